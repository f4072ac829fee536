"""Figures of labels that are masks: mean IoU and pixel accuracy, of all pixels together, from counts an image.

M test images, C classes.
"""

import numpy as np
from numpy.typing import NDArray

from evaluation.metrics.intervals import Interval, bootstrap, resamples
from evaluation.metrics.kinds import LabelKind
from evaluation.metrics.outcomes import Outcomes


class Pixels(LabelKind):
    """A class for each pixel.

    Targets (M, C): pixels of each class. Predictions (M, C, 2): pixels that it is predicted for, and those of both.
    """

    name = "pixels"
    score = "mean_iou"
    headings = {"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy"}  # noqa: RUF012
    shares = frozenset(headings)

    def has_target(self, targets: NDArray) -> NDArray[np.bool_]:
        return targets.sum(1) > 0

    def measure(self, outcomes: Outcomes) -> dict[str, float]:
        return {name: float(value) for name, value in figures_of(outcomes, np.ones(len(outcomes))).items()}

    def intervals(self, outcomes: Outcomes) -> dict[str, Interval]:
        count = len(outcomes)
        times_drawn = np.stack([np.bincount(drawn, minlength=count) for drawn in resamples(count)])
        drawn = figures_of(outcomes, times_drawn)
        return {name: bootstrap(value, drawn[name], count) for name, value in self.measure(outcomes).items()}

    def baselines(self, outcomes: Outcomes, train_targets: NDArray | None) -> dict[str, float]:
        return {}  # a segmentation's report has those that need the images


def figures_of(outcomes: Outcomes, weights: NDArray) -> dict[str, NDArray[np.float64]]:
    """The figures (...) of images that count so often: weights (..., M)."""
    true = weights @ outcomes.targets
    predicted, right = (weights @ outcomes.predictions[..., part] for part in (0, 1))
    union = true + predicted - right
    present = union > 0
    ious = np.divide(right, union, out=np.zeros(union.shape), where=present)
    return {"mean_iou": ious.sum(-1) / present.sum(-1), "pixel_accuracy": right.sum(-1) / true.sum(-1)}
