"""Classification, trained end to end: the task that supervised pre-training and fine-tuning share."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torchvision.transforms import v2

from evaluation.metrics.one_class import largest_class_share
from evaluation.metrics.outcomes import Outcomes, load_outcomes, save_outcomes
from mpp.config import AugmentConfig, DataConfig, RunConfig, require
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.views import Batch, collate
from mpp.errors import UserError
from mpp.features.metrics import Sums, is_right
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.transfer import to_device
from mpp.training.flops import executed_flops
from mpp.training.log import Tracker
from mpp.training.task import ImageTask

HELD_OUT = "heldout"
"""Name of a run's outcomes."""


class Classification(ImageTask):
    """Softmax cross-entropy on labelled images; top-1 accuracy.

    Mixup and CutMix draw from torch's generator, which the loop seeds for each forward pass: what is mixed with what is
    a function of (seed, step, forward pass), and changes with the images in a forward pass, not with the processes.
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
    ):
        super().__init__(accelerator, layout, run, data)
        self.augment = augment
        self.randaugment = augment.randaugment
        if data.channels != 3:
            allowed = f"0 with {data.channels} channels: it changes colours; crops and flips serve all images"
            require(self.randaugment == 0, "augment.randaugment", self.randaugment, allowed)
        train, held_out = splits
        self.train = train
        self.held_out = held_out.choose(data.eval_images, data.cut_seed)
        self.classes = count_classes(splits)
        self.label_names = class_names(train, self.classes)
        self.mix = build_mix(augment, self.classes)
        self.predicted: list[tuple[Tensor, Tensor]] | None = None  # indices and classes of held-out images, while asked
        if self.mix is not None:
            allowed = "above 1 with augment.mixup or augment.cutmix"
            require(layout.smallest > 1, "data.batch_size", layout.smallest, allowed)

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        device = self.accelerator.device
        images, labels = to_device([batch.images, batch.labels], device)
        target = labels if labels.ndim == 1 else labels[:, 0]
        if model.training and self.mix is not None:
            images, target = self.mix(images.float(), target)  # (B, C) now
        outputs = model(images)
        logits = self.logits(outputs)
        loss = self.criterion(outputs, images, target) if model.training else F.cross_entropy(logits, target)
        if not measure:
            return loss, {}
        predicted = logits.argmax(-1)
        if self.predicted is not None:
            self.predicted.append((batch.indices, predicted.cpu()))
        right = is_right(predicted, labels).double().sum()
        count = torch.tensor(len(labels), dtype=torch.double, device=device)
        return loss, {"right": right, "images": count}

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs of the model to the logits (B, C) whose largest one is the prediction."""
        return outputs

    def criterion(self, outputs: Tensor, images: Tensor, target: Tensor) -> Tensor:
        """The loss that is trained.

        Args:
            outputs: outputs of the model.
            images: (B, C, H, W) as the model saw them, uint8 or float in [0, 255].
            target: classes (B,) or shares of classes (B, C).
        """
        return F.cross_entropy(outputs, target, label_smoothing=self.augment.label_smoothing)

    def flops(self) -> int:
        image = self.views(self.train)[FIXED_VIEW, 0]
        two = collate([image, image]).images  # over a single image, a batch norm may have no statistics
        return executed_flops(self.model, two) // 2

    def describe(self, sums: Sums) -> dict[str, float]:
        return {"accuracy": float(sums["right"] / sums["images"])}

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        self.predicted = []
        scalars = self.evaluate_held_out(model, tracker)
        self.keep_outcomes(self.predicted)
        self.predicted = None
        scalars["heldout/largest_class"] = largest_class_share(np.asarray(self.held_out_views.dataset.labels))
        return scalars

    def keep_outcomes(self, predicted: list[tuple[Tensor, Tensor]]) -> None:
        """Write the held-out images' outcomes into the run folder; those of an earlier evaluation are replaced.

        Args:
            predicted: indices of this process's images, and their predicted classes, batch by batch.
        """
        indices, classes = (torch.cat(parts).tolist() for parts in zip(*predicted, strict=True))
        pairs = sorted(gather_object(list(zip(indices, classes, strict=True))))
        if not self.accelerator.is_main_process:
            return
        dataset = self.held_out_views.dataset
        numbers = np.array([index for index, _ in pairs])
        predictions = np.array([each for _, each in pairs])
        names = (dataset.class_names or [])[: self.classes]
        all_images = Outcomes("class", np.asarray(dataset.labels), np.zeros(len(dataset)), names, dataset.image_names())
        save_outcomes(Path(self.run.dir) / HELD_OUT, [replace(all_images.select(numbers), predictions=predictions)])


def held_out_outcomes(folder: Path) -> Outcomes | None:
    """The outcomes of a run's last evaluation; None: it kept none, as earlier versions did not."""
    return load_outcomes(folder / HELD_OUT)


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


def class_names(train: ImageDataset, classes: int) -> list[str] | None:
    """The name of each output of the head; None: unknown."""
    if not train.class_names or len(train.class_names) < classes:
        return None
    return train.class_names[:classes]


def count_classes(splits: Sequence[ImageDataset]) -> int:
    """C: the largest label of any split, plus one."""
    train, _ = splits
    if len(np.unique(train.labels)) < 2:
        raise UserError("all training images are of one class")
    return 1 + max(int(split.labels.max()) for split in splits)
