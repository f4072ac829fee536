"""Lists of images, such as `metadata.csv`, and the images of a folder by its lists and the names of its folders.

Cells of CSV are text as it stands, but for spaces around a label: only a blank is no value.
"""

import io
import itertools
import json
import os
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

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
    count = len(tree.images)
    columns: Columns = defaultdict(lambda: [None] * count)
    columns[IMAGE] = tree.paths()
    lists = find_lists(tree, config)
    label = LABEL
    if any(config.label_column in table for table in lists.values()):
        label = config.label_column
    labelled: set[int] = set()  # images whose label a list has
    left_out: set[int] = set()  # masks, and images that their list does not name
    for path, table in lists.items():
        rows, others = match_rows(tree, path, table, config)
        start = os.path.join(list_folder(tree, path, config), "")
        below = {index for index, image in enumerate(columns[IMAGE]) if image.startswith(start)}
        unnamed = below - rows.keys() - others
        reason = f"images that {os.path.basename(path)} does not name"
        tree.leave_out(reason, *(tree.images[index] for index in unnamed))
        left_out |= unnamed | (others - rows.keys())
        for name, values in table.items():
            for index, row in rows.items():
                columns[name][index] = values[row]
        if label in table:
            labelled |= rows.keys()

    folders = {index: image[: image.rfind("/") + 1] for index, image in enumerate(tree.images) if index not in left_out}
    if labelled.issuperset(folders):
        config = replace(config, label_folder="inner")  # the lists have all labels: no matter which
    splits, classes = find_places({*folders.values()}, config)
    for index, folder in folders.items():
        columns[SPLIT][index] = columns[SPLIT][index] or splits[folder]
        if index not in labelled:
            columns[label][index] = classes.get(folder)
    if lists:
        columns[label] = to_label_column(columns[label])
    beside = [tree.images[index] for index in folders if columns[SPLIT][index] is None]
    tree.leave_out("images in no split's folder", *beside)
    return Listing(columns, {IMAGE, config.mask_column})


def find_lists(tree: Tree, config: ImagesConfig) -> dict[str, Columns]:
    """Path -> columns of the lists of a tree, or of that of `data.labels`; at most one is about any image.

    The column of file names is IMAGE.
    """
    start = os.path.join(tree.root, "")
    paths = [start + name for name in tree.lists]
    if config.labels is not None:
        named = os.path.abspath(os.path.expanduser(config.labels))
        others = [path for path in paths if os.path.realpath(path) != os.path.realpath(named)]
        tree.leave_out("lists other than data.labels", *(path.removeprefix(start) for path in others))
        paths = [named]
    tables = {path: read_list(path, config) for path in paths}
    lists = {path: table for path, table in tables.items() if IMAGE in table}
    if not lists and (config.labels or config.file_column):
        columns = shortened(sorted({name for table in tables.values() for name in table}), 9) or "none"
        raise UserError(
            f"data.file_column is {config.file_column}; "
            f"it must be the column of file names: the lists of {config.labels or tree.root} have {columns}"
        )
    unused = [path.removeprefix(start) for path in tables if path not in lists]
    tree.leave_out("tables without a column of file names (data.file_column names one)", *unused)
    folders = sorted(os.path.join(os.path.dirname(path), "") for path in lists)
    if any(inner.startswith(outer) for outer, inner in itertools.pairwise(folders)):
        raise UserError(
            f"{shortened([*lists])} are lists of the same images; data.labels must name the one that counts"
        )
    return lists


def list_folder(tree: Tree, path: str, config: ImagesConfig) -> str:
    """The folder that a list is about."""
    return os.path.dirname(path) if config.labels is None else tree.root


def match_rows(tree: Tree, path: str, table: Columns, config: ImagesConfig) -> tuple[dict[int, int], set[int]]:
    """Index of each image that a list names -> its row; and indices of other files that it names, such as masks.

    Columns of other files are dropped; that of masks has paths then, or None where there is none.
    """
    starts = [list_folder(tree, path, config), os.path.dirname(path)]
    images = find_files(table[IMAGE], starts, tree)
    missing = [str(name) for name, index in zip(table.pop(IMAGE), images, strict=True) if index is None]
    others: set[int] = set()
    for column in [*table]:
        name = column.removesuffix(OTHER_FILES_SUFFIX)
        if name in (column, IMAGE) and column != config.mask_column:
            continue
        values = table.pop(column)
        found = find_files(values, starts, tree)
        others |= {*found} - {None}
        if name == config.mask_column:
            missing += [str(value) for value, index in zip(values, found, strict=True) if value and index is None]
            table[name] = [None if index is None else os.path.join(tree.root, tree.images[index]) for index in found]
    if missing and config.missing == "refuse":
        raise UserError(
            f"{path} names {len(missing)} that are no images in {tree.root}, or the name of several: "
            f"{shortened(missing)}; mend the list, or set data.missing skip"
        )
    tree.leave_out("files that a list names and that are not there", *missing)
    rows: dict[int, int] = {}
    values = [table[name] for name in (SPLIT, config.label_column or LABEL, config.eval_label_column) if name in table]
    for row, index in enumerate(images):
        if index is None:
            continue
        first = rows.setdefault(index, row)
        if any(column[first] != column[row] for column in values):
            raise UserError(f"{path} has two rows of {tree.images[index]} with other labels or splits; leave one")
    return rows, others


def find_files(names: list[Any], starts: list[str], tree: Tree) -> list[int | None]:
    """The index of the image that each name of a list means; None: it is not there, or several have the name.

    `\\` is `/`; composed and decomposed letters are the same; the ending may be missing, and so may the folders, where
    one file has the name.

    Args:
        starts: folders in which names start.
    """
    known: dict[str, int | None] = {}
    for root in {tree.root, os.path.realpath(tree.root)}:  # through which absolute names may lead
        known |= {os.path.join(root, image): index for index, image in enumerate(tree.images)}

    def look_up(name: str) -> int | None:
        places = (known.get(os.path.normpath(os.path.join(start, name))) for start in starts)
        return next((index for index in places if index is not None), None)

    texts = ["" if name is None else str(name) for name in names]
    found = [look_up(name) for name in texts]
    if all(index is not None for name, index in zip(texts, found, strict=True) if name):
        return found
    for index, path in enumerate(tree.paths()):  # only for lists that need it: it is large
        for spelling in spellings(path, starts):
            if known.setdefault(spelling, index) != index:
                known[spelling] = None
    return [
        look_up(compose(name.strip().replace("\\", "/"))) if index is None else index
        for name, index in zip(texts, found, strict=True)
    ]


def spellings(path: str, starts: list[str]) -> Iterator[str]:
    """Other ways in which a list may name an image: without its ending, or its folders."""
    path = compose(path)
    for name in (path, path.removesuffix(os.path.splitext(path)[1] if ending_of(path) else "")):
        yield name
        yield from (os.path.join(start, os.path.basename(name)) for start in starts)


def compose(text: str) -> str:
    """Text with composed letters: one character for a letter and its accent."""
    return unicodedata.normalize("NFC", text)


def read_list(path: str, config: ImagesConfig) -> Columns:
    """The columns of a list: that of file names is IMAGE, labels are as `to_label` has them, and splits are words.

    Returns:
        No column IMAGE, where none names files.
    Raises:
        UserError: it cannot be read.
    """
    table = read_table(path, config.labels_encoding)
    usual = {name.lower().replace(" ", "_"): name for name in table}
    files = config.file_column or next((usual[name] for name in FILE_COLUMNS if name in usual), None)
    names = table.pop(files, None)
    table.pop(IMAGE, None)  # another column of files
    label_columns = {LABEL, config.label_column, config.eval_label_column}
    for name in (LABEL, SPLIT):
        if name not in table and usual.get(name) in table.keys() - label_columns:
            table[name] = table.pop(usual[name])
    for name in label_columns & table.keys():
        table[name] = to_label_column(table[name])
    if SPLIT in table:
        table[SPLIT] = [split_of_cell(cell) for cell in table[SPLIT]]
    return table if names is None else table | {IMAGE: names}


def read_table(path: str, encoding: str) -> Columns:
    """The columns of a table: CSV (`,`, `;` or tabs), JSON lines or parquet.

    Raises:
        UserError: it cannot be read as that.
    """
    try:
        if ending_of(path) == ".parquet":
            return pq.read_table(path).to_pydict()
        with open(path, encoding=encoding, newline="") as file:
            text = file.read().removeprefix("\ufeff")
        return read_json_lines(text) if ending_of(path) == ".jsonl" else read_csv(text)
    except (OSError, ValueError, TypeError, LookupError, pd.errors.ParserWarning, pa.ArrowException) as error:
        problem = f"{path} cannot be read: {one_line(error)}{did_you_mean(path)}"
        raise UserError(f"{problem} (data.labels_encoding is {encoding})") from error


def read_csv(text: str) -> Columns:
    """The columns of a CSV file, all of text; an empty cell is None."""
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pandas warns of cells that it drops
        options = {"sep": delimiter, "dtype": str, "index_col": False, "keep_default_na": False, "na_values": [""]}
        table = pd.read_csv(io.StringIO(text), **options).dropna(how="all")
    return {name.strip(): [None if cell != cell else cell for cell in table[name]] for name in table}


def read_json_lines(text: str) -> Columns:
    """The columns of a file of JSON objects, a line each."""
    rows = [dict(json.loads(line)) for line in text.split("\n") if line.strip()]
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
