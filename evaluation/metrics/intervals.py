"""Figures of predictions as functions of weights of the images, so that each image has a score.

The derivative of a figure says what an image adds (the infinitesimal jackknife):

    score_i = figure + M * d figure / d weight_i        at weights of 1

For accuracy that is whether image i is right. Of any figure, the mean of the scores is the figure, and their variance
divided by M is the square of its standard error: intervals and differences of encoders need nothing else.

The figures are scikit-learn's (accuracy_score, balanced_accuracy_score, f1_score, average_precision_score, r2_score,
mean_absolute_error), with derivatives. Weights are float64. M images, C classes.
95 % intervals say how far a figure would move with other test images of the same kind. They know nothing of another
seed of the training, and take images for independent.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit  # quantiles of Student's distribution
from torch import Tensor

Z = 1.959963984540054  # of 95 %: the normal distribution's quantile at 0.975
TINY = 1e-9  # of an error that is 0 but for rounding
ADDED = 2.0  # images of which one encoder is right, each in turn, or both, or none, half an image each

Interval = tuple[float, float]
"""Lower and upper end."""


def wilson(right: float, count: float) -> Interval:
    """Wilson's score interval of a share (Wilson, 1927).

    Args:
        right: number of images that are right; of a mean over seeds, their mean number.
        count: number of images, at least one; perhaps an effective number, with a fraction.
    """
    share = right / count
    denominator = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / denominator
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def interval(scores: NDArray[np.float64], is_share: bool, count: float | None = None) -> Interval:
    """Of a share Wilson's, for as many images as have the variance of its scores; of any other figure Student's.

    For accuracy these are all images. Where they are more, the variance is known by few images: see `widening`.

    Args:
        scores: (M,), whose mean is the figure; NaN: it is not known, nor is its interval.
        count: number of images that the variance is known by. None: all.
    """
    value, count = float(scores.mean()), count or len(scores)
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


class Difference(NamedTuple):
    """A difference of two figures of the same images."""

    value: float
    interval: Interval
    images: int

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        low, high = self.interval
        return low > 0 or high < 0


def paired(one: NDArray[np.float64], other: NDArray[np.float64], is_share: bool = True) -> Difference:
    """The figure of one encoder minus that of another, of the same images.

    Of a share, images are added as Agresti and Min (2005) do, which makes the interval hold for few images, too.

    Args:
        one, other: (M,) scores of the images in the same order; of several seeds their means.
    """
    gains = one - other
    value, count = float(gains.mean()), len(gains)
    if not is_share:
        return Difference(value, interval(gains, is_share), count)
    centre = float(gains.sum()) / (count + ADDED)
    variance = (float(np.square(gains).sum()) + ADDED / 2) / (count + ADDED) - centre**2
    half = float(stdtrit(count + 1, 0.975)) * math.sqrt(variance / (count + ADDED))
    ends = max(-1.0, min(value, centre - half)), min(1.0, max(value, centre + half))
    return Difference(value, ends, count)


# --- figures ---

Figures = dict[str, Tensor]
"""Name -> a number; NaN: these images do not have it."""


@torch.enable_grad()
def score_images(figures: Callable[[Tensor], Figures], count: int) -> dict[str, tuple[float, NDArray]]:
    """Each figure of weights (M,), and by it the score of every image, (M,)."""
    weights = torch.ones(count, dtype=torch.float64, requires_grad=True)
    scores = {}
    for name, value in figures(weights).items():
        (slopes,) = torch.autograd.grad(value, weights, retain_graph=True)
        scores[name] = value.item(), (value.detach() + count * slopes).numpy()
    return scores


def class_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """Accuracy, the mean over classes of the share that is right, and macro F1; targets and predictions (M,)."""
    classes = 1 + int(max(targets.max(), predictions.max()))
    is_right = weights * (predictions == targets)
    right = sum_by_class(is_right, targets, classes)
    true = sum_by_class(weights, targets, classes)
    either = true + sum_by_class(weights, predictions, classes)
    recall = right[true > 0] / true[true > 0]
    f1 = 2 * right[either > 0] / either[either > 0]
    return {"accuracy": is_right.sum() / weights.sum(), "class_mean": recall.mean(), "macro_f1": f1.mean()}


def sum_by_class(weights: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The weight of the images of each class, (C,)."""
    return weights.new_zeros(classes).index_add(0, labels, weights)


def several_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """Average precision: the mean over the classes that an image has, and of all pairs of image and class.

    Args:
        targets: (M, C) of 0 and 1.
        predictions: (M, C); larger is surer.
    """
    by_class = []
    for of_targets, of_predictions in zip(targets.T, predictions.T, strict=True):
        if of_targets.any():
            by_class.append(average_precision(weights, of_targets, of_predictions))
    macro = torch.stack(by_class).mean() if by_class else weights.sum() * math.nan
    of_pairs = weights.repeat_interleave(targets.shape[1])
    return {"macro_map": macro, "micro_map": average_precision(of_pairs, targets.flatten(), predictions.flatten())}


def average_precision(weights: Tensor, targets: Tensor, predictions: Tensor) -> Tensor:
    """The mean precision at the positive items (K,); equal predictions are one threshold. NaN: no item is positive."""
    order = predictions.argsort(descending=True)
    weights = weights[order]
    positives = weights * targets[order]
    _, threshold, items = predictions[order].unique_consecutive(return_inverse=True, return_counts=True)
    last = items.cumsum(0)[threshold] - 1  # of the items that are predicted alike
    precision = positives.cumsum(0)[last] / weights.cumsum(0)[last]
    return (positives * precision).sum() / positives.sum()


def number_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """Explained variance (R2), NaN where all targets are equal, and mean absolute error; (M,), in the same unit."""
    errors = predictions.double() - targets
    mean = (weights * targets).sum() / weights.sum()
    variance = (weights * (targets - mean).square()).sum()
    if targets.min() == targets.max():  # the squares of equal numbers may be 1e-33, by rounding
        variance = variance * math.nan
    r2 = 1 - (weights * errors.square()).sum() / variance
    return {"r2": r2, "mae": (weights * errors.abs()).sum() / weights.sum()}


def has_pixels(targets: NDArray) -> NDArray[np.bool_]:
    """Whether each image has a pixel that counts: (M,)."""
    return targets.sum(1) > 0


def pixel_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """The mean over the classes of their IoU, and the share of pixels that are right."""
    matrix = torch.tensordot(weights, predictions.double(), 1)
    by_class = torch.stack(list(ious(matrix).values()))
    return {"mean_iou": by_class.mean(), "pixel_accuracy": matrix.trace() / matrix.sum()}


def ious(matrix: Tensor) -> Figures:
    """IoU by number of a class, from a confusion matrix (C, C); none of a class that no pixel has and none gets."""
    right = matrix.diagonal()
    union = matrix.sum(0) + matrix.sum(1) - right
    return {str(number): right[number] / union[number] for number in torch.nonzero(union).flatten().tolist()}


def most_frequent(targets: NDArray) -> dict[str, float]:
    """The mean IoU of predicting the most frequent class for all pixels."""
    pixels = targets.sum(0)
    return {"most frequent class": float(pixels.max() / pixels.sum() / (pixels > 0).sum())}
