"""Classification, learned end to end: the task that supervised pre-training and fine-tuning share."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torchvision.transforms import v2

from mpp.config import AugmentConfig, DataConfig, RunConfig, require
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.views import Batch, ViewDataset, collate
from mpp.errors import UserError
from mpp.features.metrics import Sums, is_right
from mpp.runtime.randomness import FIXED
from mpp.training.flops import executed_flops
from mpp.training.log import Tracker
from mpp.training.task import ImageTask


class Classification(ImageTask):
    """Softmax cross-entropy on labelled images; top-1 accuracy.

    Mixup and CutMix draw from torch's generator, which the loop seeds for each forward pass: what is mixed with what is
    a function of (seed, update, forward pass), and changes with the images in a forward pass, not with the processes.
    """

    learns_labels = True
    kind = "encoder trained with labels"
    judged: ViewDataset
    """The held-out images as they are evaluated on; whoever knows the image size sets it."""

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
        self.augment, self.randaugment = augment, augment.randaugment
        allowed = f"0 with {data.channels} channels: it changes colours; crops and flips serve all images"
        require(data.channels == 3 or self.randaugment == 0, "augment.randaugment", self.randaugment, allowed)
        self.train = splits[0]
        self.held_out = splits[1].choose(data.eval_images, data.cut_seed)
        self.classes = count_classes(splits)
        self.label_names = names_of_classes(splits[0], self.classes)
        self.mix = build_mix(augment, self.classes)
        if self.mix:
            require(
                layout.smallest > 1, "data.batch_size", layout.smallest, "above 1 with augment.mixup or augment.cutmix"
            )

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        device = self.accelerator.device
        images, labels = (part.to(device, non_blocking=True) for part in (batch.images, batch.labels))
        target = labels if labels.ndim == 1 else labels[:, 0]
        if model.training and self.mix:
            images, target = self.mix(images.float(), target)  # (B, C) now
        outputs = model(images)
        logits = self.logits(outputs)
        loss = self.criterion(outputs, images, target) if model.training else F.cross_entropy(logits, target)
        if not measure:
            return loss, {}
        right = is_right(logits.argmax(-1), labels).double().sum()
        return loss, {"right": right, "images": torch.tensor(len(labels), dtype=torch.double, device=device)}

    def logits(self, outputs: Tensor) -> Tensor:
        """What the model gives to the logits (B, C) that it is judged by."""
        return outputs

    def criterion(self, outputs: Tensor, images: Tensor, target: Tensor) -> Tensor:
        """The loss that is trained.

        Args:
            outputs: of the model.
            images: (B, C, H, W) as the model saw them, uint8 or float in [0, 255].
            target: classes (B,) or shares of classes (B, C).
        """
        return F.cross_entropy(outputs, target, label_smoothing=self.augment.label_smoothing)

    def flops(self) -> int:
        two = collate([self.views(self.train)[FIXED, 0]] * 2).images  # of one, a batch norm may have nothing to norm
        return executed_flops(self.model, two) // 2

    def describe(self, sums: Sums) -> dict[str, float]:
        return {"accuracy": float(sums["right"] / sums["images"])}

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        found = {f"heldout/{name}": value for name, value in self.judge(model, self.judged, tracker).items()}
        return found | {"heldout/largest_class": largest_class(np.asarray(self.judged.dataset.labels))}


def largest_class(labels: np.ndarray) -> float:
    """The accuracy of who always says the class that most images have: labels (N,), or (N, L) of which any is right."""
    return float(np.unique(labels[labels >= 0], return_counts=True)[1].max() / len(labels))


def build_mix(augment: AugmentConfig, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Images (B, C, H, W) float32 and labels (B,) to mixed images and shares of classes (B, C); None: no mixing."""
    chosen = [(v2.MixUp, augment.mixup), (v2.CutMix, augment.cutmix)]
    transforms = [transform(alpha=alpha, num_classes=classes) for transform, alpha in chosen if alpha > 0]
    return v2.RandomChoice(transforms) if len(transforms) > 1 else next(iter(transforms), None)


def names_of_classes(train: ImageDataset, classes: int) -> list[str] | None:
    """The name of each output of the head; None: nothing says them."""
    return train.names[:classes] if train.names and len(train.names) >= classes else None


def count_classes(splits: Sequence[ImageDataset]) -> int:
    """C: the largest label of any split, and one."""
    if len(np.unique(splits[0].labels)) < 2:
        raise UserError("all training images are of one class")
    return 1 + max(int(part.labels.max()) for part in splits)
