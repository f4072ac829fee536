"""A survey of a sample of the images: sizes, copies, classes, and images that cannot be decoded.

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
from mpp.data.dataset import ImageDataset, names_by_number
from mpp.errors import UnreadableImage

MAX_HELD_OUT = 512  # images in the sample of a survey
MAX_TRAINING = 4096
THUMBNAIL_SIDE = 16  # pixels
COPY_CORRELATION = 0.99  # of two thumbnails, above which their images count as copies
ONE_COLOUR_DEVIATION = 2.0  # of a thumbnail's pixels (0 to 255), below which its image shows one colour
MAX_UNREADABLE_SHARE = 0.01
MAX_DUPLICATES = 0.05  # of the held-out images; birds and CIFAR-10 have none, tiles of photographs at most 4 %
MAX_ONE_COLOUR = 0.25  # birds, CIFAR-10, digits have none, tiles of photographs 6 %


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
    """The copies: names of the held-out image and of the training image."""

    def warnings(self) -> list[str]:
        """Warnings of images that cannot be decoded, are copies or of one colour, and of a class that dominates."""
        unreadable = len(self.unreadable)
        sampled = self.train_images + self.held_out_images + unreadable
        largest = max(self.class_shares.values(), default=0.0)
        found = [
            (
                unreadable > MAX_UNREADABLE_SHARE * sampled,
                f"unreadable images: {unreadable} of {sampled} in the sample cannot be decoded",
            ),
            (
                self.duplicate_share > MAX_DUPLICATES,
                f"train / held-out duplicates: {self.duplicate_share:.0%} of the held-out images are nearly the same "
                "as a training image, so held-out figures are too good; remove copies, or name another data.eval_split",
            ),
            (
                self.one_colour_share > MAX_ONE_COLOUR,
                f"constant images dominate: {self.one_colour_share:.0%} of the images show only one colour; remove "
                "them, or see data.range and data.bands",
            ),
            (
                largest > max(0.5, 1.5 / max(1, len(self.class_shares))),
                f"one class dominates: {largest:.0%} of the labelled images are of one class, the baseline of kNN "
                "accuracy; balance the images, or name another data.label_column",
            ),
        ]
        return [warning for applies, warning in found if applies]


def survey(train: ImageDataset, held_out: ImageDataset, data: DataConfig, seconds: float) -> Survey:
    """Survey a random sample of the images, chosen by `data.cut_seed`.

    Args:
        seconds: limit for the training images; a quarter of it for the held-out images.
    """
    shares = train.class_shares()
    result = Survey(dict(zip(names_by_number(train.class_names, map(int, shares)), shares.values(), strict=True)))
    learned, learned_names = take_sample(train.choose(MAX_TRAINING, data.cut_seed), data, seconds, result)
    readable = len(train) - len(result.unreadable)
    tested, tested_names = take_sample(held_out.choose(MAX_HELD_OUT, data.cut_seed), data, seconds / 4, result)
    result.held_out_images, result.train_images = len(tested), len(learned)
    if not (len(tested) and len(learned)):
        return result
    one_colour = torch.cat([tested, learned]).std(1, unbiased=False) < ONE_COLOUR_DEVIATION
    result.one_colour_share = float(one_colour.float().mean())
    correlation, originals = correlations(tested, learned).max(1)
    copies = (correlation > COPY_CORRELATION) & ~one_colour[: len(tested)]
    result.duplicate_pairs = [(tested_names[copy], learned_names[originals[copy]]) for copy in copies.nonzero()]
    sampled_share = len(learned) / readable  # also the chance that an original is in the sample
    if copies.sum() > 2 or sampled_share == 1:
        result.duplicate_share = min(1.0, float(copies.float().mean()) / sampled_share)
    return result


def take_sample(dataset: ImageDataset, data: DataConfig, seconds: float, result: Survey) -> tuple[Tensor, list[str]]:
    """Decode images in random order, as many as the time allows: files come sorted by class.

    Args:
        result: gets their sizes, and those that cannot be decoded.
    Returns:
        Small grey versions of the others, (n, THUMBNAIL_SIDE**2), each with mean 0, and their names.
    """
    end = time.monotonic() + seconds
    thumbnails, names = [torch.empty(0, THUMBNAIL_SIDE**2)], []
    for index in np.random.default_rng(0).permutation(len(dataset)).tolist():
        if time.monotonic() > end:
            break
        name = dataset.image_name(index)
        try:
            image = dataset.decode(index, data)  # (C, H, W)
        except UnreadableImage as error:
            result.unreadable.append(f"{name}: {error}")
            continue
        names.append(name)
        result.sizes[tuple(image.shape[1:])] += 1
        grey = F.adaptive_avg_pool2d(image.float().mean(0, keepdim=True), THUMBNAIL_SIDE)
        thumbnails.append((grey - grey.mean()).view(1, -1))
    return torch.cat(thumbnails), names


def correlations(some: Tensor, others: Tensor) -> Tensor:
    """Correlations of thumbnails (n, P) and (m, P) of mean 0, as (n, m): above COPY_CORRELATION they are of copies.

    A JPEG of quality 60 at 70 % of the size has 0.990 to 0.999 with its original (birds and digits, 5th percentile
    0.992). It has to be so with and without the mean of all images, such as a horizon or the spectrum of a voice: the
    lesser counts. Images of one colour are all alike, and tell nothing.
    """
    shared = F.normalize(others.mean(0), dim=0)
    without = [each - torch.outer(each @ shared, shared) for each in (some, others)]
    both = [F.normalize(one) @ F.normalize(other).T for one, other in ((some, others), without)]
    return torch.minimum(*both)
