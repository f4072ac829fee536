"""Which images a run is of: a record that is quick to make and to compare.

A file that is added, taken away or renamed shifts the indices of the others, and a seeded cut with them: what was held
out would be trained on. So a run notes its images, and goes on with the same alone.
"""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc

from mpp.data.dataset import ImageDataset, encoded_bytes, is_encoded
from mpp.errors import UnreadableImage

SAMPLED = 64  # image files of a split whose bytes enter the record
NAMES = 100_000  # names that are held at a time
THE_FILES = "the files (their names, or the bytes of one of those that are looked at)"
NAMES_OF_CLASSES = "classes"  # noted for people; labels have a digest
MEANING = {
    "split": "split",
    "images": "number of images",
    "shards": "number of shards",
    "files": THE_FILES,
    "names": THE_FILES,
    "chosen": "which of them are chosen",
    "labels": "labels",
    "revision": "revision on the hub",
    "weights": "weights",
}


def record(dataset: ImageDataset, labels: bool, retries: int = 0, revision: str | None = None) -> dict[str, Any]:
    """What these images are.

    Args:
        labels: whether their labels count.
        retries: see `data.read_retries`.
        revision: the commit of a hub dataset.
    Returns:
        The split, how many they are, and digests: of all names and some files of the split, of which images are
        chosen from it, of the labels.
    Raises:
        ReadFailed: a file cannot be read.
    """
    whole, split, chosen = dataset.origin
    return {
        "split": split,
        "images": len(dataset),
        "files": short_digest(image_files(whole, dataset.image_column, retries)),
        "chosen": None if chosen is None else short_digest([chosen.astype(np.int64).tobytes()]),
        "labels": short_digest([dataset.labels.tobytes()]) if labels and dataset.labels is not None else None,
        "revision": revision,
    }


def short_digest(parts: Iterator[bytes] | list[bytes]) -> str:
    """The first 16 digits of the SHA-256 of all parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def image_files(rows: datasets.Dataset, column: str, retries: int) -> Iterator[bytes]:
    """What the image files of a split are known by: number, names from their common folder on, bytes of some."""
    yield f"{len(rows)}\n".encode()
    looked_at = np.unique(np.linspace(0, len(rows) - 1, SAMPLED).astype(int)).tolist() if len(rows) else []
    if not is_encoded(rows.features[column]):  # arrays have no names
        cells = (rows[index][column] for index in looked_at)
        yield from (repr(cell.tolist() if isinstance(cell, np.ndarray) else cell).encode() for cell in cells)
        return
    paths = pc.struct_field(rows.data.column(column), "path")
    ends = pc.min_max(paths)
    first_and_last = [ends[each].as_py() or "" for each in ("min", "max")]
    shared = os.path.commonprefix(first_and_last).rfind("/") + 1  # noqa: RUF071  characters, up to a folder's end
    for first in range(0, len(paths), NAMES):
        names = paths.slice(first, NAMES).to_pylist()
        yield "\n".join((name or "")[shared:] for name in names).encode()
    for index in looked_at:
        try:
            yield hashlib.sha256(encoded_bytes(rows[index][column], retries)).digest()
        except UnreadableImage:
            yield b"unreadable"


def listed(files: list[list[str]] | None) -> str | None:
    """What the files of a stream are known by: names and sizes; None: they are unknown.

    Args:
        files: name, size and stamp of each: see `mpp.data.kept_samples`.
    """
    return short_digest([f"{name}\t{size}\n".encode() for name, size, *_ in files]) if files else None


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed of what is known, in words, part by part: "train: number of images was 633, is 634"."""
    unlisted = not_listed(before) | not_listed(now)
    changed = []
    for part, known in before.items():
        for key, value in now.get(part, {}).items():
            was = known.get(key)
            unlisted_now = key == "files" and part in unlisted
            unasked = key == "revision" and was is None  # the hub did not answer when the run began
            if was != value and key != NAMES_OF_CLASSES and not (unlisted_now or unasked):
                plain = key in ("split", "images", "shards", "revision")
                changed.append(f"{part}: {MEANING[key]} {f'was {was}, is {value}' if plain else 'changed'}")
    return changed


def not_listed(images: dict[str, Any]) -> set[str]:
    """The parts of a record whose files are unknown: those of a stream that could not be listed."""
    return {part for part, known in images.items() if known.get("files", "") is None}


def together(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The record of now, with the files of before where they are unknown now."""
    earlier = {part: {"files": before.get(part, {}).get("files")} for part in not_listed(now)}
    return {part: known | earlier.get(part, {}) for part, known in now.items()}
