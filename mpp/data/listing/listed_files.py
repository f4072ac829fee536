"""The files that lists name, and the values that lists have for them."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mpp.config import ImagesConfig
from mpp.data.decoding.formats import is_picture
from mpp.data.listing.file_index import FileIndex
from mpp.data.listing.formats import IMAGE_EXTENSIONS, extension_of
from mpp.data.listing.image_table import LABEL, SPLIT
from mpp.data.listing.left_out import without_decoder
from mpp.data.listing.lists import ImageList, named_label_columns, to_label_column
from mpp.data.listing.split_names import split_of_cell
from mpp.data.listing.tree import Tree, first_bytes
from mpp.errors import UserError
from mpp.runtime.messages import printable, shortened


@dataclass
class Cells:
    """The values of the lists of one folder: column -> index of the file -> value."""

    values: dict[str, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    conflicts: dict[str, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    """Column -> images whose rows have different values."""

    def add(self, column: str, file_index: int, value: Any) -> None:
        """Add a value; of several the first counts. None is no value."""
        if value is not None and self.values[column].setdefault(file_index, value) != value:
            self.conflicts[column][file_index] = None


class ListedFiles:
    """The files of a tree that lists name, by their index in `files`, and the values of their rows.

    Raises:
        UserError: a list names files that are not there, and `data.missing` refuses that.
    """

    def __init__(self, tree: Tree, lists: Sequence[ImageList], config: ImagesConfig):
        self.tree = tree
        self.config = config
        self.files = FileIndex(tree)
        self.images: set[int] = set()
        self.masks: set[int] = set()
        """Masks, and other files that a list names next to an image: they are not images themselves."""
        self.with_label_cell: set[int] = set()
        """Images of a list with a column of labels, whose cells count even if they are blank."""
        self.values: dict[str, dict[int, Any]] = {}
        """Column -> image -> value; those of lists in inner folders win."""
        self.folders = {image_list.folder for image_list in lists}
        """Folders, from the top, whose images are those that a list names."""
        self.missing: dict[str, list[str]] = defaultdict(list)
        """List -> names of files that are not there."""
        self.notes: list[str] = []
        self.warnings: list[str] = []

        usual_label = config.label_column or LABEL
        has_labels = any(usual_label in image_list.columns for image_list in lists)
        self.label = usual_label if has_labels else LABEL
        """Column of the labels."""
        self.label_columns = {LABEL} | named_label_columns(config)

        for folder in sorted(self.folders, key=lambda folder: (folder.count("/"), folder)):
            cells = Cells()
            for image_list in lists:
                if image_list.folder == folder:
                    self.read_rows(image_list, cells)
            self.resolve_conflicts(cells)
            for column, values in cells.values.items():
                self.values.setdefault(column, {}).update(values)
        self.refuse_missing()

    def read_rows(self, image_list: ImageList, cells: Cells) -> None:
        """Find the files of a list, and take the values of its rows."""
        file_indices = [self.find_image(name, row, image_list) for row, name in enumerate(image_list.files, start=1)]
        found = [file_index for file_index in file_indices if file_index is not None]
        repetitions = len(found) - len({*found})
        if repetitions:
            list_name = os.path.basename(image_list.path)
            self.notes.append(f"{list_name} names files more than once, which count once ({repetitions})")
        self.images.update(found)
        if self.label in image_list.columns:
            self.with_label_cell.update(found)
        for column, values in image_list.columns.items():
            if column in self.label_columns:
                values = to_label_column(values)
            if column == SPLIT:
                values = map(split_of_cell, values)
            for file_index, value in zip(file_indices, values, strict=True):
                if file_index is not None:
                    cells.add(column, file_index, value)
        for column, names in image_list.others.items():
            for file_index, name in zip(file_indices, names, strict=True):
                if file_index is not None and name is not None:
                    self.add_other(column, file_index, str(name), image_list, cells)

    def add_other(self, column: str, file_index: int, name: str, image_list: ImageList, cells: Cells) -> None:
        """Take another file of an image, such as its mask.

        Only masks have to be there: another column may be called so and name no files.
        """
        is_mask = column == self.config.mask_column
        other = self.find(name, image_list) if is_mask else self.files.find(name, image_list.folder)
        if other is None:
            return
        self.masks.add(other)
        if is_mask:
            cells.add(column, file_index, self.files.paths[other])

    def find(self, name: str, image_list: ImageList) -> int | None:
        """The index of a file by the name that a list has for it; missing files are noted."""
        file_index = self.files.find(name, image_list.folder)
        if file_index is None and self.config.labels is not None:  # whose names may start from the list's own folder
            own_folder = os.path.dirname(os.path.abspath(image_list.path))
            file_index = self.files.find(os.path.join(own_folder, name), "")
        if file_index is None:
            of_several = self.files.is_of_several(name, image_list.folder)
            self.missing[image_list.path].append(f"{name} (several have this name)" if of_several else name)
        return file_index

    def find_image(self, name: Any, row: int, image_list: ImageList) -> int | None:
        """The index of an image by the name that a list has for it, if it can be read."""
        if name is None:
            self.missing[image_list.path].append(f"row {row} names none")
            return None
        file_index = self.find(str(name), image_list)
        if file_index is None or file_index < self.files.tree_size:
            return file_index
        path = self.files.paths[file_index]
        reason = without_decoder(path, partial(first_bytes, path))
        if reason is None:
            if extension_of(path) in IMAGE_EXTENSIONS or is_picture(first_bytes(path)):
                return file_index
            reason = "not an image that mpp reads"
        self.missing[image_list.path].append(f"{name} ({reason})")
        return None

    def refuse_missing(self) -> None:
        """Refuse lists that name files which are not there, or leave these out, as `data.missing` says."""
        for path, names in self.missing.items():
            if self.config.missing == "refuse":
                what = f"{len(names)} files that are" if len(names) > 1 else "a file that is"
                problem = f"{path} names {what} not in {self.tree.root}: {shortened(names)}"
                start = "the list's folder" if self.config.labels is None else "data.path or the list's folder"
                advice = f"names start from {start}; mend the list, or set data.missing skip"
                raise UserError(printable(f"{problem}; {advice}"))
            self.tree.left_out.add("files that a list names and that are not there", names[0], len(names))

    def resolve_conflicts(self, cells: Cells) -> None:
        """Take away the labels of images with different ones, and warn of these and of images in several splits."""
        for column in self.label_columns & cells.conflicts.keys():
            for file_index in cells.conflicts[column]:
                cells.values[column][file_index] = None
        problems = {
            self.label: "files that are listed with different labels count as unlabelled",
            SPLIT: "files that are listed in several splits count in the first of these",
        }
        for column, problem in problems.items():
            if column in cells.conflicts:
                self.warnings.append(f"{problem} ({self.describe_files(cells.conflicts[column])})")

    def describe_files(self, file_indices: Iterable[int]) -> str:
        """The number of files, and the names of the first of them."""
        names = [self.name(file_index) for file_index in file_indices]
        return printable(f"{len(names)}: {shortened(names)}")

    def name(self, file_index: int) -> str:
        """A file's name from the top."""
        return os.path.relpath(self.files.paths[file_index], self.tree.root)
