"""Help of a command: its settings with defaults, allowed values and docstrings."""

import dataclasses
import sys
import textwrap
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NoReturn

from docstring_parser import parse_from_object

from mpp.config.allowed import describe_allowed
from mpp.config.command_line import as_words
from mpp.config.fields import default_of

CHANGED_FIRST = (
    "encoder",
    "run.dir",
    "data.path",
    "run.steps",
    "optim.lr",
    "lrs",
    "optim.global_batch_size",
    "data.batch_size",
    "model.width",
    "model.depth",
    "model.img_size",
    "model.patch_size",
    "objective.name",
    "network.name",
    "dir",
    "shots",
    "neighbours",
    "solver",
    "pictures",
    "depth",
    "representation",
    "data.train_images",
    "out",
)
"""Settings that users change first; help begins with the first of these that a command has."""
FIRST_SETTINGS = 10
CONFIG_HELP = "YAML file of settings, or the name of one that the package brings; several compose, later ones win."
IMPORT_HELP = "Python file or module of yours, which registers objectives, patterns, networks or evaluations."
LINE_WIDTH = 110


def show_help(text: str) -> NoReturn:
    """Print a text and end the process."""
    print(text)
    sys.exit()


def help_of(config_class: type, prog: str | None) -> str:
    """Help of a command: the ten settings that users change first, then all others by group."""
    defaults = {each.name: default_of(each) for each in dataclasses.fields(config_class)}
    lines_by_key = dict(documented_settings(config_class, defaults))
    command = prog or Path(sys.argv[0]).name
    lines = [
        f"usage: {command} [--config FILE_OR_NAME ...] [--import FILE] [--SETTING VALUE ...]",
        "",
        " ".join((config_class.__doc__ or "").split()),
        "",
        f"--config: {CONFIG_HELP}",
        f"--import: {IMPORT_HELP}",
    ]
    for name, keys in groups_of(list(lines_by_key)).items():
        heading = f"{name}:"
        if name in defaults:
            heading = f"--{name}.*: {type(defaults[name]).__doc__.splitlines()[0]}"
        lines += ["", heading]
        for key in keys:
            lines += lines_by_key[key]
    return "\n".join(lines)


def groups_of(keys: list[str]) -> dict[str, list[str]]:
    """Dotted keys by the heading below which help lists them."""
    first = [key for key in CHANGED_FIRST if key in keys][:FIRST_SETTINGS]
    groups = {"What people change first": first}
    for key in keys:
        if key not in first:
            group = key.rpartition(".")[0] or "general"
            groups.setdefault(group, []).append(key)
    return groups


def documented_settings(
    config_class: type, defaults: dict[str, Any], prefix: str = "", unused: Container[str] = ()
) -> Iterator[tuple[str, list[str]]]:
    """The settings of a config as (dotted key, lines of help): default, allowed values, docstring.

    Args:
        prefix: of the settings' names, such as "optim.".
        unused: names of settings that have no effect in this command, and are left out.
    """
    docstrings = field_docstrings(config_class)
    for each in dataclasses.fields(config_class):
        if each.name in unused:
            continue
        default = defaults[each.name]
        key = f"{prefix}{each.name}"
        if dataclasses.is_dataclass(default):
            yield from documented_settings(type(default), vars(default), f"{key}.", each.metadata.get("unused", ()))
            continue
        text = " ".join(docstrings[each.name].split())
        about = [f"      {line}" for line in textwrap.wrap(text, LINE_WIDTH)]
        yield key, [f"  --{key} {as_words(default)}{describe_values(each)}", *about]


def field_docstrings(config_class: type) -> dict[str, str]:
    """The docstrings below a dataclass's fields, inherited ones too."""
    docstrings = {}
    for base in reversed(config_class.__mro__[:-1]):
        for parameter in parse_from_object(base).params:
            docstrings[parameter.arg_name] = parameter.description or ""
    return docstrings


def describe_values(each: dataclasses.Field) -> str:
    """Allowed values of a setting in parentheses; empty for one that is any text."""
    return "" if each.type is str else f"  ({describe_allowed(each)})"
