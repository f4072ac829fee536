"""Help of a command: its settings with defaults, allowed values and docstrings."""

import dataclasses
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from docstring_parser import parse_from_object

from mpp.config.allowed import describe_allowed
from mpp.config.command_line import as_words
from mpp.config.fields import default_of
from mpp.config.terms import names_elsewhere
from mpp.errors import UserError

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
CONFIG_HELP = "YAML file of settings, or the name of a config in the package; several compose, later ones win."
IMPORT_HELP = "your Python file or module that registers objectives, patterns, networks or evaluations."
LINE_WIDTH = 110
MOST_SHOWN_IN_FULL = 12
"""Help of a command with so many settings at most shows all of them."""
ALL = "all"
FIRST_HEADING = "Often changed"
UNGROUPED = "general"
"""Heading of a command's settings that are in no group."""


@dataclass(frozen=True)
class DocumentedSetting:
    """A setting with all that help and the page of settings say of it."""

    key: str
    """With its group: optim.lr."""
    default: Any
    field: dataclasses.Field
    text: str
    """Its docstring in one line."""


def show_help(text: str) -> NoReturn:
    """Print a text and end the process."""
    print(text)
    sys.exit()


def help_of(config_class: type, prog: str | None, part: str = "") -> str:
    """Help of a command: the settings that users change first and the groups of all others, or a part of it.

    Args:
        part: "all", or a group's name, of which all settings are shown. "": as described.
    Raises:
        UserError: there is no such part.
    """
    settings = list(documented_settings(config_class))
    groups = by_group(settings)
    if part in groups:
        return "\n".join([title_of(part, config_class), *lines_of(groups[part])])
    if part not in ("", ALL):
        raise UserError(f"--help is {part}; it must be {ALL}, or a group of settings: {', '.join(groups)}")
    settings_by_key = {each.key: each for each in settings}
    first = [settings_by_key[key] for key in CHANGED_FIRST if key in settings_by_key][:FIRST_SETTINGS]
    command = prog or Path(sys.argv[0]).name
    lines = [
        f"usage: {command} [--config FILE_OR_NAME ...] [--import FILE] [--SETTING VALUE ...]",
        "",
        " ".join((config_class.__doc__ or "").split()),
        "",
        f"--config: {CONFIG_HELP}",
        f"--import: {IMPORT_HELP}",
    ]
    shows_all = part == ALL or len(settings) <= MOST_SHOWN_IN_FULL
    lines += ["", f"{FIRST_HEADING}:", *lines_of(first, in_full=shows_all)]
    if shows_all:
        for name, members in groups.items():
            others = [each for each in members if each not in first]
            if others:
                lines += ["", title_of(name, config_class), *lines_of(others)]
        return "\n".join(lines)
    lines += ["", f"All {len(settings)} settings: --help {ALL}. One group: --help {next(iter(groups))}."]
    for name, members in groups.items():
        lines.append(f"  {name:11} {len(members):3}  {first_sentence(about_group(name, config_class))}")
    return "\n".join(lines)


def by_group(settings: Iterable[DocumentedSetting]) -> dict[str, list[DocumentedSetting]]:
    """The settings by the name of their group, such as "optim"."""
    groups: dict[str, list[DocumentedSetting]] = {}
    for each in settings:
        groups.setdefault(each.key.rpartition(".")[0] or UNGROUPED, []).append(each)
    return groups


def title_of(group: str, config_class: type) -> str:
    """A group's heading: "--optim.*: The optimiser: ..."."""
    name = group if group == UNGROUPED else f"--{group}.*"
    return f"{name}: {about_group(group, config_class)}"


def about_group(group: str, config_class: type) -> str:
    """The subject of a group of settings, in a line."""
    if group == UNGROUPED:
        return "Settings of this command only."
    return type(defaults_of(config_class)[group]).__doc__.splitlines()[0]


def defaults_of(config_class: type) -> dict[str, Any]:
    """Name of each field of a config -> its default."""
    return {each.name: default_of(each) for each in dataclasses.fields(config_class)}


def lines_of(settings: Iterable[DocumentedSetting], in_full: bool = True) -> list[str]:
    """Help of settings: name, default and allowed values, then the docstring or its first sentence."""
    lines = []
    for each in settings:
        text = each.text if in_full else first_sentence(each.text)
        lines.append(f"  --{each.key} {as_words(each.default)}{describe_values(each)}")
        lines += [f"      {line}" for line in textwrap.wrap(text, LINE_WIDTH)]
    return lines


def first_sentence(text: str) -> str:
    """The first sentence of a text."""
    return f"{text.partition('. ')[0].rstrip('.')}."


def documented_settings(
    config_class: type, defaults: dict[str, Any] | None = None, prefix: str = "", unused: Container[str] = ()
) -> Iterator[DocumentedSetting]:
    """The settings of a config.

    Args:
        defaults: of its fields; None: its own.
        prefix: of the settings' names, such as "optim.".
        unused: names of settings that have no effect in this command, and are left out.
    """
    docstrings = field_docstrings(config_class)
    if defaults is None:
        defaults = defaults_of(config_class)
    for each in dataclasses.fields(config_class):
        if each.name in unused:
            continue
        default = defaults[each.name]
        key = f"{prefix}{each.name}"
        if dataclasses.is_dataclass(default):
            yield from documented_settings(type(default), vars(default), f"{key}.", each.metadata.get("unused", ()))
            continue
        yield DocumentedSetting(key, default, each, " ".join(docstrings[each.name].split()))


def field_docstrings(config_class: type) -> dict[str, str]:
    """The docstrings below a dataclass's fields, inherited ones too."""
    docstrings = {}
    for base in reversed(config_class.__mro__[:-1]):
        for parameter in parse_from_object(base).params:
            docstrings[parameter.arg_name] = parameter.description or ""
    return docstrings


def describe_values(setting: DocumentedSetting) -> str:
    """Allowed values and names elsewhere of a setting in parentheses; empty for one that is any text."""
    remarks = [] if setting.field.type is str else [describe_allowed(setting.field)]
    remarks += [f"elsewhere: {name}" for name in names_elsewhere(setting.key)[:1]]
    return f"  ({'; '.join(remarks)})" if remarks else ""
