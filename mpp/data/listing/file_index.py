"""The images of a folder by their names, for lists that spell these names in several ways."""

import os
import posixpath
import unicodedata
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from mpp.data.listing.formats import without_extension
from mpp.data.listing.tree import Tree


class FileIndex:
    """The images of a tree, indexed from 0, and found by their names from its top or by other spellings of these.

    Those are `\\` for `/`, composed and decomposed letters, absolute paths, names without their ending, and bare names,
    if exactly one file has it.

    A file outside the tree gets an index when a list names it.
    """

    def __init__(self, tree: Tree):
        self.root = tree.root
        self.tops = [top.rstrip("/") + "/" for top in (tree.root, os.path.realpath(tree.root))]
        self.paths: list[str] = []
        self.index_by_name: dict[str, int] = {}
        """By names from the top, or by paths outside the tree."""
        for folder in tree.folders:
            above = "".join(f"{part}/" for part in folder.parts)
            for file, path in zip(folder.files, folder.paths(), strict=True):
                self.index_by_name[above + file] = len(self.paths)
                self.paths.append(path)
        self.tree_size = len(self.paths)
        """Larger indices are those of files outside."""

    def find(self, name: str, folder: str) -> int | None:
        """The index of a file by the name that a list has for it; None: there is no such file.

        `\\` is `/`; composed and decomposed letters are the same; spaces around the name do not count; the extension
        may be missing; so may the folder, below that of the list, where only one file has the name.

        Args:
            folder: of the list, from the top.
        """
        file_index = self.index_by_name.get(f"{folder}/{name}" if folder else name)
        if file_index is not None:
            return file_index
        for spelling in dict.fromkeys((name, name.replace("\\", "/"), name.strip())):
            file_index = self.find_spelling(spelling, folder)
            if file_index is not None:
                return file_index
        if "/" in name or "\\" in name:
            return None
        return self.by_bare_name.get((folder, compose(name)))

    def is_of_several(self, name: str, folder: str) -> bool:
        """Whether a name is not found because several files have it, in other folders or with other endings."""
        name = compose(name)
        return self.place(name, folder) in self.without_extensions or (folder, name) in self.by_bare_name

    def find_spelling(self, name: str, folder: str) -> int | None:
        """The index of a file by a name with `/` between folders; None: there is no such file."""
        place = self.place(name, folder)
        if place in self.index_by_name:
            return self.index_by_name[place]
        composed = compose(place)
        if composed in self.composed:
            return self.composed[composed]
        if self.without_extensions.get(composed) is not None:  # made only for lists that need it: it is large
            return self.without_extensions[composed]
        path = os.path.normpath(os.path.join(self.root, place))
        if not os.path.isfile(path):
            return None
        if path not in self.index_by_name:
            self.index_by_name[path] = len(self.paths)
            self.paths.append(path)
        return self.index_by_name[path]

    def place(self, name: str, folder: str) -> str:
        """A name from the top, where the file is below it; else an absolute path, or a relative one that leads out."""
        place = posixpath.normpath(posixpath.join(folder, name))
        for top in self.tops:
            if place.startswith(top):
                return place.removeprefix(top)
        return place

    @cached_property
    def composed(self) -> dict[str, int]:
        """Indices by names with composed letters."""
        return {compose(place): file_index for place, file_index in self.index_by_name.items()}

    @cached_property
    def without_extensions(self) -> dict[str, int | None]:
        """Indices by names without their extension; None: several files have that name."""
        return unique_or_none((without_extension(place), file_index) for place, file_index in self.composed.items())

    @cached_property
    def by_bare_name(self) -> dict[tuple[str, str], int | None]:
        """Indices by a folder and a name below it, with its extension or without; None: several files have the name."""
        pairs = []
        for place, file_index in self.composed.items():
            folder, _, file = place.rpartition("/")
            spellings = {file, without_extension(file)}
            while folder:
                folder = folder.rpartition("/")[0]
                pairs += [((folder, spelling), file_index) for spelling in spellings]
        return unique_or_none(pairs)


def compose(text: str) -> str:
    """Text with composed letters: one character for a letter and its accent."""
    return unicodedata.normalize("NFC", text)


def unique_or_none(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int | None]:
    """Keys -> indices; None for the keys that stand for several indices."""
    index_by_key: dict[Any, int | None] = {}
    for key, file_index in pairs:
        if index_by_key.setdefault(key, file_index) != file_index:
            index_by_key[key] = None
    return index_by_key
