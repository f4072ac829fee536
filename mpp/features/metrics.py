"""Accuracy of predicted patches and of three trivial baselines, and the spread of predicted features.

Sums are collected batch by batch and process by process, and divided at the end, so an uneven last batch has its proper
weight. B images, N patches, K corrupted patches, D width of features.
"""

import math
from functools import reduce

import torch
from accelerate.utils import gather_object
from einops import rearrange
from torch import Tensor

from mpp.config import Grid
from mpp.corruption import Corruption, Kind
from mpp.features.ranks import ranks_of_grams
from mpp.objectives import Objective, patches_at

Sums = dict[str, Tensor]
DISTANCES_PER_BLOCK = 2**22  # between patches of several images: bounds the memory, to 16 MB
NOT_COUNTED = -1  # instead of a kind of corruption
ACCURACY_OF_KIND = {"mask": "accuracy", "random": "accuracy_random", "keep": "accuracy_keep"}
"""Kind of corruption -> scalar."""


def nearest_visible(positions: Tensor, grid: Grid, hidden: Tensor | None = None) -> Tensor:
    """For each corrupted patch the two nearest visible ones: (B, K) positions to (B, K, 2) positions.

    Nearest on a grid of N = rows x columns patches, centre to centre; of equally near ones the first in reading order.
    If only one patch is visible, it is both.

    Args:
        hidden: (B, U) positions that are not visible either.
    """
    rows, columns = grid
    patches = rows * columns
    beyond = rows**2 + columns**2  # no two patches are as far apart
    place = torch.arange(patches, dtype=torch.int32, device=positions.device)
    row = place // columns
    column = place % columns
    squared_distances = (row[:, None] - row) ** 2 + (column[:, None] - column) ** 2  # (N, N)

    unseen = positions if hidden is None else torch.cat([positions, hidden], 1)
    is_unseen = torch.zeros(len(positions), patches, dtype=torch.bool, device=positions.device)
    is_unseen.scatter_(1, unseen, True)
    penalties = is_unseen.int() * beyond  # (B, N)

    nearest = []
    images_per_block = max(1, DISTANCES_PER_BLOCK // (positions.shape[1] * patches))
    blocks = zip(positions.split(images_per_block), penalties.split(images_per_block), strict=True)
    for block_positions, block_penalties in blocks:
        distances = squared_distances[block_positions].add_(block_penalties[:, None])  # (b, K, N)
        first = distances.argmin(-1, keepdim=True)
        second = distances.scatter_(-1, first, beyond - 1).argmin(-1, keepdim=True)
        nearest.append(torch.cat([first, second], -1))
    return torch.cat(nearest)


def mean_in_a_row(one: Tensor, other: Tensor) -> Tensor:
    """Means of patches (B, K, C, P, P), of uint8 with halves rounded up, side by side as images (B, C, P, K * P)."""
    whole_numbers = one.dtype == torch.uint8
    mean = (one.int() + other.int() + 1) // 2 if whole_numbers else (one + other) / 2
    return rearrange(mean.to(one.dtype), "b k c p q -> b c p (k q)")


@torch.no_grad()
def measure_predictions(
    objective: Objective,
    predictions: Tensor,
    images: Tensor,
    corruption: Corruption,
    image_numbers: Tensor | None = None,
    image_count: int = 0,
    counted: Tensor | None = None,
) -> Sums:
    """Counts for `summarize`, additive over batches; empty for an objective without colours.

    Args:
        predictions: (B, K, outputs).
        images: (B, C, H, W), clean.
        corruption: of the images that the model saw.
        image_numbers: (B,) of the images among `image_count`, for `by_image`, (image_count, 4): see `MaskedCounts`.
        counted: (B, K) bool, patches that count. None: all.
    """
    if objective.palette is None:
        return {}
    truth = objective.colour_classes(objective.targets(images, corruption.positions))  # (B, K, cells * S)
    kinds = corruption.kinds if counted is None else torch.where(counted, corruption.kinds, NOT_COUNTED)
    sums = {}
    right = share_right(objective.colour_classes(objective.decide(predictions)), truth)
    for kind in Kind:
        of_kind = kinds == kind
        name = kind.name.lower()
        sums[f"count_{name}"] = of_kind.sum().double()
        sums[f"right_{name}"] = (right * of_kind).sum()

    masked = kinds == Kind.MASK
    nearest, two_nearest = copies_of_visible(objective, images, corruption)
    right_nearest = share_right(nearest, truth) * masked
    right_two_nearest = share_right(two_nearest, truth) * masked
    sums["right_nearest"] = right_nearest.sum()
    sums["right_two_nearest"] = right_two_nearest.sum()
    sums["colors"] = objective.palette.count(truth[masked])
    if image_numbers is not None:
        counts = torch.stack([masked.double(), right * masked, right_nearest, right_two_nearest]).sum(-1).T  # (B, 4)
        sums["by_image"] = counts.new_zeros(image_count, 4).index_add_(0, image_numbers.to(counts.device), counts)
    return sums


def share_right(classes: Tensor, truth: Tensor) -> Tensor:
    """The share of each patch's cells that are right: (B, K, cells * S) to (B, K)."""
    return (classes == truth).double().mean(-1)


def copies_of_visible(objective: Objective, images: Tensor, corruption: Corruption) -> tuple[Tensor, Tensor]:
    """Colour classes (B, K, cells * S) of the visible patches next to each corrupted one, the baselines of accuracy.

    Returns:
        Those of the nearest patch, and of the mean of the two nearest.
    """
    height, width = images.shape[-2:]
    grid = (height // objective.patch_size, width // objective.patch_size)
    first, second = nearest_visible(corruption.positions, grid, corruption.hidden).unbind(-1)  # (B, K)
    first_patches = patches_at(images, first, objective.patch_size)
    second_patches = patches_at(images, second, objective.patch_size)
    row = mean_in_a_row(first_patches, second_patches)
    all_of_row = torch.arange(first.shape[1], device=images.device).expand_as(first)
    nearest = objective.colour_classes(objective.targets(images, first))
    return nearest, objective.colour_classes(objective.targets(row, all_of_row))


@torch.no_grad()
def measure_features(predictions: Tensor, targets: Tensor, positions: Tensor, patch_count: int) -> Sums:
    """Moments of predicted features and of their targets for `summarize`, additive over batches.

    Args:
        predictions, targets: (B, K, D).
        positions: (B, K), of N `patch_count`.
    """
    target_rows = targets.flatten(0, 1).double()
    prediction_rows = predictions.flatten(0, 1).double()
    count, width = target_rows.shape
    places = positions.flatten()
    return {
        "features": target_rows.new_full((), count),
        "target_sum": target_rows.sum(0),  # (D,)
        "target_products": target_rows.T @ target_rows,  # (D, D)
        "prediction_sum": prediction_rows.sum(0),
        "prediction_products": prediction_rows.T @ prediction_rows,
        "place_count": target_rows.new_zeros(patch_count).index_add_(0, places, torch.ones_like(target_rows[:, 0])),
        "place_sum": target_rows.new_zeros(patch_count, width).index_add_(0, places, target_rows),
    }


def feature_spread(sums: Sums, name: str) -> dict[str, float]:
    """Spread of the features of that name (target or prediction) over all patches of all images.

    Returns:
        `NAME_deviation`: over the patches, the root of its square's mean over the channels; `NAME_share`: that square's
        share in the features' mean square, which is 0 where all patches have the same; `NAME_rank`: the effective rank
        (see `ranks_of_grams`) of the features less their mean.
    """
    count = sums["features"]
    mean = sums[f"{name}_sum"] / count
    mean_products = sums[f"{name}_products"] / count
    covariance = mean_products - torch.outer(mean, mean)
    variance = float(covariance.diagonal().mean().clamp(min=0))
    mean_square = float(mean_products.diagonal().mean().clamp(min=0))
    return {
        f"{name}_deviation": math.sqrt(variance),
        f"{name}_share": variance / mean_square if mean_square else 0.0,
        f"{name}_rank": ranks_of_grams(covariance[None])[0],
    }


def place_share(sums: Sums) -> float | None:
    """Share of the targets' variance that their places explain, without bias; None: too few images for an estimate.

    Near 1, targets tell where a patch is, and nothing of its content.
    """
    count = sums["features"]
    seen = sums["place_count"] > 0
    degrees_of_freedom = count - seen.sum()
    squares = sums["target_products"].diagonal().sum()
    squares_of_place_means = (sums["place_sum"][seen].square().sum(1) / sums["place_count"][seen]).sum()
    squares_around_mean = squares - sums["target_sum"].square().sum() / count
    if degrees_of_freedom <= 0 or squares_around_mean <= 0:
        return None
    return float(1 - (squares - squares_of_place_means) / degrees_of_freedom * (count - 1) / squares_around_mean)


def add_sums(one: Sums, other: Sums) -> Sums:
    """Both together; a name that only one of them has keeps its value."""
    both = dict(one)
    for name, value in other.items():
        both[name] = one[name] + value if name in one else value
    return both


def sum_over_processes(sums: Sums) -> Sums:
    """Sums over all processes, on the CPU. Those of a process without images may be empty."""
    on_cpu = {name: value.cpu() for name, value in sums.items()}
    return reduce(add_sums, gather_object([on_cpu]), {})


def summarize(sums: Sums) -> dict[str, float]:
    """Accuracies as shares, and spreads of features; none where nothing was measured.

    `accuracy`, the headline, is of the masked patches; `accuracy_random` and `accuracy_keep` of the two other kinds.
    On the same masked patches: `most_frequent`, the best that one colour for all can reach (chosen on these very
    patches), `nearest`, a copy of the nearest uncorrupted patch, and `two_nearest`, the mean of the two nearest.
    Of features, how far they spread: see `feature_spread`; and `target_place`: see `place_share`.
    """
    scalars: dict[str, float] = {}
    if "features" in sums:
        scalars |= feature_spread(sums, "target")
        scalars |= feature_spread(sums, "prediction")
        place = place_share(sums)
        if place is not None:
            scalars["target_place"] = place
    for kind, name in ACCURACY_OF_KIND.items():
        if sums.get(f"count_{kind}", 0) > 0:
            scalars[name] = float(sums[f"right_{kind}"] / sums[f"count_{kind}"])
    if sums.get("count_mask", 0) > 0:
        scalars["most_frequent"] = float(sums["colors"].amax(-1).sum() / sums["colors"].sum())
        for name in ("nearest", "two_nearest"):
            scalars[name] = float(sums[f"right_{name}"] / sums["count_mask"])
    return scalars


def is_right(predicted: Tensor, labels: Tensor) -> Tensor:
    """Whether predicted classes (B,) are right: labels (B,), or (B, L) of which any counts (ImageNet ReaL)."""
    return (predicted[:, None] == labels.reshape(len(labels), -1)).any(1)


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Share of predicted classes that are right: see `is_right`."""
    return float(is_right(predicted, labels).double().mean())
