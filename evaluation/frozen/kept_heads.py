"""Heads that a probe has trained on frozen features, kept as a folder: head.safetensors and head.json.

The encoder is not in it. head.json has its fingerprint, so that the head is used with no other.
C classes, D width.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from evaluation.config import EncoderConfig
from evaluation.frozen.known_labels import LabelledImages
from mpp.config import SourceConfig
from mpp.errors import UserError, one_line
from mpp.runtime.files import complete
from mpp.runtime.weights import fingerprint

WEIGHTS_FILE = "head.safetensors"
DESCRIPTION_FILE = "head.json"

HeadTask = Literal["classes", "several", "number", "pixels"]
"""Prediction of a head: the class of an image, several classes, a number, or the class of each pixel."""


class StandardizedLinear(nn.Module):
    """A linear layer on standardised features: (B, D) to logits (B, C).

    Args:
        classify: D to C.
        mean, std: of each feature, (D,).
    """

    def __init__(self, classify: nn.Linear, mean: Tensor, std: Tensor):
        super().__init__()
        self.classify = classify
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, features: Tensor) -> Tensor:
        return self.classify((features - self.mean) / self.std)


@dataclass(frozen=True)
class HeadDescription:
    """head.json: the prediction of a head, and the features and the encoder that it takes."""

    task: HeadTask
    class_names: list[str]
    """Of the outputs, in their order."""
    representation: str
    """Feature of the image; of pixels: patches."""
    depth: int
    """Blocks that the features have passed."""
    encoder: str
    """Path or name of the encoder at that time."""
    weights: str
    """Fingerprint of its weights, or of those in `checkpoint`; empty: random, or published by timm."""
    checkpoint: str | None
    random: bool
    seed: int
    """Of random weights."""
    input: dict[str, Any]
    """Input of the encoder: img_size (height and width), crop_pct, channels, mean, std, and how files are read; and
    its precision."""
    learned: dict[str, Any]
    """The training images: `source`, their settings, and `train`, their record."""
    class_numbers: Sequence[int] = ()
    """Of pixels: the numbers of the classes in the files of masks."""


@dataclass(frozen=True)
class KeptHead:
    """A head that was read from its folder."""

    folder: Path
    description: HeadDescription
    weights: dict[str, Tensor]

    @property
    def learned(self) -> LabelledImages:
        """The training images."""
        learned = self.description.learned
        return LabelledImages(SourceConfig(**learned["source"]), learned["train"])


def describe_encoder(frozen: EncoderConfig) -> dict[str, Any]:
    """The entries of a description that name the encoder of a command's settings."""
    return {
        "encoder": frozen.encoder,
        "weights": fingerprint(Path(frozen.weights), on_hub=True) if frozen.weights else "",
        "checkpoint": frozen.checkpoint,
        "random": frozen.random,
        "seed": frozen.seed,
    }


def save_head(report: Path, head: nn.Module, frozen: EncoderConfig, **about: Any) -> None:
    """Write a head, complete or not at all, replacing an earlier one, and print how to use it.

    Args:
        report: next to which it is written.
        frozen: the encoder whose features it takes.
        about: the other entries of its description.
    """
    description = HeadDescription(**describe_encoder(frozen), **about)
    folder = report.with_name(f"{report.stem}_head")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with complete(folder) as partial:
        partial.mkdir()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
        save_file(weights, partial / WEIGHTS_FILE)
        text = json.dumps(asdict(description), indent=1, ensure_ascii=False)
        (partial / DESCRIPTION_FILE).write_text(text, encoding="utf-8")
    print(f"wrote {folder}: mpp predict --classifier {folder} --data.path NEW_IMAGES")


def load_head(folder: Path) -> KeptHead:
    """Read a head; nothing in its files is executed.

    Raises:
        UserError: its files cannot be read.
    """
    try:
        description = json.loads((folder / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        return KeptHead(folder, HeadDescription(**description), load_file(folder / WEIGHTS_FILE))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise UserError(f"classifier is {folder}, which cannot be read: {one_line(error)}") from error


def rebuild_linear(head: KeptHead) -> StandardizedLinear:
    """The head of images with its weights."""
    classes, width = head.weights["classify.weight"].shape
    module = StandardizedLinear(nn.Linear(width, classes), head.weights["mean"], head.weights["std"])
    module.load_state_dict(head.weights)
    return module
