"""How a setting is marked and checked."""

from dataclasses import field
from typing import Any

from mpp.errors import UserError


def plumbing(default: Any) -> Any:
    """A field whose value may change when a run is resumed: it does not enter the science."""
    return field(default=default, metadata={"plumbing": True})


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise the one-line error of a setting that is out of range."""
    if not condition:
        raise UserError(f"{key} is {value}; it must be {allowed}")


def as_lists(config: Any, *names: str) -> None:
    """Let settings that are lists be given as one value: `--shots 5` for `--shots [5]`."""
    for name in names:
        value = getattr(config, name)
        object.__setattr__(config, name, tuple(value) if isinstance(value, tuple | list) else (value,))
