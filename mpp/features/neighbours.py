"""Nearest neighbours by cosine similarity, and classification by their votes (kNN).

N rows of a bank (training images, patches), M queries, D width, k neighbours, C classes.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpp.features.arrays import in_blocks
from mpp.runtime.messages import progress_bar

QUERIES_PER_BLOCK = 1024  # with BANK_ROWS_PER_BLOCK, bounds the memory of similarities
BANK_ROWS_PER_BLOCK = 2**15
TIED_ROWS_PER_SORT = 64


class Neighbours(NamedTuple):
    """The nearest rows of a bank for each of M queries, the nearest first."""

    similarity: Tensor  # (M, k) cosines
    index: Tensor  # (M, k) int64, rows of the bank


def find_neighbours(bank: Tensor | NDArray, queries: Tensor, count: int) -> list[Neighbours]:
    """The nearest rows of a bank for queries that are not in it; of equally near rows the first come first.

    Args:
        bank: (N, D), on any device and of any floating-point type, perhaps mapped: read once, block by block.
        queries: (M, D), on the device and of the type to compute in.
        count: k, at most N.
    Returns:
        Neighbours of consecutive blocks of queries.
    """
    query_blocks = [F.normalize(block, dim=-1) for block in queries.split(QUERIES_PER_BLOCK)]
    nearest = [Neighbours(block[:, :0], block[:, :0].long()) for block in query_blocks]
    bank_blocks = progress_bar(
        in_blocks(bank, BANK_ROWS_PER_BLOCK),
        desc="neighbours",
        total=math.ceil(len(bank) / BANK_ROWS_PER_BLOCK),
        disable=len(bank) <= BANK_ROWS_PER_BLOCK,  # ImageNet takes an hour of a CPU
    )
    first_row = 0
    for block in bank_blocks:
        if not isinstance(block, Tensor):
            block = torch.tensor(block)  # a copy: mapped arrays must not be written to
        rows = F.normalize(block.to(queries), dim=-1)
        for number, units in enumerate(query_blocks):
            in_block = largest_of_rows(units @ rows.T, count)
            similarity = torch.cat([nearest[number].similarity, in_block.similarity], dim=1)
            index = torch.cat([nearest[number].index, in_block.index + first_row], dim=1)  # ascending where equal
            similarity, chosen = largest_of_rows(similarity, count)
            nearest[number] = Neighbours(similarity, index.gather(1, chosen))
        first_row += len(rows)
    return nearest


def find_other_neighbours(features: Tensor, queries: Sequence[int], count: int) -> Neighbours:
    """The nearest other rows for some rows of (N, D).

    Args:
        queries: numbers of these M rows.
        count: k; fewer where there are fewer other rows.
    """
    units = F.normalize(features, dim=-1)
    rows = torch.as_tensor(queries, device=features.device)
    similarity = units[rows] @ units.T
    similarity.scatter_(1, rows[:, None], -math.inf)
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
    return Neighbours(largest[:, :count], index[:, :count])


# --- kNN ---


def vote_weights(similarity: Tensor, temperature: float) -> Tensor:
    """Weights exp(s / temperature) of neighbours (M, k), in shares of the nearest one's, which come first."""
    return ((similarity - similarity[:, :1]) / temperature).exp()


def count_votes(neighbours: Neighbours, bank_classes: Tensor, classes: int, temperature: float) -> Tensor:
    """Votes for each class: see `vote_weights`.

    Args:
        bank_classes: (N,) int64 of the bank's rows, from 0 to C - 1.
        classes: C.
    Returns:
        (M, C).
    """
    weights = vote_weights(neighbours.similarity, temperature)
    votes = torch.zeros(len(weights), classes, dtype=weights.dtype, device=weights.device)
    return votes.scatter_add_(1, bank_classes[neighbours.index], weights)


def predict_by_neighbours(
    train: Tensor | NDArray, test: Tensor, neighbours: Sequence[int], predict: Callable[[Neighbours], Tensor]
) -> dict[int, Tensor]:
    """Predictions by the k nearest training images of each test image: see `knn_predict`.

    Args:
        predict: neighbours (M, k) to the predictions for their M test images.
    """
    blocks = find_neighbours(train, test, min(max(neighbours), len(train)))
    return {
        k: torch.cat([predict(Neighbours(*(part[:, :k] for part in nearest))) for nearest in blocks])
        for k in neighbours
    }


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
    labels, classes = train_labels.to(test.device).unique(return_inverse=True)  # labels may be far apart

    def vote(nearest: Neighbours) -> Tensor:
        return labels[count_votes(nearest, classes, len(labels), temperature).argmax(-1)]

    return predict_by_neighbours(train, test, neighbours, vote)


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
    values = train_values.to(test)

    def mean(nearest: Neighbours) -> Tensor:
        weights = vote_weights(nearest.similarity, temperature)
        return (weights[..., None] * values[nearest.index]).sum(1) / weights.sum(1, keepdim=True)

    return predict_by_neighbours(train, test, neighbours, mean)
