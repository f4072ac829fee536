"""How a setting is marked and checked."""

import math
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any

from mpp.errors import UserError


def operational(default: Any, **others: Any) -> Any:
    """A field whose value may change when a run is resumed: it does not enter the science. `others`: see `needs`."""
    return field(default=default, metadata={"operational": True, "needs": others})


def needs(default: Any, **others: Any) -> Any:
    """A field that has an effect only with certain values of others beside it.

    Args:
        others: a field's name -> the value or the tuple of values that it has then (a field that is a list has one of
            them in it); True: it is set; False: it is not.
    """
    return field(default=default, metadata={"needs": others})


def group(default: Callable[[], Any], **unused: str) -> Any:
    """A field that is a group of settings, some of which have no effect here: a setting's name -> why."""
    return field(default_factory=default, metadata={"unused": unused})


def refuse_idle(config: Any, usual: Any = None, prefix: str = "") -> None:
    """Raise UserError at a setting that somebody gave and that has no effect, with what it needs.

    Args:
        usual: the same config where nobody gave anything; None: the defaults. What is as usual is not given.
        prefix: of the settings' names.
    """
    for each in fields(config):
        key, value = f"{prefix}{each.name}", getattr(config, each.name)
        default = default_of(each) if usual is None else getattr(usual, each.name)
        if is_dataclass(value):
            for name, why in each.metadata.get("unused", {}).items():
                given, other = getattr(value, name), getattr(default, name)
                require(given == other, f"{key}.{name}", said(given), f"{said(other)} or left out: {why}")
            refuse_idle(value, default, f"{key}.")
        elif value != default:
            for other, wanted in each.metadata.get("needs", {}).items():
                needed = f"{prefix}{other} {in_words(wanted)}"
                allowed = f"{said(default)} or left out: it has no effect unless {needed}"
                require(is_met(getattr(config, other), wanted), key, said(value), allowed)


def default_of(each: Field) -> Any:
    """A field's value where nobody gives one."""
    return each.default if each.default_factory is MISSING else each.default_factory()


def is_met(value: Any, wanted: Any) -> bool:
    """Whether a field's value is what another field needs."""
    if isinstance(wanted, bool):
        return bool(value) == wanted
    allowed = wanted if isinstance(wanted, tuple) else (wanted,)
    return any(part in allowed for part in (value if isinstance(value, tuple) else (value,)))


def in_words(wanted: Any) -> str:
    """What a field needs of another: "is pixels or hog"."""
    if isinstance(wanted, bool):
        return "is set" if wanted else "is not set"
    return f"is {' or '.join(map(said, wanted if isinstance(wanted, tuple) else (wanted,)))}"


def said(value: Any) -> str:
    """A value as a user says it."""
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise the one-line error of a setting that is out of range."""
    if not condition:
        raise UserError(f"{key} is {value}; it must be {allowed}")


def at_least(config: Any, least: int, *names: str, prefix: str = "") -> None:
    """Raise the error where one of these settings is smaller; null is not."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= least, f"{prefix}{name}", value, f"at least {least}")


def as_numbers(config: Any, *names: str, least: float = -math.inf, above: float = -math.inf) -> None:
    """The same of numbers; UserError where a list is empty, or has a number out of bounds. null stays."""
    for name in (each for each in names if getattr(config, each) is not None):
        as_lists(config, name)
        values = getattr(config, name)
        allowed = f"a list of numbers above {above:g}" if above > least else f"a list of numbers from {least:g}"
        require(len(values) > 0 and min(values) >= least and min(values) > above, name, list(values), allowed)


def as_lists(config: Any, *names: str) -> None:
    """Let settings that are lists be given as one value: `--shots 5` for `--shots [5]`."""
    for name in names:
        value = getattr(config, name)
        object.__setattr__(config, name, tuple(value) if isinstance(value, tuple | list) else (value,))
