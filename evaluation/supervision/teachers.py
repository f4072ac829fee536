"""Teachers: trained classifiers that are only asked what they see in an image."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from evaluation.config import DistillConfig, SupervisedConfig
from evaluation.frozen.encoder import FrozenEncoder, check_channels, load_frozen_encoder
from evaluation.frozen.provenance import find_labelled_images
from evaluation.frozen.run_images import find_run
from evaluation.supervision.deit import DistilledEncoder, averaged
from evaluation.supervision.heads import HeadedEncoder, build_head
from mpp.config import OptimConfig, require
from mpp.errors import UserError
from mpp.models.encoder import load_encoder
from mpp.models.teachers import resize_bilinear
from mpp.models.timm_models import set_attention
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.weights import BEST, encoder_folder, fingerprint
from mpp.training.checkpoint import MODEL, complete_checkpoints, damaged_files, restore_trained
from mpp.training.run_folder import saved_settings

SETTING = "distill.teacher"
A_TEACHER = "the folder of a finished supervised or fine-tuned run, or a folder of timm's with a classification head"


Classifier = tuple[nn.Module, tuple[int, int], int]
"""Images (B, C, H, W) in [0, 255] to logits (B, classes), or (B, 2, classes) of two heads; H, W; the classes."""


class FrozenClassifier(nn.Module):
    """A classifier in eval mode, without gradients, that takes crops of any size.

    Args:
        network: a classifier, which normalises its own input.
        img_size: height and width that it takes.
    """

    def __init__(self, network: nn.Module, img_size: tuple[int, int]):
        super().__init__()
        self.network, self.img_size = network.eval().requires_grad_(False), img_size

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), uint8 or float in [0, 255], to logits (B, classes) float32."""
        logits = self.network(resize_bilinear(images, self.img_size)).float()
        return averaged(logits) if logits.ndim == 3 else logits


def with_teacher_digest(config: SupervisedConfig) -> SupervisedConfig:
    """The config with the digest of its teacher's weights, if it has a teacher: a run is not resumed with others.

    Raises:
        UserError: no such folder.
    """
    teacher = config.distill.teacher
    if teacher is None or config.distill.teacher_sha256 is not None:
        return config
    one_line = " ".join(teacher.split())
    require(Path(teacher).is_dir(), SETTING, one_line, "a folder: of a finished run, or in timm's layout")
    return replace(config, distill=replace(config.distill, teacher_sha256=fingerprint(Path(teacher))))


def load_teacher(config: DistillConfig, classes: int, channels: int = 3) -> FrozenClassifier:
    """The teacher that the config names.

    Args:
        classes: that the student learns.
        channels: of the images.
    Raises:
        UserError: no classifier there, one of other classes or channels, or other weights than the run began with.
    """
    folder = Path(config.teacher)
    if config.teacher_sha256 is not None:
        digest = fingerprint(folder)
        allowed = f"{digest}, that of {folder}, or null"
        require(digest == config.teacher_sha256, "distill.teacher_sha256", config.teacher_sha256, allowed)
    network, img_size, own = classifier_at(config.teacher, channels, SETTING)
    if own != classes:
        raise UserError(f"{SETTING} is {folder}, which knows {own} classes; these images have {classes}")
    return FrozenClassifier(network, img_size)


def classifier_at(encoder: str, channels: int, setting: str) -> Classifier:
    """A run's or timm's; `channels` of the images, and `setting` that names it.

    Raises:
        UserError: no classifier there, or one of other channels.
    """
    require(Path(encoder).name != BEST, setting, encoder, "the run folder: no head is kept beside encoder_best")
    run = find_run(encoder)
    return classifier_of_timm(encoder, channels, setting) if run is None else classifier_of_run(run, channels, setting)


def classifier_of_timm(folder: str, channels: int, setting: str) -> Classifier:
    """What timm's own folder has, with its head."""
    model = load_encoder(folder, setting=setting)
    classes = getattr(model, "num_classes", 0)
    require(classes > 0, setting, folder, A_TEACHER)
    if not uses_gpu():
        set_attention(model, fused=False)
    frozen = FrozenEncoder(model)
    check_channels(frozen, channels, setting)
    return nn.Sequential(frozen.normalize, model), frozen.img_size, classes


def classifier_of_run(run: Path, channels: int, setting: str) -> Classifier:
    """What a run with labels came to. encoder/ has no head: it is in the newest checkpoint."""
    require(find_labelled_images(str(run)) is not None, setting, run, A_TEACHER)
    checkpoints = complete_checkpoints(run)[-1:]
    whole = bool(checkpoints) and not damaged_files(checkpoints[0])
    require(whole, setting, run, "a run whose newest checkpoint is there and whole: the head is in it")
    saved, classes, frozen = saved_settings(run), outputs_of(checkpoints[0] / MODEL), load_frozen_encoder(str(run))
    check_channels(frozen, channels, setting)
    network = as_trained(frozen, saved, classes)
    restore_trained(run, network, OptimConfig(**saved["optim"]))
    exported = load_file(encoder_folder(run) / "model.safetensors")  # the digest is of these
    same = all(torch.equal(tensor, exported[name]) for name, tensor in network.encoder.state_dict().items())
    require(same, setting, run, "a run whose newest checkpoint has the weights of its encoder/")
    return network, frozen.img_size, classes


def outputs_of(weights: Path) -> int:
    """How many numbers the last layer of a network's `head` gives."""
    with safe_open(weights, framework="pt") as file:
        names = file.keys()
        last = max(name for name in names if name.startswith("head.") and name.endswith(".bias"))
        return file.get_slice(last).get_shape()[0]


def as_trained(frozen: FrozenEncoder, saved: dict[str, Any], classes: int) -> HeadedEncoder:
    """The network that a run trained, by its settings, to load its weights into."""
    encoder = frozen.model.requires_grad_(True)  # the optimiser's state, which has the averages, counts what is trained
    of_head = saved.get("head") or {"kind": "linear", "pooling": saved.get("pooling")}  # fine-tuning has one layer
    distilled = (saved.get("distill") or {}).get("teacher") is not None
    heads = [build_head(of_head["kind"], encoder.head_hidden_size, classes) for _ in range(1 + distilled)]
    kind = DistilledEncoder if distilled else HeadedEncoder
    return kind(encoder, *heads, of_head["pooling"], frozen.normalize.mean, frozen.normalize.std)
