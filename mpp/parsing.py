"""The command line and YAML files to a config, and back.

`parse(Config)` reads YAML files (`--config`, several compose, later ones win) and dotted overrides
(`--optim.lr 1e-3`). Whatever is wrong with them is one line.
"""

import dataclasses
import difflib
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

ConfigT = TypeVar("ConfigT")


def parse(config_class: type[ConfigT], arguments: Sequence[str] | None = None, prog: str | None = None) -> ConfigT:
    """Read a config from the command line.

    Args:
        config_class: a frozen dataclass with defaults; fields that are dataclasses are groups.
        arguments: the command line's words; None: `sys.argv[1:]`.
        prog: the command that `--help` shows.
    Raises:
        ValueError: one line that names the wrong key or value and what is allowed.
    """
    parser = parser_of(config_class, prog)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        values = parser.parse_args(arguments)
    except (ArgumentError, yaml.YAMLError) as error:
        raise ValueError(explain(config_class, str(error))) from None
    values.pop("config")
    return config_class(**vars(parser.instantiate(values)))


@lru_cache
def parser_of(config_class: type, prog: str | None) -> ArgumentParser:
    """The parser of a config; it takes longer to make than to use."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(exit_on_error=False, prog=prog, description=config_class.__doc__)
    parser.add_argument("--config", action="config", help="YAML file of settings; several compose, later ones win.")
    parser.add_class_arguments(config_class)
    return parser


def explain(config_class: type, message: str) -> str:
    """The parser's message in one line; for an unknown key, with the keys that exist."""
    line = " ".join(message.split())
    known = list(flatten(config_class()))
    if "unrecognized arguments" in line:
        culprit = line.split("arguments:", 1)[1].split()[0].removeprefix("--").split("=")[0]
    elif "does not accept option" in line:
        group, option = line.split("'")[1::2][:2]
        culprit = f"{group}.{option}"
    else:
        return line
    group = [key for key in known if key.startswith(culprit.split(".")[0] + ".")]
    near = difflib.get_close_matches(culprit, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown setting {culprit}: {hint}allowed: {', '.join(group or sorted({k.split('.')[0] for k in known}))}"


def settings(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """All settings as (dotted key, field, value)."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, value


def flatten(config: Any) -> dict[str, Any]:
    """Dotted key -> value."""
    return {key: value for key, _, value in settings(config)}


def plain(value: Any) -> Any:
    """A config as what YAML has: tuples become lists."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else value


def to_yaml(config: Any) -> str:
    """The config as the YAML text that `parse` reads back."""
    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False)


def changed_keys(config: Any, path: Path) -> list[str]:
    """Keys outside the plumbing in which `config` differs from the one saved at `path`.

    Raises:
        ValueError: the saved file is not a config of this kind.
    """
    try:
        saved = flatten(parse(type(config), ["--config", str(path)]))
    except ValueError as error:
        raise ValueError(f"{path} is not a config of this command ({error})") from None
    return [key for key, field, value in settings(config) if not field.metadata.get("plumbing") and value != saved[key]]
