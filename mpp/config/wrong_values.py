"""Errors for values of the wrong type: the setting, where it was given, and the allowed values."""

import argparse
import re
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from mpp.config.allowed import describe_allowed, members, suggest, takes_lists
from mpp.config.command_line import FILE_OPTION, as_words
from mpp.config.keys import iterate_settings

KEY_OF_MESSAGE = re.compile(r'Parser key "([^"]+)"')


def explain_value(config_class: type, parser: ArgumentParser, words: Sequence[str]) -> str | None:
    """The error of the first word whose value its setting does not allow; None: there is no such word.

    "optim.name is adamw; it must be one of muon, adam, sgd (did you mean adam?)", with the file where it is of one.

    Args:
        words: of a command line, with files as `--config=FILE`.
    """
    fields = {key: field for key, field, _ in iterate_settings(config_class)}
    groups = {key.rpartition(".")[0] for key in fields}
    for option in options_of(words):
        key = wrong_key(parser, option)
        if key in fields:
            return describe_wrong(key, fields[key], *given_value(key, option))
        if key in groups:
            value, _ = given_value(key, option)
            return f"{key} is {value}; it is a group of settings: give --{key}.NAME VALUE"
    return None


def explain_null(config_class: type, values: Mapping[str, Any], words: Sequence[str]) -> str | None:
    """The error of the first setting that is null and must not be; None: there is none. The parser checks no null.

    Args:
        values: of all settings, by their keys.
        words: of a command line, with files as `--config=FILE`.
    """
    for key, field, _ in iterate_settings(config_class):
        if values.get(key, "") is None and NoneType not in members(field.type):
            return f"{key} is null; it must be {describe_allowed(field)}{place_of_null(key, words)}"
    return None


def place_of_null(key: str, words: Sequence[str]) -> str:
    """The file in which a setting is null, for the end of a message; empty where it is in none."""
    for word in words:
        if word.startswith(FILE_OPTION):
            file = Path(word.removeprefix(FILE_OPTION))
            with suppress(KeyError, TypeError):
                if value_in(yaml.safe_load(file.read_text(encoding="utf-8")), key) is None:
                    return f" (in {file})"
    return ""


def describe_wrong(key: str, field: Field, value: Any, file: Path | None) -> str:
    """The error of a setting with a value that is not allowed, which may be that of a file."""
    given = " ".join(as_words(value).split())
    where = f" (in {file})" if file else ""
    return f"{key} is {given}; it must be {describe_allowed(field)}{hint(field, value)}{where}"


def options_of(words: Sequence[str]) -> Iterator[list[str]]:
    """The options of a command line one by one: `--key=value` as one word, `--key value` as two."""
    remaining = list(words)
    while remaining:
        option = [remaining.pop(0)]
        if "=" not in option[0] and remaining and not remaining[0].startswith("--"):
            option.append(remaining.pop(0))
        yield option


def wrong_key(parser: ArgumentParser, option: Sequence[str]) -> str | None:
    """The setting that the parser complains of when it reads this option by itself; None: of none."""
    try:
        parser.parse_args(option)
    except (ArgumentError, argparse.ArgumentTypeError) as error:
        keys = KEY_OF_MESSAGE.findall(str(error))
        return keys[-1] if keys else None
    return None


def given_value(key: str, option: Sequence[str]) -> tuple[Any, Path | None]:
    """The value that an option gives to a setting, and the file that has it; None: it is on the command line."""
    name, _, value = option[0].removeprefix("--").partition("=")
    value = option[1] if len(option) > 1 else value
    if name == key:
        return value, None
    if option[0].startswith(FILE_OPTION):
        file = Path(value)
        return value_in(yaml.safe_load(file.read_text(encoding="utf-8")), key), file
    return value_in({name: yaml.safe_load(value)}, key), None  # a group such as --optim '{lr: x}'


def value_in(content: Any, key: str) -> Any:
    """The value of a dotted key in nested settings, whose keys may have dots, too."""
    if key in content:
        return content[key]
    group, _, name = key.partition(".")
    return value_in(content[group], name)


def hint(field: Field, value: Any) -> str:
    """A hint in parentheses: the value probably meant, or how to write a list; empty where neither helps."""
    if str in members(field.type) and not isinstance(value, list | dict):  # YAML took it for something else
        return " (in quotes, any word is text)"
    if not isinstance(value, str):
        return ""
    meant = suggest(field, value)
    if meant is not None:
        return f" (did you mean {meant}?)"
    return " (a list is written '[a, b]')" if takes_lists(field) and not value.startswith("[") else ""
