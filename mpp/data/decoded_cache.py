"""Decoded images kept in memory, where all of them fit: each is decoded once a run, not once an epoch."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpp.config import DataConfig
from mpp.data.dataset import DecodedImages, ImageDataset
from mpp.data.workers import WatchedLoader, loader_processes, note_reading
from mpp.errors import UnreadableImage

IMAGES_PER_BATCH = 64  # that a loader process hands over at a time


@dataclass(frozen=True)
class WholeImages(Dataset):
    """Whole images by index, flat: pixels (H * W * C,), and C, H, W; nothing, C, 0, 0 where one cannot be decoded."""

    dataset: ImageDataset
    data: DataConfig

    def __getitem__(self, index: int) -> tuple[Tensor, torch.Size]:
        note_reading(index)
        try:
            pixels = self.dataset.decode(index, self.data)
        except UnreadableImage:
            pixels = torch.empty(self.data.channels, 0, 0)  # it is reported when a batch needs it
        note_reading(None)
        return pixels.permute(1, 2, 0).flatten(), pixels.shape


def cache_decoded(dataset: ImageDataset, data: DataConfig) -> ImageDataset:
    """The same images, decoded and kept in memory, if they take at most `data.cache_gb`; else unchanged.

    Images of different types, such as of 8 bits and more, stay unchanged, too: crops of 8 bits are rounded.
    """
    limit = int(data.cache_gb * 1e9)  # bytes
    if limit == 0:
        return dataset
    batches = [batch.tolist() for batch in torch.arange(len(dataset)).split(IMAGES_PER_BATCH)]
    parts: list[Tensor] = []
    shapes: list[torch.Size] = []
    size = 0  # bytes
    loader = WatchedLoader(
        WholeImages(dataset, data),
        dataset.image_name,
        batch_sampler=batches,
        num_workers=loader_processes(data),
        collate_fn=join_by_type,
        pin_memory=False,
    )
    for pixels, batch_shapes in loader:
        parts += [part.clone() for part in pixels]  # the memory of a loader process keeps a file open
        shapes += batch_shapes
        size += sum(part.nbytes for part in pixels)
        expected = size * len(dataset) / len(shapes)
        if size > limit or expected > 2 * limit:
            return dataset
        if len({part.dtype for part in parts}) > 1:
            return dataset
    sizes = np.array(shapes)
    pixels = torch.cat(parts) if parts else torch.empty(0)
    return replace(dataset, decoded=DecodedImages(pixels, sizes.prod(1).cumsum(), sizes))


def join_by_type(samples: list[tuple[Tensor, torch.Size]]) -> tuple[list[Tensor], list[torch.Size]]:
    """Whole images joined to one tensor for each type that occurs, and their shapes."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for pixels, _ in samples:
        if len(pixels):
            by_type.setdefault(pixels.dtype, []).append(pixels)
    return [torch.cat(parts) for parts in by_type.values()], [shape for _, shape in samples]
