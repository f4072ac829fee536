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

from mpp.config import HOW_READ, ImageSize, resized_side, sides
from mpp.runtime.weights import HUB, encoder_folder, weights_file


def saved_config(folder: Path) -> dict[str, Any]:
    """The config.json of an encoder folder; empty: there is none, or none that can be read."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def trained_on(folder: Path, entry: str) -> Any:
    """The `mean`, `std` or `input_size` (height and width) of an exported encoder's images. None: unknown."""
    about = saved_config(folder).get("pretrained_cfg")
    found = about.get(entry) if isinstance(about, dict) else None
    return found and tuple(found[1:] if entry == "input_size" else found)


def stride_of(folder: Path) -> int | None:
    """Pixels from one patch to the next of an exported encoder of `mpp_vit`; None: unknown."""
    arguments = saved_config(folder).get("model_args")
    return arguments.get("stride") or arguments.get("patch_size") if isinstance(arguments, dict) else None


def is_named(encoder: str) -> bool:
    """Whether an encoder is given by the name of a timm model, not by a path or a name on the hub."""
    return not (encoder.startswith(HUB) or Path(encoder).exists())


def how_read(encoder: str) -> dict[str, Any]:
    """Settings by which the training images were read, of an encoder without its run; empty: as usual, or unknown.

    Raises:
        UserError: no encoder there.
    """
    if is_named(encoder) or Path(encoder).is_file():
        return {}
    saved = saved_config(encoder_folder(Path(encoder))).get("data") or {}  # loading it refuses a broken file
    return {name: saved[name] for name in HOW_READ if name in saved}


def learned_labels(encoder: str) -> bool:
    """Whether an encoder is known to have learned from labels or texts, or from an encoder that did.

    The published weights of a timm model have classes then. A folder's config.json has classes, or says so; it counts
    for a weights file next to it, too.

    Args:
        encoder: a run folder, an encoder folder, hf-hub:NAME, a weights file, or the name of a timm model.
    """
    if is_named(encoder):
        known = timm.get_pretrained_cfg(encoder) if timm.is_model(encoder) else None
        return known is not None and known.num_classes > 0
    path = Path(encoder)
    about = saved_config(weights_file(path, "encoder").parent)
    has_classes = about.get("num_classes") not in (None, 0)
    return about.get("learned_labels") is True or has_classes


def timm_crop_pct(img_size: int | ImageSize, share: float) -> float:
    """The `crop_pct` with which timm resizes and crops an image as `centre_crop` of mpp/data/crops.py does.

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
    """Update a model's `pretrained_cfg`, by which `timm.data.resolve_model_data_config` describes its images.

    timm leaves there the description of the weights, whatever the model was built for.

    Args:
        changes: arguments of `timm.create_model` that the model was built with.
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
