"""A survey of a sample of the images: sizes, unreadable files, copies, images of one colour, classes.

n, m images of the sample.
"""

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpp.config import DataConfig
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.channels import is_picture
from mpp.data.decoding.decode import describe
from mpp.errors import MissingDecoder, UnreadableImage

THUMBNAIL_SIDE = 16  # pixels
COPY_CORRELATION = 0.99  # of two thumbnails, above which their images count as copies
ONE_COLOUR_DEVIATION = 2.0  # of a thumbnail's pixels (0 to 255), below which its image shows one colour
MAX_HELD_OUT = 512  # images in the sample
MAX_TRAINING = 4096
PAIRS_SHOWN = 8


class Thumbnails(NamedTuple):
    """Small grey versions of images."""

    pixels: Tensor  # (n, THUMBNAIL_SIDE**2) float32, 0 to 255
    indices: NDArray[np.int64]  # (n,): indices of the images in their dataset

    @property
    def of_one_colour(self) -> Tensor:
        """(n,) bool: images of one colour."""
        return self.pixels.std(1, unbiased=False) < ONE_COLOUR_DEVIATION

    def unit_vectors(self, without: Tensor | None = None) -> Tensor:
        """(n, THUMBNAIL_SIDE**2): without their mean, of length 1; their products are correlations.

        Args:
            without: a thumbnail whose direction is removed from each.
        """
        centred = self.pixels - self.pixels.mean(1, keepdim=True)
        if without is not None:
            direction = F.normalize(without - without.mean(), dim=0)
            centred = centred - (centred @ direction)[:, None] * direction
        return F.normalize(centred, dim=1)


class SampledImages(NamedTuple):
    """A sample of a split: the images that can be decoded, and the peculiarities of their files."""

    thumbnails: Thumbnails
    unreadable: list[str]
    """Images that cannot be decoded, and why."""
    without_decoder: Counter[str]
    """The package that some of these need, and how to install it -> images."""
    sizes: Counter[tuple[int, int]]
    """(height, width) -> images."""
    frames: Counter[int]
    """Number of frames, of which the first counts -> images that have more than one."""
    other_nodata: Counter[float]
    """Value of nodata by a TIFF's own tag that is not `data.nodata` -> images."""


@dataclass(frozen=True)
class Survey:
    """Properties of the images of both samples together."""

    train_images: int = 0
    """Training images that can be decoded."""
    held_out_images: int = 0
    """Held-out images that can be decoded."""
    unreadable: list[str] = field(default_factory=list)
    """As in `SampledImages`, like the next four."""
    without_decoder: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    frames: Counter[int] = field(default_factory=Counter)
    other_nodata: Counter[float] = field(default_factory=Counter)
    one_colour_share: float = 0.0
    """Share of images of one colour."""
    duplicate_share: float = 0.0
    """Share of the held-out images that are copies of a training image, estimated where not all training images are in
    the sample."""
    smallest_visible_share: float = 0.0
    """Smallest share of duplicates that a sample of this size shows: three pairs are expected in it."""
    duplicate_pairs: list[tuple[str, str]] = field(default_factory=list)
    """Some of the duplicates: names of the held-out image and of the training image."""
    double_share: float = 0.0
    """Share of the training images that are copies of an earlier one."""
    class_shares: dict[str, float] = field(default_factory=dict)
    """Class -> its share of all labelled training images."""

    @property
    def sample_size(self) -> int:
        """Images of the sample, including those that cannot be decoded."""
        return self.train_images + self.held_out_images + len(self.unreadable)


def survey(train: ImageDataset, held_out: ImageDataset, data: DataConfig, seconds: float) -> Survey:
    """Survey a random sample of the images, chosen by `data.cut_seed`.

    Args:
        seconds: limit for the training images; a quarter of it for the held-out images.
    """
    held_out_images = held_out.choose(MAX_HELD_OUT, data.cut_seed)
    train_images = train.choose(MAX_TRAINING, data.cut_seed)
    tested = take_sample(held_out_images, data, seconds / 4)
    learned = take_sample(train_images, data, seconds)
    of_one_colour = torch.cat([tested.thumbnails.of_one_colour, learned.thumbnails.of_one_colour])
    copies = find_copies(tested.thumbnails, learned.thumbnails)
    shown = copies[:PAIRS_SHOWN]
    pairs = [(held_out_images.image_name(copy), train_images.image_name(original)) for copy, original in shown]
    duplicate_share, smallest_visible_share = share_of_duplicates(len(copies), tested, learned, len(train))
    return Survey(
        train_images=len(learned.thumbnails.indices),
        held_out_images=len(tested.thumbnails.indices),
        unreadable=tested.unreadable + learned.unreadable,
        without_decoder=tested.without_decoder + learned.without_decoder,
        sizes=tested.sizes + learned.sizes,
        frames=tested.frames + learned.frames,
        other_nodata=tested.other_nodata + learned.other_nodata,
        one_colour_share=float(of_one_colour.float().mean()) if len(of_one_colour) else 0.0,
        duplicate_share=duplicate_share,
        smallest_visible_share=smallest_visible_share,
        duplicate_pairs=pairs,
        double_share=share_of_doubles(learned.thumbnails),
        class_shares=train.class_shares(),
    )


def take_sample(dataset: ImageDataset, data: DataConfig, seconds: float) -> SampledImages:
    """Decode images in random order, as many as the time allows: files come sorted by class."""
    begin = time.monotonic()
    pixels: list[Tensor] = []
    indices: list[int] = []
    unreadable: list[str] = []
    without_decoder, sizes, frames, nodata = Counter(), Counter(), Counter(), Counter()
    for index in np.random.default_rng(0).permutation(len(dataset)).tolist():
        if time.monotonic() - begin > seconds:
            break
        try:
            image = dataset.decode(index, data)  # (C, H, W)
            description = describe(dataset.encoded(index, data))
        except UnreadableImage as error:
            unreadable.append(f"{dataset.image_name(index)}: {error}")
            if isinstance(error, MissingDecoder):
                without_decoder[str(error)] += 1
            continue
        nodata.update(other_nodata(description.nodata, data))
        if description.frames > 1 and is_picture(data):
            frames[description.frames] += 1
        height, width = image.shape[-2:]
        sizes[height, width] += 1
        grey = image.float().mean(0, keepdim=True)
        pixels.append(F.adaptive_avg_pool2d(grey, THUMBNAIL_SIDE).flatten())
        indices.append(index)
    stacked = torch.stack(pixels) if pixels else torch.empty(0, THUMBNAIL_SIDE**2)
    thumbnails = Thumbnails(stacked, np.array(indices, np.int64))
    return SampledImages(thumbnails, unreadable, without_decoder, sizes, frames, nodata)


def share_of_duplicates(
    copies: int, tested: SampledImages, learned: SampledImages, train_images: int
) -> tuple[float, float]:
    """`duplicate_share` and `smallest_visible_share` of a `Survey`, by the number of copies in the held-out sample.

    Args:
        train_images: all training images, also those that are not in the sample.
    """
    held_out = len(tested.thumbnails.indices)
    readable = train_images - len(learned.unreadable)
    sampled_share = len(learned.thumbnails.indices) / max(readable, 1)  # also the chance that an original is in it
    duplicates, visible = 0.0, 0.0
    if sampled_share < 1:
        visible = min(1.0, 3 / max(held_out * sampled_share, 1e-9))
    if copies > 2 or sampled_share == 1:
        duplicates = min(1.0, copies / max(held_out, 1) / max(sampled_share, 1e-9))
    return duplicates, visible


def other_nodata(value: float | None, data: DataConfig) -> list[float]:
    """The value of nodata by an image's own tag, if `data.nodata` is another one."""
    if data.nodata is None or value is None or value == data.nodata or (data.nodata == "nan" and math.isnan(value)):
        return []
    return [value]


def find_copies(some: Thumbnails, others: Thumbnails) -> list[tuple[int, int]]:
    """Images of `some` that are copies of one of `others`, and of which: indices of both.

    Two images count as copies where the correlation of their thumbnails is above 0.99: a JPEG of quality 60 at 70 % of
    the size has 0.990 to 0.999 with its original (birds and digits, 5th percentile 0.992). It has to be so with and
    without the mean of all images, such as a horizon or the spectrum of a voice. Images of one colour are left out:
    they are all alike.
    """
    if not len(some.indices) or not len(others.indices):
        return []
    correlation, best = correlations(some, others).max(1)
    is_copy = ((correlation > COPY_CORRELATION) & ~some.of_one_colour).numpy()
    originals = others.indices[best.numpy()]
    return list(zip(some.indices[is_copy].tolist(), originals[is_copy].tolist(), strict=True))


def correlations(some: Thumbnails, others: Thumbnails) -> Tensor:
    """(n, m) correlations of thumbnails: the lesser of those with and without the mean of `others`."""
    shared = others.pixels.mean(0)
    with_shared = some.unit_vectors() @ others.unit_vectors().T
    without_shared = some.unit_vectors(shared) @ others.unit_vectors(shared).T
    return torch.minimum(with_shared, without_shared)


def share_of_doubles(images: Thumbnails) -> float:
    """Share of the images that are copies of an earlier one."""
    if len(images.indices) < 2:
        return 0.0
    highest = correlations(images, images).tril(-1).amax(1)
    is_double = (highest > COPY_CORRELATION) & ~images.of_one_colour
    return float(is_double.float().mean())
