"""Position embeddings that are added to tokens, and their resampling to another grid (paper, appendix D.4).

T tokens (prefix tokens first: [class], registers), N = rows x columns patches, D width.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed, resample_abs_pos_embed
from torch import Tensor, nn

from mpp.config import Grid, require

ABSOLUTE = ("learned", "learned_2d", "sincos_2d")


def sincos_2d(grid: Grid, width: int) -> Tensor:
    """Fixed position embeddings (MAE): sines and cosines of the row, then of the column, at width / 4 frequencies each.

    Args:
        width: a multiple of 4.
    Returns:
        (rows * columns, width).
    """
    return build_sincos2d_pos_embed(list(grid), width, interleave_sin_cos=True)


class AbsolutePositions(nn.Module):
    """An embedding for each token, to be added to it.

    Args:
        kind: learned: a table of all tokens; learned_2d: a table of rows and one of columns, half of the width each;
            sincos_2d: fixed (prefix tokens: zeros).
        prefix: tokens before them, which have rows of their own.
        width: of the tokens.
    Raises:
        UserError: a width that does not go with the kind.
    """

    def __init__(self, kind: str, grid: Grid, prefix: int, width: int):
        super().__init__()
        self.kind = kind
        self.grid = grid
        self.prefix = prefix
        if kind == "learned":
            self.pos_embed = nn.Parameter(torch.empty(prefix + math.prod(grid), width))
        elif kind == "learned_2d":
            require(width % 2 == 0, "model.width", width, "even with model.position=learned_2d")
            self.pos_embed_rows = nn.Parameter(torch.empty(grid[0], width // 2))
            self.pos_embed_columns = nn.Parameter(torch.empty(grid[1], width // 2))
            self.pos_embed_prefix = nn.Parameter(torch.empty(prefix, width)) if prefix else None
        else:
            require(width % 4 == 0, "model.width", width, "a multiple of 4 with model.position=sincos_2d")
            table = torch.cat([torch.zeros(prefix, width), sincos_2d(grid, width)])
            self.register_buffer("table", table, persistent=False)
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self) -> Tensor:
        """The embeddings, (T, D)."""
        if self.kind == "learned":
            return self.pos_embed
        if self.kind == "sincos_2d":
            return self.table
        grid_rows, grid_columns = self.grid
        rows = self.pos_embed_rows[:, None].expand(-1, grid_columns, -1)
        columns = self.pos_embed_columns.expand(grid_rows, -1, -1)
        patches = torch.cat([rows, columns], dim=-1).flatten(0, 1)  # (N, D)
        if self.pos_embed_prefix is None:
            return patches
        return torch.cat([self.pos_embed_prefix, patches])

    def resample(self, name: str, table: Tensor, old: Grid | None) -> Tensor:
        """A table of another grid, as this one's `name`: in two dimensions, as timm does, or along its only one."""
        if name == "pos_embed":
            before = list(old) if old else None
            return resample_abs_pos_embed(table[None], list(self.grid), before, num_prefix_tokens=self.prefix)[0]
        count = len(getattr(self, name))
        line = F.interpolate(table.T[None, :, None], (1, count), mode="bicubic", antialias=True)  # (1, D / 2, 1, count)
        return line[0, :, 0].T


def other_grid(grid: Grid, length: int, side: int, known: Grid | None) -> Grid:
    """The grid that a table of offsets is for: a line where `grid` is one, else the known one, else a square.

    Args:
        length: patches of the line.
        side: patches of a side of the square.
    """
    rows, columns = grid
    if rows == 1:
        return 1, length
    if columns == 1:
        return length, 1
    return known or (side, side)


def interpolate_offsets(table: Tensor, grid: Grid, prefix: int, old: Grid | None = None) -> Tensor:
    """Embeddings of offsets along the sequence of another grid, as those of this one.

    An offset along the sequence is taken for rows and columns: of all ways to write it, that with the fewest columns.
    It is interpolated between the four nearest offsets of the other grid.

    Args:
        table: (2 * (prefix + N') - 1, d), of the other grid's N' patches.
        grid: this one's rows and columns.
        old: rows and columns of the other grid; None: it is square, or a line where this is one.
    Returns:
        (2 * (prefix + N) - 1, d).
    """
    rows, columns = grid
    old_patches = (len(table) + 1) // 2 - prefix
    old_rows, old_columns = other_grid(grid, old_patches, math.isqrt(old_patches), old)

    most = prefix + math.prod(grid) - 1  # the largest offset
    offsets = torch.arange(-most, most + 1)
    down = torch.zeros_like(offsets)
    if rows > 1:
        down = torch.div(offsets + columns // 2, columns, rounding_mode="floor")
    right = offsets - down * columns
    old_down = down * (old_rows - 1) / max(rows - 1, 1)  # in rows and columns of the other grid
    old_right = right * (old_columns - 1) / max(columns - 1, 1)

    result = torch.zeros(len(offsets), table.shape[1], dtype=table.dtype)
    for next_row in (0, 1):
        for next_column in (0, 1):
            row = old_down.floor() + next_row
            column = old_right.floor() + next_column
            weight = (1 - (old_down - row).abs()) * (1 - (old_right - column).abs())
            place = (row * old_columns + column).long() + (len(table) - 1) // 2
            place = place.clamp(0, len(table) - 1)
            result += weight[:, None].to(table.dtype) * table[place]
    return result
