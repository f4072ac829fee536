"""Accuracy of predicted patches and of three trivial baselines, spread of predicted features, rank of features.

Sums are collected batch by batch and process by process, and divided at the end, so an uneven last batch has its proper
weight. B images, N patches, K corrupted patches, D width of features, M held-out images.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object, reduce
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from mpp.config import Grid
from mpp.corruption import Corruption, Kind
from mpp.errors import NPZ_ERRORS, UserError
from mpp.objectives import Objective, patchify, select_patches
from mpp.runtime.files import complete

Sums = dict[str, Tensor]
COUNTS_FILE = "heldout_patches.npz"
COUNTED = ("masked", "model", "nearest", "two_nearest")
"""The columns of counts by image: masked patches, and the right ones of the model and of two baselines (see
`summarize`)."""
ACCURACIES = ("accuracy", "accuracy_random", "accuracy_keep")
"""Scalars by Kind."""


# --- sums, and what they say ---


def add_sums(one: Sums, other: Sums) -> Sums:
    """Both together; a name that only one of them has keeps its value."""
    return one | {name: one.get(name, 0) + value for name, value in other.items()}


def count_right(right: Tensor) -> Sums:
    """Sums of an accuracy, of predictions that are right or not."""
    right = right.double()
    return {"right": right.sum(), "tested": torch.ones_like(right).sum()}


def sum_over_processes(sums: Sums) -> Sums:
    """Sums over all processes, float64 on the CPU. Those of a process without images may be empty.

    Only names and shapes are gathered as objects: products of features may have megabytes.
    """
    shapes: dict[str, torch.Size] = {}
    for of_process in gather_object([{name: value.shape for name, value in sums.items()}]):
        shapes |= of_process
    totals = {}
    for name, shape in shapes.items():
        own = sums.get(name, torch.zeros(shape)).to(PartialState().device, torch.double)
        totals[name] = reduce(own, "sum").cpu()
    return totals


def summarize(sums: Sums) -> dict[str, float]:
    """Accuracies as shares, and spreads of features; none where nothing was measured.

    `accuracy`, the headline, is of the masked patches; `accuracy_random` and `accuracy_keep` of the two other kinds.
    On the same masked patches: `most_frequent`, the best that one colour for all can reach (chosen on these very
    patches), `nearest`, a copy of the nearest uncorrupted patch, and `two_nearest`, the mean of the two nearest.
    Of features, how far they spread (see `feature_spread`), and how much of that their places explain (`place_share`).
    """
    scalars: dict[str, float] = {}
    if "features" in sums:
        scalars |= feature_spread(sums, "target") | feature_spread(sums, "prediction") | place_share(sums)
    if "counts" in sums:
        shares = sums["counts"] / sums["counts"][0]  # (4, 3), NaN of a kind without patches
        named = dict(zip(ACCURACIES, shares[1].tolist(), strict=True))
        named |= dict(zip(COUNTED[2:], shares[2:, Kind.MASK].tolist(), strict=True))
        named["most_frequent"] = float(sums["colors"].amax(-1).sum() / sums["colors"].sum())
        scalars |= {name: share for name, share in named.items() if not math.isnan(share)}
    return scalars


# --- predicted colours ---


def nearest_visible(corruption: Corruption, grid: Grid) -> Tensor:
    """For each corrupted patch the two nearest visible ones: (B, K) positions to (B, K, 2) positions.

    Nearest on a grid of N = rows x columns patches, centre to centre; of equally near ones the first in reading order.
    If only one patch is visible, it is both.
    """
    unseen = corruption.unseen()
    patches = math.prod(grid)
    places = torch.cartesian_prod(*(torch.arange(side, device=unseen.device) for side in grid))
    squared_distances = (places[:, None] - places).square().sum(-1)
    keys = squared_distances * patches + torch.arange(patches, device=unseen.device)  # of equal ones the first is least
    beyond = patches**3  # no two patches are as far apart
    is_unseen = torch.zeros(len(unseen), patches, dtype=torch.bool, device=unseen.device)
    is_unseen.scatter_(1, unseen, True)
    visible = keys[corruption.positions].masked_fill_(is_unseen[:, None], beyond)  # (B, K, N)
    two = visible.topk(2, largest=False).values
    return torch.where(two < beyond, two, two[..., :1]) % patches


@torch.no_grad()
def measure_predictions(
    objective: Objective,
    predictions: Tensor,
    images: Tensor,
    corruption: Corruption,
    image_numbers: Tensor | None = None,
    image_count: int = 0,
) -> Sums:
    """Counts for `summarize`, additive over batches; empty for an objective without colours.

    Args:
        predictions: (B, K, outputs).
        images: (B, C, H, W), clean.
        corruption: of the images that the model saw.
        image_numbers: (B,) of the images among `image_count`, for `by_image`, (image_count, 4) by COUNTED.
    """
    if objective.palette is None:
        return {}
    truth = objective.colour_classes(objective.targets(images, corruption.positions))  # (B, K, cells * S)
    guesses = objective.colour_classes(objective.decide(predictions)), *copies_of_visible(objective, images, corruption)
    right = [(guess == truth).double().mean(-1) for guess in guesses]  # (B, K) each: shares of cells
    of_kind = torch.stack([corruption.kinds == kind for kind in Kind])  # (3, B, K)
    counts = torch.stack([torch.ones_like(right[0]), *right])[:, None] * of_kind  # (4, 3, B, K), by COUNTED
    sums = {"counts": counts.sum((2, 3)), "colors": objective.palette.count(truth[of_kind[Kind.MASK]])}
    if image_numbers is not None:
        by_image = counts.new_zeros(image_count, len(COUNTED))
        sums["by_image"] = by_image.index_add_(0, image_numbers.to(counts.device), counts[:, Kind.MASK].sum(-1).T)
    return sums


def copies_of_visible(objective: Objective, images: Tensor, corruption: Corruption) -> tuple[Tensor, Tensor]:
    """Colour classes (B, K, cells * S) of the visible patches next to each corrupted one, the baselines of accuracy.

    Returns:
        Those of the nearest patch, and of the mean of the two nearest.
    """
    height, width = images.shape[-2:]
    grid = (height // objective.patch_size, width // objective.patch_size)
    first, second = nearest_visible(corruption, grid).unbind(-1)  # (B, K)
    patches = patchify(images, objective.patch_size)
    both = select_patches(patches, first).float() + select_patches(patches, second)
    round_up = images.dtype == torch.uint8  # halves of whole numbers
    mean = ((both + round_up) / 2).to(images.dtype)  # (B, K, C, P, P)
    row = rearrange(mean, "b k c p q -> b c p (k q)")  # side by side, as images
    all_of_row = torch.arange(first.shape[1], device=images.device).expand_as(first)
    nearest = objective.colour_classes(objective.targets(images, first))
    return nearest, objective.colour_classes(objective.targets(row, all_of_row))


def save_masked_counts(folder: Path, step: int, counts: NDArray[np.float64], images: Sequence[str]) -> None:
    """Write the masked patches of each held-out image, and those that are right, into the folder of a run.

    Args:
        step: of the evaluation.
        counts: (M, 4) patches, by COUNTED; of a patch with several cells, the share that is right counts.
        images: their M names.
    """
    with complete(folder / COUNTS_FILE) as partial, partial.open("wb") as file:
        np.savez_compressed(file, step=step, counts=counts, images=np.array(images, str))


def load_masked_counts(folder: Path, step: int) -> tuple[NDArray[np.float64], list[str]] | None:
    """The counts (M, 4) of the evaluation after `step`, and M names; None: they were not kept, as by earlier versions.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / COUNTS_FILE
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return (arrays["counts"], arrays["images"].tolist()) if arrays["step"] == step else None
    except NPZ_ERRORS as error:
        raise UserError(f"{path} cannot be read: {error}; delete it to evaluate without intervals") from error


# --- predicted features ---


@torch.no_grad()
def measure_features(predictions: Tensor, targets: Tensor, positions: Tensor, patch_count: int) -> Sums:
    """Moments of predicted features and of their targets for `summarize`, additive over batches.

    Args:
        predictions, targets: (B, K, D).
        positions: (B, K), of N `patch_count`.
    """
    sums = {}
    for name, features in (("prediction", predictions), ("target", targets)):
        rows = features.flatten(0, 1).double()
        sums |= {f"{name}_sum": rows.sum(0), f"{name}_products": rows.T @ rows}  # (D,), (D, D)
    places = positions.flatten()
    return sums | {
        "features": rows.new_full((), len(rows)),
        "place_count": rows.new_zeros(patch_count).index_add_(0, places, torch.ones_like(rows[:, 0])),
        "place_sum": rows.new_zeros(patch_count, rows.shape[1]).index_add_(0, places, rows),  # of targets
    }


def feature_spread(sums: Sums, name: str) -> dict[str, float]:
    """Spread of the features of that name (target or prediction) over all patches of all images.

    Returns:
        `NAME_deviation`: over the patches, the root of its square's mean over the channels; `NAME_share`: that square's
        share in the features' mean square, which is 0 where all patches have the same; `NAME_rank`: the effective rank
        (see `rank_of_gram`) of the features less their mean.
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
        f"{name}_rank": rank_of_gram(covariance),
    }


def place_share(sums: Sums) -> dict[str, float]:
    """`target_place`: share of the targets' variance that their places explain, without bias.

    Empty: there are too few images for an estimate.

    Near 1, targets tell where a patch is, and nothing of its content.
    """
    count = sums["features"]
    degrees_of_freedom = count - (sums["place_count"] > 0).sum()
    squares = sums["target_products"].diagonal().sum()
    squares_of_place_means = (sums["place_sum"].square().sum(1) / sums["place_count"].clamp(min=1)).sum()
    squares_around_mean = squares - sums["target_sum"].square().sum() / count
    if degrees_of_freedom <= 0 or squares_around_mean <= 0:
        return {}
    share = float(1 - (squares - squares_of_place_means) / degrees_of_freedom * (count - 1) / squares_around_mean)
    return {"target_place": share}


# --- features of images ---


def is_right(predicted: Tensor, labels: Tensor) -> Tensor:
    """Whether predicted classes (B,) are right: labels (B,), or (B, L) of which any counts (ImageNet ReaL)."""
    return (predicted[:, None] == labels.reshape(len(labels), -1)).any(1)


def effective_rank(features: Tensor | NDArray, device: torch.device) -> float:
    """Effective rank of features (N, D) (RankMe: Garrido et al., 2023): the number of directions in which they spread.

    A loss does not show the collapse of features; their rank does.

    Returns:
        From 1 to min(N, D): k where k orthogonal directions are equally strong; 0 where all features are 0.
    """
    rows = torch.as_tensor(features).to(device).double()
    count, width = rows.shape
    return rank_of_gram(rows @ rows.T if count < width else rows.T @ rows)


def rank_of_gram(gram: Tensor) -> float:
    """Effective rank by the inner products of rows or columns, (m, m) float64.

    The exponential of the entropy of the singular values, scaled to a sum of 1. They are the roots of the Gram matrix's
    eigenvalues, a fraction of the work of decomposing the features. Singular values below 1e-8 of the largest are then
    noise: the rank of collapsed features has a relative error of up to 1e-4, as rounding to float32 causes too. 2,048
    images take 0.17 s of a CPU core for each depth at width 768.
    """
    singular_values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    total = singular_values.sum()
    if not total > 0:
        return 0.0
    return float(torch.special.entr(singular_values / total).sum().exp())
