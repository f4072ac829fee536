"""The images of a folder: all that are in it, or those that its lists name.

The rules are in mpp/data/README.md: folders say splits and classes, and lists say which files count and what they show.
"""

import os
import posixpath
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from mpp.config import ImagesConfig
from mpp.data.listing.folders import (
    SPLITS,
    Folder,
    LeftOut,
    Tree,
    begins_as_picture,
    files_of_kind,
    is_below,
    layout_of,
)
from mpp.data.listing.formats import ARRAYS, PICTURES, ending
from mpp.data.listing.lists import ImageList, label_column, read_list
from mpp.data.listing.table import IMAGE, LABEL, SPLIT, Listing, split_order, text_column
from mpp.errors import UserError
from mpp.runtime.messages import shortened
from mpp.runtime.output import printable

IN_NO_SPLIT = "images in no split's folder"


def list_images(tree: Tree, config: ImagesConfig, mask_column: str | None = None) -> Listing:
    """The images of a folder, by its lists where there are some.

    Raises:
        UserError: a list cannot be read, or names files that are not there.
    """
    lists = lists_of(tree, config, mask_column)
    if lists:
        return ListedImages(tree, config, mask_column).listing(lists)
    if config.file_column is not None:
        raise UserError(
            f"data.file_column is {config.file_column}; {tree.root} has no list of images with such a column"
        )
    return by_folders(tree.folders, tree.left_out, config).with_left_out(tree.left_out)


def by_folders(folders: Sequence[Folder], left_out: LeftOut, config: ImagesConfig) -> Listing:
    """The images of all folders that are in a split: first those to train on."""
    layout = layout_of(folders, config.label_folder)
    for folder, split in zip(folders, layout.splits, strict=True):
        if split is None:
            first = "/".join((*folder.parts, folder.files[0]))
            left_out.add(IN_NO_SPLIT, first, len(folder.files))
    kept = [number for number, split in enumerate(layout.splits) if split is not None]
    kept.sort(key=lambda number: split_order(layout.splits[number]))
    paths: list[str] = []
    for number in kept:
        start = folders[number].path.rstrip("/") + "/"
        paths += [start + file for file in folders[number].files]
    counts = [len(folders[number].files) for number in kept]
    rows = pa.array(np.repeat(np.arange(len(kept)), counts))
    columns = {IMAGE: paths, SPLIT: text_column([layout.splits[number] for number in kept]).take(rows)}
    names = text_column([layout.classes[number] for number in kept]).take(rows)
    if names.null_count < len(names):
        columns[LABEL] = names
    return Listing(columns, {LABEL} & columns.keys(), warnings=layout.warnings)


def lists_of(tree: Tree, config: ImagesConfig, mask_column: str | None) -> list[tuple[str, ImageList]]:
    """The lists of a tree, and from which folder on each names files, seen from the top; or that of `data.labels`."""
    if config.labels is not None:
        path = os.path.expanduser(config.labels)
        for _, other in tree.lists:
            if not (os.path.exists(path) and os.path.samefile(other, path)):
                tree.left_out.add("lists, since data.labels names another", os.path.basename(other))
        if is_below(whole := os.path.abspath(path), tree.root):
            tree.left_out.forget(files_of_kind(ending(path)), os.path.relpath(whole, tree.root))
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


class Files:
    """The images of a tree by their names from its top, and by other spellings of these.

    A file that a list names outside of the tree joins them when it is found.
    """

    def __init__(self, tree: Tree):
        self.tops = dict.fromkeys(top.rstrip("/") + "/" for top in (tree.root, os.path.realpath(tree.root)))
        self.root = tree.root
        self.paths: list[str] = []
        self.numbers: dict[str, int] = {}
        for folder in tree.folders:
            above, start = "".join(f"{part}/" for part in folder.parts), folder.path.rstrip("/") + "/"
            for file in folder.files:
                self.numbers[above + file] = len(self.paths)
                self.paths.append(start + file)
        self.inside = len(self.paths)
        """How many are in the tree; later numbers are of files outside."""

    def find(self, name: str, folder: str) -> int | None:
        """The number of a file by what a list in `folder` (from the top) calls it; None: there is no such file.

        `\\` is `/`; composed and decomposed letters are the same; an ending that is left out may be any; so may the
        folder, below that of the list, where one file alone has the name.
        """
        number = self.numbers.get(f"{folder}/{name}" if folder else name)
        if number is not None:
            return number
        for spelled in dict.fromkeys((name, name.replace("\\", "/"))):
            place = self.place(spelled, folder)
            if place in self.numbers:
                return self.numbers[place]
            composed = unicodedata.normalize("NFC", place)
            for known in (self.composed, self.without_ending):
                if composed in known:
                    return known[composed]
            path = place if os.path.isabs(place) else os.path.join(self.root, place)
            if os.path.isfile(path):
                return self.outside(os.path.normpath(path))
        if "/" not in name and "\\" not in name:
            return self.by_name.get((folder, unicodedata.normalize("NFC", name)))
        return None

    def outside(self, path: str) -> int:
        """The number of a file that is no image of the tree."""
        if path not in self.numbers:
            self.numbers[path] = len(self.paths)
            self.paths.append(path)
        return self.numbers[path]

    def place(self, name: str, folder: str) -> str:
        """A name from the top, where it is below; else an absolute path, or one that leads out."""
        place = posixpath.normpath(posixpath.join(folder, name))
        top = next((top for top in self.tops if place.startswith(top)), "")
        return place.removeprefix(top)

    @cached_property
    def composed(self) -> dict[str, int]:
        """By names with composed letters."""
        return {unicodedata.normalize("NFC", place): number for place, number in self.numbers.items()}

    @cached_property
    def without_ending(self) -> dict[str, int]:
        """By names without their ending, where one alone has that beginning."""
        return only_once((place[: len(place) - len(ending(place))], number) for place, number in self.composed.items())

    @cached_property
    def by_name(self) -> dict[tuple[str, str], int]:
        """By a folder and the name of a file below it, with its ending or without, where one alone has that name."""
        known = []
        for place, number in self.composed.items():
            folder, _, file = place.rpartition("/")
            beginning = file[: len(file) - len(ending(file))]
            while folder:
                folder = folder.rpartition("/")[0]
                known += [((folder, spelled), number) for spelled in dict.fromkeys((file, beginning))]
        return only_once(known)


def only_once(pairs: Any) -> dict[Any, int]:
    """Keys -> numbers, without the keys that stand for several."""
    known: dict[Any, int] = {}
    several = set()
    for key, number in pairs:
        if known.setdefault(key, number) != number:
            several.add(key)
    return {key: number for key, number in known.items() if key not in several}


@dataclass
class Cells:
    """What lists of one folder say of images: a column's values by the number of the image."""

    values: dict[str, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    differing: dict[str, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    """Images of which rows say different things."""

    def add(self, column: str, number: int, value: Any) -> None:
        """Note a value; of several the first counts."""
        if value is not None and self.values[column].setdefault(number, value) != value:
            self.differing[column][number] = None


class ListedImages:
    """The images that lists name, and those of folders that no list is about."""

    def __init__(self, tree: Tree, config: ImagesConfig, mask_column: str | None):
        self.tree, self.config, self.mask_column = tree, config, mask_column
        self.files = Files(tree)
        self.listed: set[int] = set()
        self.others: set[int] = set()
        """Files that are listed as masks and the like: no images."""
        self.with_label_cell: set[int] = set()
        """Images of which a list says whether they have a label."""
        self.absent: dict[str, list[str]] = {}
        """List -> what it names that is not there."""
        self.scopes: set[str] = set()
        """Folders that lists are about, from the top."""
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def listing(self, lists: Sequence[tuple[str, ImageList]]) -> Listing:
        """All of them, in the order of their names; lists of inner folders count more than those around them."""
        self.scopes = {folder for folder, _ in lists}
        label = self.config.label_column or LABEL
        named = any(label in each.columns for _, each in lists)
        values: dict[str, dict[int, Any]] = {}
        for folder in sorted(self.scopes, key=lambda folder: (folder.count("/"), folder)):
            cells = Cells()
            for own, each in lists:
                if own == folder:
                    self.read(folder, each, cells, label)
            self.warn_of_differing(cells, label)
            for column, of_images in cells.values.items():
                values.setdefault(column, {}).update(of_images)
        self.refuse_absent()
        listing = self.table(values, label if named else LABEL)
        listing.notes += self.notes
        listing.warnings += self.warnings
        return listing.with_left_out(self.tree.left_out)

    def read(self, folder: str, each: ImageList, cells: Cells, label: str) -> None:
        """Take the rows of a list."""
        numbers = [self.image(name, row, folder, each.path) for row, name in enumerate(each.files, start=1)]
        found = [number for number in numbers if number is not None]
        repeated = len(found) - len({*found})
        if repeated:
            self.notes.append(
                f"{os.path.basename(each.path)} names files more than once, which count once ({repeated})"
            )
        self.listed.update(found)
        if label in each.columns:
            self.with_label_cell.update(found)
        for column, values in each.columns.items():
            if column in self.label_columns:
                values = label_column(values)
            for number, value in zip(numbers, values, strict=True):
                if number is not None:
                    cells.add(column, number, split_in(value) if column == SPLIT else value)
        for column, names in each.others.items():
            for number, name in zip(numbers, names, strict=True):
                if number is None or name is None:
                    continue
                wanted = column == self.mask_column  # another column may be called so and name nothing that is here
                other = self.number(str(name), folder, each.path) if wanted else self.files.find(str(name), folder)
                if other is None:
                    continue
                self.others.add(other)
                if wanted:
                    cells.add(column, number, self.files.paths[other])

    @property
    def label_columns(self) -> set[str]:
        """Columns that hold labels, as far as anything says so."""
        return {self.config.label_column, getattr(self.config, "eval_label_column", None), LABEL} - {None}

    def number(self, name: str, folder: str, list_path: str) -> int | None:
        """The number of a file by what a list calls it; what is not there is noted."""
        number = self.files.find(name, folder)
        if number is None and self.config.labels is not None:  # that list may name files from its own place on
            number = self.files.find(os.path.join(os.path.dirname(os.path.abspath(list_path)), name), "")
        if number is None:
            self.absent.setdefault(list_path, []).append(name)
        return number

    def image(self, name: Any, row: int, folder: str, list_path: str) -> int | None:
        """The same of an image, which has to be one that can be read."""
        if name is None:
            self.absent.setdefault(list_path, []).append(f"row {row} names none")
            return None
        number = self.number(str(name), folder, list_path)
        if number is None or number < self.files.inside:
            return number
        path = self.files.paths[number]
        if ending(path) not in PICTURES | ARRAYS and not begins_as_picture(path):
            self.absent.setdefault(list_path, []).append(f"{name} (which is no image that mpp reads)")
            return None
        return number

    def refuse_absent(self) -> None:
        """Refuse lists that name files which are not there, or leave these out, as `data.missing` says."""
        for path, names in self.absent.items():
            if self.config.missing == "refuse":
                what = f"{len(names)} files that are" if len(names) > 1 else "a file that is"
                said = f"{path} names {what} not in {self.tree.root}: {shortened(names)}"
                ways = "names are from the list's folder on; mend the list, or data.missing skip leaves them out"
                raise UserError(printable(f"{said}; {ways}"))
            self.tree.left_out.add("files that a list names and that are not there", names[0], len(names))

    def warn_of_differing(self, cells: Cells, label: str) -> None:
        """Take the labels from images that have several, and say what else differs."""
        for column in self.label_columns & cells.differing.keys():
            for number in cells.differing[column]:
                cells.values[column][number] = None
        if label in cells.differing:
            which = self.named(cells.differing[label])
            self.warnings.append(f"files that are listed with different labels count as unlabelled ({which})")
        if SPLIT in cells.differing:
            which = self.named(cells.differing[SPLIT])
            self.warnings.append(f"files that are listed in several splits count in the first of these ({which})")

    def named(self, numbers: dict[int, None]) -> str:
        """How many images these are, and the first of them."""
        names = [os.path.relpath(self.files.paths[number], self.tree.root) for number in numbers]
        return printable(f"{len(names)}: {shortened(names)}")

    def kept_folders(self) -> tuple[list[Folder], list[int]]:
        """The folders with the images that count, and the numbers of these, in the same order."""
        folders, kept, first = [], [], 0
        for folder in self.tree.folders:
            numbers = range(first, first + len(folder.files))
            first += len(folder.files)
            above = ["/".join(folder.parts[:depth]) for depth in range(len(folder.parts) + 1)]
            if self.scopes.isdisjoint(above):
                own = [number for number in numbers if number not in self.others or number in self.listed]
            else:
                own = [number for number in numbers if number in self.listed]
                for number in numbers:
                    if number not in self.listed and number not in self.others:
                        name = "/".join((*folder.parts, folder.files[number - numbers.start]))
                        self.tree.left_out.add("files that no list names", name)
            if own:
                folders.append(replace(folder, files=[folder.files[number - numbers.start] for number in own]))
                kept += own
        return folders, kept

    def table(self, values: dict[str, dict[int, Any]], label: str) -> Listing:
        """The listing: what lists say, and where they say nothing what folders say.

        Args:
            values: column -> what lists say of each image, by its number.
            label: the column of the labels.
        """
        folders, kept = self.kept_folders()
        outside = sorted(self.listed - {*kept}, key=self.files.paths.__getitem__)
        self.note_outside(outside)
        layout = layout_of(folders, self.config.label_folder)
        splits: dict[int, str | None] = dict.fromkeys(outside, "train")
        labels: dict[int, Any] = {}
        of_folders = iter(kept)
        for folder, split, name in zip(folders, layout.splits, layout.classes, strict=True):
            for number in islice(of_folders, len(folder.files)):
                splits[number], labels[number] = split, name
        splits |= values.get(SPLIT, {})
        labels |= {number: values[label].get(number) for number in self.with_label_cell}
        numbers = []
        for number in [*kept, *outside]:
            if splits[number] is not None:
                numbers.append(number)
            else:
                name = os.path.relpath(self.files.paths[number], self.tree.root)
                self.tree.left_out.add(IN_NO_SPLIT, name)
        columns: dict[str, list[Any] | pa.Array] = {IMAGE: [self.files.paths[number] for number in numbers]}
        for column, of_images in values.items():
            columns.setdefault(column, [of_images.get(number) for number in numbers])
        columns[SPLIT] = [splits[number] for number in numbers]
        columns[label] = label_column(labels.get(number) for number in numbers)
        if not any(columns[label]):
            del columns[label]
        paths = {IMAGE, self.mask_column} & columns.keys()
        return Listing(columns, self.label_columns & columns.keys(), paths, warnings=layout.warnings)

    def note_outside(self, outside: list[int]) -> None:
        """Say that lists name images outside of the tree, whose folders say nothing."""
        if outside:
            which = self.named(dict.fromkeys(outside))
            what = f"listed files outside of {self.tree.root}, to train on unless a list says their split"
            self.notes.append(f"{what} ({which})")


def split_in(value: Any) -> str | None:
    """The split that a cell names; None: a blank."""
    text = "" if value is None else str(value).strip()
    return SPLITS.get(text.lower(), text) or None
