"""Fields of settings: a default, its bounds, the settings it needs, and whether a resumed run may change it.

    rate: float = setting(0.5, above=0, below=1)
    workers: int = setting(2, at_least=0, operational=True)
    bits: int = setting(3, at_least=1, at_most=8, needs={"name": ("mean_color", "grid_color")})

`checks.check_bounds` holds a config to its bounds, and `checks.refuse_idle` to its needs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

SEED_END = 2**63
"""Seeds are below this number, so that they fit into numpy's and torch's signed integers."""


@dataclass(frozen=True)
class Bounds:
    """Allowed values of a number, or of each number in a tuple. None: no bound, but infinity is still refused."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    listed: bool = False
    """Whether the setting is a list of any length from 1, which may be given as one value."""
    repeats: bool = False
    """Whether such a list may have a value more than once."""

    def contain(self, number: float) -> bool:
        """Whether a number is within the bounds. NaN never is."""
        if self.at_least is not None and not number >= self.at_least:
            return False
        if self.above is not None and not number > self.above:
            return False
        if self.at_most is not None:
            return number <= self.at_most
        if self.below is not None:
            return number < self.below
        return abs(number) < math.inf

    def describe(self) -> str:
        """The bounds in words: "above 0 and at most 1"; empty where there are none."""
        if self.at_least is not None and self.at_most is not None:
            return f"from {describe_bound(self.at_least)} to {describe_bound(self.at_most)}"
        sides = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        given = [(words, bound) for words, bound in sides.items() if bound is not None and bound != math.inf]
        return " and ".join(f"{words} {describe_bound(bound)}" for words, bound in given)


def describe_bound(bound: float) -> str:
    """A bound in an error message: large ones as the powers that they are."""
    return "2**63" if bound == SEED_END else f"{bound:g}"


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    listed: bool = False,
    repeats: bool = False,
    needs: Mapping[str, Any] | None = None,
    operational: bool = False,
) -> Any:
    """A field of settings.

    Args:
        at_least, above, at_most, below: bounds of the number, or of each number of a tuple.
        listed: whether it is a list of any length from 1, which may be given as one value.
        repeats: whether such a list may have a value more than once.
        needs: other fields without which this one has no effect: a name -> the value or the tuple of values that it
            must have (a field that is a list must hold one of them); True: it is set; False: it is not. A name with a
            dot is of another group, such as "run.precision".
        operational: whether it changes how a run is carried out and not what it computes, so that it may differ when
            the run is resumed.
    """
    metadata: dict[str, Any] = {}
    bounds = Bounds(at_least, above, at_most, below, listed, repeats)
    if bounds != Bounds():
        metadata["bounds"] = bounds
    if needs:
        metadata["needs"] = dict(needs)
    if operational:
        metadata["operational"] = True
    return field(default=default, metadata=metadata)


def group(default: Callable[[], Any], **unused: str) -> Any:
    """A field that is a group of settings, some of which have no effect here: a setting's name -> why."""
    return field(default_factory=default, metadata={"unused": unused})


def default_of(each: Field) -> Any:
    """Default value of a field."""
    return each.default if each.default_factory is MISSING else each.default_factory()
