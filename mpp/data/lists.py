"""Lists of images, such as `metadata.csv`, and the images of a folder by its lists and the names of its folders.

Cells of CSV are text as it stands, but for spaces around a label: only a blank is no value.
"""

import codecs
import itertools
import json
import os
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TextIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mpp.config import ImagesConfig
from mpp.data.folder import Tree, ending_of, find_places, split_of_cell
from mpp.data.listing import IMAGE, LABEL, SPLIT, Listing
from mpp.errors import UserError, did_you_mean, one_line
from mpp.runtime.messages import printable, shortened

FILE_COLUMNS = ("file_name", "filename", "file", "path", "image")
"""Usual names of the column that names the files, in order of preference, in small or capital letters."""
OTHER_FILES_SUFFIX = "_file_name"
"""End of a column's name that holds names of other files, such as masks: `mask_file_name` becomes `mask`."""
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

    Columns of other files are dropped; that of masks has paths then, or None where there is none.
    """
    starts = [*dict.fromkeys((list_folder(tree, path, config), os.path.dirname(path) + "/"))]
    names = table.pop(IMAGE)
    images = find_files(names, starts, paths, tree.root)
    missing = [str(name) for name, index in zip(names, images, strict=True) if index is None]
    others: set[int] = set()
    for column in [*table]:
        is_suffixed = column.lower().endswith(OTHER_FILES_SUFFIX)
        name = column[: -len(OTHER_FILES_SUFFIX)] if is_suffixed else column
        if not is_suffixed and name != config.mask_column:
            continue
        values = table.pop(column)
        found = find_files(values, starts, paths, tree.root)
        others |= {index for index in found if index is not None}
        if name == config.mask_column:
            missing += [value for value, index in zip(values, found, strict=True) if value and index is None]
            table[name] = [None if index is None else paths[index] for index in found]
    if missing and config.missing == "refuse":
        start = "the list's folder" if config.labels is None else "data.path or the list's folder"
        advice = f"names start from {start}; mend the list, or set data.missing skip"
        what = f"names {len(missing)} that are no images in {tree.root}, or the name of several"
        raise UserError(f"{path} {what}: {shortened(missing)}; {advice}")
    tree.leave_out("files that a list names and that are not there", *missing)
    rows: dict[int, int] = {}
    labels = {SPLIT, config.label_column or LABEL, config.eval_label_column} & table.keys()
    for row, index in enumerate(images):
        first = row if index is None else rows.setdefault(index, row)
        for name in labels:
            if table[name][first] != table[name][row]:
                values = f"{table[name][first]} and {table[name][row]}"
                raise UserError(f"{path} has two rows of {paths[index]}, with {name} {values}; leave one")
    return rows, others


def find_files(names: list[Any], starts: list[str], paths: list[str], root: str) -> list[int | None]:
    """The index of the image that each name of a list means; None: it is not there, or several have the name.

    `\\` is `/`; composed and decomposed letters are the same; the ending may be missing, and so may the folders, where
    one file has the name.

    Args:
        starts: folders in which names start.
        paths: of the images, absolute.
        root: the folder of all of them.
    """
    known: dict[str, int | None] = {path: index for index, path in enumerate(paths)}
    real_root = os.path.realpath(root)  # through which absolute names may lead

    def look_up(names: Iterable[str]) -> list[int | None]:
        found = []
        for name in names:
            places = [os.path.normpath(start + name if name[:1] != "/" else name) for start in starts]
            places += [root + place.removeprefix(real_root) for place in places if place.startswith(real_root)]
            found.append(next((known[place] for place in places if known.get(place) is not None), None))
        return found

    found = look_up(str(name or "") for name in names)
    if all(index is not None for name, index in zip(names, found, strict=True) if name):
        return found
    for index, path in enumerate(paths):  # only for lists that need it: it is large
        for spelling in spellings(path, starts):
            if known.setdefault(spelling, index) != index:
                known[spelling] = None
    others = look_up(compose(str(name or "").strip().replace("\\", "/")) for name in names)
    return [other if index is None else index for index, other in zip(found, others, strict=True)]


def spellings(path: str, starts: list[str]) -> Iterator[str]:
    """Other ways in which a list may name an image: without its ending, or its folders."""
    path = compose(path)
    for name in (path, path[: len(path) - len(ending_of(path))]):
        yield name
        yield from (start + os.path.basename(name) for start in starts)


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
    encoding = config.labels_encoding
    try:
        if ending == ".parquet":
            return pq.read_table(path).to_pydict()
        with open(
            path, encoding="utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding, newline=""
        ) as file:
            return read_json_lines(file) if ending == ".jsonl" else read_csv(file)
    except (UnicodeError, LookupError) as error:
        advice = "it must be the encoding of the list, such as utf-8, latin-1 or utf-16"
        raise UserError(f"data.labels_encoding is {encoding}; {path}: {one_line(error)}; {advice}") from error
    except (OSError, ValueError, TypeError, pd.errors.ParserWarning, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}{did_you_mean(path)}") from error


def read_csv(file: TextIO) -> Columns:
    """The columns of a CSV file, all of text; a blank cell is None."""
    header = file.readline()
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pandas warns of cells that it drops
        delimiter = max(",;\t", key=header.count)
        table = pd.read_csv(file, sep=delimiter, dtype=str, keep_default_na=False, index_col=False).fillna("")
    table = table[table.apply(lambda column: column.str.strip() != "").any(axis=1)]
    return {name.strip(): [cell if cell.strip() else None for cell in table[name]] for name in table}


def read_json_lines(file: Iterable[str]) -> Columns:
    """The columns of a file of JSON objects, a line each."""
    rows = [dict(json.loads(line)) for line in file if line.strip()]
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
    return printable(str(value).strip()) or None


def to_label_column(values: Iterable[Any]) -> list[Any]:
    """Labels of images: all texts, or, where one is a list, all lists of texts; None: an image has no label."""
    labels = [to_label(value) for value in values]
    if any(isinstance(label, list) for label in labels):
        return [label if label is None or isinstance(label, list) else [label] for label in labels]
    return labels
