"""The paper's other Vision Transformers, on timm's parts (appendices D.4 and D.6): `mpp_vit`, registered with timm.

After `import mpp.models`, `timm.create_model` rebuilds an exported one. A plain ViT stays timm's own class.

B images, T tokens (prefix tokens first), N = rows x columns patches, D width.
"""

import math
from functools import partial
from typing import Any

from timm.layers import PatchEmbed, resample_abs_pos_embed, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from mpp.config import Grid, ImageSize
from mpp.models.attention import RELATIVE, Biases, PositionedAttention, RelativeKeys
from mpp.models.positions import ABSOLUTE, AbsolutePositions

RESAMPLED = (AbsolutePositions, RelativeKeys, Biases)
__all__ = ["VariantViT"]  # timm adds the models that are registered here


class OverlappingPatchEmbed(PatchEmbed):
    """Patches that overlap: they are `stride` pixels apart, which is a divisor of their side."""

    def __init__(self, *args: Any, stride: int, **options: Any):
        self.stride = stride
        super().__init__(*args, **options)
        self.proj.stride = (stride, stride)

    def _init_img_size(self, img_size: int | ImageSize) -> tuple[ImageSize, Grid, int]:
        sizes = to_2tuple(img_size)
        rows, columns = ((size - side) // self.stride + 1 for size, side in zip(sizes, self.patch_size, strict=True))
        return sizes, (rows, columns), rows * columns

    def dynamic_feat_size(self, img_size: ImageSize) -> Grid:
        """Rows and columns of patches of an image of this size."""
        return self._init_img_size(img_size)[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | Grid:
        """Pixels from one patch to the next."""
        return self.stride if as_scalar else (self.stride, self.stride)


class PositionedBlock(Block):
    """timm's block. Position embeddings may be added to what goes in, or act in its attention.

    Args:
        position, grid, prefix, along: see `PositionedAttention.set_position`.
    """

    def __init__(self, *args: Any, position: str, grid: Grid, prefix: int, along: str | None = None, **options: Any):
        super().__init__(*args, **options | {"attn_layer": PositionedAttention})
        self.attn.set_position(position, grid, prefix, along)
        self.positions: AbsolutePositions | None = None  # its own
        self.shared: tuple[AbsolutePositions, ...] = ()  # the encoder's; in a tuple they are not registered twice

    def place(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T, D) with the position embeddings that belong to this block."""
        for positions in (self.positions, *self.shared):
            tokens = tokens if positions is None else tokens + positions()
        return tokens

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return super().forward(self.place(x), attn_mask, is_causal)  # its attention refuses masks


class AxialBlock(nn.Module):
    """A block along each row of patches, then one along each column, each with its MLP (paper, appendix D.6).

    Position embeddings are added once, to what goes in.

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
        class_token, prefix = class_token and not axial, 0 if axial else int(class_token) + reg_tokens
        embed = PatchEmbed if stride in (None, patch_size) else partial(OverlappingPatchEmbed, stride=stride)
        sides = (to_2tuple(part) for part in (img_size, patch_size))
        grid = tuple((size - side) // (stride or side) + 1 for size, side in zip(*sides, strict=True))
        places = dict(position=position, grid=grid, prefix=prefix)
        block = partial(AxialBlock, **places) if axial else partial(PositionedBlock, **places)
        plain = position not in RELATIVE and position_at == "stem" and not axial
        timms = position == "learned" and position_at == "stem"  # a table as timm has it, which takes its weights
        options |= dict(embed_layer=embed, block_fn=Block if plain else block, embed_dim=embed_dim)
        options |= dict(pos_embed="learn" if timms else "none")
        options |= dict(class_token=class_token, reg_tokens=prefix - class_token)
        options |= dict(global_pool="avg") if axial else {}
        super().__init__(img_size, patch_size, **options)
        self.position, self.mixing = position, mixing
        self.takes_any_tokens = plain  # its blocks are timm's own, which do not care how many tokens there are
        own = position in ABSOLUTE and not timms
        table = partial(AbsolutePositions, position, grid, prefix, embed_dim)
        self.pos_embeds = table() if own else None
        for following in self.blocks[1:] if own and position_at != "stem" else ():
            block = following.along_rows if axial else following
            if position_at == "every":
                block.positions = table()
            else:
                block.shared = (self.pos_embeds,)

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = x.to(self.patch_embed.proj.weight.dtype)  # under autocast float32: what blocks add to is not to be rounded
        tokens = super()._pos_embed(x)  # with the prefix tokens
        return tokens if self.pos_embeds is None else self.pos_drop(tokens + self.pos_embeds())

    def set_input_size(self, *_: Any, **__: Any) -> None:
        """timm's way to another size after loading: refused, it would leave our tables as they are."""
        raise NotImplementedError("load it for this size: mpp.load_encoder(FOLDER, img_size=...)")

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimisers do not decay."""
        words = ("pos_embed", "relative_position_bias_table")
        ours = {name for name, _ in self.named_parameters() if any(word in name for word in words)}
        return super().no_weight_decay() | ours


def resample(
    state: dict[str, Tensor], model: VisionTransformer, size: ImageSize | None, stride: int | None = None
) -> dict[str, Tensor]:
    """Weights of another input size as this model's: timm's rules, and those of the tables that timm does not know.

    Args:
        size: height and width that the weights are for; None: nobody knows, and tables are taken for those of squares.
        stride: pixels from one of their patches to the next, where that is known.
    """
    old, new = size and grid_of_weights(state, model, size, stride), tuple(model.patch_embed.grid_size)
    table, own = state.get("pos_embed"), getattr(model, "pos_embed", None)
    if old and table is not None and own is not None and (old != new or table.shape != own.shape):
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        table = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=prefix)
    state = checkpoint_filter_fn(state | ({} if table is None else {"pos_embed": table}), model)
    if old and "pos_embed" in state:
        state["pos_embed"] = table  # timm's may be of the square with as many patches
    for place, module in model.named_modules():
        for name, parameter in module.named_parameters() if isinstance(module, RESAMPLED) else ():
            key = f"{place}.{name}"
            if key in state and (state[key].shape != parameter.shape or (old and old != new)):
                state[key] = module.resample(name, state[key], old)
    return state


def grid_of_weights(
    state: dict[str, Tensor], model: VisionTransformer, size: ImageSize, stride: int | None = None
) -> Grid:
    """Rows and columns of the patches of images of this size, of which the weights may have others than the model."""
    embed = model.patch_embed
    if not isinstance(embed, PatchEmbed):  # a hybrid's convolutions
        return tuple(side // embed.feat_ratio() for side in size)
    patch, table = tuple(state["patch_embed.proj.weight"].shape[-2:]), state.get("pos_embed")
    if isinstance(embed, OverlappingPatchEmbed) or stride:
        grid = tuple((side - part) // (stride or embed.stride) + 1 for side, part in zip(size, patch, strict=True))
        if stride or table is None or table.shape[1] >= math.prod(grid):  # else they are a plain ViT's
            return grid
    return tuple(side // part for side, part in zip(size, patch, strict=True))


def resample_exported(state: dict[str, Tensor], model: VisionTransformer) -> dict[str, Tensor]:
    """As timm asks for it: the weights are those that the model's configuration is about, where mpp has written it."""
    known = model.pretrained_cfg.get("tag") == "mpp"
    return resample(state, model, tuple(model.pretrained_cfg["input_size"][1:]) if known else None)


default_cfgs = generate_default_cfgs({"mpp_vit": {"url": "", "first_conv": "patch_embed.proj", "classifier": "head"}})


@register_model
def mpp_vit(pretrained: bool = False, **options: Any) -> VariantViT:
    """The Vision Transformers that timm has not: see `VariantViT`."""
    features = dict(out_indices=options.pop("out_indices", 3), feature_cls="getter")
    kind = dict(pretrained_filter_fn=resample_exported, feature_cfg=features)
    return build_model_with_cfg(VariantViT, "mpp_vit", pretrained, **kind, **options)
