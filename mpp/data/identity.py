"""Records of images, which tell whether a run continues on those that it began with; quick to make and to compare.

A file that is added, taken away or renamed shifts the indices of the others, and a random cut with them: held-out
images would be trained on. So a run saves a record of its images, and continues only on the same.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mpp.data.columns import common_folder, is_encoded, read_cell
from mpp.data.dataset import ImageDataset
from mpp.errors import UnreadableImage
from mpp.runtime.files import short_digest

SAMPLED_FILES = 64  # image files of a split whose bytes enter its record
NAMES_PER_PIECE = 100_000  # file names in memory at a time
PLAIN_FIELDS = ("split", "images", "shards", "revision", "label_kind")
"""Values that a person can read: the others are digests."""
MAY_BE_UNKNOWN = ("files", "revision")  # None where the server did not answer when the run began
LABEL_KIND_FIELD = "label_kind"  # of a run that learned labels of another kind than one class an image
CLASS_NAMES_FIELD = "classes"  # not compared: the digest of the labels is


def identify_images(
    dataset: ImageDataset, with_labels: bool, retries: int = 0, revision: str | None = None
) -> dict[str, Any]:
    """The record of a dataset's images.

    Args:
        with_labels: whether it includes their labels.
    Returns:
        The split, the number of images, and digests: of all names and some files of the split, of the indices of the
        images that are chosen from it, of the labels.
    Raises:
        ReadFailed: a file cannot be read.
    """
    whole, split, chosen = dataset.origin
    has_labels = with_labels and dataset.labels is not None
    return {
        "split": split,
        "images": len(dataset),
        "files": short_digest(split_fingerprint(whole, dataset.image_column, retries)),
        "chosen": None if chosen is None else short_digest([chosen.astype(np.int64).tobytes()]),
        "labels": short_digest([dataset.labels.tobytes()]) if has_labels else None,
        "revision": revision,
    }


def split_fingerprint(rows: datasets.Dataset, column: str, retries: int) -> Iterator[bytes]:
    """Number of a split's images, their names from their common folder on, and digests of some files' bytes.

    Arrays, which have no names, are known by the values of some.
    """
    yield f"{len(rows)}\n".encode()
    sampled = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_FILES)).astype(int).tolist()
    if not is_encoded(rows.features[column]):
        for index in sampled:
            cell = rows[index][column]
            yield repr(cell.tolist() if isinstance(cell, np.ndarray) else cell).encode()
        return
    yield from names_from_common_folder(pc.struct_field(rows.data.column(column), "path"))
    for index in sampled:
        try:
            yield hashlib.sha256(read_cell(rows[index][column], retries)).digest()
        except UnreadableImage:
            yield b"unreadable"


def names_from_common_folder(paths: pa.ChunkedArray) -> Iterator[bytes]:
    """Paths without the folder that they share, a line each."""
    ends = pc.min_max(paths)
    start = common_folder(ends["min"].as_py() or "", ends["max"].as_py() or "")
    for offset in range(0, len(paths), NAMES_PER_PIECE):
        names = paths.slice(offset, NAMES_PER_PIECE).to_pylist()
        yield "\n".join((name or "")[start:] for name in names).encode()


def digest_listing(files: list[list[str]]) -> str:
    """Digest of the names and sizes of a stream's files.

    Args:
        files: name, size and stamp of each: see `mpp.data.shards.list_files`.
    """
    return short_digest(f"{name}\t{size}\n".encode() for name, size, *_ in files)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between the records of images, by part and field: "train: images was 633, is 634".

    Args:
        before, now: part, such as `train` -> its record.
    """
    changed = []
    for part, record in before.items():
        for field, value in now.get(part, {}).items():
            value_before = record.get(field)
            was_unknown = value_before is None and field in MAY_BE_UNKNOWN
            if value == value_before or was_unknown or field == CLASS_NAMES_FIELD:
                continue
            change = f"was {value_before}, is {value}" if field in PLAIN_FIELDS else "changed"
            changed.append(f"{part}: {field} {change}")
    return changed
