"""The two doors to an encoder: `build_encoder` makes one from settings, `load_encoder` opens one that exists.

Behind them stand vit.py (architectures that timm lacks), timm_models.py (properties of timm models), loading.py
(weights of a file) and descriptions.py (config.json). `Normalize` makes the input of an encoder.
"""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.models import is_model_in_modules
from torch import Tensor, nn

from mpp.config import ModelConfig, require
from mpp.config.imports import require_imports
from mpp.errors import UserError, one_line
from mpp.models.descriptions import is_named, saved_config, trained_on, update_description
from mpp.models.loading import WeightsFile, load_resampled, load_timm_model, load_weights, note_other_moments
from mpp.models.plain import constructor_arguments, is_plain
from mpp.models.residual import use_bf16_residual
from mpp.models.timm_models import (
    FIXED_POSITIONS,
    check_cells,
    checkpoint_activations,
    fix_positions,
    hold_positions,
    set_attention,
)
from mpp.models.vit import VariantViT
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.weights import encoder_folder, refuse_pickle, run_of

PLAIN_VIT = "vit_base_patch16_224"  # timm's plain ViT, built to other numbers where no name is given
PLAIN_TRANSFORMERS = "a plain timm transformer (VisionTransformer, Eva, Beit)"
NAMES_OF_TRANSFORMERS = ["*vit*", "eva*", "beit*", "deit*"]
SQUARES_ONLY = ("vision_transformer_hybrid", "beit")  # timm's modules that take weights for those of square images
SET_ELSEWHERE = {"num_classes", "in_chans", "drop_rate", "dynamic_img_size", "dynamic_img_pad", "device", "dtype"}
SET_ELSEWHERE |= {"embed_layer", "block_fn", "mlp_layer", "attn_layer"}  # classes, which no config.json can hold
SET_ELSEWHERE |= {"patch_drop_rate"}  # drops tokens that are to be predicted
VALUE_ERRORS = (AttributeError, KeyError, RuntimeError, ValueError)  # errors of timm for arguments of senseless values


def build_encoder(config: ModelConfig, channels: int = 3) -> nn.Module:
    """Build the plain timm transformer that the settings describe, without a classification head.

    Its weights are random, from torch's global generator, or those of `init_from` with position embeddings and patch
    filters resampled where the sizes differ, and filters on RGB repeated or summed where the channels do (timm's way).

    Raises:
        UserError: an unknown name, a model that is no plain transformer or does not fit, weights that do not fit.
    """
    encoder = create_vit(config, channels)
    fused = config.attention == "fused" or (config.attention == "auto" and uses_gpu())
    set_attention(encoder, fused)
    if config.residual == "bf16":
        use_bf16_residual(encoder)
    if config.activation_checkpointing:
        checkpoint_activations(encoder, "model.activation_checkpointing")
    if config.init_from:
        load_weights(encoder, config.init_from)
        note_other_moments(config, channels)
    if config.position == FIXED_POSITIONS and not isinstance(encoder, VariantViT):
        fix_positions(encoder)
    return encoder


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
    named = is_named(source)
    checkpoint_setting = "checkpoint" if setting == "encoder" else f"{setting}_checkpoint"
    if named and not timm.is_model(source):
        raise UserError(f"{setting} is {source}: no folder of that name, and no timm model")
    weights = None
    if checkpoint:
        if not named:
            raise UserError(f"{checkpoint_setting} needs the name of a timm model; a folder has its own weights")
        weights = WeightsFile(Path(checkpoint), checkpoint_setting, model=f"of {source}")
        refuse_pickle(weights.path, checkpoint_setting)
        weights.names()  # a file that cannot be read is refused also where random weights are asked for

    if named:
        eval_crop = None
        load = partial(load_named, source, pretrained, weights)
    else:
        folder = encoder_folder(Path(source), setting)
        eval_crop = saved_config(folder).get("eval_crop")
        load = partial(load_folder, folder, pretrained, setting)
    try:
        model = load_at_size(load, changes)
    except UserError:
        raise
    except (*VALUE_ERRORS, AssertionError, OSError, SafetensorError, TypeError) as error:
        hint = ""
        if named and pretrained and not checkpoint:
            hint = f"; without a network, set {checkpoint_setting} to a file with its weights"
            if setting == "encoder":
                hint += " (random true, or init random, takes none)"
        raise UserError(f"{setting} is {source}, which cannot be loaded: {one_line(error)}{hint}") from error
    update_description(model, changes, eval_crop)
    return model


class Normalize(nn.Module):
    """Pixels (B, C, H, W) from 0 to 255, uint8 or float32, to an encoder's float32 input.

    Args:
        mean, std: of the channels, for pixels scaled to [0, 1].
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.register_buffer("shift", 255 * torch.tensor(self.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("scale", 255 * torch.tensor(self.std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.shift) / self.scale


def create_vit(config: ModelConfig, channels: int) -> nn.Module:
    """The plain transformer that the settings describe, with random weights, as timm creates it.

    Raises:
        UserError: an unknown name, a model that is no plain transformer, or one that does not fit the settings.
    """
    name, arguments = architecture(config)
    if channels != 3:
        arguments["in_chans"] = channels
    setting = f"model.name is {name}"
    refusals: tuple[type[Exception], ...] = (AssertionError, TypeError)
    if config.arguments:
        setting = f"model.arguments is {config.arguments}"
        refusals += VALUE_ERRORS
    try:
        encoder = timm.create_model(name, num_classes=0, **arguments)
    except UserError:
        raise
    except refusals as error:
        raise UserError(f"{setting}, which timm cannot build with these dimensions: {one_line(error)}") from error
    if not is_plain(encoder):
        raise UserError(f"model.name is {name}, a {type(encoder).__name__}; it must be {PLAIN_TRANSFORMERS}")
    if getattr(encoder, "attn_pool", None) is not None:
        serves = without_attention_pool(name)
        raise UserError(
            f"model.name is {name}, whose attention pooling cannot be trained here; {serves} builds it without"
        )
    allowed = "built by timm.models.build_model_with_cfg: an export needs the pretrained_cfg that it adds"
    require(hasattr(encoder, "pretrained_cfg"), "model.name", name, allowed)
    check_cells(encoder)
    has_positions = getattr(encoder, "pos_embed", None) is not None
    allowed = f"learned with {name}, which has position embeddings"
    require(config.position != "none" or not has_positions, "model.position", config.position, allowed)
    return encoder


def architecture(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Name and arguments by which timm builds the encoder: a plain one, or our `mpp_vit` where timm has none.

    Raises:
        UserError: an unknown name, or `model.arguments` that this timm model does not take.
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
    refused = set(SET_ELSEWHERE)
    name = config.name or PLAIN_VIT
    if config.is_variant():
        name = "mpp_vit"
        arguments |= dict(
            position=config.position,
            position_at=config.position_at,
            stride=config.stride,
            mixing=config.mixing,
            pos_embed=None,
        )
        refused.add("no_embed_class")
    if config.mixing == "axial":
        refused |= {"class_token", "reg_tokens", "global_pool", "fix_init"}

    if not timm.is_model(name):
        similar = difflib.get_close_matches(
            name, timm.list_models(NAMES_OF_TRANSFORMERS, exclude_filters="naflex*"), n=3
        )
        raise UserError(f"model.name is {name}; it must be {PLAIN_TRANSFORMERS}, such as {similar or PLAIN_VIT}")
    arguments |= further_arguments(config, name, refused | arguments.keys())
    return name, {argument: value for argument, value in arguments.items() if value is not None}


def further_arguments(config: ModelConfig, name: str, given: set[str]) -> dict[str, Any]:
    """`model.arguments`, for the timm model of that name.

    Args:
        given: arguments that other settings give, or that the user must not give.
    Raises:
        UserError: an argument that the model does not take, or positions that cannot be left out.
    """
    arguments = config.arguments or {}
    if not arguments and config.position != "none":
        return {}
    taken = constructor_arguments(name)
    can_lack_positions = "pos_embed" in taken
    allowed = f"learned with {name}, whose positions are its own"
    require(config.position != "none" or can_lack_positions, "model.position", config.position, allowed)
    allowed = f"some of {', '.join(sorted(taken - given))}"
    for argument in arguments:
        require(argument in taken - given, "model.arguments", argument, allowed)
    return arguments


def without_attention_pool(name: str) -> str:
    """The settings for a model like the named one, which pools by attention, without that head."""
    namesake = name.split(".")[0].replace("siglip_", "siglip_gap_")
    if namesake != name and timm.is_model(namesake):
        return f"model.name {namesake}"
    without_norm = "fc_norm" if "fc_norm" in constructor_arguments(name) else "use_fc_norm"
    arguments = f'{{"global_pool": "avg", "{without_norm}": false}}'
    return f"model.arguments '{arguments}'"


def load_at_size(load: Callable[[dict[str, Any]], nn.Module], changes: dict[str, Any]) -> nn.Module:
    """`load(changes)`; without `img_size` for networks of timm that take any size and lack that argument."""
    try:
        return load(changes)
    except TypeError:
        if "img_size" not in changes:
            raise
    return load({argument: value for argument, value in changes.items() if argument != "img_size"})


def load_named(name: str, pretrained: bool, weights: WeightsFile | None, changes: dict[str, Any]) -> nn.Module:
    """The timm model of that name, with the weights of a file or else those that timm has published."""
    if weights is None or not pretrained:
        return timm.create_model(name, pretrained, **changes)
    create = partial(timm.create_model, name, **changes)
    return load_timm_model(create, weights, {"file": str(weights.path), "custom_load": False})


def load_folder(folder: Path, pretrained: bool, setting: str, changes: dict[str, Any]) -> nn.Module:
    """The encoder of a folder in eval mode; its `pretrained_cfg` is that of the folder.

    Args:
        pretrained, changes: see `load_encoder`.
    """
    weights = WeightsFile(folder / "model.safetensors", setting, model="that its config.json is about")
    description = saved_config(folder)
    name = description.get("architecture", "")
    if name and not timm.is_model(name):
        require_imports(run_of(folder))
        raise UserError(
            f"the architecture in {folder / 'config.json'} is {name}; it must be a timm model, or one that a file of "
            "--import registers"
        )
    create = partial(timm.create_model, f"local-dir:{folder}", **changes)
    squares_only = is_model_in_modules(name, SQUARES_ONLY)
    if not pretrained:
        encoder = create(pretrained=False)
    elif squares_only and "img_size" in changes:
        encoder = create(pretrained=False)
        load_resampled(encoder, weights, trained_on(folder, "input_size"))
    else:
        encoder = load_timm_model(create, weights, changes.get("pretrained_cfg_overlay") or {})

    if description.get("position") == FIXED_POSITIONS:
        if pretrained:
            hold_positions(encoder, encoder.pos_embed.data)
        else:
            fix_positions(encoder)
    return encoder.eval()
