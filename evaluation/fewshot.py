"""Few-shot accuracy of frozen features: regularised least squares, in closed form (paper, section 4.1).

    python evaluation/fewshot.py --encoder runs/birds
    python evaluation/fewshot.py --features features.npz --shots "[5]"

What the paper leaves open is as the authors' public evaluator has it: support sets nested by one permutation a seed and
class, features whitened by the support set, a penalised bias of 100, targets -1 and 1, l2 = 2**10. All in float64.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.config import FewshotConfig
from evaluation.frozen.extraction import Features
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.probing import probe
from mpp.features.metrics import is_right
from mpp.runtime.arrays import in_blocks, select
from mpp.runtime.messages import note
from mpp.runtime.start import command

BIAS = 100.0
BLOCK = 4096  # test images scored at a time: what bounds the memory


def orders(labels: NDArray[np.int64], seed: int) -> list[NDArray[np.int64]]:
    """For each class up to the largest that occurs, in order of its number, its images in the seed's random order."""
    rng = np.random.default_rng(seed)
    by_class = np.argsort(labels, kind="stable")  # within a class ascending, as numpy.where gives them
    ends = np.cumsum(np.bincount(labels))
    groups = np.split(by_class, ends[:-1])
    return [rng.permutation(group) for group in groups]


def least_squares(
    features: NDArray[np.float64], targets: NDArray[np.float64], l2: Sequence[float]
) -> list[NDArray[np.float64]]:
    """Weights (D, C) of min |X w - Y|^2 + l2 |w|^2 for each l2, by one eigendecomposition of the smaller Gram matrix.

    Args:
        features: X (N, D).
        targets: Y (N, C).
    """
    count, width = features.shape
    if count >= width:
        values, vectors = np.linalg.eigh(features.T @ features)
        projected = vectors.T @ (features.T @ targets)
        return [vectors @ (projected / (values + penalty)[:, None]) for penalty in l2]
    values, vectors = np.linalg.eigh(features @ features.T)
    projected = vectors.T @ targets
    return [features.T @ (vectors @ (projected / (values + penalty)[:, None])) for penalty in l2]


def predict(
    support: NDArray, labels: NDArray[np.int64], test: NDArray, classes: int, l2: Sequence[float]
) -> list[NDArray[np.int64]]:
    """Predicted classes of test images, (M,) for each l2.

    Args:
        support: (N, D) features of the k-shot support set.
        labels: (N,) their classes.
        test: (M, D).
        classes: C, classes there are, whether in the support set or not.
    """
    support = support.astype(np.float64)
    mean, std = support.mean(0), support.std(0) + 1e-5
    whitened = np.hstack([(support - mean) / std, np.full((len(support), 1), BIAS)])
    targets = np.full((len(labels), classes), -1.0)
    targets[np.arange(len(labels)), labels] = 1.0
    weights = least_squares(whitened, targets, l2)
    predictions: list[list[NDArray[np.int64]]] = [[] for _ in l2]
    for block in in_blocks(test, BLOCK):
        block = (block.astype(np.float64) - mean) / std
        for of_l2, weight in zip(predictions, weights, strict=True):
            of_l2.append((block @ weight[:-1] + BIAS * weight[-1]).argmax(1))
    return [np.concatenate(of_l2) for of_l2 in predictions]


def evaluate(features: Features, config: FewshotConfig) -> list[dict]:
    """Accuracy for every number of shots, seed and l2."""
    features, classes = features.numbered()
    truth = torch.from_numpy(features.test_labels)
    counts = np.bincount(features.train_labels, minlength=classes)
    for shots in config.shots:
        short = int((counts < shots).sum())
        if short:
            note(f"classes with fewer than {shots} training images ({short} of {classes}) give what they have")
    results = []
    for seed in config.seeds:
        drawn = orders(features.train_labels, seed)
        for shots in config.shots:
            chosen = np.concatenate([order[:shots] for order in drawn])
            support, labels = select(features.train, chosen), features.train_labels[chosen]
            predicted = predict(support, labels, features.test, classes, config.l2)
            for l2, of_l2 in zip(config.l2, predicted, strict=True):
                accuracy = float(is_right(torch.from_numpy(of_l2), truth).double().mean())
                case = {"case": f"{shots}, l2 {l2:g}" if len(config.l2) > 1 else str(shots)}
                results.append({"shots": shots, "seed": seed, "l2": l2, "accuracy": accuracy} | case)
    return results


def run(config: FewshotConfig) -> dict[str, Any]:
    """Probe and report; the report."""
    return probe(config, "fewshot", lambda features: evaluate(features, config), "shots")


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe as the command line, or `arguments`, say."""
    run(parse_with_images(FewshotConfig, arguments, prog="python evaluation/fewshot.py"))


if __name__ == "__main__":
    command(main)
