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


def figures(weights: Tensor, outcomes: "Outcomes") -> Figures:
    """The mean over the classes of their IoU, and the share of pixels that are right."""
    matrix = weighted_confusion(weights, outcomes)
    by_class = torch.stack(list(ious(matrix).values()))
    return {"mean_iou": by_class.mean(), "pixel_accuracy": matrix.trace() / matrix.sum()}


def weighted_confusion(weights: Tensor, outcomes: "Outcomes") -> Tensor:
    """The confusion matrix (C, C) of images that count so often."""
    return torch.tensordot(weights, torch.as_tensor(outcomes.predictions).double(), 1)


def ious(matrix: Tensor) -> Figures:
    """IoU by class, without those in no mask that are never predicted, from a confusion matrix (C, C)."""
    right = matrix.diagonal()
    union = matrix.sum(0) + matrix.sum(1) - right
    return {number: right[number] / union[number] for number in torch.nonzero(union).flatten().tolist()}


def class_table(outcomes: "Outcomes") -> ClassTable:
    """IoU of each class, with an interval where several images have it: as wide as these are few."""
    scores = score_images(lambda weights: ious(weighted_confusion(weights, outcomes)), len(outcomes))
    true, predicted = confusion(outcomes).sum(1), confusion(outcomes).sum(0)
    having = (outcomes.targets > 0).sum(0).tolist()  # images of each class
    shares, intervals = np.full(len(true), np.nan), np.full((len(true), 2), np.nan)
    for number, of_class in scores.items():
        shares[number] = of_class.mean()
        if having[number] > 1:
            intervals[number] = interval(of_class, is_share=True, most=having[number])
    return ClassTable(outcomes.names(len(true)), {"pixels": true, "predicted": predicted}, {"IoU": shares}, intervals)


def confusion(outcomes: "Outcomes") -> NDArray[np.int64]:
    """Pixels of each class (rows) that each class (columns) is predicted for: (C, C)."""
    return outcomes.predictions.sum(0)


def baselines(targets: NDArray) -> dict[str, float]:
    """The mean IoU of predicting the most frequent class for all pixels."""
    pixels = targets.sum(0)
    return {"most frequent class": float(pixels.max() / pixels.sum() / (pixels > 0).sum())}
