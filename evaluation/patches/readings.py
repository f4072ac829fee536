"""Two readings of patch features: the class of each pixel by a linear layer, or by the nearest training patches.

B or n images, h x w patches, H x W pixels, D width, C classes.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from evaluation.config import SegmentationConfig
from evaluation.patches.features import PatchFeatures
from evaluation.patches.masks import IGNORED_CLASS
from evaluation.patches.statistics import class_shares_of_patches, find_classes
from mpp.features.neighbours import count_votes, find_neighbours
from mpp.runtime.hardware import device

WARMUP_SHARE = 0.04  # of the steps; DINOv2 has 1500 of 40,000
IMAGES_PER_PREDICTION = 16  # that are predicted together
UNTAUGHT_LOGIT = -1e4  # its probability is 0; infinity times a weight of 0 would be no number when upsampled
PIXEL_LOGITS_PER_BLOCK = 2**24  # upsampled at a time, which bounds the memory
PatchScorer = Callable[[Tensor], Tensor]
"""Features of patches (B, h, w, D), on the device, to scores (B, C, h, w)."""


class LinearReading(nn.Module):
    """A batch norm and a linear layer on each patch: features (B, h, w, D) to logits (B, C, h, w).

    Args:
        width: D.
        taught: the classes that occur in the training masks; others are never predicted.
    """

    def __init__(self, width: int, taught: Sequence[int]):
        super().__init__()
        classes = max(taught, default=0) + 1
        self.norm = nn.BatchNorm1d(width)
        self.classify = nn.Linear(width, classes)
        self.register_buffer("untaught", torch.tensor([number not in taught for number in range(classes)]))
        nn.init.normal_(self.classify.weight, std=0.01)
        nn.init.zeros_(self.classify.bias)

    def forward(self, features: Tensor) -> Tensor:
        logits = self.classify(self.norm(features.flatten(0, -2)))
        logits = logits.masked_fill(self.untaught, UNTAUGHT_LOGIT)
        return logits.unflatten(0, features.shape[:-1]).movedim(-1, 1)


def fit_linear_reading(features: PatchFeatures, config: SegmentationConfig, lr: float, seed: int) -> LinearReading:
    """Train a linear reading of the training patches with AdamW."""
    generator = torch.Generator().manual_seed(seed)
    taught = find_classes(features.train_masks).tolist()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reading = LinearReading(features.train.shape[-1], taught).to(device())
    optimizer = torch.optim.AdamW(reading.parameters(), lr=lr, weight_decay=config.weight_decay)
    warmup = max(1, round(WARMUP_SHARE * config.steps))

    def lr_factor(step: int) -> float:
        rising = (step + 1) / warmup
        falling = (config.steps - step) / max(1, config.steps - warmup)
        return min(rising, falling)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    images_seen = config.steps * config.images_a_step
    epochs = math.ceil(images_seen / len(features.train))
    order = torch.cat([torch.randperm(len(features.train), generator=generator) for _ in range(epochs)])
    for batch in np.sort(order[:images_seen].view(config.steps, -1).numpy()):
        inputs = torch.from_numpy(features.train[batch]).to(device())
        masks = torch.from_numpy(features.train_masks[batch]).long().to(device())
        optimizer.zero_grad()
        loss = masked_loss(upsample(reading(inputs), masks.shape[1:]), masks)
        loss.backward()
        optimizer.step()
        schedule.step()
    return reading.eval()


def masked_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Mean cross-entropy over the pixels that count; 0 if there are none."""
    total = F.cross_entropy(logits, masks, ignore_index=IGNORED_CLASS, reduction="sum")
    return total / (masks != IGNORED_CLASS).sum().clamp(min=1)


def upsample(scores: Tensor, size: Sequence[int]) -> Tensor:
    """Scores of patches (B, C, h, w) to scores of the pixels of a mask, (B, C, H, W)."""
    return F.interpolate(scores, tuple(size), mode="bilinear", align_corners=False)


def choose_labelled_patches(
    features: PatchFeatures, config: SegmentationConfig, classes: int
) -> tuple[NDArray, Tensor]:
    """Training patches with pixels that count, at most `config.patches` of them, and their most frequent classes.

    Returns:
        Features (P, D) and classes (P,).
    """
    grid = features.train.shape[1:3]
    labels = []
    for shares in class_shares_of_patches(features.train_masks, grid, classes):
        has_class = shares.sum(-1) > 0
        labels.append(shares.argmax(-1).where(has_class, -1).flatten())
    labels = torch.cat(labels)
    chosen = (labels >= 0).nonzero().squeeze(1)
    if len(chosen) > config.patches:
        generator = torch.Generator().manual_seed(config.data.cut_seed)
        order = torch.randperm(len(chosen), generator=generator)
        chosen = chosen[order[: config.patches].sort().values]
    patches = features.train.reshape(-1, features.train.shape[-1])
    return patches[chosen.numpy()], labels[chosen]


def neighbour_votes(
    features: Tensor, bank: NDArray, labels: Tensor, classes: int, config: SegmentationConfig
) -> Tensor:
    """Shares of the votes of the nearest training patches: features (B, h, w, D) to (B, C, h, w).

    Args:
        bank, labels: training patches and their classes: see `choose_labelled_patches`.
    """
    queries = features.flatten(0, -2)
    labels = labels.to(queries.device)
    votes = count_votes(find_neighbours(bank, queries, config.neighbours), labels, classes, config.temperature)
    shares = votes / votes.sum(1, keepdim=True)
    return shares.unflatten(0, features.shape[:-1]).movedim(-1, 1)


@torch.no_grad()
def predict_pixels(score_patches: PatchScorer, features: NDArray, size: Sequence[int], classes: int) -> Tensor:
    """The class of each pixel, (n, H, W) int16, of images whose patches have these features (n, h, w, D).

    Args:
        size: H, W.
        classes: C.
    """
    images_per_upsampling = max(1, PIXEL_LOGITS_PER_BLOCK // (classes * math.prod(size)))
    predicted = []
    for first in range(0, len(features), IMAGES_PER_PREDICTION):
        block = torch.from_numpy(features[first : first + IMAGES_PER_PREDICTION]).to(device())
        for scores in score_patches(block).split(images_per_upsampling):
            predicted.append(upsample(scores, size).argmax(1).to(torch.int16).cpu())
    return torch.cat(predicted)
