"""A table with a row for each image of a dataset, as CSV or parquet, written in parts: after a kill it is continued.

A table is known by its identity: the settings, weights and images that its rows depend on. FILE.json next to it has the
digest of this identity, and describes the content.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils.data import Dataset

import mpp
from evaluation.config import ProbeDataConfig
from evaluation.frozen.features import DEFAULT_BATCH_SIZE
from evaluation.frozen.run_images import LoadedSplits
from mpp.config import HOW_READ, ImageSize, SourceConfig, require
from mpp.data.columns import find_image_column
from mpp.data.crops import centre_crop
from mpp.data.data_path import describe_source, is_local
from mpp.data.dataset import ImageDataset, images_only
from mpp.data.identity import SAMPLED_FILES, identify_images
from mpp.data.sources import load_splits
from mpp.data.workers import WatchedLoader, deaths_explained, loader_processes, note_reading
from mpp.errors import UnreadableImage
from mpp.runtime.files import complete, delete, hold, short_digest, write_complete
from mpp.runtime.messages import counted, note, printable, progress_bar, shortened, tell, warn

MAX_UNREADABLE_NAMED = 20
ROWS_PER_PART = 512  # which an interruption loses at most
ONLY_SPLIT = "all"
"""Name of the only split of a dataset that has none of its own: no image is trained on here."""
Rows = pyarrow.dataset.Dataset
"""The rows of a whole table, in its order."""


def load_all_splits(data: ProbeDataConfig, loaded: LoadedSplits | None) -> LoadedSplits:
    """Load the rows of every split that has any, and print their numbers. The only split, `train`, is `all` here."""
    splits = {name: rows for name, rows in (loaded or load_splits(data)).items() if len(rows)}
    if [*splits] == [SourceConfig.split]:
        splits = {ONLY_SPLIT: splits[SourceConfig.split]}
    counts = [f"{name} {counted(len(rows), 'image')}" for name, rows in splits.items()]
    tell(f"{describe_source(data)}: {', '.join(counts)}")
    return splits


def unlabelled_images(data: ProbeDataConfig, splits: LoadedSplits) -> list[ImageDataset]:
    """The images of each split, without labels."""
    images = []
    for split, rows in splits.items():
        column = find_image_column(data, rows.features)
        images.append(ImageDataset(images_only(rows, column), column, None, split))
    return images


@dataclass(frozen=True)
class ViewsOrErrors(Dataset):
    """Images by index as `view` makes them, and the reason why one cannot be decoded (None: it can)."""

    images: ImageDataset
    data: ProbeDataConfig
    view: Callable[[Tensor], Tensor]
    """Converts an image (C, H, W) from 0 to 255 to its entry in a batch. May raise UnreadableImage."""
    placeholder: Tensor
    """Entry in a batch of an image that cannot be decoded."""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, str | None]:
        note_reading(index)
        try:
            return self.view(self.images.decode(index, self.data)), None
        except UnreadableImage as reason:
            return self.placeholder, str(reason)
        finally:
            note_reading(None)


@dataclass(frozen=True)
class ImageBatch:
    """Some images of a split."""

    images: ImageDataset
    pixels: Tensor
    """(B, C, H, W) from 0 to 255; zeros for an image that cannot be decoded."""
    errors: list[str | None]
    """Why an image cannot be decoded; None: it can."""

    def column(self, values: Sequence, kind: pa.DataType | None = None) -> pa.Array:
        """Values (B,) as a column; an image that cannot be decoded has none."""
        return pa.array(values, kind, mask=np.array([error is not None for error in self.errors]))

    def table(self, columns: dict[str, pa.Array], data: ProbeDataConfig, more: dict[str, pa.Array]) -> pa.Table:
        """The rows of these images: file, split, `columns`, error, and `more`."""
        names = map(self.images.image_name, range(len(self.images)))
        files = [printable(str(path_in_folder(name, data) or name)) for name in names]
        first = {"file": pa.array(files), "split": pa.array([self.images.split] * len(files))}
        return pa.table(first | columns | {"error": pa.array(self.errors, pa.string())} | more)


def read_batches(views: ViewsOrErrors, batch_size: int | None = None) -> Iterator[ImageBatch]:
    """All images, in their order.

    Args:
        batch_size: None: `data.batch_size`.
    """
    images = views.images
    size = batch_size or views.data.batch_size or DEFAULT_BATCH_SIZE
    loader = WatchedLoader(
        views, images.image_name, batch_size=size, num_workers=loader_processes(views.data), collate_fn=collate
    )
    for number, (pixels, errors) in enumerate(loader):
        indices = np.arange(number * size, number * size + len(errors))
        yield ImageBatch(images.select(indices), pixels, errors)


def collate(samples: list[tuple[Tensor, str | None]]) -> tuple[Tensor, list[str | None]]:
    """Views of one size to a batch, float32 where one is."""
    views, errors = zip(*samples, strict=True)
    return torch.stack(views), list(errors)


def read_crops(images: ImageDataset, data: ProbeDataConfig, size: ImageSize) -> Iterator[ImageBatch]:
    """Centre crops (height and width `size`) of all images, in their order."""
    crop = partial(centre_crop, size=size, share=data.eval_crop)
    placeholder = torch.zeros(data.channels, *size, dtype=torch.uint8)
    return read_batches(ViewsOrErrors(images, data, crop, placeholder))


def path_in_folder(path: str, data: ProbeDataConfig) -> Path | None:
    """The path of a file from the folder `data.path` on, whatever `..` is in it; None: it is elsewhere.

    A relative path is a name in a shard, wherever the command is run.
    """
    if not (is_local(data.path) and os.path.isabs(path)):
        return None
    place = Path(data.path).expanduser()
    folder = os.path.abspath(place.parent if place.is_file() else place)
    file = Path(os.path.abspath(path))
    return file.relative_to(folder) if file.is_relative_to(folder) else None


def identify_splits(data: ProbeDataConfig, splits: Sequence[ImageDataset], with_labels: bool = False) -> dict[str, Any]:
    """The settings and the images that a table of these splits depends on.

    Args:
        with_labels: whether the labels are in the table.
    """
    identity = {name: getattr(data, name) for name in (*HOW_READ, "max_pixels", "eval_crop")}
    identity["images"] = [identify_images(images, with_labels, retries=data.read_retries) for images in splits]
    if with_labels:  # whose numbers stay where a name is corrected
        identity["label_names"] = splits[0].class_names
    return identity


def parts_folder(out: Path, identity: dict[str, Any]) -> Path:
    """The folder of the parts of a table that was begun, and is not complete."""
    digest = short_digest([json.dumps(identity, sort_keys=True).encode()])
    return out.parent / f".{out.name}.parts" / digest


def write_table(
    out: Path,
    identity: dict[str, Any],
    splits: Sequence[ImageDataset],
    rows_of: Callable[[ImageDataset], Iterator[pa.Table]],
    describe: Callable[[Rows], dict[str, Any]] = lambda rows: {},
) -> None:
    """Write a table, or its missing part, and its description; print which images cannot be decoded.

    Args:
        out: a file whose name ends in .csv or .parquet.
        rows_of: the rows of images of a split, some at a time.
        describe: entries of the description, by all rows.
    Raises:
        UserError: the file is another table.
    """
    parts = parts_folder(out, identity)
    about = out.with_name(f"{out.name}.json")
    if out.exists():
        is_same = about.is_file() and parts.name.encode() in about.read_bytes()
        require(is_same, "out", out, "a new file: the existing one is from other images, weights, labels or settings")
        way = f"delete it where images have changed (all names are compared, and {SAMPLED_FILES} files of a split)"
        note(f"{out} was complete already, so nothing is computed again; {way}")
        delete(parts.parent)
        return
    with hold(parts.parent, "out"), deaths_explained():
        with progress_bar(unit="image", total=sum(map(len, splits))) as bar:
            for number, images in enumerate(splits):
                write_parts(parts / f"{number:03d}", images, rows_of, bar.update)
        rows = pyarrow.dataset.dataset(sorted(parts.rglob("*.parquet")))
        broken = rows.to_table(["file", "error"]).to_pandas().dropna()
        if len(broken):
            named = shortened([*(broken.file + ": " + broken.error)], MAX_UNREADABLE_NAMED)
            warn(f"{counted(len(broken), 'image')} cannot be decoded: {named}")
        described = {"mpp": mpp.__version__, "identity": parts.name} | identity
        described |= {"images": rows.count_rows(), "unreadable": len(broken)} | describe(rows)
        write_complete(about, json.dumps(described, indent=1, ensure_ascii=False))
        join_parts(rows, out)
    delete(parts.parent)
    print(f"wrote {out}, {about.name}: {counted(described['images'], 'image')}, {len(broken)} unreadable")


def write_parts(
    folder: Path,
    images: ImageDataset,
    rows_of: Callable[[ImageDataset], Iterator[pa.Table]],
    on_rows: Callable[[int], Any],
) -> None:
    """Write the rows of a split that are not written yet, in files that are named by their first row."""
    folder.mkdir(parents=True, exist_ok=True)
    done = sum(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))
    on_rows(done)
    waiting: list[pa.Table] = []
    for rows in rows_of(images.select(np.arange(done, len(images)))):
        waiting.append(rows)
        on_rows(len(rows))
        count = sum(map(len, waiting))
        if count >= ROWS_PER_PART or done + count == len(images):
            with complete(folder / f"{done:012d}.parquet") as partial:
                pq.write_table(pa.concat_tables(waiting), partial)
            done += count
            waiting = []


def join_parts(rows: Rows, out: Path) -> None:
    """Write the rows of all parts to one file, some of them in memory at a time."""
    write = pyarrow.csv.CSVWriter if out.suffix == ".csv" else pq.ParquetWriter
    with complete(out) as partial, write(partial, rows.schema) as writer:
        for part in rows.to_batches():
            writer.write_batch(part)
