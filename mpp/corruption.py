"""Corruption of patch embeddings: which patches, and mask, random or keep for each (paper, appendix B.1.2).

A pattern chooses the patches. To add one, write a function that returns their positions, and name it in PATTERNS.

B images, N patches on a grid of rows x columns, K corrupted patches, D width.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpp.config import CorruptionConfig, Grid, require
from mpp.config.imports import Registry
from mpp.runtime.randomness import DrawUniform, Stream, endless_uniforms

Positions = NDArray[np.int64]
MIN_RECTANGLE_PATCHES = 16  # of `blockwise`, as in BEiT
MIN_RECTANGLE_RATIO = 0.3  # height / width of `blockwise`, as in BEiT; the highest is its inverse


class Kind(IntEnum):
    """Replacement of a corrupted patch's embedding."""

    MASK = 0  # the learnable [mask]
    RANDOM = 1  # the embedding of another patch
    KEEP = 2  # its own embedding


class Corruption(NamedTuple):
    """The corruption of a batch (of one image: without the leading B)."""

    positions: Tensor  # (B, K) int64, ascending: which of the N patches are corrupted
    kinds: Tensor  # (B, K) int64: a Kind each
    sources: Tensor  # (B, K) int64: the position whose embedding a patch gets (its own, where it is kept)
    hidden: Tensor | None = None
    """(B, U) int64, ascending: further patches that are masked but not predicted. None: there are none."""

    def to(self, device: torch.device | str) -> "Corruption":
        """The same on a device; the host does not wait for pinned memory."""
        return Corruption(*(part if part is None else part.to(device, non_blocking=True) for part in self))

    def unseen(self) -> Tensor:
        """(B, K + U): the corrupted and the hidden patches. No property: torch 2.9 compiles none of a named tuple."""
        return self.positions if self.hidden is None else torch.cat([self.positions, self.hidden], 1)


@cache  # it is the same for all images
def corrupted_count(rate: float, count: int, unit: str = "patches") -> int:
    """K = floor(rate * N + 1/2), in decimal arithmetic, where halves go up without rounding errors of floats.

    Raises:
        UserError: none, or all, would be corrupted.
    """
    corrupted = int(Decimal(str(rate)) * count + Decimal("0.5"))
    allowed = f"a share that masks 1 to {count - 1} of {count} {unit}"
    require(0 < corrupted < count, "corruption.rate", rate, allowed)
    return corrupted


# --- patterns: (config, grid, draw_uniform) -> positions of the corrupted patches (K,) ---


def random_patches(config: CorruptionConfig, grid: Grid, draw_uniform: DrawUniform) -> Positions:
    """Any K patches."""
    return choose(config, math.prod(grid), draw_uniform)


def choose(config: CorruptionConfig, count: int, draw_uniform: DrawUniform, unit: str = "patches") -> Positions:
    """The numbers of some of `count` patches or blocks, `corruption.rate` of them."""
    order = np.argsort(draw_uniform(count), kind="stable")
    return order[: corrupted_count(config.rate, count, unit)]


def square_blocks(config: CorruptionConfig, grid: Grid, draw_uniform: DrawUniform) -> Positions:
    """Squares of `block` x `block` patches on their own grid, all or nothing (SimMIM).

    The rate is that of the squares: K is block**2 times floor(rate * squares + 1/2).

    Raises:
        UserError: the squares do not fill the grid of patches, or there is but one.
    """
    side = config.block
    rows, columns = grid
    fits = rows % side == 0 == columns % side and side < max(grid)
    require(fits, "corruption.block", side, f"a divisor of the grid of patches ({rows} x {columns}), and smaller")
    squares = np.zeros((rows // side, columns // side), bool)
    squares.flat[choose(config, squares.size, draw_uniform, "blocks")] = True
    patches = squares.repeat(side, 0).repeat(side, 1)
    return np.flatnonzero(patches)


def blockwise(config: CorruptionConfig, grid: Grid, draw_uniform: DrawUniform) -> Positions:
    """Rectangles anywhere, one after the other, until K patches are in one (BEiT, algorithm 1; MaskFeat).

    A rectangle has 16 patches or more, up to the number left to corrupt, and is from 0.3 to 1 / 0.3 times as high as
    wide, as far as whole numbers and the grid allow. Of a rectangle with more patches than are left, the first ones in
    reading order are corrupted.
    """
    least = min(MIN_RECTANGLE_PATCHES, corrupted_count(config.rate, math.prod(grid)))
    return union_of_rectangles(
        config,
        grid,
        draw_uniform,
        area=lambda number, left: least + number * max(left - MIN_RECTANGLE_PATCHES, 0),
        ratio=lambda number: MIN_RECTANGLE_RATIO ** (1 - 2 * number),  # its logarithm is uniform, as in BEiT's code
        from_corner=False,
    )


def multiblock(config: CorruptionConfig, grid: Grid, draw_uniform: DrawUniform) -> Positions:
    """Rectangles of 0.15 to 0.2 of the patches anywhere, until K patches are in one (I-JEPA's targets).

    A rectangle is from 0.75 to 1.5 times as high as wide, as far as whole numbers and the grid allow. The last one is
    cut to the number left, beginning at a corner that is drawn: all sides of the image are corrupted equally often.
    """
    patches = math.prod(grid)
    return union_of_rectangles(
        config,
        grid,
        draw_uniform,
        area=lambda number, left: (0.15 + 0.05 * number) * patches,
        ratio=lambda number: 0.75 * 2**number,
        from_corner=True,
    )


PATTERNS = Registry(
    "corruption.pattern",
    {
        "random": random_patches,
        "blocks": square_blocks,
        "blockwise": blockwise,
        "multiblock": multiblock,
    },
)
"""Patterns by name: settings, grid and a source of uniform numbers -> positions."""


def union_of_rectangles(
    config: CorruptionConfig,
    grid: Grid,
    draw_uniform: DrawUniform,
    area: Callable[[float, int], float],
    ratio: Callable[[float], float],
    from_corner: bool,
) -> Positions:
    """Rectangles within the grid, one after the other, until K patches are in one.

    Args:
        area: number in [0, 1), and patches left to corrupt -> about the patches of a rectangle.
        ratio: number in [0, 1) -> about its height / width.
        from_corner: of a rectangle with more patches than are left take the first ones from any corner on, not always
            in reading order.
    """
    rows, columns = grid
    corrupted = np.zeros(grid, bool)
    count = corrupted_count(config.rate, corrupted.size)
    while (left := count - np.count_nonzero(corrupted)) > 0:
        area_number, ratio_number, row_number, column_number = draw_uniform(4)
        size, shape = area(area_number, left), ratio(ratio_number)
        height = min(max(1, round(math.sqrt(size * shape))), rows)
        width = min(max(1, round(math.sqrt(size / shape))), columns)
        row = int(row_number * (rows - height + 1))
        column = int(column_number * (columns - width + 1))
        new = np.zeros(grid, bool)
        new[row : row + height, column : column + width] = True
        new &= ~corrupted
        order = reading_order(grid, draw_uniform(1)[0] if from_corner else 0)
        corrupted.flat[order[new.flat[order]][:left]] = True
    return np.flatnonzero(corrupted)


def reading_order(grid: Grid, number: float) -> Positions:
    """All positions (N,) in one of eight reading orders: by rows or by columns, from any corner on.

    Args:
        number: in [0, 1): which order; 0: by rows from the first patch on.
    """
    choice = int(8 * number)
    positions = np.arange(math.prod(grid)).reshape(grid)
    if choice & 4:
        positions = positions.T
    return positions[:: -1 if choice & 1 else 1, :: -1 if choice & 2 else 1].ravel()


def positions_to_hide(
    config: CorruptionConfig, grid: Grid, positions: Positions, draw_uniform: DrawUniform
) -> Positions:
    """Positions (U,) hidden but not predicted.

    Of the patches that are not corrupted, 1 - context are hidden, beginning at an edge.
    """
    order = reading_order(grid, draw_uniform(1)[0])
    from_edge = order[~np.isin(order, positions)]
    context_size = max(1, round(config.context * len(from_edge)))
    return np.sort(from_edge[: len(from_edge) - context_size])


def draw(config: CorruptionConfig, grid: Grid, seed: int, epoch: int, index: int) -> Corruption:
    """The corruption of one image: a pure function of (config, grid, seed, epoch, index). All images have the same K.

    Raises:
        UserError: no such pattern, or one that does not fit the grid.
    """
    draw_uniform = endless_uniforms(Stream.CORRUPTION, seed, epoch, index)
    patches = math.prod(grid)
    chosen = PATTERNS[config.pattern](config, grid, draw_uniform)
    positions = np.unique(chosen)  # ascending
    fits = positions.dtype == np.int64 and 0 < len(positions) == len(chosen) < patches
    if not (fits and positions[0] >= 0 and positions[-1] < patches):  # one that is drawn twice would count twice
        given = f"{config.pattern}, which chose {np.array2string(positions, threshold=8)}"
        allowed = f"one that chooses different whole numbers (int64) from 0 to {patches - 1}, not all of them"
        require(False, "corruption.pattern", given, allowed)
    count = len(positions)
    # The order in which the numbers are drawn is part of the result: the last third is not used, and hidden patches
    # come after it.
    kind_numbers, source_numbers, _ = draw_uniform(3 * count).reshape(3, count)

    kinds = (kind_numbers >= config.mask).astype(np.int64) + (kind_numbers >= config.mask + config.random)
    is_random = kinds == Kind.RANDOM.value
    others = (source_numbers * (patches - 1)).astype(np.int64)
    others += others >= positions  # any patch but itself
    drawn = [positions, kinds, np.where(is_random, others, positions)]
    if config.pattern == "multiblock":
        drawn.append(positions_to_hide(config, grid, positions, draw_uniform))
    return Corruption(*map(torch.from_numpy, drawn))


def stack(drawn: Sequence[Corruption]) -> Corruption:
    """The corruptions of images (K,) as that of a batch (B, K). Raises UserError where K differs."""
    counts = {len(each.positions) for each in drawn}
    allowed = "one that corrupts the same number of patches of all images"
    require(len(counts) == 1, "corruption.pattern", f"one that corrupts {counts} patches", allowed)
    return Corruption(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*drawn, strict=True)))


def corrupt(embeddings: Tensor, mask_token: Tensor, corruption: Corruption) -> Tensor:
    """Replace the embeddings of the corrupted patches.

    Args:
        embeddings: (B, N, D) patch embeddings, before position embeddings are added.
        mask_token: (D,) the learnable [mask].
    Returns:
        (B, N, D). Patches that are not corrupted, or kept, are unchanged; those that are hidden are [mask].
    """
    batch, patches, width = embeddings.shape
    mask_token = mask_token.to(embeddings.dtype)
    images = torch.arange(batch, device=embeddings.device)[:, None]
    flat = images * patches + corruption.sources
    replaced = F.embedding(flat, embeddings.flatten(0, 1))  # (B, K, D)
    is_masked = (corruption.kinds == int(Kind.MASK))[..., None]  # an int: the compiler takes an enum for unequal
    replaced = torch.where(is_masked, mask_token, replaced)
    embeddings = embeddings.scatter(1, corruption.positions[..., None].expand(-1, -1, width), replaced)
    if corruption.hidden is None:
        return embeddings
    hidden = corruption.hidden[..., None].expand(-1, -1, width)
    return embeddings.scatter(1, hidden, mask_token.expand(hidden.shape))
