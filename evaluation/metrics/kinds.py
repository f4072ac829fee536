"""Kinds of labels: how targets and predictions of images become figures, intervals, differences and tables.

A kind is a class with the members of `LabelKind`, and a line in `KINDS`. Evaluations, reports and comparisons know no
kind: they hand over `Outcomes`, and show the figures they get.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.intervals import Difference, Interval, bootstrap, clipped, containing, paired, resamples
from evaluation.metrics.outcomes import Outcomes


class Estimate(NamedTuple):
    """A figure of test images with its interval."""

    value: float
    interval: Interval
    """95 % over test images."""


def three_digits(value: float) -> str:
    """A number with three significant digits, and all digits before the point: 0.00123, 12.3, 12346."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def divide(numerator: NDArray, denominator: NDArray) -> NDArray[np.float64]:
    """The quotient; NaN where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.full(np.shape(denominator), np.nan), where=denominator > 0)


class LabelKind(ABC):
    """A kind of label. M test images, C classes."""

    name: ClassVar[str]
    """As in reports."""
    score: ClassVar[str]
    """The figure that reports and comparisons call `accuracy`: choices are made by it, more is better."""
    headings: ClassVar[dict[str, str]]
    """Figure -> its heading in tables."""
    shares: ClassVar[frozenset[str]]
    """The figures that are shares, which tables show in percent."""

    @property
    def score_heading(self) -> str:
        """The heading of the score in tables."""
        return self.headings[self.score]

    @property
    def sign(self) -> str:
        """Behind a score in a sentence: "%", or nothing."""
        return "%" if self.score in self.shares else ""

    @property
    def score_title(self) -> str:
        """The score with its unit, for headings of columns and axes: "accuracy (%)"."""
        return f"{self.score_heading} (%)" if self.sign else self.score_heading

    @property
    def factor(self) -> int:
        """Plots and tables have scores times this."""
        return 100 if self.sign else 1

    @abstractmethod
    def has_target(self, targets: NDArray) -> NDArray[np.bool_]:
        """Whether each image has a label: (M,). The others are left out and counted."""

    @abstractmethod
    def measure(self, outcomes: Outcomes) -> dict[str, float]:
        """All figures, by name. NaN: these images do not have it."""

    def error(self, outcomes: Outcomes) -> float:
        """A figure by which predictions are compared where the score is not defined, less is better; NaN: none."""
        return math.nan

    @abstractmethod
    def baselines(self, outcomes: Outcomes) -> dict[str, float]:
        """The score of predictions that look at no image, by name: such as the largest class."""

    def describe_baseline(self, name: str, value: float | None) -> str:
        """A baseline and its score in words: `largest class 25.0%`."""
        return f"{name} {self.text(self.score, value)}{self.sign}"

    def baseline_errors(self, outcomes: Outcomes) -> dict[str, float]:
        """Errors of the baselines, by their headings in tables, where the score says nothing of their size."""
        return {}

    def problem(self, targets: NDArray, split: str) -> str | None:
        """The problem with the labels of a split, `train` or `test`, in words; None: there is none."""
        return None

    def note_tested(self, train_targets: NDArray, test_targets: NDArray, names: Sequence[str]) -> None:
        """Print limits of the figures of test images, such as classes that have none.

        Args:
            names: of the classes, by number.
        """
        return

    def intervals(self, outcomes: Outcomes) -> dict[str, Interval]:
        """95 % interval of each figure over test images: a bootstrap, unless the kind knows better."""
        values = self.measure(outcomes)
        drawn = [self.measure(outcomes.select(indices)) for indices in resamples(len(outcomes))]
        found = {}
        for name, value in values.items():
            interval = bootstrap(value, np.array([each[name] for each in drawn]), len(outcomes))
            found[name] = clipped(interval) if name in self.shares else interval
        return found

    def difference(self, one: Sequence[Outcomes], other: Sequence[Outcomes]) -> Difference:
        """The score of one encoder minus that of another, of the same images in the same order.

        Args:
            one, other: of each its outcomes, of several seeds: their mean score counts.
        """

        def mean_score(of_seeds: Sequence[Outcomes], indices: NDArray[np.int64]) -> float:
            return float(np.mean([self.measure(each.select(indices))[self.score] for each in of_seeds]))

        difference = paired(lambda indices: mean_score(one, indices) - mean_score(other, indices), len(one[0]))
        if self.score not in self.shares:
            return difference
        return difference._replace(interval=clipped(difference.interval, -1.0))

    def class_table(self, outcomes: Outcomes) -> ClassTable | None:
        """The figures of each class; None: the kind has no classes."""
        return None

    def confusion(self, outcomes: Outcomes) -> NDArray[np.int64] | None:
        """Images (or pixels) of each class, rows, that each class, columns, is predicted for: (C, C).

        None: the kind has none.
        """
        return None

    def text(self, name: str, value: float | None, low: float | None = None, high: float | None = None) -> str:
        """A figure with its interval, as tables have it; "-": these images do not have it.

        Shares are in percent with one decimal. Others have three significant digits, unless the kind says otherwise.
        """
        if value is None or math.isnan(value):
            return "-"
        return self.text_of_number(name, value) + self.text_of_interval(name, low, high)

    def text_of_interval(self, name: str, low: float | None, high: float | None) -> str:
        """The interval of a figure in brackets, behind its value; "" where it is not known."""
        if low is None or high is None or math.isnan(low + high):
            return ""
        return f" ({self.text_of_number(name, low)} to {self.text_of_number(name, high)})"

    def text_of_number(self, name: str, value: float) -> str:
        """A value, or an end of the interval, of a figure."""
        return f"{100 * value:.1f}" if name in self.shares else three_digits(value)

    def text_of_scores(self, summary: Mapping[str, Any]) -> str:
        """A mean score, with its spread where there are several measurements, and its interval where it has one.

        Args:
            summary: see `summarize_accuracies`.
        Returns:
            "-": it is not known (NaN; null of a file).
        """
        mean = summary["mean"]
        if mean is None or math.isnan(mean):
            return "-"
        text = self.text_of_number(self.score, mean)
        if summary.get("count", 2) > 1:
            text += f" ± {self.text_of_number(self.score, summary['std'])}"
        return text + self.text_of_interval(self.score, *summary.get("interval", (None, None)))

    def figures(self, outcomes: Outcomes) -> dict[str, Estimate]:
        """All figures with their intervals, which contain them."""
        intervals = self.intervals(outcomes)
        figures = {}
        for name, value in self.measure(outcomes).items():
            figures[name] = Estimate(value, containing(value, intervals[name]))
        return figures
