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

IMAGES_PER_COUNT = 256  # which bounds the memory


def count_confusion(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """The number of pixels of each class (rows) that each class (columns) is predicted for: (C, C) int64.

    Args:
        truth, predicted: (n, H, W).
    """
    total = torch.zeros(classes * classes, dtype=torch.int64)
    blocks = zip(truth.split(IMAGES_PER_COUNT), predicted.split(IMAGES_PER_COUNT), strict=True)
    for true_block, predicted_block in blocks:
        counted = true_block != IGNORED_CLASS
        pairs = true_block[counted].long() * classes + predicted_block[counted].long()
        total += torch.bincount(pairs, minlength=classes * classes)
    return total.view(classes, classes)


def count_by_image(truth: Tensor, predicted: Tensor, classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Targets (n, C) and predictions (n, C, 2) of the kind of label `Pixels`.

    Args:
        truth, predicted: (n, H, W).
    """
    true_counts, predicted_counts = [], []
    for mask, prediction in zip(truth, predicted, strict=True):
        counted = mask != IGNORED_CLASS
        true, found = mask[counted].long(), prediction[counted].long()
        true_counts.append(torch.bincount(true, minlength=classes))
        of_class = [torch.bincount(each, minlength=classes) for each in (found, true[true == found])]
        predicted_counts.append(torch.stack(of_class, -1))
    return torch.stack(true_counts).numpy(), torch.stack(predicted_counts).numpy()


def score_confusion(confusion: Tensor, numbers: NDArray[np.int16]) -> dict[str, Any]:
    """Mean IoU, pixel accuracy, and the IoU of each class: null where it is neither in a mask nor predicted.

    Args:
        confusion: see `count_confusion`.
        numbers: (C,) numbers of the classes in the files of the masks, ascending.
    """
    correct = confusion.diagonal()
    union = (confusion.sum(0) + confusion.sum(1) - correct).double()
    ious: list[float | None] = []
    for intersection, pixels in zip(correct.double(), union, strict=True):
        ious.append(float(intersection / pixels) if pixels else None)
    present = [iou for iou in ious if iou is not None]
    by_number = dict(zip(numbers.tolist(), ious, strict=True))
    return {
        "accuracy": float(np.mean(present)),  # the mean IoU, by the name that all evaluations give their score
        "pixel_accuracy": float(correct.double().sum() / confusion.sum().double()),
        "iou": [by_number.get(number) for number in range(int(numbers[-1]) + 1)],
    }


def score_most_frequent(features: PatchFeatures) -> dict[str, Any]:
    """Scores of always predicting the most frequent class of the training masks."""
    features, numbers = with_numbered_classes(features)
    most_frequent = int(count_pixels(features.train_masks)[1:].argmax())
    test_masks = torch.from_numpy(features.test_masks)
    predicted = torch.full_like(test_masks, most_frequent)
    return score_confusion(count_confusion(test_masks, predicted, len(numbers)), numbers)
