"""Few-shot accuracy of frozen features: regularised least squares, in closed form (paper, section 4.1).

    python evaluation/fewshot.py --encoder runs/birds
    python evaluation/fewshot.py --features features.npz --shots "[5]"

The paper leaves details open; these are those of the authors' public evaluator: support sets nested by one permutation
a seed and class, features whitened by the support set, a penalised bias of 100, targets -1 and 1, l2 = 2**10. All in
float64.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from evaluation.config import FewshotConfig
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.results import commands_of_probe
from mpp.runtime.messages import counted, note, progress_bar
from mpp.runtime.start import run_main

BIAS = 100.0
STD_OFFSET = 1e-5  # added to the deviation of a feature: a constant one is not divided by 0


def evaluate(features: LabelledFeatures, config: FewshotConfig) -> list[dict]:
    """Outcomes for every number of shots, seed and l2."""
    features, classes = features.with_numbered_classes()
    counts = np.bincount(features.train_labels, minlength=len(classes))
    for shots in config.shots:
        if (counts < shots).any():
            few = f"{(counts < shots).sum()} of {counted(len(counts), 'class', 'classes')}"
            note(f"{few}: fewer than {counted(shots, 'training image')}; the support set uses all of them")
    results = []
    for seed in progress_bar(config.seeds, desc="draws", unit="draw", delay=5):
        drawn = draw_by_class(features.train_labels, seed)
        for shots in config.shots:
            chosen = np.concatenate([images[:shots] for images in drawn])
            support, labels = features.train[chosen], features.train_labels[chosen]
            predictions = predict(support, labels, features.test, len(classes), config.l2)
            for l2, predicted in zip(config.l2, predictions, strict=True):
                case = f"{shots}, l2 {l2:g}" if len(config.l2) > 1 else str(shots)
                about = {"shots": shots, "seed": seed, "l2": l2, "case": case}
                results.append(about | {"outcomes": features.outcomes(predicted)})
    return results


def draw_by_class(labels: NDArray[np.int64], seed: int) -> list[NDArray[np.int64]]:
    """The images of each class in random order, for the classes from 0 to the largest that occurs."""
    random = np.random.default_rng(seed)
    return [random.permutation(np.flatnonzero(labels == number)) for number in range(labels.max() + 1)]


def predict(
    support: NDArray, labels: NDArray[np.int64], test: NDArray, classes: int, l2: Sequence[float]
) -> list[NDArray[np.int64]]:
    """Predicted classes of test images, (M,) for each l2.

    Args:
        support: (N, D) features of the k-shot support set.
        labels: (N,) their classes.
        test: (M, D).
        classes: C, number of classes, whether in the support set or not.
    """
    support = support.astype(np.float64)
    mean, std = support.mean(0), support.std(0) + STD_OFFSET
    targets = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)
    inputs, tested = (np.c_[(each - mean) / std, np.full(len(each), BIAS)] for each in (support, test))
    fitted = [Ridge(penalty, fit_intercept=False, solver="cholesky").fit(inputs, targets) for penalty in l2]
    return [ridge.predict(tested).argmax(1) for ridge in fitted]


run, main = commands_of_probe("fewshot", FewshotConfig, evaluate, "shots")


if __name__ == "__main__":
    run_main(main)
