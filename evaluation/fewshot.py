"""Few-shot accuracy of frozen features: regularised least squares, in closed form (paper, section 4.1).

    python evaluation/fewshot.py --encoder runs/birds
    python evaluation/fewshot.py --features features.npz --shots "[5]"

The paper leaves details open; these are those of the authors' public evaluator: support sets nested by one permutation
a seed and class, features whitened by the support set, a penalised bias of 100, targets -1 and 1, l2 = 2**10. All in
float64.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.config import FewshotConfig
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.probing import run_probe
from evaluation.frozen.run_images import LoadedSplits, parse_and_load
from mpp.runtime.messages import counted, note
from mpp.runtime.start import run_main

BIAS = 100.0
STD_OFFSET = 1e-5  # added to the deviation of a feature: a constant one is not divided by 0
TEST_IMAGES_PER_BLOCK = 4096  # scored at a time, which bounds the memory


def run(config: FewshotConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Probe the features, write the report, and return it."""
    return run_probe(config, "fewshot", lambda features: evaluate(features, config), "shots", loaded)


def evaluate(features: LabelledFeatures, config: FewshotConfig) -> list[dict]:
    """Outcomes for every number of shots, seed and l2."""
    features, numbers = features.with_numbered_classes()
    classes = len(numbers)
    note_small_classes(features.train_labels, classes, config.shots)
    results = []
    for seed in config.seeds:
        drawn = draw_by_class(features.train_labels, seed)
        for shots in config.shots:
            chosen = np.concatenate([images[:shots] for images in drawn])
            support = features.train[chosen]
            predictions = predict(support, features.train_labels[chosen], features.test, classes, config.l2)
            for l2, predicted in zip(config.l2, predictions, strict=True):
                result = {"shots": shots, "seed": seed, "l2": l2, "outcomes": features.outcomes(predicted)}
                result["case"] = f"{shots}, l2 {l2:g}" if len(config.l2) > 1 else str(shots)
                results.append(result)
    return results


def note_small_classes(labels: NDArray[np.int64], classes: int, all_shots: Sequence[int]) -> None:
    """Note the classes that have fewer training images than a support set takes."""
    counts = np.bincount(labels, minlength=classes)
    for shots in all_shots:
        small = int((counts < shots).sum())
        if small:
            few = f"{small} of {counted(classes, 'class', 'classes')}: fewer than {counted(shots, 'training image')}"
            note(f"{few}; the support set uses all of them")


def draw_by_class(labels: NDArray[np.int64], seed: int) -> list[NDArray[np.int64]]:
    """The images of each class in random order, for the classes from 0 to the largest that occurs."""
    rng = np.random.default_rng(seed)
    by_class = np.argsort(labels, kind="stable")  # within a class ascending, as numpy.where gives them
    ends = np.cumsum(np.bincount(labels))
    return [rng.permutation(images) for images in np.split(by_class, ends[:-1])]


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
    mean = support.mean(0)
    std = support.std(0) + STD_OFFSET
    bias = np.full((len(support), 1), BIAS)
    whitened = np.hstack([(support - mean) / std, bias])
    targets = np.full((len(labels), classes), -1.0)
    targets[np.arange(len(labels)), labels] = 1.0
    weights = least_squares(whitened, targets, l2)

    predictions: list[list[NDArray[np.int64]]] = [[] for _ in l2]
    for start in range(0, len(test), TEST_IMAGES_PER_BLOCK):
        block = (test[start : start + TEST_IMAGES_PER_BLOCK].astype(np.float64) - mean) / std
        for of_l2, weight in zip(predictions, weights, strict=True):
            scores = block @ weight[:-1] + BIAS * weight[-1]
            of_l2.append(scores.argmax(1))
    return [np.concatenate(of_l2) for of_l2 in predictions]


def least_squares(
    features: NDArray[np.float64], targets: NDArray[np.float64], l2: Sequence[float]
) -> list[NDArray[np.float64]]:
    """Weights (D, C) of min |X w - Y|^2 + l2 |w|^2 for each l2, by one eigendecomposition of the smaller Gram matrix.

    Args:
        features: X (N, D).
        targets: Y (N, C).
    """
    count, width = features.shape
    has_fewer_images = count < width
    if has_fewer_images:  # w = X^T (X X^T + l2 I)^-1 Y
        gram, right_side = features @ features.T, targets
    else:  # w = (X^T X + l2 I)^-1 X^T Y
        gram, right_side = features.T @ features, features.T @ targets
    values, vectors = np.linalg.eigh(gram)
    projected = vectors.T @ right_side
    weights = []
    for penalty in l2:
        solution = vectors @ (projected / (values + penalty)[:, None])
        weights.append(features.T @ solution if has_fewer_images else solution)
    return weights


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Probe with the settings of the command line, or of `arguments`."""
    return run(*parse_and_load(FewshotConfig, arguments))


if __name__ == "__main__":
    run_main(main)
