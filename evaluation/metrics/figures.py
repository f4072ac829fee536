"""Figures of predictions as functions of weights of the images, so that each image has a score.

The derivative of a figure says what an image adds (the infinitesimal jackknife):

    score_i = figure + M * d figure / d weight_i        at weights of 1

For accuracy that is whether image i is right. Of any figure, the mean of the scores is the figure, and their variance
divided by M is the square of its standard error: intervals and differences of encoders need nothing else.

The figures are scikit-learn's (accuracy_score, balanced_accuracy_score, f1_score, average_precision_score, r2_score,
mean_absolute_error), with derivatives. Weights are float64. M images, C classes.
"""

import math
from collections.abc import Callable

import torch
from numpy.typing import NDArray
from torch import Tensor

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
