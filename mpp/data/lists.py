"""Lists of images, such as `metadata.csv`, and the images of a folder by its lists and the names of its folders.

Cells of CSV are text as it stands, but for spaces around a label: only a blank is no value.
"""

import io
import json
import os
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mpp.config import ImagesConfig
from mpp.data.folder import Tree, ending_of, find_places, split_of_cell, split_order
from mpp.data.listing import IMAGE, LABEL, SPLIT, Listing
from mpp.errors import UserError, one_line
from mpp.runtime.messages import printable, shortened

FILE_COLUMNS = ("file_name", "filename", "file", "path", "image")
"""Usual names of the column that names the files, in order of preference, in small or capital letters."""
OTHER_FILES_SUFFIX = "_file_name"
"""End of a column's name that holds names of other files, such as masks: `mask_file_name` becomes `mask`."""
Columns = dict[str, list[Any]]


def list_images(tree: Tree, config: ImagesConfig) -> Listing:
    """The images of a folder: those that its lists name, and those of folders without a list.

    Folders are splits and classes of images of which no list says it.

    Raises:
        UserError: a list cannot be read, names files that are not there, or contradicts itself.
    """
    paths = tree.paths()
    columns: dict[str, dict[str, Any]] = defaultdict(dict)
    lists = find_lists(tree, config)
    label = config.label_column if any(config.label_column in table for table in lists.values()) else LABEL
    named: set[str] = set()
    listed: set[str] = set()  # images in the folder of a list
    left_out: set[str] = set()  # masks, and images that their list does not name
    for path, table in lists.items():
        folder = tree.root if config.labels else os.path.dirname(path)
        rows, others = match_rows(tree, path, folder, table, config)
        below = {image for image in paths if image.startswith(os.path.join(folder, ""))}
        if not listed.isdisjoint(below):
            raise UserError(f"{shortened([*lists])} list the same images; data.labels must name the one that counts")
        listed |= below
        named |= rows.keys()
        unnamed = below - rows.keys() - others
        tree.leave_out(f"images that {os.path.basename(path)} does not name", *unnamed)
        left_out |= unnamed | others
        for name, values in table.items():
            columns[name] |= {image: values[row] for image, row in rows.items()}
    if tree.arrays:
        unlisted = {*paths} - left_out - named
        arrays = unlisted & {os.path.join(tree.root, array) for array in tree.arrays}
        if arrays < unlisted:
            tree.leave_out("arrays next to pictures", *arrays)
            left_out |= arrays
    start = len(os.path.join(tree.root, ""))
    folders = {image: image[start : image.rfind("/") + 1] for image in paths if image not in left_out}
    splits = add_folders(folders, columns.pop(SPLIT, {}), columns[label], tree, config)
    leave_out_other_names(splits, columns[label], tree)
    return Listing(splits, columns, {config.mask_column})


def leave_out_other_names(splits: dict[str, str], labels: dict[str, Any], tree: Tree) -> None:
    """Of several names of a file, by links, keep one in the last of their splits, the held-out one: its own, if there.

    Raises:
        UserError: a link and an image of the tree that it is have different labels.
    """
    links: dict[str, list[str]] = defaultdict(list)  # file -> the images that are links to it
    for link, file in tree.links.items():
        links[file].append(os.path.join(tree.root, link))
    for file, names in links.items():
        names = [name for name in (file, *sorted(names)) if name in splits]
        for name in names:
            if file in splits and labels[name] != labels[file]:
                one = f"{name} ({labels[name]}) is a link to {file} ({labels[file]}), of another label"
                raise UserError(f"{one}; leave one out, or give the folder of the links or of the files as data.path")
        others = {*names} - {max(names, key=lambda name: split_order(splits[name]), default=None)}
        tree.leave_out("other names (links) of a file that counts", *others)
        for name in others:
            del splits[name]


def add_folders(
    folders: dict[str, str], splits: dict[str, str | None], labels: dict[str, Any], tree: Tree, config: ImagesConfig
) -> dict[str, str]:
    """Take classes from folders where nothing else says them, and return the splits, for which the same holds.

    Args:
        folders: of all images that count.
        splits: of images; None, or none, where folders say it.
        labels: of images; those of the other images are added.
    """
    if labels.keys() >= folders.keys():
        config = replace(config, label_folder="inner")  # no class is asked for
    split_of, class_of = find_places({*folders.values()}, config)
    kept: dict[str, str] = {}
    beside: list[str] = []
    for image, folder in folders.items():
        labels.setdefault(image, class_of.get(folder))
        split = splits.get(image) or split_of[folder]
        if split:
            kept[image] = split
        else:
            beside.append(image)
    tree.leave_out("images in no split's folder", *beside)
    return kept


def find_lists(tree: Tree, config: ImagesConfig) -> dict[str, Columns]:
    """Path -> columns of the lists of a tree, or of that of `data.labels`. The column of file names is IMAGE."""
    paths = [os.path.join(tree.root, name) for name in tree.lists]
    if config.labels is not None:
        tree.leave_out("lists of images; data.labels names another", *paths)
        paths = [os.path.abspath(os.path.expanduser(config.labels))]
        used = os.path.realpath(paths[0])
        endings = {ending_of(paths[0]), ending_of(used)}
        for names in tree.left_out.values():
            names[:] = [
                name
                for name in names
                if ending_of(name) not in endings or os.path.realpath(os.path.join(tree.root, name)) != used
            ]
    tables = {path: read_list(path, config) for path in paths}
    lists = {path: table for path, table in tables.items() if IMAGE in table}
    if not lists and (config.labels or config.file_column):
        columns = dict.fromkeys(name for table in tables.values() for name in table)
        rule = f"it must be the column of file names in {config.labels or tree.root}, which has {', '.join(columns)}"
        raise UserError(f"data.file_column is {config.file_column}; {rule}")
    unused = tables.keys() - lists.keys()
    tree.leave_out("tables without a column of file names (data.file_column names one)", *unused)
    return lists


def match_rows(
    tree: Tree, path: str, folder: str, table: Columns, config: ImagesConfig
) -> tuple[dict[str, int], set[str]]:
    """The row of each image that a list names; and other files that it names, such as masks.

    Columns of other files are dropped; that of masks has paths then, or None where there is none.

    Args:
        path: of the list.
        folder: the folder that it is about.
    """
    starts = [folder, os.path.dirname(path)]
    names = table.pop(IMAGE)
    inside = os.path.join(folder, "")
    images = [image if image and image.startswith(inside) else None for image in find_files(names, starts, tree)]
    missing = [str(name) for name, image in zip(names, images, strict=True) if image is None]
    others: set[str | None] = set()
    for column in [name for name in table if name == config.mask_column or name.endswith(OTHER_FILES_SUFFIX)]:
        names = table.pop(column)
        files = find_files(names, starts, tree)
        others |= {*files}
        if column.removesuffix(OTHER_FILES_SUFFIX) == config.mask_column:
            missing += [str(name) for name, mask in zip(names, files, strict=True) if name and mask is None]
            table[config.mask_column] = files
    if missing and config.missing == "refuse":
        (near,) = find_files([os.path.splitext(missing[0])[0]], starts, tree)  # perhaps of another ending
        hint = f" (did you mean {near}?)" if near else ""
        raise UserError(
            f"{path} names {len(missing)} that are no images in {folder}, or the name of several: "
            f"{shortened(missing)}{hint}; mend the list, or set data.missing skip"
        )
    tree.leave_out("files that a list names and that are not there", *missing)
    rows: dict[str, int] = {}
    label_columns = (SPLIT, config.label_column or LABEL, config.eval_label_column, config.mask_column)
    labels = [table[name] for name in label_columns if name in table]
    for row, image in enumerate(images):
        first = row if image is None else rows.setdefault(image, row)
        if any(column[first] != column[row] for column in labels):
            raise UserError(f"{path} has two rows of {image} with other labels, splits or masks; leave one")
    return rows, others - rows.keys() - {None}


def find_files(names: list[Any], starts: list[str], tree: Tree) -> list[str | None]:
    """The path of the image that each name of a list means; None: it is not there, or several have the name.

    `\\` is `/`; composed and decomposed letters are the same; the ending may be missing, and so may the folders, where
    one file in the first of the folders has the name.

    Args:
        starts: folders in which names start.
    """
    paths = tree.paths()
    real_root = os.path.realpath(tree.root)  # through which absolute names may lead
    known: dict[str, str | None] = dict(zip(paths, paths, strict=True))
    known |= {os.path.join(real_root, image): path for image, path in zip(tree.images, paths, strict=True)}

    def look_up(name: str) -> str | None:
        places = (known.get(os.path.normpath(os.path.join(start, name))) for start in (*starts, ""))
        return next(filter(None, places), None)

    texts = ["" if name is None else str(name) for name in names]
    found = [look_up(name) for name in texts]
    if None not in found:
        return found
    inside = os.path.join(starts[0], "")
    for path in paths:  # only for lists that need it: it is large
        for spelling in spellings(compose(path)) if path.startswith(inside) else ():
            if known.setdefault(spelling, path) != path:
                known[spelling] = None
    cleaned = (compose(name.strip().replace("\\", "/")) for name in texts)
    return [path or look_up(name) for name, path in zip(cleaned, found, strict=True)]


def spellings(path: str) -> Iterator[str]:
    """Other ways in which a list may name an image: without its ending, or its folders."""
    for name in (path, path[: len(path) - len(ending_of(path))]):
        yield from (name, os.path.basename(name))


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
        table[name] = [to_label(cell) for cell in table[name]]
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
        problem = f"{path} cannot be read: {one_line(error)}"
        raise UserError(f"{problem} (data.labels_encoding is {encoding})") from error


def read_csv(text: str) -> Columns:
    """The columns of a CSV file, all of text; an empty cell is None."""
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pandas warns of cells that it drops
        table = pd.read_csv(
            io.StringIO(text), sep=delimiter, dtype=str, index_col=False, keep_default_na=False, na_values=[""]
        ).dropna(how="all")
    return {name.strip(): [None if cell != cell else cell for cell in table[name]] for name in table}


def read_json_lines(text: str) -> Columns:
    """The columns of a file of JSON objects, a line each."""
    rows = [dict(json.loads(line)) for line in text.split("\n") if line.strip()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def to_label(value: Any) -> Any:
    """A label as text without spaces around it, or as a list of such texts; None: a blank. 1.0 is 1."""
    if isinstance(value, list):
        return [text for text in map(to_label, value) if text is not None]
    if value is None or value != value:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # tables with blanks turn integers to floating point
    return printable(str(value).strip()) or None
