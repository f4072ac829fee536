"""Attention, at all tokens or at the few that are looked at, and the positions that act in it (paper, appendix D.4).

B images, T tokens (prefix tokens first: [class], registers), N = rows x columns patches, K tokens that are looked at,
D width, d width of a head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Attention, RelPosBias, RotaryEmbeddingCat, apply_rot_embed_cat, resize_rel_pos_bias_table
from torch import Tensor, nn

from mpp.config import Grid, require
from mpp.models.positions import interpolate_offsets

RELATIVE = ("relative", "relative_bias", "rope")


def take(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens (B, N, D) at index (B, K): (B, K, D)."""
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))


class RelativeKeys(nn.Module):
    """An embedding for each offset of two tokens, as keys of a second attention: its logits are added (paper, D.4).

    As in the paper the offset is along the sequence, in one dimension, [class] first. The heads share the embeddings,
    as in Shaw et al. (2018); the paper does not say.

    Args:
        grid: rows and columns of patches.
        prefix: tokens before them.
        width: of a head.
    """

    def __init__(self, grid: Grid, prefix: int, width: int):
        super().__init__()
        self.grid, self.prefix = grid, prefix
        tokens = prefix + math.prod(grid)
        self.pos_embed_offsets = nn.Parameter(torch.empty(2 * tokens - 1, width))
        nn.init.trunc_normal_(self.pos_embed_offsets, std=0.02)
        place = torch.arange(tokens)
        self.register_buffer("offsets", place - place[:, None] + tokens - 1, persistent=False)  # (query, key)

    def forward(self, queries: Tensor, index: Tensor | None, scale: float) -> Tensor:
        """Logits (B, heads, K, T) of queries (B, heads, K, d) at index (B, K)."""
        logits = queries @ self.pos_embed_offsets.to(queries.dtype).T * scale  # (B, heads, K, 2 T - 1)
        columns = self.offsets[None, None] if index is None else self.offsets[index][:, None]
        return logits.gather(-1, columns.expand(*logits.shape[:2], -1, -1))

    def resample(self, name: str, table: Tensor, old: Grid | None) -> Tensor:
        """Offsets of another grid, as those of this one."""
        return interpolate_offsets(table, self.grid, self.prefix, old)


class Biases(nn.Module):
    """A learned bias for each offset in rows and columns, by head: timm's (Swin, BEiT), one table a block.

    Args:
        grid: rows and columns of patches.
        prefix: tokens before them, at most one.
        heads: of the attention.
    """

    def __init__(self, grid: Grid, prefix: int, heads: int):
        super().__init__()
        require(prefix <= 1, "model.position", "relative_bias", "another one with registers: timm's biases know none")
        self.biases = RelPosBias(grid, heads, prefix)

    def forward(self, queries: Tensor, index: Tensor | None, scale: float) -> Tensor:
        """Logits (B or 1, heads, K, T) to add, of queries at index (B, K)."""
        biases = self.biases.get_bias()
        return biases if index is None else biases[0][:, index].transpose(0, 1)

    def resample(self, name: str, table: Tensor, old: Grid | None) -> Tensor:
        """Biases of another grid, as those of this one."""
        (rows, columns), extra = self.biases.window_size, 3 * self.biases.prefix_tokens
        offsets = len(table) - extra  # of the other grid: a line as this one is, or `old`, or square
        line = (offsets + 1) // 2
        square = (math.isqrt(offsets) + 1) // 2
        old = (1, line) if rows == 1 else (line, 1) if columns == 1 else old or (square, square)
        shape = tuple(self.biases.relative_position_bias_table.shape)
        return resize_rel_pos_bias_table(table, self.biases.window_size, shape, old_window_size=old)


class Rotation(nn.Module):
    """Queries and keys turned by their row and column: timm's rotary embeddings, of patches alone.

    Args:
        grid: rows and columns of patches.
        prefix: tokens before them, which are not turned.
        width: of a head.
    """

    def __init__(self, grid: Grid, prefix: int, width: int):
        super().__init__()
        require(width % 4 == 0, "model.width / model.heads", width, "a multiple of 4 with model.position=rope")
        patches = RotaryEmbeddingCat(width, in_pixels=False, feat_shape=list(grid)).get_embed()  # (N, 2 d)
        unturned = torch.cat([torch.zeros(prefix, width), torch.ones(prefix, width)], dim=1)  # sines; cosines
        self.register_buffer("angles", torch.cat([unturned, patches]), persistent=False)  # (T, 2 d)

    def forward(self, vectors: Tensor, index: Tensor | None) -> Tensor:
        """Queries or keys (B, heads, K, d) of the tokens at index (B, K), turned."""
        angles = self.angles if index is None else self.angles[index][:, None]
        return apply_rot_embed_cat(vectors, angles).to(vectors.dtype)


class PositionedAttention(Attention):
    """timm's attention, in which positions act: see `set_position`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.rotation: Rotation | None = None
        self.added: RelativeKeys | Biases | None = None
        self.lines: tuple[str, str, dict[str, int]] | None = None  # tokens to lines, and back

    def set_position(self, position: str, grid: Grid, prefix: int, along: str | None = None) -> None:
        """Let the places of query and key matter.

        Args:
            position: one of RELATIVE; with another, places do not matter here.
            grid: rows and columns of patches.
            prefix: tokens before them.
            along: rows or columns: tokens see those of their line alone, and places are those in it; prefix is 0 then.
        Raises:
            UserError: a position that does not go with these numbers.
        """
        if along == "rows":
            self.lines = ("b (h w) d -> (b h) w d", "(b h) w d -> b (h w) d", {"h": grid[0]})
            grid = (1, grid[1])
        elif along == "columns":
            self.lines = ("b (h w) d -> (b w) h d", "(b w) h d -> b (h w) d", {"w": grid[1]})
            grid = (grid[0], 1)
        if position == "relative":
            self.added = RelativeKeys(grid, prefix, self.head_dim)
        elif position == "relative_bias":
            self.added = Biases(grid, prefix, self.num_heads)
        elif position == "rope":
            self.rotation = Rotation(grid, prefix, self.head_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise NotImplementedError("this attention takes no mask")
        if self.lines is None:
            return attention_at(self, x, None)
        fold, unfold, sizes = self.lines
        return rearrange(attention_at(self, rearrange(x, fold, **sizes), None), unfold, **sizes)


def is_known(attention: nn.Module | None) -> bool:
    """Whether `attention_at` knows all that this attention does: timm's, or ours, without a gate."""
    plain = type(attention) in (Attention, PositionedAttention) and type(attention.qkv) is nn.Linear
    return plain and getattr(attention, "gate", None) is None and getattr(attention, "lines", None) is None


def positioned(
    attention: Attention, queries: Tensor, keys: Tensor, index: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries and keys turned, and logits to add, where positions act in this attention."""
    rotation, added = getattr(attention, "rotation", None), getattr(attention, "added", None)
    if rotation is not None:
        queries, keys = rotation(queries, index), rotation(keys, None)
    return queries, keys, None if added is None else added(queries, index, attention.scale).to(queries.dtype)


def attention_at(attention: Attention, tokens: Tensor, index: Tensor | None) -> Tensor:
    """Attention with the tokens at `index` (B, K) as its only queries; None: all. (B, T, D) to (B, K, D)."""
    heads, width = attention.num_heads, attention.qkv.weight.shape[0] // 3
    weight, bias = attention.qkv.weight, attention.qkv.bias
    query_bias, key_value_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    queries = F.linear(tokens if index is None else take(tokens, index), weight[:width], query_bias)  # (B, K, width)
    keys_values = F.linear(tokens, weight[width:], key_value_bias)  # (B, T, 2 * width)
    queries = queries.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, heads, K, width / heads)
    keys, values = keys_values.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    queries, keys, added = positioned(attention, queries, keys, index)
    if attention.fused_attn:
        dropout = attention.attn_drop.p if attention.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=added, dropout_p=dropout)
    else:
        logits = queries * attention.scale @ keys.transpose(-2, -1)
        weights = (logits if added is None else logits + added).softmax(-1)
        mixed = attention.attn_drop(weights) @ values
    return attention.proj_drop(attention.proj(attention.norm(mixed.transpose(1, 2).flatten(2))))
