"""Settings as fields of frozen dataclasses: their types, bounds, and the settings that they need.

    rate: float = setting(0.5, above=0, below=1)
    workers: int = setting(2, at_least=0, operational=True)
    bits: int = setting(3, at_least=1, at_most=8, needs={"objective.name": ("mean_color", "grid_color")})

A field whose default is a dataclass is a group: its settings have dotted names (`optim.lr`). The docstring below a
field is its text in help and on the page of all settings.
"""

import json
import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass, replace
from functools import cache
from itertools import product
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mpp.errors import UserError, did_you_mean

SEED_END = 2**63
"""Seeds are below this number, so that they fit into numpy's and torch's signed integers."""
BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
TYPES_IN_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def setting(
    default: Any,
    *,
    needs: Mapping[str, Any] | None = None,
    operational: bool = False,
    distinct: bool = False,
    otherwise: Any = None,
    **bounds: float,
) -> Any:
    """A field of settings.

    Args:
        needs: other settings without which this one has no effect: a key -> the value or the tuple of values that it
            must have (a list must hold one of them); True: it is set; False: it is not.
        operational: whether it changes how a run is carried out and not what it computes, so that it may differ when
            the run is resumed.
        distinct: whether it is a list of at least one value, each once.
        otherwise: the value that null stands for.
        bounds: at_least, above, at_most, below: of the number, or of each number of a list.
    """
    metadata = {"needs": needs or {}, "operational": operational, "distinct": distinct, "bounds": bounds}
    metadata["otherwise"] = otherwise
    return field(default=default, metadata=metadata)


USUAL = setting(None).metadata
"""Metadata of a field that is declared without `setting`."""


def group(default: Any, **unused: str) -> Any:
    """A field that is a group of settings, some of which have no effect here: name of a setting -> why."""
    return field(default=default, metadata={"unused": unused})


class Setting(NamedTuple):
    """A setting of a config."""

    key: str
    """With its group: optim.lr."""
    value: Any
    kind: Any
    """Its type."""
    about: Mapping[str, Any]
    """The arguments of `setting`."""
    owner: type
    """The class that declares it."""
    unused: str | None
    """Why it has no effect; None: it may have one."""

    @property
    def is_shown(self) -> bool:
        """Whether it has an effect and a choice: files of earlier versions have settings of one value."""
        return not self.unused and not (get_origin(self.kind) is Literal and len(get_args(self.kind)) == 1)


class Settings:
    """Settings whose types and bounds are checked when they are made, by Python too."""

    is_flat: ClassVar[bool] = False
    """Whether a group of them is named without the group, as those that many commands share."""

    def __post_init__(self):
        for each in settings_of(self):
            if each.owner is type(self):
                object.__setattr__(self, each.key, take(each, each.value))
        self.check()

    def check(self) -> None:
        """Raise UserError where settings do not go together."""

    @classmethod
    def of(cls, **values: Any) -> Any:
        """The config with these settings by their names, and a group by its own: `of(shots=5, data=DataConfig(...))`.

        Raises:
            UserError: there is no such setting, or it may not have the value.
        """
        config = cls()
        names = flatten(config) | vars(config)
        for name in values:
            if name not in names:
                raise UserError(f"unknown setting {name}{did_you_mean(name, names)}")
        return rebuild(config, values)


# --- all settings of a config ---


def settings_of(config: Any, prefix: str = "", unused: Mapping[str, str] | None = None) -> Iterator[Setting]:
    """All settings of a config, group by group."""
    types = types_of(type(config))
    for each in fields(config):
        value, about = getattr(config, each.name), USUAL | each.metadata
        if is_dataclass(value):
            yield from settings_of(value, prefix_of(each, value, prefix), about.get("unused"))
        else:
            yield Setting(
                prefix + each.name, value, types[each.name], about, type(config), (unused or {}).get(each.name)
            )


@cache
def types_of(config_class: type) -> dict[str, Any]:
    """Name of each field -> its type, also where annotations are text."""
    return get_type_hints(config_class)


def prefix_of(each: Field, value: Settings, prefix: str) -> str:
    """The beginning of the keys of a group's settings, in a config whose keys begin with `prefix`."""
    return prefix if value.is_flat else f"{prefix}{each.name}."


def flatten(config: Any) -> dict[str, Any]:
    """Dotted key -> value."""
    return {each.key: each.value for each in settings_of(config)}


def changed_settings(config: Any) -> dict[str, Any]:
    """Dotted key -> value of the settings that are not the defaults."""
    defaults = flatten(type(config)())
    return {key: value for key, value in flatten(config).items() if value != defaults[key]}


def nested(config: Any) -> dict[str, Any]:
    """The settings as a file has them: those of a group below its name."""
    content: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        inner = nested(value) if is_dataclass(value) else value
        content |= inner if is_dataclass(value) and value.is_flat else {each.name: inner}
    return content


def rebuild(config: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """The config with other values, by their dotted keys."""
    parts = {}
    for each in fields(config):
        value = getattr(config, each.name)
        part = rebuild(value, values, prefix_of(each, value, prefix)) if is_dataclass(value) else value
        parts[each.name] = values.get(prefix + each.name, part)
    return replace(config, **parts)


# --- values ---


def take(each: Setting, *values: Any) -> Any:
    """The first of these values that a setting may have, as it has it.

    Raises:
        UserError: it may have none of them.
    """
    for value in values:
        for reading in readings(each.kind, os.fspath(value) if isinstance(value, os.PathLike) else value):
            if (value != "" or each.value == "") and fits(as_tuple(reading), **each.about):
                return reading
    words = allowed(each)
    hint = " (quotes make text of a number)" if "text" in words and not isinstance(values[0], str) else ""
    raise UserError(f"{each.key} is {show(values[-1])}; it must be {words}{hint}")


def readings(kind: Any, value: Any) -> Iterator[Any]:
    """The meanings that a value may have as one of a type: lists become tuples, and whole numbers floats.

    The first one counts: one value of `tuple[int, ...] | int` becomes a tuple, and one of `int | tuple` does not.
    A text is no list of texts: it may be a list that is misspelled.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for part in parts:
            yield from readings(part, value)
    elif origin is tuple and (isinstance(value, list | tuple) or parts[0] is not str):
        values = value if isinstance(value, list | tuple) else [value]
        kinds = parts[:1] * len(values) if ... in parts else parts
        if len(kinds) == len(values):
            yield from product(*map(readings, kinds, values))
    elif kind is float and (type(value) is int or isinstance(value, float)):
        yield float(value)
    elif origin is dict and isinstance(value, dict):
        yield with_lists(value)
    elif type(value) in (kind, origin) or (origin is Literal and value in parts):
        yield value


def with_lists(value: Any) -> Any:
    """The value of a dictionary with lists instead of tuples, as files have it."""
    if isinstance(value, dict):
        return {name: with_lists(each) for name, each in value.items()}
    return [*map(with_lists, value)] if isinstance(value, list | tuple) else value


def fits(values: tuple[Any, ...], bounds: Mapping[str, float], distinct: bool, **_: Any) -> bool:
    """Whether all numbers are within the bounds, and whether the values are distinct where they have to be."""
    numbers = [value for value in values if isinstance(value, int | float)]
    is_distinct = not distinct or values == (None,) or 0 < len(set(values)) == len(values)
    return is_distinct and all(BOUNDS[name](number, bound) for name, bound in bounds.items() for number in numbers)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One value as a tuple of it."""
    return value if isinstance(value, tuple) else (value,)


def require(condition: object, key: str, value: Any, allowed: str) -> None:
    """Raise the error of one line for a setting whose value is not allowed."""
    if not condition:
        raise UserError(f"{key} is {show(value)}; it must be {allowed}")


# --- words ---


def allowed(each: Setting) -> str:
    """The values of a setting in words: "a number or null, above 0"."""
    bounds = [f"{name.replace('_', ' ')} {bound}" for name, bound in each.about["bounds"].items()]
    return ", ".join([describe_type(each.kind), *bounds, *["each once"] * each.about["distinct"]])


def describe_type(kind: Any) -> str:
    """The values of a type in words: "[a number, ...] or a number or auto or null"."""
    if get_origin(kind) is dict:
        return "{name: value}"
    parts = ["..." if part is ... else describe_type(part) for part in get_args(kind)]
    if get_origin(kind) is tuple:
        return f"[{', '.join(parts)}]"
    return TYPES_IN_WORDS.get(kind) or " or ".join(parts) or as_words(kind)


def as_words(value: Any) -> str:
    """A value as the command line takes it."""
    return os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(value, default=str)


def show(value: Any) -> str:
    """A value in one line of a message."""
    return " ".join(as_words(value).split()) or "empty"
