"""Supervised pre-training baselines, from scratch (paper, section 3.1 and Table 3), with a teacher if one is named.

    accelerate launch evaluation/supervised.py
    accelerate launch evaluation/supervised.py --config configs/supervised/imagenet_vit_b16.yaml
    accelerate launch evaluation/supervised.py --distill.teacher runs/resnet --model.init_from runs/birds

ViTs, BiT's ResNets (`--model.name resnetv2_50x1_bit`) and hybrids (`--model.name vit_base_r50_s16_224`). The run folder
and its encoder/ are as pre-training's, so that every probe takes it. Fine-tuning is the same task (finetune.py).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from shutil import copytree
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torchvision.transforms import v2

from evaluation.config import OneRunConfig, SupervisedConfig
from evaluation.frozen.encoder import FrozenEncoder, load_frozen_encoder
from evaluation.frozen.features import LabelledSplits, load_labelled
from evaluation.frozen.known_labels import check_labels_unseen
from evaluation.frozen.results import print_details, write_report
from evaluation.frozen.run_images import SUPERVISED_REPORT, LoadedSplits
from evaluation.metrics.scoring import (
    Outcomes,
    add_figures,
    describe_labels,
    kind_of,
    load_outcomes,
    save_outcomes,
    score_of,
)
from evaluation.supervision.classifiers import DISTILL_TEACHER, load_teacher, with_teacher_digest
from evaluation.supervision.learners import (
    HeadedEncoder,
    add_head,
    as_timm_classifier,
    average_heads,
    build_backbone,
    distillation_loss,
    learner_of,
    number_of_classes,
)
from mpp.config import AugmentConfig, ImageSize, require
from mpp.config.parsing import parse
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.views import Batch, ViewDataset
from mpp.errors import Unavailable
from mpp.features.metrics import Sums, add_sums, count_right, is_right, sum_over_processes
from mpp.models.descriptions import licence_of
from mpp.models.encoder import Normalize
from mpp.models.plain import checkpoint_activations, has_running_statistics
from mpp.runtime.files import complete
from mpp.runtime.messages import note
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.start import run_main
from mpp.runtime.weights import CLASSIFIER, ENCODER
from mpp.training.flops import executed_flops
from mpp.training.log import UNREADABLE_FILE, Tracker
from mpp.training.run import train, write_run_page
from mpp.training.run_folder import read_record
from mpp.training.task import ImageTask

MAX_LEFT_OUT = 5000
"""Maximum number of left-out training images that fine-tuning is evaluated on, besides the held-out ones."""
OUTCOMES_NAME = "heldout"
"""Name of a run's outcomes."""
LEFT_OUT_NAME = "dev"
"""Name of the outcomes of left-out training images."""


# --- the task ---


class Classification(ImageTask):
    """Learn the labels of images, of any kind (see `Learner`), from scratch or, in fine-tuning, from an encoder.

    Mixup and CutMix draw from torch's generator, which the loop seeds for each forward pass: the mixed pairs are a
    function of (seed, step, forward pass), and change with the images in a forward pass, not with the processes.

    With a teacher (DeiT), a second head predicts its answer for the same crop. The teacher keeps its normalisation,
    gets the crop at its own size, and is not saved with the run.
    """

    learns_labels = True
    kind = "encoder trained with labels"

    def __init__(
        self,
        config: SupervisedConfig | OneRunConfig,
        accelerator: Accelerator,
        layout: BatchLayout,
        loaded: LoadedSplits | None = None,
    ):
        data, augment, teacher = config.data, config.augment, config.distill.teacher
        left_out_images = min(MAX_LEFT_OUT, data.eval_images) if config.is_fine_tuning and not config.on_dev else 0
        splits = load_labelled(data, accelerator, config.weights, left_out_images, loaded, task=config.task)
        if config.on_dev:
            splits = LabelledSplits(*splits.train.cut(config.dev_fraction, data.eval_seed, "dev"))
        super().__init__(accelerator, layout, config.run, data)
        self.config = config
        self.train, held_out, left_out = splits
        self.held_out = held_out.to_evaluate_on(data, data.eval_images)
        self.label_kind = self.train.label_kind
        self.classes = number_of_classes(splits)
        self.learner = learner_of(self.label_kind, self.train.labels, self.classes, config.loss)

        needs_classes = augment.mixup or augment.cutmix or augment.label_smoothing or teacher
        allowed = "class with mixup, CutMix, label smoothing or a teacher"
        require(self.label_kind == "class" or not needs_classes, "task", self.label_kind, allowed)
        self.mix = build_mix(augment, self.classes)
        self.model, self.img_size = self.build_network()
        if self.mix is not None or has_running_statistics(self.model):
            layout.require_several(" with augment.mixup or cutmix, or for a model with batch norms")
        self.teacher = None
        if teacher is not None:
            check_labels_unseen(teacher, data, None, held_out, DISTILL_TEACHER)  # all, not only `eval_images`
            frozen = load_teacher(teacher, self.classes, data.channels, self.train.class_names)
            self.teacher = frozen.to(accelerator.device)
        self.held_out_views = self.fixed_view_loader.add(self.views(self.held_out))
        self.evaluated = {OUTCOMES_NAME: self.held_out_views}
        if left_out:
            self.evaluated[LEFT_OUT_NAME] = self.fixed_view_loader.add(self.views(left_out))

    def build_network(self) -> tuple[HeadedEncoder, ImageSize]:
        """The encoder with its head or heads; height and width of its images."""
        config, channels, is_distilled = self.config, self.config.data.channels, self.config.distill.teacher is not None
        if config.is_fine_tuning:
            frozen = self.open_encoder()
            encoder, img_size, normalize = frozen.model.requires_grad_(True), frozen.img_size, frozen.normalize
        else:
            self.licence = licence_of(config.model.init_from)
            encoder, img_size = build_backbone(config.model, channels, is_distilled)
            normalize = Normalize(*config.model.normalization(channels))
        return add_head(encoder, normalize, config.head, self.learner, is_distilled), img_size

    def open_encoder(self) -> FrozenEncoder:
        """The encoder that is fine-tuned."""
        config = self.config
        frozen = load_frozen_encoder(
            config.encoder,
            config.checkpoint,
            random=config.init == "random",
            img_size=config.img_size,
            seed=config.run.seed,
            channels=config.data.channels,
            drop_path_rate=config.drop_path,
        )
        if getattr(frozen.model, "attn_pool", None) is not None:
            raise Unavailable(f"encoder is {config.encoder}, which pools by attention and cannot be fine-tuned here")
        if config.weights == config.encoder:  # of other weights it is unknown
            self.licence = frozen.model.pretrained_cfg.get("license")
        if config.activation_checkpointing:
            checkpoint_activations(frozen.model, "activation_checkpointing")
        return frozen

    @property
    def method(self) -> str:
        """Its training in a sentence, for the model card."""
        start, distill = self.config.weights or "random weights", self.config.distill
        if distill.teacher is not None:
            start += f", and by {distill.kind} distillation from {distill.teacher} through a token (DeiT: Touvron "
            start += "et al., ICML 2021). The tokens begin with [class] and the distillation token"
        return f"Trained with labels, from {start}"

    def export(self, model: HeadedEncoder, folder: Path, name: str = ENCODER) -> None:
        """Write the encoder, and before the last one the classifier, if timm has such a head."""
        if name == ENCODER and self.config.head.kind == "linear":
            layer = next(each for each in model.head.modules() if isinstance(each, nn.Linear))
            linear = self.learner.merge(copy.deepcopy(layer))
            classifier = as_timm_classifier(model, linear, self.img_size)
            if classifier is not None:
                super().export(classifier, folder, CLASSIFIER)
        super().export(model, folder, name)

    def views(self, dataset: ImageDataset) -> ViewDataset:
        """Crops of these images, perhaps augmented."""
        return replace(super().views(dataset), randaugment=self.config.augment.randaugment)

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        loss, predicted, labels = self.predict_batch(model, batch)
        if not measure or self.label_kind != "class":
            return loss, {}
        return loss, count_right(is_right(predicted, labels))

    def predict_batch(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss of a batch, its predictions (B, ...) and its labels, on the device."""
        device = self.accelerator.device
        images, labels = (tensor.to(device, non_blocking=True) for tensor in (batch.images, batch.labels))
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

    def flops(self) -> int:
        two = torch.stack([self.views(self.train)[FIXED_VIEW, 0].images] * 2)  # of one, some norms have no statistics
        taught = executed_flops(self.teacher, two, backward=False) if self.teacher else 0
        return (executed_flops(self.model, two) + taught) // 2

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        scalars = {}
        for name, views in self.evaluated.items():
            loss, outcomes = self.measure_outcomes(model, views, tracker)
            if self.accelerator.is_main_process:
                save_outcomes(Path(self.run.dir) / name, [outcomes])
            scalars[f"{name}/loss"] = loss
            figures = {kind_of(outcomes).score: score_of(outcomes)} | describe_labels(outcomes)["baselines"]
            for key, value in figures.items():
                if math.isfinite(value):
                    scalars[f"{name}/{key.replace(' ', '_')}"] = value
        return scalars

    @torch.no_grad()
    def measure_outcomes(self, model: nn.Module, views: ViewDataset, tracker: Tracker) -> tuple[float, Outcomes]:
        """Mean loss over views of `fixed_view_loader`, and the outcomes of their images, in their order.

        In the loss, others replace images that cannot be decoded; outcomes leave these out.
        """
        images = views.dataset
        requested = range(self.accelerator.process_index, len(images), self.accelerator.num_processes)
        sums: Sums = {}
        shown = []
        for batch in self.fixed_views(views, tracker):
            loss, predicted, _ = self.predict_batch(model, batch)
            sums = add_sums(sums, self.loss_sums(loss, batch))
            shown += zip(batch.indices.tolist(), predicted.tolist(), strict=True)
        sums = sum_over_processes(sums)
        own = [each for each, index in zip(shown, requested, strict=True) if each[0] == index]
        indices, predictions = map(np.array, zip(*sorted(gather_object(own)), strict=True))
        known = images.class_names[: self.classes], np.array(images.image_names())[indices].tolist()
        outcomes = Outcomes(self.label_kind, images.labels[indices], predictions, *known)
        return float(sums["loss"] / sums["images"]), outcomes


def build_mix(augment: AugmentConfig, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Mixup, CutMix, or a random choice of both; None: no mixing.

    Returns:
        Images (B, C, H, W) float32 and labels (B,) to mixed images and shares of classes (B, C).
    """
    kinds = {v2.MixUp: augment.mixup, v2.CutMix: augment.cutmix}
    transforms = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds.items() if alpha > 0]
    return v2.RandomChoice(transforms) if len(transforms) > 1 else next(iter(transforms), None)


# --- the result of a run ---


def result_of_run(folder: Path, seed: int) -> dict[str, Any]:
    """A result: the outcomes of a run's last evaluation, and their figures.

    Held-out images that cannot be decoded are noted, and counted as `left_out`.
    """
    outcomes = load_outcomes(folder / OUTCOMES_NAME)
    (result,) = add_figures([{"seed": seed, "outcomes": outcomes}])
    left_out = read_record(folder)["held_out"]["images"] - len(outcomes)
    if left_out > 0:
        note(f"{left_out} held-out images cannot be decoded and are left out: see {UNREADABLE_FILE}")
        result["left_out"] = left_out
    return result


def finish(run: Path, folder: Path, writes_page: bool) -> None:
    """Write the page of a run, with the figures of its report if asked for, and print how to use it.

    Args:
        folder: the run's, or that of its fine-tuning, which gets the classifier, too.
    """
    if not (run / CLASSIFIER).is_dir():
        print(f"no {CLASSIFIER}/ for timm, whose models have one linear head on what they pool")
    else:
        if folder != run:
            with complete(folder / CLASSIFIER) as partial:
                copytree(run / CLASSIFIER, partial)
        print(f"wrote {folder / CLASSIFIER}: the encoder with its head, a model of timm")
    if writes_page:
        write_run_page(run)
    print(f"next: mpp predict --classifier {quote(str(run))} --data.path NEW_IMAGES")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line, or `arguments`, say."""
    config = parse(SupervisedConfig, arguments)
    folder = train(with_teacher_digest(config), Classification, writes_page=False)
    if not PartialState().is_main_process:
        return
    path = folder / SUPERVISED_REPORT
    if config.run.eval_every > 0 and load_outcomes(folder / OUTCOMES_NAME):
        print_details(path, write_report(path, {"results": [result_of_run(folder, config.run.seed)]}))
        print(f"wrote {path}")
    else:
        print(f"no {path}: the run was not evaluated (run.eval_every 0)")
    finish(folder, folder, config.run.report)


if __name__ == "__main__":
    run_main(main)
