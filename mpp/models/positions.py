"""Position embeddings that are added to tokens, and what becomes of tables on another grid (paper, appendix D.4).

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
        grid: rows and columns of patches.
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
        grid: rows and columns of patches.
        prefix: tokens before them, which have rows of their own.
        width: of the tokens.
    Raises:
        UserError: a width that does not go with the kind.
    """

    def __init__(self, kind: str, grid: Grid, prefix: int, width: int):
        super().__init__()
        self.kind, self.grid, self.prefix = kind, grid, prefix
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
        rows = self.pos_embed_rows[:, None].expand(-1, self.grid[1], -1)
        columns = self.pos_embed_columns.expand(self.grid[0], -1, -1)
        patches = torch.cat([rows, columns], dim=-1).flatten(0, 1)
        return patches if self.pos_embed_prefix is None else torch.cat([self.pos_embed_prefix, patches])

    def resample(self, name: str, table: Tensor, old: Grid | None) -> Tensor:
        """A table of another grid, as this one's `name`: in two dimensions, as timm does, or along its only one."""
        if name == "pos_embed":
            before = list(old) if old else None
            return resample_abs_pos_embed(table[None], list(self.grid), before, num_prefix_tokens=self.prefix)[0]
        count = len(getattr(self, name))
        line = F.interpolate(table.T[None, :, None], (1, count), mode="bicubic", antialias=True)  # (1, D / 2, 1, count)
        return line[0, :, 0].T


def interpolate_offsets(table: Tensor, grid: Grid, prefix: int, old: Grid | None = None) -> Tensor:
    """Embeddings of offsets along the sequence of another grid, as those of this one.

    An offset along the sequence is so many rows and columns, of all ways to say it the one with the fewest columns. It
    is found between the four nearest offsets of the other grid.

    Args:
        table: (2 * (prefix + N') - 1, d), of the other grid's N' patches.
        grid: this one's rows and columns.
        prefix: tokens before the patches.
        old: rows and columns of the other grid; None: it is square, or a line where this is one.
    Returns:
        (2 * (prefix + N) - 1, d).
    """
    before = (len(table) + 1) // 2 - prefix  # patches of the other grid
    side = math.isqrt(before)
    old = (1, before) if grid[0] == 1 else (before, 1) if grid[1] == 1 else old or (side, side)
    reach = prefix + math.prod(grid) - 1
    offsets = torch.arange(-reach, reach + 1)
    down = torch.div(offsets + grid[1] // 2, grid[1], rounding_mode="floor") if grid[0] > 1 else 0 * offsets
    right = offsets - down * grid[1]
    at = [part * (o - 1) / max(n - 1, 1) for part, o, n in zip((down, right), old, grid, strict=True)]
    result = torch.zeros(len(offsets), table.shape[1], dtype=table.dtype)
    for near_row in (0, 1):
        for near_column in (0, 1):
            row, column = at[0].floor() + near_row, at[1].floor() + near_column
            weight = (1 - (at[0] - row).abs()) * (1 - (at[1] - column).abs())
            place = (row * old[1] + column).long() + (len(table) - 1) // 2
            result += weight[:, None].to(table.dtype) * table[place.clamp(0, len(table) - 1)]
    return result
