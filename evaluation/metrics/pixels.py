"""Figures of labels that are masks: mean IoU and pixel accuracy, of all pixels together, from counts an image.

M test images, C classes.
"""

import math
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.intervals import Interval, bootstrap, clipped, drawn_weights
from evaluation.metrics.kinds import LabelKind, divide
from evaluation.metrics.outcomes import Outcomes


class PixelClasses(LabelKind):
    """A class for each pixel.

    Targets (M, C): pixels of each class. Predictions (M, C, C): pixels of each class (second axis) that each class
    (third axis) is predicted for.

    The interval of a class's IoU is as wide as the images that have the class are few; one image gives none. With 50
    images and classes that 2 to 5 of them have, that of the mean IoU covers the truth in 83 to 94 of 100 cases.
    """

    name = "pixels"
    score = "mean_iou"
    headings: ClassVar[dict[str, str]] = {"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy"}
    shares = frozenset(headings)

    def has_target(self, targets: NDArray) -> NDArray[np.bool_]:
        return targets.sum(1) > 0

    def measure(self, outcomes: Outcomes) -> dict[str, float]:
        return {name: float(value) for name, value in figures_of(outcomes, np.ones(len(outcomes))).items()}

    def intervals(self, outcomes: Outcomes) -> dict[str, Interval]:
        count = len(outcomes)
        drawn = figures_of(outcomes, drawn_weights(count))
        return {name: clipped(bootstrap(value, drawn[name], count)) for name, value in self.measure(outcomes).items()}

    def class_table(self, outcomes: Outcomes) -> ClassTable:
        count = len(outcomes)
        ious = ious_by_class(outcomes, np.ones(count))
        resampled = ious_by_class(outcomes, drawn_weights(count))
        having = (outcomes.targets > 0).sum(0).tolist()  # images of each class
        intervals = []
        for iou, drawn, images in zip(ious, resampled.T, having, strict=True):
            intervals.append(clipped(bootstrap(iou, drawn, images)) if images > 1 else (math.nan, math.nan))
        return ClassTable(
            outcomes.names(len(ious)),
            counts={"pixels": outcomes.targets.sum(0), "predicted": self.confusion(outcomes).sum(0)},
            shares={"IoU": ious},
            intervals=np.array(intervals),
        )

    def confusion(self, outcomes: Outcomes) -> NDArray[np.int64]:
        """Pixels of each class (rows) that each class (columns) is predicted for: (C, C)."""
        return outcomes.predictions.sum(0)

    def baselines(self, outcomes: Outcomes) -> dict[str, float]:
        return {}  # a segmentation's report has those that need the images


def right_pixels(outcomes: Outcomes) -> NDArray[np.int64]:
    """Pixels of each image that are predicted as their own class: (M, C)."""
    return np.diagonal(outcomes.predictions, axis1=1, axis2=2)


def ious_by_class(outcomes: Outcomes, weights: NDArray) -> NDArray[np.float64]:
    """IoU (..., C) of images that count so often: weights (..., M). NaN: in no mask, and never predicted."""
    true = weights @ outcomes.targets
    predicted = weights @ outcomes.predictions.sum(1)
    right = weights @ right_pixels(outcomes)
    union = true + predicted - right
    return divide(right, union)


def figures_of(outcomes: Outcomes, weights: NDArray) -> dict[str, NDArray[np.float64]]:
    """The figures (...) of images that count so often: weights (..., M)."""
    ious = ious_by_class(outcomes, weights)
    present = np.isfinite(ious)
    true = (weights @ outcomes.targets).sum(-1)
    right = (weights @ right_pixels(outcomes)).sum(-1)
    return {"mean_iou": np.where(present, ious, 0).sum(-1) / present.sum(-1), "pixel_accuracy": right / true}
