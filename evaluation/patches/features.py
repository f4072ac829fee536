"""Frozen features of patches, and two readings of them: by a linear layer, or by the nearest training patches.

B or n images, h x w patches, H x W pixels, D width, C classes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from evaluation.config import SegmentationConfig
from evaluation.frozen.encoder import FrozenEncoder, patch_grid
from evaluation.frozen.features import LabelledFeatures, extract_split, warn_left_out
from evaluation.patches.masks import BIRD_CLASSES, IGNORED_CLASS, LARGEST_CLASS, MaskedViews
from mpp.config import require
from mpp.features.frozen import tokens_at
from mpp.features.neighbours import count_votes, find_neighbours
from mpp.runtime.hardware import device
from mpp.runtime.messages import progress_bar, tell

WARMUP_SHARE = 0.04  # of the steps; DINOv2 has 1500 of 40,000
IMAGES_PER_PREDICTION = 16  # that are predicted together
UNTAUGHT_LOGIT = -1e4  # its probability is 0; infinity times a weight of 0 would be no number when upsampled
Reading = Callable[[Tensor], Tensor]
"""Features of patches (B, h, w, D), on the device, to scores (B, C, h, w)."""


Encode = Callable[[Tensor], list[Tensor]]
"""Images (B, C, H, W) from 0 to 255, on the device, to features of patches (B, h, w, D), one of each depth."""


# --- features ---


@torch.no_grad()
def patch_features(encoder: FrozenEncoder, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """Features of each patch of images (B, C, H, W) after each depth, (B, h, w, D) float32."""
    model = encoder.model
    grid = patch_grid(model)
    features = []
    for depth, tokens in zip(depths, tokens_at(model, encoder.normalize(images), depths), strict=True):
        patches = tokens[:, model.num_prefix_tokens :]
        if depth == len(encoder.stages) and hasattr(model, "fc_norm"):  # some encoders have their last norm there
            patches = model.fc_norm(patches)
        features.append(patches.unflatten(1, grid).float().cpu())
    return features


def color_and_position(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mean colour of each patch, its row and its column, each from -0.5 to 0.5: (B, h, w, C + 2)."""
    colors = F.adaptive_avg_pool2d(images.float() / 255 - 0.5, grid).movedim(1, -1).cpu()
    rows, columns = ((torch.arange(count) + 0.5) / count - 0.5 for count in grid)
    positions = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
    return torch.cat([colors, positions.expand(len(images), -1, -1, -1)], -1)


class ExtractedPatches(NamedTuple):
    """Features of patches, of the images and masks that can be decoded."""

    by_depth: dict[int, LabelledFeatures]
    """Of the patches (n, h, w, D); the labels are masks (n, H, W) of classes from 0 without gaps, and IGNORED_CLASS."""
    class_numbers: NDArray[np.int16]
    """(C,) numbers of the classes in the files of the masks, ascending."""
    left_out: dict[str, int]
    """Number of the others, of train and test."""


def extract_patches(
    encode: Encode,
    depths: Sequence[int],
    views: Sequence[MaskedViews],
    config: SegmentationConfig,
    accelerator: Accelerator,
) -> ExtractedPatches:
    """Extract features of patches.

    Args:
        depths: of the features that `encode` returns.
        views: of train and test.
    Raises:
        UserError: no image can be decoded, or one cannot and `strict` is set; or the masks are of one class.
    """
    train, test = (extract_split(each, encode, accelerator, config.strict, "features of patches") for each in views)
    warn_left_out((*train.unreadable, *test.unreadable))
    learned, tested = (f"{(each.labels == IGNORED_CLASS).mean():.1%}" for each in (train, test))
    tell(f"{learned} of the pixels to learn from and {tested} of those to evaluate on are ignored (data.ignore_index)")

    numbers = classes_in([*train.labels, *test.labels])
    allowed = "a column of several classes, not counting data.ignore_index"
    require(len(numbers) > 1, "data.mask_column", f"of the classes {numbers.tolist()}", allowed)
    train_masks, test_masks = (places_of_classes(numbers)[each.labels] for each in (train, test))
    about = name_classes(config, numbers.tolist()), views[1].dataset.select(test.kept).image_names(), "pixels"
    by_depth = {}
    for depth, of_train, of_test in zip(depths, train.by_depth, test.by_depth, strict=True):
        by_depth[depth] = LabelledFeatures(of_train, train_masks, of_test, test_masks, *about)
    left_out = {"train": len(train.unreadable), "test": len(test.unreadable)}
    return ExtractedPatches(by_depth, numbers, left_out)


def name_classes(config: SegmentationConfig, numbers: Sequence[int]) -> list[str]:
    """The name of each class.

    Args:
        numbers: of the classes in the files of the masks, ascending.
    Raises:
        UserError: `class_names` has no name for a class.
    """
    names = config.class_names or (BIRD_CLASSES if config.data.path is None else ())
    fits = not names or len(names) > numbers[-1]
    require(fits, "class_names", list(names), f"{numbers[-1] + 1} names, from class 0 on")
    return [names[number] if names else f"class {number}" for number in numbers]


def classes_in(masks: Iterable[NDArray[np.int16]]) -> NDArray[np.int16]:
    """The classes that occur in masks (H, W), ascending."""
    found = np.unique(np.concatenate([np.unique(mask) for mask in masks]))
    return found[found != IGNORED_CLASS]


def places_of_classes(numbers: Sequence[int]) -> NDArray[np.int16]:
    """By number in the files of masks, the place of each class among `numbers`; C of others; IGNORED_CLASS stays."""
    places = np.full(LARGEST_CLASS + 2, len(numbers), np.int16)  # the last one is that of IGNORED_CLASS, -1
    places[numbers] = np.arange(len(numbers))
    places[IGNORED_CLASS] = IGNORED_CLASS
    return places


# --- readings ---


class LinearReading(nn.Module):
    """A batch norm and a linear layer on each patch: features (B, h, w, D) to logits (B, C, h, w).

    Args:
        width: D.
        untaught: (C,) whether a class does not occur in the training masks: it is never predicted.
    """

    def __init__(self, width: int, untaught: Tensor):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.classify = nn.Linear(width, len(untaught))
        self.register_buffer("untaught", untaught)
        nn.init.normal_(self.classify.weight, std=0.01)
        nn.init.zeros_(self.classify.bias)

    def forward(self, features: Tensor) -> Tensor:
        logits = self.classify(self.norm(features.flatten(0, -2)))
        logits = logits.masked_fill(self.untaught, UNTAUGHT_LOGIT)
        return logits.unflatten(0, features.shape[:-1]).movedim(-1, 1)


def fit_linear(features: LabelledFeatures, config: SegmentationConfig, lr: float, seed: int) -> LinearReading:
    """Train a linear reading of the training patches with AdamW; the rate rises, then falls linearly."""
    taught = classes_in(features.train_labels)
    untaught = torch.from_numpy(~np.isin(np.arange(1 + max(taught, default=0)), taught))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reading = LinearReading(features.train.shape[-1], untaught).to(device())
    inputs, masks = torch.from_numpy(features.train), torch.from_numpy(features.train_labels)
    optimizer = torch.optim.AdamW(reading.parameters(), weight_decay=config.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(config.steps * config.images_a_step / len(features.train))
    order = torch.cat([torch.randperm(len(features.train), generator=generator) for _ in range(epochs)])
    warmup = max(1, round(WARMUP_SHARE * config.steps))
    bar = progress_bar(range(config.steps), desc=f"linear, rate {lr:g}, seed {seed}", unit="step")
    for step, batch in zip(bar, order.split(config.images_a_step), strict=False):
        rising, falling = (step + 1) / warmup, (config.steps - step) / max(1, config.steps - warmup)
        optimizer.param_groups[0]["lr"] = lr * min(rising, falling)
        batch = batch.sort().values
        targets = masks[batch].long().to(device())
        optimizer.zero_grad()
        masked_loss(upsample(reading(inputs[batch].to(device())), targets.shape[1:]), targets).backward()
        optimizer.step()
    return reading.eval()


def masked_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Mean cross-entropy over the pixels that count; 0 if there are none."""
    total = F.cross_entropy(logits, masks, ignore_index=IGNORED_CLASS, reduction="sum")
    return total / (masks != IGNORED_CLASS).sum().clamp(min=1)


def fit_neighbours(features: LabelledFeatures, config: SegmentationConfig) -> Reading:
    """The shares of the votes of the nearest training patches, of at most `patches` with a class."""
    labels = label_patches(features).flatten()
    chosen = (labels != IGNORED_CLASS).nonzero().squeeze(1)
    if len(chosen) > config.patches:
        generator = torch.Generator().manual_seed(config.data.cut_seed)
        order = torch.randperm(len(chosen), generator=generator)
        chosen = chosen[order[: config.patches].sort().values]
    bank = features.train.reshape(-1, features.train.shape[-1])[chosen.numpy()]
    labels = labels[chosen].to(device())

    def vote(patches: Tensor) -> Tensor:
        nearest = find_neighbours(bank, patches.flatten(0, -2), config.neighbours)
        votes = count_votes(nearest, labels, len(features.class_names), config.temperature)
        shares = votes / votes.sum(1, keepdim=True)
        return shares.unflatten(0, patches.shape[:-1]).movedim(-1, 1)

    return vote


def label_patches(features: LabelledFeatures) -> Tensor:
    """The most frequent class of each training patch, (n, h, w); IGNORED_CLASS where no pixel counts."""
    labels = []
    for mask in torch.from_numpy(features.train_labels):
        one_hot = F.one_hot(mask.long() - IGNORED_CLASS, 1 + len(features.class_names))[..., 1:]
        shares = F.adaptive_avg_pool2d(one_hot.movedim(-1, 0).float(), features.train.shape[1:3])
        labels.append(shares.argmax(0).where(shares.sum(0) > 0, IGNORED_CLASS))
    return torch.stack(labels)


# --- predictions ---


def upsample(scores: Tensor, size: Sequence[int]) -> Tensor:
    """Scores of patches (B, C, h, w) to scores of the pixels of a mask, (B, C, H, W)."""
    return F.interpolate(scores, tuple(size), mode="bilinear", align_corners=False)


@torch.no_grad()
def predict_pixels(reading: Reading, features: NDArray[np.float32], size: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """The class of each pixel of images, (H, W), by the features of their patches, (M, h, w, D).

    Args:
        size: (H, W).
    """
    for block in torch.from_numpy(features).split(IMAGES_PER_PREDICTION):
        for scores in reading(block.to(device())):  # image by image, which bounds the memory
            yield upsample(scores[None], size)[0].argmax(0).cpu().numpy()


def count_confusion(truth: NDArray, predicted: NDArray, classes: int) -> NDArray[np.int64]:
    """Pixels of each class (first axis) that each class (second axis) is predicted for, of an image: (C, C).

    Args:
        truth, predicted: (H, W) classes from 0; a pixel that is truly of IGNORED_CLASS does not count.
    """
    counts = truth != IGNORED_CLASS
    pairs = truth[counts].astype(np.int64) * classes + predicted[counts]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
