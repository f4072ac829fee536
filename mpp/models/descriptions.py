"""The description of an encoder: its folder's config.json, or timm's `pretrained_cfg` of a model; the export of both.

Size, mean, standard deviation and crop of its images, how their files were read, and whether it learned from labels.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
from timm.data.model_config import resolve_input_data_config
from timm.models import PretrainedCfg, save_for_hf
from torch import nn

from mpp.config import HOW_READ, ImageSize, require, resized_side, sides
from mpp.models.plain import FIXED_POSITIONS
from mpp.runtime.files import complete, read_json
from mpp.runtime.weights import CONFIG, HUB, ZOO, encoder_folder, weights_file

MPP_TAG = "mpp"
"""Tag of encoders that mpp has written."""
TAGS_WITHOUT_LABELS = {"dino", "lvd142m", "lvd1689m", "dinov3_lvd1689m", "sat493m", "mae", "fcmae", "seer"}
TAGS_WITHOUT_LABELS |= {"in1k_ijepa", "in22k_ijepa"}
"""Tags of published weights that learned from images alone."""


# --- what a source names ---


def is_named(encoder: str) -> bool:
    """Whether an encoder is given by the name of a timm model, not by a path or a name on the hub or in mpp."""
    return not (encoder.startswith((HUB, ZOO)) or Path(encoder).exists())


def published_as(name: str) -> PretrainedCfg | None:
    """timm's configuration of the weights that it has published by that name; None: there are none."""
    name = name.removeprefix(f"{HUB}timm/")
    return timm.get_pretrained_cfg(name) if timm.is_model(name) else None


def first_weights(source: str) -> Path:
    """The .safetensors file of the weights that `model.init_from` names, next to which may be a config.json.

    Args:
        source: run folder, encoder folder, .safetensors file, zoo:NAME, hf-hub:NAME, or the name of a timm model with
            weights on the hub.
    Raises:
        UserError: nothing of that name here, in timm or, as far as timm knows, on the hub.
    """
    if is_named(source):
        name = getattr(published_as(source), "hf_hub_id", None)
        allowed = "a run folder, an encoder folder, a .safetensors file, zoo:NAME, hf-hub:NAME, or the name of a timm "
        allowed += "model with weights on the hub, such as vit_small_patch16_dinov3.lvd1689m"
        require(name is not None, "model.init_from", source, allowed)
        source = f"{HUB}{name}"
    return weights_file(Path(source), "model.init_from")


# --- config.json ---


def as_saved(value: Any) -> Any:
    """A setting as JSON and YAML have it, to be compared with a saved one: tuples become lists."""
    return json.loads(json.dumps(value))


def saved_config(folder: Path) -> dict[str, Any]:
    """The config.json of an encoder folder; empty where it is missing or cannot be read."""
    return read_json(folder / CONFIG)


def saved_entry(folder: Path, name: str) -> Any:
    """An entry of the `pretrained_cfg` of an encoder folder, such as mean or license; an empty list: unknown."""
    published = saved_config(folder).get("pretrained_cfg") or {}
    return published.get(name) or []


def licence_of(source: str | None) -> str | None:
    """The licence of the weights that `model.init_from` names; None: there are none, or it is unknown."""
    if source is None:
        return None
    return saved_entry(first_weights(source).parent, "license") or getattr(published_as(source), "license", None)


def how_read(encoder: str) -> dict[str, Any]:
    """Settings for reading the training images of an encoder without its run; empty: the defaults, or unknown.

    Raises:
        UserError: there is no encoder.
    """
    if is_named(encoder) or Path(encoder).is_file():
        return {}
    saved = saved_config(encoder_folder(Path(encoder))).get("data") or {}
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
        published = published_as(name)
        return published is not None and (published.num_classes != 0 or published.tag not in TAGS_WITHOUT_LABELS)
    config = saved_config(weights_file(Path(encoder), "encoder").parent)
    return config.get("learned_labels") is True or config.get("num_classes") not in (None, 0)


# --- timm's `pretrained_cfg` ---


def timm_crop_pct(img_size: int | ImageSize, share: float) -> float:
    """The `crop_pct` with which timm resizes and crops an image as `centre_crop` of mpp/data/crops.py does.

    For a square, timm rounds side / crop_pct down and mpp to the nearest: 32 / 0.875 becomes 36 in timm, 37 in mpp. The
    result gives mpp's length with either rounding. It is `share` itself wherever that already agrees.

    Args:
        img_size: size of the input: a side, or height and width.
        share: share of the shorter side in the fixed view.
    """
    height, width = sides(img_size)
    length = resized_side(height, share)
    if height != width or math.floor(height / share) == length:
        return share
    return height / (length + 0.25)


def update_description(model: nn.Module, img_size: int | ImageSize | None, eval_crop: float | None = None) -> None:
    """Update a model's `pretrained_cfg`, by which `timm.data.resolve_model_data_config` describes its images.

    timm describes the published weights there, whatever the arguments of the model.

    Args:
        img_size: that the model was asked for; None: its own.
        eval_crop: share of the shorter side in mpp's fixed view; None: crop_pct stays.
    """
    description = model.pretrained_cfg
    if img_size and eval_crop:
        description["crop_pct"] = timm_crop_pct(img_size, eval_crop)
    description |= resolve_input_data_config(model, {"img_size": img_size})
    if description.get("num_classes") != model.num_classes:
        description["num_classes"] = model.num_classes
        for name in ("label_names", "label_descriptions", "label_offset"):
            description.pop(name, None)


# --- the export ---


@dataclass(frozen=True)
class EncoderFacts:
    """Facts of an encoder and its training, for its config.json and its model card."""

    kind: str = "encoder"
    """By its training, in a few words, such as `fine-tuned encoder`."""
    model: str = ""
    """Architecture and size, in a few words."""
    method: str = ""
    """Its training in a sentence without its full stop."""
    images: str = ""
    """The images that it was trained on."""
    how_read: dict[str, Any] = field(default_factory=dict)
    """Settings for reading pixels from files, where they are not the defaults."""
    step: int | None = None
    """Steps that it was trained for; None: it is of no run."""
    learned_labels: bool = False
    """Whether it learned from labels, or from an encoder that did."""
    label_kind: str = "class"
    """Kind of the labels that it learned; one class an image is not written."""
    label_names: Sequence[str] | None = None
    """Names of a head's classes in the order of their numbers. None: those in the model's `pretrained_cfg`."""
    licence: str | None = None
    """Licence of the weights that it began from; None: random ones, or unknown."""


def export_encoder(
    encoder: nn.Module,
    folder: Path,
    img_size: int | ImageSize,
    mean: Sequence[float],
    std: Sequence[float],
    crop_pct: float,
    facts: EncoderFacts = EncoderFacts(),
    card: str = "",
) -> None:
    """Write a timm model as a folder in timm's layout (`model.safetensors`, `config.json`).

    timm loads it by `timm.create_model("local-dir:FOLDER", pretrained=True)`: without mpp where it is a plain ViT,
    after `import mpp.models` where the encoder is of mpp/models/variants.py.

    Args:
        encoder: made by `timm.create_model`, which records the arguments that rebuild it.
        folder: complete or absent: written aside, synced to disk and renamed.
        img_size: size of the training images: a side, or height and width.
        mean, std: of the input's channels, for pixels scaled to [0, 1].
        crop_pct: share of the shorter side in the fixed view; timm gets `timm_crop_pct` of it.
        card: text of README.md; empty: no such file.
    """
    data_config = dict(
        mean=tuple(mean),
        std=tuple(std),
        interpolation="bilinear",
        crop_mode="center",
        input_size=(len(mean), *sides(img_size)),
        crop_pct=timm_crop_pct(img_size, crop_pct),
    )
    is_fixed = any(name == "pos_embed" for name, _ in encoder.named_buffers())
    entries = {
        "pretrained_cfg": {"tag": MPP_TAG, "license": facts.licence},  # not those of published weights
        "eval_crop": crop_pct,  # `load_encoder` needs it for other sizes
        "position": is_fixed and FIXED_POSITIONS,  # it, too; timm itself takes the table for learned
        "data": facts.how_read,  # evaluation reads it
        "step": facts.step,  # its run may grow beyond it
        "learned_labels": facts.learned_labels,
        "label_kind": facts.label_kind != "class" and facts.label_kind,
        "label_names": list(facts.label_names or ()),
    }
    ours = {name: entry for name, entry in entries.items() if entry}
    with complete(folder) as partial:
        save_for_hf(encoder, str(partial), model_config=ours, safe_serialization=True, data_config=data_config)
        saved = saved_config(partial)
        saved["model_args"].pop("num_classes", None)  # it is in pretrained_cfg; transformers gives it twice
        if not encoder.num_classes:
            saved["pretrained_cfg"].pop("label_names", None)  # those of the initial weights
        (partial / CONFIG).write_text(json.dumps(saved, indent=2), encoding="utf-8")
        if card:
            (partial / "README.md").write_text(card, encoding="utf-8")
