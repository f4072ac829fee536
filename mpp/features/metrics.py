"""How much of what was hidden is predicted, beside three trivial baselines.

Sums are collected batch by batch and process by process, and divided at the end: an uneven last batch weighs what it
should. B images, N patches, K corrupted patches, D width of features.
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
DISTANCES = 2**22  # between patches, of several images at a time: what bounds the memory, to 16 MB


def nearest_visible(positions: Tensor, grid: Grid, dropped: Tensor | None = None) -> Tensor:
    """For each corrupted patch the two nearest ones that are not corrupted: (B, K) positions to (B, K, 2) positions.

    `dropped` (B, U) are not seen either.

    Nearest on a grid of N = rows x columns patches, centre to centre; of equally near ones the first in reading order.
    Where one patch alone is not corrupted, it is both.
    """
    patches, beyond = math.prod(grid), grid[0] ** 2 + grid[1] ** 2  # no two patches are as far apart
    place = torch.arange(patches, dtype=torch.int32, device=positions.device)
    rows, columns = place // grid[1], place % grid[1]
    apart = (rows[:, None] - rows) ** 2 + (columns[:, None] - columns) ** 2  # (N, N)
    corrupted = torch.zeros(len(positions), patches, dtype=torch.bool, device=positions.device)
    corrupted.scatter_(1, positions if dropped is None else torch.cat([positions, dropped], 1), True)
    hidden = corrupted.int() * beyond  # (B, N)
    found = []
    at_a_time = max(1, DISTANCES // (positions.shape[1] * patches))  # images
    for at, far in zip(positions.split(at_a_time), hidden.split(at_a_time), strict=True):
        distances = apart[at].add_(far[:, None])  # (b, K, N)
        first = distances.argmin(-1, keepdim=True)
        second = distances.scatter_(-1, first, beyond - 1).argmin(-1, keepdim=True)
        found.append(torch.cat([first, second], -1))
    return torch.cat(found)


def mean_in_a_row(one: Tensor, other: Tensor) -> Tensor:
    """The means of patches (B, K, C, P, P), of uint8 with halves going up, as images of a row, (B, C, P, K * P)."""
    whole = one.dtype == torch.uint8
    mean = ((one.int() + other.int() + 1) // 2).to(torch.uint8) if whole else (one + other) / 2
    return rearrange(mean, "b k c p q -> b c p (k q)")


@torch.no_grad()
def measure(objective: Objective, predictions: Tensor, images: Tensor, corruption: Corruption) -> Sums:
    """Counts for `summarize`, additive over batches; none of an objective without colours.

    Args:
        predictions: (B, K, outputs).
        images: (B, C, H, W), clean.
        corruption: what the model saw.
    """
    if objective.palette is None:
        return {}
    truth = objective.labels(objective.targets(images, corruption.positions))  # (B, K, cells * S)
    right = (objective.labels(objective.decide(predictions)) == truth).double().mean(-1)  # (B, K): share of cells
    rows, columns = (side // objective.patch_size for side in images.shape[-2:])
    two = nearest_visible(corruption.positions, (rows, columns), corruption.dropped).unbind(-1)
    copied = objective.labels(objective.targets(images, two[0]))
    row = mean_in_a_row(*(patches_at(images, each, objective.patch_size) for each in two))
    places = torch.arange(truth.shape[1], device=images.device).expand(truth.shape[:2])
    guessed = objective.labels(objective.targets(row, places))
    sums = {}
    for kind in Kind:
        of_kind = corruption.kinds == kind
        sums[f"count_{kind.name.lower()}"] = of_kind.sum().double()
        sums[f"right_{kind.name.lower()}"] = (right * of_kind).sum()
    masked = corruption.kinds == Kind.MASK
    sums["right_nearest"] = ((copied == truth).double().mean(-1) * masked).sum()
    sums["right_two_nearest"] = ((guessed == truth).double().mean(-1) * masked).sum()
    sums["colors"] = objective.palette.count(truth[masked])
    return sums


@torch.no_grad()
def measure_features(predictions: Tensor, targets: Tensor, positions: Tensor, patches: int) -> Sums:
    """Moments for `summarize`, additive over batches: of features that are predicted and of those that were to be.

    Args:
        predictions, targets: (B, K, D).
        positions: (B, K), of N `patches`.
    """
    sums = {"features": targets.new_full((), targets[..., 0].numel(), dtype=torch.double)}
    for name, values in (("target", targets), ("prediction", predictions)):
        rows = values.flatten(0, 1).double()
        sums |= {f"{name}_sum": rows.sum(0), f"{name}_products": rows.T @ rows}  # (D,), (D, D)
    rows, places = targets.flatten(0, 1).double(), positions.flatten()
    sums["place_count"] = rows.new_zeros(patches).index_add_(0, places, torch.ones_like(rows[:, 0]))
    sums["place_sum"] = rows.new_zeros(patches, rows.shape[1]).index_add_(0, places, rows)
    return sums


def spread_of(sums: Sums, name: str) -> dict[str, float]:
    """How far the features of that name spread over all patches of all images.

    Returns:
        `NAME_deviation`: over the patches, the root of its square's mean over the channels; `NAME_share`: that square's
        share in the features' mean square, which is 0 where all patches have the same; `NAME_rank`: the effective rank
        (see `ranks_of_grams`) of what is left without the mean.
    """
    count = sums["features"]
    mean = sums[f"{name}_sum"] / count
    products = sums[f"{name}_products"] / count
    around = products - torch.outer(mean, mean)
    variance, whole = (float(each.diagonal().mean().clamp(min=0)) for each in (around, products))
    spread = {"deviation": math.sqrt(variance), "share": variance / whole if whole else 0.0}
    return {f"{name}_{key}": value for key, value in (spread | {"rank": ranks_of_grams(around[None])[0]}).items()}


def share_of_place(sums: Sums) -> float | None:
    """Which share of the targets' variance their places explain, without bias; None: too few images to say so.

    Near 1, targets say where a patch is, and nothing of what is there.
    """
    count, seen = sums["features"], sums["place_count"] > 0
    freedom = count - seen.sum()
    whole = sums["target_products"].diagonal().sum()
    of_places = (sums["place_sum"][seen].square().sum(1) / sums["place_count"][seen]).sum()
    around = whole - sums["target_sum"].square().sum() / count
    if freedom <= 0 or around <= 0:
        return None
    return float(1 - (whole - of_places) / freedom * (count - 1) / around)


def add(one: Sums, other: Sums) -> Sums:
    """Both together; a name that only one of them has keeps its value."""
    return one | {name: one[name] + value if name in one else value for name, value in other.items()}


def total(sums: Sums) -> Sums:
    """Sums over all processes, on the CPU. A process that saw no image of few may have none."""
    parts = gather_object([{name: value.cpu() for name, value in sums.items()}])
    return reduce(add, parts, {})


def summarize(sums: Sums) -> dict[str, float]:
    """Accuracies as shares; none where nothing was measured.

    `accuracy`, the headline, is of the masked patches; `accuracy_random` and `accuracy_keep` of the two other kinds.
    On the same masked patches: `most_frequent`, the best that one colour for all can reach (chosen on these very
    patches), `nearest`, a copy of the nearest uncorrupted patch, and `two_nearest`, the mean of the two nearest.
    Of features, how far they spread: see `spread_of`; and `target_place`: see `share_of_place`.
    """
    result: dict[str, float] = {}
    if "features" in sums:
        result |= spread_of(sums, "target") | spread_of(sums, "prediction")
        place = share_of_place(sums)
        result |= {} if place is None else {"target_place": place}
    for kind, name in (("mask", "accuracy"), ("random", "accuracy_random"), ("keep", "accuracy_keep")):
        if sums.get(f"count_{kind}", 0) > 0:
            result[name] = float(sums[f"right_{kind}"] / sums[f"count_{kind}"])
    if sums.get("count_mask", 0) > 0:
        result["most_frequent"] = float(sums["colors"].amax(-1).sum() / sums["colors"].sum())
        for name in ("nearest", "two_nearest"):
            result[name] = float(sums[f"right_{name}"] / sums["count_mask"])
    return result


def is_right(predicted: Tensor, labels: Tensor) -> Tensor:
    """Whether predicted classes (B,) are right: labels (B,), or (B, L) of which any counts (ImageNet ReaL)."""
    return (predicted[:, None] == labels.reshape(len(labels), -1)).any(1)
