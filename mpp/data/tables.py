"""Tables of images on this machine: parquet and arrow files."""

import os
from contextlib import suppress
from itertools import chain, repeat
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mpp.data.columns import BINARY_TYPES, TEXT_TYPES, find_array_dtype, is_cell
from mpp.data.data_path import is_url
from mpp.data.label_columns import column_of
from mpp.data.listing.formats import extension_of
from mpp.data.listing.image_table import path_column
from mpp.data.retry import LOADING_ERRORS
from mpp.errors import UserError, one_line
from mpp.runtime.messages import shortened

STREAMED_FILES_COMPARED = 16  # of a split, or a few more: a stream may have very many
MAX_EMPTY_TABLE_BYTES = 1 << 20  # a longer table has rows, and need not be opened to know it


def can_hold_images(feature: Any) -> bool:
    """Whether a column may hold image files or arrays."""
    is_binary = getattr(feature, "dtype", None) in BINARY_TYPES
    return is_binary or is_cell(feature) or find_array_dtype(feature) is not None


def holds_images(table: str) -> bool:
    """Whether a parquet or arrow file has a column of images; not where it cannot be read."""
    try:
        features = read_features(table)
    except LOADING_ERRORS:
        return False
    return any(can_hold_images(feature) for feature in features.values())


def read_features(table: str) -> datasets.Features:
    """The columns' types of a parquet or arrow file."""
    if extension_of(table) == ".parquet":
        return datasets.Features.from_arrow_schema(pq.read_schema(table))
    with pa.memory_map(table) as file:
        return datasets.Features.from_arrow_schema(open_arrow(file).schema)


def has_rows(table: str) -> bool:
    """Whether a parquet or arrow file has rows; also where it cannot be read: loading it says why."""
    with suppress(*LOADING_ERRORS):
        if os.path.getsize(table) > MAX_EMPTY_TABLE_BYTES:
            return True
        return count_rows(table) > 0
    return True


def count_rows(table: str) -> int:
    """Number of rows of a parquet or arrow file."""
    if extension_of(table) == ".parquet":
        return pq.read_metadata(table).num_rows
    with pa.memory_map(table) as file:
        return sum(batch.num_rows for batch in open_arrow(file))


def open_arrow(file: pa.MemoryMappedFile) -> pa.RecordBatchReader:
    """A reader of an arrow file, in either of its formats: `datasets` reads both."""
    try:
        return pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        reader = pa.ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
        return pa.RecordBatchReader.from_batches(reader.schema, batches)


def first_row(table: str) -> dict[str, Any]:
    """The first row of a parquet or arrow file; {}: it has none."""
    if extension_of(table) == ".parquet":
        with pq.ParquetFile(table) as file:
            batch = next(file.iter_batches(batch_size=1), None)
            return batch.to_pylist()[0] if batch else {}
    with pa.memory_map(table) as file:
        batch = next(open_arrow(file), None)
        return batch.slice(0, 1).to_pylist()[0] if batch else {}


def refuse_other_columns(files: list[str], streaming: bool) -> None:
    """Refuse tables of one split that `datasets` would load wrongly, by the first one's classes, or not at all.

    Of a stream some are compared, and damaged ones are left for its reader to name.

    Raises:
        UserError: a file declares other classes than the first, or another order of these, or has more columns.
    """
    first_names: dict[str, list[str]] = {}
    first_columns: set[str] | None = None
    for file in files[:: max(1, len(files) // STREAMED_FILES_COMPARED)] if streaming else files:
        try:
            features = read_features(file)
        except (OSError, pa.ArrowException) as error:
            if streaming:
                continue
            raise ValueError(f"{file}: {one_line(error)}") from error
        first_columns = first_columns or {*features}
        more = sorted(features.keys() - first_columns)
        if more:
            rule = "tables of a split must have the same columns"
            raise UserError(f"{file} has columns that {files[0]} lacks ({shortened(more)}): {rule}")
        for column, feature in features.items():
            names = getattr(feature, "names", None)
            if names is not None and first_names.setdefault(column, names) != names:
                raise UserError(f"{file} declares other classes in {column} than {files[0]}, or another order of these")


def resolve_relative_paths(rows: datasets.Dataset, tables: list[str], text_column: str | None) -> datasets.Dataset:
    """Rows whose paths of image files are absolute.

    Args:
        tables: that the rows are of, one after the other; relative paths start from the folder of their table.
        text_column: has paths also where its type is text.
    """
    columns = rows.column_names
    for column in columns:
        paths = relative_paths(rows, column, column == text_column)
        if paths is None:
            continue
        folders = folders_of_rows(tables, len(rows))
        cells = path_column([path and from_folder(path, folder) for path, folder in zip(paths, folders, strict=True)])
        found = f"{column} found"  # added first: a table without columns has no rows
        rows = rows.add_column(found, cells, feature=datasets.Image(decode=False))
        rows = rows.remove_columns([column]).rename_column(found, column)
    return rows.select_columns(columns)


def refuse_relative_paths(tables: list[str]) -> None:
    """Refuse to stream tables whose images are relative paths: a row of a stream does not say its table's folder.

    The first row of the first one tells, if it can be read.
    """
    row: dict[str, Any] = {}
    with suppress(*LOADING_ERRORS):
        row = first_row(tables[0])
    for column, cell in row.items():
        is_path = isinstance(cell, dict) and {*cell} == {"bytes", "path"} and cell["bytes"] is None
        if is_path and cell["path"] and is_relative(cell["path"]):
            advice = "leave out data.streaming, or make shards by mpp prepare"
            raise UserError(f"{tables[0]} has relative paths of images ({column}: {cell['path']}): {advice}")


def relative_paths(rows: datasets.Dataset, column: str, may_be_text: bool) -> list[str | None] | None:
    """The paths in a column of images without bytes, if some are relative; None: it is another column."""
    has_cells = is_cell(rows.features[column])
    has_texts = may_be_text and getattr(rows.features[column], "dtype", None) in TEXT_TYPES
    if not (has_cells or has_texts) or len(rows) == 0:
        return None
    cells = column_of(rows, column)
    if has_cells and pc.struct_field(cells, "bytes").null_count < len(cells):
        return None
    paths = (pc.struct_field(cells, "path") if has_cells else cells).to_pylist()
    return paths if any(is_relative(path) for path in paths if path) else None


def is_relative(path: str) -> bool:
    """Whether a path in a table is neither absolute nor a URL."""
    return not is_url(path) and not os.path.isabs(path)


def folders_of_rows(tables: list[str], count: int) -> list[str]:
    """The folder of each row's table.

    Args:
        count: number of rows of all tables.
    """
    folders = [os.path.dirname(table) for table in tables]
    if len({*folders}) == 1:
        return folders[:1] * count
    return list(
        chain.from_iterable(repeat(folder, count_rows(table)) for folder, table in zip(folders, tables, strict=True))
    )


def from_folder(path: str, folder: str) -> str:
    """A path of a file that starts from a folder, unless it is absolute or a URL."""
    return os.path.join(folder, path) if is_relative(path) else path
