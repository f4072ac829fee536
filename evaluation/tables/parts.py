"""A table with a row for each image, as CSV or parquet, written in parts: after a kill the same command continues.

A table is known by its identity, the settings, weights and images that its rows depend on. A table of parquet has it in
its metadata, and one of CSV its digest in the file FILE.json next to it.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from mpp.config import require
from mpp.data.dataset import ImageDataset
from mpp.data.identity import SAMPLED_FILES
from mpp.data.workers import deaths_explained
from mpp.runtime.files import complete, hold, short_digest, write_complete
from mpp.runtime.messages import note, progress_bar

IDENTITY_KEY = b"mpp"  # of the metadata of parquet
IDENTITY_ENTRIES = ("identity", "bytes")  # by which the file next to a CSV knows it
BEGUN_FILE = "identity"  # in the folder of the parts: whose they are, also before the first one is complete
ROWS_PER_PART = 4096  # bounds the memory, and the rows lost by an interruption
RowsOf = Callable[[ImageDataset, range, Callable[[int], Any]], pa.Table]
"""The rows of some images of a split, by their indices; the last argument is told how many more are done."""


def write_table(
    out: Path,
    identity: dict[str, Any],
    splits: Sequence[ImageDataset],
    rows_of: RowsOf,
    progress: str,
    rows_per_part: int | None = None,
) -> None:
    """Write a table, or its missing part.

    Args:
        out: a file whose name ends in .csv or .parquet.
        rows_per_part: images of a part; None: ROWS_PER_PART.
    Raises:
        UserError: the file is another table.
    """
    text = json.dumps(identity, sort_keys=True)
    parts = parts_folder(out)
    if is_table_complete(out, text):  # a refused table leaves no folder
        way = f"delete it where images have changed (all names are compared, and {SAMPLED_FILES} files of a split)"
        note(f"{out} was complete already, so nothing is computed again; {way}")
    with hold(parts, "out"), deaths_explained():
        if not is_table_complete(out, text):
            write_complete(parts / BEGUN_FILE, digest(text))
            files = write_parts(parts, splits, text, rows_of, progress, rows_per_part or ROWS_PER_PART)
            join_parts(files, out, text)
    shutil.rmtree(parts, ignore_errors=True)


def parts_folder(out: Path) -> Path:
    """The folder of the parts of a table that is not complete."""
    return out.parent / f".{out.name}.parts"


def is_begun(out: Path, identity: dict[str, Any]) -> bool:
    """Whether this very table was begun, and is not complete."""
    file = parts_folder(out) / BEGUN_FILE
    return file.is_file() and file.read_text(encoding="utf-8") == digest(json.dumps(identity, sort_keys=True))


def is_table_complete(out: Path, identity: str) -> bool:
    """Whether the whole table is there. Raises UserError if another file is."""
    complete_table = has_identity(out, identity)
    allowed = "a new file: the existing one is from other images, weights, labels or settings"
    require(complete_table or not out.exists(), "out", out, allowed)
    return complete_table


def has_identity(file: Path, identity: str) -> bool:
    """Whether a file is a table, or a part of one, with this identity."""
    if file.suffix == ".csv":
        about = read_about(file)
        return (
            file.is_file() and about.get("identity") == digest(identity) and about.get("bytes") == file.stat().st_size
        )
    try:
        metadata = pq.read_schema(file).metadata or {}
    except (OSError, pa.ArrowException):  # nothing, a folder, another kind of file
        return False
    return metadata.get(IDENTITY_KEY) == identity.encode()


def digest(identity: str) -> str:
    """The digest of an identity, which the file next to a table has."""
    return short_digest([identity.encode()])


def about_file(out: Path) -> Path:
    """The file next to a table that describes its content."""
    return out.with_name(f"{out.name}.json")


def read_about(out: Path) -> dict[str, Any]:
    """The content of the file next to a table; empty where there is none."""
    try:
        about = json.loads(about_file(out).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def write_parts(
    folder: Path, splits: Sequence[ImageDataset], identity: str, rows_of: RowsOf, progress: str, rows_per_part: int
) -> list[Path]:
    """Write the parts that are missing or belong to another table, and return the files of all parts."""
    files = []
    with progress_bar(desc=progress, unit="image", total=sum(map(len, splits))) as bar:
        for number, images in enumerate(splits):
            for first in range(0, len(images), rows_per_part):
                indices = range(first, min(first + rows_per_part, len(images)))
                file = folder / f"{number:03d}-{first:012d}.parquet"
                files.append(file)
                if has_identity(file, identity):
                    bar.update(len(indices))
                    continue
                rows = rows_of(images, indices, bar.update)
                rows = rows.replace_schema_metadata({IDENTITY_KEY: identity.encode()})
                with complete(file) as partial:
                    pq.write_table(rows, partial)
    return files


def join_parts(files: Sequence[Path], out: Path, identity: str) -> None:
    """Join the parts to one file, with one part in memory at a time."""
    schema = pq.read_schema(files[0])
    with complete(out) as partial:
        is_csv = out.suffix == ".csv"
        with pa.csv.CSVWriter(partial, schema) if is_csv else pq.ParquetWriter(partial, schema) as writer:
            for file in files:
                writer.write_table(pq.read_table(file))
        if is_csv:  # before the table is in its place: a table without it would be refused
            about = {"identity": digest(identity), "bytes": partial.stat().st_size}
            write_complete(about_file(out), json.dumps(about, indent=1))


def read_columns(out: Path, columns: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    """Some columns of a table, in its order, of which only a part is in memory at a time."""
    if out.suffix == ".parquet":
        with pq.ParquetFile(out) as file:
            yield from file.iter_batches(columns=list(columns))
        return
    convert = pa.csv.ConvertOptions(
        include_columns=list(columns),
        column_types=dict(columns),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    with pa.csv.open_csv(out, convert_options=convert, parse_options=parse) as reader:
        yield from reader
