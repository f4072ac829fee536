"""One table of images: a row for each file, with its split and its label, made anew at each start.

The rules are in mpp/data/README.md: folders say splits and classes, and lists say which files count and what they show.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mpp.config import ImagesConfig
from mpp.data.folders import SPLITS, Layout, LeftOut, Tree, layout_of
from mpp.data.lists import Files, ImageList, label_column, missing_message, read_list
from mpp.data.shared import shared_rows
from mpp.errors import UserError
from mpp.runtime.messages import shortened, tell, warn
from mpp.runtime.output import printable

IMAGE, LABEL, SPLIT = "image", "label", "split"
NOTES = b"mpp"  # of the table's metadata: what is to be said of it
ANY_BYTES = "file-bytes://"  # of a path that is no text: percent-encoded


@dataclass
class Listing:
    """Images in memory, before they are a table: columns of the same length."""

    columns: dict[str, list[Any] | pa.Array] = field(default_factory=lambda: {IMAGE: [], SPLIT: []})
    """split: names; `files`: paths of images, or of masks; `labels`: texts; and others as lists have them."""
    labels: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=lambda: {IMAGE})
    notes: list[str] = field(default_factory=list)
    """What was left out, for the user."""
    warnings: list[str] = field(default_factory=list)
    shards: dict[str, list[str]] = field(default_factory=dict)
    """Split -> files that are read by others: tables by the library, or shards as streams."""

    def take(self, left_out: LeftOut) -> "Listing":
        """The same, which says what was left out."""
        self.notes += map(printable, left_out.lines(images=False))
        self.warnings += map(printable, left_out.lines(images=True))
        return self

    def table(self) -> pa.Table:
        """As arrow, sorted by split, with the library's features and the notes as metadata."""
        kinds: dict[str, Any] = {}
        arrays: dict[str, pa.Array] = {}
        self.sort_by_split()
        for name, values in self.columns.items():
            if name in self.files:
                arrays[name], kinds[name] = path_column(values), datasets.Image(decode=False)
            else:
                is_text = name in self.labels or name == SPLIT
                arrays[name] = text_column(values) if is_text else any_column(values)
                kinds[name] = datasets.Features.from_arrow_schema(pa.schema([(name, arrays[name].type)]))[name]
        schema = datasets.Features(kinds).arrow_schema
        notes = json.dumps({"notes": self.notes, "warnings": self.warnings, "shards": self.shards})
        schema = schema.with_metadata(schema.metadata | {NOTES: notes.encode()})
        return pa.Table.from_arrays([*arrays.values()], schema=schema)

    def sort_by_split(self) -> None:
        """Bring the rows of each split together; within a split they stay in their order."""
        if isinstance(self.columns[SPLIT], pa.Array):
            return
        order = sorted(range(len(self.columns[SPLIT])), key=[*map(split_order, self.columns[SPLIT])].__getitem__)
        if order != [*range(len(order))]:
            self.columns = {name: [values[row] for row in order] for name, values in self.columns.items()}


def path_column(paths: list[str | None]) -> pa.Array:
    """Paths of images as the library's images: {"bytes": none, "path"}."""
    try:
        texts = pa.array(paths, pa.string())
    except (UnicodeEncodeError, pa.ArrowInvalid):  # names that are no UTF-8
        texts = pa.array([None if path is None else as_text(path) for path in paths], pa.string())
    return pa.StructArray.from_arrays([pa.nulls(len(texts), pa.binary()), texts], ["bytes", "path"])


def as_text(path: str) -> str:
    """A path as text that arrow can hold."""
    try:
        path.encode()
        return path
    except UnicodeEncodeError:
        return ANY_BYTES + quote(os.fsencode(path))


def as_path(text: str) -> str:
    """The path that `as_text` has written."""
    return os.fsdecode(unquote_to_bytes(text.removeprefix(ANY_BYTES))) if text.startswith(ANY_BYTES) else text


def text_column(values: list[Any]) -> pa.Array:
    """Texts, or lists of texts."""
    if isinstance(values, pa.Array):
        return values
    several = any(isinstance(value, list) for value in values)
    try:
        return pa.array(values, pa.list_(pa.string()) if several else pa.string())
    except (UnicodeEncodeError, pa.ArrowInvalid):
        return text_column([printable_label(value) for value in values])


def printable_label(label: str | list[str] | None) -> str | list[str] | None:
    """A label, or several, with escapes for what UTF-8 lacks."""
    if isinstance(label, list):
        return [*map(printable, label)]
    return label if label is None else printable(label)


def any_column(values: list[Any]) -> pa.Array:
    """Values of one type, or their texts."""
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return pa.array([None if value is None else printable(str(value)) for value in values], pa.string())


def list_images(tree: Tree, config: ImagesConfig, mask_column: str | None = None) -> Listing:
    """The images of a folder, by its lists where there are some.

    Raises:
        UserError: a list cannot be read, or names files that are not there.
    """
    layout = layout_of(tree.folders, config.label_folder)
    lists = lists_of(tree, config, mask_column)
    listing = ListedImages(tree, layout, config, lists, mask_column).listing() if lists else by_folders(tree, layout)
    listing.warnings += layout.warnings
    if LABEL in listing.labels and is_blank(listing.columns[LABEL]):
        listing.labels.discard(LABEL)
        del listing.columns[LABEL]
    listing.take(tree.left_out)
    return listing


def is_blank(values: list[Any] | pa.Array) -> bool:
    """Whether a column has no value."""
    return values.null_count == len(values) if isinstance(values, pa.Array) else not any(values)


def by_folders(tree: Tree, layout: Layout) -> Listing:
    """The images of all folders that are in a split."""
    for folder, split in zip(tree.folders, layout.splits, strict=True):
        if split is None:
            first = "/".join((*folder.parts, folder.files[0]))
            tree.left_out.add("images in no split's folder", first, len(folder.files))
    kept = [number for number, split in enumerate(layout.splits) if split is not None]
    kept.sort(key=lambda number: split_order(layout.splits[number]))
    paths: list[str] = []
    for number in kept:
        start = tree.folders[number].path.rstrip("/") + "/"
        paths += [start + file for file in tree.folders[number].files]
    counts = [len(tree.folders[number].files) for number in kept]
    rows = pa.array(np.repeat(np.arange(len(kept)), counts))
    splits = text_column([layout.splits[number] for number in kept]).take(rows)
    names = text_column([layout.classes[number] for number in kept]).take(rows)
    return Listing({IMAGE: paths, SPLIT: splits, LABEL: names}, labels={LABEL})


def lists_of(tree: Tree, config: ImagesConfig, mask_column: str | None) -> list[tuple[str, ImageList]]:
    """The lists of a tree, and from which folder on each names files, seen from the top; or that of `data.labels`."""
    if config.labels is not None:
        path = os.path.expanduser(config.labels)
        for _, other in tree.lists:
            if not (os.path.exists(path) and os.path.samefile(other, path)):
                tree.left_out.add("lists, since data.labels names another", os.path.basename(other))
        found = read_list(path, config, mask_column)
        return [("", found)] if found else []
    lists = []
    for parts, path in tree.lists:
        found = read_list(path, config, mask_column)
        if found is None:
            reason = "tables without a column of file names (data.file_column names one)"
            tree.left_out.add(reason, "/".join((*parts, os.path.basename(path))), images=False)
        else:
            lists.append(("/".join(parts), found))
    return lists


class ListedImages:
    """The images that lists name, and those of folders that no list is about."""

    def __init__(
        self,
        tree: Tree,
        layout: Layout,
        config: ImagesConfig,
        lists: list[tuple[str, ImageList]],
        mask_column: str | None,
    ):
        self.tree, self.config, self.lists, self.mask_column = tree, config, lists, mask_column
        self.paths: list[str] = []
        self.own: list[tuple[str | None, str | None]] = []
        places: dict[str, int] = {}
        for folder, split, name in zip(tree.folders, layout.splits, layout.classes, strict=True):
            above, start = "".join(f"{part}/" for part in folder.parts), folder.path.rstrip("/") + "/"
            for file in folder.files:
                places[above + file] = len(self.paths)
                self.paths.append(start + file)
                self.own.append((split, name))
        self.files = Files(tree.root, places)
        self.named_labels = {config.label_column, getattr(config, "eval_label_column", None), LABEL} - {None}
        self.label = config.label_column or LABEL
        if not any(self.label in each.columns for _, each in lists):
            self.label = LABEL
        self.rows: dict[str, dict[str, Any]] = {}
        self.conflicts: list[str] = []
        self.repeated = 0
        self.used: set[str] = set()

    def listing(self) -> Listing:
        """All of them, in the order of their names."""
        missing: dict[str, list[str]] = {}
        for folder, each in self.lists:
            self.read(folder, each, missing)
        for path, names in missing.items():
            message = missing_message(names, path, self.tree.root)
            if self.config.missing == "refuse":
                ways = "mend the list, or data.missing skip leaves them out"
                raise UserError(f"{printable(message)}; names are from {self.tree.root} on; {ways}")
            self.tree.left_out.add("files that a list names and that are not there", names[0], len(names))
        self.add_unlisted()
        names = dict.fromkeys(name for row in self.rows.values() for name in row)
        order = sorted(self.rows, key=lambda place: place.split("/"))
        kept = [place for place in order if self.split_of(place)]
        columns: dict[str, list[Any]] = {IMAGE: [self.path_of(place) for place in kept]}
        columns[SPLIT] = [self.split_of(place) for place in kept]
        for name in names:
            if name not in (IMAGE, SPLIT):
                columns[name] = [self.rows[place].get(name) for place in kept]
        labels = self.named_labels & columns.keys()
        columns |= {name: label_column(columns[name]) for name in labels}
        listing = Listing(columns, labels, {IMAGE, self.mask_column} & columns.keys())
        for place in order:
            if not self.split_of(place):
                self.tree.left_out.add("images in no split's folder", place)
        if self.repeated:
            listing.notes.append(f"{self.repeated} rows of lists name a file again, which counts once")
        if not (self.named_labels & columns.keys()) or is_blank(columns[self.label]):
            listing.notes += [each.describe() for _, each in self.lists if each.columns]
        if self.conflicts:
            what = f"{len(self.conflicts)} files are listed more than once, with different labels"
            listing.warnings.append(printable(f"{what}: {shortened(self.conflicts)}; they count as unlabelled"))
        return listing

    def read(self, folder: str, each: ImageList, missing: dict[str, list[str]]) -> None:
        """Take the rows of a list."""
        lists_folder = os.path.dirname(os.path.abspath(each.path))
        for number, name in enumerate(each.files):
            place = None if name is None else self.place_of(str(name), folder, lists_folder)
            if place is None:
                missing.setdefault(each.path, []).append(f"line {number + 1} names none" if name is None else str(name))
                continue
            row = {column: values[number] for column, values in each.columns.items()}
            for column, values in each.others.items():
                path = self.other_file(values[number], folder, lists_folder, each.path, missing)
                if column == self.mask_column:
                    row[column] = path
            self.add(place, row)

    def place_of(self, name: str, folder: str, lists_folder: str) -> str | None:
        """An image's file by what a list calls it: from the list's folder on, or from the top."""
        found = self.files.find(name, folder)
        if found is None and self.config.labels is not None:
            return self.files.find(name, lists_folder)
        return found

    def other_file(
        self, name: Any, folder: str, lists_folder: str, list_path: str, missing: dict[str, list[str]]
    ) -> str | None:
        """The path of another file of an image, such as a mask; None where the list names none."""
        if name is None or not str(name).strip():
            return None
        place = self.place_of(str(name), folder, lists_folder)
        if place is None:
            missing.setdefault(list_path, []).append(str(name))
            return None
        self.used.add(place)
        return self.path_of(place)

    def add(self, place: str, row: dict[str, Any]) -> None:
        """Take a row; of a file that is listed twice, the label counts where it is the same."""
        split = row.pop(SPLIT, None)
        if split is not None and str(split).strip():
            row[SPLIT] = SPLITS.get(str(split).strip().lower(), str(split).strip())
        if self.label not in row and place in self.files.places:
            row[self.label] = self.own[self.files.places[place]][1]
        before = self.rows.get(place)
        if before is not None:
            self.repeated += 1
            if before.get(self.label) != row.get(self.label):
                self.conflicts.append(place)
                before[self.label] = None
            return
        self.rows[place] = row

    def add_unlisted(self) -> None:
        """Take the images of folders that no list is about; say how many others no list names."""
        scopes = [f"{folder}/" if folder else "" for folder, _ in self.lists]
        for place, number in self.files.places.items():
            if place in self.rows or place in self.used:
                continue
            if any(place.startswith(scope) for scope in scopes):
                self.tree.left_out.add("files that no list names", place)
            else:
                self.rows[place] = {self.label: self.own[number][1]}

    def path_of(self, place: str) -> str:
        """Where an image is on the disk."""
        number = self.files.places.get(place)
        return place if number is None else self.paths[number]

    def split_of(self, place: str) -> str | None:
        """The split of an image: its list's, else its folder's; an image from outside of the tree is to train on."""
        number = self.files.places.get(place)
        own = "train" if number is None else self.own[number][0]
        return self.rows[place].get(SPLIT) or own


class Found(NamedTuple):
    """What is at a place."""

    splits: dict[str, datasets.Dataset]
    """Its images, one by one, in the order of their names."""
    shards: dict[str, list[str]]
    """Or the files that hold them, by split."""


def shared(source: str, listing: Callable[[], Listing], key: str) -> Found:
    """A listing that all processes of this machine share; says what was left out.

    Args:
        source: what the dataset is called.
        listing: makes it; one process a machine calls it.
        key: what it is made from.
    """
    rows, about = shared_rows(lambda: listing().table(), key)
    said = json.loads(about[NOTES])
    for line in said["notes"]:
        tell(f"{source}: {line}")
    for line in said["warnings"]:
        warn(f"{source}: {line}")
    splits = rows.data.column(SPLIT).combine_chunks() if len(rows) else pa.array([], pa.string())
    names = sorted(pc.unique(splits).to_pylist(), key=split_order)
    columns = [name for name in rows.column_names if name != SPLIT]
    return Found({name: rows_of_split(rows, splits, name).select_columns(columns) for name in names}, said["shards"])


def rows_of_split(rows: datasets.Dataset, splits: pa.Array, name: str) -> datasets.Dataset:
    """The rows of a split, which stand together."""
    first = pc.index(splits, name).as_py()
    return rows.select(range(first, first + pc.sum(pc.equal(splits, name)).as_py()))


def split_order(name: str) -> tuple[int, str]:
    """Splits in the usual order: what is trained on first."""
    usual = [*dict.fromkeys(SPLITS.values())]
    return usual.index(name) if name in usual else len(usual), name
