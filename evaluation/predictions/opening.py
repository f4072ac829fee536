"""Opening of a classifier that predicts: a trained run, a kept head on its encoder, or timm's."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.frozen.encoder import FrozenEncoder, load_frozen_encoder
from evaluation.frozen.kept_heads import KeptHead, is_kept_head, load_head, rebuild_linear
from evaluation.frozen.run_images import LabelledImages, find_labelled_images, find_tested_run, lineage
from evaluation.patches.features import LinearReading, patch_features, upsample
from evaluation.supervision.classifiers import Classifier, distinct_class_names, load_classifier
from mpp.config import require, sides
from mpp.errors import UserError
from mpp.runtime.files import short_digest
from mpp.runtime.weights import BEST, ENCODER, fingerprint


class ProbedEncoder(nn.Module):
    """A frozen encoder with a head that a probe has trained: images (B, C, H, W) from 0 to 255 to logits.

    They are (B, classes), or (B, classes, H, W) of a head of pixels. The head computes in float32, as in the probe.
    """

    def __init__(self, encoder: FrozenEncoder, head: KeptHead):
        super().__init__()
        self.encoder = encoder
        self.about = head.description
        self.head = rebuild_reading(head.weights) if self.about.task == "pixels" else rebuild_linear(head)

    def forward(self, images: Tensor) -> Tensor:
        depths, is_of_pixels = [self.about.depth], self.about.task == "pixels"
        if is_of_pixels:
            (features,) = patch_features(self.encoder, images, depths)
        else:
            (features,) = self.encoder(images, self.about.representation, depths)
        with torch.autocast(images.device.type, enabled=False):
            logits = self.head(features.to(images.device, torch.float32))
            return upsample(logits, images.shape[-2:]) if is_of_pixels else logits


def rebuild_reading(weights: dict[str, Tensor]) -> LinearReading:
    """The linear reading of patches with its weights."""
    reading = LinearReading(weights["classify.weight"].shape[1], weights["untaught"])
    reading.load_state_dict(weights)
    return reading


@dataclass(frozen=True)
class ClassifierSource:
    """The classifier that the setting `classifier` names."""

    classifier: str
    """A run folder, a timm folder or name, or the folder of a head."""
    encoder: str
    """The encoder, whose run says how images are read."""
    head: KeptHead | None = None
    """None: the classifier has its head by training."""
    checkpoint: str | None = None
    """File of weights of a kept head's timm model."""

    @property
    def how_read(self) -> dict[str, Any]:
        """The settings by which a kept head's training images were read; empty: its head is none, or does not say."""
        return {} if self.head is None else self.head.description.input.get("data", {})

    @property
    def learned(self) -> list[LabelledImages]:
        """The images that it was trained on with their labels: its own, and those of the encoders it builds on."""
        found = [find_labelled_images(encoder) for encoder in lineage(self.encoder)]
        return [each for each in (self.head and self.head.learned, *found) if each is not None]


def find_classifier(classifier: str, encoder: str | None) -> ClassifierSource:
    """Find the classifier that the settings `classifier` and `encoder` name, and its encoder.

    Raises:
        UserError: no such classifier, or the encoder of a kept head is gone or another.
    """
    folder = Path(classifier)
    if is_kept_head(folder):
        return find_encoder_of_head(load_head(folder), encoder)
    require(encoder is None, "encoder", encoder, f"null with {classifier}, which has its own encoder")
    trained = str(find_tested_run(folder, "classifier") or classifier)
    return ClassifierSource(trained, trained)


def find_encoder_of_head(head: KeptHead, named: str | None) -> ClassifierSource:
    """The encoder that a head was trained on, known by its weights: in the run that has the head, or at its old place.

    Args:
        named: the setting `encoder`.
    Raises:
        UserError: it is gone, or another one is in its place.
    """
    about, folder = head.description, str(head.folder)
    was = about.checkpoint or about.encoder
    if about.weights == "":  # random, or published by timm: known by its name
        allowed = f"null or {about.encoder}, which {folder} was trained on"
        require(about.random or named in (None, about.encoder), "encoder", named, allowed)
        return ClassifierSource(folder, named or about.encoder, head)
    run = head.folder.resolve().parent.parent
    near = [str(run / name) for name in (ENCODER, BEST) if (run / name).is_dir() and not about.checkpoint]
    places = [named] if named else [*near, was]
    for place in places:
        with suppress(UserError):  # no encoder is there
            if fingerprint(Path(place), on_hub=True) == about.weights:
                if about.checkpoint:
                    return ClassifierSource(folder, about.encoder, head, place)
                return ClassifierSource(folder, place, head)
    raise UserError(
        f"the encoder that {folder} was trained on ({was}) is not at {' or '.join(places)}: choose it with --encoder"
    )


def open_classifier(found: ClassifierSource, channels: int) -> Classifier:
    """Open a classifier: of a head of pixels, `label_kind` is pixels, and the logits are those of each pixel.

    Raises:
        UserError: no classifier there, or one of other channels.
    """
    if found.head is None:
        return load_classifier(found.classifier, channels, "classifier")
    about = found.head.description
    size = sides(about.input["img_size"])
    encoder = load_frozen_encoder(found.encoder, found.checkpoint, about.random, size, about.seed, channels)
    outputs = len(found.head.weights["classify.bias"])
    names = distinct_class_names(about.class_names, len(about.class_names))
    kind = "class" if about.task == "classes" else about.task
    network = ProbedEncoder(encoder, found.head).eval()
    return Classifier(network, encoder.img_size, outputs, about.input["crop_pct"], names, kind)


def digest_network(network: nn.Module) -> str:
    """The digest of all weights of a network."""
    return short_digest(name.encode() + each.numpy().tobytes() for name, each in network.state_dict().items())
