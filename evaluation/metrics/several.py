"""Figures of labels that are several classes an image: average precision, its mean over classes (macro), and over all
pairs of image and class together (micro).

M test images, C classes, R resamples.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.intervals import Interval, bootstrap_of_share, drawn_weights
from evaluation.metrics.kinds import LabelKind, divide
from evaluation.metrics.outcomes import Outcomes
from mpp.data.dataset import names_by_number
from mpp.runtime.messages import counted, note, shortened

IMAGES_OF_A_POSITIVE = 3
"""Independent images that a positive one counts for at most: out of its place it costs about a third of a precision."""
WEIGHTS_IN_MEMORY = 2**24  # weights of pairs, for all resamples at a time


class SeveralClasses(LabelKind):
    """Several classes an image. Targets (M, C): 1, 0 and, of a missing label, -1. Predictions (M, C): larger is surer.

    A class without a test image has no average precision: it is left out of the mean.

    Intervals are wider the fewer positive images a class has. With 50 images they are too wide for a few classes of
    equal size near 5 positive images (99 of 100 cases), and too narrow above an mAP of 0.9 where some classes have 2 or
    3 (90 of 100).
    """

    name = "several"
    score = "macro_map"
    headings: ClassVar[dict[str, str]] = {"macro_map": "mAP, macro", "micro_map": "mAP, micro"}
    shares = frozenset(headings)

    def has_target(self, targets: NDArray) -> NDArray[np.bool_]:
        return (targets >= 0).all(1)

    def measure(self, outcomes: Outcomes) -> dict[str, float]:
        return {name: float(value) for name, value in figures_of(outcomes, np.ones((1, len(outcomes)))).items()}

    def intervals(self, outcomes: Outcomes) -> dict[str, Interval]:
        count = len(outcomes)
        drawn = figures_of(outcomes, drawn_weights(count).astype(float))
        values = self.measure(outcomes)
        positives = outcomes.targets.sum(0)
        positives = positives[positives > 0]
        if not len(positives):
            return dict.fromkeys(values, (math.nan, math.nan))
        of_class = float(len(positives) / (1 / positives).sum())  # harmonic mean: the smallest classes vary most
        draws = {"macro_map": of_class, "micro_map": count}
        most = {"macro_map": of_class * len(positives), "micro_map": float(positives.sum())}
        found = {}
        for name, value in values.items():
            found[name] = bootstrap_of_share(value, drawn[name], draws[name], IMAGES_OF_A_POSITIVE * most[name])
        return found

    def baselines(self, outcomes: Outcomes) -> dict[str, float]:
        frequency = outcomes.targets.mean(0)
        present = frequency[frequency > 0]
        return {"any order of the images": float(present.mean())} if len(present) else {}

    def class_table(self, outcomes: Outcomes) -> ClassTable:
        return ClassTable(
            outcomes.names(outcomes.targets.shape[1]),
            counts={"images": outcomes.targets.sum(0)},
            shares={"average precision": class_precisions(outcomes, np.ones((1, len(outcomes))))[0]},
        )

    def problem(self, targets: NDArray, split: str) -> str | None:
        is_missing = targets == -1
        is_matrix = targets.ndim == 2 and targets.shape[1] > 0
        if not is_matrix or not np.isin(targets, (-1, 0, 1)).all() or (is_missing.any(1) != is_missing.all(1)).any():
            values = "1 where an image is of a class, 0 where not, and -1 in the whole row of a missing label"
            return f"{split}_labels must be {values}"
        if split == "train" and not (targets == 1).any():
            return "no training image is of any class"
        return None

    def note_tested(self, train_targets: NDArray, test_targets: NDArray, names: Sequence[str]) -> None:
        is_tested = (test_targets == 1).any(0)
        is_learned = (train_targets == 1).any(0)
        note_classes("test", "left out of mAP, macro", np.flatnonzero(~is_tested), names)
        note_classes("training", "any features score the same", np.flatnonzero(is_tested & ~is_learned), names)


def note_classes(split: str, effect: str, classes: NDArray[np.int64], names: Sequence[str]) -> None:
    """Note the classes, by number, that have no image in a split, if there are any."""
    if len(classes):
        shown = shortened(names_by_number(names, classes.tolist()))
        note(f"{counted(len(classes), 'class', 'classes')} without a {split} image ({shown}): {effect}")


def average_precisions(scores: NDArray, targets: NDArray, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average precision, (R,), of a ranking in which each item counts by its weight; NaN: no item is positive.

    The sum over thresholds of precision times the gain in recall, as scikit-learn's; equal scores are one threshold.

    Args:
        scores, targets: (K,) of the items; targets are 1 or 0.
        weights: (R, K).
    """
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    is_end = np.append(ranked[1:] != ranked[:-1], True)  # of a threshold
    weights = weights[:, order]
    positives = np.cumsum(weights * targets[order], 1)[:, is_end]
    items = np.cumsum(weights, 1)[:, is_end]
    precision = np.divide(positives, items, out=np.zeros_like(positives), where=items > 0)
    gains = np.diff(positives, axis=1, prepend=0)
    total = positives[:, -1]
    return divide((precision * gains).sum(1), total)


def class_precisions(outcomes: Outcomes, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average precision of each class, (R, C), by weights (R, M) of the images."""
    by_class = []
    for scores, targets in zip(outcomes.predictions.T, outcomes.targets.T, strict=True):
        by_class.append(average_precisions(scores, targets, weights))
    return np.stack(by_class, 1)


def figures_of(outcomes: Outcomes, weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Both figures, (R,) or a number where R is 1, by weights (R, M) of the images."""
    by_class = class_precisions(outcomes, weights)
    known = np.isfinite(by_class)
    sums = np.where(known, by_class, 0).sum(1)
    macro = divide(sums, known.sum(1))

    images, classes = outcomes.targets.shape
    scores, targets = outcomes.predictions.ravel(), outcomes.targets.ravel()
    rows = max(1, WEIGHTS_IN_MEMORY // (images * classes))
    micro = []
    for first in range(0, len(weights), rows):
        of_pairs = np.repeat(weights[first : first + rows], classes, axis=1)
        micro.append(average_precisions(scores, targets, of_pairs))
    figures = {"macro_map": macro, "micro_map": np.concatenate(micro)}
    return {name: values[0] if len(values) == 1 else values for name, values in figures.items()}
