"""The encoder: any Vision Transformer of timm's. Build it, start it from weights, export it, load it.

An exported encoder is a folder in timm's own layout (`model.safetensors`, `config.json`), so that timm loads it by
`timm.create_model("local-dir:FOLDER", pretrained=True)`: alone, or after `import mpp` where it
is of mpp/models/variants.py.
"""

import difflib
import inspect
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import PatchEmbed
from timm.models import adapt_input_conv, is_model_in_modules, save_for_hf
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mpp.config import HOW_READ, ModelConfig, check_grid, require, resized_side, sides
from mpp.errors import UserError, one_line
from mpp.models.positions import Grid, sincos_2d
from mpp.models.variants import OverlappingPatchEmbed, VariantViT, resample
from mpp.runtime.disk import aside_of, put
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.weights import (
    HUB,
    NAMED,
    encoder_folder,
    misfit,
    refuse_pickle,
    weight_names,
    weights_file,
    wrapper_of,
)

FIXED = "sincos_2d"  # positions that are not learned
PLAIN = "vit_base_patch16_224"  # timm's plain ViT, built to other numbers where no name is given
SET_ELSEWHERE = {"num_classes", "in_chans", "drop_rate", "dynamic_img_size", "dynamic_img_pad", "device", "dtype"}
SET_ELSEWHERE |= {"embed_layer", "block_fn", "mlp_layer", "attn_layer"}  # classes, which no config.json can hold
SET_ELSEWHERE |= {"patch_drop_rate"}  # drops tokens that are to be predicted
HYBRIDS = ("vision_transformer_hybrid",)  # timm's module of ViTs on convolutions
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
        raise UserError(f"model.name is {name}; it must be a Vision Transformer of timm's, such as {near or PLAIN}")
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
        raise UserError(f"model.name is {name}, a {type(encoder).__name__}; it must be a VisionTransformer of timm's")
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
        UserError: `model.arguments` that no Vision Transformer of timm's takes.
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
    """What `set_attention` said."""
    return any(getattr(module, "fused_attn", False) for module in encoder.modules())


def checkpoint_activations(encoder: nn.Module, key: str) -> None:
    """Keep few activations of a model of timm's, and compute the rest again in the backward pass.

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


def load_weights(encoder: VisionTransformer, path: Path) -> None:
    """Load the weights at `path` (run folder, encoder folder or .safetensors file), resampled to the encoder's sizes.

    Raises:
        UserError: no such file, or weights of another architecture.
    """
    setting, whose = "model.init_from", "of an encoder as the model settings describe it"
    file = weights_file(path, setting)
    names, own = weight_names(file, setting), encoder.state_dict().keys()
    wrapper = noted_wrapper(file, names, own)
    state = {name.removeprefix(wrapper): tensor for name, tensor in load_file(file).items()}
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


def noted_wrapper(file: Path, names: Sequence[str], own: Collection[str]) -> str:
    """The beginning of all names in a file that is left out (see `wrapper_of`), which is said."""
    wrapper = wrapper_of(names, own)
    if wrapper and os.environ.get("RANK", "0") == "0":
        print(f"note: the names of all weights in {file} begin with `{wrapper}`, which is left out")
    return wrapper


def refuse_misfit(setting: str, file: Path, whose: str, own: Collection[str], names: Collection[str]) -> None:
    """Raise UserError where a file has others than the model's `own` weights."""
    problem = misfit([name for name in own if name not in names], [name for name in names if name not in own])
    if problem:
        raise UserError(f"{setting} is {file}; it must be the weights {whose}; {problem}")


def first_lines(error: Exception) -> str:
    """An error of torch's that may have a line for each weight: a few of them."""
    lines = str(error).splitlines()[1:]
    more = f" (and {len(lines) - NAMED} more)" if len(lines) > NAMED else ""
    return "; ".join(line.strip() for line in lines[:NAMED]) + more if lines else one_line(error)


def note_other_moments(config: ModelConfig, channels: int) -> None:
    """Say that the weights to begin from learned from images that were normalised in another way."""
    path = Path(config.init_from)
    folder = path.parent if path.suffix == ".safetensors" else encoder_folder(path)
    for name, own in zip(("mean", "std"), config.normalization(channels), strict=True):
        theirs = trained_on(folder, name)
        known = theirs and getattr(config, name) != "auto"  # which is measured later
        other = known and len(theirs) == len(own) and any(abs(a - b) > 1e-6 for a, b in zip(theirs, own, strict=True))
        if other and os.environ.get("RANK", "0") == "0":
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
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {key} is of RGB: its filters {how} for {first.in_channels} channels, as timm does")
    return state | {f"{name}.weight": adapt_input_conv(first.in_channels, own)}


def saved_config(folder: Path) -> dict[str, Any]:
    """What an encoder folder's config.json says; empty: nothing that can be read."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def stride_of(folder: Path) -> int | None:
    """Pixels from one patch to the next of an exported encoder of `mpp_vit`; None: nothing says so."""
    try:
        arguments = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_args"]
        return arguments.get("stride") or arguments.get("patch_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def trained_on(folder: Path, what: str) -> Any:
    """What an exported encoder says of its images: height and width as `input_size`, `mean`, `std`. None: nothing."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pretrained_cfg"][what]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found and tuple(found[1:] if what == "input_size" else found)


def timm_crop_pct(img_size: int | Grid, share: float) -> float:
    """The `crop_pct` with which timm resizes and crops an image as `centre_crop` of mpp/data/images.py does.

    Of a square timm rounds side / crop_pct down, mpp to the nearest: of 32 / 0.875 one makes 36, the other 37. The
    result gives mpp's length in both ways. It is `share` itself wherever that is right.

    Args:
        img_size: of the input: a side, or height and width.
        share: of the shorter side, that the held-out view keeps.
    """
    height, width = sides(img_size)
    length = resized_side(height, share)
    return share if height != width or math.floor(height / share) == length else height / (length + 0.25)


def export_encoder(
    encoder: nn.Module,
    folder: Path,
    img_size: int | Grid,
    mean: Sequence[float],
    std: Sequence[float],
    crop_pct: float,
    card: str = "",
    how_read: dict[str, Any] | None = None,
    label_names: Sequence[str] | None = None,
    learned_labels: bool = False,
) -> None:
    """Write a timm model in timm's layout.

    Args:
        encoder: made by `timm.create_model`, which records the arguments that rebuild it.
        folder: complete or absent: written aside, synced to disk and renamed.
        img_size: of the images it was trained on: a side, or height and width.
        mean, std: of the input's channels, for pixels scaled to [0, 1].
        crop_pct: share of the shorter side that the held-out view keeps; timm gets `timm_crop_pct` of it.
        card: text of its README.md; empty: none is written.
        how_read: settings by which the pixels of files were read, where they are not as usual.
        label_names: of the classes that it learned, by number: timm's `pretrained_cfg["label_names"]`. None: those that
            a model with a head came with.
        learned_labels: whether it learned from labels, or from an encoder that did: `learned_labels` reads it.
    Raises:
        UserError: a head for another number of classes.
    """
    aside = aside_of(folder)
    shutil.rmtree(aside, ignore_errors=True)
    data_config = dict(mean=tuple(mean), std=tuple(std), interpolation="bilinear")
    data_config |= dict(input_size=(len(mean), *sides(img_size)), crop_pct=timm_crop_pct(img_size, crop_pct))
    ours: dict[str, Any] = {"pretrained_cfg": {"tag": "mpp", "license": None}}  # not of timm's weights of this name
    ours["eval_crop"] = crop_pct  # `load_encoder` needs it for other sizes
    if any(name == "pos_embed" for name, _ in encoder.named_buffers()):
        ours["position"] = FIXED  # `load_encoder` reads it; timm alone takes the table for learned
    if how_read:
        ours["data"] = how_read  # evaluation reads it
    if learned_labels:
        ours["learned_labels"] = True
    if label_names:
        count, allowed = len(label_names), f"{encoder.num_classes}, the outputs of the model's head"
        require(encoder.num_classes in (0, count), "the number of label_names", count, allowed)
        ours["label_names"] = list(label_names)  # which timm moves into pretrained_cfg
    save_for_hf(encoder, str(aside), model_config=ours, safe_serialization=True, data_config=data_config)
    saved = json.loads((aside / "config.json").read_text(encoding="utf-8"))
    saved.get("model_args", {}).pop("num_classes", None)  # it is in pretrained_cfg; transformers would give it twice
    if label_names or not encoder.num_classes:
        saved["pretrained_cfg"].pop("label_names", None)  # of what the encoder began from
    (aside / "config.json").write_text(json.dumps(saved, indent=2), encoding="utf-8")
    if card:
        (aside / "README.md").write_text(card, encoding="utf-8")
    put(aside, folder)


def load_encoder(path: str | Path, pretrained: bool = True, **changes: Any) -> nn.Module:
    """Load an exported encoder: the library's front door.

    Positions that were fixed stay so: they are a buffer, and no parameter.

    Args:
        path: a run folder, an encoder folder, or hf-hub:NAME.
        pretrained: False: the architecture with random weights.
        changes: arguments of timm's that differ, such as `img_size=96` (position embeddings are resampled in 2-D) or
            `num_classes=10` (a new head).
    Returns:
        The timm model in eval mode. `forward_features` gives tokens (B, 1 + N, D), [class] first, of images that are
        normalised: `timm.data.resolve_model_data_config(model)` says size, mean, std and crop, after `changes`.
        Calling it gives [class] (B, D), which masked patch prediction did not train; with
        `global_pool="avg", fc_norm=False` the mean.
    Raises:
        UserError: no encoder there, or weights that cannot be read or are not this model's.
    """
    return load_folder(encoder_folder(Path(path)), "encoder", pretrained, changes)


def load_folder(folder: Path, setting: str, pretrained: bool, changes: dict[str, Any]) -> nn.Module:
    """`load_encoder` of an encoder folder, which `setting` names."""
    file = folder / "model.safetensors"
    about = saved_config(folder)
    build = partial(timm.create_model, f"local-dir:{folder}", **changes)
    if not pretrained:
        encoder = build(pretrained=False)
    elif "img_size" in changes and is_model_in_modules(about.get("architecture", ""), HYBRIDS):
        encoder = build(pretrained=False)
        load_hybrid(encoder, file, setting, trained_on(folder, "input_size"))
    else:
        overlay = changes.get("pretrained_cfg_overlay") or {}
        encoder = build_with_weights(build, file, setting, "that its config.json is about", overlay)
    fixed = about.get("position") == FIXED
    if fixed and not pretrained:
        fix_positions(encoder)
    elif fixed:
        hold_positions(encoder, encoder.pos_embed.data)
    describe_changes(encoder, changes, about.get("eval_crop"))
    return encoder.eval()


def build_with_weights(
    build: Callable[..., nn.Module], file: Path, setting: str, whose: str, overlay: dict[str, Any]
) -> nn.Module:
    """A model of timm's with the weights of a file: all of its weights, but for a new head, and none left over.

    Args:
        build: takes `pretrained` and `pretrained_cfg_overlay`, as `timm.create_model` does.
        setting: that names the file.
        whose: the model, in a message: "of resnet18".
        overlay: of timm's pretrained_cfg, with which timm finds the file.
    Raises:
        UserError: a file that cannot be read, or has other weights than the model.
    """
    names = weight_names(file, setting)
    wrapper = ""
    if len({name.split(".")[0] for name in names}) == 1:
        wrapper = noted_wrapper(file, names, own_names(build))
    if wrapper:
        state = {name.removeprefix(wrapper): tensor for name, tensor in load_file(file).items()}
        overlay = overlay | {"source": None, "file": None, "custom_load": False, "state_dict": state}
    names = [name.removeprefix(wrapper) for name in names]
    load = partial(build, pretrained=True, pretrained_cfg_overlay=overlay)
    try:
        with weights_without_use() as left_over:
            model = load()
    except RuntimeError as error:
        refuse_misfit(setting, file, whose, own_names(build), names)
        raise UserError(f"{setting} is {file}; it must be the weights {whose}: {first_lines(error)}") from error
    model.pretrained_cfg.pop("state_dict", None)
    own = [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]  # which older files lack
    missing = [name for name in own if name not in names and not of_head(name, model)]
    known = all(name in model.state_dict() or of_head(name, model) for name in names)
    if missing and not known:  # timm may know them by other names
        missing = left_random(model, load, missing)
    problem = misfit(missing, [name for name in left_over if not of_head(name, model)])
    if problem:
        raise UserError(f"{setting} is {file}; it must be the weights {whose}; {problem}")
    return model


def own_names(build: Callable[..., nn.Module]) -> Collection[str]:
    """The names of a model's weights; nothing random is drawn for it."""
    with torch.random.fork_rng(devices=[]):
        return build(pretrained=False).state_dict().keys()


def of_head(name: str, model: nn.Module) -> bool:
    """Whether a weight is of the classifier, or of the module that has it: another number of classes has another."""
    classifiers = model.pretrained_cfg.get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    return name.split(".")[0] in {classifier.split(".")[0] for classifier in classifiers}


@contextmanager
def weights_without_use() -> Iterator[list[str]]:
    """Collect the names of weights for which timm's loading has no use, which it only logs."""
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


def describe_changes(model: nn.Module, changes: dict[str, Any], eval_crop: float | None = None) -> None:
    """Say in a model's `pretrained_cfg`, which `timm.data.resolve_model_data_config` reads, what it takes now.

    timm leaves there what the weights were made for.

    Args:
        changes: arguments of timm's with which the model was built.
        eval_crop: share of the shorter side that mpp's held-out view keeps; None: crop_pct stays.
    """
    about = model.pretrained_cfg
    own, *size = about["input_size"]
    size, channels = changes.get("img_size") or size, changes.get("in_chans") or own
    if changes.get("img_size") and eval_crop:
        about["crop_pct"] = timm_crop_pct(size, eval_crop)
    if channels != own:  # other channels are like the mean of those that are known
        for name in ("mean", "std"):
            about[name] = (sum(about[name]) / len(about[name]),) * channels
    if (own, *about["input_size"][1:]) != (channels, *sides(size)):
        about["input_size"] = (channels, *sides(size))
        about.pop("test_input_size", None)  # of the size that it had
    classes = changes.get("num_classes")
    if classes is not None and classes != about.get("num_classes"):
        about["num_classes"] = classes
        for name in ("label_names", "label_descriptions", "label_offset"):
            about.pop(name, None)


def load_hybrid(encoder: VisionTransformer, file: Path, setting: str, size: Grid | None) -> None:
    """Load weights for images of this size: timm does not know the grid of a hybrid's positions."""
    own = encoder.state_dict()
    wrapper = noted_wrapper(file, weight_names(file, setting), own)
    state = {name.removeprefix(wrapper): tensor for name, tensor in load_file(file).items()}
    state = resample(of_these_channels(state, encoder), encoder, size)
    body = {name: tensor for name, tensor in state.items() if not of_head(name, encoder)}
    wanted = [name for name in own if not of_head(name, encoder)]
    refuse_misfit(setting, file, "that its config.json is about", wanted, body)
    fitting = {name: tensor for name, tensor in state.items() if name in own and tensor.shape == own[name].shape}
    encoder.load_state_dict(fitting | body, strict=False)  # a head of other classes is new


def create(
    encoder: str,
    img_size: int | Grid | None = None,
    pretrained: bool = True,
    checkpoint: str | None = None,
    num_classes: int | None = 0,
    key: str = "encoder",
    **changes: Any,
) -> nn.Module:
    """The model of a run folder, an encoder folder, a name of the hub's (hf-hub:NAME), or timm's of that name.

    Args:
        img_size: that a ViT is built for, resampled; None: its own.
        pretrained: with weights: a folder's own, those in `checkpoint`, or those that timm has published.
        checkpoint: .safetensors file with the weights of a timm name.
        num_classes: 0: without a head; None: with its own.
        key: the setting that names it.
        changes: other arguments of timm's that differ.
    Raises:
        UserError: nothing of that name, or nothing that can be loaded.
    """
    named = is_named(encoder)
    file = "checkpoint" if key == "encoder" else f"{key}_checkpoint"
    if checkpoint and not named:
        raise UserError(f"{file} goes with the name of a timm model; a folder has its own weights")
    if named and not timm.is_model(encoder):
        raise UserError(f"{key} is {encoder}: no folder of that name, and no model of timm's")
    if checkpoint:
        refuse_pickle(Path(checkpoint), file)
        weight_names(Path(checkpoint), file)
    folder = None if named else encoder_folder(Path(encoder), key)
    eval_crop = None if named else saved_config(folder).get("eval_crop")
    sizes = [{}] if img_size is None else [{"img_size": img_size}, {}]  # timm's convolutional networks know no img_size
    for size in sizes:
        options = dict(num_classes=num_classes, **changes, **size)
        try:
            if folder:
                model = load_folder(folder, key, pretrained, options)
            elif checkpoint and pretrained:
                build = partial(timm.create_model, encoder, **options)
                where = {"file": checkpoint, "custom_load": False}
                model = build_with_weights(build, Path(checkpoint), file, f"of {encoder}", where)
            else:
                model = timm.create_model(encoder, pretrained, **options)
            describe_changes(model, options | {"img_size": img_size}, eval_crop)
            return model
        except UserError:
            raise
        except TypeError as error:
            reason: Exception = error
        except (*BAD_VALUES, AssertionError, OSError, SafetensorError) as error:
            reason = error
            break
    published = named and pretrained and not checkpoint
    hint = f"; without a network, {file} names a file with its weights" if published else ""
    hint += " (random true, or init random, takes none)" if published and key == "encoder" else ""
    raise UserError(f"{key} is {encoder}, which cannot be loaded: {one_line(reason)}{hint}") from reason


def is_named(encoder: str) -> bool:
    """Whether an encoder is no folder, here or on the hub, but a name: that of a model of timm's."""
    return not (encoder.startswith(HUB) or Path(encoder).exists())


def how_read(encoder: str) -> dict[str, Any]:
    """How the files were read that an encoder without its run was trained on, as far as its own folder says it.

    Raises:
        UserError: no encoder there.
    """
    if is_named(encoder) or Path(encoder).is_file():
        return {}
    saved = saved_config(encoder_folder(Path(encoder))).get("data") or {}  # what is wrong with it, its loading says
    return {name: saved[name] for name in HOW_READ if name in saved}


def learned_labels(encoder: str) -> bool:
    """Whether an encoder is known to have learned from labels or texts, or from an encoder that did.

    A name of timm's has classes then; a folder has them, or says so. Nothing is known of a weights file alone.

    Args:
        encoder: a run folder, an encoder folder, hf-hub:NAME, a weights file, or a name of timm's.
    """
    if is_named(encoder):
        known = timm.get_pretrained_cfg(encoder) if timm.is_model(encoder) else None
        return known is not None and known.num_classes > 0
    path = Path(encoder)
    about = saved_config(weights_file(path, "encoder").parent)
    has_classes = about.get("num_classes") not in (None, 0)
    return about.get("learned_labels") is True or has_classes


def has_class(encoder: nn.Module) -> bool:
    """Whether an encoder of timm's has a [class] token; not all of timm's modules say so."""
    return getattr(encoder, "has_class_token", getattr(encoder, "cls_token", None) is not None)


def left_random(model: nn.Module, again: Callable[[], nn.Module], names: Sequence[str]) -> list[str]:
    """These weights of a model, if one of them was not loaded: built again by other random numbers, it is another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        others = again().state_dict()
    own = model.state_dict()
    return [*names] if any(not torch.equal(own[name], others[name]) for name in names) else []
