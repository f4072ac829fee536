"""The kNN classifier on frozen features."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mpp.metrics import is_right

BLOCK = 1024  # test images compared at a time: what bounds the memory


def knn_predict(
    train: Tensor, train_labels: Tensor, test: Tensor, neighbours: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Classes that a weighted kNN gives test images.

    Cosine similarity s; the nearest k training images vote with weight exp(s / temperature) (Wu et al., 2018).

    Args:
        train, test: (N, D) and (M, D) features.
        train_labels: (N,) int64, from 0.
        neighbours: values of k; those above N count as N.
    Returns:
        k -> (M,) int64.
    """
    train = F.normalize(train, dim=-1)
    classes, most = int(train_labels.max()) + 1, min(max(neighbours), len(train))
    predictions: dict[int, list[Tensor]] = {k: [] for k in neighbours}
    for block in test.split(BLOCK):
        similarity, index = (F.normalize(block, dim=-1) @ train.T).topk(most, dim=-1)  # (block, most), descending
        weights, labels = ((similarity - 1) / temperature).exp(), train_labels[index]
        for k, of_k in predictions.items():
            votes = torch.zeros(len(block), classes, dtype=weights.dtype, device=block.device)
            of_k.append(votes.scatter_add_(1, labels[:, :k], weights[:, :k]).argmax(-1))
    return {k: torch.cat(of_k) for k, of_k in predictions.items()}


def knn_accuracy(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, neighbours: int, temperature: float = 0.07
) -> float:
    """Share of test images (M, D) that a kNN classifies rightly: see `knn_predict`."""
    predicted = knn_predict(train, train_labels, test, [neighbours], temperature)[neighbours]
    return float(is_right(predicted, test_labels).double().mean())
