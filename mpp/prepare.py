"""A dataset made ready for training: parquet shards of images that are no larger than training needs.

    python -m mpp.prepare --data.path FOLDER --out prepared
    accelerate launch mpp/pretrain.py --data.path prepared --data.streaming true

Photographs of full size are slow to decode, and a million files are slow to copy and to open. Shards are written in
parallel, whole or not at all; the same command goes on where it was broken off. The library's `map` and `to_parquet`
would write every image twice, and begin anew.
"""

import contextlib
import ctypes
import io
import json
import shlex
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional

from mpp.config import PrepareConfig, require
from mpp.config.parsing import changed_keys, parse, to_yaml
from mpp.data.columns import cell_file_name, find_array_dtype, find_image_column, read_cell, without_decoding
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.decode import read_values
from mpp.data.decoding.pictures import to_ppm
from mpp.data.decoding.tiff import white_is_zero
from mpp.data.hub import resolve_commit
from mpp.data.identity import differences, short_digest, split_fingerprint
from mpp.data.labels import number_labels, read_labels
from mpp.data.overview import announce_splits
from mpp.data.sources import load_splits
from mpp.errors import UnreadableImage, UserError
from mpp.runtime import lock
from mpp.runtime.files import complete, write_complete
from mpp.runtime.hardware import cores
from mpp.runtime.lock import hold
from mpp.runtime.output import printable
from mpp.runtime.progress import progress_bar
from mpp.runtime.randomness import Stream, permutation
from mpp.runtime.start import command

NOTES, IMAGES = ".prepare", "images.json"  # hidden: what `datasets` finds beside the shards it takes for data


class Shard(NamedTuple):
    """A shard that is to be written."""

    split: str
    file: Path
    rows: datasets.Dataset  # of undecoded images or arrays (`image`) and, where there are some, labels
    config: PrepareConfig

    @property
    def notes(self) -> Path:
        """Where the notes of what went into it are."""
        return Path(self.config.out) / NOTES / f"{self.file.stem}.json"


def prepare_image(image: bytes | NDArray, config: PrepareConfig, name: str | None = None) -> bytes:
    """An image file that is shrunk to `config.short_side`, where it is larger; `name` is for the message.

    Raises:
        UnreadableImage: it cannot be decoded.
        UserError: the format cannot hold it.
    """
    values = np.ascontiguousarray(read_values(image, config.data))  # an upright view may run backwards
    small = min(values.shape[1:]) <= config.short_side
    plain = config.data.bands is None and config.data.nodata is None
    as_it_is = plain and isinstance(image, bytes) and not white_is_zero(image)  # else, shrunk or not, images differ
    if small and config.format == "jpeg" and as_it_is:
        return image
    if config.format != "npy" and values.dtype != np.uint8:
        what = f"{name or 'an image'}, which has {values.dtype} values"
        raise UserError(f"format is {config.format}, which holds 8 bits; it must be npy for {what}")
    values = values if small else shrunk(values, config.short_side)
    if config.format == "ppm":
        return to_ppm(torch.from_numpy(values))
    buffer = io.BytesIO()
    if config.format == "npy":
        np.save(buffer, np.ascontiguousarray(values.transpose(1, 2, 0)))
    else:
        shown = values.transpose(1, 2, 0) if len(values) > 1 else values[0]
        try:
            Image.fromarray(shown).save(buffer, "JPEG", quality=config.quality)
        except OSError as error:  # over 65,500 pixels long
            size = "{1} x {0}".format(*shown.shape)
            raise UnreadableImage(f"JPEG does not hold {size} pixels; --format ppm or npy does") from error
    return buffer.getvalue()


def shrunk(values: NDArray, side: int) -> NDArray:
    """Values (C, H, W) of any type, resized to so short a side; of the same type."""
    if values.dtype == np.uint8:
        return functional.resize(torch.from_numpy(values), [side], antialias=True).numpy()
    resized = functional.resize(torch.from_numpy(values.astype(np.float64)), [side], antialias=True).numpy()
    return (resized if values.dtype.kind == "f" else np.rint(resized)).astype(values.dtype)


def write_shard(shard: Shard) -> None:
    """Write a shard, and notes of what went into it."""
    notes: dict[str, Any] = {"kept": 0, "dropped": [], "bytes_before": 0, "bytes_after": 0}
    features = datasets.Features(shard.rows.features | {"image": datasets.Image()})
    columns: dict[str, list] = {column: [] for column in features}
    numbers = find_array_dtype(shard.rows.features["image"])
    for row in shard.rows:
        name = name_of(row["image"], shard.config.data.path)
        try:
            data = read_cell(row["image"], shard.config.data.read_retries, numbers)
            prepared = prepare_image(data, shard.config, name)
        except UnreadableImage as error:
            notes["dropped"].append(f"{name or 'an image without a name'}: {error}")
            continue
        for column, value in (row | {"image": {"bytes": prepared, "path": name}}).items():
            columns[column].append(value)
        notes["kept"] += 1
        notes["bytes_before"] += memoryview(data).nbytes
        notes["bytes_after"] += len(prepared)
    shard.file.parent.mkdir(exist_ok=True)
    with complete(shard.file) as partial:
        datasets.Dataset.from_dict(columns, features=features).to_parquet(partial)  # without compression of images
        write_complete(shard.notes, json.dumps(notes))


def name_of(cell: Any, root: str | None) -> str | None:
    """A file's name, from the dataset's folder on where it is in there: nothing of the machine. An array has none."""
    path = Path(printable(cell_file_name(cell) or ""))
    folder = Path(root or "").expanduser().absolute()
    if root and path.is_absolute() and path.is_relative_to(folder):
        return printable(str(path.relative_to(folder)))
    return printable(path.name) or None


def cut(config: PrepareConfig, commit: str | None) -> tuple[list[Shard], dict[str, Any]]:
    """All splits, cut into shards, and what their images are: see mpp/data/identity.py.

    Args:
        commit: which one of a dataset of the hub.
    Raises:
        UserError: no such images.
    """
    shards, images = [], {}
    splits = load_splits(replace(config.data, revision=commit))
    say_what_is_there(config, splits)
    for split, rows in splits.items():
        image_column = find_image_column(config.data, rows.features)
        label_column = config.data.label_column or ("label" if "label" in rows.features else None)
        require(label_column in (None, *rows.features), "data.label_column", label_column, ", ".join(rows.features))
        if image_column != "image" and label_column == "image":
            raise UserError("the labels' column is called image, as the column of images is in shards; rename it")
        rows = rows.select_columns([*dict.fromkeys(name for name in (image_column, label_column) if name)])
        rows = rows if image_column == "image" else rows.rename_column(image_column, "image")
        rows = without_decoding(rows, "image")
        files = short_digest(split_fingerprint(rows, "image", config.data.read_retries))
        images[split] = {"images": len(rows), "files": files, "revision": commit}
        if label_column:
            labels = rows.select_columns([label_column]).with_format("arrow")[:].column(0)
            parts = str(rows.features[label_column]).encode(), json.dumps(labels.to_pylist(), default=str).encode()
            images[split]["labels"] = short_digest(list(parts))
        order, count = permutation(Stream.ORDER, config.seed, 0, len(rows)), -(-len(rows) // config.rows)
        for number in range(count):
            file = Path(config.out) / "data" / f"{split}-{number:05d}-of-{count:05d}.parquet"
            chosen = rows.select(order[number * config.rows : (number + 1) * config.rows])
            shards.append(Shard(split, file, chosen, config))
    return shards, images


def say_what_is_there(config: PrepareConfig, splits: dict[str, datasets.Dataset]) -> None:
    """Say how many images there are, how many of them have a label, and of which classes."""
    source = describe_source(config.data)
    known = {name: rows for name, rows in splits.items() if len(rows)}
    with contextlib.suppress(UserError):  # labels of other kinds are kept as they are
        labels = number_labels([read_labels(rows, config.data.label_column, source) for rows in known.values()])
        columns = [find_image_column(config.data, rows.features) for rows in known.values()]
        named = zip(known.items(), columns, labels.parts, strict=True)
        parts = [
            ImageDataset.from_column(rows, column, numbers, name, labels.names, labels.classes)
            for (name, rows), column, numbers in named
        ]
        announce_splits(source, parts, {})


def begun_with(config: PrepareConfig) -> dict[str, Any]:
    """The images that the folder was begun with; {}: it is new."""
    noted = Path(config.out) / NOTES / IMAGES
    return json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}


def check_settings(config: PrepareConfig) -> Path:
    """Where the settings of the folder are; UserError where they are others, or something else is in there."""
    out, saved = Path(config.out), Path(config.out) / NOTES / "config.yaml"
    if saved.is_file():
        different = changed_keys(config, saved)
        if different:
            raise UserError(f"out is {out}, prepared with another {', '.join(different)}; choose another out")
    elif out.is_dir() and any(path.name not in lock.FILES for path in out.iterdir()):
        raise UserError(f"out is {out}, which holds something else; choose another out")
    return saved


def open_folder(config: PrepareConfig, images: dict[str, Any]) -> None:
    """Check that the folder is new, or of the same settings and images; note both."""
    saved, before = check_settings(config), begun_with(config)
    changed = differences(before, images) + [f"{split}: the split is gone" for split in {*before} - {*images}]
    if changed:
        raise UserError(f"out is {config.out}, prepared of other images ({'; '.join(changed)})")
    saved.parent.mkdir(parents=True, exist_ok=True)
    write_complete(saved, to_yaml(config))
    write_complete(saved.with_name(IMAGES), json.dumps(images))


def begin() -> None:
    """Start a worker: one thread, and no life without its parent (on Linux)."""
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def write_all(shards: Sequence[Shard], workers: int) -> Iterable[Shard]:
    """Write shards in parallel; each as it is done."""
    with ProcessPoolExecutor(workers, initializer=begin) as pool:
        jobs = {pool.submit(write_shard, shard): shard for shard in shards}
        try:
            for job in as_completed(jobs):
                job.result()
                yield jobs[job]
        except BrokenProcessPool:
            raise UserError("a process died (out of memory?); the same command goes on, with fewer workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare as the command line, or `arguments`, say."""
    config = parse(PrepareConfig, arguments, prog="python -m mpp.prepare")
    if config.data.path is None:
        raise UserError("data.path is null; it must be a dataset of the hub, a folder, or a file")
    require(not Path(config.out).exists() or Path(config.out).is_dir(), "out", config.out, "a folder")
    images, out = Path(config.data.path).expanduser(), Path(config.out).resolve()
    inside = images.is_dir() and out.is_relative_to(images.resolve())
    require(not inside, "out", config.out, f"outside of {images}: its shards would be read as images")
    check_settings(config)
    commits = {noted["revision"] for noted in begun_with(config).values()} - {None}
    shards, images = cut(config, resolve_commit(config.data, commits.pop() if commits else None))
    with hold(Path(config.out), "out"):
        open_folder(config, images)
        summarize(config, write_missing(config, shards))


def write_missing(config: PrepareConfig, shards: list[Shard]) -> list[dict[str, Any]]:
    """Write the shards that are not there; the notes of all."""
    missing = [shard for shard in shards if not (shard.file.is_file() and shard.notes.is_file())]
    there, total = len(shards) - len(missing), sum(len(shard.rows) for shard in shards)
    left = sum(len(shard.rows) for shard in missing)
    print(f"{describe_source(config.data)}: {total} images to {len(shards)} shards, {there} of them there already")
    workers = min(config.workers or cores(), max(1, len(missing)))
    with progress_bar(total=total, initial=total - left, unit="image", desc="preparing") as bar:
        for shard in write_all(missing, workers):
            bar.update(len(shard.rows))
    return [json.loads(shard.notes.read_text(encoding="utf-8")) for shard in shards]


def summarize(config: PrepareConfig, notes: list[dict[str, Any]]) -> None:
    """Say what was kept and what was dropped, and why."""
    dropped = sorted(line for each in notes for line in each["dropped"])
    kept, before, after = (sum(each[key] for each in notes) for key in ("kept", "bytes_before", "bytes_after"))
    listed = Path(config.out) / NOTES / "dropped.txt"
    write_complete(listed, "".join(f"{line}\n" for line in dropped))
    print(f"wrote {config.out}: {kept} images, {before / 1e6:.1f} MB became {after / 1e6:.1f} MB")
    if dropped:
        print(f"dropped {len(dropped)} that cannot be decoded, all named in {listed}:")
        print("\n".join(f"  {line}" for line in dropped[:10]))
    channels = f" --data.channels {config.data.channels}" if config.data.channels != 3 else ""
    named = config.data.label_column
    labels = f" --data.label_column {shlex.quote(named)}" if named not in (None, "label") else ""
    command = f"mpp pretrain --data.path {shlex.quote(config.out)}{channels}{labels}"
    print(f"next: {command}    (--data.streaming true: without an index)")


if __name__ == "__main__":
    command(main)
