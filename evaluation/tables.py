"""A table with a row for each image of a dataset, as CSV or parquet, written in parts: after a kill it is continued.

A table is known by its identity: the settings, weights and images that its rows depend on. FILE.json next to it has the
digest of this identity, and describes the content.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
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
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset, images_only
from mpp.data.identity import identify_images
from mpp.data.overview import warn_of_depth
from mpp.data.sources import load_splits
from mpp.data.workers import WatchedLoader, deaths_explained, loader_processes, note_reading
from mpp.errors import UnreadableImage
from mpp.runtime.files import complete, delete, hold, short_digest, write_complete
from mpp.runtime.messages import counted, note, printable, progress_bar, shortened, tell, warn

BATCHES_PER_PART = 8  # which an interruption loses at most
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
    """The images of each split, without labels; those of another depth are warned of."""
    images = []
    for split, rows in splits.items():
        column = find_image_column(data, rows.features)
        images.append(ImageDataset(images_only(rows, column), column, None, split))
        warn_of_depth(images[-1], data)
    return images


@dataclass(frozen=True)
class PixelsOrErrors(Dataset):
    """Images by index, and the reason why one cannot be decoded (None: it can)."""

    images: ImageDataset
    data: ProbeDataConfig
    size: ImageSize | None
    """Height and width of the centre crop that each is shown by; None: it is whole."""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, str | None]:
        note_reading(index)
        try:
            pixels, error = self.images.decode(index, self.data), None
        except UnreadableImage as reason:
            pixels, error = torch.zeros(self.data.channels, 1, 1, dtype=torch.uint8), str(reason)
        note_reading(None)
        return pixels if self.size is None else centre_crop(pixels, self.size, self.data.eval_crop), error


@dataclass(frozen=True)
class ImageBatch:
    """Some images of a split."""

    images: ImageDataset
    pixels: Tensor
    """(B, C, H, W) from 0 to 255; zeros for an image that cannot be decoded."""
    errors: list[str | None]
    """Why an image cannot be decoded; None: it can."""

    def table(self, columns: dict[str, Sequence], data: ProbeDataConfig) -> pa.Table:
        """The rows of these images: file, split, `columns` (an image that cannot be decoded has none), and error."""
        names = map(self.images.image_name, range(len(self.images)))
        files = [printable(str(path_in_folder(name, data) or name)) for name in names]
        places = pa.array([place if error is None else None for place, error in enumerate(self.errors)], pa.int64())
        known = {name: pa.array(values).take(places) for name, values in columns.items()}  # null of a null place
        first = {"file": files, "split": [self.images.split] * len(files)}
        return pa.table(first | known | {"error": pa.array(self.errors, pa.string())})


def read_images(images: ImageDataset, data: ProbeDataConfig, size: ImageSize | None) -> Iterator[ImageBatch]:
    """All images, in their order: centre crops of this height and width; None: whole, each a batch of its own."""
    batch_size = 1 if size is None else data.batch_size or DEFAULT_BATCH_SIZE
    loader = WatchedLoader(
        PixelsOrErrors(images, data, size),
        images.image_name,
        batch_size=batch_size,
        num_workers=loader_processes(data),
        collate_fn=collate,
    )
    for number, (pixels, errors) in enumerate(loader):
        indices = np.arange(number * batch_size, number * batch_size + len(errors))
        yield ImageBatch(images.select(indices), pixels, errors)


def collate(samples: list[tuple[Tensor, str | None]]) -> tuple[Tensor, list[str | None]]:
    """Images of one size to a batch, float32 where one is."""
    pixels, errors = zip(*samples, strict=True)
    return torch.stack(pixels), list(errors)


def path_in_folder(path: str, data: ProbeDataConfig) -> Path | None:
    """The path of a file from the folder `data.path` on, whatever `..` is in it; None: it is elsewhere.

    A relative path is a name in a shard, wherever the command is run.
    """
    place = Path(data.path or "").expanduser()
    folder = os.path.abspath(place.parent if place.is_file() else place)
    file = Path(os.path.abspath(path))
    is_inside = os.path.isabs(path) and file.is_relative_to(folder)
    return file.relative_to(folder) if is_inside else None


def identify_splits(data: ProbeDataConfig, splits: Sequence[ImageDataset]) -> dict[str, Any]:
    """The settings, the images and the labels that a table of these splits depends on."""
    identity = {name: getattr(data, name) for name in (*HOW_READ, "max_pixels", "eval_crop")}
    identity["images"] = [identify_images(images, with_labels=True, retries=data.read_retries) for images in splits]
    if splits[0].class_names:  # whose numbers stay where a name is corrected
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
) -> Path:
    """Write a table, or its missing part, and its description; print which images cannot be decoded; return its file.

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
        note(f"{out} was complete already, so nothing is computed again; delete it where images have changed")
        delete(parts.parent)
        return out
    with hold(parts.parent, "out"), deaths_explained():
        for number, images in enumerate(splits):
            write_parts(parts / f"{number:03d}", images, rows_of)
        rows = pyarrow.dataset.dataset(sorted(parts.rglob("*.parquet")))
        broken = rows.to_table(["file", "error"]).to_pandas().dropna()
        if len(broken):
            named = shortened([*(broken.file + ": " + broken.error)])
            warn(f"{counted(len(broken), 'image')} cannot be decoded: {named}")
        described = {"mpp": mpp.__version__, "identity": parts.name} | identity
        described |= {"images": rows.count_rows(), "unreadable": len(broken)} | describe(rows)
        write_complete(about, json.dumps(described, indent=1, ensure_ascii=False))
        write = pyarrow.csv.CSVWriter if out.suffix == ".csv" else pq.ParquetWriter
        with complete(out) as partial, write(partial, rows.schema) as writer:
            for part in rows.to_batches():  # some rows in memory at a time
                writer.write_batch(part)
    delete(parts.parent)
    print(f"wrote {out}, {about.name}: {counted(described['images'], 'image')}, {len(broken)} unreadable")
    return out


def write_parts(folder: Path, images: ImageDataset, rows_of: Callable[[ImageDataset], Iterator[pa.Table]]) -> None:
    """Write the rows of a split that are not written yet, in files that are named by their first row."""
    folder.mkdir(parents=True, exist_ok=True)
    done = sum(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))
    batches = rows_of(images.select(np.arange(done, len(images))))
    with progress_bar(desc=images.split, unit="image", total=len(images), initial=done) as bar:
        while part := list(islice(batches, BATCHES_PER_PART)):
            rows = pa.concat_tables(part)
            with complete(folder / f"{done:012d}.parquet") as partial:
                pq.write_table(rows, partial)
            done += len(rows)
            bar.update(len(rows))
