"""Help of a command, and the page of all settings: names with defaults, allowed values and docstrings."""

import sys
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from typing import Any, NoReturn

from docstring_parser import parse_from_object

from mpp.config.fields import Setting, allowed, as_tuple, require, settings_of, show

CHANGED_FIRST = (
    "encoder",
    "run.dir",
    "data.path",
    "run.steps",
    "optim.lr",
    "lrs",
    "optim.global_batch_size",
    "model.width",
    "model.depth",
    "model.img_size",
    "model.patch_size",
    "objective.name",
    "shots",
    "depth",
    "out",
)
"""Settings that users change first; help begins with the first ten of these that a command has."""


def show_help(config: Any, part: str = "-") -> NoReturn:
    """Print the settings of a command, and end the process.

    Args:
        part: all, or a group such as optim; another option: the settings that are often changed.
    """
    settings = {each.key: each for each in settings_of(config) if each.is_shown}
    groups = groups_of(settings)
    shown = [key for key in settings if part in ("all", key.partition(".")[0])]
    if part.startswith("-"):
        shown = ([key for key in CHANGED_FIRST if key in settings] or [*settings])[:10]
    require(shown, "--help", part, f"all, {', '.join(groups)}")
    print(f"{show(config.__doc__)}\n\noptions: --config FILE_OR_NAME ..., --import FILE ..., --SETTING VALUE ...\n")
    for each in map(settings.get, shown):
        print(f"  {heading(each)}")
        print(textwrap.fill(text_of(each), 110, initial_indent="      ", subsequent_indent="      "))
    print(f"\nMore: --help with all, {', '.join(groups)}")
    sys.exit()


def groups_of(keys: Iterable[str]) -> list[str]:
    """Groups of settings, and settings that are in none."""
    return list(dict.fromkeys(key.partition(".")[0] for key in keys))


def heading(each: Setting) -> str:
    """A setting with its default, the values that it may have, and what it needs."""
    needs = describe_needs(each)
    number = each.about["otherwise"]
    value = show(each.value) if number is None or each.value is not None else f"null: {number}"
    return f"--{each.key} {value}  ({allowed(each)}{needs and f'; has an effect if {needs}'})"


def text_of(each: Setting) -> str:
    """The docstring of a setting, in one line."""
    return texts_of(each.owner).get(each.key.rpartition(".")[2], "")


@cache
def texts_of(owner: type) -> dict[str, str]:
    """Name of each field of a class -> its docstring."""
    bases = reversed(owner.__mro__[:-1])
    return {each.arg_name: show(each.description) for base in bases for each in parse_from_object(base).params}


def describe_needs(each: Setting) -> str:
    """The settings that this one needs, in words: "objective.name is pixels or hog"."""
    words = {True: ["set"], False: ["not set"]}
    needs = {key: words.get(wanted) or map(show, as_tuple(wanted)) for key, wanted in each.about["needs"].items()}
    return " and ".join(f"{key} is {' or '.join(wanted)}" for key, wanted in needs.items())


def page(configs: Mapping[str, Any]) -> str:
    """The page of all settings: those of each command (name -> config) that no earlier one has alike."""
    lines: list[str] = []
    for command, config in configs.items():
        lines += ["", f"## mpp {command}"]
        new = [each for each in settings_of(config) if each.is_shown and row_of(each) not in lines]
        for group, members in groupby(new, key=lambda each: each.key.rpartition(".")[0]):
            rows = [*map(row_of, members)]
            lines += ["", f"### {group}"] if group else []
            lines += ["", f"<details><summary>{group or command}</summary>", "", *rows, "", "</details>"]
    return "\n".join(lines)


def row_of(each: Setting) -> str:
    """A setting on the page."""
    return f"- `{heading(each)}` {text_of(each)}"
