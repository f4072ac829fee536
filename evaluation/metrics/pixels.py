"""Figures of labels that are masks: mean IoU and pixel accuracy, of all pixels together, from counts an image.

Predictions (M, C, C) are a confusion matrix for each image: pixels of each class (second axis) that each class (third
axis) is predicted for. Targets (M, C) are its pixels of each class. M test images, C classes.
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


def figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """The mean over the classes of their IoU, and the share of pixels that are right."""
    matrix = torch.tensordot(weights, predictions.double(), 1)
    by_class = torch.stack(list(ious(matrix).values()))
    return {"mean_iou": by_class.mean(), "pixel_accuracy": matrix.trace() / matrix.sum()}


def ious(matrix: Tensor) -> Figures:
    """IoU by number of a class, from a confusion matrix (C, C); none of a class that no pixel has and none gets."""
    right = matrix.diagonal()
    union = matrix.sum(0) + matrix.sum(1) - right
    return {str(number): right[number] / union[number] for number in torch.nonzero(union).flatten().tolist()}


def class_table(outcomes: "Outcomes") -> ClassTable:
    """IoU of each class, with an interval where several images have it: as wide as these are few."""
    predictions = torch.as_tensor(outcomes.predictions).double()
    estimates = score_images(lambda weights: ious(torch.tensordot(weights, predictions, 1)), len(outcomes))
    classes = outcomes.targets.shape[1]
    shares, intervals = np.full(classes, np.nan), np.full((classes, 2), np.nan)
    having = (outcomes.targets > 0).sum(0).tolist()  # images of each class
    for name, (iou, scores) in estimates.items():
        shares[int(name)] = iou
        if having[int(name)] > 1:
            intervals[int(name)] = interval(scores, is_share=True, count=having[int(name)])
    counts = {"pixels": outcomes.targets.sum(0), "predicted": confusion(outcomes).sum(0)}
    return ClassTable(outcomes.names(classes), counts, {"IoU": shares}, intervals)


def confusion(outcomes: "Outcomes") -> NDArray[np.int64]:
    """Pixels of each class (rows) that each class (columns) is predicted for: (C, C)."""
    return outcomes.predictions.sum(0)


def baselines(targets: NDArray) -> dict[str, float]:
    """The mean IoU of predicting the most frequent class for all pixels."""
    pixels = targets.sum(0)
    return {"most frequent class": float(pixels.max() / pixels.sum() / (pixels > 0).sum())}
