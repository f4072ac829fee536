"""Lists of images: tables that say which files count, and what they show.

`metadata.csv`, `labels.csv` and the like stand in a folder of images, and name files from there on; `data.labels` is
one anywhere. Cells are text as it stands: only a blank is no value.
"""

import codecs
import csv
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from mpp.config import ImagesConfig
from mpp.data.listing.formats import ending
from mpp.errors import UserError, one_line

FILE_COLUMNS = ("file_name", "filename", "file", "path", "image")
"""Columns that name images' files, the first of these that a list has, in small or capital letters."""
USUAL = ("label", "split")
OTHER_FILES = "_file_name"
"""End of a column's name that holds names of other files, such as masks: `mask_file_name` becomes `mask`."""
DELIMITERS = (",", ";", "\t")
NAMES = 3  # files in a message
csv.field_size_limit(2**31 - 1)
Column = list[Any]


@dataclass
class ImageList:
    """A list of images as its file has it."""

    path: str
    columns: dict[str, Column]
    """All but that of the files; text where the file has text alone."""
    files: Column
    """What it calls each file."""
    others: dict[str, Column]
    """Other files of each image, such as masks, by the name of their column."""

    def __len__(self) -> int:
        return len(self.files)


def read_list(path: str, config: ImagesConfig, mask_column: str | None = None) -> ImageList | None:
    """A list of images.

    Args:
        mask_column: the column of masks, which holds names of files, too.
    Returns:
        None: no column of this table names files, and nothing says that it is a list of images.
    Raises:
        UserError: it cannot be read, or names no files.
    """
    columns = read_table(path, config)
    column = find_file_column(columns, config.file_column)
    if column is None:
        is_one = config.labels is not None or os.path.basename(path).lower().startswith("metadata")
        if is_one or config.file_column is not None:
            named = f"data.file_column is {config.file_column}; " if config.file_column else ""
            has = ", ".join(columns) or "nothing"
            raise UserError(f"{named}{path} has the columns {has}; data.file_column must say which names the files")
        return None
    files = columns.pop(column)
    columns = {as_usual(name, columns): values for name, values in columns.items()}
    others = {}
    for name in list(columns):
        what = name[: -len(OTHER_FILES)] if name.lower().endswith(OTHER_FILES) else name
        if what != name or what == mask_column:
            others[what] = columns.pop(name)
    return ImageList(path, columns, files, others)


def as_usual(name: str, columns: dict[str, Column]) -> str:
    """The name of a column, `label` and `split` in small letters."""
    return name.lower() if name.lower() in USUAL and name.lower() not in columns else name


def find_file_column(columns: Iterable[str], named: str | None) -> str | None:
    """The column that names images' files: the one that is named, or the first of FILE_COLUMNS."""
    if named is not None:
        return named if named in columns else None
    spelled = {name.lower().replace(" ", "_").replace("-", "_"): name for name in columns}
    return next((spelled[name] for name in FILE_COLUMNS if name in spelled), None)


def read_table(path: str, config: ImagesConfig) -> dict[str, Column]:
    """The columns of a table: CSV (`,` or `;`), TSV, JSON lines or parquet.

    Raises:
        UserError: it cannot be read as that.
    """
    end = ending(path)
    readers: dict[str, Callable[[], dict[str, Column]]] = {
        ".csv": lambda: read_csv(path, config.labels_encoding, config.file_column),
        ".tsv": lambda: read_csv(path, config.labels_encoding, config.file_column),
        ".jsonl": lambda: read_json_lines(path, config.labels_encoding),
        ".parquet": lambda: pq.read_table(path).to_pydict(),
    }
    if end not in readers:
        raise UserError(f"{path} is no list of images; it must end in {', '.join(readers)}")
    try:
        return readers[end]()
    except UnicodeError as error:
        usual = "utf-16" if begins_as_utf_16(path) else "latin-1"
        how = f"it is not {config.labels_encoding}; data.labels_encoding names its encoding, such as {usual}"
        raise UserError(f"{path} cannot be read: {how} ({one_line(error)})") from error
    except LookupError as error:
        raise UserError(
            f"data.labels_encoding is {config.labels_encoding}, which is no encoding: {one_line(error)}"
        ) from error
    except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def begins_as_utf_16(path: str) -> bool:
    """Whether a file has the mark of UTF-16, as Excel's Unicode text."""
    with open(path, "rb") as file:
        return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def without_mark(encoding: str) -> str:
    """The encoding that reads the same text without a byte order mark."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def delimiter_of(file: TextIO, file_column: str | None) -> str:
    """What is between the columns of a CSV file: what makes one of them name files, and the most of them. Names of
    columns may have commas and the like in them."""

    def fits(delimiter: str) -> tuple[bool, int]:
        file.seek(0)
        names = [name.strip() for name in next(csv.reader(file, delimiter=delimiter), [])]
        return find_file_column(names, file_column) is not None, len(names)

    found = max(DELIMITERS, key=fits)
    file.seek(0)
    return found


def read_csv(path: str, encoding: str, file_column: str | None) -> dict[str, Column]:
    """The columns of a CSV file, all of text; a blank cell is None."""
    with open(path, encoding=without_mark(encoding), newline="") as file:
        delimiter = delimiter_of(file, file_column)
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        names = [name.strip() for name in next(rows, [])]
        twice = sorted({name for name in names if name and names.count(name) > 1})
        if twice:
            raise ValueError(f"it has the column {twice[0]} twice")
        columns: list[Column] = [[] for _ in names]
        for row in rows:
            if not any(map(str.strip, row)):
                continue
            if len(row) > len(names) and any(map(str.strip, row[len(names) :])):
                raise ValueError(f"line {rows.line_num} has {len(row)} cells, and the first line {len(names)}")
            row += [""] * (len(names) - len(row))
            for column, cell in zip(columns, row, strict=False):
                column.append(cell if cell.strip() else None)
    return {name: column for name, column in zip(names, columns, strict=True) if name}


def read_json_lines(path: str, encoding: str) -> dict[str, Column]:
    """The columns of a file of JSON objects, a line each."""
    rows: list[dict[str, Any]] = []
    with open(path, encoding=without_mark(encoding)) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is no JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no object such as {{...}}")
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def as_label(value: Any) -> Any:
    """A label as text, or as a list of texts; None: a blank.

    Whole numbers are written as integers: tables with blanks turn them to floating point.
    """
    if isinstance(value, list | tuple):
        return [text for text in map(as_label, value) if text is not None]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    text = str(value)
    return text if text.strip() else None


def label_column(values: Iterable[Any]) -> list[Any]:
    """A column of labels: texts, or lists of texts where one of them is a list."""
    labels = [as_label(value) for value in values]
    if any(isinstance(label, list) for label in labels):
        return [label if isinstance(label, list) else [] if label is None else [label] for label in labels]
    return labels
