"""Load the weights of a file into a model: all that the model has and no others, resampled where sizes differ."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from torch import Tensor, nn

from mpp.config import ImageSize, ModelConfig, require
from mpp.errors import UserError, one_line
from mpp.models.attention import is_attention
from mpp.models.descriptions import (
    first_weights,
    folder_of_weights,
    saved_config,
    saved_section,
    stride_of,
    trained_on,
)
from mpp.models.plain import build_without_memory
from mpp.models.vit import VariantViT, resample
from mpp.runtime.messages import note, shortened
from mpp.runtime.weights import weight_names, weights_file

NOT_OF_ENCODERS = ("head.", "head_dist.", "attn_pool.", "decoder_", "mask_token")
"""Beginnings of the names of weights that an encoder may lack: heads, MAE's decoder, and [mask]."""
IN_CHECKPOINTS = ("encoder.", "student.encoder.")
"""Beginnings of the names of the weights that a run trains, in its checkpoints."""
COMPUTED_POSITIONS = ("rope", "sincos_2d")
"""Positions of `VariantViT` that are no weights."""


class WeightsFile(NamedTuple):
    """A .safetensors file that is to be loaded, with the words that messages about it need."""

    path: Path
    setting: str
    """Name of the setting that holds the path."""
    model: str
    """The model that has such weights: "of resnet18"."""

    def names(self) -> list[str]:
        """Names of the weights. Raises UserError where the file cannot be read."""
        return weight_names(self.path, self.setting)

    def wrapper(self, model_names: Collection[str]) -> str:
        """The prefix of all names (see `wrapper_of`), with a note that it is left out; empty where there is none."""
        wrapper = wrapper_of(self.names(), model_names)
        if wrapper:
            note(f"the names of all weights in {self.path} begin with `{wrapper}`, which is left out")
        return wrapper

    def encoder_tensors(self, model_names: Collection[str]) -> dict[str, Tensor]:
        """An encoder's weights: without a prefix of all names, or of all but those of heads, a decoder and [mask].

        A note names the prefix or the weights that are left out.
        """
        names = self.names()
        of_encoder = [name for name in names if not name.startswith(NOT_OF_ENCODERS)]
        wrapper = checkpoint_wrapper(names, model_names) or wrapper_of(of_encoder, model_names)
        if not wrapper or all(name.startswith(wrapper) for name in names):
            return self.tensors(self.wrapper(model_names))
        others = shortened([name for name in names if not name.startswith(wrapper)])
        note(f"the weights in {self.path} whose names begin with `{wrapper}` are taken, and {others} left out")
        return {
            name.removeprefix(wrapper): tensor
            for name, tensor in load_file(self.path).items()
            if name.startswith(wrapper)
        }

    def tensors(self, wrapper: str) -> dict[str, Tensor]:
        """The weights, by names without this prefix."""
        return {name.removeprefix(wrapper): tensor for name, tensor in load_file(self.path).items()}

    def require_fit(self, missing: Collection[str], left_over: Collection[str]) -> None:
        """Raise UserError where the model has weights that the file lacks, or the other way round."""
        if missing:
            raise self.refusal(f"it lacks {shortened([*missing])}")
        if left_over:
            raise self.refusal(f"it has {shortened([*left_over])}, which the model does not have")

    def require_names(self, model_names: Collection[str], names: Collection[str]) -> None:
        """Raise UserError where the file's names (without wrapper) are not those of the model."""
        missing = [name for name in model_names if name not in names]
        left_over = [name for name in names if name not in model_names]
        self.require_fit(missing, left_over)

    def refusal(self, problem: str) -> UserError:
        """The error of weights that do not fit."""
        return UserError(f"{self.setting} is {self.path}; it must be the weights {self.model}; {problem}")


def wrapper_of(names: Sequence[str], model_names: Collection[str]) -> str:
    """The prefix of all names without which most of them are the model's; empty where there is none.

    Weights that were saved from within a larger module have one, such as `module.` or `student.backbone.`.

    Args:
        names: of the weights in a file.
        model_names: of the model's weights.
    """
    prefixes = [""]
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):  # the parts of all names at one level
        if len(set(parts)) > 1:
            break
        prefixes.append(f"{prefixes[-1]}{parts[0]}.")

    def matches(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in model_names for name in names)

    return max(prefixes, key=matches)


def checkpoint_wrapper(names: Collection[str], model_names: Collection[str]) -> str:
    """The prefix of an encoder's weights in a checkpoint of a run; empty: these are other names."""
    for prefix in IN_CHECKPOINTS:
        if {f"{prefix}{name}" for name in model_names} <= set(names):
            return prefix
    return ""


def load_weights(encoder: nn.Module, source: str) -> None:
    """Load the weights that `model.init_from` names, by timm's own filter and resampled to the encoder's sizes.

    Args:
        source: run folder, encoder folder, .safetensors file, zoo:NAME, hf-hub:NAME, or the name of a timm model.
    Raises:
        UserError: no such weights, weights of another architecture, or only a part of them.
    """
    path = Path(first_weights(source))
    setting = "model.init_from"
    file = WeightsFile(weights_file(path, setting), setting, "of an encoder as the model settings describe it")
    folder = file.path.parent
    model_names = encoder.state_dict().keys()
    state = file.encoder_tensors(model_names)
    if model_names <= state.keys():
        state.pop("mask_token", None)  # by which timm's filters know files of other names
    try:
        state = adapt_channels(state, encoder)
        state = resample(state, encoder, trained_on(folder, "input_size"), stride_of(folder))
        state = {name: tensor for name, tensor in state.items() if not name.startswith(NOT_OF_ENCODERS)}
        file.require_names(model_names, state)
        encoder.load_state_dict(state)
    except UserError:
        raise
    except (AttributeError, KeyError):  # a file without the patch filters, or with tables that the encoder lacks
        file.require_names(model_names, state)
        raise
    except (AssertionError, RuntimeError, ValueError) as error:  # timm cannot resample them
        raise file.refusal(first_lines(error)) from error
    require_same_computation(encoder, source, folder)


def require_same_computation(encoder: nn.Module, source: str, folder: Path) -> None:
    """Refuse weights that another encoder computes with in another way, by the config.json next to them.

    Raises:
        UserError: a trait that no weight shows differs.
    """
    description = saved_config(folder)
    name = description.get("architecture")
    if not isinstance(name, str) or not timm.is_model(name):
        return
    try:
        theirs = build_without_memory(name, **saved_section(folder, "model_args") | {"num_classes": 0})
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):  # a config.json of another library
        return
    of_weights = traits_without_weights(theirs)
    for trait, value in traits_without_weights(encoder).items():
        allowed = f"{of_weights[trait]} with the weights of {source}: they are of such an encoder"
        require(value == of_weights[trait], trait, value, allowed)


def traits_without_weights(encoder: nn.Module) -> dict[str, str]:
    """Traits of an encoder's computation that its weights do not show: the name in a message -> the value."""
    heads = {str(module.num_heads) for module in encoder.modules() if is_attention(module)}
    activations = {type(module.act).__name__ for module in encoder.modules() if hasattr(module, "act")}
    computed = isinstance(encoder, VariantViT) and encoder.position in COMPUTED_POSITIONS
    return {
        "model.heads": ", ".join(sorted(heads)),
        "the model's activation": ", ".join(sorted(activations)),
        "model.position": encoder.position if computed else "none",  # or with weights, which show it
        "model.position_at": getattr(encoder, "position_at", "stem"),
    }


def note_other_moments(config: ModelConfig, channels: int) -> None:
    """Print a note where `model.init_from` was trained on images that were normalised in another way."""
    path = config.init_from
    folder = folder_of_weights(path)
    for name, values in zip(("mean", "std"), config.normalization(channels), strict=True):
        trained_values = trained_on(folder, name)
        if not trained_values or len(trained_values) != len(values):
            continue
        if getattr(config, name) in ("auto", None):  # measured or taken later
            continue
        if any(abs(value - trained) > 1e-6 for value, trained in zip(values, trained_values, strict=True)):
            theirs = list(trained_values)
            note(f"model.{name} is {list(values)}, and {path} learned with {theirs}: model.{name} null takes these")


def moments_of_weights(config: ModelConfig, channels: int) -> ModelConfig:
    """The settings with the moments of the first weights instead of a `model.mean` or `model.std` that is null.

    Raises:
        UserError: no config.json next to the weights has the moments that they were trained with.
    """
    if None not in (config.mean, config.std):
        return config
    found: dict[str, Any] = {}
    for name in ("mean", "std"):
        if getattr(config, name) is not None:
            continue
        values = trained_on(folder_of_weights(config.init_from), name)
        allowed = f"numbers or auto: no config.json next to {config.init_from} has those of the weights"
        require(values is not None, f"model.{name}", "null", allowed)
        if len(values) != channels:  # the mean of the known channels serves for each of the others
            values = (sum(values) / len(values),) * channels
        found[name] = tuple(float(value) for value in values)
    return replace(config, **found)


def adapt_channels(state: dict[str, Tensor], encoder: nn.Module) -> dict[str, Tensor]:
    """Weights with the first filters for the encoder's channels.

    Raises:
        UserError: they are of other channels, and not of RGB.
    """
    convolutions = (item for item in encoder.named_modules() if isinstance(item[1], nn.Conv2d))
    name, first = next(convolutions)
    filters = state.get(f"{name}.weight")
    if filters is None or filters.shape[1] == first.in_channels:
        return state
    channels = filters.shape[1]
    allowed = f"3 (RGB) or data.channels ({first.in_channels})"
    require(channels == 3, "model.init_from's input channels", channels, allowed)
    how = "are summed" if first.in_channels == 1 else "are repeated, and scaled by 3 / data.channels"
    note(f"model.init_from is of RGB: its filters {how} for {first.in_channels} channels, as timm does")
    return state | {f"{name}.weight": adapt_input_conv(first.in_channels, filters)}


def load_resampled(encoder: nn.Module, file: WeightsFile, size: ImageSize | None) -> None:
    """Load the weights of a hybrid or a Beit, whose grid of positions timm does not know.

    Args:
        size: height and width of the images that the weights were trained on.
    Raises:
        UserError: a file that cannot be read, or has other weights than the model.
    """
    model_state = encoder.state_dict()
    state = file.tensors(file.wrapper(model_state))
    state = resample(adapt_channels(state, encoder), encoder, size)
    body = {name: tensor for name, tensor in state.items() if not is_of_head(name, encoder)}
    body_names = [name for name in model_state if not is_of_head(name, encoder)]
    file.require_names(body_names, body)

    def fits(name: str, tensor: Tensor) -> bool:
        return name in model_state and tensor.shape == model_state[name].shape

    fitting = {name: tensor for name, tensor in state.items() if fits(name, tensor)}
    encoder.load_state_dict(fitting | body, strict=False)  # a head of other classes is new


def load_timm_model(create: Callable[..., nn.Module], file: WeightsFile, overlay: dict[str, Any]) -> nn.Module:
    """A timm model with the weights of a file: all that it has except those of a new head, and none left over.

    Args:
        create: `timm.create_model` with its other arguments; takes `pretrained` and `pretrained_cfg_overlay`.
        overlay: entries of `pretrained_cfg` by which timm finds the file.
    Raises:
        UserError: a file that cannot be read, or has other weights than the model.
    """
    names = file.names()
    wrapper = ""
    if len({name.split(".")[0] for name in names}) == 1:
        wrapper = file.wrapper(names_of_model(create))
    if wrapper:
        names = [name.removeprefix(wrapper) for name in names]
        overlay = overlay | {"source": None, "file": None, "custom_load": False, "state_dict": file.tensors(wrapper)}

    load = partial(create, pretrained=True, pretrained_cfg_overlay=overlay)
    try:
        with collect_unexpected_weights() as unexpected:
            model = load()
    except RuntimeError as error:
        file.require_names(names_of_model(create), names)
        raise file.refusal(first_lines(error)) from error
    model.pretrained_cfg.pop("state_dict", None)
    missing = missing_weights(model, names, load)
    left_over = [name for name in unexpected if not is_of_head(name, model)]
    file.require_fit(missing, left_over)
    return model


@contextmanager
def collect_unexpected_weights() -> Iterator[list[str]]:
    """Collect the names of weights that a file has and the model does not: timm only logs them."""
    unexpected: list[str] = []
    logger = logging.getLogger("timm.models._builder")
    level = logger.level

    def collect(record: logging.LogRecord) -> bool:
        _, begins, names = record.getMessage().partition("Unexpected keys (")
        unexpected.extend(names.partition(") found")[0].split(", ") if begins else [])
        return not begins

    logger.addFilter(collect)
    logger.setLevel(logging.WARNING)  # a program may have turned warnings off
    try:
        yield unexpected
    finally:
        logger.removeFilter(collect)
        logger.setLevel(level)


def missing_weights(model: nn.Module, names: Collection[str], load: Callable[[], nn.Module]) -> list[str]:
    """Names of a loaded model's weights that its file, with these names, did not have. A new head's do not count.

    timm knows some files by other names than the model's: weights under names that the model lacks may have been
    loaded. They were where they do not depend on the random numbers that the model is built with.
    """
    model_names = model.state_dict().keys()
    counted = [name for name in model_names if not name.endswith("num_batches_tracked")]  # which older files lack
    missing = [name for name in counted if name not in names and not is_of_head(name, model)]
    renamed = any(name not in model_names and not is_of_head(name, model) for name in names)
    if missing and renamed and not any_random(model, load, missing):
        return []
    return missing


def any_random(model: nn.Module, load: Callable[[], nn.Module], names: Sequence[str]) -> bool:
    """Whether one of these weights was not loaded: it differs in a model that is built with other random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        other_state = load().state_dict()
    state = model.state_dict()
    return any(not torch.equal(state[name], other_state[name]) for name in names)


def names_of_model(create: Callable[..., nn.Module]) -> Collection[str]:
    """The names of a model's weights; the global random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        return create(pretrained=False).state_dict().keys()


def is_of_head(name: str, model: nn.Module) -> bool:
    """Whether a weight belongs to the classification head, which is new for another number of classes."""
    classifiers = model.pretrained_cfg.get("classifier") or ()
    if isinstance(classifiers, str):
        classifiers = (classifiers,)
    heads = {classifier.split(".")[0] for classifier in classifiers}
    return name.split(".")[0] in heads


def first_lines(error: Exception) -> str:
    """The first lines of an error that torch raises with a line for each weight."""
    lines = str(error).splitlines()[1:]
    if not lines:
        return one_line(error)
    return shortened([line.strip() for line in lines])
