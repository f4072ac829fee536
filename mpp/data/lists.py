"""Lists of images, such as `metadata.csv`, and the images of a folder by its lists and the names of its folders.

Cells of CSV are text as it stands, but for spaces around a label: only a blank is no value.
"""

import codecs
import csv
import itertools
import json
import os
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mpp.config import ImagesConfig
from mpp.data.folder import Tree, ending_of, find_places, split_of_cell
from mpp.data.listing import IMAGE, LABEL, SPLIT, Listing
from mpp.errors import UserError, did_you_mean, one_line
from mpp.runtime.messages import shortened

FILE_COLUMNS = ("file_name", "filename", "file", "path", "image")
"""Usual names of the column that names the files, in order of preference, in small or capital letters."""
OTHER_FILES_SUFFIX = "_file_name"
"""End of a column's name that holds names of other files, such as masks: `mask_file_name` becomes `mask`."""
LIST_FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
Columns = dict[str, list[Any]]


def list_images(tree: Tree, config: ImagesConfig) -> Listing:
    """The images of a folder: those that its lists name, and those of folders without a list.

    Where lists have no value, folders are splits and classes.

    Raises:
        UserError: a list cannot be read, names files that are not there, or contradicts itself.
    """
    paths = tree.paths()
    lists = find_lists(tree, config)
    label = config.label_column or LABEL
    label = label if any(label in table for table in lists.values()) else LABEL
    columns: Columns = {label: [None] * len(paths), SPLIT: [None] * len(paths)}
    is_listed = [False] * len(paths)
    left_out: set[int] = set()  # masks, and images that their list does not name
    for path, table in lists.items():
        rows, others = match_rows(tree, path, table, paths, config)
        unnamed = unnamed_images(tree, path, rows.keys() | others, paths, config)
        tree.leave_out(f"images that {os.path.basename(path)} does not name", *(paths[index] for index in unnamed))
        left_out |= others.difference(rows) | {*unnamed}
        for name, values in table.items():
            column = columns.setdefault(name, [None] * len(paths))
            for index, row in rows.items():
                column[index] = split_of_cell(values[row]) if name == SPLIT else values[row]
        if label in table:
            for index in rows:
                is_listed[index] = True

    folders = [folder for folder, names in tree.images.items() for _ in names]
    kept = [index for index in range(len(paths)) if index not in left_out] if left_out else range(len(paths))
    if all(map(is_listed.__getitem__, kept)):
        config = replace(config, label_folder="inner")  # the lists have all labels: no matter which
    places = find_places(dict.fromkeys(folders[index] for index in kept), config)
    labels, splits = columns[label], columns[SPLIT]
    for index in kept:
        place = places[folders[index]]
        splits[index] = splits[index] or place.split
        if not is_listed[index]:
            labels[index] = place.name
    if lists:
        columns[label] = to_label_column(labels)
    beside = [paths[index] for index in kept if splits[index] is None]
    if beside:
        tree.leave_out("images in no split's folder", *beside)
        kept = [index for index in kept if splits[index] is not None]
    columns = {IMAGE: paths} | columns
    if len(kept) < len(paths):
        columns = {name: [values[index] for index in kept] for name, values in columns.items()}
    columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    listing = Listing(columns, {IMAGE, config.mask_column} & columns.keys())
    unused = sorted(columns.keys() - {IMAGE, SPLIT, LABEL, config.mask_column})
    if lists and unused and LABEL in columns and not any(is_listed):
        listing.lines.append(f"classes are folders; data.label_column may name one of {shortened(unused)}")
    return listing


def unnamed_images(tree: Tree, path: str, named: set[int], paths: list[str], config: ImagesConfig) -> list[int]:
    """Indices of the images in the folder of a list that it does not name."""
    start = list_folder(tree, path, config)
    return [index for index, image in enumerate(paths) if image.startswith(start) and index not in named]


def find_lists(tree: Tree, config: ImagesConfig) -> dict[str, Columns]:
    """Path -> columns of the lists of a tree, or of that of `data.labels`; at most one is about any image.

    The column of file names is IMAGE.
    """
    if config.labels is not None:
        named = os.path.abspath(os.path.expanduser(config.labels))
        others = [
            name for name in tree.lists if os.path.realpath(os.path.join(tree.root, name)) != os.path.realpath(named)
        ]
        if others:
            tree.leave_out("lists other than data.labels", *others)
        return {named: read_list(named, config)}
    lists: dict[str, Columns] = {}
    for name in tree.lists:
        table = read_list(os.path.join(tree.root, name), config)
        if table is None:
            tree.leave_out("tables without a column of file names (data.file_column names one)", name)
        else:
            lists[os.path.join(tree.root, name)] = table
    if config.file_column and not lists:
        problem = f"data.file_column is {config.file_column}; {tree.root} has no list of images with such a column"
        raise UserError(problem)
    folders = sorted(os.path.join(os.path.dirname(path), "") for path in lists)
    if any(inner.startswith(outer) for outer, inner in itertools.pairwise(folders)):
        raise UserError(
            f"{shortened([*lists])} are lists of the same images; data.labels must name the one that counts"
        )
    return lists


def list_folder(tree: Tree, path: str, config: ImagesConfig) -> str:
    """The folder that a list is about, ending in /."""
    return os.path.join(tree.root if config.labels is not None else os.path.dirname(path), "")


def match_rows(
    tree: Tree, path: str, table: Columns, paths: list[str], config: ImagesConfig
) -> tuple[dict[int, int], set[int]]:
    """Index of each image that a list names -> its row; and indices of other files that it names, such as masks.

    Columns of other files lose the end of their name; those of masks have paths then.
    """
    finder = Finder(tree, path, paths, config)
    names = table.pop(IMAGE)
    images = [finder.find(name) for name in names]
    missing = [f"row {row + 1} names none" if names[row] is None else str(names[row]) for row in unfound(images)]
    others: set[int] = set()
    for column in [*table]:
        is_mask = column == config.mask_column
        if not (is_mask or column.lower().endswith(OTHER_FILES_SUFFIX)):
            continue
        values = table.pop(column)
        name = column if is_mask else column[: -len(OTHER_FILES_SUFFIX)]
        found = [finder.find(value) for value in values]
        others |= {index for index in found if index is not None}
        if name == config.mask_column:
            missing += [str(values[row]) for row in unfound(found) if values[row] is not None]
            table[name] = [None if index is None else paths[index] for index in found]
    if missing:
        if config.missing == "refuse":
            start = "the list's folder" if config.labels is None else "data.path or the list's folder"
            advice = f"names start from {start}; mend the list, or set data.missing skip"
            what = f"names {len(missing)} that are no images in {tree.root}, or the name of several"
            raise UserError(f"{path} {what}: {shortened(missing)}; {advice}")
        tree.leave_out("files that a list names and that are not there", *missing)
    listed: dict[int, int] = {}
    for row, index in enumerate(images):
        if index is not None:
            first = listed.setdefault(index, row)
            for name in {SPLIT, config.label_column or LABEL, config.eval_label_column} & table.keys():
                if table[name][first] != table[name][row]:
                    found = f"{table[name][first]} and {table[name][row]}"
                    raise UserError(f"{path} has two rows of {paths[index]}, with {name} {found}; leave one")
    return listed, others


def unfound(indices: list[int | None]) -> list[int]:
    """Rows without an index."""
    return [row for row, index in enumerate(indices) if index is None]


class Finder:
    """Images by the names that a list has for them.

    They start from the list's folder (with `data.labels` from `data.path` or from there). `\\` is `/`; composed and
    decomposed letters are the same; the ending may be missing, and so may the folders, where one file has the name.

    Args:
        paths: of the images, absolute.
    """

    def __init__(self, tree: Tree, path: str, paths: list[str], config: ImagesConfig):
        self.starts = [*dict.fromkeys((list_folder(tree, path, config), os.path.dirname(path) + "/"))]
        self.real_root = os.path.join(os.path.realpath(tree.root), "")
        self.root = os.path.join(tree.root, "")
        self.paths = paths
        self.by_path = {path: index for index, path in enumerate(paths)}
        self.by_spelling: dict[str, int | None] | None = None
        """None instead of an index: several files have the name."""

    def find(self, name: Any) -> int | None:
        """The index of an image; None: it is not there, or several have the name."""
        if name is None:
            return None
        places = [self.place(start, str(name)) for start in self.starts]
        for place in places:
            if place in self.by_path:
                return self.by_path[place]
        if self.by_spelling is None:  # made only for lists that need it: it is large
            self.by_spelling = self.spell()
        for start in self.starts:
            index = self.by_spelling.get(compose(self.place(start, str(name).strip().replace("\\", "/"))))
            if index is not None:
                return index
        return None

    def place(self, start: str, name: str) -> str:
        """The absolute path of a name, seen through the same links as the images."""
        place = os.path.normpath(os.path.join(start, name))
        return self.root + place.removeprefix(self.real_root) if place.startswith(self.real_root) else place

    def spell(self) -> dict[str, int | None]:
        """Other spellings of the images' paths -> their indices."""
        spelled: dict[str, int | None] = {}
        bare: dict[str, int | None] = {}
        for index, path in enumerate(self.paths):
            path = compose(path)
            names = {path, path.removesuffix(os.path.splitext(path)[1]) if ending_of(path) else path}
            for name in names:
                spelled[name] = index if spelled.setdefault(name, index) == index else None
                for start in self.starts:
                    name = start + os.path.basename(name)
                    bare[name] = index if bare.setdefault(name, index) == index else None
        return bare | spelled


def compose(text: str) -> str:
    """Text with composed letters: one character for a letter and its accent."""
    return unicodedata.normalize("NFC", text)


def read_list(path: str, config: ImagesConfig) -> Columns | None:
    """The columns of a list: that of file names is IMAGE, and labels are as `to_label` has them.

    Returns:
        None: no column of this table names files, and neither its name nor a setting says that it is a list of images.
    Raises:
        UserError: it cannot be read, or names no files.
    """
    columns = read_table(path, config)
    label_columns = {LABEL, config.label_column, config.eval_label_column}
    files = find_file_column(columns, config.file_column)
    if files is None:
        is_metadata = os.path.basename(path).lower().startswith("metadata")
        if config.labels is None and config.file_column is None and not is_metadata:
            return None
        advice = "data.file_column must name the column of file names (or rename the table, if it lists no images)"
        raise UserError(f"{path} has the columns {', '.join(columns) or 'nothing'}; {advice}")
    table = {IMAGE: columns.pop(files)}
    for written, values in columns.items():
        lower = written.lower()
        name = lower if lower in (LABEL, SPLIT) and lower not in columns and written not in label_columns else written
        if name == IMAGE:
            continue  # another column of files
        table[name] = to_label_column(values) if name in label_columns else values
    return table


def find_file_column(columns: Iterable[str], setting: str | None) -> str | None:
    """The column that names the images' files: that of the setting, or the first of FILE_COLUMNS; None: there is none.

    Args:
        setting: `data.file_column`.
    """
    if setting is not None:
        return setting if setting in columns else None
    by_name = {name.lower().replace(" ", "_"): name for name in columns}
    return next((by_name[name] for name in FILE_COLUMNS if name in by_name), None)


def read_table(path: str, config: ImagesConfig) -> Columns:
    """The columns of a table: CSV (`,`, `;` or tabs), JSON lines or parquet.

    Raises:
        UserError: it cannot be read as that.
    """
    ending = ending_of(path)
    try:
        if ending not in LIST_FORMATS:
            raise ValueError(f"the name of a list must end in {', '.join(LIST_FORMATS)}")
        if ending == ".parquet":
            return pq.read_table(path).to_pydict()
        encoding = "utf-8-sig" if codecs.lookup(config.labels_encoding).name == "utf-8" else config.labels_encoding
        with open(path, encoding=encoding, newline="") as file:
            return read_json_lines(file) if ending == ".jsonl" else read_csv(file, config.file_column)
    except UnicodeError as error:
        advice = "data.labels_encoding must name its encoding, such as latin-1 or utf-16"
        raise UserError(f"{path} is not {config.labels_encoding}; {advice}") from error
    except LookupError as error:
        raise UserError(f"data.labels_encoding is {config.labels_encoding}; it must be an encoding") from error
    except FileNotFoundError:
        raise UserError(f"data.labels is {path}, which does not exist{did_you_mean(path)}") from None
    except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def read_csv(file: Any, file_column: str | None) -> Columns:
    """The columns of a CSV file, all of text; a blank cell is None."""
    csv.field_size_limit(2**31 - 1)

    def header(delimiter: str) -> list[str]:
        file.seek(0)
        return [name.strip() for name in next(csv.reader(file, delimiter=delimiter), [])]

    # The delimiter makes a column of file names, and then the most columns: names may have commas in them.
    delimiter = max(
        ",;\t", key=lambda each: (find_file_column(header(each), file_column) is not None, len(header(each)))
    )
    names = header(delimiter)
    repeated = [name for name in names if name and names.count(name) > 1]
    if repeated:
        raise ValueError(f"it has the column {repeated[0]} twice")
    file.seek(0)
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    columns: list[list[Any]] = [[] for _ in names]
    for number, row in enumerate(numbered(rows)):
        if number == 0 or not any(map(str.strip, row)):
            continue
        if any(map(str.strip, row[len(names) :])):
            raise ValueError(f"line {rows.line_num} has {len(row)} cells, and the first line {len(names)}")
        for column, cell in zip(columns, row + [""] * len(names), strict=False):
            column.append(cell if cell.strip() else None)
    return {name: column for name, column in zip(names, columns, strict=True) if name}


def numbered(rows: Any) -> Iterator[list[str]]:
    """The rows of a reader of csv, whose errors name the line at which the row begins."""
    first_line = 1
    try:
        for row in rows:
            yield row
            first_line = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(f"the row of line {first_line}: {error}") from error


def read_json_lines(file: Iterable[str]) -> Columns:
    """The columns of a file of JSON objects, a line each."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                rows.append(dict(json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"line {number} is not a JSON object: {one_line(error)}") from error
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def to_label(value: Any) -> Any:
    """A label as text without spaces around it, or as a list of such texts; None: a blank. 1.0 is 1."""
    if isinstance(value, list | tuple):
        texts = [to_label(str(each) if isinstance(each, list) else each) for each in value]
        return [text for text in texts if text is not None]
    if value is None or value != value:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # tables with blanks turn integers to floating point
    return str(value).strip() or None


def to_label_column(values: Iterable[Any]) -> list[Any]:
    """Labels of images: all texts, or, where one is a list, all lists of texts; None: an image has no label."""
    labels = [to_label(value) for value in values]
    if any(isinstance(label, list) for label in labels):
        return [label if label is None or isinstance(label, list) else [label] for label in labels]
    return labels
