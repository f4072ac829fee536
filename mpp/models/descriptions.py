"""The description of an encoder: its folder's config.json, or timm's `pretrained_cfg` of a model.

Size, mean, standard deviation and crop of its images, how their files were read, and whether it learned from labels.
"""

import json
import math
from pathlib import Path
from typing import Any

import timm
from torch import nn

from mpp.config import HOW_READ, ImageSize, require, resized_side, sides
from mpp.errors import UserError
from mpp.runtime.weights import HUB, PICKLES, SAFETENSORS_SUFFIX, ZOO, encoder_folder, weights_file

MPP_TAG = "mpp"
"""Tag of encoders that mpp has written."""
TAGS_WITHOUT_LABELS = {"dino", "lvd142m", "lvd1689m", "dinov3_lvd1689m", "sat493m", "mae", "fcmae", "seer"}
TAGS_WITHOUT_LABELS |= {"in1k_ijepa", "in22k_ijepa"}
"""Tags of published weights that learned from images alone."""


def as_saved(value: Any) -> Any:
    """A setting as JSON and YAML have it, to be compared with a saved one: tuples become lists."""
    return json.loads(json.dumps(value))


def saved_config(folder: Path) -> dict[str, Any]:
    """The config.json of an encoder folder; empty where it is missing or cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def saved_section(folder: Path, name: str) -> dict[str, Any]:
    """A section of the config.json of an encoder folder; empty where it is missing or no section."""
    section = saved_config(folder).get(name)
    return section if isinstance(section, dict) else {}


def exported_step(folder: Path) -> int | None:
    """The steps that the encoder in a folder was trained for; None: unknown."""
    step = saved_config(folder).get("step")
    return step if isinstance(step, int) else None


def trained_on(folder: Path, entry: str) -> Any:
    """The `mean`, `std` or `input_size` (height and width) of an exported encoder's images. None: unknown."""
    value = saved_section(folder, "pretrained_cfg").get(entry)
    if not value:
        return None
    if entry == "input_size":
        value = value[1:]  # without the channels
    return tuple(value)


def first_weights(source: str) -> str:
    """The first weights' path, zoo:NAME or hf-hub:NAME as given; for the name of a timm model, its hf-hub:NAME.

    Raises:
        UserError: nothing of that name here, in timm or, as far as timm knows, on the hub.
    """
    if not is_named(source) or Path(source).suffix in (SAFETENSORS_SUFFIX, *PICKLES):
        return source
    allowed = "a run folder, an encoder folder, a .safetensors file, zoo:NAME, hf-hub:NAME, or the name of a timm model"
    if not timm.is_model(source):
        if "/" in source:
            return source  # a path, whose absence has its own message
        raise UserError(f"model.init_from is {source}, neither here nor a timm model; it must be {allowed}")
    published = timm.get_pretrained_cfg(source)
    hub_name = None if published is None else published.hf_hub_id
    allowed = "the name of a timm model with weights on the hub, such as vit_small_patch16_dinov3.lvd1689m"
    require(hub_name is not None, "model.init_from", source, allowed)
    return f"{HUB}{hub_name}"


def folder_of_weights(source: str) -> Path:
    """The folder of the weights that `model.init_from` names, which may have a config.json."""
    path = Path(first_weights(source))
    return path.parent if path.suffix == SAFETENSORS_SUFFIX else encoder_folder(path, "model.init_from")


def licence_of(source: str | None) -> str | None:
    """The licence of the weights that `model.init_from` names; None: there are none, or it is unknown."""
    if source is None:
        return None
    saved = saved_section(folder_of_weights(source), "pretrained_cfg").get("license")
    name = first_weights(source).removeprefix(f"{HUB}timm/")
    published = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return saved or (published.license if published else None)


def stride_of(folder: Path) -> int | None:
    """Pixels from one patch to the next of an exported encoder of `mpp_vit`; None: unknown."""
    arguments = saved_section(folder, "model_args")
    return arguments.get("stride") or arguments.get("patch_size")


def is_named(encoder: str) -> bool:
    """Whether an encoder is given by the name of a timm model, not by a path or a name on the hub or in mpp."""
    return not (encoder.startswith((HUB, ZOO)) or Path(encoder).exists())


def how_read(encoder: str) -> dict[str, Any]:
    """Settings for reading the training images of an encoder without its run; empty: the defaults, or unknown.

    Raises:
        UserError: there is no encoder.
    """
    if is_named(encoder) or Path(encoder).is_file():
        return {}
    saved = saved_section(encoder_folder(Path(encoder)), "data")  # a broken file is refused when the encoder is loaded
    return {name: saved[name] for name in HOW_READ if name in saved}


def learned_labels(encoder: str) -> bool:
    """Whether an encoder is known to have learned from labels or texts, or from an encoder that did.

    Published weights of timm count as such unless they are known to have learned without: those of SigLIP, or of
    ImageNet-21k, may come without a head. An encoder folder's config.json has classes or an entry `learned_labels`; it
    also counts for a weights file next to it.

    Args:
        encoder: a run folder, an encoder folder, zoo:NAME, hf-hub:NAME, a weights file, or the name of a timm model.
    """
    name = encoder.removeprefix(f"{HUB}timm/")
    if is_named(name):
        if not timm.is_model(name):
            return False
        published = timm.get_pretrained_cfg(name)
        without_labels = published is None or (published.num_classes == 0 and published.tag in TAGS_WITHOUT_LABELS)
        return not without_labels
    folder = weights_file(Path(encoder), "encoder").parent
    config = saved_config(folder)
    if config.get("learned_labels") is True:
        return True
    return config.get("num_classes") not in (None, 0)


def timm_crop_pct(img_size: int | ImageSize, share: float) -> float:
    """The `crop_pct` with which timm resizes and crops an image as `centre_crop` of mpp/data/crops.py does.

    For a square, timm rounds side / crop_pct down and mpp to the nearest: 32 / 0.875 becomes 36 in timm, 37 in mpp. The
    result gives mpp's length with either rounding. It is `share` itself wherever that already agrees.

    Args:
        img_size: size of the input: a side, or height and width.
        share: share of the shorter side in the fixed view.
    """
    height, width = sides(img_size)
    if height != width:
        return share
    length = resized_side(height, share)
    if math.floor(height / share) == length:
        return share
    return height / (length + 0.25)


def update_description(model: nn.Module, changes: dict[str, Any], eval_crop: float | None = None) -> None:
    """Update a model's `pretrained_cfg`, by which `timm.data.resolve_model_data_config` describes its images.

    timm describes the published weights there, whatever the arguments of the model.

    Args:
        changes: arguments of `timm.create_model` for this model.
        eval_crop: share of the shorter side in mpp's fixed view; None: crop_pct stays.
    """
    description = model.pretrained_cfg
    published_channels, *published_size = description["input_size"]
    channels = changes.get("in_chans") or published_channels
    size = changes.get("img_size") or published_size
    input_size = (channels, *sides(size))

    if changes.get("img_size") and eval_crop:
        description["crop_pct"] = timm_crop_pct(size, eval_crop)
    if channels != published_channels:  # the mean of the known channels serves for each of the others
        for name in ("mean", "std"):
            values = description[name]
            description[name] = (sum(values) / len(values),) * channels
    if (published_channels, *published_size) != input_size:
        description["input_size"] = input_size
        description.pop("test_input_size", None)  # that of the published size
    classes = changes.get("num_classes")
    if classes is not None and classes != description.get("num_classes"):
        description["num_classes"] = classes
        for name in ("label_names", "label_descriptions", "label_offset"):
            description.pop(name, None)
