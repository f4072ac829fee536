"""The description of an encoder: its folder's config.json, or timm's `pretrained_cfg` of a model.

Size, mean, standard deviation and crop of its images, how their files were read, and whether it learned from labels.
"""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
from torch import nn

from mpp.config import HOW_READ, resized_side, sides
from mpp.models.positions import Grid
from mpp.runtime.weights import HUB, encoder_folder, weights_file


def saved_config(folder: Path) -> dict[str, Any]:
    """What an encoder folder's config.json says; empty: nothing that can be read."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def trained_on(folder: Path, what: str) -> Any:
    """What an exported encoder says of its images: height and width as `input_size`, `mean`, `std`. None: nothing."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pretrained_cfg"][what]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found and tuple(found[1:] if what == "input_size" else found)


def stride_of(folder: Path) -> int | None:
    """Pixels from one patch to the next of an exported encoder of `mpp_vit`; None: nothing says so."""
    try:
        arguments = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_args"]
        return arguments.get("stride") or arguments.get("patch_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


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
