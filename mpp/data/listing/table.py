"""One table of images: a row for each file, with its split and its label, made anew at each start."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from mpp.data.listing.folders import SPLITS, LeftOut
from mpp.data.listing.shared import shared_rows
from mpp.runtime.messages import tell, warn
from mpp.runtime.output import printable

IMAGE, LABEL, SPLIT = "image", "label", "split"
NOTES = b"mpp"  # of the table's metadata: what is to be said of it
ANY_BYTES = "file-bytes://"  # of a path that is no text: percent-encoded


@dataclass
class Listing:
    """Images in memory, before they are a table: columns of the same length."""

    columns: dict[str, list[Any] | pa.Array] = field(default_factory=lambda: {IMAGE: [], SPLIT: []})
    """split: names; `files`: paths of images, or of masks; `labels`: texts; and others as lists have them."""
    labels: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=lambda: {IMAGE})
    notes: list[str] = field(default_factory=list)
    """What was left out, for the user."""
    warnings: list[str] = field(default_factory=list)
    shards: dict[str, list[str]] = field(default_factory=dict)
    """Split -> files that are read by others: tables by the library, or shards as streams."""

    def __len__(self) -> int:
        return len(self.columns[SPLIT])

    def with_left_out(self, left_out: LeftOut) -> "Listing":
        """The same, which says what was left out."""
        self.notes += map(printable, left_out.lines(images=False))
        self.warnings += map(printable, left_out.lines(images=True))
        return self

    def table(self) -> pa.Table:
        """As arrow, sorted by split, with the library's features and the notes as metadata."""
        kinds: dict[str, Any] = {}
        arrays: dict[str, pa.Array] = {}
        self.sort_by_split()
        for name, values in self.columns.items():
            if name in self.files:
                arrays[name], kinds[name] = path_column(values), datasets.Image(decode=False)
            else:
                is_text = name in self.labels or name == SPLIT
                arrays[name] = text_column(values) if is_text else any_column(values)
                kinds[name] = datasets.Features.from_arrow_schema(pa.schema([(name, arrays[name].type)]))[name]
        schema = datasets.Features(kinds).arrow_schema
        notes = json.dumps({"notes": self.notes, "warnings": self.warnings, "shards": self.shards})
        schema = schema.with_metadata(schema.metadata | {NOTES: notes.encode()})
        return pa.Table.from_arrays([*arrays.values()], schema=schema)

    def sort_by_split(self) -> None:
        """Bring the rows of each split together; within a split they stay in their order."""
        if isinstance(self.columns[SPLIT], pa.Array):
            return
        order = sorted(range(len(self.columns[SPLIT])), key=[*map(split_order, self.columns[SPLIT])].__getitem__)
        if order != [*range(len(order))]:
            self.columns = {name: [values[row] for row in order] for name, values in self.columns.items()}


def path_column(paths: list[str | None]) -> pa.Array:
    """Paths of images as the library's images: {"bytes": none, "path"}."""
    try:
        texts = pa.array(paths, pa.string())
    except (UnicodeEncodeError, pa.ArrowInvalid):  # a name that is no UTF-8: all are written so, with one beginning
        texts = pa.array([None if path is None else as_text(path) for path in paths], pa.string())
    return pa.StructArray.from_arrays([pa.nulls(len(texts), pa.binary()), texts], ["bytes", "path"])


def as_text(path: str) -> str:
    """A path of any bytes as text that arrow can hold."""
    return ANY_BYTES + quote(os.fsencode(path))


def as_path(text: str) -> str:
    """The path that `as_text` has written."""
    return os.fsdecode(unquote_to_bytes(text.removeprefix(ANY_BYTES))) if text.startswith(ANY_BYTES) else text


def text_column(values: list[Any]) -> pa.Array:
    """Texts, or lists of texts."""
    if isinstance(values, pa.Array):
        return values
    several = any(isinstance(value, list) for value in values)
    try:
        return pa.array(values, pa.list_(pa.string()) if several else pa.string())
    except (UnicodeEncodeError, pa.ArrowInvalid):
        return text_column([printable_label(value) for value in values])


def printable_label(label: str | list[str] | None) -> str | list[str] | None:
    """A label, or several, with escapes for what UTF-8 lacks."""
    if isinstance(label, list):
        return [*map(printable, label)]
    return label if label is None else printable(label)


def any_column(values: list[Any]) -> pa.Array:
    """Values of one type, or their texts."""
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return pa.array([None if value is None else printable(str(value)) for value in values], pa.string())


class Found(NamedTuple):
    """What is at a place."""

    splits: dict[str, datasets.Dataset]
    """Its images, one by one, in the order of their names."""
    shards: dict[str, list[str]]
    """Or the files that hold them, by split."""


def shared(source: str, listing: Callable[[], Listing], key: str) -> Found:
    """A listing that all processes of this machine share; says what was left out.

    Args:
        source: what the dataset is called.
        listing: makes it; one process a machine calls it.
        key: what it is made from.
    """
    rows, about = shared_rows(lambda: listing().table(), key)
    said = json.loads(about[NOTES])
    for line in said["notes"]:
        tell(f"{source}: {line}")
    for line in said["warnings"]:
        warn(f"{source}: {line}")
    splits = rows.data.column(SPLIT).combine_chunks() if len(rows) else pa.array([], pa.string())
    names = sorted(pc.unique(splits).to_pylist(), key=split_order)
    columns = [name for name in rows.column_names if name != SPLIT]
    found = {name: rows_of_split(rows, splits, name).select_columns(columns) for name in names}
    return Found(found, said["shards"])


def rows_of_split(rows: datasets.Dataset, splits: pa.Array, name: str) -> datasets.Dataset:
    """The rows of a split, which stand together."""
    first = pc.index(splits, name).as_py()
    return rows.select(range(first, first + pc.sum(pc.equal(splits, name)).as_py()))


def split_order(name: str) -> tuple[int, str]:
    """Splits in the usual order: what is trained on first."""
    usual = [*dict.fromkeys(SPLITS.values())]
    return usual.index(name) if name in usual else len(usual), name
