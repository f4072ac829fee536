"""Figures by class, as numbers: a terminal and a page show them as text, and a file has a column for each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ClassTable:
    """Figures of C classes."""

    names: Sequence[str]
    counts: dict[str, NDArray[np.int64]]
    """Heading -> number of images or pixels of each class, (C,)."""
    shares: dict[str, NDArray[np.float64]]
    """Heading -> share of each class, (C,); NaN: the class has none. The first is the `score`."""
    intervals: NDArray[np.float64] | None = None
    """Of the score, (C, 2)."""

    @property
    def score(self) -> str:
        """Heading of the share that says how well classes are recognised."""
        return next(iter(self.shares))

    def select(self, classes: NDArray[np.int64]) -> "ClassTable":
        """The table of these classes, by their places."""
        return ClassTable(
            [self.names[place] for place in classes],
            {heading: counts[classes] for heading, counts in self.counts.items()},
            {heading: shares[classes] for heading, shares in self.shares.items()},
            None if self.intervals is None else self.intervals[classes],
        )

    def worst(self, number: int) -> "ClassTable":
        """All classes, or of more than so many those that are recognised worst; one without a share is better."""
        if len(self.names) <= number:
            return self
        return self.select(np.argsort(self.shares[self.score], kind="stable")[:number])

    def columns(self) -> dict[str, list[str]]:
        """Heading -> cells, which programs read as numbers: an interval has two columns behind its share."""
        columns = {"class": list(self.names)}
        for heading, counts in self.counts.items():
            columns[heading] = [str(count) for count in counts]
        for heading, shares in self.shares.items():
            columns[f"{heading} (%)"] = [in_percent(share) or "-" for share in shares]
            if self.intervals is not None and heading == self.score:
                columns[f"{heading} (%), from"] = [in_percent(low) for low in self.intervals[:, 0]]
                columns[f"{heading} (%), to"] = [in_percent(high) for high in self.intervals[:, 1]]
        return columns

    def text(self) -> tuple[list[str], list[list[str]]]:
        """Headings, and a row for each class, with its interval in brackets."""
        columns = self.columns()
        if self.intervals is not None:
            score = f"{self.score} (%)"
            cells = zip(columns[score], columns.pop(f"{score}, from"), columns.pop(f"{score}, to"), strict=True)
            columns[score] = [f"{share} ({low} to {high})" if low else share for share, low, high in cells]
        return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def in_percent(share: float) -> str:
    """A share in percent; "": it is not known."""
    return "" if math.isnan(share) else f"{100 * share:.1f}"
