"""A survey of a sample of the images: sizes, copies, classes and peculiarities of files.

n, m images of a sample.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpp.config import DataConfig
from mpp.data.dataset import ImageDataset
from mpp.errors import UnreadableImage

MAX_HELD_OUT = 512  # images in the sample of a survey
MAX_TRAINING = 4096
THUMBNAIL_SIDE = 16  # pixels
COPY_CORRELATION = 0.99  # of two thumbnails, above which their images count as copies
ONE_COLOUR_DEVIATION = 2.0  # of a thumbnail's pixels (0 to 255), below which its image shows one colour
PAIRS_SHOWN = 8


@dataclass
class Survey:
    """Properties of a sample of the training and of the held-out images, together where nothing else is said."""

    class_shares: dict[str, float] = field(default_factory=dict)
    """Class -> its share of all labelled training images."""
    train_images: int = 0
    """Training images that can be decoded."""
    held_out_images: int = 0
    """Held-out images that can be decoded."""
    unreadable: list[str] = field(default_factory=list)
    """Images that cannot be decoded, and why."""
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(height, width) -> images."""
    one_colour_share: float = 0.0
    """Share of images of one colour."""
    duplicate_share: float = 0.0
    """Share of the held-out images that are copies of a training image, estimated where not all training images are in
    the sample: by at least three pairs, otherwise 0."""
    duplicate_pairs: list[tuple[str, str]] = field(default_factory=list)
    """Some of the duplicates: names of the held-out image and of the training image."""

    @property
    def sample_size(self) -> int:
        """Images of the sample, including those that cannot be decoded."""
        return self.train_images + self.held_out_images + len(self.unreadable)


def survey(train: ImageDataset, held_out: ImageDataset, data: DataConfig, seconds: float) -> Survey:
    """Survey a random sample of the images, chosen by `data.cut_seed`.

    Args:
        seconds: limit for the training images; a quarter of it for the held-out images.
    """
    result = Survey(train.class_shares())
    held_out = held_out.choose(MAX_HELD_OUT, data.cut_seed)
    train_sample = train.choose(MAX_TRAINING, data.cut_seed)
    tested, tested_indices = take_sample(held_out, data, seconds / 4, result)
    unreadable_held_out = len(result.unreadable)
    learned, learned_indices = take_sample(train_sample, data, seconds, result)
    result.held_out_images, result.train_images = len(tested), len(learned)
    if not (len(tested) and len(learned)):
        return result
    result.one_colour_share = float(is_one_colour(torch.cat([tested, learned])).float().mean())
    correlation, originals = correlations(tested, learned).max(1)
    copies = ((correlation > COPY_CORRELATION) & ~is_one_colour(tested)).nonzero().flatten().tolist()
    for copy in copies[:PAIRS_SHOWN]:
        original = train_sample.image_name(learned_indices[originals[copy]])
        result.duplicate_pairs.append((held_out.image_name(tested_indices[copy]), original))
    readable = len(train) - len(result.unreadable) + unreadable_held_out
    sampled_share = len(learned) / readable  # also the chance that an original is in the sample
    if len(copies) > 2 or sampled_share == 1:
        result.duplicate_share = min(1.0, len(copies) / len(tested) / sampled_share)
    return result


def take_sample(dataset: ImageDataset, data: DataConfig, seconds: float, result: Survey) -> tuple[Tensor, list[int]]:
    """Decode images in random order, as many as the time allows: files come sorted by class.

    Args:
        result: gets what their files say.
    Returns:
        Small grey versions of those that can be decoded, (n, THUMBNAIL_SIDE**2) from 0 to 255, and their indices.
    """
    begin = time.monotonic()
    thumbnails = [torch.empty(0, THUMBNAIL_SIDE**2)]
    indices: list[int] = []
    for index in np.random.default_rng(0).permutation(len(dataset)).tolist():
        if time.monotonic() - begin > seconds:
            break
        try:
            image = dataset.decode(index, data)  # (C, H, W)
        except UnreadableImage as error:
            result.unreadable.append(f"{dataset.image_name(index)}: {error}")
            continue
        result.sizes[tuple(image.shape[1:])] += 1
        grey = image.float().mean(0, keepdim=True)
        thumbnails.append(F.adaptive_avg_pool2d(grey, THUMBNAIL_SIDE).view(1, -1))
        indices.append(index)
    return torch.cat(thumbnails), indices


def is_one_colour(thumbnails: Tensor) -> Tensor:
    """(n,) bool: images of one colour."""
    return thumbnails.std(1, unbiased=False) < ONE_COLOUR_DEVIATION


def correlations(some: Tensor, others: Tensor) -> Tensor:
    """Correlations of thumbnails (n, P), (m, P), as (n, m), of which those above COPY_CORRELATION are of copies.

    A JPEG of quality 60 at 70 % of the size has 0.990 to 0.999 with its original (birds and digits, 5th percentile
    0.992). It has to be so with and without the mean of all images, such as a horizon or the spectrum of a voice: the
    lesser counts. Images of one colour are all alike, and tell nothing.
    """
    some, others = some - some.mean(1, keepdim=True), others - others.mean(1, keepdim=True)
    shared = F.normalize(others.mean(0), dim=0)
    some_without = some - (some @ shared)[:, None] * shared
    others_without = others - (others @ shared)[:, None] * shared
    with_shared = F.normalize(some) @ F.normalize(others).T
    return torch.minimum(with_shared, F.normalize(some_without) @ F.normalize(others_without).T)
