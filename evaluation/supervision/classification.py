"""Learning labels end to end: the task of supervised pre-training and of fine-tuning, and the result of such a run."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torchvision.transforms import v2

from evaluation.config import OneRunConfig, SupervisedConfig
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.frozen.features import LabelledSplits, label_problem, load_labelled
from evaluation.frozen.run_images import LoadedSplits, check_labels_unseen, note_other_images
from evaluation.metrics.scoring import (
    KINDS,
    Outcomes,
    add_figures,
    labelled_outcomes,
    load_outcomes,
    save_outcomes,
    score_of,
)
from evaluation.supervision.classifiers import TEACHER_SETTING, load_teacher
from evaluation.supervision.deit import average_heads, build_student, distillation_loss
from evaluation.supervision.learners import HeadedEncoder, build_backbone, build_head, learner_of
from mpp.config import AugmentConfig, ImageSize, require
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.shards import Shards
from mpp.data.views import Batch, ViewDataset, collate
from mpp.errors import Unavailable, UserError
from mpp.features.metrics import Sums, add_sums, sum_over_processes
from mpp.models.descriptions import licence_of
from mpp.models.plain import checkpoint_activations, has_running_statistics
from mpp.runtime.messages import note
from mpp.runtime.randomness import FIXED_VIEW
from mpp.training.flops import executed_flops
from mpp.training.log import UNREADABLE_FILE, Tracker
from mpp.training.run_folder import read_record
from mpp.training.task import ImageTask, to_device

MAX_LEFT_OUT = 5000
"""Maximum number of left-out training images that fine-tuning is evaluated on, besides the held-out ones."""
OUTCOMES_NAME = "heldout"
"""Name of a run's outcomes."""
LEFT_OUT_NAME = "dev"
"""Name of the outcomes of left-out training images."""
HEAD_LEFT_OUT = "the classification head is left out"
"""End of the sentence on training, in the card of an encoder that learned labels."""
HOW_TO_LOAD = re.compile(r"^## Load it\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class Classification(ImageTask):
    """Learn the labels of images, of any kind (see `Learner`), from scratch or from an encoder's weights.

    Mixup and CutMix draw from torch's generator, which the loop seeds for each forward pass: the mixed pairs are a
    function of (seed, step, forward pass), and change with the images in a forward pass, not with the processes.

    With a teacher (DeiT), a second head predicts its answer for the same crop. The teacher keeps its normalisation,
    gets the crop at its own size, and is not saved with the run.
    """

    learns_labels = True
    kind = "encoder trained with labels"
    start: str
    """Weights that it begins from, and its teacher, in words."""

    def __init__(
        self,
        config: SupervisedConfig | OneRunConfig,
        accelerator: Accelerator,
        layout: BatchLayout,
        loaded: LoadedSplits | None = None,
    ):
        data, augment = config.data, config.augment
        left_out_images = min(MAX_LEFT_OUT, data.eval_images) if config.is_fine_tuning and not config.on_dev else 0
        splits = load_labelled(data, accelerator, config.weights, left_out_images, loaded, task=config.task)
        if config.on_dev:
            splits = LabelledSplits(*splits.train.cut(config.dev_fraction, data.eval_seed, "dev"))
        super().__init__(accelerator, layout, config.run, data)
        self.config = config
        self.train, held_out, left_out = splits
        self.held_out = held_out.choose(data.eval_images, data.cut_seed)
        self.label_kind = self.train.label_kind
        self.classes = number_of_classes(splits)
        names = self.train.class_names[: self.classes]
        self.label_names = names if names and len(names) == self.classes else None
        self.learner = learner_of(self.label_kind, self.train.labels, self.classes, config.loss)

        teacher = None if config.is_fine_tuning else config.distill.teacher
        needs_classes = augment.mixup or augment.cutmix or augment.label_smoothing or teacher
        allowed = "class with mixup, CutMix, label smoothing or a teacher"
        require(self.label_kind == "class" or not needs_classes, "task", self.label_kind, allowed)
        self.mix = build_mix(augment, self.classes)
        self.model, self.img_size = self.load_network() if config.is_fine_tuning else self.build_network()
        if self.mix is not None or has_running_statistics(self.model):
            layout.require_several(" with augment.mixup or cutmix, or for a model with batch norms")
        self.teacher = None
        if teacher is not None:
            check_labels_unseen(teacher, data, None, held_out, TEACHER_SETTING)  # all, not only `eval_images`
            self.teacher = load_teacher(config.distill, self.classes, data.channels).to(accelerator.device)
        self.held_out_views = self.fixed_view_loader.add(self.views(self.held_out))
        self.evaluated = {OUTCOMES_NAME: self.held_out_views}
        if left_out:
            self.evaluated[LEFT_OUT_NAME] = self.fixed_view_loader.add(self.views(left_out))

    def load_network(self) -> tuple[HeadedEncoder, ImageSize]:
        """The encoder that is fine-tuned, with a linear layer; height and width of its images."""
        config = self.config
        how = config.init == "random", config.img_size, config.run.seed, config.data.channels
        frozen = load_frozen_encoder(config.encoder, config.checkpoint, *how, drop_path_rate=config.drop_path)
        encoder = frozen.model.requires_grad_(True)
        if getattr(encoder, "attn_pool", None) is not None:
            raise Unavailable(f"encoder is {config.encoder}, which pools by attention and cannot be fine-tuned here")
        note_other_images(config.encoder, config.data)
        self.start = config.weights or "random weights"
        if config.weights == config.encoder:  # of other weights it is unknown
            self.licence = encoder.pretrained_cfg.get("license")
        if config.activation_checkpointing:
            checkpoint_activations(encoder, "activation_checkpointing")
        mean, std = frozen.normalize.mean, frozen.normalize.std
        return HeadedEncoder(encoder, self.build_head(encoder, "linear"), config.pooling, mean, std), frozen.img_size

    def build_network(self) -> tuple[HeadedEncoder, ImageSize]:
        """The encoder that the settings describe, with its head or heads; height and width of its images."""
        model, distill, channels = self.config.model, self.config.distill, self.config.data.channels
        self.start = model.init_from or "random weights"
        self.licence = licence_of(model.init_from)
        if distill.teacher is None:
            encoder, img_size = build_backbone(model, channels)
        else:
            encoder = build_student(model, channels)
            img_size = encoder.patch_embed.img_size
            self.start += f", and by {distill.kind} distillation from {distill.teacher} through a token (DeiT: Touvron "
            self.start += "et al., ICML 2021). The tokens begin with [class] and the distillation token"
        heads = [self.build_head(encoder, self.config.head.kind) for _ in range(1 if distill.teacher is None else 2)]
        mean, std = model.normalization(channels)
        return HeadedEncoder(encoder, heads[0], self.config.head.pooling, mean, std, *heads[1:]), img_size

    def build_head(self, encoder: nn.Module, kind: str) -> nn.Module:
        """A classifier on a token of the encoder."""
        return self.learner.complete(build_head(kind, encoder.head_hidden_size, self.learner.outputs))

    @property
    def method(self) -> str:
        """Its training in a sentence, for the model card."""
        return f"Trained with labels, from {self.start}; {HEAD_LEFT_OUT}"

    def views(self, dataset: ImageDataset | Shards) -> ViewDataset:
        """Crops of these images, perhaps augmented."""
        return replace(super().views(dataset), randaugment=self.config.augment.randaugment)

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        loss, predicted, labels = self.predict_batch(model, batch)
        if not measure:
            return loss, {}
        scores = self.learner.score(predicted, labels).double()
        return loss, {"score": scores.sum(), "images": torch.ones_like(scores).sum()}

    def predict_batch(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss of a batch, its predictions (B, ...) and its labels, on the device."""
        images, labels = to_device([batch.images, batch.labels], self.accelerator.device)
        target = labels
        if model.training and self.mix is not None:
            images, target = self.mix(images.float(), labels)  # (B, C) now
        outputs = model(images)
        logits = average_heads(outputs)
        smoothing = self.config.augment.label_smoothing
        if not model.training:
            loss = self.learner.loss(logits, labels)
        elif self.teacher is None:
            loss = self.learner.loss(logits, target, smoothing)
        else:
            with self.accelerator.autocast():
                taught = self.teacher(images)
            loss = distillation_loss(outputs, target, taught, self.config.distill, smoothing)
        return loss, self.learner.predict(logits.detach()), labels

    def describe(self, sums: Sums) -> dict[str, float]:
        return {self.learner.figure: float(sums["score"] / sums["images"])}

    def flops(self) -> int:
        image = self.views(self.train)[FIXED_VIEW, 0]
        two = collate([image, image]).images  # over a single image, a batch norm may have no statistics
        taught = executed_flops(self.teacher, two, backward=False) if self.teacher else 0
        return (executed_flops(self.model, two) + taught) // 2

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        kind = KINDS[self.label_kind]
        scalars = {}
        for name, views in self.evaluated.items():
            loss, outcomes = self.measure_outcomes(model, views, tracker)
            if self.accelerator.is_main_process:
                save_outcomes(Path(self.run.dir) / name, [outcomes])
            figures = {kind.score: score_of(outcomes)} | kind.baselines(labelled_outcomes(outcomes).targets)
            known = {key.replace(" ", "_"): value for key, value in figures.items() if math.isfinite(value)}
            scalars |= {f"{name}/{key}": value for key, value in ({"loss": loss} | known).items()}
        return scalars

    @torch.no_grad()
    def measure_outcomes(self, model: nn.Module, views: ViewDataset, tracker: Tracker) -> tuple[float, Outcomes]:
        """Mean loss over views of `fixed_view_loader`, and the outcomes of their images, in their order.

        In the loss, others replace images that cannot be decoded; outcomes leave these out.
        """
        images = views.dataset
        requested = iter(range(self.accelerator.process_index, len(images), self.accelerator.num_processes))
        sums: Sums = {}
        own = []
        for batch in self.fixed_views(views, tracker):
            loss, predicted, _ = self.predict_batch(model, batch)
            sums = add_sums(sums, self.loss_sums(loss, batch))
            of_batch = zip(batch.indices.tolist(), predicted.tolist(), requested, strict=False)
            own += [(index, prediction) for shown, prediction, index in of_batch if shown == index]
        sums = sum_over_processes(sums)
        indices, predictions = map(np.array, zip(*sorted(gather_object(own)), strict=True))
        known = images.class_names[: self.classes], np.array(images.image_names())[indices].tolist()
        outcomes = Outcomes(self.label_kind, images.labels[indices], predictions, *known)
        return float(sums["loss"] / sums["images"]), outcomes


def number_of_classes(splits: LabelledSplits) -> int:
    """C: of one class an image the largest label of any split, plus one; of numbers 0."""
    train = splits.train
    problem = label_problem(train.label_kind, train.labels, "train")
    if problem is not None:
        raise UserError(problem)
    if train.label_kind != "class":
        return len(train.class_names)
    return 1 + max(int(split.labels.max()) for split in splits if split)


def build_mix(augment: AugmentConfig, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Mixup, CutMix, or a random choice of both; None: no mixing.

    Returns:
        Images (B, C, H, W) float32 and labels (B,) to mixed images and shares of classes (B, C).
    """
    kinds = {v2.MixUp: augment.mixup, v2.CutMix: augment.cutmix}
    transforms = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds.items() if alpha > 0]
    return v2.RandomChoice(transforms) if len(transforms) > 1 else next(iter(transforms), None)


def result_of_run(folder: Path, seed: int) -> dict[str, Any]:
    """A result: the outcomes of a run's last evaluation, and their figures.

    Held-out images that cannot be decoded are noted, and counted as `left_out`.

    Raises:
        UserError: it kept no outcomes, as earlier versions did not.
    """
    outcomes = load_outcomes(folder / OUTCOMES_NAME)
    if outcomes is None:
        raise UserError(f"{folder} has no {OUTCOMES_NAME}.outcomes.npz: train it again")
    (result,) = add_figures([{"seed": seed, "outcomes": outcomes}])
    left_out = read_record(folder)["held_out"]["images"] - len(outcomes)
    if left_out > 0:
        note(f"{left_out} held-out images cannot be decoded and are left out: see {UNREADABLE_FILE}")
        result["left_out"] = left_out
    return result


def card_of_file(card: str, has_head: bool) -> str:
    """The card of an encoder's folder as that of a file that was exported from it, which timm cannot load.

    Args:
        has_head: whether the file has the classification head, too, or both of a distilled encoder.
    """
    card = HOW_TO_LOAD.sub("", card)
    return card.replace(HEAD_LEFT_OUT, "this file has the classification head, too") if has_head else card
