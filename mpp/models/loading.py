"""Load the weights of a file into a timm model: all that the model has and no others, resampled where sizes differ."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

import timm
from safetensors.torch import load_file
from timm.layers import PatchEmbed
from timm.models import adapt_input_conv
from torch import Tensor, nn

from mpp.config import ModelConfig, require, sides
from mpp.errors import UserError
from mpp.models.descriptions import first_weights, saved_config, saved_entry
from mpp.models.plain import BIAS_TABLE, TIMM_ERRORS, is_plain, model_without_memory
from mpp.runtime.messages import note
from mpp.runtime.weights import refuse_pickle, weight_names

Weights = dict[str, Tensor]
"""Weights by name."""
NOT_OF_ENCODERS = ("head.", "head_dist.", "attn_pool.", "decoder_", "mask_token")
"""Beginnings of the names of weights that an encoder may lack: heads, MAE's decoder, and [mask]."""
LONGEST_REASON = 400
"""Characters of torch's error for weights that do not fit."""


def load_first_weights(encoder: nn.Module, source: str) -> None:
    """Load the weights that `model.init_from` names: see `first_weights`.

    Raises:
        UserError: no such weights, or weights of an encoder that computes otherwise.
    """
    file = first_weights(source)
    load_weights(encoder, file, "model.init_from")
    require_same_computation(encoder, source, file.parent)


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
    heads = tuple(f"{classifier.split('.')[0]}." for classifier in classifiers)
    has_new_head = model.num_classes != model.pretrained_cfg.get("num_classes")
    built = model.state_dict()
    new = {name: tensor for name, tensor in built.items() if has_new_head and name.startswith(heads)}
    refuse_pickle(file, setting)
    weight_names(file, setting)  # a file that cannot be read is refused
    state = without_prefix(load_file(file), next(iter(built)), file)
    if built.keys() - new.keys() <= state.keys() - {"mask_token"}:
        state.pop("mask_token", None)  # by which timm's filters know files of other names
    state = adapt_channels(state, model, setting)
    others = (*NOT_OF_ENCODERS, *heads)
    try:
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


def adapt_channels(state: Weights, model: nn.Module, setting: str) -> Weights:
    """Weights with the first filters for the model's channels.

    Raises:
        UserError: they are of other channels, and not of RGB.
    """
    first = f"{model.pretrained_cfg.get('first_conv')}.weight"
    if first not in state:
        return state
    channels, wanted = (weights[first].shape[1] for weights in (state, model.state_dict()))
    if channels == wanted:
        return state
    require(channels == 3, f"{setting}'s input channels", channels, f"3 (RGB) or data.channels ({wanted})")
    note(f"{setting} is of RGB: its filters are summed or repeated for {wanted} channels, as timm does")
    return state | {first: adapt_input_conv(wanted, state[first])}


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
    config = saved_config(folder)
    if not timm.is_model(config.get("architecture", "")):
        return
    try:
        theirs = model_without_memory(config["architecture"], **config.get("model_args", {}) | {"num_classes": 0})
    except TIMM_ERRORS:  # a config.json of another library
        return
    of_weights, ours = describe_computation(theirs), describe_computation(encoder)
    allowed = f"weights of an encoder that computes as this one, with {ours}: theirs has {of_weights}"
    require(ours == of_weights, "model.init_from", source, allowed)


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
