"""Figures of labels that are masks: mean IoU and pixel accuracy, of all pixels together, from counts an image.

Targets (M, C): pixels of each class. Predictions (M, C, C): pixels of each class (second axis) that each class (third
axis) is predicted for. M test images, C classes.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.figures import Figures, score_images
from evaluation.metrics.intervals import interval

if TYPE_CHECKING:
    from evaluation.metrics.scoring import Outcomes


def has_target(targets: NDArray) -> NDArray[np.bool_]:
    """Whether each image has a pixel that counts: (M,)."""
    return targets.sum(1) > 0


def figures(weights: Tensor, outcomes: "Outcomes") -> Figures:
    """The mean over the classes of their IoU, and the share of pixels that are right."""
    by_class = ious(weights, outcomes)
    right = torch.as_tensor(np.diagonal(outcomes.predictions, axis1=1, axis2=2).copy()).double()
    true = torch.as_tensor(outcomes.targets).double()
    return {
        "mean_iou": torch.stack(list(by_class.values())).mean(),
        "pixel_accuracy": (weights @ right).sum() / (weights @ true).sum(),
    }


def ious(weights: Tensor, outcomes: "Outcomes") -> Figures:
    """IoU by class, without those in no mask that are never predicted."""
    predictions = torch.as_tensor(outcomes.predictions).double()
    right = weights @ predictions.diagonal(dim1=1, dim2=2)
    union = weights @ torch.as_tensor(outcomes.targets).double() + weights @ predictions.sum(1) - right
    return {number: right[number] / union[number] for number in torch.nonzero(union).flatten().tolist()}


def class_table(outcomes: "Outcomes") -> ClassTable:
    """IoU of each class, with an interval where several images have it: as wide as these are few."""
    scores = score_images(lambda weights: ious(weights, outcomes), len(outcomes))
    classes = outcomes.targets.shape[1]
    shares, intervals = np.full(classes, np.nan), np.full((classes, 2), np.nan)
    having = (outcomes.targets > 0).sum(0).tolist()  # images of each class
    for number, of_class in scores.items():
        shares[number] = of_class.mean()
        if having[number] > 1:
            intervals[number] = interval(of_class, is_share=True, most=having[number])
    counts = {"pixels": outcomes.targets.sum(0), "predicted": confusion(outcomes).sum(0)}
    return ClassTable(outcomes.names(classes), counts, {"IoU": shares}, intervals)


def confusion(outcomes: "Outcomes") -> NDArray[np.int64]:
    """Pixels of each class (rows) that each class (columns) is predicted for: (C, C)."""
    return outcomes.predictions.sum(0)
