"""Learning labels end to end: the task that supervised pre-training and fine-tuning share."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torchvision.transforms import v2

from evaluation.config import NumberLoss
from evaluation.frozen.features import label_problem
from evaluation.metrics.scoring import KINDS, Outcomes, kind_of, labelled_outcomes, load_outcomes, save_outcomes
from evaluation.supervision.learners import Learner, learner_of
from mpp.config import AugmentConfig, DataConfig, RunConfig, require
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.shards import Shards
from mpp.data.views import Batch, ViewDataset, collate
from mpp.errors import UserError
from mpp.features.metrics import Sums, add_sums, sum_over_processes
from mpp.models.plain import has_running_statistics
from mpp.runtime.messages import note
from mpp.runtime.randomness import FIXED_VIEW
from mpp.training.flops import executed_flops
from mpp.training.log import UNREADABLE_FILE, Tracker, last_scalars
from mpp.training.run_folder import read_record
from mpp.training.task import ImageTask, to_device

OUTCOMES_NAME = "heldout"
"""Name of a run's outcomes."""
HEAD_LEFT_OUT = "the classification head is left out"
BOTH_HEADS_LEFT_OUT = "both heads are left out"
"""Endings of the sentence on training, in the card of an encoder that learned labels."""
HOW_TO_LOAD = re.compile(r"^## Load it\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class Classification(ImageTask):
    """Learn the labels of images, of any kind: one class by softmax cross-entropy, others see `Learner`.

    Mixup and CutMix draw from torch's generator, which the loop seeds for each forward pass: the mixed pairs are a
    function of (seed, step, forward pass), and change with the images in a forward pass, not with the processes.
    """

    learns_labels = True
    kind = "encoder trained with labels"

    def __init__(
        self,
        accelerator: Accelerator,
        layout: BatchLayout,
        run: RunConfig,
        data: DataConfig,
        augment: AugmentConfig,
        splits: Sequence[ImageDataset],
        number_loss: NumberLoss = "l2",
    ):
        super().__init__(accelerator, layout, run, data)
        self.augment = augment
        train, held_out = splits
        self.train = train
        self.held_out = held_out.choose(data.eval_images, data.cut_seed)
        self.classes = number_of_classes(splits)
        self.label_names = output_names(train, self.classes)
        self.label_kind = train.label_kind
        self.learner = learner_of(self.label_kind, train.labels, self.classes, number_loss)
        refuse_mixing(augment, self.learner)
        self.mix = build_mix(augment, self.classes)
        if self.mix is not None:
            layout.require_several(" with augment.mixup or augment.cutmix")

    def views(self, dataset: ImageDataset | Shards) -> ViewDataset:
        """Crops of these images, perhaps augmented."""
        return replace(super().views(dataset), randaugment=self.augment.randaugment)

    def refuse_single_images(self) -> None:
        """Raise UserError where a forward pass may be of a single image, which has no statistics for batch norms."""
        if has_running_statistics(self.model):
            self.layout.require_several(" for a model with batch norms")

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        loss, logits, labels = self.predict_batch(model, batch)
        if not measure:
            return loss, {}
        count = torch.tensor(len(labels), dtype=torch.double, device=labels.device)
        return loss, self.learner.sums(self.learner.predict(logits.detach()), labels) | {"images": count}

    def predict_batch(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss of a batch, its logits (B, C) and its labels, on the device."""
        images, labels = to_device([batch.images, batch.labels], self.accelerator.device)
        target = self.learner.to_learn(labels)
        if model.training and self.mix is not None:
            images, target = self.mix(images.float(), target)  # (B, C) now
        outputs = model(images)
        logits = self.logits(outputs)
        loss = self.criterion(outputs, images, target) if model.training else self.learner.loss(logits, target)
        return loss, logits, labels

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs of the model to the logits (B, C) whose largest one is the prediction."""
        return outputs

    def criterion(self, outputs: Tensor, images: Tensor, target: Tensor) -> Tensor:
        """The loss that is trained.

        Args:
            images: (B, C, H, W) as the model saw them, uint8 or float in [0, 255].
            target: labels (B, ...), or shares of classes (B, C).
        """
        return self.learner.loss(outputs, target, self.augment.label_smoothing)

    def flops(self) -> int:
        image = self.views(self.train)[FIXED_VIEW, 0]
        two = collate([image, image]).images  # over a single image, a batch norm may have no statistics
        return executed_flops(self.model, two) // 2

    def describe(self, sums: Sums) -> dict[str, float]:
        return self.learner.describe(sums)

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        scalars, outcomes = self.measure_outcomes(model, self.held_out_views, tracker)
        if self.accelerator.is_main_process:
            save_outcomes(Path(self.run.dir) / OUTCOMES_NAME, [outcomes])
        baselines = KINDS[self.label_kind].baselines(labelled_outcomes(outcomes).targets)
        scalars |= {name.replace(" ", "_"): value for name, value in baselines.items()}
        return {f"heldout/{name}": value for name, value in scalars.items()}

    @torch.no_grad()
    def measure_outcomes(
        self, model: nn.Module, views: ViewDataset, tracker: Tracker
    ) -> tuple[dict[str, float], Outcomes]:
        """Mean loss and figures over views of `fixed_view_loader`, and the outcomes of their images, in their order.

        In the loss, others replace images that cannot be decoded; figures and outcomes leave these out.
        """
        sums: Sums = {}
        predicted = []
        for batch in self.fixed_views(views, tracker):
            loss, logits, labels = self.predict_batch(model, batch)
            predictions = self.learner.predict(logits)
            sums = add_sums(sums, self.learner.sums(predictions, labels) | self.loss_sums(loss, batch))
            predicted.append((batch.indices, predictions.cpu()))
        scalars = self.describe_views(sum_over_processes(sums))
        outcomes = self.gather_outcomes(views.dataset, predicted)
        figures = {name: value for name, value in self.learner.figures(outcomes).items() if math.isfinite(value)}
        return scalars | figures, outcomes

    def gather_outcomes(self, dataset: ImageDataset, predicted: list[tuple[Tensor, Tensor]]) -> Outcomes:
        """The outcomes of images, of all processes.

        Args:
            predicted: indices of this process's images, and their predictions, batch by batch; empty where there are
                fewer images than processes.
        """
        requested = iter(range(self.accelerator.process_index, len(dataset), self.accelerator.num_processes))
        own_pairs = []
        for indices, predictions in predicted:
            for shown_index, prediction in zip(indices.tolist(), predictions.tolist(), strict=True):
                index = next(requested)
                if shown_index == index:
                    own_pairs.append((index, prediction))
        pairs = sorted(gather_object(own_pairs))
        numbers = np.array([index for index, _ in pairs])
        predictions = np.array([each for _, each in pairs])
        names = dataset.class_names[: self.classes]
        labels = np.asarray(dataset.labels)
        all_images = Outcomes(self.label_kind, labels, np.zeros(len(dataset)), names, dataset.image_names())
        return replace(all_images.select(numbers), predictions=predictions)


def score_of_run(folder: Path) -> dict[str, Any]:
    """Entries of a result: the score of a run's last evaluation as `accuracy`, and its outcomes, if they were kept.

    Held-out images that cannot be decoded are noted, and counted as `left_out`.
    """
    outcomes = held_out_outcomes(folder)
    if outcomes is None:
        return {"accuracy": last_scalars(folder)["heldout/accuracy"]}
    score = kind_of(outcomes).score
    accuracy = last_scalars(folder).get(f"heldout/{score}", math.nan)
    result = {"accuracy": accuracy, "outcomes": outcomes}
    held_out = read_record(folder)["held_out"].get("images", len(outcomes))
    left_out = held_out - len(outcomes)
    if left_out > 0:
        note(f"{left_out} of {held_out} held-out images cannot be decoded and are left out: see {UNREADABLE_FILE}")
        result["left_out"] = left_out
    return result


def held_out_outcomes(folder: Path) -> Outcomes | None:
    """The outcomes of a run's last evaluation; None: it kept none, as earlier versions did not."""
    return load_outcomes(folder / OUTCOMES_NAME)


def refuse_mixing(augment: AugmentConfig, learner: Learner) -> None:
    """Raise UserError where a setting is for one class an image, and the labels are of another kind."""
    for name in ("mixup", "cutmix", "label_smoothing"):
        value = getattr(augment, name)
        require(learner.mixes or value == 0, f"augment.{name}", value, f"0 with task {learner.kind}")


def build_mix(augment: AugmentConfig, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Mixup, CutMix, or a random choice of both; None: no mixing.

    Returns:
        Images (B, C, H, W) float32 and labels (B,) to mixed images and shares of classes (B, C).
    """
    transforms: list[v2.Transform] = []
    if augment.mixup > 0:
        transforms.append(v2.MixUp(alpha=augment.mixup, num_classes=classes))
    if augment.cutmix > 0:
        transforms.append(v2.CutMix(alpha=augment.cutmix, num_classes=classes))
    if not transforms:
        return None
    return transforms[0] if len(transforms) == 1 else v2.RandomChoice(transforms)


def output_names(train: ImageDataset, classes: int) -> list[str] | None:
    """The name of each output of the head; None: unknown."""
    if not train.class_names or len(train.class_names) < classes:
        return None
    return train.class_names[:classes]


def number_of_classes(splits: Sequence[ImageDataset]) -> int:
    """C: of one class an image the largest label of any split, plus one; of numbers 0."""
    train, _ = splits
    problem = label_problem(train.label_kind, train.labels, "train")
    if problem is not None:
        raise UserError(problem)
    if train.label_kind != "class":
        return len(train.class_names)
    return 1 + max(int(split.labels.max()) for split in splits)


def card_of_file(card: str, has_head: bool) -> str:
    """The card of an encoder's folder as that of a file that was exported from it, which timm cannot load.

    Args:
        has_head: whether the file has the classification head, too, or both of a distilled encoder.
    """
    card = HOW_TO_LOAD.sub("", card)
    if has_head:
        card = card.replace(HEAD_LEFT_OUT, "this file has the classification head, too")
        card = card.replace(BOTH_HEADS_LEFT_OUT, "this file has the mean of both heads, too")
    return card
