"""Figures of labels that are one class an image: accuracy, the mean over classes, macro F1, confusion.

M test images, C classes, R resamples.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.metrics import confusion_matrix

from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.intervals import (
    RESAMPLES,
    RESAMPLING_SEED,
    Difference,
    Interval,
    Z,
    bootstrap,
    clipped,
    paired,
    paired_accuracies,
    wilson,
)
from evaluation.metrics.kinds import LabelKind, divide
from evaluation.metrics.outcomes import Outcomes
from mpp.data.overview import note_tested

SMOOTHING = Z**2 / 2  # images added to those that are right, and to those that are wrong: as in Wilson's interval

BIASED = {"macro_f1"}
"""Figures that are lower in resamples than in the images that these are drawn from, with few images a class.

The figure of these images is as much lower than the truth, so the interval is moved by twice the bias of resamples.
"""


class ClassCounts(NamedTuple):
    """Numbers of images by class, (..., C): all that the figures need."""

    true: NDArray
    """Images of the class."""
    predicted: NDArray
    """Images that it is predicted for."""
    right: NDArray
    """Images of both."""


class OneClass(LabelKind):
    """One class an image. Targets (M,), or (M, L) of which any is right, padded with -1; predictions (M,).

    Intervals of the mean over classes and of macro F1 are of 200 resamples of the confusion matrix. With 2 or 3 images
    a class, macro F1's covers the truth in 90 of 100 cases with 20 classes, and in 79 with 100 classes, not in 95.
    """

    name = "class"
    score = "accuracy"
    headings: ClassVar[dict[str, str]] = {
        "accuracy": "accuracy",
        "class_mean": "mean over classes",
        "macro_f1": "macro F1",
    }
    shares = frozenset(headings)

    def has_target(self, targets: NDArray) -> NDArray[np.bool_]:
        return (targets >= 0).reshape(len(targets), -1).any(1)

    def measure(self, outcomes: Outcomes) -> dict[str, float]:
        truth = true_classes(outcomes)
        counts = count_by_class(truth, outcomes.predictions, np.ones(len(outcomes)), class_number(outcomes))
        accuracy = float(is_right(outcomes).mean())
        return {"accuracy": accuracy} | {name: float(each) for name, each in class_figures(counts).items()}

    def intervals(self, outcomes: Outcomes) -> dict[str, Interval]:
        found = {"accuracy": wilson(int(is_right(outcomes).sum()), len(outcomes))}
        if class_number(outcomes) == 1:  # all three are the same share
            return dict.fromkeys(self.headings, found["accuracy"])
        expected, resampled = resample_counts(outcomes)
        values, drawn = class_figures(expected), class_figures(resampled)
        for name, of_resamples in drawn.items():
            bias = of_resamples.mean() - values[name] if name in BIASED else 0.0
            found[name] = clipped(bootstrap(values[name], of_resamples - 2 * bias, len(outcomes)))
        return found

    def difference(self, one: Sequence[Outcomes], other: Sequence[Outcomes]) -> Difference:
        if len(one) == len(other) == 1:
            return paired_accuracies(is_right(one[0]), is_right(other[0]))
        gains = np.mean([is_right(each) for each in one], 0) - np.mean([is_right(each) for each in other], 0)
        difference = paired(lambda indices: float(gains[indices].mean()), len(gains))
        return difference._replace(interval=clipped(difference.interval, -1.0))

    def baselines(self, outcomes: Outcomes) -> dict[str, float]:
        return {"largest class": largest_class_share(outcomes.targets)}

    def problem(self, targets: NDArray, split: str) -> str | None:
        is_integer = np.issubdtype(targets.dtype, np.integer) and targets.max() <= np.iinfo(np.int64).max
        if not is_integer or not self.has_target(targets).all():
            return f"{split}_labels must be integers from 0 and below 2**63"
        if split == "train" and len(np.unique(targets)) < 2:
            return "all training images are of one class"
        return None

    def note_tested(self, train_targets: NDArray, test_targets: NDArray, names: Sequence[str]) -> None:
        note_tested(train_targets, test_targets, names)

    def class_table(self, outcomes: Outcomes) -> ClassTable:
        classes = class_number(outcomes)
        counts = count_by_class(true_classes(outcomes), outcomes.predictions, np.ones(len(outcomes)), classes)
        unknown = (np.nan, np.nan)
        intervals = [
            wilson(right, true) if true else unknown for right, true in zip(counts.right, counts.true, strict=True)
        ]
        return ClassTable(
            outcomes.names(classes),
            counts={"images": counts.true.astype(int), "predicted": counts.predicted.astype(int)},
            shares={"right": recall(counts), "precision": precision(counts), "F1": f1_scores(counts)},
            intervals=np.array(intervals),
        )

    def confusion(self, outcomes: Outcomes) -> NDArray[np.int64]:
        numbers = np.arange(class_number(outcomes))
        return confusion_matrix(true_classes(outcomes), outcomes.predictions, labels=numbers)


def is_right(outcomes: Outcomes) -> NDArray[np.bool_]:
    """Whether each prediction is right: (M,)."""
    targets = outcomes.targets.reshape(len(outcomes), -1)
    return (outcomes.predictions[:, None] == targets).any(1)


def true_classes(outcomes: Outcomes) -> NDArray[np.int64]:
    """The class of each image, (M,): of several right ones the predicted one, or else the first."""
    if outcomes.targets.ndim == 1:
        return outcomes.targets
    return np.where(is_right(outcomes), outcomes.predictions, outcomes.targets[:, 0])


def class_number(outcomes: Outcomes) -> int:
    """C: as many as have names, and as occur."""
    return 1 + max(len(outcomes.class_names) - 1, int(outcomes.targets.max()), int(outcomes.predictions.max()))


def largest_class_share(targets: NDArray) -> float:
    """Accuracy of always predicting the most frequent class.

    Args:
        targets: (M,), or (M, L) of which any is right, padded with -1.
    """
    _, counts = np.unique(targets[targets >= 0], return_counts=True)
    return float(counts.max() / len(targets))


def count_by_class(truth: NDArray, predicted: NDArray, weights: NDArray, classes: int) -> ClassCounts:
    """Counts (..., C) of pairs (K,) of a true and a predicted class, each with weights (..., K)."""
    pairs = np.arange(len(truth))
    is_true = csr_array((np.ones(len(truth)), (pairs, truth)), (len(truth), classes))
    is_predicted = csr_array((np.ones(len(truth)), (pairs, predicted)), (len(truth), classes))
    return ClassCounts(weights @ is_true, weights @ is_predicted, (weights * (truth == predicted)) @ is_true)


def resample_counts(outcomes: Outcomes) -> tuple[ClassCounts, ClassCounts]:
    """Counts by class from which resamples of the confusion matrix are drawn, and counts (R, C) of these resamples.

    SMOOTHING is added to the right and to the wrong images, spread over the classes as the images are: where all images
    of a class are right, a plain bootstrap would know no other outcome.
    """
    classes = class_number(outcomes)
    truth, predicted = true_classes(outcomes), outcomes.predictions
    cells, counts = np.unique(truth * classes + predicted, return_counts=True)
    present, images = np.unique(truth, return_counts=True)
    share = images / len(truth)
    confused = np.roll(present, 1) if len(present) > 1 else (present + 1) % classes  # one other class for each
    cells = np.concatenate([cells, present * classes + present, present * classes + confused])
    counts = np.concatenate([counts, SMOOTHING * share, SMOOTHING * share])
    drawn = np.random.default_rng(RESAMPLING_SEED).multinomial(len(truth), counts / counts.sum(), RESAMPLES)
    truth, predicted = cells // classes, cells % classes
    return count_by_class(truth, predicted, counts, classes), count_by_class(truth, predicted, drawn, classes)


def recall(counts: ClassCounts) -> NDArray[np.float64]:
    """Share of each class's images that are right; NaN where it has none."""
    return divide(counts.right, counts.true)


def precision(counts: ClassCounts) -> NDArray[np.float64]:
    """Share of the images that a class is predicted for that are of it; NaN where it is never predicted."""
    return divide(counts.right, counts.predicted)


def f1_scores(counts: ClassCounts) -> NDArray[np.float64]:
    """F1 of each class; NaN where no image is of it, and none is predicted to be."""
    return divide(2 * counts.right, counts.true + counts.predicted)


def class_figures(counts: ClassCounts) -> dict[str, NDArray[np.float64]]:
    """The mean of the classes' recall (scikit-learn's balanced accuracy) and of their F1, (...)."""
    return {"class_mean": np.nanmean(recall(counts), -1), "macro_f1": np.nanmean(f1_scores(counts), -1)}
