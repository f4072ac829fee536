"""Decoded images kept in memory, where all of them fit: each is decoded once a run, not once an epoch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpp.config import DataConfig
from mpp.data.dataset import DecodedImages, ImageDataset
from mpp.data.views import ViewDataset
from mpp.data.workers import WORKERS_ARE_FORKS, WatchedLoader, loader_processes, note_reading
from mpp.errors import UnreadableImage

IMAGES_PER_BATCH = 64  # that a loader process hands over at a time, at most
BYTES_PER_BATCH = 4 * 2**20  # in shared memory, unless a single image takes more
MAX_THREADS_WITHOUT_WORKERS = 2  # crops of decoded images take a tenth of a step then; loader processes take more


@dataclass(frozen=True)
class WholeImages(Dataset):
    """Whole images by index, flat: pixels (H * W * C,), and C, H, W; nothing, C, 0, 0 where one cannot be decoded."""

    dataset: ImageDataset
    data: DataConfig
    marks_nodata: bool = False

    def __getitem__(self, index: int) -> tuple[Tensor, torch.Size]:
        note_reading(index)
        try:
            pixels = self.dataset.decode(index, self.data, self.marks_nodata)
        except UnreadableImage:
            pixels = torch.empty(self.data.channels, 0, 0)  # it is reported when a batch needs it
        note_reading(None)
        return pixels.permute(1, 2, 0).flatten(), pixels.shape


@dataclass
class BatchesBySize:
    """Batches of indices for about BYTES_PER_BATCH each, by the mean size of the images so far; of one image at first.

    A sampler for torch's loader, which asks for the next batch when an earlier one has come.
    """

    count: int
    """Images of the dataset."""
    shapes: list[torch.Size] = field(default_factory=list)
    """Of the images that have come, which the caller appends to."""
    size: int = 0
    """Bytes of these."""

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        while first < self.count:
            fitting = BYTES_PER_BATCH * len(self.shapes) // max(1, self.size)
            end = min(self.count, first + min(IMAGES_PER_BATCH, max(1, fitting)))
            yield list(range(first, end))
            first = end


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
    views = replace(views, dataset=cache_decoded(views.dataset, data, views.marks_nodata))
    few_threads = device.type == "cpu" and torch.get_num_threads() <= MAX_THREADS_WITHOUT_WORKERS
    if not views.dataset.decoded or not few_threads or views.costly:
        return views
    return replace(views, data=replace(data, workers=0))


def cache_decoded(dataset: ImageDataset, data: DataConfig, marks_nodata: bool = False) -> ImageDataset:
    """The same images, decoded and kept in memory, if they take at most `data.cache_gb`; else unchanged.

    Images of different types, such as of 8 bits and more, stay unchanged, too: crops of 8 bits are rounded.
    """
    limit = int(data.cache_gb * 1e9)  # bytes
    if limit == 0:
        return dataset
    batches = BatchesBySize(len(dataset))
    sample_size = min(IMAGES_PER_BATCH, len(dataset))  # tells how much memory all will take
    parts: list[Tensor] = []
    loader = WatchedLoader(
        WholeImages(dataset, data, marks_nodata),
        dataset.image_name,
        batch_sampler=batches,
        num_workers=loader_processes(data),
        collate_fn=join_by_type,
        pin_memory=False,
    )
    for pixels, batch_shapes in loader:
        parts += [part.clone() for part in pixels]  # the memory of a loader process keeps a file open
        batches.shapes += batch_shapes
        batches.size += sum(part.nbytes for part in pixels)
        expected = batches.size
        if len(batches.shapes) >= sample_size:
            expected = batches.size * len(dataset) / len(batches.shapes)
        if batches.size > limit or expected > 2 * limit:
            return dataset
        if len({part.dtype for part in parts}) > 1:
            return dataset
    sizes = np.array(batches.shapes)
    pixels = torch.cat(parts) if parts else torch.empty(0)
    return replace(dataset, decoded=DecodedImages(pixels, sizes.prod(1).cumsum(), sizes, marks_nodata))


def join_by_type(samples: list[tuple[Tensor, torch.Size]]) -> tuple[list[Tensor], list[torch.Size]]:
    """Whole images joined to one tensor for each type that occurs, and their shapes."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for pixels, _ in samples:
        if len(pixels):
            by_type.setdefault(pixels.dtype, []).append(pixels)
    return [torch.cat(parts) for parts in by_type.values()], [shape for _, shape in samples]
