"""Open an encoder that exists: a run folder, an encoder folder, a model of the hub, or a timm model."""

from functools import partial
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from timm.models import is_model_in_modules
from torch import nn

from mpp.errors import UserError, one_line
from mpp.models.descriptions import describe_changes, is_named, saved_config, trained_on
from mpp.models.encoder import BAD_VALUES, FIXED, fix_positions, hold_positions
from mpp.models.loading import build_with_weights, load_hybrid
from mpp.models.positions import Grid
from mpp.runtime.weights import encoder_folder, refuse_pickle, weight_names

HYBRIDS = ("vision_transformer_hybrid",)  # timm's module of ViTs on convolutions


def load_encoder(path: str | Path, pretrained: bool = True, **changes: Any) -> nn.Module:
    """Load an exported encoder: the library's front door.

    Positions that were fixed stay so: they are a buffer, and no parameter.

    Args:
        path: a run folder, an encoder folder, or hf-hub:NAME.
        pretrained: False: the architecture with random weights.
        changes: arguments of `timm.create_model` that differ, such as `img_size=96` (position embeddings are resampled
            in 2-D) or `num_classes=10` (a new head).
    Returns:
        The timm model in eval mode. `forward_features` gives tokens (B, 1 + N, D), [class] first, of images that are
        normalised: `timm.data.resolve_model_data_config(model)` says size, mean, std and crop, after `changes`.
        Calling it gives [class] (B, D), which masked patch prediction did not train; with
        `global_pool="avg", fc_norm=False` the mean.
    Raises:
        UserError: no encoder there, or weights that cannot be read or are not this model's.
    """
    folder = encoder_folder(Path(path))
    encoder = load_folder(folder, "encoder", pretrained, changes)
    describe_changes(encoder, changes, saved_config(folder).get("eval_crop"))
    return encoder


def load_folder(folder: Path, setting: str, pretrained: bool, changes: dict[str, Any]) -> nn.Module:
    """The encoder of a folder in eval mode; its `pretrained_cfg` is that of the folder.

    Args:
        setting: the setting that names the folder.
        pretrained, changes: see `load_encoder`.
    """
    file, whose = folder / "model.safetensors", "that its config.json is about"
    about = saved_config(folder)
    build = partial(timm.create_model, f"local-dir:{folder}", **changes)
    if not pretrained:
        encoder = build(pretrained=False)
    elif "img_size" in changes and is_model_in_modules(about.get("architecture", ""), HYBRIDS):
        encoder = build(pretrained=False)
        load_hybrid(encoder, file, setting, whose, trained_on(folder, "input_size"))
    else:
        overlay = changes.get("pretrained_cfg_overlay") or {}
        encoder = build_with_weights(build, file, setting, whose, overlay)
    fixed = about.get("position") == FIXED
    if fixed and not pretrained:
        fix_positions(encoder)
    elif fixed:
        hold_positions(encoder, encoder.pos_embed.data)
    return encoder.eval()


def create(
    encoder: str,
    img_size: int | Grid | None = None,
    pretrained: bool = True,
    checkpoint: str | None = None,
    num_classes: int | None = 0,
    key: str = "encoder",
    **changes: Any,
) -> nn.Module:
    """The model of a run folder or an encoder folder, of the hub (hf-hub:NAME), or the timm model of that name.

    Args:
        img_size: that a ViT is built for, resampled; None: its own.
        pretrained: with weights: a folder's own, those in `checkpoint`, or those that timm has published.
        checkpoint: .safetensors file with the weights of a timm model.
        num_classes: 0: without a head; None: with its own.
        key: the setting that names it.
        changes: other arguments of `timm.create_model` that differ.
    Raises:
        UserError: nothing of that name, or nothing that can be loaded.
    """
    named = is_named(encoder)
    file = "checkpoint" if key == "encoder" else f"{key}_checkpoint"
    if checkpoint and not named:
        raise UserError(f"{file} goes with the name of a timm model; a folder has its own weights")
    if named and not timm.is_model(encoder):
        raise UserError(f"{key} is {encoder}: no folder of that name, and no timm model")
    if checkpoint:
        refuse_pickle(Path(checkpoint), file)
        weight_names(Path(checkpoint), file)
    folder = None if named else encoder_folder(Path(encoder), key)
    eval_crop = saved_config(folder).get("eval_crop") if folder else None
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
