"""The paper's other Vision Transformers on timm's parts (appendices D.4 and D.6): positions, overlap, axial attention.

All are one architecture, `mpp_vit`, registered with timm: after `import mpp.models`, `timm.create_model` rebuilds an
exported one. A plain ViT stays timm's own class.

B images, T tokens (prefix tokens first: [class], registers), N = rows x columns patches, K queries, D width, d width of
a head.
"""

import math
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from timm.layers import (
    Attention,
    PatchEmbed,
    RelPosBias,
    RotaryEmbeddingCat,
    apply_rot_embed_cat,
    resample_abs_pos_embed,
    resize_rel_pos_bias_table,
    to_2tuple,
)
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter
from torch import Tensor, nn

from mpp.config import Grid, ImageSize, require
from mpp.models.encoder import Weights, resample
from mpp.models.plain import BIAS_TABLE, attention_at, sincos_2d, uses_autocast

RELATIVE = ("relative", "relative_bias", "rope")
PATCHES = "b (h w) d"  # patterns of einops: the patches of an image as one sequence,
LINES = {"rows": "(b h) w d", "columns": "(b w) h d"}  # and as one for each line
__all__ = ["VariantViT"]  # timm adds the models that are registered here


# --- positions that are added to tokens ---


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
        if kind == "learned":
            self.pos_embed = nn.Parameter(torch.empty(prefix + math.prod(grid), width))
        elif kind == "learned_2d":
            require(width % 2 == 0, "model.width", width, "even with model.position=learned_2d")
            self.pos_embed_rows = nn.Parameter(torch.empty(grid[0], width // 2))
            self.pos_embed_columns = nn.Parameter(torch.empty(grid[1], width // 2))
            self.pos_embed_prefix = nn.Parameter(torch.empty(prefix, width)) if prefix else None
        else:
            self.register_buffer("pos_embed", F.pad(sincos_2d(grid, width), (0, 0, prefix, 0)), persistent=False)
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self) -> Tensor:
        """The embeddings, (T, D)."""
        if self.kind != "learned_2d":
            return self.pos_embed
        rows = repeat(self.pos_embed_rows, "row d -> (row column) d", column=self.grid[1])
        columns = repeat(self.pos_embed_columns, "column d -> (row column) d", row=self.grid[0])
        patches = torch.cat([rows, columns], dim=-1)  # (N, D)
        if self.pos_embed_prefix is None:
            return patches
        return torch.cat([self.pos_embed_prefix, patches])


# --- positions that act within attention ---


class RelativeKeys(nn.Module):
    """An embedding for each offset of two tokens, as keys of a second attention: its logits are added (paper, D.4).

    As in the paper the offset is along the sequence, in one dimension, [class] first. The heads share the embeddings,
    as in Shaw et al. (2018); the paper does not say.
    """

    def __init__(self, grid: Grid, prefix: int, width: int):
        super().__init__()
        self.scale = width**-0.5
        tokens = prefix + math.prod(grid)
        self.pos_embed_offsets = nn.Parameter(torch.empty(2 * tokens - 1, width))
        nn.init.trunc_normal_(self.pos_embed_offsets, std=0.02)
        places = torch.arange(tokens)
        offsets = places - places[:, None] + tokens - 1  # (query, key), from 0
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, queries: Tensor, index: Tensor | None) -> Tensor:
        """Logits (B, heads, K, T) of queries (B, heads, K, d) at index (B, K)."""
        embeddings = self.pos_embed_offsets.to(queries.dtype)
        offset_logits = queries @ embeddings.T * self.scale  # (B, heads, K, 2 T - 1)
        offsets = self.offsets[index]  # (B, K, T); None adds a dimension: (1, T, T)
        offsets = offsets[:, None].expand(*offset_logits.shape[:2], -1, -1)
        return offset_logits.gather(-1, offsets)


class RelativeBiases(nn.Module):
    """A learned bias for each offset in rows and columns, by head: timm's (Swin, BEiT), one table a block."""

    def __init__(self, grid: Grid, prefix: int, heads: int):
        super().__init__()
        allowed = "another one with registers: timm's relative biases do not support them"
        require(prefix <= 1, "model.position", "relative_bias", allowed)
        self.biases = RelPosBias(grid, heads, prefix)

    def forward(self, queries: Tensor, index: Tensor | None) -> Tensor:
        """Logits (B or 1, heads, K, T) to add, of queries at index (B, K)."""
        (biases,) = self.biases.get_bias()  # (heads, T, T)
        return biases[:, index].transpose(0, 1)


class Rotation(nn.Module):
    """Queries and keys of patches turned by their row and column: timm's rotary embeddings."""

    def __init__(self, grid: Grid, prefix: int, width: int):
        super().__init__()
        require(width % 4 == 0, "model.width / model.heads", width, "a multiple of 4 with model.position=rope")
        patches = RotaryEmbeddingCat(width, in_pixels=False, feat_shape=list(grid)).get_embed()  # (N, 2 d)
        unturned = torch.cat([torch.zeros(prefix, width), torch.ones(prefix, width)], dim=1)  # sines, cosines
        self.register_buffer("angles", torch.cat([unturned, patches]), persistent=False)  # (T, 2 d)

    def forward(self, vectors: Tensor, index: Tensor | None) -> Tensor:
        """Queries or keys (B, heads, K, d) of the tokens at index (B, K), turned."""
        angles = self.angles[index]  # (B, K, 2 d) or (1, T, 2 d)
        return apply_rot_embed_cat(vectors, angles[:, None]).to(vectors.dtype)


class PositionedAttention(Attention):
    """timm's attention, with positions that act within it: see `set_position` and `attention_at`."""

    lines: str | None = None
    """Pattern of the lines among whose tokens it is; None: among all."""

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
            grid = (1, grid[1]) if along == "rows" else (grid[0], 1)
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


# --- blocks, patches and the whole ---


class PositionedBlock(Block):
    """timm's block. Position embeddings may be added to its input, or act in its attention.

    Args:
        position, grid, prefix, along: see `PositionedAttention.set_position`.
    """

    def __init__(self, *args: Any, position: str, grid: Grid, prefix: int, along: str | None = None, **options: Any):
        super().__init__(*args, **options | {"attn_layer": PositionedAttention})
        self.attn.set_position(position, grid, prefix, along)
        self.added: tuple[AbsolutePositions, ...] = ()  # its own or the encoder's, which a tuple does not register

    def add_positions(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T, D) with the position embeddings that belong to this block."""
        for positions in self.added:
            tokens = tokens + positions().to(tokens.dtype)
        return tokens

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        return super().forward(self.add_positions(x), **masks)  # its attention refuses masks


def axial_block(*args: Any, **options: Any) -> nn.Sequential:
    """A block along each row of patches, then one along each column, each with its MLP (paper, appendix D.6).

    Position embeddings are added once, to the input.

    Args:
        options: of both blocks.
    """
    parts = {f"along_{line}": PositionedBlock(*args, along=line, **options) for line in LINES}
    return nn.Sequential(OrderedDict(parts))


def grid_of_patches(size: ImageSize, patch_size: int, stride: int) -> Grid:
    """Rows and columns of patches that lie `stride` pixels apart."""
    rows, columns = ((side - patch_size) // stride + 1 for side in size)
    return rows, columns


class OverlappingPatchEmbed(PatchEmbed):
    """Patches that overlap: they are `stride` pixels apart, which is a divisor of their side."""

    def __init__(self, *args: Any, stride: int, **options: Any):
        super().__init__(*args, **options)
        self.stride = stride
        self.proj.stride = (stride, stride)
        self.grid_size = self.dynamic_feat_size(self.img_size)
        self.num_patches = math.prod(self.grid_size)

    def dynamic_feat_size(self, img_size: ImageSize) -> Grid:
        """Rows and columns of patches of an image of this size."""
        return grid_of_patches(img_size, self.patch_size[0], self.stride)

    def feat_ratio(self, as_scalar: bool = True) -> int | Grid:
        """Pixels from one patch to the next."""
        return self.stride if as_scalar else (self.stride, self.stride)


class VariantViT(VisionTransformer):
    """timm's Vision Transformer with other positions, overlapping patches, or axial attention.

    Args:
        position: learned, learned_2d, sincos_2d (see `AbsolutePositions`); relative, relative_bias, rope (see
            `PositionedAttention`); none.
        position_at: where absolute ones are added: stem; every: to the input of each block, each its own; every_shared:
            the same to each (paper, Table 8).
        stride: pixels from one patch to the next; None: the patch's side.
        mixing: full; axial: along rows, then along columns. Then there is no [class], and the mean is pooled.
        options: timm's.
    """

    def __init__(
        self,
        img_size: int | ImageSize = 224,
        patch_size: int = 16,
        embed_dim: int = 768,
        class_token: bool = True,
        reg_tokens: int = 0,
        position: str = "learned",
        position_at: str = "stem",
        stride: int | None = None,
        mixing: str = "full",
        **options: Any,
    ):
        axial = mixing == "axial"
        if axial:
            class_token, reg_tokens = False, 0
            options["global_pool"] = "avg"
        stride = stride or patch_size
        if stride != patch_size:
            options["embed_layer"] = partial(OverlappingPatchEmbed, stride=stride)
        prefix = class_token + reg_tokens
        grid = grid_of_patches(to_2tuple(img_size), patch_size, stride)
        plain_blocks = position not in RELATIVE and position_at == "stem" and not axial
        if not plain_blocks:
            block = axial_block if axial else PositionedBlock
            options["block_fn"] = partial(block, position=position, grid=grid, prefix=prefix)
        has_table = position in ("learned_2d", "sincos_2d") or position_at != "stem"
        pos_embed = "learn" if position == "learned" and not has_table else "none"  # timm's, which takes timm's weights
        tokens = dict(class_token=class_token, reg_tokens=reg_tokens)
        super().__init__(img_size, patch_size, embed_dim=embed_dim, pos_embed=pos_embed, **tokens, **options)
        self.position = position
        self.mixing = mixing
        is_computed = position in ("rope", "sincos_2d") or position_at != "stem"
        self.computed_positions = f"{position} at {position_at}" if is_computed else "none"  # what no weights show
        self.takes_any_tokens = plain_blocks  # timm's own blocks do not depend on the number of tokens
        self.pos_embeds = AbsolutePositions(position, grid, prefix, embed_dim) if has_table else None
        for block in self.blocks[1:] if position_at != "stem" else ():
            first_part = block.along_rows if axial else block
            first_part.added = (self.pos_embeds,)
            if position_at == "every":
                first_part.positions = AbsolutePositions(position, grid, prefix, embed_dim)
                first_part.added = (first_part.positions,)

    def _pos_embed(self, x: Tensor) -> Tensor:
        # with the prefix tokens; float as positions are: blocks add to these tokens
        tokens = super()._pos_embed(x.float() if uses_autocast(x.device.type) else x)
        if self.pos_embeds is None:
            return tokens
        return self.pos_drop(tokens + self.pos_embeds())

    def set_input_size(self, *_: Any, **__: Any) -> None:
        """Refuse timm's way to another size after loading: it would leave our tables as they are."""
        raise NotImplementedError("load it for this size: mpp.load_encoder(FOLDER, img_size=...)")

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimisers do not decay."""
        tables = {name for name, _ in self.named_parameters() if "pos_embed" in name or BIAS_TABLE in name}
        return super().no_weight_decay() | tables


def checkpoint_filter_fn(state: Weights, model: VariantViT) -> Weights:
    """timm's filter; tables that it does not know are resampled, too, from those of a square.

    In two dimensions as timm does, those of rows and columns along their only one. Offsets along a line are not.
    """
    resampled = {}
    for name, wanted in model.state_dict().items():
        path, _, kind = name.rpartition(".")
        table = state.get(name, wanted)
        if not path or table.shape == wanted.shape:
            continue
        if kind == BIAS_TABLE:
            window = model.get_submodule(path).window_size
            if 1 not in window:  # timm would take a line for a square
                resampled[name] = resize_rel_pos_bias_table(table, window, wanted.shape)
        elif "pos_embed" in kind:
            sizes = ([1, len(wanted)], [1, len(table)], 0)
            if kind == "pos_embed":
                sizes = (model.patch_embed.grid_size, None, model.num_prefix_tokens)
            resampled[name] = resample_abs_pos_embed(table[None], *sizes)[0]
    return timm_filter(state | resampled, model)


default_cfgs = generate_default_cfgs({"mpp_vit": {"url": "", "first_conv": "patch_embed.proj", "classifier": "head"}})


@register_model
def mpp_vit(pretrained: bool = False, **options: Any) -> VariantViT:
    """The Vision Transformers that timm lacks: see `VariantViT`."""
    return build_model_with_cfg(VariantViT, "mpp_vit", pretrained, pretrained_filter_fn=resample, **options)
