"""Figures of predictions as functions of weights of the images: each image has a score, and a figure an interval.

The derivative of a figure says what an image adds (the infinitesimal jackknife):

    score_i = figure + M * d figure / d weight_i        at weights of 1

For accuracy that is whether image i is right. Of any figure, the mean of the scores is the figure, and their variance
divided by M is the square of its standard error: intervals and differences of encoders need nothing else.

The figures are scikit-learn's (accuracy_score, balanced_accuracy_score, f1_score, average_precision_score, r2_score,
mean_absolute_error, jaccard_score), with derivatives. Weights are float64. 95 % intervals say how far a figure would
move with other test images of the same kind. They know nothing of another seed of the training, and take images for
independent. M images, C classes.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit  # quantiles of Student's distribution
from torch import Tensor

Z = 1.959963984540054  # of 95 %: the normal distribution's quantile at 0.975
TINY = 1e-9  # of an error that is 0 but for rounding

Interval = tuple[float, float]
"""Lower and upper end."""
Figures = dict[Any, Tensor]
"""Name -> a number; NaN: these images do not have it."""


# --- scores of images, and intervals by them ---


@torch.enable_grad()
def score_images(
    figures: Callable[[Tensor, Tensor, Tensor], Figures], targets: NDArray, predictions: NDArray
) -> dict[Any, tuple[float, NDArray]]:
    """Each figure of weights (M,), targets and predictions (M, ...), and by it the score of every image, (M,)."""
    count = len(predictions)
    weights = torch.ones(count, dtype=torch.float64, requires_grad=True)
    scores = {}
    for name, value in figures(weights, torch.tensor(targets), torch.tensor(predictions)).items():
        (slopes,) = torch.autograd.grad(value, weights, retain_graph=True)
        scores[name] = value.item(), (value.detach() + count * slopes).numpy()
    return scores


def wilson(right: Any, count: Any) -> Interval:
    """Wilson's score interval of a share (Wilson, 1927), or of many; NaN of no image in a pandas Series.

    Args:
        right: number of images that are right; of a mean over seeds, their mean number.
        count: number of images; perhaps an effective number, with a fraction.
    """
    share = right / count
    denominator = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / denominator
    half = Z * np.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / denominator
    return np.maximum(0.0, centre - half), np.minimum(1.0, centre + half)


def interval(scores: NDArray[np.float64], is_share: bool, count: float) -> Interval:
    """Of a share Wilson's, for as many images as have the variance of its scores; of any other figure Student's.

    For accuracy these are all images. Where they are more, the variance is known by few images: see `widening`.

    Args:
        scores: (M,), whose mean is the figure; NaN: it is not known, nor is its interval.
        count: number of images that the variance is known by.
    """
    value = float(scores.mean())
    if not math.isfinite(value):
        return math.nan, math.nan
    error = float(scores.std()) / math.sqrt(len(scores))
    if not is_share:
        half = Z * widening(count) * error
        return value - half, value + half
    value = min(max(value, 0.0), 1.0)  # rounding
    images = value * (1 - value) / error**2 if error > TINY else count
    if images > count:
        images = max(count, images / widening(count) ** 2)
    images = max(1.0, images)
    return wilson(value * images, images)


def widening(count: float) -> float:
    """The factor of an interval by the standard deviation of so many images: Student's."""
    freedom = max(1.0, count - 1)
    return float(stdtrit(freedom, 0.975)) / Z * math.sqrt(count / freedom)


# --- figures ---


def ratio(weights: Tensor, parts: Tensor, wholes: Tensor | float = 1.0) -> Tensor:
    """The sum over images of parts (M,) by that of wholes (M,); without wholes the mean of parts."""
    return (weights * parts).sum() / (weights * wholes).sum()


def class_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """Accuracy, the mean over classes of the share that is right, and macro F1; targets and predictions (M,)."""
    classes = 1 + int(max(targets.max(), predictions.max()))
    is_right = predictions == targets
    right = sum_by_class(weights * is_right, targets, classes)
    true = sum_by_class(weights, targets, classes)
    either = true + sum_by_class(weights, predictions, classes)
    recall = right[true > 0] / true[true > 0]
    f1 = 2 * right[either > 0] / either[either > 0]
    return {"accuracy": ratio(weights, is_right), "class_mean": recall.mean(), "macro_f1": f1.mean()}


def sum_by_class(weights: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The weight of the images of each class, (C,)."""
    return weights.new_zeros(classes).index_add(0, labels, weights)


def several_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """Average precision: the mean over the classes that an image has, and of all pairs of image and class.

    Args:
        targets: (M, C) of 0 and 1.
        predictions: (M, C); larger is surer.
    """
    classes = [each for each in zip(targets.T, predictions.T, strict=True) if each[0].any()]
    by_class = [average_precision(weights, *each) for each in classes] or [weights.sum() * math.nan]
    of_pairs = weights.repeat_interleave(targets.shape[1])
    micro = average_precision(of_pairs, targets.flatten(), predictions.flatten())
    return {"macro_map": torch.stack(by_class).mean(), "micro_map": micro}


def average_precision(weights: Tensor, targets: Tensor, predictions: Tensor) -> Tensor:
    """The mean precision at the positive items (K,); equal predictions are one threshold. NaN: no item is positive."""
    order = predictions.argsort(descending=True)
    weights = weights[order]
    positives = weights * targets[order]
    _, threshold, items = predictions[order].unique_consecutive(return_inverse=True, return_counts=True)
    last = items.cumsum(0)[threshold] - 1  # of the items that are predicted alike
    return ratio(positives, positives.cumsum(0)[last] / weights.cumsum(0)[last])


def number_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """Explained variance (R2), NaN where all targets are equal, and mean absolute error; (M,), in the same unit."""
    errors = predictions.double() - targets
    deviations = targets - ratio(weights, targets)
    if targets.min() == targets.max():  # the squares of equal numbers may be 1e-33, by rounding
        deviations = deviations * math.nan
    return {"r2": 1 - ratio(weights, errors.square(), deviations.square()), "mae": ratio(weights, errors.abs())}


def pixel_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """The mean over the classes of their IoU, and the share of pixels that are right.

    Args:
        targets: (M, C) pixels of each class.
        predictions: (M, C, C): of these, pixels (last axis) that each class is predicted for.
    """
    by_class = torch.stack(list(ious(weights, targets, predictions).values()))
    right = predictions.diagonal(dim1=1, dim2=2).sum(1)
    return {"mean_iou": by_class.mean(), "pixel_accuracy": ratio(weights, right, targets.sum(1))}


def ious(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """IoU by number of a class, of all pixels together; none of a class that no pixel has and none gets."""
    matrix = torch.tensordot(weights, predictions.double(), 1)
    right = matrix.diagonal()
    union = matrix.sum(0) + matrix.sum(1) - right
    return {number: right[number] / union[number] for number in union.nonzero().flatten().tolist()}


def patch_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """Accuracy of the masked patches of all images together, by their numbers (M,) and those of right ones."""
    return {"accuracy": ratio(weights, predictions, targets)}
