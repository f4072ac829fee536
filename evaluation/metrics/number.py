"""Figures of labels that are numbers: explained variance (R2) and mean absolute error. M test images."""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evaluation.metrics.intervals import Interval, clipped
from evaluation.metrics.kinds import LabelKind
from evaluation.metrics.outcomes import Outcomes
from mpp.runtime.messages import note

FEW_IMAGES = 100  # with fewer, the interval of R2 is wide
LARGEST_OFFSET = 1e4  # mean of the numbers, in their deviations; float32 has 7 digits


class Number(LabelKind):
    """A number. Targets (M,) float64, NaN where the label is missing; predictions (M,) in the same unit."""

    name = "number"
    score = "r2"
    headings: ClassVar[dict[str, str]] = {"r2": "explained variance (R2)", "mae": "mean absolute error"}
    shares = frozenset()

    def has_target(self, targets: NDArray) -> NDArray[np.bool_]:
        return np.isfinite(targets)

    def measure(self, outcomes: Outcomes) -> dict[str, float]:
        targets = outcomes.targets
        errors = outcomes.predictions.astype(np.float64) - targets
        r2 = math.nan
        if targets.min() < targets.max():  # the squares of equal numbers may be 1e-33, by rounding
            r2 = 1 - float(np.square(errors).sum()) / float(np.square(targets - targets.mean()).sum())
        return {"r2": r2, "mae": float(np.abs(errors).mean())}

    def intervals(self, outcomes: Outcomes) -> dict[str, Interval]:
        found = super().intervals(outcomes)
        return {"r2": clipped(found["r2"], -math.inf), "mae": clipped(found["mae"], 0.0, math.inf)}

    def error(self, outcomes: Outcomes) -> float:
        return self.measure(outcomes)["mae"]

    def text_of_number(self, name: str, value: float) -> str:
        return f"{value:.3f}" if name == "r2" else super().text_of_number(name, value)

    def baselines(self, outcomes: Outcomes) -> dict[str, float]:
        return {"mean of the test images": 0.0}  # by the definition of R2

    def describe_baseline(self, name: str, value: float | None) -> str:
        return f"always predicting the {name}: R2 {self.text(self.score, value)}"

    def baseline_errors(self, outcomes: Outcomes) -> dict[str, float]:
        targets = outcomes.targets
        return {"mean absolute error of always predicting their mean": float(np.abs(targets - targets.mean()).mean())}

    def problem(self, targets: NDArray, split: str) -> str | None:
        if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.floating):
            return f"{split}_labels must be floating-point numbers, one an image"
        known = targets[self.has_target(targets)]
        if split == "train" and len(known) and known.min() == known.max():
            return f"all training images have the number {known[0]:g}"
        return None

    def note_tested(self, train_targets: NDArray, test_targets: NDArray, names: Sequence[str]) -> None:
        low, high = test_targets.min(), test_targets.max()
        if low == high:
            note(f"all test images have the number {low:g}: R2 is not defined")
        mean, deviation = float(np.nanmean(train_targets)), float(np.nanstd(train_targets))
        if abs(mean) > LARGEST_OFFSET * deviation:
            note(f"numbers near {mean:g} that differ by {deviation:g}: layers have 32 bits; subtract a constant first")
        if len(test_targets) < FEW_IMAGES:
            note(f"{len(test_targets)} held-out images: see the interval of R2 over test images")
