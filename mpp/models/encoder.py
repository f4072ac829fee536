"""The two doors to an encoder: `build_encoder` makes one from settings, `load_encoder` opens one that exists.

Behind them stand plain.py (the parts of timm's) and descriptions.py (config.json); variants.py has architectures that
timm lacks. `Normalize` makes the input of an encoder.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import PatchEmbed
from timm.models import adapt_input_conv
from torch import Tensor, nn

from mpp.config import ModelConfig, changed_settings, require, show, sides
from mpp.config.imports import require_imports
from mpp.errors import UserError, one_line
from mpp.models.descriptions import first_weights, is_named, saved_config, saved_entry, update_description
from mpp.models.plain import (
    BIAS_TABLE,
    FIXED_POSITIONS,
    TIMM_ERRORS,
    check_cells,
    checkpoint_activations,
    fix_positions,
    is_plain,
    model_without_memory,
    set_attention,
    use_bf16_residual,
)
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.messages import note
from mpp.runtime.weights import SAFETENSORS_SUFFIX, WEIGHTS, describe_conversion, encoder_folder, run_of

PLAIN_VIT = "vit_base_patch16_224"  # timm's plain ViT, built to other numbers where no name is given
VARIANT = "mpp_vit"
OF_VARIANTS = ("position", "position_at", "stride", "mixing")
NUMBERS_OF_TIMM = ("embed_dim", "depth", "num_heads", "img_size", "patch_size")
RESAMPLED = {"img_size", "patch_size", "stride"}
"""Settings in which a model may differ from its first weights."""
PLAIN_TRANSFORMERS = "a plain transformer (VisionTransformer, Eva, Beit) that timm's build_model_with_cfg has built, "
PLAIN_TRANSFORMERS += f"such as {PLAIN_VIT}"
NO_POOLING = '{"global_pool": "avg", "fc_norm": false}'
SET_ELSEWHERE = {"num_classes", "in_chans", "drop_rate", "dynamic_img_size", "dynamic_img_pad", "device", "dtype"}
SET_ELSEWHERE |= {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "features_only"}
SET_ELSEWHERE |= {"patch_drop_rate"}  # drops tokens that are to be predicted
NOT_OF_ENCODERS = ("head.", "head_dist.", "attn_pool.", "decoder_", "mask_token")
"""Beginnings of the names of weights that an encoder may lack: heads, MAE's decoder, and [mask]."""
LONGEST_REASON = 400
"""Characters of torch's error for weights that do not fit."""
Weights = dict[str, Tensor]
"""Weights by name."""


def build_encoder(config: ModelConfig, channels: int = 3) -> nn.Module:
    """Build the plain timm transformer that the settings describe, without a classification head.

    Its weights are random, from torch's global generator, or those of `init_from` with position embeddings and patch
    filters resampled where the sizes differ, and filters on RGB repeated or summed where the channels do (timm's way).

    Raises:
        UserError: an unknown name, a model that is no plain transformer or does not fit, weights that do not fit.
    """
    config = with_architecture(config)
    name, arguments = architecture(config)
    try:
        encoder = timm.create_model(name, num_classes=0, in_chans=channels, **arguments)
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
        file = first_weights(config.init_from)
        load_weights(encoder, file, "model.init_from")
        require_same_computation(encoder, config.init_from, file.parent)
    if config.position == FIXED_POSITIONS and not config.is_variant():
        fix_positions(encoder)
    return encoder


def architecture(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Name and arguments by which timm builds the encoder: a plain one, or our `mpp_vit` where timm has none.

    Raises:
        UserError: an unknown name, or `model.arguments` that this timm model does not take.
    """
    arguments = config.numbers()
    arguments |= dict(
        embed_dim=arguments.pop("width"),
        num_heads=arguments.pop("heads"),
        pos_drop_rate=config.dropout or None,
        proj_drop_rate=config.dropout or None,
        drop_path_rate=config.drop_path or None,
        pos_embed="none" if config.position == "none" else None,
    )
    refused = set(SET_ELSEWHERE)
    name = config.name or PLAIN_VIT
    if config.is_variant():
        name = VARIANT
        arguments |= {each: getattr(config, each) for each in OF_VARIANTS}
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
    allowed = f"{PLAIN_TRANSFORMERS}, without batch norms and without attention pooling (model.arguments {NO_POOLING}; "
    allowed += f"Eva: use_fc_norm); this is a {type(encoder).__name__}"
    require(is_plain(encoder) and getattr(encoder, "attn_pool", None) is None, *setting, allowed)
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
        after `changes`. Calling it gives the feature (B, D) that its run was judged by, mostly the mean of the patches;
        of older exports and published weights [class], unless `global_pool="avg", fc_norm=False`.
    Raises:
        UserError: no encoder there, or weights that cannot be read or are not this model's.
    """
    source = str(source)
    changes = {argument: value for argument, value in changes.items() if value is not None}
    weights_setting = "checkpoint" if setting == "encoder" else f"{setting}_checkpoint"
    config: dict[str, Any] = {}
    if is_named(source):
        require(timm.is_model(source), setting, source, "the name of a timm model, or a folder that exists")
        name = source
        file = Path(checkpoint) if checkpoint else None  # None: those that timm has published
    else:
        require(checkpoint is None, weights_setting, checkpoint, f"null with {source}, which has its own weights")
        weights_setting = setting
        folder = encoder_folder(Path(source), setting)
        config = saved_config(folder)
        if not timm.is_model(config.get("architecture", "")):
            require_imports(run_of(folder))
        name = f"local-dir:{folder}"
        file = folder / WEIGHTS

    published = pretrained and file is None
    try:
        model = create_model(name, published, **changes)
    except (*TIMM_ERRORS, OSError) as error:
        hint = f" (without a network, set {weights_setting} to a file with its weights)" if published else ""
        raise UserError(f"{setting} is {source}, which cannot be loaded{hint}: {one_line(error)}") from error
    if config.get("position") == FIXED_POSITIONS:
        fix_positions(model)
    if pretrained and file:
        load_weights(model, file, weights_setting)
    update_description(model, changes.get("img_size"), config.get("eval_crop"))
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


# --- weights of a file: all that a model has and no others, resampled where sizes differ ---


def read_weights(file: Path, setting: str) -> Weights:
    """The weights of a .safetensors file.

    Raises:
        UserError: it is none, or cannot be read.
    """
    if file.suffix != SAFETENSORS_SUFFIX:
        raise UserError(f"{setting} is {file}; it must be a {SAFETENSORS_SUFFIX} file: {describe_conversion(file)}")
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        reason = f"{one_line(error)}; it must be a whole {SAFETENSORS_SUFFIX} file"
        raise UserError(f"{setting} is {file}, which cannot be read: {reason} (`git lfs pull` fetches it)") from error


def load_weights(model: nn.Module, file: Path, setting: str) -> None:
    """Load the weights of a .safetensors file by timm's own filter.

    Sizes that differ are resampled, from those in a config.json next to the file. Left out are a prefix of all names,
    and heads, decoders and [mask] that the model lacks. A head of other classes than those of the weights stays new.

    Args:
        setting: name of the setting that holds the file, for messages.
    Raises:
        UserError: a file that cannot be read, or that has other weights than the model.
    """
    classifiers = model.pretrained_cfg.get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    heads = tuple(f"{classifier}." for classifier in classifiers)
    has_new_head = model.num_classes != model.pretrained_cfg.get("num_classes")
    built = model.state_dict()
    new = {name: tensor for name, tensor in built.items() if has_new_head and name.startswith(heads)}
    state = without_prefix(read_weights(file, setting), next(iter(built)), file)
    if built.keys() - new.keys() <= state.keys() - {"mask_token"}:
        state.pop("mask_token", None)  # by which timm's filters know files of other names
    others = (*NOT_OF_ENCODERS, *heads)
    first = f"{model.pretrained_cfg.get('first_conv')}.weight"
    try:
        if first in state and state[first].shape[1] != (channels := built[first].shape[1]):
            note(f"{setting}'s filters are summed or repeated for {channels} channels, as timm does with those on RGB")
            state[first] = adapt_input_conv(channels, state[first])
        state = resample(state, model, saved_entry(file.parent, "input_size")[1:]) | new
        model.load_state_dict({name: state[name] for name in state if name in built or not name.startswith(others)})
    except TIMM_ERRORS as error:
        reason = shorten(f"{type(error).__name__}: {error}", LONGEST_REASON)
        raise UserError(f"{setting} is {file}; it must be the weights of the model that is built: {reason}") from error


def without_prefix(state: Weights, first_name: str, file: Path) -> Weights:
    """The weights by names without a prefix, such as `module.` or `encoder.`.

    It is the shortest before the first name of the model's weights; of equal ones the student's, not the teacher's.
    """
    ending = f".{first_name}"
    prefixes = [name.removesuffix(first_name) for name in state if f".{name}".endswith(ending)]
    prefix = min(prefixes, key=lambda each: (len(each), each), default="")
    if not prefix:
        return state
    note(f"of the weights in {file} only those are taken whose names begin with `{prefix}`")
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


# --- other sizes ---


def timm_filter(model: nn.Module) -> Callable[..., Weights]:
    """timm's conversion of a file's weights to a model's: other names, patch filters and positions of other sizes.

    It is defined in the module of the model's class, and takes the weights by name and the model.
    """
    for each in type(model).__mro__:
        module = sys.modules[each.__module__]
        if hasattr(module, "checkpoint_filter_fn"):
            return module.checkpoint_filter_fn
    return lambda state, model: state


def resample(state: Weights, model: nn.Module, size: Sequence[int] = ()) -> Weights:
    """Weights of another input size as this model's, by timm's filter; tables of the same size stay as they are.

    Args:
        size: height and width that the weights are for; empty: as far as timm knows, and otherwise all is timm's.
    Raises:
        ValueError: timm would take a table of positions for that of another grid.
    """
    size = size or model.pretrained_model_args.get("img_size")
    unchanged = {}
    if size and is_plain(model):
        size, own_size = sides(size), tuple(model.patch_embed.img_size)
        model.pretrained_model_args = {"img_size": size}  # from which timm's filters know the grid of `pos_embed`
        built = model.state_dict()
        tables = {name: state[name] for name in state if "pos_embed" in name or name.endswith(BIAS_TABLE)}
        if type(model.patch_embed) is PatchEmbed:
            tables.pop("pos_embed", None)
        fits = [name in built and built[name].shape == tables[name].shape for name in tables]
        if size == own_size and all(fits):
            unchanged = tables
        elif tables and (size[0] != size[1] or (any(fits) and own_size[0] != own_size[1])):
            raise ValueError(f"its positions are for {size} pixels, which fit this size alone, and not {own_size}")
    others = {name: tensor for name, tensor in state.items() if name not in unchanged}
    return timm_filter(model)(others, model) | unchanged


# --- what weights do not show ---


def require_same_computation(encoder: nn.Module, source: str, folder: Path) -> None:
    """Raise UserError where an encoder computes otherwise than the one in the config.json next to its first weights."""
    theirs = described_encoder(saved_config(folder))
    if theirs is None:
        return
    of_weights, ours = describe_computation(theirs), describe_computation(encoder)
    allowed = f"weights of an encoder that computes as this one, with {ours}: theirs has {of_weights}"
    require(ours == of_weights, "model.init_from", source, allowed)


def described_encoder(config: dict[str, Any]) -> nn.Module | None:
    """The encoder of a config.json, without memory; None: timm has no such model."""
    if timm.is_model(name := config.get("architecture", "")):
        with suppress(*TIMM_ERRORS):  # a config.json of another library
            return model_without_memory(name, **config.get("model_args", {}) | {"num_classes": 0})
    return None


def describe_computation(encoder: nn.Module) -> str:
    """The part of an encoder's computation that its weights do not show, in words."""
    heads = {module.num_heads for module in encoder.modules() if hasattr(module, "num_heads")}
    activations = {type(module.act).__name__ for module in encoder.modules() if hasattr(module, "act")}
    positions = getattr(encoder, "computed_positions", "none")
    return f"heads {sorted(heads)}, activation {sorted(activations)}, computed positions {positions}"


def moments_of_weights(config: ModelConfig, channels: int) -> ModelConfig:
    """The settings with the moments of the first weights instead of a `model.mean` or `model.std` that is null.

    A note says where others are given than those that the weights learned with.

    Raises:
        UserError: no config.json next to the weights has the moments that they were trained with.
    """
    if config.init_from is None:
        return config
    folder = first_weights(config.init_from).parent
    for name, ours in zip(("mean", "std"), config.normalization(channels), strict=True):
        given = getattr(config, name)
        theirs = tuple(saved_entry(folder, name))
        if given is None:
            allowed = f"numbers or auto: no config.json next to {config.init_from} has those of the weights"
            require(theirs, f"model.{name}", "null", allowed)
            if len(theirs) != channels:  # the mean of the known channels serves for each of the others
                theirs = (sum(theirs) / len(theirs),) * channels
            config = replace(config, **{name: theirs})
        elif given != "auto" and len(theirs) == channels and theirs != tuple(ours):
            note(f"model.{name} is {ours}, and {config.init_from} learned with {theirs}: null takes these")
    return config


# --- settings left open ---


def with_architecture(config: ModelConfig) -> ModelConfig:
    """The settings with those of the first weights, and the numbers of a named model, in the place of defaults.

    Raises:
        UserError: a setting contradicts the weights. Those in RESAMPLED do not.
    """
    if config.init_from:
        given, theirs = changed_settings(config), settings_of_weights(config.init_from)
        if config.name not in (None, theirs.get("name") or PLAIN_VIT):  # another model, which these may fit
            theirs = {name: theirs[name] for name in ("width", "depth", "heads") if theirs}
        if config.is_variant():  # built from the numbers of the weights, not by timm's name
            theirs["name"] = None
        if config.position == FIXED_POSITIONS:  # which takes the place of any table
            theirs.pop("position", None)
        ours, known = config.arguments or {}, theirs.get("arguments", {})
        given["arguments"], theirs["arguments"] = known | ours or None, ours | known or None
        for name in given.keys() & theirs.keys() - RESAMPLED - {"name"}:
            allowed = f"{show(theirs[name])}, as in the weights of {config.init_from}, or left out"
            require(given[name] == theirs[name], f"model.{name}", given[name], allowed)
        config = replace(config, **theirs | given)
    if config.name is None:
        return replace(config, **config.numbers())
    name, arguments = architecture(config)
    encoder = described_encoder({"architecture": name, "model_args": arguments})
    return replace(config, **numbers_of(encoder)) if has_numbers(encoder) else config


def settings_of_weights(source: str) -> dict[str, Any]:
    """The settings of the model that is described next to first weights; empty: none that mpp can build."""
    config = saved_config(first_weights(source).parent)
    encoder = described_encoder(config)
    if not has_numbers(encoder):
        return {}
    name, arguments = config["architecture"], config.get("model_args", {})
    settings = numbers_of(encoder) | {each: arguments[each] for each in OF_VARIANTS if each in arguments}
    usual = "none" if arguments.get("pos_embed") == "none" else config.get("position", "learned")
    settings.setdefault("position", usual)
    elsewhere = {*SET_ELSEWHERE, *NUMBERS_OF_TIMM, *OF_VARIANTS, "pos_embed"}
    usually_pooled = described_encoder(config | {"model_args": arguments | dict(global_pool=None, fc_norm=None)})
    is_free = usually_pooled is not None and usually_pooled.state_dict().keys() == encoder.state_dict().keys()
    if is_free or settings.get("mixing") == "axial":  # pooling changes no weights
        elsewhere |= {"global_pool", "fc_norm"}
    kept = {each: arguments[each] for each in arguments if each not in elsewhere and not each.endswith("_rate")}
    return settings | {"name": None if name in (PLAIN_VIT, VARIANT) else name, "arguments": kept}


def has_numbers(encoder: nn.Module | None) -> bool:
    """Whether an encoder is a plain transformer of square patches."""
    return encoder is not None and is_plain(encoder) and len({*encoder.patch_embed.patch_size}) == 1


def numbers_of(encoder: nn.Module) -> dict[str, Any]:
    """The five numbers of a plain transformer, as settings."""
    patches = encoder.patch_embed
    height, width = patches.img_size
    return dict(
        width=encoder.embed_dim,
        depth=len(encoder.blocks),
        heads=next(each.num_heads for each in encoder.blocks.modules() if hasattr(each, "num_heads")),
        img_size=height if height == width else (height, width),
        patch_size=patches.patch_size[0],
    )
