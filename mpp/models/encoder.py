"""Build an encoder from settings: any Vision Transformer that timm has, and those of mpp/models/vit.py."""

import difflib
import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mpp.config import ModelConfig, check_grid, require
from mpp.errors import UserError, one_line
from mpp.models.loading import load_weights, note_other_moments
from mpp.models.positions import Grid, sincos_2d
from mpp.models.vit import OverlappingPatchEmbed, VariantViT
from mpp.runtime.hardware import uses_gpu

FIXED = "sincos_2d"  # positions that are not learned
PLAIN = "vit_base_patch16_224"  # timm's plain ViT, built to other numbers where no name is given
SET_ELSEWHERE = {"num_classes", "in_chans", "drop_rate", "dynamic_img_size", "dynamic_img_pad", "device", "dtype"}
SET_ELSEWHERE |= {"embed_layer", "block_fn", "mlp_layer", "attn_layer"}  # classes, which no config.json can hold
SET_ELSEWHERE |= {"patch_drop_rate"}  # drops tokens that are to be predicted
BAD_VALUES = (AttributeError, KeyError, RuntimeError, ValueError)  # how timm answers to senseless arguments


def build_encoder(config: ModelConfig, channels: int = 3) -> VisionTransformer:
    """The ViT that the config describes, without a classification head.

    Its weights are random, from torch's global generator, or those of `init_from` with position embeddings and patch
    filters resampled where the sizes differ, and filters on RGB repeated or summed where the channels do (timm's way).

    Args:
        channels: of the images.
    Raises:
        UserError: an unknown name, a model that is not a ViT or does not fit, weights that do not fit.
    """
    name, arguments = architecture(config)
    arguments |= {"in_chans": channels} if channels != 3 else {}
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models("*vit*"), n=3)
        raise UserError(f"model.name is {name}; it must be a timm Vision Transformer, such as {near or PLAIN}")
    refusals = (AssertionError, TypeError, *(BAD_VALUES if config.arguments else ()))
    try:
        encoder = timm.create_model(name, num_classes=0, **arguments)
    except UserError:
        raise
    except refusals as error:
        key, value = ("model.name", name) if not config.arguments else ("model.arguments", config.arguments)
        reason = one_line(error)
        raise UserError(f"{key} is {value}, which timm cannot build to these numbers: {reason}") from error
    if not isinstance(encoder, VisionTransformer):
        raise UserError(f"model.name is {name}, a {type(encoder).__name__}; it must be a timm VisionTransformer")
    if encoder.attn_pool is not None:
        raise UserError(f"model.name is {name}, which pools by attention; that head cannot be trained here")
    check_cells(encoder)
    without = config.position != "none" or getattr(encoder, "pos_embed", None) is None
    require(without, "model.position", config.position, f"learned with {name}, which has position embeddings")
    fused = config.attention == "fused" or (config.attention == "auto" and uses_gpu())
    set_attention(encoder, fused)
    if config.activation_checkpointing:
        checkpoint_activations(encoder, "model.activation_checkpointing")
    if config.init_from:
        load_weights(encoder, Path(config.init_from))
        note_other_moments(config, channels)
    if config.position == FIXED and not isinstance(encoder, VariantViT):
        fix_positions(encoder)
    return encoder


def architecture(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Name and arguments by which timm builds the encoder: a plain one, or our `mpp_vit` where timm has none.

    Raises:
        UserError: `model.arguments` that timm's VisionTransformer does not take.
    """
    numbers = config.numbers()
    arguments = dict(
        img_size=numbers["img_size"],
        patch_size=numbers["patch_size"],
        embed_dim=numbers["width"],
        depth=numbers["depth"],
        num_heads=numbers["heads"],
        pos_drop_rate=config.dropout or None,
        proj_drop_rate=config.dropout or None,
        drop_path_rate=config.drop_path or None,
        pos_embed="none" if config.position == "none" else None,
    )
    name = config.name or PLAIN
    if config.is_variant():
        name = "mpp_vit"
        arguments |= dict(position=config.position, position_at=config.position_at)
        arguments |= dict(stride=config.stride, mixing=config.mixing, pos_embed=None)
    given = config.arguments or {}
    fixed = SET_ELSEWHERE | ({"no_embed_class"} if config.is_variant() else set())
    fixed |= {"class_token", "reg_tokens", "global_pool", "fix_init"} if config.mixing == "axial" else set()
    free = sorted(set(inspect.signature(VisionTransformer).parameters) - set(arguments) - fixed)
    for key in given:
        require(key in free, "model.arguments", key, f"some of {', '.join(free)}")
    return name, {key: value for key, value in (arguments | given).items() if value is not None}


def check_cells(encoder: VisionTransformer) -> None:
    """Raise UserError where the image is no whole number of cells (see `cell_grid`)."""
    side = cell_grid(encoder)[1]
    if not isinstance(encoder.patch_embed, PatchEmbed):  # a hybrid's steps are a power of two; it fills up what is left
        side = 2 ** math.ceil(math.log2(side))
    check_grid(encoder.patch_embed.img_size, side)


def cell_grid(encoder: VisionTransformer) -> tuple[Grid, int]:
    """The grid of squares, one beside the other, that an image consists of, and the side of one in pixels.

    They are the patches. Where patches overlap, they are as large; of a hybrid they are as large as its steps.
    """
    embed = encoder.patch_embed
    side = embed.patch_size[0] if isinstance(embed, OverlappingPatchEmbed) else embed.feat_ratio()
    return tuple(size // side for size in embed.img_size), side


def fix_positions(encoder: VisionTransformer) -> None:
    """Put sines and cosines in the place of the learned positions; [class] and registers have none.

    Raises:
        UserError: the encoder has no table of positions, or a width that is no multiple of 4.
    """
    asked, width = ("model.position", FIXED), encoder.embed_dim
    require(encoder.pos_embed is not None, *asked, "learned with a model that has no table of position embeddings")
    require(width % 4 == 0, *asked, f"learned with a width ({width}) that is no multiple of 4")
    of_patches, table = sincos_2d(encoder.patch_embed.grid_size, width), torch.zeros_like(encoder.pos_embed.data)
    table[0, -len(of_patches) :] = of_patches
    hold_positions(encoder, table)


def hold_positions(encoder: VisionTransformer, table: Tensor) -> None:
    """Make these the positions for good: under timm's name a buffer, which nothing trains, in place of a parameter."""
    del encoder.pos_embed
    encoder.register_buffer("pos_embed", table)


class Normalize(nn.Module):
    """Pixels (B, C, H, W) from 0 to 255, uint8 or float32, to an encoder's float32 input.

    Args:
        mean, std: of the channels, for pixels scaled to [0, 1].
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.mean, self.std = tuple(mean), tuple(std)
        self.register_buffer("shift", 255 * torch.tensor(self.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("scale", 255 * torch.tensor(self.std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.shift) / self.scale


def set_attention(encoder: nn.Module, fused: bool) -> None:
    """Compute attention by torch's fused kernel, or step by step: the same result at another speed."""
    for module in encoder.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused


def has_fused_attention(encoder: nn.Module) -> bool:
    """Whether attention is computed by torch's fused kernel: see `set_attention`."""
    return any(getattr(module, "fused_attn", False) for module in encoder.modules())


def checkpoint_activations(encoder: nn.Module, key: str) -> None:
    """Keep few activations of a timm model, and compute the rest again in the backward pass.

    Args:
        key: the setting that asks for it.
    Raises:
        UserError: timm has none for this model, or it has batch norms: their statistics would count each batch twice.
    """
    batch_norms = any(name.endswith("running_mean") for name, _ in encoder.named_buffers())
    require(not batch_norms, key, True, "false for this model: its batch norms would see each batch twice")
    try:
        encoder.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        raise UserError(f"{key} is True; it must be false: timm has none for this model") from None


def has_class(encoder: nn.Module) -> bool:
    """Whether a timm model has a [class] token; not all of timm's modules have `has_class_token`."""
    return getattr(encoder, "has_class_token", getattr(encoder, "cls_token", None) is not None)
