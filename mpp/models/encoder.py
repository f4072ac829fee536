"""The two doors to an encoder: `build_encoder` makes one from settings, `load_encoder` opens one that exists.

Behind them stand variants.py (architectures that timm lacks), plain.py (the parts of timm's), loading.py (weights of a
file) and descriptions.py (config.json). `Normalize` makes the input of an encoder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mpp.config import ModelConfig, require
from mpp.config.imports import require_imports
from mpp.errors import UserError, one_line
from mpp.models.descriptions import is_named, saved_config, update_description
from mpp.models.loading import load_first_weights, load_weights
from mpp.models.plain import (
    FIXED_POSITIONS,
    TIMM_ERRORS,
    check_cells,
    checkpoint_activations,
    fix_positions,
    hold_positions,
    is_plain,
    set_attention,
    use_bf16_residual,
)
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.weights import WEIGHTS, encoder_folder, run_of

PLAIN_VIT = "vit_base_patch16_224"  # timm's plain ViT, built to other numbers where no name is given
PLAIN_TRANSFORMERS = "a plain transformer (VisionTransformer, Eva, Beit) that timm's build_model_with_cfg has built, "
PLAIN_TRANSFORMERS += f"such as {PLAIN_VIT}"
NO_POOLING = '{"global_pool": "avg", "fc_norm": false}'
SET_ELSEWHERE = {"num_classes", "in_chans", "drop_rate", "dynamic_img_size", "dynamic_img_pad", "device", "dtype"}
SET_ELSEWHERE |= {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "features_only"}
SET_ELSEWHERE |= {"patch_drop_rate"}  # drops tokens that are to be predicted


def build_encoder(config: ModelConfig, channels: int = 3) -> nn.Module:
    """Build the plain timm transformer that the settings describe, without a classification head.

    Its weights are random, from torch's global generator, or those of `init_from` with position embeddings and patch
    filters resampled where the sizes differ, and filters on RGB repeated or summed where the channels do (timm's way).

    Raises:
        UserError: an unknown name, a model that is no plain transformer or does not fit, weights that do not fit.
    """
    name, arguments = architecture(config)
    if channels != 3:
        arguments["in_chans"] = channels
    try:
        encoder = timm.create_model(name, num_classes=0, **arguments)
    except TIMM_ERRORS as error:
        given = f"model.name is {name} and model.arguments is {config.arguments}"
        raise UserError(f"{given}, which timm cannot build with these dimensions: {one_line(error)}") from error
    check_encoder(encoder, name, config)
    fused = config.attention == "fused" or (config.attention == "auto" and uses_gpu())
    set_attention(encoder, fused)
    if config.residual == "bf16":
        use_bf16_residual(encoder)
    if config.activation_checkpointing:
        checkpoint_activations(encoder, "model.activation_checkpointing")
    if config.init_from:
        load_first_weights(encoder, config.init_from)
    if config.position == FIXED_POSITIONS and not config.is_variant():
        fix_positions(encoder)
    return encoder


def architecture(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Name and arguments by which timm builds the encoder: a plain one, or our `mpp_vit` where timm has none.

    Raises:
        UserError: an unknown name, or `model.arguments` that this timm model does not take.
    """
    timm_names = {"width": "embed_dim", "heads": "num_heads"}
    arguments = {timm_names.get(name, name): number for name, number in config.numbers().items()}
    arguments |= dict(
        pos_drop_rate=config.dropout or None,
        proj_drop_rate=config.dropout or None,
        drop_path_rate=config.drop_path or None,
        pos_embed="none" if config.position == "none" else None,
    )
    refused = set(SET_ELSEWHERE)
    name = config.name or PLAIN_VIT
    if config.is_variant():
        name = "mpp_vit"
        arguments |= {each: getattr(config, each) for each in ("position", "position_at", "stride", "mixing")}
        arguments["pos_embed"] = None
        refused.add("no_embed_class")
    if config.mixing == "axial":
        refused |= {"class_token", "reg_tokens", "global_pool", "fix_init"}
    require(timm.is_model(name), "model.name", name, PLAIN_TRANSFORMERS)
    given = config.arguments or {}
    taken = sorted(refused.union(arguments).intersection(given))
    require(not taken, "model.arguments", ", ".join(taken), "arguments of the model's class that no setting gives")
    arguments |= given
    return name, {argument: value for argument, value in arguments.items() if value is not None}


def check_encoder(encoder: nn.Module, name: str, config: ModelConfig) -> None:
    """Raise UserError where a timm model is no plain transformer, or does not fit the settings."""
    setting = ("model.name", name)
    allowed = f"{PLAIN_TRANSFORMERS}, without attention pooling (model.arguments {NO_POOLING}; Eva: use_fc_norm); "
    allowed += f"this is a {type(encoder).__name__}"
    pools = getattr(encoder, "attn_pool", None) is not None
    require(is_plain(encoder) and hasattr(encoder, "pretrained_cfg") and not pools, *setting, allowed)
    check_cells(encoder)
    has_positions = getattr(encoder, "pos_embed", None) is not None
    allowed = f"learned with {name}, which has position embeddings"
    require(config.position != "none" or not has_positions, "model.position", config.position, allowed)


def load_encoder(
    source: str | Path,
    pretrained: bool = True,
    checkpoint: str | None = None,
    setting: str = "encoder",
    **changes: Any,
) -> nn.Module:
    """Open an encoder that exists: the library's front door.

    Positions that were fixed stay so: they are a buffer, and no parameter.

    Args:
        source: a run folder, an encoder folder, zoo:NAME, hf-hub:NAME, or the name of a timm model.
        pretrained: with weights: a folder's own, those in `checkpoint`, or those that timm has published. False: the
            architecture with random weights.
        checkpoint: .safetensors file with the weights of a timm model.
        setting: name of the setting that holds `source`, for messages.
        changes: arguments of `timm.create_model` that differ, such as `img_size=96` (position embeddings are resampled
            in 2-D), `num_classes=10` (a new head) or `num_classes=0` (no head).
    Returns:
        The timm model. That of a folder is in eval mode. `forward_features` gives tokens (B, 1 + N, D), [class] first,
        of images that are normalised: `timm.data.resolve_model_data_config(model)` says size, mean, std and crop,
        after `changes`. Calling it gives [class] (B, D), to which masked patch prediction gave no gradient of its own;
        with `global_pool="avg", fc_norm=False` the mean.
    Raises:
        UserError: no encoder there, or weights that cannot be read or are not this model's.
    """
    source = str(source)
    changes = {argument: value for argument, value in changes.items() if value is not None}
    weights_setting = setting
    config: dict[str, Any] = {}
    if is_named(source):
        require(timm.is_model(source), setting, source, "the name of a timm model, or a folder that exists")
        name = source
        file = Path(checkpoint) if checkpoint else None  # None: those that timm has published
        weights_setting = "checkpoint" if setting == "encoder" else f"{setting}_checkpoint"
    else:
        require(checkpoint is None, "checkpoint", checkpoint, f"null with {source}, which has its own weights")
        folder = encoder_folder(Path(source), setting)
        config = saved_config(folder)
        if not timm.is_model(config.get("architecture", "")):
            require_imports(run_of(folder))
        name = f"local-dir:{folder}"
        file = folder / WEIGHTS

    published = pretrained and file is None
    try:
        model = create_model(name, published, **changes)
    except (*TIMM_ERRORS, OSError, SafetensorError) as error:
        hint = f" (without a network, set {weights_setting} to a file with its weights)" if published else ""
        raise UserError(f"{setting} is {source}, which cannot be loaded{hint}: {one_line(error)}") from error
    if pretrained and file:
        load_weights(model, file, weights_setting)
    if config.get("position") == FIXED_POSITIONS:
        if pretrained:
            hold_positions(model, model.pos_embed.data)
        else:
            fix_positions(model)
    update_description(model, changes, config.get("eval_crop"))
    return model.eval() if config else model


def create_model(name: str, pretrained: bool, **arguments: Any) -> nn.Module:
    """`timm.create_model`, without `img_size` for networks that take any size and lack that argument."""
    try:
        return timm.create_model(name, pretrained, **arguments)
    except TypeError:  # raised again if it has another cause
        arguments.pop("img_size", None)
        return timm.create_model(name, pretrained, **arguments)


class Normalize(nn.Module):
    """Pixels (B, C, H, W) from 0 to 255, uint8 or float32, to an encoder's float32 input.

    Args:
        mean, std: of the channels, for pixels scaled to [0, 1].
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.mean = tuple(mean)
        self.std = tuple(std)
        for name, values in (("shift", self.mean), ("scale", self.std)):
            self.register_buffer(name, 255 * torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.shift) / self.scale
