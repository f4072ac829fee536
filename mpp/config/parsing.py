"""Command line and YAML files to a config.

`parse(Config)` reads YAML files (`--config`, several compose, later ones win) and dotted overrides
(`--optim.lr 1e-3`). Every mistake in them is an error of one line.
"""

import difflib
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from mpp.config.allowed import describe_allowed
from mpp.config.checks import check_places, refuse_idle
from mpp.config.command_line import FILE_OPTION, as_words, files_first, join_files, join_numbers
from mpp.config.help import CONFIG_HELP, help_of, show_help
from mpp.config.imports import take_imports
from mpp.config.keys import iterate_settings, known_keys
from mpp.config.terms import NAMES_ELSEWHERE, REMARKS
from mpp.config.wrong_values import explain_null, explain_value
from mpp.config.yaml_files import read_yaml
from mpp.errors import UserError

SPELLED_ALIKE = 0.85
"""Likeness of two names of which one is the other, misspelled."""
WORDS_FOR_OTHER_FILES = ("base", "config", "defaults", "extends", "include", "inherit", "parent")
"""Keys by which files of other tools name files that they build on."""
OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")
"""Octal, or with a base of 60."""

ConfigT = TypeVar("ConfigT")


def parse(config_class: type[ConfigT], arguments: Sequence[str] | None = None, prog: str | None = None) -> ConfigT:
    """Read a config from the command line.

    Args:
        config_class: a frozen dataclass with defaults; fields that are dataclasses are groups.
        arguments: words of the command line; None: `sys.argv[1:]`.
        prog: the command that `--help` shows.
    Raises:
        UserError: one line that names the wrong key or value and what is allowed, or a setting that has no effect.
    """
    words = sys.argv[1:] if arguments is None else arguments
    config = parse_unchecked(config_class, files_first(words), prog)
    check_places(config)
    refuse_idle(config)
    return config


def parse_unchecked(config_class: type[ConfigT], arguments: Sequence[str], prog: str | None = None) -> ConfigT:
    """Read a config as `parse` does, with files where they stand, and without a look at settings that have no effect.

    Settings of a saved config may have no effect: not all of them were given.
    """
    words = join_numbers(join_files(take_imports(arguments)))
    for option in ("-h", "--help"):
        if option in words:
            following = words[words.index(option) + 1 :]
            is_part = bool(following) and not following[0].startswith("-")
            show_help(help_of(config_class, prog, following[0] if is_part else ""))
    parser = parser_of(config_class, prog)
    check_files(config_class, words)
    try:
        values = parser.parse_args(words)
    except ArgumentError as error:
        message = explain_value(config_class, parser, words) or explain(config_class, str(error))
        raise UserError(message) from None
    values.pop("config")
    problem = explain_null(config_class, vars(values.as_flat()), words)
    if problem is not None:
        raise UserError(problem)
    config = config_class(**vars(parser.instantiate(values)))
    for key, field, value in iterate_settings(config):
        if value == "" and field.default != "":  # as of a shell's variable that is not set
            raise UserError(f"{key} is empty; leave it out, or give it a value")
    return config


@lru_cache
def parser_of(config_class: type, prog: str | None) -> ArgumentParser:
    """The parser of a config; it takes longer to make than to use."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, prog=prog, description=config_class.__doc__)
    parser.add_argument("--config", action="config", help=CONFIG_HELP)
    parser.add_class_arguments(config_class)
    return parser


# --- files ---


def check_files(config_class: type, words: Sequence[str]) -> None:
    """Raise UserError at a key that is unknown, or that stands twice, in a file of the command line.

    The parser accepts `modle: {}`, and of two `optim:` the first would not count. It stumbles over an empty `run:`.
    """
    for word in words:
        if word.startswith(FILE_OPTION):
            file = Path(word.removeprefix(FILE_OPTION))
            if file.is_file():
                check_file(config_class, file)


def check_file(config_class: type, file: Path) -> None:
    """Raise UserError at a key that is unknown, or that stands twice, in a file."""
    text, content = read_yaml(file)
    if not isinstance(content, dict):
        raise UserError(f"--config is {file}, without settings; it must have lines such as `optim: {{lr: 1e-3}}`")
    check_keys(config_class, file, content)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in repeated_keys(node):
        raise UserError(f"{file}: {key} occurs twice")
    for key in content:
        group = str(key).partition(".")[0]
        if group != key and group in content:  # the parser would drop one that stands before its group
            raise UserError(f"{file}: {key} occurs next to {group}; write it below {group}")
    for number in other_numbers(node):
        meant = yaml.safe_load(number.value)
        problem = f"{number.value} is {meant} in YAML"
        raise UserError(f"{file}, line {number.start_mark.line + 1}: {problem}; write {meant}, or text in quotes")


def check_keys(config_class: type, file: Path, content: dict[Any, Any]) -> None:
    """Raise UserError at an unknown key of a file, or at a group without settings."""
    known = known_keys(config_class)
    groups = {key.rpartition(".")[0] for key in known}
    allowed = {*known, *groups}
    for group, values in content.items():
        keys = [str(group)]
        if isinstance(values, dict) and group in groups:
            keys += [f"{group}.{name}" for name in values]
        for key in keys:
            if key in allowed:
                continue
            if key.strip("_") in WORDS_FOR_OTHER_FILES:
                advice = f"files compose on the command line: --config OTHER --config {file}"
                raise UserError(f"unknown setting {key} (in {file}): {advice}")
            raise UserError(f"{describe_unknown(config_class, key)} (in {file})")
        if group in groups and not isinstance(values, dict):
            problem = f"{group} is {as_words(values)}; it must have settings below it, or be left out"
            raise UserError(f"{file}: {problem}")


def repeated_keys(node: yaml.Node | None) -> Iterator[str]:
    """Keys that stand twice in a mapping, or in a mapping below it."""
    if not isinstance(node, yaml.MappingNode):
        return
    names = [key.value for key, _ in node.value]
    for name in names:
        if names.count(name) > 1 and name != "<<":
            yield str(name)
    for _, value in node.value:
        yield from repeated_keys(value)


def other_numbers(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Numbers that YAML 1.1 does not read as they look: 010 is 8, and 1:30 is 90."""
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and OTHER_NUMBER.fullmatch(node.value):
            yield node
        return
    for part in node.value:
        for each in part if isinstance(node, yaml.MappingNode) else (part,):
            yield from other_numbers(each)


# --- errors ---


def explain(config_class: type, message: str) -> str:
    """The parser's message in one line, with the keys that exist or the values that are allowed."""
    line = " ".join(message.split())
    if "unrecognized arguments" in line:
        return explain_word(config_class, line.split("arguments:", 1)[1].split()[0])
    if "does not accept option" in line:
        group, option = line.split("'")[1::2][:2]
        return describe_unknown(config_class, f"{group}.{option}")
    if "expected one argument" in line:
        return explain_missing(config_class, line.removeprefix("argument --").split(":")[0])
    return line


def explain_missing(config_class: type, key: str) -> str:
    """The message for an option without a value."""
    fields = {name: field for name, field, _ in iterate_settings(config_class)}
    allowed = describe_allowed(fields[key]) if key in fields else "a YAML file, or the name of a config"
    return f"--{key} has no value; it must be {allowed}"


def explain_word(config_class: type, word: str) -> str:
    """The message for a word of the command line that is no setting."""
    key = word.removeprefix("--").split("=")[0]
    if not word.startswith("--") and key in known_keys(config_class):
        return f"unknown word {word}: did you mean --{word}?"
    if not word.startswith("-"):
        return f"unknown word {word}: settings are --NAME VALUE, and a list is '[a, b]'"
    return describe_unknown(config_class, key)


def describe_unknown(config_class: type, key: str) -> str:
    """The message for a setting that does not exist: the nearest one, and those that are allowed."""
    known = known_keys(config_class)
    groups = sorted({each.split(".")[0] for each in known})
    in_group = [each for each in known if each.startswith(key.split(".")[0] + ".")]
    nearest = nearest_key(key, known, groups)
    name = key.rpartition(".")[2]
    meaning = f" ({REMARKS[name]})" if name in REMARKS and nearest == NAMES_ELSEWHERE[name] else ""
    hint = f"did you mean {nearest}{meaning}? " if nearest else ""
    return f"unknown setting {key}: {hint}allowed: {', '.join(in_group or groups)}"


def nearest_key(key: str, known: Sequence[str], groups: Sequence[str]) -> str | None:
    """The setting that was probably meant: by its name in other libraries, or by its spelling."""
    name = key.rsplit(".", 1)[-1]
    by_name = NAMES_ELSEWHERE.get(name)
    if by_name in known:
        return by_name
    misspelled = difflib.get_close_matches(key, known, n=1, cutoff=SPELLED_ALIKE)
    if misspelled:
        return misspelled[0]
    elsewhere = difflib.get_close_matches(name, NAMES_ELSEWHERE, n=1, cutoff=SPELLED_ALIKE)
    if elsewhere and NAMES_ELSEWHERE[elsewhere[0]] in known:
        return NAMES_ELSEWHERE[elsewhere[0]]
    for candidates in (known, groups):
        matches = difflib.get_close_matches(key, candidates, n=1)
        if matches:
            return matches[0]
    return None
