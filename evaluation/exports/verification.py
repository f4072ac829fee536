"""Comparison of an exported file with PyTorch on real images: largest difference, few-shot accuracy."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from evaluation import fewshot
from evaluation.config import ExportConfig, FewshotConfig
from evaluation.exports.formats import Computation
from evaluation.frozen.encoder import FrozenEncoder
from evaluation.frozen.features import DEFAULT_BATCH_SIZE, LabelledFeatures, extract_split, views_for, warn_left_out
from evaluation.metrics.scoring import add_scores
from mpp.data.crops import to_8_bits
from mpp.data.dataset import ImageDataset
from mpp.data.loader import fixed_view_batches
from mpp.data.views import Batch
from mpp.runtime.messages import note

MAX_ROUNDING_DIFFERENCE = 1e-4
SHOTS = 5


class Verification(NamedTuple):
    """Images by which a file is compared with PyTorch."""

    config: ExportConfig
    encoder: FrozenEncoder
    accelerator: Accelerator
    train: ImageDataset
    held_out: ImageDataset
    dtype: torch.dtype | None = None
    """Type of the pixels that the file takes; None: that of the images, which may be of both types."""

    def batches(self, dataset: ImageDataset) -> Iterable[Batch]:
        """Images as an encoder takes them, before its normalisation."""
        views = views_for(self.encoder, dataset, self.config.data)
        return fixed_view_batches(views, self.config.data.batch_size or DEFAULT_BATCH_SIZE)

    def file_input(self, images: Tensor) -> Tensor:
        """Images as the file takes them. If these are bytes, images of more bits are rounded, and a note says so."""
        if not self.config.normalize:
            return self.encoder.normalize(images)
        if self.dtype == torch.uint8 and images.dtype != self.dtype:
            note("the file takes uint8, by its first images; others have more than 8 bits, and are rounded")
            return to_8_bits(images)
        return images.to(self.dtype or images.dtype)

    def example(self, count: int) -> Tensor:
        """`count` held-out images (count, C, H, W) as the file takes them, repeated where there are fewer."""
        chosen = self.held_out.choose(count, self.config.data.cut_seed)
        first_batch = next(iter(self.batches(chosen)))
        images = self.file_input(first_batch.images)
        return images[torch.arange(count) % len(images)]

    @torch.no_grad()
    def largest_difference(self, compute: Computation, reference: Computation) -> float:
        """Largest absolute difference of two computations over `config.images` held-out images."""
        held_out = self.held_out.choose(self.config.images, self.config.data.cut_seed)
        differences = []
        for batch in self.batches(held_out):
            images = self.file_input(batch.images)
            differences.append((compute(images) - reference(images)).abs().max())
        return float(torch.stack(differences).max())

    def few_shot_accuracy(self, compute: Computation) -> float | None:
        """Few-shot accuracy of the features that `compute` extracts, the mean of three draws.

        None: there are no labels of one class an image, or `compute` has tokens or logits and not features.
        """
        if self.config.representation in ("tokens", "logits"):
            return None
        train, test = self.train.labelled(), self.held_out.labelled()
        if train is None or test is None or train.label_kind != "class" or train.labels.ndim > 1:
            return None
        train = train.choose(self.config.images, self.config.data.eval_seed)
        test = test.choose(self.config.images, self.config.data.cut_seed)
        of_train = self.extract(train, compute)
        of_test = self.extract(test, compute)
        features = LabelledFeatures(of_train.by_depth[0], of_train.labels, of_test.by_depth[0], of_test.labels)
        results = fewshot.evaluate(features.checked(self.config.frozen.encoder), FewshotConfig(shots=(SHOTS,)))
        return float(np.mean([result["accuracy"] for result in add_scores(results)]))

    def extract(self, dataset: ImageDataset, compute: Computation):
        """The features that `compute` has of the images that can be decoded; the others are named."""
        views = views_for(self.encoder, dataset, self.config.data)
        extracted = extract_split(views, lambda images: [compute(self.file_input(images.cpu()))], self.accelerator)
        warn_left_out(extracted.unreadable)
        return extracted
