"""What a sample of the images is like: sizes, broken files, copies, images of one colour, classes.

n images that were looked at.
"""

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
from mpp.errors import UnreadableImage

SIDE = 16  # of the small greys
ALIKE = 0.99  # correlation of two small greys, from which on two images count as nearly the same
FLAT = 2.0  # deviation of the small grey, of 0 to 255, below which an image shows one colour
HELD_OUT, TRAINING = 512, 4096  # images that are looked at, at most


class Greys(NamedTuple):
    """Small greys of images, and which images they are."""

    pixels: Tensor  # (n, SIDE * SIDE) float32
    indices: NDArray[np.int64]  # (n,) of the split

    @property
    def flat(self) -> Tensor:
        """(n,) bool: images of one colour."""
        return self.pixels.std(1, unbiased=False) < FLAT

    def units(self, without: Tensor | None = None) -> Tensor:
        """(n, SIDE * SIDE): without mean, and what lies along an image, of unit length; products are correlations."""
        own = self.pixels - self.pixels.mean(1, keepdim=True)
        if without is not None:
            along = F.normalize(without - without.mean(), dim=0)
            own = own - (own @ along)[:, None] * along
        return F.normalize(own, dim=1)


@dataclass
class Survey:
    """What was found."""

    training: int = 0
    """Training images looked at that can be decoded."""
    held_out: int = 0
    """Held-out images looked at that can be decoded."""
    broken: list[str] = field(default_factory=list)
    """Images that cannot be decoded, and why."""
    sizes: Counter = field(default_factory=Counter)
    """(height, width) -> images."""
    constant: float = 0.0
    """Share that shows one colour alone."""
    duplicates: float = 0.0
    """Share of the held-out images that are nearly the same as a training image, estimated where not all training
    images were looked at."""
    visible: float = 0.0
    """The least share that would be seen: three pairs are expected of it among those that were looked at."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Some of these: names of the held-out image and of the training image."""
    doubles: float = 0.0
    """Share of the training images looked at that are nearly the same as an earlier one of these."""
    classes: dict[str, float] = field(default_factory=dict)
    """Class -> its share of the labelled training images."""

    @property
    def looked_at(self) -> int:
        """Images looked at, the broken ones with them."""
        return self.training + self.held_out + len(self.broken)


KNOWN: dict[tuple, Survey] = {}  # runs of one process are often on the same images


def survey(train: ImageDataset, held_out: ImageDataset, data: DataConfig, seconds: float = 10.0) -> Survey:
    """Look at a seeded choice of the images, for so many seconds at most; once in the life of a process."""
    read = (data.channels, data.bands, data.range, data.nodata, data.max_pixels, data.cut_seed)
    key = (train.rows._fingerprint, held_out.rows._fingerprint, *read)
    if key not in KNOWN:
        KNOWN[key] = look(train, held_out, data, seconds)
    return KNOWN[key]


def look(train: ImageDataset, held_out: ImageDataset, data: DataConfig, seconds: float) -> Survey:
    """The same, anew."""
    found = Survey()
    tested = greys(held_out.choose(HELD_OUT, data.cut_seed), data, seconds / 4, found)
    learned = greys(train.choose(TRAINING, data.cut_seed), data, seconds, found)
    found.held_out, found.training = len(tested.indices), len(learned.indices)
    together = torch.cat([tested.flat, learned.flat])
    found.constant = float(together.float().mean()) if len(together) else 0.0
    pairs = twins(tested, learned)
    names = (held_out.choose(HELD_OUT, data.cut_seed), train.choose(TRAINING, data.cut_seed))
    found.pairs = [(names[0].name(one), names[1].name(other)) for one, other in pairs[:8]]
    looked_at = len(learned.indices) / max(len(train), 1)  # each held-out image has a twin with this chance
    found.visible = min(1.0, 3 / max(found.held_out * looked_at, 1e-9)) if looked_at < 1 else 0.0
    if len(pairs) > 2 or looked_at == 1:
        found.duplicates = min(1.0, len(pairs) / max(found.held_out, 1) / max(looked_at, 1e-9))
    found.doubles = doubled(learned)
    found.classes = shares(train)
    return found


def greys(dataset: ImageDataset, data: DataConfig, seconds: float, found: Survey) -> Greys:
    """Small greys of the images in random order, as far as one gets; what cannot be decoded is noted."""
    begin, pixels, indices = time.monotonic(), [], []
    for index in np.random.default_rng(0).permutation(len(dataset)).tolist():  # files come sorted by class
        if time.monotonic() - begin > seconds:
            break
        try:
            image = dataset.decode(index, data)  # (C, H, W)
        except UnreadableImage as error:
            found.broken.append(f"{dataset.name(index)}: {error}")
            continue
        found.sizes[tuple(image.shape[-2:])] += 1
        pixels.append(F.adaptive_avg_pool2d(image.float().mean(0, keepdim=True), SIDE).flatten())
        indices.append(index)
    shape = (0, SIDE * SIDE)
    return Greys(torch.stack(pixels) if pixels else torch.empty(shape), np.array(indices, np.int64))


def twins(one: Greys, other: Greys) -> list[tuple[int, int]]:
    """Images of `one` that are nearly the same as one of `other`, and which: indices of both.

    Two images are nearly the same where the correlation of their small greys is above 0.99: a JPEG of quality 60 at
    70 % of the size has 0.990 to 0.999 with its original (birds and digits, 5th percentile 0.992). It has to be so with
    and without what all images share, such as a horizon or the spectrum of a voice. Images of one colour are left out:
    they are all alike.
    """
    if not len(one.indices) or not len(other.indices):
        return []
    likeness, index = alike(one, other).max(1)
    found = (likeness > ALIKE) & ~one.flat
    return [(int(one.indices[i]), int(other.indices[index[i]])) for i in found.nonzero().flatten().tolist()]


def alike(one: Greys, other: Greys) -> Tensor:
    """(n, m) correlations of small greys, the lesser of those with and without what all of `other` share."""
    shared = other.pixels.mean(0)
    return torch.minimum(one.units() @ other.units().T, one.units(shared) @ other.units(shared).T)


def doubled(greys: Greys) -> float:
    """Share of the images that are nearly the same as an earlier one."""
    if len(greys.indices) < 2:
        return 0.0
    likeness = alike(greys, greys).tril(-1).amax(1)
    return float(((likeness > ALIKE) & ~greys.flat).float().mean())


def shares(dataset: ImageDataset) -> dict[str, float]:
    """Class -> its share of the labelled images, the largest first; nothing without labels."""
    labelled = dataset.labelled()
    if labelled is None or labelled.labels.ndim > 1:
        return {}
    names, counts = np.unique(labelled.labels, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {str(names[i]): float(counts[i] / counts.sum()) for i in order}
