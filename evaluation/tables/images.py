"""All images of a dataset, batch by batch, with the reason where one cannot be decoded."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evaluation.config import ProbeDataConfig
from evaluation.frozen.features import DEFAULT_BATCH_SIZE
from evaluation.frozen.run_images import LoadedSplits
from mpp.config import HOW_READ, SourceConfig
from mpp.data.columns import find_image_column
from mpp.data.crops import centre_crop
from mpp.data.data_path import describe_source, is_local
from mpp.data.dataset import ImageDataset, images_only
from mpp.data.identity import identify_images
from mpp.data.sources import label_images, load_splits
from mpp.data.workers import WatchedLoader, loader_processes, note_reading
from mpp.errors import UnreadableImage, UserError
from mpp.runtime.messages import counted, printable, tell, warn

MAX_UNREADABLE_NAMED = 20


class ImageBatch(NamedTuple):
    """Some images of a split."""

    indices: list[int]
    pixels: Any
    """The collated views of the batch."""
    errors: list[str | None]
    """Why an image cannot be decoded; None: it can."""


ONLY_SPLIT = "all"
"""Name of the only split of a dataset that has none of its own: no image is trained on here."""


def load_all_splits(data: ProbeDataConfig, loaded: LoadedSplits | None) -> LoadedSplits:
    """Load the rows of every split that has any, and print their numbers. The only split, `train`, is `all` here."""
    splits = {name: rows for name, rows in (loaded or load_splits(data)).items() if len(rows)}
    if [*splits] == [SourceConfig.split]:
        splits = {ONLY_SPLIT: splits[SourceConfig.split]}
    counts = [
        counted(len(rows), "image") if name == ONLY_SPLIT else f"{len(rows)} {name}" for name, rows in splits.items()
    ]
    tell(f"{describe_source(data)}: {', '.join(counts)}")
    return splits


def images_of_splits(
    data: ProbeDataConfig, splits: LoadedSplits, with_labels: bool = False, label_kind: str = "class"
) -> list[ImageDataset]:
    """The images of each split.

    Args:
        with_labels: where they have some.
        label_kind: kind of these. Labels of another kind than one class do without: a warning says so.
    """
    columns = {name: find_image_column(data, rows.features) for name, rows in splits.items()}
    if with_labels:
        first_column = columns[next(iter(splits))]
        try:
            return label_images(data, splits, first_column, label_kind)
        except UserError as error:
            if label_kind == "class":
                raise
            warn(f"no scores are computed: {error}")
    images = []
    for name, rows in splits.items():
        images.append(ImageDataset(images_only(rows, columns[name]), columns[name], None, name))
    return images


@dataclass(frozen=True)
class ViewsOrErrors(Dataset):
    """Images by index as `view` makes them, and the reason why one cannot be decoded (None: it can)."""

    dataset: ImageDataset
    data: ProbeDataConfig
    view: Callable[[Tensor], Any]
    """Converts an image (C, H, W) from 0 to 255 to its entry in a batch. May raise UnreadableImage."""
    placeholder: Any
    """Entry in a batch of an image that cannot be decoded."""

    def __getitem__(self, index: int) -> tuple[Any, str | None]:
        note_reading(index)
        try:
            return self.view(self.dataset.decode(index, self.data)), None
        except UnreadableImage as reason:
            return self.placeholder, str(reason)
        finally:
            note_reading(None)


def read_batches(
    views: ViewsOrErrors,
    indices: range,
    collate: Callable[[list[tuple[Any, str | None]]], tuple[Any, list[str | None]]],
    batch_size: int | None = None,
) -> Iterator[ImageBatch]:
    """The images at these indices, in their order.

    Args:
        batch_size: None: `data.batch_size`.
    """
    batch_size = batch_size or views.data.batch_size or DEFAULT_BATCH_SIZE
    batches = [list(indices[first : first + batch_size]) for first in range(0, len(indices), batch_size)]
    loader = WatchedLoader(
        views,
        views.dataset.image_name,
        batch_sampler=batches,
        num_workers=loader_processes(views.data),
        collate_fn=collate,
    )
    for batch, (pixels, errors) in zip(batches, loader, strict=True):
        yield ImageBatch(batch, pixels, errors)


def read_crops(
    images: ImageDataset, data: ProbeDataConfig, size: tuple[int, int], indices: range
) -> Iterator[ImageBatch]:
    """Centre crops of the images at these indices, in their order; zeros for one that cannot be decoded.

    Args:
        size: height and width.
    """
    crop = partial(centre_crop, size=size, share=data.eval_crop)
    placeholder = torch.zeros(data.channels, *size, dtype=torch.uint8)
    return read_batches(ViewsOrErrors(images, data, crop, placeholder), indices, stack_crops)


def stack_crops(samples: list[tuple[Tensor, str | None]]) -> tuple[Tensor, list[str | None]]:
    """Crops of one size to a batch; a placeholder may be of another type."""
    crops, errors = zip(*samples, strict=True)
    all_bytes = all(crop.dtype == torch.uint8 for crop in crops)
    dtype = torch.uint8 if all_bytes else torch.float32
    return torch.stack([crop.to(dtype) for crop in crops]), list(errors)


def folder_of(data: ProbeDataConfig) -> Path | None:
    """The folder of the images on this machine; None: they are elsewhere, or the package's birds.

    Of a file, the one that it is in.
    """
    if not is_local(data.path):
        return None
    path = Path(data.path).expanduser()
    if path.is_file():
        path = path.parent
    return Path(os.path.abspath(path))


def path_in_folder(path: str, folder: Path | None) -> Path | None:
    """The path of a file from a folder on (see `folder_of`), whatever `..` is in it; None: it is elsewhere.

    A relative path is a name in a shard, wherever the command is run.
    """
    if not os.path.isabs(path):
        return None
    file = Path(os.path.abspath(path))
    return file.relative_to(folder) if folder is not None and file.is_relative_to(folder) else None


def name_in_folder(images: ImageDataset, index: int, folder: Path | None) -> str:
    """The image's file from its folder on, as a list of images names it; of other images the name in messages."""
    name = images.image_name(index)
    return printable(str(path_in_folder(name, folder) or name))


def first_columns(images: ImageDataset, indices: range, folder: Path | None) -> dict[str, pa.Array]:
    """The columns that every table has: file and split.

    Args:
        folder: of the images: see `name_in_folder`.
    """
    return {
        "file": pa.array([name_in_folder(images, index, folder) for index in indices], pa.string()),
        "split": pa.array([images.split] * len(indices), pa.string()),
    }


def identify_splits(data: ProbeDataConfig, splits: Sequence[ImageDataset], with_labels: bool = False) -> dict[str, Any]:
    """The settings and the images that a table of these splits depends on.

    Args:
        labels: whether the labels are in the table.
    """
    identity = {name: getattr(data, name) for name in (*HOW_READ, "max_pixels", "eval_crop")}
    identity["images"] = [identify_images(images, with_labels, retries=data.read_retries) for images in splits]
    if with_labels and splits[0].class_names:  # whose numbers stay where a name is corrected
        identity["label_names"] = splits[0].class_names
    return identity
