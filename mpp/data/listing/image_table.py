"""One table of images: a row for each file, with its split and its label, made again at each start."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from mpp.data.listing.left_out import LeftOutFiles
from mpp.data.listing.shared_table import share_table
from mpp.data.listing.split_names import split_order
from mpp.runtime.messages import printable, tell, warn

IMAGE = "image"
LABEL = "label"
SPLIT = "split"
METADATA_KEY = b"mpp"
ENCODED_PATH_PREFIX = "file-bytes://"  # of a path that is no text: percent-encoded


@dataclass
class Listing:
    """Images in memory, before they are a table: columns of the same length."""

    columns: dict[str, list[Any] | pa.Array] = field(default_factory=lambda: {IMAGE: [], SPLIT: []})
    """SPLIT has names of splits."""
    label_columns: set[str] = field(default_factory=set)
    """Columns of texts, or of lists of texts."""
    path_columns: set[str] = field(default_factory=lambda: {IMAGE})
    """Columns of paths of images, or of masks."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user, such as the files that were left out."""
    warnings: list[str] = field(default_factory=list)
    shards: dict[str, list[str]] = field(default_factory=dict)
    """Split -> files that others read: tables by `datasets`, or shards as streams."""

    def __len__(self) -> int:
        return len(self.columns[SPLIT])

    def add_left_out(self, left_out: LeftOutFiles) -> None:
        """Add lines about the files that were left out."""
        self.notes += map(printable, left_out.lines(about_images=False))
        self.warnings += map(printable, left_out.lines(about_images=True))

    def to_table(self) -> pa.Table:
        """As arrow, sorted by split, with the features of `datasets` and the lines for the user as metadata."""
        self.sort_by_split()
        arrays: dict[str, pa.Array] = {}
        for name, values in self.columns.items():
            if isinstance(values, pa.Array):
                arrays[name] = values
            elif name in self.path_columns:
                arrays[name] = path_column(values)
            elif name == SPLIT or name in self.label_columns:
                arrays[name] = text_column(values)
            else:
                arrays[name] = to_array(values, None, lambda value: printable(str(value)))
        table = pa.table(arrays)
        features = datasets.Features.from_arrow_schema(table.schema)
        for name in self.path_columns:
            features[name] = datasets.Image(decode=False)
        lines = {"notes": self.notes, "warnings": self.warnings, "shards": self.shards}
        metadata = features.arrow_schema.metadata | {METADATA_KEY: json.dumps(lines).encode()}
        return table.replace_schema_metadata(metadata)

    def sort_by_split(self) -> None:
        """Bring the rows of each split together; within a split they stay in their order."""
        splits = self.columns[SPLIT]
        if isinstance(splits, pa.Array):
            return  # sorted already
        keys = [split_order(split) for split in splits]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        if order != list(range(len(keys))):
            self.columns = {name: [values[row] for row in order] for name, values in self.columns.items()}


def path_column(paths: list[str | None]) -> pa.Array:
    """Paths of images as `datasets` has images: {"bytes": none, "path"}."""
    texts = to_array(paths, pa.string(), encode_path)
    return pa.StructArray.from_arrays([pa.nulls(len(texts), pa.binary()), texts], ["bytes", "path"])


def encode_path(path: str) -> str:
    """A path of any bytes as text that arrow can hold."""
    return ENCODED_PATH_PREFIX + quote(os.fsencode(path))


def decode_path(text: str) -> str:
    """The path in a table: see `encode_path`."""
    if not text.startswith(ENCODED_PATH_PREFIX):
        return text
    return os.fsdecode(unquote_to_bytes(text.removeprefix(ENCODED_PATH_PREFIX)))


def text_column(values: list[Any]) -> pa.Array:
    """Texts, or lists of texts, with escapes for characters that UTF-8 lacks."""
    if any(isinstance(value, list) for value in values):
        return to_array(values, pa.list_(pa.string()), lambda texts: [printable(text) for text in texts])
    return to_array(values, pa.string(), printable)


def to_array(values: list[Any], kind: pa.DataType | None, to_text: Callable[[Any], Any]) -> pa.Array:
    """Values as arrow; each by `to_text` where arrow cannot hold them all, as with characters that UTF-8 lacks.

    Args:
        kind: None: the values' type, or text.
    """
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        texts = [None if value is None else to_text(value) for value in values]
        return pa.array(texts, kind or pa.string())


class SharedListing(NamedTuple):
    """The images or shards of a dataset, which all processes of this machine share."""

    splits: dict[str, datasets.Dataset]
    """Images, one by one, in the order of their names."""
    shards: dict[str, list[str]]
    """Or the files that hold them, by split."""


def share_listing(make: Callable[[], Listing], source: str, key: str) -> SharedListing:
    """A listing that all processes of this machine share. Prints its notes and warnings.

    Args:
        make: makes the listing; one process of a machine calls it.
        source: the dataset's name in messages.
        key: text that identifies the listing: see `share_table`.
    """
    rows, metadata = share_table(lambda: make().to_table(), key)
    lines = json.loads(metadata[METADATA_KEY])
    for line in lines["notes"]:
        tell(f"{source}: {line}")
    for line in lines["warnings"]:
        warn(f"{source}: {line}")
    split_of_row = rows.data.column(SPLIT).combine_chunks() if len(rows) else pa.array([], pa.string())
    columns = [name for name in rows.column_names if name != SPLIT]
    splits = {}
    for name in sorted(pc.unique(split_of_row).to_pylist(), key=split_order):
        first = pc.index(split_of_row, name).as_py()
        count = pc.sum(pc.equal(split_of_row, name)).as_py()  # which stand together
        splits[name] = rows.select(range(first, first + count)).select_columns(columns)
    return SharedListing(splits, lines["shards"])
