"""The paper's other Vision Transformers, on timm's parts (appendices D.4 and D.6): `mpp_vit`, registered with timm.

After `import mpp.models`, `timm.create_model` rebuilds an exported one. A plain ViT stays timm's own class.

B images, T tokens (prefix tokens first), N = rows x columns patches, D width.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import PatchEmbed, RelPosBias, resample_abs_pos_embed, resize_rel_pos_bias_table, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from mpp.config import Grid, ImageSize
from mpp.models.attention import RELATIVE, PositionedAttention, RelativeBiases, RelativeKeys
from mpp.models.plain import BIAS_TABLE, timm_filter
from mpp.models.positions import ABSOLUTE, AbsolutePositions

RESAMPLED = (AbsolutePositions, RelativeKeys, RelativeBiases)  # modules with tables that depend on the grid
__all__ = ["VariantViT"]  # timm adds the models that are registered here


def grid_of_patches(size: ImageSize, patch_size: tuple[int, int], stride: int | None) -> Grid:
    """Rows and columns of patches that lie `stride` pixels apart; None: side by side."""
    height, width = size
    patch_height, patch_width = patch_size
    rows = (height - patch_height) // (stride or patch_height) + 1
    columns = (width - patch_width) // (stride or patch_width) + 1
    return rows, columns


class OverlappingPatchEmbed(PatchEmbed):
    """Patches that overlap: they are `stride` pixels apart, which is a divisor of their side."""

    def __init__(self, *args: Any, stride: int, **options: Any):
        self.stride = stride
        super().__init__(*args, **options)
        self.proj.stride = (stride, stride)

    def _init_img_size(self, img_size: int | ImageSize) -> tuple[ImageSize, Grid, int]:
        size = to_2tuple(img_size)
        rows, columns = grid_of_patches(size, self.patch_size, self.stride)
        return size, (rows, columns), rows * columns

    def dynamic_feat_size(self, img_size: ImageSize) -> Grid:
        """Rows and columns of patches of an image of this size."""
        return self._init_img_size(img_size)[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | Grid:
        """Pixels from one patch to the next."""
        return self.stride if as_scalar else (self.stride, self.stride)


class PositionedBlock(Block):
    """timm's block. Position embeddings may be added to its input, or act in its attention.

    Args:
        position, grid, prefix, along: see `PositionedAttention.set_position`.
    """

    def __init__(self, *args: Any, position: str, grid: Grid, prefix: int, along: str | None = None, **options: Any):
        super().__init__(*args, **options | {"attn_layer": PositionedAttention})
        self.attn.set_position(position, grid, prefix, along)
        self.positions: AbsolutePositions | None = None  # its own
        self.shared: tuple[AbsolutePositions, ...] = ()  # the encoder's; in a tuple they are not registered twice

    def add_positions(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T, D) with the position embeddings that belong to this block."""
        if self.positions is not None:
            tokens = tokens + self.positions().to(tokens.dtype)
        for positions in self.shared:
            tokens = tokens + positions().to(tokens.dtype)
        return tokens

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return super().forward(self.add_positions(x), attn_mask, is_causal)  # its attention refuses masks


class AxialBlock(nn.Module):
    """A block along each row of patches, then one along each column, each with its MLP (paper, appendix D.6).

    Position embeddings are added once, to the input.

    Args:
        options: of both blocks.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__()
        self.along_rows = PositionedBlock(*args, along="rows", **options)
        self.along_columns = PositionedBlock(*args, along="columns", **options)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, N, D) to the same."""
        return self.along_columns(self.along_rows(x, attn_mask, is_causal), attn_mask, is_causal)


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
            class_token = False
            reg_tokens = 0
            options["global_pool"] = "avg"
        prefix = int(class_token) + reg_tokens
        embed = PatchEmbed
        if stride not in (None, patch_size):
            embed = partial(OverlappingPatchEmbed, stride=stride)
        grid = grid_of_patches(to_2tuple(img_size), to_2tuple(patch_size), stride)
        plain_blocks = position not in RELATIVE and position_at == "stem" and not axial
        block: Any = Block
        if not plain_blocks:
            block = partial(AxialBlock if axial else PositionedBlock, position=position, grid=grid, prefix=prefix)
        timm_positions = position == "learned" and position_at == "stem"  # timm's table, which takes timm's weights
        options |= dict(
            embed_layer=embed,
            block_fn=block,
            embed_dim=embed_dim,
            pos_embed="learn" if timm_positions else "none",
            class_token=class_token,
            reg_tokens=reg_tokens,
        )
        super().__init__(img_size, patch_size, **options)
        self.position = position
        self.position_at = position_at
        self.mixing = mixing
        self.takes_any_tokens = plain_blocks  # timm's own blocks do not depend on the number of tokens
        self.pos_embeds: AbsolutePositions | None = None
        if position in ABSOLUTE and not timm_positions:
            self.add_tables(partial(AbsolutePositions, position, grid, prefix, embed_dim), position_at)

    def add_tables(self, create: Callable[[], AbsolutePositions], position_at: str) -> None:
        """Create the tables of positions: the encoder's, and those of the blocks after the first where asked for."""
        self.pos_embeds = create()
        if position_at == "stem":
            return
        for block in self.blocks[1:]:
            if isinstance(block, AxialBlock):
                block = block.along_rows
            if position_at == "every":
                block.positions = create()
            else:
                block.shared = (self.pos_embeds,)

    def _pos_embed(self, x: Tensor) -> Tensor:
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # the meta device has no autocast
            x = x.float()  # as positions are: blocks add to these tokens
        tokens = super()._pos_embed(x)  # with the prefix tokens
        if self.pos_embeds is None:
            return tokens
        return self.pos_drop(tokens + self.pos_embeds())

    def set_input_size(self, *_: Any, **__: Any) -> None:
        """Refuse timm's way to another size after loading: it would leave our tables as they are."""
        raise NotImplementedError("load it for this size: mpp.load_encoder(FOLDER, img_size=...)")

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimisers do not decay."""
        tables = {
            name for name, _ in self.named_parameters() if "pos_embed" in name or "relative_position_bias_table" in name
        }
        return super().no_weight_decay() | tables


def resample(
    state: dict[str, Tensor], model: nn.Module, size: ImageSize | None, stride: int | None = None
) -> dict[str, Tensor]:
    """Weights of another input size as this model's: timm's rules, and those of the tables that timm does not know.

    Args:
        size: height and width that the weights are for; None: unknown, and tables are taken for those of squares.
        stride: pixels from one of their patches to the next, where that is known.
    """
    grid = tuple(model.patch_embed.grid_size)
    old_grid = grid_of_weights(state, model, size, stride) if size else None
    moved = old_grid is not None and old_grid != grid
    table = state.get("pos_embed")
    model_table = getattr(model, "pos_embed", None)
    if table is not None:
        if old_grid and model_table is not None and (moved or table.shape != model_table.shape):
            prefix = 0 if getattr(model, "no_embed_class", False) else model.num_prefix_tokens
            table = resample_abs_pos_embed(table, list(grid), list(old_grid), num_prefix_tokens=prefix)
        state = state | {"pos_embed": table}
    bias_tables = resample_bias_tables(state, model, old_grid) if old_grid else {}
    state = timm_filter(model)(state | bias_tables, model) | bias_tables  # timm refuses some tables of oblong images
    if old_grid and "pos_embed" in state:
        state["pos_embed"] = table  # timm's may be of the square with as many patches

    for path, module in model.named_modules():
        if not isinstance(module, RESAMPLED):
            continue
        for name, parameter in module.named_parameters():
            key = f"{path}.{name}"
            if key in state and (moved or state[key].shape != parameter.shape):
                state[key] = module.resample(name, state[key], old_grid)
    return state


def resample_bias_tables(state: dict[str, Tensor], model: nn.Module, old_grid: Grid) -> dict[str, Tensor]:
    """Tables of biases of Beit's blocks, from a known grid: timm takes them for those of squares."""
    tables = {}
    for name, table in state.items():
        path, _, last_name = name.rpartition(".")
        if last_name != BIAS_TABLE:
            continue
        module = dict(model.named_modules()).get(path)
        if module is None or isinstance(module, RelPosBias):  # ours have their own way
            continue
        shape = tuple(module.relative_position_bias_table.shape)
        tables[name] = resize_rel_pos_bias_table(table, module.window_size, shape, old_grid)
    return tables


def grid_of_weights(state: dict[str, Tensor], model: nn.Module, size: ImageSize, stride: int | None = None) -> Grid:
    """Rows and columns of the patches of images of this size, for weights whose patches may differ from the model's."""
    height, width = size
    embed = model.patch_embed
    if not isinstance(embed, PatchEmbed):  # a hybrid's convolutions
        return height // embed.feat_ratio(), width // embed.feat_ratio()
    patch_size = tuple(state["patch_embed.proj.weight"].shape[-2:])
    table = state.get("pos_embed")
    if isinstance(embed, OverlappingPatchEmbed) or stride:
        grid = grid_of_patches(size, patch_size, stride or embed.stride)
        if stride or table is None or table.shape[1] >= math.prod(grid):  # otherwise they are a plain ViT's
            return grid
    return height // patch_size[0], width // patch_size[1]


def resample_exported(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """timm's filter of weights: those that mpp has written are for the input size in the model's configuration."""
    exported = model.pretrained_cfg.get("tag") == "mpp"
    size = tuple(model.pretrained_cfg["input_size"][1:]) if exported else None
    return resample(state, model, size)


default_cfgs = generate_default_cfgs({"mpp_vit": {"url": "", "first_conv": "patch_embed.proj", "classifier": "head"}})


@register_model
def mpp_vit(pretrained: bool = False, **options: Any) -> VariantViT:
    """The Vision Transformers that timm lacks: see `VariantViT`."""
    out_indices = options.pop("out_indices", 3)
    return build_model_with_cfg(
        VariantViT,
        "mpp_vit",
        pretrained,
        pretrained_filter_fn=resample_exported,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **options,
    )
