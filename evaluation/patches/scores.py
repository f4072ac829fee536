"""Scores of predicted masks: mean IoU and pixel accuracy, of all pixels together.

n images, H x W pixels, C classes.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.patches.features import PatchFeatures
from evaluation.patches.masks import IGNORED_CLASS
from evaluation.patches.statistics import count_pixels, with_numbered_classes


def count_confusion(truth: Tensor, predicted: Tensor, classes: int) -> NDArray[np.int32]:
    """Pixels of each class (second axis) that each class (third axis) is predicted for, by image: (n, C, C).

    Args:
        truth, predicted: (n, H, W).
    """
    by_image = []
    for mask, prediction in zip(truth, predicted, strict=True):
        counted = mask != IGNORED_CLASS
        pairs = mask[counted].long() * classes + prediction[counted].long()
        by_image.append(torch.bincount(pairs, minlength=classes * classes).view(classes, classes).int())
    return torch.stack(by_image).numpy()


def score_confusion(confusion: NDArray[np.int64], numbers: NDArray[np.int16]) -> dict[str, Any]:
    """Mean IoU, pixel accuracy, and the IoU of each class: null where it is neither in a mask nor predicted.

    Args:
        confusion: (C, C) pixels of each class (rows) that each class (columns) is predicted for.
        numbers: (C,) numbers of the classes in the files of the masks, ascending.
    """
    correct = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - correct
    ious: list[float | None] = []
    for intersection, pixels in zip(correct.tolist(), union.tolist(), strict=True):
        ious.append(intersection / pixels if pixels else None)
    present = [iou for iou in ious if iou is not None]
    by_number = dict(zip(numbers.tolist(), ious, strict=True))
    return {
        "accuracy": float(np.mean(present)),  # the mean IoU, by the name that all evaluations give their score
        "pixel_accuracy": float(correct.sum() / confusion.sum()),
        "iou": [by_number.get(number) for number in range(int(numbers[-1]) + 1)],
    }


def score_most_frequent(features: PatchFeatures) -> dict[str, Any]:
    """Scores of always predicting the most frequent class of the training masks."""
    features, numbers = with_numbered_classes(features)
    most_frequent = int(count_pixels(features.train_masks)[1:].argmax())
    test_masks = torch.from_numpy(features.test_masks)
    predicted = torch.full_like(test_masks, most_frequent)
    return score_confusion(count_confusion(test_masks, predicted, len(numbers)).sum(0), numbers)
