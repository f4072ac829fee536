"""Load the weights of a file into a model: all that the model has and no others, resampled where sizes differ."""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mpp.config import ModelConfig, require
from mpp.errors import UserError, one_line
from mpp.models.descriptions import stride_of, trained_on
from mpp.models.positions import Grid
from mpp.models.vit import resample
from mpp.runtime.messages import on_first_process
from mpp.runtime.weights import NAMED, encoder_folder, misfit, weight_names, weights_file, wrapper_of


def load_weights(encoder: VisionTransformer, path: Path) -> None:
    """Load the weights at `path` (run folder, encoder folder or .safetensors file), resampled to the encoder's sizes.

    Raises:
        UserError: no such file, or weights of another architecture.
    """
    setting, whose = "model.init_from", "of an encoder as the model settings describe it"
    file = weights_file(path, setting)
    own = encoder.state_dict().keys()
    state = unwrapped(file, noted_wrapper(file, weight_names(file, setting), own))
    try:
        size, stride = trained_on(file.parent, "input_size"), stride_of(file.parent)
        state = resample(of_these_channels(state, encoder), encoder, size, stride)
        state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        refuse_misfit(setting, file, whose, own, state)
        encoder.load_state_dict(state)
    except KeyError:  # the patches, whose size is looked up
        refuse_misfit(setting, file, whose, own, state)
        raise
    except RuntimeError as error:
        raise UserError(f"{setting} is {file}; it must be the weights {whose}: {first_lines(error)}") from error


def note_other_moments(config: ModelConfig, channels: int) -> None:
    """Print a note where `model.init_from` was trained on images that were normalised in another way."""
    path = Path(config.init_from)
    folder = path.parent if path.suffix == ".safetensors" else encoder_folder(path)
    for name, own in zip(("mean", "std"), config.normalization(channels), strict=True):
        theirs = trained_on(folder, name)
        known = theirs and getattr(config, name) != "auto"  # which is measured later
        other = known and len(theirs) == len(own) and any(abs(a - b) > 1e-6 for a, b in zip(theirs, own, strict=True))
        if other and on_first_process():
            print(f"note: model.{name} is {list(own)}, and {path} learned with {list(theirs)}")


def of_these_channels(state: dict[str, Tensor], encoder: VisionTransformer) -> dict[str, Tensor]:
    """Weights with the first filters for the encoder's channels.

    Raises:
        UserError: they are of other channels, and not of RGB.
    """
    name, (first, own) = next(
        (name, (module, state.get(f"{name}.weight")))
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Conv2d)
    )
    if own is None or own.shape[1] == first.in_channels:
        return state
    key, channels = "model.init_from", own.shape[1]
    require(channels == 3, f"{key}'s input channels", channels, f"3 (RGB) or data.channels ({first.in_channels})")
    how = "are summed" if first.in_channels == 1 else "are repeated, and scaled by 3 / data.channels"
    if on_first_process():
        print(f"note: {key} is of RGB: its filters {how} for {first.in_channels} channels, as timm does")
    return state | {f"{name}.weight": adapt_input_conv(first.in_channels, own)}


def load_hybrid(encoder: VisionTransformer, file: Path, setting: str, whose: str, size: Grid | None) -> None:
    """Load the weights of a hybrid, whose grid of positions timm does not know.

    Args:
        setting: the setting that names the file.
        whose: the model, in a message: "of resnet18".
        size: height and width of the images that the weights were trained on.
    Raises:
        UserError: a file that cannot be read, or has other weights than the model.
    """
    own = encoder.state_dict()
    state = unwrapped(file, noted_wrapper(file, weight_names(file, setting), own))
    state = resample(of_these_channels(state, encoder), encoder, size)
    body = {name: tensor for name, tensor in state.items() if not of_head(name, encoder)}
    wanted = [name for name in own if not of_head(name, encoder)]
    refuse_misfit(setting, file, whose, wanted, body)
    fitting = {name: tensor for name, tensor in state.items() if name in own and tensor.shape == own[name].shape}
    encoder.load_state_dict(fitting | body, strict=False)  # a head of other classes is new


def build_with_weights(
    build: Callable[..., nn.Module], file: Path, setting: str, whose: str, overlay: dict[str, Any]
) -> nn.Module:
    """A timm model with the weights of a file: all that it has except those of a new head, and none left over.

    Args:
        build: takes `pretrained` and `pretrained_cfg_overlay`, as `timm.create_model` does.
        setting: the setting that names the file.
        whose: the model, in a message: "of resnet18".
        overlay: entries of `pretrained_cfg` by which timm finds the file.
    Raises:
        UserError: a file that cannot be read, or has other weights than the model.
    """
    names = weight_names(file, setting)
    wrapper = ""
    if len({name.split(".")[0] for name in names}) == 1:
        wrapper = noted_wrapper(file, names, own_names(build))
    if wrapper:
        from_memory = {"source": None, "file": None, "custom_load": False, "state_dict": unwrapped(file, wrapper)}
        overlay = overlay | from_memory
    names = [name.removeprefix(wrapper) for name in names]
    load = partial(build, pretrained=True, pretrained_cfg_overlay=overlay)
    try:
        with unexpected_weights() as unexpected:
            model = load()
    except RuntimeError as error:
        refuse_misfit(setting, file, whose, own_names(build), names)
        raise UserError(f"{setting} is {file}; it must be the weights {whose}: {first_lines(error)}") from error
    model.pretrained_cfg.pop("state_dict", None)
    own = [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]  # which older files lack
    missing = [name for name in own if name not in names and not of_head(name, model)]
    known = all(name in model.state_dict() or of_head(name, model) for name in names)
    if missing and not known and not any_random(model, load, missing):  # timm knows them by other names
        missing = []
    problem = misfit(missing, [name for name in unexpected if not of_head(name, model)])
    if problem:
        raise UserError(f"{setting} is {file}; it must be the weights {whose}; {problem}")
    return model


@contextmanager
def unexpected_weights() -> Iterator[list[str]]:
    """Collect the names of weights that a file has and the model does not: timm only logs them."""
    found: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        unexpected = re.match(r"Unexpected keys \((.*)\) found while loading", record.getMessage())
        found.extend(unexpected[1].split(", ") if unexpected else ())
        return not unexpected

    logger = logging.getLogger("timm.models._builder")
    logger.addFilter(collect)
    try:
        yield found
    finally:
        logger.removeFilter(collect)


def any_random(model: nn.Module, build: Callable[[], nn.Module], names: Sequence[str]) -> bool:
    """Whether one of these weights was not loaded: in a model that is built with other random numbers it differs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        others = build().state_dict()
    own = model.state_dict()
    return any(not torch.equal(own[name], others[name]) for name in names)


def own_names(build: Callable[..., nn.Module]) -> Collection[str]:
    """The names of a model's weights; the global random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        return build(pretrained=False).state_dict().keys()


def of_head(name: str, model: nn.Module) -> bool:
    """Whether a weight belongs to the classification head, which is new for another number of classes."""
    classifiers = model.pretrained_cfg.get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    return name.split(".")[0] in {classifier.split(".")[0] for classifier in classifiers}


def noted_wrapper(file: Path, names: Sequence[str], own: Collection[str]) -> str:
    """The prefix of all names in a file (see `wrapper_of`), with a note that it is left out."""
    wrapper = wrapper_of(names, own)
    if wrapper and on_first_process():
        print(f"note: the names of all weights in {file} begin with `{wrapper}`, which is left out")
    return wrapper


def unwrapped(file: Path, wrapper: str) -> dict[str, Tensor]:
    """The weights of a file, by names without this prefix."""
    return {name.removeprefix(wrapper): tensor for name, tensor in load_file(file).items()}


def refuse_misfit(setting: str, file: Path, whose: str, own: Collection[str], names: Collection[str]) -> None:
    """Raise UserError where the `names` in a file are not those of the model's `own` weights."""
    problem = misfit([name for name in own if name not in names], [name for name in names if name not in own])
    if problem:
        raise UserError(f"{setting} is {file}; it must be the weights {whose}; {problem}")


def first_lines(error: Exception) -> str:
    """The first lines of an error that torch raises with a line for each weight."""
    lines = str(error).splitlines()[1:]
    more = f" (and {len(lines) - NAMED} more)" if len(lines) > NAMED else ""
    return "; ".join(line.strip() for line in lines[:NAMED]) + more if lines else one_line(error)
