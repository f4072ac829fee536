"""Configs as YAML files: written, read back, compared."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from mpp.config.checks import describe_value
from mpp.config.imports import require_imports
from mpp.config.keys import as_yaml_value, flatten, iterate_settings
from mpp.config.parsing import ConfigT, parse_unchecked
from mpp.errors import UserError


def to_yaml(config: Any) -> str:
    """The config as the YAML text that `parse` reads back."""
    return yaml.safe_dump(as_yaml_value(dataclasses.asdict(config)), sort_keys=False)


def read_saved(path: Path) -> dict[str, Any]:
    """Content of a saved config; empty where the file is missing or damaged."""
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return saved if isinstance(saved, dict) else {}


def parse_saved(config_class: type[ConfigT], path: Path) -> ConfigT:
    """The config that was saved at `path`.

    Raises:
        UserError: it is none of this kind, or of a run with code of its own that is not imported.
    """
    require_imports(path.parent)
    return parse_unchecked(config_class, ["--config", str(path)])


Changes = dict[str, tuple[Any, Any]]
"""Key of a setting -> its value before, its value now."""


def changes_since(config: Any, path: Path, spelled: Callable[[Any], Any] = lambda config: config) -> Changes:
    """Settings that are not operational in which `config` differs from the one saved at `path`.

    Args:
        spelled: brings a config into the spelling in which the two are compared.
    Raises:
        UserError: the saved file is not a config of this kind.
    """
    try:
        saved = flatten(spelled(parse_saved(type(config), path)))
    except ValueError as error:
        raise UserError(f"{path} is not a config of this command ({error})") from None
    changes = {}
    for key, field, value in iterate_settings(spelled(config)):
        if not field.metadata.get("operational") and value != saved[key]:
            changes[key] = (saved[key], value)
    return changes


def describe_changes(changes: Changes, saved_in: str) -> str:
    """Changed settings with both values: "optim.lr (0.01 in the run, 0.02 now)".

    Args:
        saved_in: name of the thing made with the earlier values, such as "the run".
    """
    described = [
        f"{key} ({describe_value(before)} in {saved_in}, {describe_value(now)} now)"
        for key, (before, now) in changes.items()
    ]
    return ", ".join(described)
