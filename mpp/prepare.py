"""A dataset made ready for training: parquet shards of images that are no larger than training needs.

    python -m mpp.prepare --data.path FOLDER --out prepared
    accelerate launch mpp/pretrain.py --data.path prepared --data.streaming true

Photographs of full size are slow to decode, and a million files are slow to copy and to open. Shards are written in
parallel, whole or not at all; the same command continues where it was broken off. The library's `map` and `to_parquet`
would write every image twice, and begin again.
"""

import io
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional

from mpp.config import PrepareConfig, require, settings_of
from mpp.config.parsing import parse
from mpp.data.columns import cell_file_name, find_array_dtype, find_image_column, read_cell, without_decoding
from mpp.data.data_path import describe_source
from mpp.data.decoding.decode import read_values
from mpp.data.decoding.formats import JPEG
from mpp.data.folder import split_of_cell, split_of_shard
from mpp.data.identity import split_fingerprint
from mpp.data.labels import column_of, find_label_column
from mpp.data.remote import resolve_commit
from mpp.data.sources import load_splits
from mpp.data.workers import WatchedLoader, deaths_explained
from mpp.errors import UnreadableImage
from mpp.runtime.files import LOCK, complete, hold, short_digest, write_complete
from mpp.runtime.hardware import cores
from mpp.runtime.messages import counted, note, printable, progress_bar
from mpp.runtime.randomness import Stream, permutation
from mpp.runtime.start import run_main

NOTES_FOLDER = ".prepare"  # hidden: `datasets` takes other files next to the shards for data
NOTES_OF_JPEG = re.compile(rb"\xff([\xe1-\xed\xef\xfe]|\xe0(?!\0\x10JFIF\0)|\xee(?!\0\x0eAdobe)|\xd9.)", re.DOTALL)
"""Segments of applications but for the numbers of JFIF and Adobe, comments, and what follows the end."""


class Shard(NamedTuple):
    """A shard that is to be written."""

    file: Path
    rows: datasets.Dataset  # `image`: image files, not decoded, or arrays; and perhaps labels
    config: PrepareConfig

    @property
    def notes(self) -> Path:
        """File of the notes on its images."""
        return Path(self.config.out) / NOTES_FOLDER / f"{self.file.stem}.json"


# --- shards ---


def write_shard(shard: Shard) -> int:
    """Write a shard, and notes on its images; returns the number of images, with those that were dropped."""
    kept: list[dict[str, Any]] = []
    dropped: list[str] = []
    datasets.disable_progress_bars()  # one a shard
    source = shard.config.data
    array_dtype = find_array_dtype(shard.rows.features["image"])
    for row in shard.rows:
        name = relative_name(row["image"], source.path)
        try:
            image = read_cell(row["image"], source.read_retries, array_dtype)
            prepared = prepare_image(image, shard.config)
        except UnreadableImage as error:
            dropped.append(f"{name or 'an image without a name'}: {error}")
            continue
        kept.append(row | {"image": {"bytes": prepared, "path": name}})
    features = datasets.Features(shard.rows.features | {"image": datasets.Image()})
    columns = {column: [row[column] for row in kept] for column in features}  # of no rows, `from_list` makes none
    shard.file.parent.mkdir(exist_ok=True)
    with complete(shard.file) as partial:
        with partial.open("wb") as file:  # of a name, the library expands ~, and takes `a::b` for a URL
            datasets.Dataset.from_dict(columns, features=features).to_parquet(file)  # without compression of images
        write_complete(shard.notes, json.dumps({"kept": len(kept), "dropped": dropped}))
    return len(shard.rows)


def relative_name(cell: Any, root: str) -> str | None:
    """A file's path in the dataset's folder, or else its name: nothing that the machine is known by. None: an array."""
    path = Path(printable(cell_file_name(cell) or ""))
    folder = Path(os.path.abspath(os.path.expanduser(root)))  # as the files are listed
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    return path.name or None


def plan_shards(config: PrepareConfig) -> tuple[list[Shard], list[str]]:
    """All splits, their images in a random order, cut into shards; and a line a split that identifies its images.

    Raises:
        UserError: the images cannot be loaded, or a split's shards would be read as another split.
    """
    splits = load_splits(config.data)
    read_as = [split_of_shard(shard_name(split, 0, 1)) for split in splits]
    keeps_names = read_as == [split_of_cell(split) for split in splits] and len(set(read_as)) == len(read_as)
    allowed = "splits train, validation, test, or others of letters, digits and _ without such a word at the end"
    given = f"whose splits {', '.join(splits)} would be read as {', '.join(read_as)}"
    require(keeps_names, "data.path", f"{config.data.path}, {given}", allowed)
    shards: list[Shard] = []
    images = []
    for split, rows in splits.items():
        rows = select_columns(config, rows)
        images.append(f"{split}: {digest_of_rows(config, rows)}")
        order = permutation(Stream.ORDER, config.seed, 0, len(rows))
        count = -(-len(rows) // config.rows)
        for number in range(count):
            chosen = order[number * config.rows : (number + 1) * config.rows]
            file = Path(config.out) / "data" / shard_name(split, number, count)
            shards.append(Shard(file, rows.select(chosen), config))
    return shards, images


def select_columns(config: PrepareConfig, rows: datasets.Dataset) -> datasets.Dataset:
    """The images, as the column `image`, and their labels."""
    image_column = find_image_column(config.data, rows.features)
    label_column, _ = find_label_column(config.data, rows.features)
    columns = [name for name in dict.fromkeys((image_column, label_column)) if name]
    others = [name for name in rows.column_names if name not in columns]
    if others:
        note(f"the shards have images and labels only, without {', '.join(others)}; data.label_column names the labels")
    rows = rows.select_columns(columns)
    if image_column != "image":
        rows = rows.rename_column(image_column, "image")
    return without_decoding(rows, "image")


def digest_of_rows(config: PrepareConfig, rows: datasets.Dataset) -> str:
    """The digest of a split's images and labels."""
    labels = [column_of(rows, column).to_pylist() for column in rows.column_names[1:]]
    about = json.dumps([str(rows.features), labels], default=str)
    return short_digest([about.encode(), *split_fingerprint(rows, "image", config.data.read_retries)])


def shard_name(split: str, number: int, count: int) -> str:
    """Name of the file of a split's shard, which is all that says the split when it is read."""
    return f"{split}-{number:05d}-of-{count:05d}.parquet"


# --- images ---


def prepare_image(image: bytes | NDArray, config: PrepareConfig) -> bytes:
    """An image file that is shrunk to `config.short_side`, where it is larger. It has no metadata, such as EXIF.

    Raises:
        UnreadableImage: it cannot be decoded.
        UserError: the format cannot hold it.
    """
    values = np.ascontiguousarray(read_values(image, config.data))  # an upright view may run backwards
    fits = config.format == "npy" or values.dtype == np.uint8
    require(fits, "format", f"{config.format}, which holds 8 bits", f"npy for {values.dtype} values")
    if min(values.shape[1:]) > config.short_side:
        return encode(shrink(values, config.short_side), config.format, config.quality)
    if config.format != "jpeg":
        return encode(values, config.format)
    has_pixels_of_file = config.data.bands is None and config.data.nodata is None
    if has_pixels_of_file and isinstance(image, bytes) and JPEG.begins(image) and not NOTES_OF_JPEG.search(image):
        return image
    return encode(values, "png")


def shrink(values: NDArray, side: int) -> NDArray:
    """Values (C, H, W) of any type, resized until their shorter side is `side`; of the same type."""
    exact = values if values.dtype == np.uint8 else values.astype(np.float64)
    resized = functional.resize(torch.from_numpy(exact), [side], antialias=True).numpy()
    return (resized if values.dtype.kind == "f" else np.rint(resized)).astype(values.dtype)


def encode(values: NDArray, form: str, quality: int = 0) -> bytes:
    """A file of values (C, H, W): an array (H, W, C) of numpy's, or of 8 bits in a format of PIL's.

    Raises:
        UnreadableImage: it is longer than the format allows.
    """
    buffer = io.BytesIO()
    pixels = np.ascontiguousarray(values.transpose(1, 2, 0))
    if form == "npy":
        np.save(buffer, pixels)
        return buffer.getvalue()
    try:
        Image.fromarray(pixels[..., 0] if len(values) == 1 else pixels).save(buffer, form, quality=quality)
    except OSError as error:  # JPEG is at most 65,500 pixels long
        height, width = values.shape[1:]
        raise UnreadableImage(f"{form} does not hold {width} x {height} pixels; --format ppm or npy does") from error
    return buffer.getvalue()


# --- the folder ---


def begin(config: PrepareConfig, images: list[str]) -> None:
    """Note in the folder what its shards are made of.

    Args:
        images: lines that identify the images.
    Raises:
        UserError: it was begun with other settings or images, or something else is in there.
    """
    out = Path(config.out)
    settings = [f"{each.key}: {each.value}" for each in settings_of(config) if not each.about["operational"]]
    made_of = "\n".join(settings + images)
    file = out / NOTES_FOLDER / f"{short_digest([made_of.encode()])}.txt"
    others = {path.name for path in out.iterdir()} - {LOCK}
    allowed = f"a new folder, or one begun with these settings and images (a text in {file.parent} lists its own)"
    require(file.is_file() or not others, "out", out, allowed)
    file.parent.mkdir(exist_ok=True)
    write_complete(file, made_of)


# --- the work ---


def write_missing(config: PrepareConfig, shards: list[Shard]) -> list[dict[str, Any]]:
    """Write the shards that are not there, in parallel; returns the notes of all."""
    missing = [shard for shard in shards if not shard.file.is_file()]  # its notes are written before it
    there = len(shards) - len(missing)
    print(f"{describe_source(config.data)}: {counted(len(shards), 'shard')}, {there} of them there already")
    workers = min(config.workers or cores(), len(missing))
    writers = WatchedLoader(missing, str, batch_size=None, num_workers=workers, collate_fn=write_shard)
    bar = progress_bar(total=sum(len(shard.rows) for shard in missing), unit="image", desc="preparing shards")
    with bar, deaths_explained():
        for images in writers:
            bar.update(images)
    return [json.loads(shard.notes.read_text(encoding="utf-8")) for shard in shards]


def print_summary(config: PrepareConfig, notes: list[dict[str, Any]]) -> None:
    """Print how many images were kept, and which were dropped and why; then the command that trains on them.

    Raises:
        UserError: none was kept.
    """
    dropped = sorted(line for of_shard in notes for line in of_shard["dropped"])
    listings = f"see {Path(config.out) / NOTES_FOLDER}/*.json"
    kept = sum(of_shard["kept"] for of_shard in notes)
    print(f"wrote {config.out}: {counted(kept, 'image')}")
    if dropped:
        print(f"dropped {len(dropped)} that cannot be decoded, such as {dropped[0]}: {listings}")
    require(kept, "out", config.out, f"of images of which some can be decoded: {listings}")
    if config.format == "npy":
        note("arrays have the numbers of the files; unless these use all of their type, name data.range in the run")
    print(f"next: {training_command(config)}    (large sets: --data.streaming true)")


def training_command(config: PrepareConfig) -> str:
    """The command that trains on the shards."""
    words = f"mpp pretrain --data.path {shlex.quote(config.out)}"
    if config.data.channels != 3:
        words += f" --data.channels {config.data.channels}"
    if config.data.label_column not in (None, "label"):
        words += f" --data.label_column {shlex.quote(config.data.label_column)}"
    return words


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare a dataset as the command line, or `arguments`, say."""
    config = parse(PrepareConfig, arguments)
    require(config.data.path, "data.path", "null", "a dataset of the hub, a folder, or a file")
    out = Path(config.out)
    folder = Path(config.data.path).expanduser()
    is_inside = out.resolve().is_relative_to(folder.resolve())
    require(not is_inside, "out", out, f"outside of {folder}: its shards would be read as images")
    with hold(out, "out"):
        config = replace(config, data=replace(config.data, revision=resolve_commit(config.data)))
        shards, images = plan_shards(config)
        begin(config, images)
        print_summary(config, write_missing(config, shards))


if __name__ == "__main__":
    run_main(main)
