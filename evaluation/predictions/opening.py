"""Opening of a classifier that predicts: a trained run, a kept head on its encoder, or timm's."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.config import PredictConfig
from evaluation.frozen.encoder import FrozenEncoder, load_frozen_encoder
from evaluation.frozen.kept_heads import HEAD_TASKS, HeadDescription, KeptHead, is_kept_head, load_head, rebuild_linear
from evaluation.frozen.run_images import find_tested_run
from evaluation.patches.features import LinearReading
from evaluation.predictions.pixels import PixelClassifier
from evaluation.supervision.classifiers import Classifier, distinct_class_names, load_classifier
from mpp.config import require, sides
from mpp.errors import UserError
from mpp.models.descriptions import is_named
from mpp.runtime.weights import BEST, ENCODER, fingerprint


class HeadOnFeatures(nn.Module):
    """A frozen encoder with a head that a probe has trained: images (B, C, H, W) from 0 to 255 to logits (B, classes).

    The head computes in float32, as in the probe.
    """

    def __init__(self, encoder: FrozenEncoder, head: nn.Module, about: HeadDescription):
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.representation = about.representation
        self.depth = about.depth

    def forward(self, images: Tensor) -> Tensor:
        (features,) = self.encoder(images, self.representation, [self.depth])
        with torch.autocast(images.device.type, enabled=False):
            return self.head(features.float())


@dataclass(frozen=True)
class ClassifierSource:
    """The classifier that the setting `classifier` names."""

    classifier: str
    """A run folder, a timm folder or name, or the folder of a head."""
    encoder: str
    """The encoder, whose run says how images are read."""
    head: KeptHead | None
    """None: the classifier has its head by training."""
    checkpoint: str | None = None
    """File of weights of a kept head's timm model."""

    @property
    def how_read(self) -> dict[str, Any]:
        """The settings by which a kept head's training images were read; empty: its head is none, or does not say."""
        return {} if self.head is None else self.head.description.input.get("data", {})


def find_classifier(config: PredictConfig) -> ClassifierSource:
    """Find the classifier that the settings name, and its encoder.

    Raises:
        UserError: no such classifier, or the encoder of a kept head is gone or another.
    """
    return find_named_classifier(config.classifier, config.encoder)


@lru_cache
def find_named_classifier(classifier: str, encoder: str | None) -> ClassifierSource:
    """See `find_classifier`: of the settings `classifier` and `encoder`."""
    folder = Path(classifier)
    if is_kept_head(folder):
        return find_encoder_of_head(load_head(folder), encoder)
    refuse_missing_head(folder)
    if encoder is not None:
        raise UserError(f"encoder is {encoder}; it must be null with {classifier}, which has its own encoder")
    trained = str(find_tested_run(folder, "classifier") or classifier)
    return ClassifierSource(trained, trained, None)


def refuse_missing_head(folder: Path) -> None:
    """Raise UserError where a folder is missing; it names the kept heads that are next to it."""
    if folder.exists() or folder.parent == Path() or not folder.parent.is_dir():
        return
    heads = sorted(str(each) for each in folder.parent.iterdir() if is_kept_head(each))
    require(not heads, "classifier", folder, f"a head that is there: {', '.join(heads)}")


def find_encoder_of_head(head: KeptHead, named: str | None) -> ClassifierSource:
    """The encoder that a head was trained on, known by its weights.

    Args:
        named: the setting `encoder`.
    Raises:
        UserError: it is gone, or another one is in its place.
    """
    about = head.description
    folder = str(head.folder)
    if about.weights == "":  # random, or published: known by its name
        is_published = is_named(about.encoder) and not about.random
        allowed = f"null or {about.encoder}, which {folder} was trained on"
        require(not is_published or named in (None, about.encoder), "encoder", named, allowed)
        return ClassifierSource(folder, named or about.encoder, head)
    places = [named] if named else list(usual_places(head))
    found = {place: weights_at(place) for place in places if not is_named(place)}
    for place, weights in found.items():
        if weights == about.weights:
            if about.checkpoint:
                return ClassifierSource(folder, about.encoder, head, checkpoint=place)
            return ClassifierSource(folder, place, head)
    was = about.checkpoint or about.encoder
    others = [place for place, weights in found.items() if weights]
    if others:
        raise UserError(
            f"encoder is {others[0]}, whose weights are not those that {folder} was trained on ({was}); "
            "choose that encoder with --encoder, or train a head on this one"
        )
    raise UserError(f"no encoder at {' or '.join(places)}: {folder} is only a head; choose its encoder with --encoder")


def usual_places(head: KeptHead) -> Iterator[str]:
    """Places where a head's encoder may be: in the run that has the head in its evaluation/, and the original one."""
    about = head.description
    if head.folder.resolve().parent.name == "evaluation" and not about.checkpoint:
        run = head.folder.resolve().parents[1]
        name = Path(about.encoder).name
        yield str(run / name if name in (ENCODER, BEST) else run)
    yield about.checkpoint or about.encoder


def weights_at(place: str) -> str:
    """Fingerprint of the weights at a place; empty where there is no encoder."""
    try:
        return fingerprint(Path(place), on_hub=True)
    except UserError:
        return ""


def open_classifier(classifier_source: ClassifierSource, channels: int) -> Classifier:
    """Open a classifier of images.

    Raises:
        UserError: no classifier there, or one of other channels.
    """
    if classifier_source.head is None:
        return load_classifier(classifier_source.classifier, channels, "classifier")
    about = classifier_source.head.description
    encoder = open_encoder_of_head(classifier_source, channels)
    network = HeadOnFeatures(encoder, rebuild_linear(classifier_source.head), about)
    names = distinct_class_names(about.class_names, len(about.class_names))
    kind = {task: kind for kind, task in HEAD_TASKS.items()}[about.task]
    outputs = len(classifier_source.head.weights["classify.bias"])
    return Classifier(network, encoder.img_size, outputs, about.input["crop_pct"], names, kind)


def open_pixel_classifier(classifier_source: ClassifierSource, channels: int) -> PixelClassifier:
    """Open a classifier of pixels.

    Args:
        classifier_source: has a head of pixels.
    """
    about = classifier_source.head.description
    weights = classifier_source.head.weights
    untaught = weights["untaught"]
    reading = LinearReading(weights["classify.weight"].shape[1], (~untaught).nonzero().flatten().tolist())
    reading.load_state_dict(weights)
    encoder = open_encoder_of_head(classifier_source, channels)
    names = distinct_class_names(about.class_names, len(about.class_names))
    return PixelClassifier(encoder, reading.eval(), about.depth, about.input["crop_pct"], names, about.class_numbers)


def open_encoder_of_head(classifier_source: ClassifierSource, channels: int) -> FrozenEncoder:
    """Open the encoder of a kept head, with the input that the head was trained on."""
    about = classifier_source.head.description
    return load_frozen_encoder(
        classifier_source.encoder,
        classifier_source.checkpoint,
        about.random,
        sides(about.input["img_size"]),
        about.seed,
        channels,
    )


def digest_network(network: nn.Module) -> str:
    """SHA-256 of all weights of a network, by their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
