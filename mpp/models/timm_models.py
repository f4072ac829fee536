"""Properties and switches of timm models: grid of cells, [class] token, fixed positions, attention, checkpointing."""

import math

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from mpp.config import Grid, check_grid, require
from mpp.errors import UserError
from mpp.models.positions import sincos_2d
from mpp.models.vit import OverlappingPatchEmbed

FIXED_POSITIONS = "sincos_2d"  # the position embeddings that are not learned


def cell_grid(encoder: nn.Module) -> tuple[Grid, int]:
    """Grid of adjacent squares that an image consists of, and the side of a square in pixels.

    They are the patches. Where patches overlap, squares are as large as patches; those of a hybrid are as large as the
    stride of its convolutions.
    """
    embed = encoder.patch_embed
    side = embed.patch_size[0] if isinstance(embed, OverlappingPatchEmbed) else embed.feat_ratio()
    rows, columns = (size // side for size in embed.img_size)
    return (rows, columns), side


def check_cells(encoder: nn.Module) -> None:
    """Raise UserError where cells are no squares, or the image is no whole number of them (see `cell_grid`)."""
    _, side = cell_grid(encoder)
    height, width = encoder.patch_embed.feat_ratio(as_scalar=False)
    require(height == width, "the patch of the encoder", f"{height} x {width} pixels", "a square")
    if not isinstance(encoder.patch_embed, PatchEmbed):  # a hybrid's convolutions pad to a power of two
        side = 2 ** math.ceil(math.log2(side))
    check_grid(encoder.patch_embed.img_size, side)


def has_class(encoder: nn.Module) -> bool:
    """Whether a timm model has a [class] token; not all of timm's modules have `has_class_token`."""
    return getattr(encoder, "has_class_token", getattr(encoder, "cls_token", None) is not None)


def width_of(encoder: nn.Module) -> int:
    """Width of a timm model's tokens, of several stages the largest; 0: it has none."""
    width = getattr(encoder, "embed_dim", 0)
    return width if isinstance(width, int) else max(width)


def fix_positions(encoder: nn.Module) -> None:
    """Replace learned positions by sines and cosines; [class] and registers have none.

    Raises:
        UserError: the encoder has no table of positions, or its width is no multiple of 4.
    """
    setting = ("model.position", FIXED_POSITIONS)
    width = encoder.embed_dim
    require(encoder.pos_embed is not None, *setting, "learned with a model that has no table of position embeddings")
    require(width % 4 == 0, *setting, f"learned with a width ({width}) that is not a multiple of 4")
    patch_positions = sincos_2d(encoder.patch_embed.grid_size, width)
    table = torch.zeros_like(encoder.pos_embed.data)
    table[0, -len(patch_positions) :] = patch_positions
    hold_positions(encoder, table)


def hold_positions(encoder: nn.Module, table: Tensor) -> None:
    """Make a table the encoder's positions for good: a buffer under timm's name, which is not trained."""
    del encoder.pos_embed
    encoder.register_buffer("pos_embed", table)


def set_attention(encoder: nn.Module, fused: bool) -> None:
    """Compute attention by torch's fused kernel, or step by step: the same result at another speed."""
    for module in encoder.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused


def has_fused_attention(encoder: nn.Module) -> bool:
    """Whether attention is computed by torch's fused kernel: see `set_attention`."""
    return any(getattr(module, "fused_attn", False) for module in encoder.modules())


def checkpoint_activations(encoder: nn.Module, setting: str) -> None:
    """Keep few activations of a timm model, and compute the others again in the backward pass.

    Args:
        setting: name of the setting that asks for it.
    Raises:
        UserError: timm cannot do so for this model, or it has batch norms, whose statistics would count each batch
            twice.
    """
    batch_norms = any(name.endswith("running_mean") for name, _ in encoder.named_buffers())
    require(not batch_norms, setting, True, "false for this model: its batch norms would see each batch twice")
    try:
        encoder.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        raise UserError(f"{setting} is true; it must be false: timm has none for this model") from None
