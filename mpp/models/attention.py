"""Attention with all tokens or a few as queries, and positions within attention (paper, appendix D.4).

B images, T tokens (prefix tokens first: [class], registers), N = rows x columns patches, K queries, D width, d width of
a head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Attention, RelPosBias, RotaryEmbeddingCat, apply_rot_embed_cat, resize_rel_pos_bias_table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.utils.parametrize import is_parametrized

from mpp.config import Grid, require
from mpp.models.positions import interpolate_offsets, other_grid

RELATIVE = ("relative", "relative_bias", "rope")
PATCHES = "b (h w) d"  # patterns of einops: the patches of an image as one sequence,
LINES = {"rows": "(b h) w d", "columns": "(b w) h d"}  # and as one for each line


def gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, N, D) at index (B, K): (B, K, D)."""
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))


class RelativeKeys(nn.Module):
    """An embedding for each offset of two tokens, as keys of a second attention: its logits are added (paper, D.4).

    As in the paper the offset is along the sequence, in one dimension, [class] first. The heads share the embeddings,
    as in Shaw et al. (2018); the paper does not say.
    """

    def __init__(self, grid: Grid, prefix: int, width: int):
        super().__init__()
        self.grid = grid
        self.prefix = prefix
        tokens = prefix + math.prod(grid)
        self.pos_embed_offsets = nn.Parameter(torch.empty(2 * tokens - 1, width))
        nn.init.trunc_normal_(self.pos_embed_offsets, std=0.02)
        places = torch.arange(tokens)
        offsets = places - places[:, None] + tokens - 1  # (query, key), from 0
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, queries: Tensor, index: Tensor | None, scale: float) -> Tensor:
        """Logits (B, heads, K, T) of queries (B, heads, K, d) at index (B, K)."""
        embeddings = self.pos_embed_offsets.to(queries.dtype)
        offset_logits = queries @ embeddings.T * scale  # (B, heads, K, 2 T - 1)
        offsets = self.offsets[None] if index is None else self.offsets[index]  # (1, T, T) or (B, K, T)
        batch, heads = offset_logits.shape[:2]
        offsets = offsets[:, None].expand(batch, heads, -1, -1)
        return offset_logits.gather(-1, offsets)

    def resample(self, name: str, table: Tensor, old: Grid | None) -> Tensor:
        """The table of another grid, interpolated to the offsets of this one."""
        return interpolate_offsets(table, self.grid, self.prefix, old)


class RelativeBiases(nn.Module):
    """A learned bias for each offset in rows and columns, by head: timm's (Swin, BEiT), one table a block."""

    def __init__(self, grid: Grid, prefix: int, heads: int):
        super().__init__()
        require(
            prefix <= 1,
            "model.position",
            "relative_bias",
            "another one with registers: timm's relative biases do not support them",
        )
        self.biases = RelPosBias(grid, heads, prefix)

    def forward(self, queries: Tensor, index: Tensor | None, scale: float) -> Tensor:
        """Logits (B or 1, heads, K, T) to add, of queries at index (B, K)."""
        biases = self.biases.get_bias()  # (1, heads, T, T)
        if index is None:
            return biases
        return biases[0][:, index].transpose(0, 1)

    def resample(self, name: str, table: Tensor, old: Grid | None) -> Tensor:
        """The table of another grid, interpolated to the offsets of this one."""
        offsets = len(table) - 3 * self.biases.prefix_tokens  # between patches of the other grid
        length = (offsets + 1) // 2  # patches, if the other grid is a line
        side = (math.isqrt(offsets) + 1) // 2  # patches, if it is a square
        old = other_grid(self.biases.window_size, length, side, old)
        shape = tuple(self.biases.relative_position_bias_table.shape)
        return resize_rel_pos_bias_table(table, self.biases.window_size, shape, old_window_size=old)


class Rotation(nn.Module):
    """Queries and keys of patches turned by their row and column: timm's rotary embeddings."""

    def __init__(self, grid: Grid, prefix: int, width: int):
        super().__init__()
        require(width % 4 == 0, "model.width / model.heads", width, "a multiple of 4 with model.position=rope")
        patches = RotaryEmbeddingCat(width, in_pixels=False, feat_shape=list(grid)).get_embed()  # (N, 2 d)
        sines = torch.zeros(prefix, width)
        cosines = torch.ones(prefix, width)
        unturned = torch.cat([sines, cosines], dim=1)
        self.register_buffer("angles", torch.cat([unturned, patches]), persistent=False)  # (T, 2 d)

    def forward(self, vectors: Tensor, index: Tensor | None) -> Tensor:
        """Queries or keys (B, heads, K, d) of the tokens at index (B, K), turned."""
        angles = self.angles if index is None else self.angles[index][:, None]  # (T, 2 d) or (B, 1, K, 2 d)
        return apply_rot_embed_cat(vectors, angles).to(vectors.dtype)


class PositionedAttention(Attention):
    """timm's attention, with positions that act within it: see `set_position`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.rotation: Rotation | None = None
        self.added: RelativeKeys | RelativeBiases | None = None
        self.grid: Grid = (0, 0)
        self.lines: str | None = None

    def set_position(self, position: str, grid: Grid, prefix: int, along: str | None = None) -> None:
        """Let attention depend on the places of query and key.

        Args:
            position: one of RELATIVE; with any other, attention does not depend on places.
            along: "rows" or "columns" for axial attention: a token attends only to its own line, places are those
                within the line, and prefix must be 0.
        Raises:
            UserError: a position that does not go with these numbers.
        """
        self.grid = grid
        if along is not None:
            self.lines = LINES[along]
            rows, columns = grid
            grid = (1, columns) if along == "rows" else (rows, 1)
        if position == "relative":
            self.added = RelativeKeys(grid, prefix, self.head_dim)
        elif position == "relative_bias":
            self.added = RelativeBiases(grid, prefix, self.num_heads)
        elif position == "rope":
            self.rotation = Rotation(grid, prefix, self.head_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise NotImplementedError("this attention takes no mask")
        if self.lines is None:
            return attention_at(self, x, None)
        rows, columns = self.grid
        lines = rearrange(x, f"{PATCHES} -> {self.lines}", h=rows, w=columns)
        attended = attention_at(self, lines, None)
        return rearrange(attended, f"{self.lines} -> {PATCHES}", h=rows, w=columns)


def is_known(attention: nn.Module | None) -> bool:
    """Whether `attention_at` computes this attention in full: timm's or ours, without gate and lines."""
    if type(attention) not in (Attention, PositionedAttention):
        return False
    if type(attention.qkv) is not nn.Linear and not is_parametrized(attention.qkv):  # by mpp/models/adaptation.py
        return False
    return getattr(attention, "gate", None) is None and getattr(attention, "lines", None) is None


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention module, timm's or ours, by torch's kernel or step by step."""
    return hasattr(module, "fused_attn") and hasattr(module, "num_heads") and hasattr(module, "attn_drop")


def shows_weights(attention: nn.Module | None) -> bool:
    """Whether an attention among all tokens gives its weights to `attn_drop` when it is not fused: timm's and ours."""
    return is_attention(attention) and getattr(attention, "lines", None) is None


def attention_at(attention: Attention, tokens: Tensor, index: Tensor | None) -> Tensor:
    """Attention with only the tokens at `index` (B, K) as queries; None: all. (B, T, D) to (B, K, D)."""
    queries, keys, values = queries_keys_values(attention, tokens, index)
    queries = attention.q_norm(queries)
    keys = attention.k_norm(keys)
    rotation = getattr(attention, "rotation", None)
    if rotation is not None:
        queries = rotation(queries, index)
        keys = rotation(keys, None)
    bias = None  # logits to add, (B or 1, heads, K, T)
    added = getattr(attention, "added", None)
    if added is not None:
        bias = added(queries, index, attention.scale).to(queries.dtype)
    mixed = mix_values(attention, queries, keys, values, bias)
    mixed = mixed.transpose(1, 2).flatten(2)  # (B, K, D)
    return attention.proj_drop(attention.proj(attention.norm(mixed)))


def mix_values(attention: Attention, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Values weighted by attention, (B, heads, K, d).

    Args:
        queries: (B, heads, K, d).
        keys, values: (B, heads, T, d).
        bias: logits to add, (B or 1, heads, K, T).
    """
    if attention.fused_attn:
        dropout = attention.attn_drop.p if attention.training else 0.0
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, dropout_p=dropout)
    logits = queries * attention.scale @ keys.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias
    weights = logits.softmax(-1)
    return attention.attn_drop(weights) @ values


def attention_kernel(model: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Kernel of the attention in a model's first block, in training: torch's, or "unfused"; None: it has no attention.

    Args:
        tokens: T.
        dtype: of queries, keys and values.
    """
    attention = next((module for module in model.modules() if is_attention(module)), None)
    if attention is None:
        return None
    if not attention.fused_attn:
        return "unfused"
    head_width = getattr(attention, "head_dim", round(attention.scale**-2))  # Beit's has no name for it
    shape = (2, tokens, attention.num_heads, head_width)
    queries, keys, values = (
        torch.empty(shape, device=device, dtype=dtype, requires_grad=True).transpose(1, 2) for _ in range(3)
    )
    bias = None
    tables = ("added", "relative_position_bias_table")
    if any(getattr(attention, table, None) is not None for table in tables):
        bias_shape = (1, attention.num_heads, tokens, tokens)
        bias = torch.empty(bias_shape, device=device, dtype=dtype, requires_grad=True)
    kernel = torch._fused_sdp_choice(queries, keys, values, attn_mask=bias, dropout_p=attention.attn_drop.p)
    return SDPBackend(kernel).name.removesuffix("_ATTENTION").lower()


def queries_keys_values(attention: Attention, tokens: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, heads, K, d) of the tokens at `index`, keys and values (B, heads, T, d) of all tokens (B, T, D)."""
    heads = attention.num_heads
    weight = attention.qkv.weight
    bias = attention.qkv.bias
    width = weight.shape[0] // 3
    query_bias = None if bias is None else bias[:width]
    key_value_bias = None if bias is None else bias[width:]
    query_tokens = tokens if index is None else gather_tokens(tokens, index)
    queries = F.linear(query_tokens, weight[:width], query_bias)  # (B, K, width)
    keys_values = F.linear(tokens, weight[width:], key_value_bias)  # (B, T, 2 * width)
    queries = queries.unflatten(-1, (heads, -1)).transpose(1, 2)
    keys, values = keys_values.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return queries, keys, values
