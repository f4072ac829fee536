"""The kNN classifier on frozen features."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpp.metrics import is_right
from mpp.runtime.arrays import in_blocks

BLOCK, TRAIN_BLOCK = 1024, 2**15  # test and training images compared at a time: what bounds the memory
TIED_ROWS = 64  # test images at a time whose neighbours cannot be told apart


def knn_predict(
    train: Tensor | NDArray, train_labels: Tensor, test: Tensor, neighbours: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Classes that a weighted kNN gives test images.

    Cosine similarity s; the nearest k training images vote with weight exp(s / temperature) (Wu et al., 2018). Of
    training images that are equally near the first count; of classes with equally many votes the lowest wins.

    Args:
        train: (N, D) features, on any device and of any floating-point type, perhaps mapped: they are read once, block
            by block.
        train_labels: (N,) int64, from 0.
        test: (M, D) features, on the device and of the type to compute in.
        neighbours: values of k; those above N count as N.
    Returns:
        k -> (M,) int64, on the device of `test`.
    """
    train_labels = train_labels.to(test.device)
    classes, most = int(train_labels.max()) + 1, min(max(neighbours), len(train))
    predictions: dict[int, list[Tensor]] = {k: [] for k in neighbours}
    for similarity, index in nearest(train, test, most):
        weights, labels = ((similarity - 1) / temperature).exp(), train_labels[index]
        for k, of_k in predictions.items():
            votes = torch.zeros(len(labels), classes, dtype=weights.dtype, device=weights.device)
            of_k.append(votes.scatter_add_(1, labels[:, :k], weights[:, :k]).argmax(-1))
    return {k: torch.cat(of_k) for k, of_k in predictions.items()}


def nearest(train: Tensor | NDArray, test: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Cosine similarity and index of the `count` nearest training images, (m, count) each, by blocks of test images."""
    units = [F.normalize(block, dim=-1) for block in test.split(BLOCK)]
    best: dict[int, tuple[Tensor, Tensor]] = {}
    for turn, block in enumerate(in_blocks(train, TRAIN_BLOCK)):
        block = block if isinstance(block, Tensor) else torch.tensor(block)  # a copy: what is mapped is not written to
        others = F.normalize(block.to(test), dim=-1)
        for number, unit in enumerate(units):
            similarity, index = largest(unit @ others.T, count)
            found = similarity, index + turn * TRAIN_BLOCK
            best[number] = merge(best[number], found, count) if turn else found
    return list(best.values())


def merge(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The `count` nearest of both: similarity and index."""
    similarity, index = (torch.cat(pair, dim=1) for pair in zip(before, after, strict=True))
    similarity, chosen = largest(similarity, count)
    return similarity, index.gather(1, chosen)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, descending, and where they are; of equal ones the first come first.

    torch.topk alone says nothing of equal ones.
    """
    found, index = values.topk(min(count + 1, values.shape[1]))
    equal = found[:, 1:] == found[:, :-1]
    tied = equal[:, count - 1 :].any(1).nonzero().squeeze(1)  # where it chose among equal ones
    for first in range(0, len(tied), TIED_ROWS):
        rows = tied[first : first + TIED_ROWS]
        above, level = values[rows] > found[rows, count:], values[rows] == found[rows, count:]
        wanted = count - above.sum(1, keepdim=True)
        chosen = (above | level & (level.cumsum(1, dtype=torch.int32) <= wanted)).nonzero()[:, 1].view(-1, count)
        index[rows, :count], found[rows, :count] = chosen, values[rows].gather(1, chosen)
    found, index = found[:, :count], index[:, :count]
    rows = equal.any(1).nonzero().squeeze(1)
    ascending, order = index[rows].sort()
    found[rows], order = found[rows].gather(1, order).sort(descending=True, stable=True)
    index[rows] = ascending.gather(1, order)
    return found, index


def knn_accuracy(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, neighbours: int, temperature: float = 0.07
) -> float:
    """Share of test images (M, D) that a kNN classifies rightly: see `knn_predict`."""
    predicted = knn_predict(train, train_labels, test, [neighbours], temperature)[neighbours]
    return float(is_right(predicted, test_labels).double().mean())
