"""Write an encoder as a folder in timm's own layout (`model.safetensors`, `config.json`).

timm loads it by `timm.create_model("local-dir:FOLDER", pretrained=True)`: without mpp where it is a plain ViT, after
`import mpp.models` where the encoder is of mpp/models/vit.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timm.models import save_for_hf
from torch import nn

from mpp.config import ImageSize, require, sides
from mpp.models.descriptions import MPP_TAG, timm_crop_pct
from mpp.models.timm_models import FIXED_POSITIONS
from mpp.runtime.files import complete


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
    """Names of the learned classes in the order of their numbers, for timm's `pretrained_cfg["label_names"]`. None: for
    a model with a head, the names in its `pretrained_cfg`."""
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
    """Write a timm model in timm's layout.

    Args:
        encoder: made by `timm.create_model`, which records the arguments that rebuild it.
        folder: complete or absent: written aside, synced to disk and renamed.
        img_size: size of the training images: a side, or height and width.
        mean, std: of the input's channels, for pixels scaled to [0, 1].
        crop_pct: share of the shorter side in the fixed view; timm gets `timm_crop_pct` of it.
        card: text of README.md; empty: no such file.
    Raises:
        UserError: a head for another number of classes.
    """
    data_config = dict(
        mean=tuple(mean),
        std=tuple(std),
        interpolation="bilinear",
        crop_mode="center",
        input_size=(len(mean), *sides(img_size)),
        crop_pct=timm_crop_pct(img_size, crop_pct),
    )
    ours = model_config(encoder, crop_pct, facts)
    with complete(folder) as partial:
        save_for_hf(encoder, str(partial), model_config=ours, safe_serialization=True, data_config=data_config)
        saved = json.loads((partial / "config.json").read_text(encoding="utf-8"))
        saved.get("model_args", {}).pop("num_classes", None)  # it is in pretrained_cfg; transformers gives it twice
        if facts.label_names or not encoder.num_classes:
            saved["pretrained_cfg"].pop("label_names", None)  # those of the initial weights
        (partial / "config.json").write_text(json.dumps(saved, indent=2), encoding="utf-8")
        if card:
            (partial / "README.md").write_text(card, encoding="utf-8")


def model_config(encoder: nn.Module, crop_pct: float, facts: EncoderFacts) -> dict[str, Any]:
    """The entries of config.json that timm does not write itself; for arguments and errors see `export_encoder`."""
    ours: dict[str, Any] = {
        "pretrained_cfg": {"tag": MPP_TAG, "license": facts.licence},  # not those of published weights
        "eval_crop": crop_pct,  # `load_encoder` needs it for other sizes
    }
    if any(name == "pos_embed" for name, _ in encoder.named_buffers()):
        ours["position"] = FIXED_POSITIONS  # `load_encoder` reads it; timm itself takes the table for learned
    if facts.how_read:
        ours["data"] = facts.how_read  # evaluation reads it
    if facts.step is not None:
        ours["step"] = facts.step  # its run may grow beyond it
    if facts.learned_labels:
        ours["learned_labels"] = True
    if facts.label_kind != "class":
        ours["label_kind"] = facts.label_kind
    if facts.label_names:
        count = len(facts.label_names)
        allowed = f"{encoder.num_classes}, the outputs of the model's head"
        require(encoder.num_classes in (0, count), "the number of label_names", count, allowed)
        ours["label_names"] = list(facts.label_names)  # which timm moves into pretrained_cfg
    return ours
