"""Opening of a classifier that predicts: a trained run, a kept head on its encoder, or timm's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.frozen.encoder import FrozenEncoder, load_frozen_encoder
from evaluation.frozen.kept_heads import HEAD_TASKS, KeptHead, is_kept_head, load_head, rebuild_linear
from evaluation.frozen.run_images import LabelledImages, find_labelled_images, find_tested_run, lineage
from evaluation.patches.features import LinearReading, patch_features, upsample
from evaluation.supervision.classifiers import Classifier, distinct_class_names, load_classifier
from mpp.config import require, sides
from mpp.errors import UserError
from mpp.runtime.files import short_digest
from mpp.runtime.weights import BEST, ENCODER, fingerprint


class HeadOnFeatures(nn.Module):
    """A frozen encoder with a head that a probe has trained: images (B, C, H, W) from 0 to 255 to logits (B, classes).

    The head computes in float32, as in the probe.
    """

    def __init__(self, encoder: FrozenEncoder, head: KeptHead):
        super().__init__()
        self.encoder = encoder
        self.head = rebuild_linear(head)
        self.representation = head.description.representation
        self.depth = head.description.depth

    def forward(self, images: Tensor) -> Tensor:
        (features,) = self.encoder(images, self.representation, [self.depth])
        with torch.autocast(images.device.type, enabled=False):
            return self.head(features.float())


class ReadingOfPatches(nn.Module):
    """A frozen encoder with a linear reading of its patches: images (B, C, H, W) to logits (B, classes, H, W)."""

    def __init__(self, encoder: FrozenEncoder, head: KeptHead):
        super().__init__()
        taught = (~head.weights["untaught"]).nonzero().flatten().tolist()
        self.encoder = encoder
        self.reading = LinearReading(head.weights["classify.weight"].shape[1], taught)
        self.reading.load_state_dict(head.weights)
        self.depth = head.description.depth
        self.class_numbers = head.description.class_numbers
        """Of its classes in the files of masks, in their order."""

    def forward(self, images: Tensor) -> Tensor:
        (features,) = patch_features(self.encoder, images, [self.depth])
        with torch.autocast(images.device.type, enabled=False):
            return upsample(self.reading(features.to(images.device)), images.shape[-2:])


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
    allowed = f"null with {classifier}, which has its own encoder"
    require(encoder is None, "encoder", encoder, allowed)
    trained = str(find_tested_run(folder, "classifier") or classifier)
    return ClassifierSource(trained, trained)


def find_encoder_of_head(head: KeptHead, named: str | None) -> ClassifierSource:
    """The encoder that a head was trained on, known by its weights.

    Args:
        named: the setting `encoder`.
    Raises:
        UserError: it is gone, or another one is in its place.
    """
    about = head.description
    folder = str(head.folder)
    if about.weights == "":  # random, or published by timm: known by its name
        allowed = f"null or {about.encoder}, which {folder} was trained on"
        require(about.random or named in (None, about.encoder), "encoder", named, allowed)
        return ClassifierSource(folder, named or about.encoder, head)
    places = [named] if named else usual_places(head)
    for place in places:
        if weights_at(place) == about.weights:
            encoder = about.encoder if about.checkpoint else place
            return ClassifierSource(folder, encoder, head, place if about.checkpoint else None)
    was = about.checkpoint or about.encoder
    raise UserError(
        f"the encoder that {folder} was trained on ({was}) is not at {' or '.join(places)}: choose it with --encoder"
    )


def usual_places(head: KeptHead) -> list[str]:
    """Places where a head's encoder may be: in the run that has the head in its evaluation/, and the original one."""
    about = head.description
    folder = head.folder.resolve().parent
    if folder.name != "evaluation" or about.checkpoint:
        return [about.checkpoint or about.encoder]
    name = Path(about.encoder).name
    return [str(folder.parent / name if name in (ENCODER, BEST) else folder.parent), about.encoder]


def weights_at(place: str) -> str:
    """Fingerprint of the weights at a place; empty where there is no encoder."""
    try:
        return fingerprint(Path(place), on_hub=True)
    except UserError:
        return ""


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
    kind = {task: kind for kind, task in HEAD_TASKS.items()}.get(about.task, about.task)
    network = (ReadingOfPatches if kind == "pixels" else HeadOnFeatures)(encoder, found.head)
    return Classifier(network.eval(), encoder.img_size, outputs, about.input["crop_pct"], names, kind)


def digest_network(network: nn.Module) -> str:
    """The digest of all weights of a network."""
    return short_digest(name.encode() + each.numpy().tobytes() for name, each in network.state_dict().items())
