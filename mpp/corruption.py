"""Corruption of patch embeddings: which patches, what becomes of each. Pure functions (paper, appendix B.1.2).

Which patches is a pattern's choice. To add one, write a function that chooses positions and name it in PATTERNS.

B images, N patches on a grid of rows x columns, K corrupted patches, D width.
"""

import math
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpp.config import CorruptionConfig, Grid, require
from mpp.errors import UserError
from mpp.runtime.randomness import Numbers, Stream, uniforms

LEAST = 16  # patches of a rectangle of `blockwise`, and how flat one may be (BEiT)
FLATTEST = 0.3


class Kind(IntEnum):
    """What becomes of a corrupted patch's embedding."""

    MASK = 0  # the learnable [mask]
    RANDOM = 1  # the embedding of another patch
    KEEP = 2  # as it is


class Corruption(NamedTuple):
    """The corruption of a batch (of one image: without the leading B)."""

    positions: Tensor  # (B, K) int64, ascending: which of the N patches are corrupted
    kinds: Tensor  # (B, K) int64: a Kind each
    sources: Tensor  # (B, K) int64: the position whose embedding a patch gets (its own, where it is kept)
    shifts: Tensor  # (B, K) int64: 0: the source is in the same image; else a random number that chooses another image
    dropped: Tensor  # (B, U) int64, ascending: others that are hidden as by [mask], and not predicted; mostly U is 0

    def to(self, device: torch.device) -> "Corruption":
        """The same on a device."""
        return Corruption(*(part.to(device, non_blocking=True) for part in self))


def corrupted_count(rate: float, count: int, what: str = "patches") -> int:
    """K = floor(rate * N + 1/2), in decimal arithmetic: halves go up, whatever a float makes of them.

    Raises:
        UserError: none, or all, would be corrupted.
    """
    corrupted = int((Decimal(str(rate)) * count).quantize(Decimal(1), rounding=ROUND_HALF_UP))
    if not 0 < corrupted < count:
        raise UserError(
            f"corruption.rate is {rate}, which corrupts {corrupted} of {count} {what}; "
            f"it must leave between 1 and {count - 1} corrupted"
        )
    return corrupted


def anywhere(config: CorruptionConfig, grid: Grid, numbers: Numbers) -> NDArray[np.int64]:
    """Any K patches."""
    patches = math.prod(grid)
    return np.argsort(numbers(patches), kind="stable")[: corrupted_count(config.rate, patches)]


def whole_blocks(config: CorruptionConfig, grid: Grid, numbers: Numbers) -> NDArray[np.int64]:
    """Squares of `block` x `block` patches on their own grid, all or nothing (SimMIM).

    The rate is that of the squares: K is block**2 times floor(rate * squares + 1/2).

    Raises:
        UserError: the squares do not fill the grid of patches, or there is but one.
    """
    side, (rows, columns) = config.block, grid
    fits = rows % side == 0 == columns % side and side < max(grid)
    require(fits, "corruption.block", side, f"a divisor of the grid of patches ({rows} x {columns}), and smaller")
    coarse = (rows // side, columns // side)
    hidden = np.zeros(coarse, bool)
    squares = np.argsort(numbers(hidden.size), kind="stable")
    hidden.flat[squares[: corrupted_count(config.rate, hidden.size, "blocks")]] = True
    return np.flatnonzero(hidden.repeat(side, 0).repeat(side, 1))


def rectangles(config: CorruptionConfig, grid: Grid, numbers: Numbers) -> NDArray[np.int64]:
    """Rectangles anywhere, one after the other, until K patches are in one (BEiT, algorithm 1; MaskFeat).

    A rectangle has from 16 patches to as many as are left to corrupt, and is from 0.3 to 1 / 0.3 times as high as wide:
    both in so far as its sides are whole numbers and the grid has room. Where K, or what is left of it, is below 16,
    so is what is taken: of the rectangle that would be too much, the first patches in reading order.
    """
    hidden = np.zeros(grid, bool)
    count = corrupted_count(config.rate, hidden.size)
    while (left := count - np.count_nonzero(hidden)) > 0:
        size, flatness, down, right = numbers(4)
        area = min(LEAST, count) + size * max(left - LEAST, 0)
        ratio = FLATTEST ** (1 - 2 * flatness)  # its logarithm is uniform, as in BEiT's code
        inside = rectangle(grid, area, ratio, down, right)
        hidden.flat[np.flatnonzero(inside & ~hidden)[:left]] = True
    return np.flatnonzero(hidden)


def large_rectangles(config: CorruptionConfig, grid: Grid, numbers: Numbers) -> NDArray[np.int64]:
    """Rectangles of 0.15 to 0.2 of the patches anywhere, until K patches are in one (I-JEPA's targets).

    A rectangle is from 0.75 to 1.5 times as high as wide, as far as whole numbers and the grid allow. Of the last one
    there is what K leaves, from a corner on that is drawn: no side of the image is hidden less often for it.
    """
    hidden = np.zeros(grid, bool)
    count = corrupted_count(config.rate, hidden.size)
    while (left := count - np.count_nonzero(hidden)) > 0:
        size, flatness, down, right, corner = numbers(5)
        area, ratio = (0.15 + 0.05 * size) * hidden.size, 0.75 * 2**flatness
        inside = rectangle(grid, area, ratio, down, right)
        new = np.flatnonzero(inside & ~hidden)
        hidden.flat[new[np.argsort(rank_from_corner(grid, corner)[new])][:left]] = True
    return np.flatnonzero(hidden)


def rectangle(grid: Grid, area: float, ratio: float, down: float, right: float) -> NDArray[np.bool_]:
    """A rectangle of about that area and height / width within the grid; `down` and `right`, in [0, 1), place it."""
    height, width = (max(1, round(side)) for side in (math.sqrt(area * ratio), math.sqrt(area / ratio)))
    height, width = min(height, grid[0]), min(width, grid[1])
    top, start = int(down * (grid[0] - height + 1)), int(right * (grid[1] - width + 1))
    inside = np.zeros(grid, bool)
    inside[top : top + height, start : start + width] = True
    return inside


def rank_from_corner(grid: Grid, number: float) -> NDArray[np.int64]:
    """Each patch's rank (N,) in a reading order, of which a number in [0, 1) draws one of eight: by rows or by columns,
    from any corner on."""
    order, choice = np.arange(math.prod(grid)).reshape(grid), int(8 * number)
    turned = order if choice < 4 else order.T
    turned = turned[:: 1 - 2 * (choice & 1), :: 1 - (choice & 2)]
    rank = np.empty(order.size, np.int64)
    rank[turned.ravel()] = np.arange(order.size)
    return rank


def beside_the_context(
    config: CorruptionConfig, grid: Grid, positions: NDArray[np.int64], numbers: Numbers
) -> NDArray[np.int64]:
    """What is neither seen nor predicted: of all but the corrupted patches those along an edge, U in every image."""
    others = np.setdiff1d(np.arange(math.prod(grid)), positions)
    seen = max(1, round(config.context * len(others)))
    rank = rank_from_corner(grid, numbers(1)[0])[others]
    return np.sort(others[np.argsort(rank)[: len(others) - seen]])


PATTERNS: dict[str, Callable[[CorruptionConfig, Grid, Numbers], NDArray[np.int64]]] = {
    "random": anywhere,
    "blocks": whole_blocks,
    "blockwise": rectangles,
    "multiblock": large_rectangles,
}


def draw(config: CorruptionConfig, grid: Grid, seed: int, epoch: int, index: int) -> Corruption:
    """The corruption of one image: a pure function of (config, grid, seed, epoch, index). All images have the same K.

    Raises:
        UserError: no such pattern, or one that does not fit the grid.
    """
    if config.pattern not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise UserError(
            f"corruption.pattern is {config.pattern}; it must be one of {known}, or registered by --import FILE"
        )
    numbers, patches = uniforms(Stream.CORRUPTION, seed, epoch, index), math.prod(grid)
    positions = np.sort(PATTERNS[config.pattern](config, grid, numbers))
    count = len(positions)
    kind, other, image = numbers(count), numbers(count), numbers(count)
    kinds = np.digitize(kind, [config.mask, config.mask + config.random])
    others = (other * (patches - 1)).astype(np.int64)
    others += others >= positions  # any position but its own
    shifts = np.zeros(count, dtype=np.int64)
    if config.source == "batch":
        others = (other * patches).astype(np.int64)  # another image's patch may stand anywhere
        shifts = (image * 2**31).astype(np.int64) + 1
    random = kinds == Kind.RANDOM
    sources, shifts = np.where(random, others, positions), np.where(random, shifts, 0)
    dropped = np.empty(0, np.int64)
    if config.pattern == "multiblock":
        dropped = beside_the_context(config, grid, positions, numbers)
    return Corruption(*(torch.from_numpy(a) for a in (positions, kinds.astype(np.int64), sources, shifts, dropped)))


def corrupt(embeddings: Tensor, mask_token: Tensor, corruption: Corruption) -> Tensor:
    """Replace the embeddings of the corrupted patches.

    Args:
        embeddings: (B, N, D) patch embeddings, before position embeddings are added.
        mask_token: (D,) the learnable [mask].
        corruption: of this batch.
    Returns:
        (B, N, D). Patches that are not corrupted, or kept, are unchanged; those that are dropped are [mask].
    """
    batch, _, width = embeddings.shape
    images = torch.arange(batch, device=embeddings.device)[:, None]  # (B, 1)
    others = 1 + (corruption.shifts - 1) % max(batch - 1, 1)  # an image after this one, never itself
    images = (images + torch.where(corruption.shifts > 0, others, 0)) % batch  # (B, K)
    flat = images * embeddings.shape[1] + corruption.sources
    replaced = torch.nn.functional.embedding(flat, embeddings.flatten(0, 1))  # (B, K, D)
    masked = (corruption.kinds == int(Kind.MASK))[..., None]  # an int: the compiler takes an enum for unequal
    replaced = torch.where(masked, mask_token.to(embeddings.dtype), replaced)
    embeddings = embeddings.scatter(1, corruption.positions[..., None].expand(-1, -1, width), replaced)
    if corruption.dropped.shape[1] == 0:
        return embeddings
    blank = mask_token.to(embeddings.dtype).expand(*corruption.dropped.shape, -1)
    return embeddings.scatter(1, corruption.dropped[..., None].expand(-1, -1, width), blank)
