"""Images in, batches out: decoded crops and their corruption, as uint8 and integers.

Training is one endless sequence of positions. Position p is image p % n of epoch p // n in that epoch's order, so the
step alone says which images come next; there is no partial batch and no padding. What a sample looks like is a pure
function of (seed, epoch, index): see mpp/runtime/randomness.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from mpp import corruption
from mpp.config import CorruptionConfig, DataConfig, SourceConfig
from mpp.corruption import Corruption, Grid
from mpp.data import crops
from mpp.data.dataset import Decoded, ImageDataset
from mpp.data.workers import NOTHING, WatchedLoader, note_reading
from mpp.errors import Undecodable, UnreadableImage, UserError
from mpp.runtime.randomness import FIXED, Stream, permutation, random_words

REPLACEMENTS = 64  # so many undecodable images in a row do not happen where fewer than half are


class Batch(NamedTuple):
    """What a loader hands over: one forward pass of one process."""

    images: Tensor  # (B, C, H, W) uint8, or float32 from 0 to 255: the network's input and the source of the targets
    corruption: Corruption | None  # (B, K); None where the images are only looked at
    labels: Tensor  # (B,) int64, -1: none; (B, L) where several are right
    indices: Tensor  # (B,) int64: which images of the split
    unreadable: list[str]  # images that could not be decoded and were replaced: name and reason
    cursor: Tensor | None = None  # of a stream: which worker read this, and how far it has come; see mpp/data/stream.py


@dataclass(frozen=True)
class ViewDataset(Dataset):
    """Samples by (epoch, index): crop, corruption, label. Epoch FIXED is the held-out view: a centre crop.

    `data` is a DataConfig, or a SourceConfig with an `eval_crop` where only the held-out view is asked for.
    """

    dataset: ImageDataset
    data: DataConfig | SourceConfig
    img_size: crops.Size
    seed: int = 0
    corruption: CorruptionConfig | None = None
    grid: Grid = (0, 0)
    randaugment: int = 0

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        """A sample: a Batch whose tensors lack the leading B."""
        epoch, index = key
        shown, pixels, unreadable = self.readable(epoch, index)
        crop = self.view(pixels, epoch, index)
        seed = self.data.cut_seed if epoch == FIXED else self.seed  # runs of other seeds are judged on the same
        drawn = self.corruption and corruption.draw(self.corruption, self.grid, seed, epoch, index)
        labels = self.dataset.labels
        label = torch.tensor(-1 if labels is None else labels[shown])
        note_reading(NOTHING)
        return Batch(crop, drawn, label, torch.tensor(shown), unreadable)

    def view(self, pixels: Tensor, epoch: int, index: int) -> Tensor:
        """What of an image (C, H, W) is shown: (C, H, W), H x W being `img_size`."""
        if epoch == FIXED:
            return crops.centre_crop(pixels, self.img_size, self.data.eval_crop)
        crop = crops.random_crop(pixels, self.img_size, self.data, self.seed, epoch, index)
        return crops.augment(crop, self.randaugment, self.seed, epoch, index)

    @property
    def costly(self) -> bool:
        """Whether a view takes much more than its crop."""
        return self.randaugment > 0

    def readable(self, epoch: int, index: int) -> tuple[int, Tensor, list[str]]:
        """The image at `index` or, where it cannot be decoded, another in its place: (its index, pixels, failures).

        Raises:
            ReadFailed: it cannot be read.
            Undecodable: nor can any of so many others be decoded.
        """
        failures: list[str] = []
        candidate = index
        while len(failures) <= REPLACEMENTS:
            note_reading(candidate)
            try:
                pixels = self.dataset.decode(candidate, self.data)
                return candidate, pixels, failures
            except UnreadableImage as error:
                failures.append(f"{self.dataset.name(candidate)}: {error}")
                seed = self.data.cut_seed if epoch == FIXED else self.seed
                others = random_words(Stream.REPLACEMENT, seed, epoch, index, len(failures))
                candidate = self.dataset.other(int(others[-1]))
        said = f"{len(failures)} images in a row cannot be decoded, such as {failures[0]}"
        raise Undecodable(f"{said} (a small split has them more than once)", failures[0])


def collate(samples: list[Batch]) -> Batch:
    """Samples to a batch."""
    crops, drawn, labels, indices, unreadable, _ = zip(*samples, strict=True)
    return Batch(
        torch.stack(crops),
        None if drawn[0] is None else Corruption(*map(torch.stack, zip(*drawn, strict=True))),
        torch.stack(labels),
        torch.stack(indices),
        [failure for failures in unreadable for failure in failures],
    )


@dataclass(frozen=True)
class BatchLayout:
    """How an update's images are dealt out: a share to each process in each forward pass, alike but for one image."""

    images: int  # per update: the global batch
    accumulation_steps: int  # forward passes per update
    world_size: int  # processes
    rank: int  # this process

    @classmethod
    def of(cls, global_batch: int, batch_size: int | None, world_size: int, rank: int) -> "BatchLayout":
        """The layout with the fewest forward passes.

        Args:
            batch_size: at most so many images per process and forward pass; None: any number, so one pass.
        Raises:
            UserError: a process would be left without an image.
        """
        if global_batch < world_size:
            least = f"at least {world_size}, an image for each process"
            raise UserError(f"optim.global_batch_size is {global_batch}; it must be {least}")
        passes = -(-global_batch // (world_size * (batch_size or global_batch)))
        if global_batch < world_size * passes:
            below = global_batch // world_size * world_size
            raise UserError(
                f"data.batch_size is {batch_size}, by which {world_size} processes cannot share {global_batch} images; "
                f"it must be at least {batch_size + 1}, or optim.global_batch_size {below} or {below + world_size}"
            )
        return cls(global_batch, passes, world_size, rank)

    @property
    def batch_size(self) -> int:
        """Images of the largest share."""
        return -(-self.images // (self.accumulation_steps * self.world_size))

    @property
    def smallest(self) -> int:
        """Images of the smallest share."""
        return self.images // (self.accumulation_steps * self.world_size)

    def share(self, forward: int) -> range:
        """Which of the update's images this process sees in that forward pass."""
        number, shares = forward * self.world_size + self.rank, self.accumulation_steps * self.world_size
        return range(number * self.images // shares, (number + 1) * self.images // shares)

    def parts(self, forward: int) -> float:
        """What the mean loss of that share is divided by.

        Summed over the forward passes, and averaged over the processes, it is the mean over the update's images then.
        """
        return self.images / (self.world_size * len(self.share(forward)))


class TrainingBatchSampler(Sampler[list[tuple[int, int]]]):
    """This process's batches of (epoch, index) from update `start` to `stop`: the sampler's state is the step."""

    def __init__(self, size: int, seed: int, layout: BatchLayout, start: int, stop: int):
        self.size, self.seed, self.layout, self.start, self.stop = size, seed, layout, start, stop

    def __len__(self) -> int:
        return (self.stop - self.start) * self.layout.accumulation_steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = lru_cache(maxsize=2)(lambda epoch: permutation(Stream.ORDER, self.seed, epoch, self.size))
        for update in range(self.start, self.stop):
            for forward in range(self.layout.accumulation_steps):
                positions = (update * self.layout.images + number for number in self.layout.share(forward))
                keys = [divmod(position, self.size) for position in positions]
                yield [(epoch, int(order(epoch)[position])) for epoch, position in keys]


@dataclass(frozen=True)
class Whole(Dataset):
    """Whole images by index, flat: pixels (H * W * C,), and C, H, W; nothing, C, 0, 0 where one cannot be decoded."""

    dataset: ImageDataset
    data: DataConfig

    def __getitem__(self, index: int) -> tuple[Tensor, torch.Size]:
        note_reading(index)
        try:
            pixels = self.dataset.decode(index, self.data)
        except UnreadableImage:
            pixels = torch.empty(self.data.channels, 0, 0)  # it is named when its turn comes
        note_reading(NOTHING)
        return pixels.permute(1, 2, 0).flatten(), pixels.shape


def cache_decoded(dataset: ImageDataset, data: DataConfig) -> ImageDataset:
    """The same images, decoded and kept in memory, if they take at most `data.cache_gb`; else as they are."""
    most = int(data.cache_gb * 1e9)
    if most == 0:
        return dataset
    keys = [batch.tolist() for batch in torch.arange(len(dataset)).split(64)]
    parts: list[Tensor] = []
    shapes: list[torch.Size] = []
    taken = 0
    for pixels, of_these in loader(Whole(dataset, data), keys, flatten, pin_memory=False):
        parts += [part.clone() for part in pixels]  # what a loader process hands over keeps a file open
        shapes += of_these
        taken += sum(part.nbytes for part in pixels)
        too_much = taken > most or taken * len(dataset) > 2 * most * len(shapes)  # it is, or by all appearance will be
        if too_much or len({part.dtype for part in parts}) > 1:  # some have 8 bits: their crops are rounded
            return dataset
    sizes = np.array(shapes)
    pixels = torch.cat(parts) if parts else torch.empty(0)
    return replace(dataset, decoded=Decoded(pixels, sizes.prod(1).cumsum(), sizes))


def flatten(samples: list[tuple[Tensor, torch.Size]]) -> tuple[list[Tensor], tuple[torch.Size, ...]]:
    """Whole images to one piece of memory for each type that they have."""
    pixels, shapes = zip(*samples, strict=True)
    kinds = dict.fromkeys(part.dtype for part in pixels if len(part))
    return [torch.cat([part for part in pixels if part.dtype == kind]) for kind in kinds], shapes


def training_loader(views: ViewDataset, layout: BatchLayout, start: int, stop: int) -> WatchedLoader:
    """Batches of this process, from update `start` to `stop`."""
    return loader(views, TrainingBatchSampler(len(views.dataset), views.seed, layout, start, stop))


def held_out_loader(views: ViewDataset, batch_size: int, world_size: int = 1, rank: int = 0) -> WatchedLoader:
    """This process's share of the held-out images, in their fixed view; the last batch may be smaller."""
    keys = [(FIXED, index) for index in range(rank, len(views.dataset), world_size)]
    return loader(views, [keys[i : i + batch_size] for i in range(0, len(keys), batch_size)])


@dataclass
class Several(Dataset):
    """Several sets of views as one, each in its held-out view: a key is the number of the set, and an index in it."""

    sets: list[ViewDataset]
    current: int = 0
    """Number of the set that is loaded."""

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        number, index = key
        return self.sets[number][FIXED, index]

    def name(self, index: int) -> str:
        """What a person finds an image of the set that is loaded by."""
        return self.sets[self.current].dataset.name(index)


class EvaluationLoader:
    """Loads sets of images in their held-out view, one set at a time, as often as each is wanted.

    Its loader processes stay until it is gone: each evaluation would fork several times, and forking a process that has
    threads may hang. They know the sets that were added before the first batch.

    Args:
        layout: which share of each set is this process's.
        workers: loader processes.
    """

    def __init__(self, layout: BatchLayout, workers: int):
        self.layout, self.workers = layout, workers
        self.several = Several([])
        self.wanted: list[list[tuple[int, int]]] = []  # keys, by batch

    def add(self, views: ViewDataset) -> ViewDataset:
        """Make this a set that is loaded."""
        self.several.sets.append(views)
        return views

    @cached_property
    def loader(self) -> WatchedLoader:
        options = dict(num_workers=self.workers, persistent_workers=self.workers > 0, collate_fn=collate)
        return WatchedLoader(self.several, self.several.name, batch_sampler=self.wanted, **options)

    def start(self) -> None:
        """Start the loader processes, which have nothing to load yet."""
        self.wanted[:] = []
        if self.workers and self.several.sets:
            list(self.loader)

    def batches(self, views: ViewDataset) -> Iterator[Batch]:
        """This process's share of a set that was added; the last batch may be smaller."""
        number, size = self.several.sets.index(views), self.layout.batch_size
        keys = [(number, index) for index in range(self.layout.rank, len(views.dataset), self.layout.world_size)]
        self.wanted[:] = [keys[i : i + size] for i in range(0, len(keys), size)]
        self.several.current = number
        yield from self.loader


def loader(
    dataset: ViewDataset | Whole, batches: Sampler | list, together: Callable = collate, **options: Any
) -> WatchedLoader:
    """torch's loader over batches of keys, each put together by `together`. `options` are DataLoader's."""
    return WatchedLoader(
        dataset,
        dataset.dataset.name,
        batch_sampler=batches,
        num_workers=dataset.data.workers,
        collate_fn=together,
        **options,
    )
