"""What frozen features know while an encoder is trained: the accuracy of a kNN classifier, and their effective rank.

Without labels: whether two crops of an image have the same neighbours. N images, D width.
"""

import math
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from mpp.config import DataConfig, ProbeConfig, Representation
from mpp.data.dataset import ImageDataset
from mpp.data.loader import HeldOutLoader
from mpp.data.overview import note_tested
from mpp.data.views import ViewDataset
from mpp.features.frozen import extract, features_at, stages
from mpp.features.metrics import is_right, ranks_of
from mpp.runtime.arrays import in_blocks
from mpp.runtime.progress import progress_bar

BLOCK, TRAIN_BLOCK = 1024, 2**15  # test and training images compared at a time: what bounds the memory
TIED_ROWS = 64  # test images with equally near neighbours that are sorted at a time
RANKED = 2048  # images that the effective rank is of, at most
CELLS = 8  # a side of the colour floor: as `floor:pixels` of the evaluation
AGREEING = 5  # neighbours of two crops that are compared
Part = tuple[float, float]
"""Which share of each side of an image: from, to."""
NORTH_WEST, SOUTH_EAST = (0.0, 0.75), (0.25, 1.0)  # two crops that share a quarter of the image


class Probe:
    """Effective rank of the features after each block and, with labels, kNN accuracy; without, neighbours' agreement.

    Args:
        loader: of the images that are probed.
        known: training images, of which labelled ones are what the kNN classifier compares with.
        held_out: images that are classified, labelled ones alone, and whose features are ranked.
        data: how many of them, which, and how they are cropped.
        img_size: height and width of the crops.
        representation: which features.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: HeldOutLoader,
        known: ImageDataset,
        held_out: ImageDataset,
        data: DataConfig,
        img_size: tuple[int, int],
        config: ProbeConfig,
        representation: Representation = "mean",
    ):
        self.accelerator, self.loader = accelerator, loader
        self.neighbours, self.representation = config.neighbours, representation

        def add(dataset: ImageDataset) -> ViewDataset:
            return loader.add(ViewDataset(dataset, data, img_size))

        self.ranked = add(held_out.choose(min(data.eval_images, RANKED), data.cut_seed))
        self.judged = self.compared = None
        train, test = known.labelled(), held_out.labelled()
        if train is None or test is None or train.labels.ndim > 1:
            return
        judged = test.choose(data.eval_images, data.cut_seed)
        same = len(test) == len(held_out) and len(judged) == len(self.ranked.dataset)
        self.judged = self.ranked if same else add(judged)
        self.compared = add(train.choose(config.images, data.eval_seed))
        note_tested(train.labels, judged.labels, train.names)

    @property
    def image_count(self) -> int:
        """Number of held-out images that are classified or, without labels, compared."""
        return len((self.judged or self.ranked).dataset)

    def __call__(self, model: nn.Module, floor: bool = False) -> dict[str, float]:
        """Probe a model that has an `encoder` and a `normalize`. All processes call it.

        Args:
            floor: probe the mean colours of a grid over the image, too, which need no model.
        Returns:
            `features/rank/depth_XX`; `knn/depth_XX` or, without labels, `agreement/depth_XX`; with `floor` also
            `knn/floor_pixels` or `agreement/floor_pixels`. Nothing but on the main process.
        """
        device, depths = self.accelerator.device, len(stages(model.encoder))
        features, truth = self.frozen_features(model, self.ranked, floor)
        scalars = by_depth("features/rank", effective_ranks(features[:depths], device))
        if self.compared is None:
            halves = [self.frozen_features(model, self.ranked, floor, part)[0] for part in (NORTH_WEST, SOUTH_EAST)]
            pairs = ((torch.from_numpy(part).to(device) for part in pair) for pair in zip(*halves, strict=True))
            chance = min(1.0, AGREEING / max(len(self.ranked.dataset) - 1, 1))
            found = by_depth("agreement", [agreement(*pair) for pair in pairs], depths)
            return scalars | found | ({"agreement/chance": chance} if found else {})
        if self.judged is not self.ranked:
            features, truth = self.frozen_features(model, self.judged, floor)
        compared, classes = self.frozen_features(model, self.compared, floor)
        parts = [[compared[i], classes, features[i], truth] for i in range(len(features))]
        on_device = [[torch.from_numpy(part).to(device) for part in of_depth] for of_depth in parts]
        return scalars | by_depth("knn", [knn_accuracy(*of_depth, self.neighbours) for of_depth in on_device], depths)

    def frozen_features(
        self, model: nn.Module, views: ViewDataset, floor: bool = False, part: Part | None = None
    ) -> tuple[list[NDArray], NDArray]:
        """Features (N, D) at every depth, then the floor's; labels (N,). Nothing but on the main process."""
        depths = range(1, 1 + len(stages(model.encoder)))

        def encode(images: Tensor) -> list[Tensor]:
            images = images if part is None else enlarged(images, part)
            colours = [F.adaptive_avg_pool2d(images.float(), CELLS).flatten(1)] if floor else []
            return features_at(model.encoder, model.normalize(images), depths, self.representation) + colours

        return extract(self.loader.batches(views), encode, len(views.dataset), self.accelerator)


def by_depth(name: str, values: Sequence[float], depths: int | None = None) -> dict[str, float]:
    """Scalars with the names of their depths; what comes after `depths` of them is the floor's."""
    names = [f"depth_{depth:02d}" for depth in range(1, 1 + (depths or len(values)))] + ["floor_pixels"]
    return {f"{name}/{each}": value for each, value in zip(names, values, strict=False)}


def enlarged(images: Tensor, part: Part) -> Tensor:
    """That part of images (B, C, H, W), as large as they are and of their type."""
    size = images.shape[-2:]
    rows, columns = (slice(round(part[0] * side), round(part[1] * side)) for side in size)
    pixels = F.interpolate(images[..., rows, columns].float(), size=size, mode="bilinear", antialias=True)
    return pixels.round().to(images.dtype) if images.dtype == torch.uint8 else pixels


def agreement(one: Tensor, other: Tensor, neighbours: int = AGREEING) -> float:
    """How well the neighbours of images agree between two crops: it needs no labels.

    Args:
        one, other: features (N, D) of two crops of the same images, in the same order.
    Returns:
        The share of the `neighbours` nearest images by one crop (cosine, the image itself left out) that are among as
        many by the other. By chance: neighbours / (N - 1). 1 where there are too few images to choose among.
    """
    count = min(neighbours, len(one) - 1)
    if count < 1:
        return 1.0
    found = []
    for features in (one, other):
        units = F.normalize(features, dim=-1)
        index = (units @ units.T).fill_diagonal_(-math.inf).topk(count).indices
        found.append(torch.zeros(len(one), len(one), device=one.device).scatter_(1, index, 1))
    return float((found[0] * found[1]).sum() / (count * len(one)))


def effective_ranks(features: Sequence[Tensor | NDArray], device: torch.device) -> list[float]:
    """RankMe (Garrido et al., 2023): in how many directions features spread. A loss does not show their collapse.

    The exponential of the entropy of the singular values, scaled to a sum of 1. The singular values are the roots of
    the Gram matrix's eigenvalues in float64, a fraction of the work of decomposing the features. Singular values below
    1e-8 of the largest are then noise: of collapsed features the rank is wrong by up to 1e-4 of itself, as much as the
    rounding to float32 does.

    Args:
        features: (N, D) for each depth; D may differ.
        device: which computes.
    Returns:
        For each depth from 1 to min(N, D): k where k orthogonal directions are equally strong. 0 where all features of
        a depth are 0.
    """
    ranks: list[float] = []
    for _, alike in groupby(features, key=lambda part: part.shape):
        grams = torch.stack([gram(torch.as_tensor(part).to(device).double()) for part in alike])  # (depths, m, m)
        ranks += ranks_of(grams)
    return ranks


def gram(features: Tensor) -> Tensor:
    """The inner products of the rows (N, D), or of the columns where they are fewer: (m, m), m = min(N, D)."""
    return features @ features.T if len(features) < features.shape[1] else features.T @ features


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
    names, train_labels = train_labels.to(test.device).unique(return_inverse=True)  # numbers may be far apart
    most = min(max(neighbours), len(train))
    predictions: dict[int, list[Tensor]] = {k: [] for k in neighbours}
    for similarity, index in nearest(train, test, most):
        weights, labels = ((similarity - 1) / temperature).exp(), train_labels[index]
        for k, of_k in predictions.items():
            votes = torch.zeros(len(labels), len(names), dtype=weights.dtype, device=weights.device)
            of_k.append(names[votes.scatter_add_(1, labels[:, :k], weights[:, :k]).argmax(-1)])
    return {k: torch.cat(of_k) for k, of_k in predictions.items()}


def nearest(train: Tensor | NDArray, test: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Cosine similarity and index of the `count` nearest training images, (m, count) each, by blocks of test images."""
    units = [F.normalize(block, dim=-1) for block in test.split(BLOCK)]
    best: dict[int, tuple[Tensor, Tensor]] = {}
    turns = progress_bar(
        in_blocks(train, TRAIN_BLOCK),
        desc="neighbours",
        total=math.ceil(len(train) / TRAIN_BLOCK),
        disable=len(train) <= TRAIN_BLOCK,  # ImageNet takes an hour of a CPU
    )
    for turn, block in enumerate(turns):
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

    torch.topk says nothing of equal ones, and a stable sort of all rows takes many times as long: only rows that have
    equal ones are sorted.
    """
    found, index = values.topk(min(count + 1, values.shape[1]))  # one more: the last may be equal to what is left out
    tied = (found[:, 1:] == found[:, :-1]).any(1).nonzero().squeeze(1)
    for rows in tied.split(TIED_ROWS):
        sorted_rows = values[rows].sort(descending=True, stable=True)
        found[rows], index[rows] = (part[:, : found.shape[1]] for part in sorted_rows)
    return found[:, :count], index[:, :count]


def knn_accuracy(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, neighbours: int, temperature: float = 0.07
) -> float:
    """Share of test images (M, D) that a kNN classifies rightly: see `knn_predict`."""
    predicted = knn_predict(train, train_labels, test, [neighbours], temperature)[neighbours]
    return float(is_right(predicted, test_labels).double().mean())
