"""The images of a folder or of shards as one table of rows: image {bytes, path}, label, mask, split, other columns.

One process of a machine makes it, and the others map it from the cache.
"""

import atexit
import dataclasses
import json
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc

from mpp.config import ImagesConfig
from mpp.data.caches import cached
from mpp.data.data_path import describe_source
from mpp.data.folder import split_order
from mpp.errors import UserError, one_line
from mpp.runtime.files import delete, short_digest
from mpp.runtime.messages import printable, warn

IMAGE = "image"
LABEL = "label"
SPLIT = "split"
LINES, TABLES = b"mpp_lines", b"mpp_tables"
"""Keys of a table's metadata: lines for the user, and the tables that `datasets` has to load instead."""
ROWS_FILE = "rows.arrow"
ROWS_PER_BATCH = 10_000
calls: Counter[str] = Counter()  # of `share` in this process, by the settings


@dataclass
class Listing:
    """Images in memory, before they are arrow: columns of the same length, or tables that hold images."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {SPLIT: []})
    """SPLIT has the names of splits, with the rows of each in their order."""
    path_columns: set[str] = field(default_factory=set)
    """Columns of paths of images, or of masks."""
    tables: dict[str, list[str]] = field(default_factory=dict)
    """Split -> shards, which are loaded elsewhere."""
    lines: list[str] = field(default_factory=list)
    """For the user, such as on files that are left out."""

    def to_arrow(self) -> pa.Table:
        """As arrow, sorted by split, with the features of `datasets`."""
        arrays = {}
        for name, values in self.columns.items():
            arrays[name] = path_column(values) if name in self.path_columns else to_arrow(values)
        table = pa.table(arrays)
        splits = sorted(pc.unique(table[SPLIT]).to_pylist(), key=split_order)
        numbers = pc.index_in(table[SPLIT], pa.array(splits, table[SPLIT].type)).to_numpy()
        if (np.diff(numbers) < 0).any():
            table = table.take(np.argsort(numbers, kind="stable"))
        features = datasets.Features.from_arrow_schema(table.schema)
        for name in self.path_columns:
            features[name] = datasets.Image(decode=False)
        lines = {LINES: json.dumps(self.lines), TABLES: json.dumps(self.tables)}
        return table.replace_schema_metadata(features.arrow_schema.metadata | lines)


def path_column(paths: list[str | None]) -> pa.Array:
    """Paths of images as `datasets` has images: {"bytes": null, "path"}; null where there is none."""
    texts = pa.array(paths, pa.string())
    empty = pa.nulls(len(texts), pa.binary())
    return pa.StructArray.from_arrays([empty, texts], ["bytes", "path"])


def to_arrow(values: list[Any]) -> pa.Array:
    """Values as arrow; as text where they are of several types, or hold what UTF-8 lacks."""
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return pa.array([None if value is None else printable(str(value)) for value in values], pa.string())


def share(make: Callable[[], Listing], config: ImagesConfig, *others: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The splits of a listing, training first, and its tables. Prints its lines.

    Args:
        make: makes the listing. Of the processes of a machine that start together, one calls it.
        others: on what the listing depends besides the settings.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        table = make().to_arrow()
        rows = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint=os.urandom(8).hex())
    else:
        settings = repr((others, dataclasses.asdict(config)))
        calls[settings] += 1  # a process that asks again gets a new listing
        key = short_digest([repr((launch(), settings, calls[settings])).encode(errors="surrogateescape")])
        folder = cached(f"listing-{key}", partial(write, make))
        file = str(folder / ROWS_FILE)
        rows = datasets.Dataset.from_file(file)
        atexit.register(remove, folder, os.getpid())
        table = pa.ipc.open_stream(pa.memory_map(file)).read_all()  # the library drops our metadata
    for line in json.loads(table.schema.metadata[LINES]):
        warn(f"{describe_source(config)}: {line}")
    splits = {}
    names = pc.unique(table[SPLIT]).to_pylist()
    for name in names:
        first, count = pc.index(table[SPLIT], name).as_py(), pc.sum(pc.equal(table[SPLIT], name)).as_py()
        splits[name] = rows.select(range(first, first + count)).remove_columns(SPLIT)
    return splits, json.loads(table.schema.metadata[TABLES])


def launch() -> tuple[Any, ...]:
    """Values that the processes of one start on one machine share, and two starts do not."""
    parent = psutil.Process(os.getppid())
    turn = [os.environ.get(name) for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    return (socket.gethostname(), parent.pid, parent.create_time(), *turn)


def write(make: Callable[[], Listing], folder: Path) -> None:
    """Write a listing."""
    try:
        table = make().to_arrow()
    except OSError as error:
        raise UserError(f"the images cannot be listed: {one_line(error)}") from error
    with (folder / ROWS_FILE).open("wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=ROWS_PER_BATCH)


def remove(folder: Path, pid: int) -> None:
    """Remove a listing at the end of this process, not of its forks; those who have mapped it keep it."""
    if os.getpid() == pid:
        delete(folder)
        delete(folder.with_name(f"{folder.name}.lock"))
