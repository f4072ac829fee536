"""Heads trained at once on frozen features of random crops, and their predictions.

B images of a step, C classes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from evaluation.config import LinearConfig, ProbeDataConfig
from evaluation.frozen.encoder import FrozenEncoder
from evaluation.frozen.features import (
    DEFAULT_BATCH_SIZE,
    RecordedBatches,
    extract_split,
    views_for,
    warn_left_out,
)
from evaluation.metrics.scoring import Outcomes
from evaluation.protocols.protocol import BASE_BATCH, Candidate, LinearProtocol, Plan
from mpp.config import DataConfig, flatten, rebuild
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout, cache_decoded, training_loader
from mpp.data.views import ViewDataset
from mpp.data.workers import WORKERS_ARE_FORKS
from mpp.runtime.messages import progress_bar

CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
"""Of random resized crops, as torchvision has them."""


class Classes(NamedTuple):
    """The classes of a dataset in the order of a head's outputs."""

    numbers: NDArray[np.int64]  # (C,) in the dataset, ascending
    names: list[str]  # of one without a name its number

    def outputs_of(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Labels by their numbers in the dataset, as outputs; -1, where there is none, stays."""
        return np.where(labels < 0, -1, np.searchsorted(self.numbers, labels))


class HeadTrainer:
    """Trains the heads of a protocol on an encoder's features, and predicts with them.

    Args:
        classes: those of the heads' outputs.
    """

    def __init__(
        self,
        protocol: LinearProtocol,
        encoder: FrozenEncoder,
        config: LinearConfig,
        accelerator: Accelerator,
        classes: Classes,
    ):
        self.protocol = protocol
        self.encoder = encoder.to(accelerator.device)
        self.data = config.data
        self.seed = config.frozen.seed
        self.strict = config.probe.strict
        self.accelerator = accelerator
        self.classes = classes

    def crops_of(self, train: ImageDataset) -> ViewDataset:
        """Random resized crops and flips of images, a function of (seed, epoch, index)."""
        data = crop_settings(self.data)
        if data.workers == 0 or WORKERS_ARE_FORKS:
            train = cache_decoded(train, data)
        return ViewDataset(train, data, self.encoder.img_size, self.seed)

    def train(self, train: ImageDataset, candidates: Sequence[Candidate], plan: Plan) -> list[nn.Module]:
        """Train the heads of some candidates at once, on the same crops of the images.

        Returns:
            The heads, in eval mode.
        """
        crops = self.crops_of(train)
        limit = crops.data.batch_size or DEFAULT_BATCH_SIZE
        layout = BatchLayout.of(plan.batch, limit, world_size=1, rank=0)
        batches = RecordedBatches(training_loader(crops, layout, 0, plan.steps), train.split, self.strict)
        steps = self.features_by_step(batches, layout.accumulation_steps)

        heads: list[nn.Module] = []
        for inputs, labels in progress_bar(steps, total=plan.steps, desc=self.protocol.name, unit="step"):
            if not heads:
                heads = self.build_heads(candidates, inputs)
                rates = [candidate.base_rate * plan.batch / BASE_BATCH for candidate in candidates]
                optimizer = self.protocol.build_optimizer(heads, rates)
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(self.protocol.rate_share, plan=plan))
            losses = []
            for head, candidate in zip(heads, candidates, strict=True):
                losses.append(F.cross_entropy(head(inputs[candidate.input]), labels))
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
            schedule.step()
        warn_left_out(sorted(set(batches.unreadable)))
        return [head.eval() for head in heads]

    def build_heads(self, candidates: Sequence[Candidate], inputs: Sequence[Tensor]) -> list[nn.Module]:
        """New heads for some candidates, in train mode.

        Args:
            inputs: some of each kind, which give the widths.
        """
        generator = torch.Generator().manual_seed(self.seed)
        heads = []
        for candidate in candidates:
            width = inputs[candidate.input].shape[1]
            head = self.protocol.build_head(width, len(self.classes.numbers), generator)
            heads.append(head.to(self.accelerator.device))
        return heads

    def features_by_step(self, batches: RecordedBatches, passes: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Inputs of heads, (B, D) each, and classes (B,) of each step, which takes several forward passes."""
        parts: list[list[Tensor]] = []
        for batch in batches:
            with torch.no_grad(), self.accelerator.autocast():
                inputs = self.protocol.encode(self.encoder, batch.images.to(self.accelerator.device, non_blocking=True))
            targets = torch.from_numpy(self.classes.outputs_of(batch.labels.numpy()))
            parts.append([*inputs, targets.to(self.accelerator.device)])
            if len(parts) == passes:
                *whole_inputs, whole_labels = map(torch.cat, zip(*parts, strict=True))
                yield whole_inputs, whole_labels
                parts = []

    def predict(
        self, images: ImageDataset, heads: Sequence[nn.Module], candidates: Sequence[Candidate]
    ) -> tuple[list[Outcomes], list[str]]:
        """Classify centre crops of the images that can be decoded.

        Returns:
            The outcomes of each head; names of the images that cannot be decoded.
        """
        classify = self.classifier(heads, candidates)
        views = views_for(self.encoder, images, self.data)
        split = extract_split(views, classify, self.accelerator, self.strict, "centre crops")
        targets = self.classes.outputs_of(split.labels)
        all_names = images.image_names()
        names = [all_names[index] for index in split.kept]
        outcomes = []
        for outputs in split.by_depth:
            predicted = outputs[:, 0].astype(np.int64)
            outcomes.append(Outcomes("class", targets, predicted, self.classes.names, names))
        return outcomes, split.unreadable

    def classifier(
        self, heads: Sequence[nn.Module], candidates: Sequence[Candidate]
    ) -> Callable[[Tensor], list[Tensor]]:
        """Images (B, C, H, W) to the output of each head that is largest, (B, 1)."""

        def classify(images: Tensor) -> list[Tensor]:
            inputs = self.protocol.encode(self.encoder, images)
            with torch.autocast(images.device.type, enabled=False):  # as heads are trained
                logits = [head(inputs[each.input]) for head, each in zip(heads, candidates, strict=True)]
            return [outputs.argmax(1, keepdim=True) for outputs in logits]

        return classify


def crop_settings(data: ProbeDataConfig) -> DataConfig:
    """The settings of a command's images, with those of random resized crops and flips."""
    settings = flatten(data)
    if settings["eval_crop"] is None:
        del settings["eval_crop"]  # the encoder's own, which random crops do not need
    return rebuild(DataConfig(crop_area=CROP_AREA, crop_ratio=CROP_RATIO, flip=True), settings)
