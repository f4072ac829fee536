"""The images of a folder or of shards as one table of rows: image {bytes, path}, label, mask, other columns.

One process of a machine makes it, and the others map it from the cache.
"""

import atexit
import json
import os
import socket
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import psutil
import pyarrow as pa

from mpp.config import ImagesConfig
from mpp.data.caches import ROWS_FILE, cached, discard
from mpp.data.data_path import describe_source
from mpp.data.folder import split_order
from mpp.errors import UserError, one_line
from mpp.runtime.files import short_digest
from mpp.runtime.messages import printable, warn

IMAGE = "image"
LABEL = "label"
SPLIT = "split"
SUMMARY_FILE = "summary.json"
ROWS_PER_BATCH = 10_000


@dataclass
class Listing:
    """Images in memory, before they are arrow, or tables that hold images."""

    splits: dict[str, str] = field(default_factory=dict)
    """Path of each image -> its split."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other columns: path of an image -> value; None, or none, where there is none."""
    path_columns: set[str] = field(default_factory=set)
    """Those with paths of images, such as masks."""
    image_column: str = IMAGE
    tables: dict[str, list[str]] = field(default_factory=dict)
    """Split -> shards, which are loaded elsewhere."""
    lines: list[str] = field(default_factory=list)
    """For the user, such as on files that are left out."""

    def to_arrow(self) -> tuple[pa.Table, dict[str, Any]]:
        """As arrow, by split, with the features of `datasets` and without empty columns; and a summary for `share`."""
        counts = Counter(self.splits.values())
        order = {split: number for number, split in enumerate(sorted(counts, key=split_order))}
        paths = sorted(self.splits, key=lambda path: order[self.splits[path]])
        columns = {self.image_column: path_column(paths)}
        for name, by_path in self.columns.items():
            values = [by_path.get(path) for path in paths]
            if any(value is not None for value in values):
                columns[name] = path_column(values) if name in self.path_columns else to_arrow(values)
        table = pa.table(columns)
        features = datasets.Features.from_arrow_schema(table.schema)
        for name in {self.image_column, *self.path_columns} & columns.keys():
            features[name] = datasets.Image(decode=False)
        summary = {"splits": {split: counts[split] for split in order}, "tables": self.tables, "lines": self.lines}
        return table.replace_schema_metadata(features.arrow_schema.metadata), summary


def path_column(paths: list[str | None]) -> pa.Array:
    """Paths of images as `datasets` has images: {"bytes": null, "path"}; null where there is none."""
    texts = pa.array(paths, pa.string())
    empty = pa.nulls(len(texts), pa.binary())
    return pa.StructArray.from_arrays([empty, texts], ["bytes", "path"])


def to_arrow(values: list[Any]) -> pa.Array:
    """Values as arrow; lists where one is a list; as text where they are of several types, or hold what UTF-8 lacks."""
    if any(isinstance(value, list) for value in values):
        values = [value if value is None or isinstance(value, list) else [value] for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return pa.array([None if value is None else printable(str(value)) for value in values], pa.string())


def share(make: partial[Listing], config: ImagesConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The splits of a listing, training first, and its tables. Prints its lines.

    Args:
        make: makes the listing. Of the processes of a machine that start together, one calls it.
    """
    parent = launcher()
    start = [os.environ.get(name) for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # nothing is shared: it lists the folder each time
    own = os.urandom(8) if alone else None
    launch = (socket.gethostname(), parent.pid, parent.create_time(), *start, own)
    key = short_digest([repr((launch, make.func.__name__, make.args)).encode(errors="surrogateescape")])
    folder = cached(f"listing-{key}", partial(write, make), is_kept=False)
    atexit.register(discard, folder)
    rows = datasets.Dataset.from_file(str(folder / ROWS_FILE))
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    for line in summary["lines"]:
        warn(f"{describe_source(config)}: {line}")
    splits, first = {}, 0
    for name, count in summary["splits"].items():
        splits[name] = rows.select(range(first, first + count))
        first += count
    return splits, summary["tables"]


def launcher() -> psutil.Process:
    """The process that has started this one, and others of the same start; this one, where it cannot be seen."""
    try:
        return psutil.Process(os.getppid())
    except psutil.Error:
        return psutil.Process()


def write(make: partial[Listing], folder: Path) -> None:
    """Write a listing."""
    try:
        table, summary = make().to_arrow()
    except OSError as error:
        raise UserError(f"the images cannot be listed: {one_line(error)}") from error
    (folder / SUMMARY_FILE).write_text(json.dumps(summary), encoding="utf-8")
    with (folder / ROWS_FILE).open("wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=ROWS_PER_BATCH)
