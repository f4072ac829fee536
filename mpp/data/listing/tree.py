"""The files of a folder by kind: images, lists of images, shards, archives. One walk finds them."""

import heapq
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mpp.data.decoding.formats import is_picture
from mpp.data.listing.archives import archive_stem, is_archive, unpack_archive
from mpp.data.listing.formats import (
    ALWAYS_READ_EXTENSIONS,
    ARRAY_EXTENSIONS,
    PICTURE_EXTENSIONS,
    SHARD_BUILDERS,
    SYSTEM_FILES,
    UNSUPPORTED_EXTENSIONS,
    extension_of,
    is_list,
)
from mpp.data.listing.left_out import LeftOutFiles, other_files, without_decoder
from mpp.data.listing.split_names import SPLIT_WORDS
from mpp.runtime.messages import progress_bar

PICTURE_HEAD_BYTES = 256  # of a file without an extension, by which a picture is known
Parts = tuple[str, ...]
"""Names of nested folders, from the top of a tree on."""


@dataclass
class Folder:
    """A folder that holds images."""

    parts: Parts
    path: str
    """On disk: in the tree, or in the cache where it was in an archive."""
    files: list[str]
    """Names of its images, sorted."""

    @property
    def first(self) -> str:
        """Its first image, seen from the top of the tree."""
        return "/".join((*self.parts, self.files[0]))

    def paths(self) -> list[str]:
        """Paths of its images."""
        start = self.path.rstrip("/") + "/"
        return [start + file for file in self.files]


@dataclass
class Tree:
    """The files of a folder that are images, or hold or list images."""

    root: str
    folders: list[Folder] = field(default_factory=list)
    """Folders that hold images, sorted by their names."""
    lists: list[tuple[Parts, str]] = field(default_factory=list)
    """Lists of images: the folder of each, and its path."""
    shards: list[tuple[Parts, str]] = field(default_factory=list)
    """Parquet, arrow and tar files: the folder of each, and its path."""
    left_out: LeftOutFiles = field(default_factory=LeftOutFiles)

    @property
    def shard_extensions(self) -> set[str]:
        """Extensions of the shards."""
        return {extension_of(path) for _, path in self.shards}

    def leave_out(self, reason: str, parts: Parts, file: str, about_images: bool = True) -> None:
        """Note a file that is not used.

        Args:
            parts: of its folder.
            file: its name or its path.
            about_images: whether it looks like an image, or holds such.
        """
        self.left_out.add(reason, "/".join((*parts, os.path.basename(file))), about_images=about_images)

    def __len__(self) -> int:
        return sum(len(folder.files) for folder in self.folders)


def walk_folder(root: str) -> Tree:
    """The files of a folder and of all folders below it.

    Each folder is listed once, and only links are asked for their state. Links to folders are followed, unless they
    lead into a folder that is walked anyway. Pictures are the images; arrays where there are no pictures; the files in
    archives where there are neither, nor shards.

    Raises:
        OSError: a folder cannot be listed.
    """
    tree = Tree(root)
    walk = Walk(tree)
    walk.list_folders(root, ())
    walk.unpack_archives()
    tree.folders.sort(key=lambda folder: folder.parts)
    tree.lists.sort()
    tree.shards.sort()
    return tree


class Walk:
    """The state of one walk: see `walk_folder`.

    Args:
        tree: gets the files that are found.
    """

    def __init__(self, tree: Tree):
        self.tree = tree
        self.followed: list[str] = []
        """Folders that are walked, with links resolved."""
        self.pictures: list[Folder] = []
        self.arrays: list[Folder] = []
        self.archives: list[tuple[Parts, str]] = []
        """Folder and path of each."""
        self.unlisted: list[tuple[str, Parts]] = []
        """Folders that are still to be listed."""
        self.links: list[tuple[Parts, str]] = []
        """A heap of the links to folders."""

    def list_folders(self, root: str, parts: Parts) -> None:
        """List all folders from `root` on. Pictures are the images; arrays where there are none.

        Links to folders come last, in the order of their names: which of two links to the same images is followed does
        not depend on the file system.
        """
        self.followed.append(os.path.realpath(root))
        self.unlisted.append((root, parts))
        with progress_bar(desc="looking for images", unit=" files", delay=1, leave=False) as bar:
            while self.unlisted or self.links:
                if self.unlisted:
                    bar.update(self.list_folder(*self.unlisted.pop()))
                    continue
                parts, path = heapq.heappop(self.links)
                if self.leads_elsewhere(path, parts):
                    self.unlisted.append((path, parts))
        self.tree.folders += self.pictures or self.arrays
        if self.pictures:
            for folder in self.arrays:
                self.tree.left_out.add("arrays next to pictures", folder.first, len(folder.files))

    def list_folder(self, path: str, parts: Parts) -> int:
        """List one folder; returns the number of its images."""
        pictures: list[str] = []
        arrays: list[str] = []
        for entry in visible_entries(path):
            name = entry.name
            extension = name[name.rfind(".") :].lower()
            if extension in ALWAYS_READ_EXTENSIONS and entry.is_file(follow_symlinks=False):  # most files, fast
                pictures.append(name)
            elif entry.is_dir():
                if entry.is_symlink():
                    heapq.heappush(self.links, ((*parts, name), entry.path))
                else:
                    self.unlisted.append((entry.path, (*parts, name)))
            elif not entry.is_file():
                reason = "dangling links" if entry.is_symlink() else "entries that are no files"
                self.tree.leave_out(reason, parts, name)
            elif extension_of(name) in PICTURE_EXTENSIONS:
                if reason := without_decoder(name, partial(first_bytes, entry.path)):
                    self.tree.leave_out(reason, parts, name)
                else:
                    pictures.append(name)
            elif extension_of(name) in ARRAY_EXTENSIONS:
                arrays.append(name)
            elif not self.take_container(entry, parts) and self.is_picture_by_start(entry, parts):
                pictures.append(name)
        if pictures:
            self.pictures.append(Folder(parts, path, sorted(pictures)))
        if arrays:
            self.arrays.append(Folder(parts, path, sorted(arrays)))
        return len(pictures) + len(arrays)

    def take_container(self, entry: os.DirEntry, parts: Parts) -> bool:
        """Take a file that lists or holds images: a list, a shard, an archive. Whether it is one."""
        if is_list(entry.name):
            self.tree.lists.append((parts, entry.path))
        elif extension_of(entry.name) in SHARD_BUILDERS:
            self.tree.shards.append((parts, entry.path))
        elif is_archive(entry.name):
            self.archives.append((parts, entry.path))
        else:
            return False
        return True

    def is_picture_by_start(self, entry: os.DirEntry, parts: Parts) -> bool:
        """Whether a file without an ending is a picture that can be read, by its first bytes; others are noted."""
        head = b"" if extension_of(entry.name) else first_bytes(entry.path)
        if reason := without_decoder(entry.name, lambda: head):
            self.tree.leave_out(reason, parts, entry.name)
            return False
        if is_picture(head):
            return True
        self.leave_out_unreadable(entry.name, parts)
        return False

    def leave_out_unreadable(self, name: str, parts: Parts) -> None:
        """Leave out a file that is no image, or that no decoder here reads."""
        extension = extension_of(name)
        if extension in UNSUPPORTED_EXTENSIONS:
            reason = f"{extension} files, which mpp does not read; convert them to JPEG, PNG or TIFF"
            self.tree.leave_out(reason, parts, name)
        else:
            self.tree.leave_out(other_files(name), parts, name, about_images=False)

    def leads_elsewhere(self, link: str, parts: Parts) -> bool:
        """Whether a link to a folder leads out of the folders that are walked: not into one, nor around one."""
        target = os.path.realpath(link)
        for walked in self.followed:
            if is_below(target, walked) or is_below(walked, target):
                self.tree.leave_out("links to folders of the same tree", parts[:-1], parts[-1])
                return False
        self.followed.append(target)
        return True

    def unpack_archives(self) -> None:
        """Take the files of archives as if they had been unpacked where the archives are, if there is nothing else.

        Each is a folder of its name. A single archive that names no split is none.
        """
        if self.tree.folders or self.tree.shards:
            self.leave_out_archives()
            return
        is_alone = len(self.archives) == 1
        for parts, path in sorted(self.archives):
            stem = archive_stem(os.path.basename(path))
            files = unpack_archive(Path(path))
            if files is None:
                self.tree.leave_out("files named as archives that are not archives", parts, path)
                continue
            has_own_folder = (files / stem).is_dir() or (is_alone and stem.lower() not in SPLIT_WORDS)
            inside = Walk(self.tree)
            inside.list_folders(str(files), parts if has_own_folder else (*parts, stem))
            inside.leave_out_archives()

    def leave_out_archives(self) -> None:
        """Leave out archives next to images, or in an archive."""
        for parts, path in self.archives:
            self.tree.leave_out("archives next to images, or in one; unpack them or move them away", parts, path)


def visible_entries(path: str) -> Iterator[os.DirEntry]:
    """The entries of a folder, without hidden files and those of operating systems."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name[0] != "." and entry.name not in SYSTEM_FILES:
                yield entry


def is_below(path: str, folder: str) -> bool:
    """Whether a path is that of a folder, or below it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def first_bytes(path: str) -> bytes:
    """The bytes of a file that tell whether it is a picture; none where it cannot be opened."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(PICTURE_HEAD_BYTES)
    return b""
