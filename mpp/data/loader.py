"""Loaders: how the images of a step are shared out among processes, and the batches that each of them loads.

Where all decoded images fit into memory, each is decoded once a run, not once an epoch: see `in_memory`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info

from mpp.config import DataConfig, require
from mpp.data.dataset import ImageDataset
from mpp.data.views import Batch, ViewDataset, collate
from mpp.data.workers import WORKERS_ARE_FORKS, WatchedLoader, loader_processes, note_reading
from mpp.errors import ReadFailed, UnreadableImage
from mpp.runtime.processes import raise_together
from mpp.runtime.randomness import FIXED_VIEW, Stream, permutation

CHUNK_BYTES = 4_000_000  # of decoded images, after which a loader process hands them over
TELLING_IMAGES = 64  # whose mean size tells how much memory all will take
MAX_THREADS_WITHOUT_WORKERS = 2  # crops of decoded images take a tenth of a step then; loader processes take more


@dataclass(frozen=True)
class BatchLayout:
    """Shares of the images of a step: one for each process in each forward pass.

    The shares differ by at most one image.
    """

    global_batch_size: int  # images per step
    accumulation_steps: int  # forward passes per step
    world_size: int  # processes
    rank: int  # this process

    @classmethod
    def of(cls, global_batch: int, limit: int | None, world_size: int, rank: int) -> "BatchLayout":
        """The layout with the fewest forward passes.

        Args:
            limit: largest number of images per process and forward pass; None: no limit, so one pass.
        Raises:
            UserError: a process would be left without an image.
        """
        least = f"at least {world_size}, an image for each process"
        require(global_batch >= world_size, "optim.global_batch_size", global_batch, least)
        largest_pass = world_size * (limit or global_batch)
        passes = -(-global_batch // largest_pass)
        least = f"larger, for {world_size} processes to share {global_batch} images"
        require(global_batch >= world_size * passes, "data.batch_size", limit, least)
        return cls(global_batch, passes, world_size, rank)

    @property
    def share_count(self) -> int:
        """Number of shares of a step: one for each process in each forward pass."""
        return self.accumulation_steps * self.world_size

    @property
    def largest_share(self) -> int:
        """Images of the largest share."""
        return -(-self.global_batch_size // self.share_count)

    @property
    def smallest_share(self) -> int:
        """Images of the smallest share."""
        return self.global_batch_size // self.share_count

    def require_several(self, reason: str) -> None:
        """Raise UserError where a process has a single image in a forward pass; `reason` ends the message."""
        allowed = f"at least 2 (data.batch_size, optim.global_batch_size){reason}"
        require(self.smallest_share > 1, "the number of images in a forward pass", self.smallest_share, allowed)

    def share(self, forward: int) -> range:
        """The step's images, counted from 0, that this process sees in a forward pass."""
        share = forward * self.world_size + self.rank
        first = share * self.global_batch_size // self.share_count
        end = (share + 1) * self.global_batch_size // self.share_count
        return range(first, end)

    def loss_divisor(self, forward: int) -> float:
        """Divisor of the mean loss of that share.

        The losses so divided, summed over the forward passes and averaged over the processes, are the mean over the
        images of the step.
        """
        return self.global_batch_size / (self.world_size * len(self.share(forward)))


@dataclass(frozen=True)
class TrainingBatchSampler(Sampler[list[tuple[int, int]]]):
    """This process's batches of (epoch, index) from step `start` up to, not including, `stop`.

    The order depends only on seed and step.
    """

    size: int  # images of the dataset
    seed: int
    layout: BatchLayout
    start: int
    stop: int

    def __len__(self) -> int:
        return (self.stop - self.start) * self.layout.accumulation_steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order_epoch, order = None, None  # images of an epoch in its order
        for step in range(self.start, self.stop):
            for forward in range(self.layout.accumulation_steps):
                batch = []
                for image_in_step in self.layout.share(forward):
                    epoch, position = divmod(step * self.layout.global_batch_size + image_in_step, self.size)
                    if epoch != order_epoch:
                        order_epoch, order = epoch, permutation(Stream.ORDER, self.seed, epoch, self.size)
                    batch.append((epoch, int(order[position])))
                yield batch


def training_loader(views: ViewDataset, layout: BatchLayout, start: int, stop: int) -> WatchedLoader:
    """Batches of this process, from step `start` up to, not including, `stop`."""
    sampler = TrainingBatchSampler(len(views.dataset), views.seed, layout, start, stop)
    return view_loader(views, sampler)


def fixed_view_batches(views: ViewDataset, batch_size: int, world_size: int = 1, rank: int = 0) -> WatchedLoader:
    """This process's share of the images, each as its fixed view, to be loaded once."""
    keys = [(FIXED_VIEW, index) for index in range(rank, len(views.dataset), world_size)]
    return view_loader(views, BatchSampler(keys, batch_size, drop_last=False))


def view_loader(views: ViewDataset, batch_sampler: Sampler) -> WatchedLoader:
    """Load batches of (epoch, index)."""
    return WatchedLoader(
        views,
        views.dataset.image_name,
        batch_sampler=batch_sampler,
        num_workers=loader_processes(views.data),
        collate_fn=collate,
    )


class FixedViewSets(Dataset):
    """Several sets of images, each image as its fixed view, by (set, index). One of the sets is loaded at a time."""

    def __init__(self):
        self.views: list[ViewDataset] = []
        self.current: ViewDataset | None = None
        """The set that is loaded, or was last: an error that ended its loading still names its images."""

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        set_index, index = key
        return self.views[set_index][FIXED_VIEW, index]

    def image_name(self, index: int) -> str:
        """Name of an image of the current set, for messages."""
        return self.current.dataset.image_name(index)


@dataclass
class FixedViewLoader:
    """Loads sets of images, held-out or training, in fixed views: this process's share of one set at a time.

    Workers are forked once, before any threads start, because forking a process that has threads may hang. So add all
    sets before the first batch.
    """

    batch_size: int
    workers: int
    world_size: int
    rank: int

    def __post_init__(self):
        self.sets = FixedViewSets()
        self.keys: list[list[tuple[int, int]]] = []
        """The batch_sampler of torch's loader. It is read when an iteration begins, so its content is replaced for
        each set; empty while no set is loaded."""

    def add(self, views: ViewDataset) -> ViewDataset:
        """Register a set, so that it can be loaded."""
        self.sets.views.append(views)
        return views

    @cached_property
    def loader(self) -> WatchedLoader:
        return WatchedLoader(
            self.sets,
            self.sets.image_name,
            batch_sampler=self.keys,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            collate_fn=collate,
        )

    def start(self) -> None:
        """Start the loader processes, which have nothing to load yet."""
        if self.workers and self.sets.views:
            list(self.loader)  # iterating over no batches forks the workers

    def batches(self, views: ViewDataset) -> Iterator[Batch]:
        """This process's share of a set that was added.

        Raises:
            ReadFailed: on every process when it has read its share, if any of them cannot read an image.
        """
        failure = None
        set_index = self.sets.views.index(views)
        keys = [(set_index, index) for index in range(self.rank, len(views.dataset), self.world_size)]
        self.sets.current = views
        self.keys[:] = BatchSampler(keys, self.batch_size, drop_last=False)
        try:
            yield from self.loader
        except ReadFailed as error:
            failure = error
        finally:
            self.keys.clear()
        raise_together(failure)


@dataclass(frozen=True)
class WholeImages(IterableDataset):
    """Chunks of whole images, each with its index; those that cannot be decoded are left out.

    A loader process reads every n-th image.
    """

    dataset: ImageDataset
    data: DataConfig

    def __iter__(self) -> Iterator[list[tuple[int, NDArray]]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        chunk, size = [], 0
        for index in range(first, len(self.dataset), step):
            note_reading(index)
            try:
                pixels = self.dataset.decode(index, self.data)
            except UnreadableImage:
                continue  # it is reported when a batch needs it
            # (H, W, C) is cropped in half the time of (C, H, W); arrays come through a pipe, tensors each as a file
            chunk.append((index, pixels.permute(1, 2, 0).contiguous().numpy()))
            size += pixels.nbytes
            if size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        note_reading(None)
        yield chunk


def in_memory(views: ViewDataset, images_left: int, device: torch.device) -> ViewDataset:
    """The views of the images that a run trains on: of decoded images, where they fit and recur.

    Args:
        images_left: images that this process still trains on, each as often as it is seen.
        device: that it trains on.
    """
    data = views.data
    workers_inherit_memory = data.workers == 0 or WORKERS_ARE_FORKS
    if images_left < 2 * len(views.dataset) or not workers_inherit_memory:
        return views
    views = replace(views, dataset=cache_decoded(views.dataset, data))
    few_threads = device.type == "cpu" and torch.get_num_threads() <= MAX_THREADS_WITHOUT_WORKERS
    if not views.dataset.decoded or not few_threads or views.costly:
        return views
    return replace(views, data=replace(data, workers=0))


def cache_decoded(dataset: ImageDataset, data: DataConfig) -> ImageDataset:
    """The same images, decoded and kept in memory, if they take at most `data.cache_gb`; else unchanged."""
    limit = int(data.cache_gb * 1e9)  # bytes
    if limit == 0:
        return dataset
    images: list[Tensor | None] = [None] * len(dataset)
    seen, size = 0, 0
    loader = WatchedLoader(
        WholeImages(dataset, data),
        dataset.image_name,
        batch_size=None,
        num_workers=loader_processes(data),
        collate_fn=list,
        pin_memory=False,
    )
    for chunk in loader:
        for index, pixels in chunk:
            images[index] = torch.from_numpy(pixels).permute(2, 0, 1)
            seen += 1
            size += pixels.nbytes
        expected = size * len(dataset) / seen if seen >= TELLING_IMAGES else size
        if size > limit or expected > 2 * limit:
            return dataset
    return replace(dataset, decoded=images)
