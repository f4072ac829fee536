"""Lists of images: tables of file names, with the labels and splits of the files.

`metadata.csv`, `labels.csv` and the like stand in a folder of images, and name files from there on; `data.labels` is
one anywhere. Cells are text as it stands, but for spaces around a label: only a blank is no value.
"""

import codecs
import csv
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from mpp.config import ImagesConfig
from mpp.data.listing.formats import extension_of
from mpp.errors import UserError, did_you_mean, one_line

FILE_COLUMNS = ("file_name", "filename", "file", "path", "image")
"""Usual names of the column that names the files, in order of preference, in small or capital letters."""
LOWERED_COLUMNS = ("label", "split")
OTHER_FILES_SUFFIX = "_file_name"
"""End of a column's name that holds names of other files, such as masks: `mask_file_name` becomes `mask`."""
DELIMITERS = (",", ";", "\t")
TABLE_FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LONGEST_CELL = 2**31 - 1
Column = list[Any]


@dataclass
class ImageList:
    """The columns of a list of images, all of the same length."""

    path: str
    folder: str
    """Folder in which its names start, from the top of the tree."""
    columns: dict[str, Column]
    """All columns but those of file names; as text if the file holds only text."""
    files: Column
    """Name of each image's file, as it is written."""
    others: dict[str, Column]
    """Names of other files of each image, such as masks."""


def read_list(path: str, folder: str, config: ImagesConfig) -> ImageList | None:
    """A list of images, whose names start in `folder`.

    Returns:
        None: no column of this table names files, and neither its name nor a setting says that it is a list of images.
    Raises:
        UserError: it cannot be read, or names no files.
    """
    columns = read_table(path, config)
    file_column = find_file_column(columns, config.file_column)
    if file_column is None:
        refuse_without_files(path, columns, config)
        return None
    files = columns.pop(file_column)
    others = {}
    own_columns = {}
    for written_name, values in columns.items():
        name = written_name if written_name in named_label_columns(config) else lowered(written_name, columns)
        if name.lower().endswith(OTHER_FILES_SUFFIX):
            others[name[: -len(OTHER_FILES_SUFFIX)]] = values
        elif name == config.mask_column:
            others[name] = values
        else:
            own_columns[name] = values
    return ImageList(path, folder, own_columns, files, others)


def refuse_without_files(path: str, columns: dict[str, Column], config: ImagesConfig) -> None:
    """Raise UserError if a table without a column of file names has to be a list of images."""
    is_metadata = os.path.basename(path).lower().startswith("metadata")
    if config.labels is None and config.file_column is None and not is_metadata:
        return
    setting = f"data.file_column is {config.file_column}; " if config.file_column else ""
    available = ", ".join(columns) or "nothing"
    rename = ", or the table another name, if it lists no images" if is_metadata and config.labels is None else ""
    advice = f"data.file_column must name the column of file names{rename}"
    raise UserError(f"{setting}{path} has the columns {available}; {advice}")


def lowered(name: str, columns: dict[str, Column]) -> str:
    """The name of a column, `label` and `split` in small letters."""
    lower = name.lower()
    return lower if lower in LOWERED_COLUMNS and lower not in columns else name


def find_file_column(columns: Iterable[str], setting: str | None) -> str | None:
    """The column that names the images' files: that of the setting, or the first of FILE_COLUMNS; None: there is none.

    Args:
        setting: `data.file_column`.
    """
    if setting is not None:
        return setting if setting in columns else None
    by_spelling = {name.lower().replace(" ", "_").replace("-", "_"): name for name in columns}
    for usual in FILE_COLUMNS:
        if usual in by_spelling:
            return by_spelling[usual]
    return None


def read_table(path: str, config: ImagesConfig) -> dict[str, Column]:
    """The columns of a table: CSV (`,` or `;`), TSV, JSON lines or parquet.

    Raises:
        UserError: it cannot be read as that.
    """
    encoding = config.labels_encoding
    extension = extension_of(path)
    if extension not in TABLE_FORMATS:
        raise UserError(f"{path} is not a list of images; its name must end in {', '.join(TABLE_FORMATS)}")
    try:
        if extension == ".parquet":
            return pq.read_table(path).to_pydict()
        if extension == ".jsonl":
            return read_json_lines(path, encoding)
        return read_csv(path, encoding, config.file_column)
    except UnicodeError as error:
        likely = "utf-16" if begins_as_utf_16(path) else "latin-1"
        advice = f"it is not {encoding}; data.labels_encoding names its encoding, such as {likely}"
        raise UserError(f"{path} cannot be read: {advice} ({one_line(error)})") from error
    except LookupError as error:
        raise UserError(f"data.labels_encoding is {encoding}, which is not an encoding: {one_line(error)}") from error
    except FileNotFoundError:
        raise UserError(f"data.labels is {path}, which does not exist{did_you_mean(path)}") from None
    except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def begins_as_utf_16(path: str) -> bool:
    """Whether a file has the byte order mark of UTF-16, as Excel's Unicode text."""
    with open(path, "rb") as file:
        return file.read(2) in UTF_16_MARKS


def skipping_mark(encoding: str) -> str:
    """The encoding that reads the same text without a byte order mark."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def find_delimiter(file: TextIO, file_column: str | None) -> str:
    """The delimiter of a CSV file: one that makes a column of file names, and then the most columns.

    Names of columns may have commas and the like in them.
    """

    def fit(delimiter: str) -> tuple[bool, int]:
        file.seek(0)
        header = next(csv.reader(file, delimiter=delimiter), [])
        names = [name.strip() for name in header]
        return find_file_column(names, file_column) is not None, len(names)

    delimiter = max(DELIMITERS, key=fit)
    file.seek(0)
    return delimiter


@contextmanager
def long_cells() -> Iterator[None]:
    """While open, csv reads cells of any length."""
    limit = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def read_csv(path: str, encoding: str, file_column: str | None) -> dict[str, Column]:
    """The columns of a CSV file, all of text; a blank cell is None."""
    with open(path, encoding=skipping_mark(encoding), newline="") as file, long_cells():
        rows = csv.reader(file, delimiter=find_delimiter(file, file_column), strict=True)
        numbered_rows = read_rows(rows)
        names = [name.strip() for name in next(numbered_rows, [])]
        repeated = sorted(name for name in {*names} if name and names.count(name) > 1)
        if repeated:
            raise ValueError(f"it has the column {repeated[0]} twice")
        columns: list[Column] = [[] for _ in names]
        for row in numbered_rows:
            if all_blank(row):
                continue
            if not all_blank(row[len(names) :]):
                raise ValueError(f"line {rows.line_num} has {len(row)} cells, and the first line {len(names)}")
            row += [""] * (len(names) - len(row))
            for column, cell in zip(columns, row, strict=False):
                column.append(cell if cell.strip() else None)
    return {name: column for name, column in zip(names, columns, strict=True) if name}


def read_rows(rows: Any) -> Iterator[list[str]]:
    """The rows of a reader of csv, whose errors name the line at which the row begins.

    Raises:
        ValueError: a row cannot be read, such as one with a quote that nothing closes.
    """
    while True:
        first_line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"the row of line {first_line}: {error}") from error
        yield row


def all_blank(cells: list[str]) -> bool:
    """Whether no cell has text."""
    return not any(cell.strip() for cell in cells)


def read_json_lines(path: str, encoding: str) -> dict[str, Column]:
    """The columns of a file of JSON objects, a line each."""
    rows: list[dict[str, Any]] = []
    with open(path, encoding=skipping_mark(encoding)) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {line_number} is not JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {line_number} is not an object such as {{...}}")
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def named_label_columns(config: ImagesConfig) -> set[str]:
    """The columns of labels that settings name."""
    return {config.label_column, config.eval_label_column} - {None}


def to_label(value: Any) -> Any:
    """A label as text without spaces around it, or as a list of such texts; None: a blank.

    Whole numbers are written as integers: tables with blanks turn them to floating point.
    """
    if isinstance(value, list | tuple):
        texts = [to_label(str(each) if isinstance(each, list) else each) for each in value]
        return [text for text in texts if text is not None]
    if value is None:
        return None
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if value.is_integer():
            value = int(value)
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    return str(value).strip() or None


def to_label_column(values: Iterable[Any]) -> list[Any]:
    """Labels of images: all texts, or, where one is a list, all lists of texts; None: an image has no label."""
    labels = [to_label(value) for value in values]
    if any(isinstance(label, list) for label in labels):
        return [label if label is None or isinstance(label, list) else [label] for label in labels]
    return labels
