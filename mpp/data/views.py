"""Samples of images, and batches of samples: decoded crops as uint8 (float32 of other depths), corruption as integers.

Training is one endless sequence of positions. Position p is image p % n of epoch p // n in that epoch's order, so the
step determines which images come next; there is no partial batch and no padding. A sample is a pure function of
(seed, epoch, index): see mpp/runtime/randomness.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from mpp import corruption
from mpp.config import CorruptionConfig, DataConfig, Grid, ImageSize, SourceConfig
from mpp.corruption import Corruption
from mpp.data import crops
from mpp.data.dataset import ImageDataset
from mpp.data.workers import note_reading
from mpp.errors import Undecodable, UnreadableImage
from mpp.runtime.randomness import FIXED_VIEW, Stream, random_words

MAX_REPLACEMENTS = 64  # undecodable images in a row, which do not occur unless half of all images are undecodable


class Batch(NamedTuple):
    """Images of one forward pass of one process, as a loader returns them."""

    images: Tensor  # (B, C, H, W) uint8, or float32 from 0 to 255: the network's input and the source of the targets
    corruption: Corruption | None  # (B, K); None where nothing is masked
    labels: Tensor  # (B,) int64, -1: none; (B, L) where several are right
    indices: Tensor  # (B,) int64: indices of the images in their split
    unreadable: list[str]  # images that could not be decoded and were replaced: name and reason
    cursor: Tensor | None = None  # of a stream: which worker read this, and how far it has come; see mpp/data/stream.py

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Tensor, Any]]:
        """Pickle, as a loader process sends the batch: the images in shared memory, all others within the message.

        Each tensor that is sent costs a file in shared memory, and a connection that passes its descriptor.
        """
        return from_arrays, (self.images, tree_map_only(Tensor, Tensor.numpy, tuple(self[1:])))


def from_arrays(images: Tensor, others: tuple[Any, ...]) -> Batch:
    """The batch of a pickle: see `Batch.__reduce__`."""
    return Batch(images, *tree_map_only(np.ndarray, torch.from_numpy, others))


@dataclass(frozen=True)
class ViewDataset(Dataset):
    """Samples by (epoch, index): crop, corruption, label. The epoch FIXED_VIEW is the fixed view: a centre crop.

    `data` is a DataConfig, or a SourceConfig with an `eval_crop` where only the fixed view is asked for.
    """

    dataset: ImageDataset
    data: DataConfig | SourceConfig
    img_size: int | ImageSize
    seed: int = 0
    corruption: CorruptionConfig | None = None
    grid: Grid = (0, 0)
    randaugment: int = 0

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        """A sample: a Batch whose tensors lack the leading B."""
        epoch, index = key
        shown_index, pixels, unreadable = self.readable(epoch, index)
        crop = self.view(pixels, epoch, index)
        drawn = None
        if self.corruption is not None:
            drawn = corruption.draw(self.corruption, self.grid, self.seed_of(epoch), epoch, index)
        labels = self.dataset.labels
        label = np.array(-1 if labels is None else labels[shown_index])
        label, number = map(torch.from_numpy, (label, np.array(shown_index)))  # in a third of torch.tensor's time
        note_reading(None)
        return Batch(crop, drawn, label, number, unreadable)

    def seed_of(self, epoch: int) -> int:
        """Seed of an epoch's samples: that of fixed views is the same for runs of other seeds."""
        return self.data.cut_seed if epoch == FIXED_VIEW else self.seed

    def view(self, pixels: Tensor, epoch: int, index: int) -> Tensor:
        """The crop of an image (C, H, W), perhaps augmented: (C, h, w), h x w being `img_size`."""
        if epoch == FIXED_VIEW:
            return crops.centre_crop(pixels, self.img_size, self.data.eval_crop)
        crop = crops.random_crop(pixels, self.img_size, self.data, self.seed, epoch, index)
        return crops.augment(crop, self.randaugment, self.seed, epoch, index)

    @property
    def costly(self) -> bool:
        """Whether a view takes much longer than its crop."""
        return self.randaugment > 0

    def readable(self, epoch: int, index: int) -> tuple[int, Tensor, list[str]]:
        """The image at `index` or, where it cannot be decoded, another in its place: (its index, pixels, failures).

        Raises:
            ReadFailed: it cannot be read.
            Undecodable: neither it nor MAX_REPLACEMENTS others can be decoded.
        """
        failures: list[str] = []
        candidate = index
        while len(failures) <= MAX_REPLACEMENTS:
            note_reading(candidate)
            try:
                pixels = self.dataset.decode(candidate, self.data)
                return candidate, pixels, failures
            except UnreadableImage as error:
                failures.append(f"{self.dataset.image_name(candidate)}: {error}")
                words = random_words(Stream.REPLACEMENT, self.seed_of(epoch), epoch, index, len(failures))
                candidate = self.dataset.replacement(int(words[-1]))
        message = f"{len(failures)} images in a row cannot be decoded, such as {failures[0]}"
        raise Undecodable(f"{message} (a small split has them more than once)", failures[0])


def collate(samples: list[Batch]) -> Batch:
    """Samples to a batch."""
    images, corruptions, labels, indices, unreadable, _ = zip(*samples, strict=True)
    return Batch(
        torch.stack(images),
        None if corruptions[0] is None else corruption.stack(corruptions),
        torch.stack(labels),
        torch.stack(indices),
        list(chain.from_iterable(unreadable)),
    )
