"""Classifiers that exist, frozen: of a run with labels, or of timm. They teach, and they predict."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

from evaluation.config import HeadConfig, SupervisedConfig
from evaluation.frozen.encoder import FrozenEncoder, check_channels, load_frozen_encoder
from evaluation.frozen.known_labels import find_labelled_images
from evaluation.frozen.run_images import find_run, find_tested_run, split_run
from evaluation.supervision.learners import LEARNERS, add_head, average_heads, learner_of
from mpp.config import ImageSize, OptimConfig, require
from mpp.data.identity import CLASS_NAMES_FIELD, LABEL_KIND_FIELD
from mpp.models.descriptions import is_named, saved_config
from mpp.models.encoder import load_encoder
from mpp.models.plain import set_attention
from mpp.models.teachers import resize_bilinear
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.messages import shortened
from mpp.runtime.weights import WEIGHTS, encoder_folder, fingerprint
from mpp.training.checkpoint import MODEL_FILE, newest_whole, restore_trained
from mpp.training.run_folder import read_record, saved_settings

DISTILL_TEACHER = "distill.teacher"
ALLOWED_SOURCES = "the folder of a finished supervised or fine-tuned run, or a timm folder with a classification head"


class Classifier(NamedTuple):
    """A trained network that classifies images."""

    network: nn.Module
    """Images (B, C, H, W) from 0 to 255 to logits (B, classes), or (B, 2, classes) of two heads."""
    img_size: ImageSize
    classes: int
    crop_pct: float
    """Share of the shorter side that the centre crop keeps."""
    class_names: list[str]
    """Of the outputs, in their order, each once; a class without a name has its number. Of a number: none."""
    label_kind: str = "class"
    """Kind of label that it predicts."""

    @property
    def meaning(self) -> str:
        """Of its outputs, in words."""
        return LEARNERS[self.label_kind].meaning


class FrozenClassifier(nn.Module):
    """A classifier in eval mode, without gradients, that takes crops of any size."""

    def __init__(self, classifier: Classifier):
        super().__init__()
        self.network = classifier.network.eval().requires_grad_(False)
        self.img_size = classifier.img_size

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), uint8 or float in [0, 255], to logits (B, classes) float32."""
        return average_heads(self.network(resize_bilinear(images, self.img_size)).float())


def with_teacher_digest(config: SupervisedConfig) -> SupervisedConfig:
    """The config with the digest of its teacher's weights, if it has a teacher: a run is not resumed with others.

    Raises:
        UserError: no such folder, or other weights than those that the config names.
    """
    teacher = config.distill.teacher
    if teacher is None:
        return config
    teacher = str(find_tested_run(Path(teacher), DISTILL_TEACHER) or teacher)
    require(Path(teacher).is_dir(), DISTILL_TEACHER, teacher, "a folder: of a finished run, or in timm's layout")
    sha256, known = fingerprint(Path(teacher)), config.distill.teacher_sha256
    allowed = f"{sha256}, that of {teacher}, or null"
    require(known in (None, sha256), "distill.teacher_sha256", known, allowed)
    return replace(config, distill=replace(config.distill, teacher=teacher, teacher_sha256=sha256))


def load_teacher(source: str, classes: int, channels: int = 3, class_names: Sequence[str] = ()) -> FrozenClassifier:
    """The teacher that the setting names.

    Args:
        class_names: of the images, by which the order of the teacher's is known, if it has any of them.
    Raises:
        UserError: no classifier there, or one of other classes or channels, or with some of these classes elsewhere.
    """
    teacher = load_classifier(source, channels, DISTILL_TEACHER)
    fits = teacher.label_kind == "class" and teacher.classes == classes
    require(fits, DISTILL_TEACHER, source, f"a classifier of one class per image, of {classes} as these images have")
    names = [*class_names[:classes]]
    number_of = {name: number for number, name in enumerate(names)}
    is_in_order = all(number_of.get(name, number) == number for number, name in enumerate(teacher.class_names))
    require(is_in_order, DISTILL_TEACHER, source, f"a classifier with the classes {shortened(names)}, in this order")
    return FrozenClassifier(teacher)


def load_classifier(source: str, channels: int, setting: str) -> Classifier:
    """Open the classifier of a run folder, or of a timm folder with its head.

    Args:
        setting: name of the setting that holds `source`, for messages.
    Raises:
        UserError: no classifier there, or one of other channels.
    """
    run, (_, part) = find_run(source), split_run(source)
    require(not part, setting, source, "the run folder: the head is in its newest checkpoint")
    if run is not None:
        return load_run_classifier(run, channels, setting)
    model = load_encoder(source, setting=setting)
    classes = getattr(model, "num_classes", 0)
    require(classes > 0, setting, source, ALLOWED_SOURCES)
    if not uses_gpu():
        set_attention(model, fused=False)
    frozen = FrozenEncoder(model)
    check_channels(frozen, channels, setting)
    kind = "class" if is_named(source) else saved_config(encoder_folder(Path(source))).get("label_kind", "class")
    names = [] if kind == "number" else distinct_class_names(timm_names(model), classes)
    kind_of_network = InFloat32 if kind == "number" else nn.Sequential
    return Classifier(kind_of_network(frozen.normalize, model), frozen.img_size, classes, frozen.crop_pct, names, kind)


class InFloat32(nn.Sequential):
    """Modules that compute in float32 under autocast, too: bf16 would round years to multiples of eight."""

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images)


def timm_names(model: nn.Module) -> list[str] | None:
    """The names of the classes of a timm model: its own, or those of the ImageNet that it was trained on."""
    subset = infer_imagenet_subset(model)
    if "label_names" in model.pretrained_cfg or subset is None:
        return model.pretrained_cfg.get("label_names")
    info = ImageNetInfo(subset)
    return [info.index_to_description(number) for number in range(info.num_classes())]


def distinct_class_names(names: Sequence[str] | None, classes: int) -> list[str]:
    """A name for each class: its own, with its number where another has the same, or only its number."""
    known = list(names or [])[:classes]
    counts = Counter(known)
    distinct = [f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(known)]
    return distinct + [str(number) for number in range(len(known), classes)]


def load_run_classifier(run: Path, channels: int, setting: str) -> Classifier:
    """Open the network that a run trained: see `load_classifier`. Its head is in the newest checkpoint."""
    ways = f"mpp finetune --encoder {run}, or mpp linear --encoder {run} --save true"
    allowed = f"{ALLOWED_SOURCES}; this run has no head, which these train: {ways}"
    require(find_labelled_images(str(run)) is not None, setting, run, allowed)
    checkpoint = newest_whole(run)
    require(checkpoint is not None, setting, run, "a run with its newest checkpoint intact: the head is in it")
    weights = load_file(checkpoint / MODEL_FILE)
    last_bias = max(name for name in weights if name.startswith("head.") and name.endswith(".bias"))
    classes = len(weights[last_bias])
    frozen = load_frozen_encoder(str(run))
    check_channels(frozen, channels, setting)
    settings = saved_settings(run)
    learned = read_record(run)["train"]
    kind = learned.get(LABEL_KIND_FIELD, "class")
    encoder = frozen.model.requires_grad_(True)  # restoring averaged weights matches them with trained parameters
    about = settings.get("head") or {"kind": "linear", "pooling": settings["pooling"]}  # of fine-tuning: one layer
    learner = learner_of(kind, np.zeros(1), classes)  # the checkpoint has mean and deviation of numbers
    is_distilled = settings["distill"].get("teacher") is not None
    network = add_head(encoder, frozen.normalize, HeadConfig(**about), learner, is_distilled)
    restore_trained(run, network, OptimConfig(**settings["optim"]))
    exported = load_file(encoder_folder(run) / WEIGHTS)  # the fingerprint is of these
    is_same = all(torch.equal(tensor, exported[name]) for name, tensor in encoder.state_dict().items())
    require(is_same, setting, run, "a run whose newest checkpoint has the weights of its encoder/")
    known = [] if kind == "number" else distinct_class_names(learned.get(CLASS_NAMES_FIELD), classes)
    return Classifier(network, frozen.img_size, classes, frozen.crop_pct, known, kind)
