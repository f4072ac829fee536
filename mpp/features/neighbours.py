"""Nearest neighbours by cosine similarity, and classification by their votes (kNN).

N rows of a bank (training images, patches), M queries, D width, k neighbours, C classes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpp.runtime.messages import progress_bar

QUERIES_PER_BLOCK = 1024
SIMILARITIES_PER_BLOCK = 2**25  # bounds their memory, to 134 MB
TIED_ROWS_PER_SORT = 64
PATIENCE = 30  # seconds without a progress bar: ImageNet takes an hour of a CPU


class Neighbours(NamedTuple):
    """The nearest rows of a bank for each of M queries, the nearest first."""

    similarity: Tensor  # (M, k) cosines
    index: Tensor  # (M, k) int64, rows of the bank

    def first(self, count: int) -> "Neighbours":
        """The nearest `count` of them."""
        return Neighbours(self.similarity[:, :count], self.index[:, :count])

    def weights(self, temperature: float) -> Tensor:
        """Weights exp(s / temperature) of votes, (M, k), in shares of the nearest one's."""
        return ((self.similarity - self.similarity[:, :1]) / temperature).exp()


def find_neighbours(bank: Tensor | NDArray, queries: Tensor, count: int) -> Neighbours:
    """The nearest rows of a bank for queries that are not in it; of equally near rows the first come first.

    Args:
        bank: (N, D), on any device and of any floating-point type.
        queries: (M, D), on the device and of the type to compute in.
        count: k; N where that is less.
    """
    rows = F.normalize(torch.as_tensor(bank).to(queries), dim=-1)
    blocks = F.normalize(queries, dim=-1).split(min(QUERIES_PER_BLOCK, 1 + SIMILARITIES_PER_BLOCK // len(rows)))
    nearest = []
    for block in progress_bar(blocks, desc="neighbours", delay=PATIENCE):
        nearest.append(largest_of_rows(block @ rows.T, min(count, len(rows))))
    return Neighbours(*map(torch.cat, zip(*nearest, strict=True)))


def find_other_neighbours(features: Tensor, count: int) -> Neighbours:
    """The nearest other rows for each row of (N, D): `count` of them, or fewer where there are fewer other rows."""
    units = F.normalize(features, dim=-1)
    similarity = (units @ units.T).fill_diagonal_(-math.inf)
    return largest_of_rows(similarity, min(count, len(features) - 1))


def largest_of_rows(values: Tensor, count: int) -> Neighbours:
    """The `count` largest values of each row (M, N), descending, and their columns; of equal ones the first come first.

    torch.topk leaves the order of equal values open, and a stable sort of all rows takes many times as long, so only
    rows with equal values are sorted.
    """
    candidates = min(count + 1, values.shape[1])  # one more: the last may be equal to the first that is left out
    largest, index = values.topk(candidates)
    is_tied = (largest[:, 1:] == largest[:, :-1]).any(1)
    for rows in is_tied.nonzero().squeeze(1).split(TIED_ROWS_PER_SORT):
        sorted_values, order = values[rows].sort(descending=True, stable=True)
        largest[rows] = sorted_values[:, :candidates]
        index[rows] = order[:, :candidates]
    return Neighbours(largest, index).first(count)


# --- kNN ---


def count_votes(neighbours: Neighbours, bank_classes: Tensor, classes: int, temperature: float) -> Tensor:
    """Votes for each class: see `Neighbours.weights`.

    Args:
        bank_classes: (N,) int64 of the bank's rows, from 0 to C - 1.
        classes: C.
    Returns:
        (M, C).
    """
    weights = neighbours.weights(temperature)
    votes = torch.zeros(len(weights), classes, dtype=weights.dtype, device=weights.device)
    return votes.scatter_add_(1, bank_classes[neighbours.index], weights)


def knn_predict(
    train: Tensor | NDArray, train_labels: Tensor, test: Tensor, neighbours: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Predictions of a weighted kNN for test images (Wu et al., 2018).

    The k nearest training images by cosine similarity s vote with weight exp(s / temperature). Of equally near training
    images the first count; of classes with equal votes the lowest wins.

    Args:
        train: (N, D) features: see `find_neighbours`.
        train_labels: (N,) int64, from 0.
        test: (M, D) features, on the device and of the type to compute in.
        neighbours: values of k; a k above N counts as N.
    Returns:
        k -> (M,) int64, on the device of `test`.
    """
    nearest = find_neighbours(train, test, max(neighbours))
    labels, classes = train_labels.to(test.device).unique(return_inverse=True)  # labels may be far apart
    predictions = {}
    for k in neighbours:
        votes = count_votes(nearest.first(k), classes, len(labels), temperature)
        predictions[k] = labels[votes.argmax(-1)]
    return predictions


def knn_means(
    train: Tensor | NDArray, train_values: Tensor, test: Tensor, neighbours: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Means of numbers over the nearest training images, weighted as the votes of `knn_predict`.

    Args:
        train, test, neighbours: see `knn_predict`.
        train_values: (N, V) numbers of each training image.
    Returns:
        k -> (M, V), on the device of `test`.
    """
    nearest = find_neighbours(train, test, max(neighbours))
    values = train_values.to(test)
    means = {}
    for k in neighbours:
        near = nearest.first(k)
        weights = near.weights(temperature)
        sums = F.embedding_bag(near.index, values, per_sample_weights=weights, mode="sum")  # no (M, k, V) in memory
        means[k] = sums / weights.sum(1, keepdim=True)
    return means
