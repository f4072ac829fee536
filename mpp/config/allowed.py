"""Allowed values of a setting in words, from its type and bounds, such as "a whole number of at least 1"."""

import difflib
import math
from dataclasses import Field
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

COUNTS = {2: "two", 3: "three", 4: "four"}
MOST_CHOICES_OF_A_SENTENCE = 2
"""Of a setting with more choices, and nothing else, the list begins with "one of"."""
SPELLINGS = {
    "none": "null",
    **dict.fromkeys(("yes", "on", "y", "t", "1"), "true"),
    **dict.fromkeys(("no", "off", "n", "f", "0"), "false"),
}
"""Choices in other languages -> their names in YAML."""
NOT_FINITE = {math.inf: ".inf", -math.inf: "-.inf"}
"""Numbers as YAML has them."""


def describe_allowed(each: Field) -> str:
    """Allowed values of a setting: "auto, true or false", "a number above 0, or null"."""
    kinds = members(each.type)
    choices = choices_of(each.type)
    if get_origin(each.type) is Literal and len(choices) > MOST_CHOICES_OF_A_SENTENCE:
        return f"one of {', '.join(choices)}"
    limits = describe_limits(each)
    parts: list[str] = []
    for kind in kinds:
        if kind is not NoneType:
            parts += describe_kind(kind, limits, kinds)
    if NoneType in kinds:
        parts.append("null")
    if len(parts) == 1:
        return parts[0]
    comma = "," if any(" " in part for part in parts) else ""
    return f"{', '.join(parts[:-1])}{comma} or {parts[-1]}"


def describe_limits(each: Field) -> str:
    """The bounds of a setting as they follow the word "number"; empty where there are none."""
    bounds = each.metadata.get("bounds")
    words = bounds.describe() if bounds else ""
    of = " of" if words.startswith("at ") else ""
    return f"{of} {words}" if words else ""


def describe_kind(kind: Any, limits: str, other_kinds: tuple[Any, ...] = ()) -> list[str]:
    """A type in words, or each of its choices.

    Args:
        limits: bounds of its numbers.
        other_kinds: the other types that the setting may have; a list of one of these is a list "of them".
    """
    origin = get_origin(kind)
    if origin is tuple:
        return [describe_tuple(kind, limits, other_kinds)]
    if origin is dict:
        return ["settings such as '{name: value}'"]
    words = {int: [f"a whole number{limits}"], float: [f"a number{limits}"], str: ["text"], bool: ["true", "false"]}
    return words.get(kind) or [str(choice) for choice in get_args(kind)]


def describe_tuple(kind: Any, limits: str, other_kinds: tuple[Any, ...]) -> str:
    """A type of lists in words: "two numbers above 0", "a list of them"."""
    parts = get_args(kind)
    is_any_length = parts[-1] is Ellipsis
    count = "a list of" if is_any_length else COUNTS[len(parts)]
    if parts[0] in other_kinds:
        return f"{count} them" if is_any_length else f"{count} of them"
    plurals = {int: f"whole numbers{limits}", float: f"numbers{limits}", str: "words"}
    if get_origin(parts[0]) is tuple:
        return f"{count} lists of these"
    return f"{count} {plurals.get(parts[0], 'groups of settings')}"


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; for any other type, the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def choices_of(kind: Any) -> list[str]:
    """Words that a setting of this type may be, with true, false and null."""
    choices: list[str] = []
    for each in members(kind):
        if get_origin(each) is Literal:
            choices += map(str, get_args(each))
        elif each is bool:
            choices += ["true", "false"]
        elif each is NoneType:
            choices.append("null")
    return choices


def suggest(each: Field, word: str) -> str | None:
    """The value that was probably meant by a word that a setting does not allow; None: there is none near."""
    kinds = members(each.type)
    choices = choices_of(each.type)
    names = {choice: choice for choice in choices}
    names |= {spelling: choice for spelling, choice in SPELLINGS.items() if choice in choices}
    matches = difflib.get_close_matches(word.lower(), names, n=1)
    if matches:
        return names[matches[0]]
    numbers = [part.strip() for part in word.split(",")]
    if takes_lists(each) and len(numbers) > 1 and all(map(is_number, numbers)):
        return f"'[{', '.join(numbers)}]'"
    if tuple[str, ...] in kinds and word.isidentifier():
        return f"'[{word}]'"
    if int in kinds and as_whole_number(word) is not None:
        return str(as_whole_number(word))
    if float in kinds and is_number(word.replace(",", ".")):
        return NOT_FINITE.get(float(word.replace(",", ".")), word.replace(",", "."))
    return None


def takes_lists(each: Field) -> bool:
    """Whether a value of the setting may be a list."""
    return any(get_origin(kind) is tuple for kind in members(each.type))


def as_whole_number(word: str) -> int | None:
    """The whole number that a word such as 1,000 or 1e3 means; None: it means none."""
    text = word.replace(",", "")
    if not is_number(text) or not float(text).is_integer():
        return None
    return int(float(text))


def is_number(text: str) -> bool:
    """Whether a text is a number in Python."""
    try:
        float(text)
    except ValueError:
        return False
    return True
