"""Folders of image files: one walk finds them, and the names of folders say splits and classes.

Splits are folders `train`, `val` and `test` at the top, or below one single folder. Classes are the innermost folders
whose name is not the same for all. See mpp/data/README.md for the rules.
"""

import heapq
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpp.data.decoding.kinds import is_picture
from mpp.data.listing.archives import is_archive, stem_of, unpacked
from mpp.data.listing.formats import ARRAYS, OF_THE_SYSTEM, PICTURES, SHARDS, UNREADABLE_PICTURES, ending, is_list
from mpp.runtime.messages import shortened
from mpp.runtime.progress import progress_bar

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Name of a folder, or word in a list's column `split` -> split."""
SPLIT_LIKE = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLITS)})(?:[^a-z]|$)")
MASK_LIKE = re.compile(r"masks|segmentation|annotation|trimap|ground_?truth")
HEAD = 64  # bytes of a file without an ending, by which a picture is known
FEW = 0.2  # share of the images: folders at a depth that has fewer are not the level of the classes
MOST = 0.95  # share of the images: where one name has more, the level is the same for all but a few
NAMED = 3  # files in a message
Parts = tuple[str, ...]
"""Names of folders, from the top of a tree on."""


@dataclass
class LeftOut:
    """Files that are no images of the dataset: reason -> how many, and the names of the first."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    """Reasons that are about images, of which a user should know."""

    def add(self, reason: str, name: str, count: int = 1, images: bool = True) -> None:
        """Note `count` files, of which `name` is one; `images`: whether they look like images."""
        self.counts[reason] += count
        if images:
            self.images.add(reason)
        first = self.names.setdefault(reason, [])
        if len(first) < NAMED or name < first[-1]:
            first[:] = sorted([*first, name])[:NAMED]

    def forget(self, reason: str, name: str) -> None:
        """One of the files is used after all."""
        if self.counts[reason] > 0:
            self.counts[reason] -= 1
            self.names[reason] = [each for each in self.names[reason] if each != name]

    def lines(self, images: bool) -> list[str]:
        """A description of each reason that is, or is not, about images: "left out: .txt files (2: a.txt, b.txt)"."""
        lines = []
        for reason, count in self.counts.items():
            if count > 0 and (reason in self.images) == images:
                more = ", ..." if count > len(self.names[reason]) else ""
                lines.append(f"left out: {reason} ({count}: {', '.join(self.names[reason])}{more})")
        return lines


@dataclass
class Folder:
    """A folder that holds images."""

    parts: Parts
    path: str
    """Where it is: in the tree, or in the cache where it was in an archive."""
    files: list[str]
    """Names of its images, sorted."""


@dataclass
class Tree:
    """What a folder holds."""

    root: str
    folders: list[Folder] = field(default_factory=list)
    """Those that hold images, sorted by their names."""
    lists: list[tuple[Parts, str]] = field(default_factory=list)
    """Files that list images: the folder that each stands in, and its path."""
    shards: list[tuple[Parts, str]] = field(default_factory=list)
    """Parquet, arrow and tar files: the folder of each, and its path."""
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def kinds(self) -> set[str]:
        """Endings of the shards."""
        return {ending(path) for _, path in self.shards}

    def __len__(self) -> int:
        return sum(len(folder.files) for folder in self.folders)


class Walk:
    """One walk over a folder: `tree` is what it found.

    It lists each folder once, and asks for the state of links alone. Links to folders are followed, unless they lead
    into a folder that is walked anyway.

    Raises:
        OSError: a folder cannot be listed.
    """

    def __init__(self, root: str, parts: Parts = (), tree: Tree | None = None, archives: bool = True):
        self.tree = Tree(root) if tree is None else tree
        self.archives = archives
        self.followed = [os.path.realpath(root)]
        self.pictures: list[Folder] = []
        self.arrays: list[Folder] = []
        self.packed: list[tuple[Parts, str, str]] = []
        self.bar = progress_bar(desc="looking for images", unit=" files", delay=1, leave=False)
        with self.bar:
            self.walk(root, parts)
        self.choose()

    def walk(self, root: str, parts: Parts) -> None:
        """List all folders from `root` on; links to folders last, in the order of their names: which of two links to
        the same images is followed does not depend on the file system."""
        waiting = [(root, parts)]
        links: list[tuple[Parts, str]] = []
        while waiting or links:
            if not waiting:
                parts, path = heapq.heappop(links)
                if self.leads_elsewhere(path, parts):
                    waiting.append((path, parts))
                continue
            path, parts = waiting.pop()
            pictures: list[str] = []
            arrays: list[str] = []
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name[0] == "." or name in OF_THE_SYSTEM:
                        continue
                    if name[name.rfind(".") :].lower() in PICTURES and entry.is_file(follow_symlinks=False):
                        pictures.append(name)
                        continue
                    end = ending(name)
                    if entry.is_dir():
                        inside = (*parts, name)
                        if entry.is_symlink():
                            heapq.heappush(links, (inside, entry.path))
                        else:
                            waiting.append((entry.path, inside))
                    elif not entry.is_file():
                        dangling = entry.is_symlink()
                        self.leave_out("dangling links" if dangling else "entries that are no files", parts, name)
                    elif end in PICTURES:
                        pictures.append(name)
                    elif end in ARRAYS:
                        arrays.append(name)
                    else:
                        self.take_other(entry, parts, end, pictures)
            self.bar.update(len(pictures) + len(arrays))
            if pictures:
                self.pictures.append(Folder(parts, path, sorted(pictures)))
            if arrays:
                self.arrays.append(Folder(parts, path, sorted(arrays)))

    def take_other(self, entry: os.DirEntry, parts: Parts, end: str, pictures: list[str]) -> None:
        """A file that is no picture by its name: a list, a shard, an archive, a picture without an ending, or none."""
        name = entry.name
        if is_list(name):
            self.tree.lists.append((parts, entry.path))
        elif end in SHARDS:
            self.tree.shards.append((parts, entry.path))
        elif is_archive(name):
            self.packed.append((parts, name, entry.path))
        elif end == "" and begins_as_picture(entry.path):
            pictures.append(name)
        elif end in UNREADABLE_PICTURES:
            self.leave_out(f"{end} files, which mpp does not read; convert them to JPEG, PNG or TIFF", parts, name)
        else:
            self.leave_out(files_of_kind(end), parts, name, images=False)

    def leads_elsewhere(self, link: str, parts: Parts) -> bool:
        """Whether a link to a folder leads out of what is walked; not into it, nor to a folder around it."""
        target = os.path.realpath(link)
        for known in self.followed:
            if is_below(target, known) or is_below(known, target):
                self.leave_out("links to folders of the same tree", parts[:-1], parts[-1])
                return False
        self.followed.append(target)
        return True

    def leave_out(self, reason: str, parts: Parts, name: str, count: int = 1, images: bool = True) -> None:
        """Note a file that is not used."""
        self.tree.left_out.add(reason, "/".join((*parts, name)), count, images)

    def choose(self) -> None:
        """Pictures are the images; arrays where there are none; what archives hold where there is neither."""
        self.tree.folders += self.pictures or self.arrays
        if self.pictures:
            for folder in self.arrays:
                self.leave_out("arrays next to pictures", folder.parts, folder.files[0], len(folder.files))
        self.unpack()
        self.tree.folders.sort(key=lambda folder: folder.parts)
        self.tree.lists.sort()
        self.tree.shards.sort()

    def unpack(self) -> None:
        """Take the files of archives as if they had been unpacked where they are: each in a folder of its name, or, of
        a single archive that names no split, without one."""
        if not self.archives or self.tree.folders or self.tree.shards:
            for parts, name, _ in self.packed:
                self.leave_out("archives next to images, or in one; unpack them or move them away", parts, name)
            return
        alone = len(self.packed) == 1
        for parts, name, path in sorted(self.packed):
            stem = stem_of(name)
            inside = unpacked(Path(path))
            if inside == Path(path):
                self.leave_out("files that are named as archives and are none", parts, name)
                continue
            own = (inside / stem).is_dir() or (alone and stem.lower() not in SPLITS)
            Walk(str(inside), parts if own else (*parts, stem), self.tree, archives=False)


def files_of_kind(end: str) -> str:
    """Files with this ending, which are not used, in words."""
    hint = "; data.labels names a list of images" if end in (".csv", ".tsv", ".jsonl") else ""
    return f"{end} files{hint}" if end else "files without an ending"


def is_below(path: str, folder: str) -> bool:
    """Whether a path is that of a folder, or below it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def begins_as_picture(path: str) -> bool:
    """Whether a file's first bytes are those of a picture; not where it cannot be opened."""
    with suppress(OSError), open(path, "rb") as file:
        return is_picture(file.read(HEAD))
    return False


@dataclass
class Layout:
    """What the names of folders say of images: a split and a class for each folder of a tree."""

    splits: list[str | None]
    """Of each folder of the tree; None: it is in no split."""
    classes: list[str | None]
    """Of each folder of the tree; None: its images have no label."""
    warnings: list[str] = field(default_factory=list)


def layout_of(folders: Sequence[Folder], label_folder: str) -> Layout:
    """Splits and classes of folders.

    Args:
        label_folder: inner or outer: which one is the class where several levels have different names.
    """
    top = top_of(folders)
    named = any(split_named(folder.parts, top) for folder in folders)
    splits = [split_named(folder.parts, top) if named else "train" for folder in folders]
    below = [folder.parts[top + named :] for folder in folders]
    layout = Layout(splits, [None] * len(folders))
    training = [number for number, split in enumerate(splits) if split == "train"]
    training = training or [number for number, split in enumerate(splits) if split]
    images = [len(folders[number].files) for number in training]
    levels = class_levels([below[number] for number in training], images)
    layout.warnings += suspicious_names([below[number] for number in training])
    if not levels:
        return layout
    level = levels[0] if label_folder == "outer" else levels[-1]
    for number in training:
        if len(below[number]) > level:
            layout.classes[number] = below[number][level]
    known = {layout.classes[number] for number in training} - {None}
    for split in {split for split in splits if split} - {splits[number] for number in training}:
        held_out = [number for number, own in enumerate(splits) if own == split]
        for number, name in zip(held_out, held_out_classes([below[n] for n in held_out], level, known), strict=True):
            layout.classes[number] = name
    if level > levels[0]:
        layout.warnings += outer_classes([below[number] for number in training], levels)
    return layout


def top_of(folders: Sequence[Folder]) -> int:
    """How many levels from the top all images are below one single folder, up to one with the name of a split."""
    parts = [folder.parts for folder in folders]
    level = 0
    while parts and all(len(each) > level for each in parts):
        names = {each[level] for each in parts}
        if len(names) > 1 or names.pop().lower() in SPLITS:
            break
        level += 1
    return level


def split_named(parts: Parts, top: int) -> str | None:
    """The split that the name of a folder at the top says; None: it says none."""
    return SPLITS.get(parts[top].lower()) if len(parts) > top else None


def class_levels(below: list[Parts], images: list[int]) -> list[int]:
    """The levels at which the names of folders differ, among the images of the usual depth.

    Args:
        below: each folder's parts, below its split.
        images: how many are in each folder.
    """
    by_depth = Counter[int]()
    for parts, count in zip(below, images, strict=True):
        by_depth[len(parts)] += count
    inside = sum(count for depth, count in by_depth.items() if depth > 0)
    usual = next((depth for depth in sorted(by_depth) if depth > 0 and by_depth[depth] >= FEW * inside), 0)
    levels, differing = [], []
    for level in range(usual):
        names = Counter[str]()
        for parts, count in zip(below, images, strict=True):
            if len(parts) >= usual:
                names[parts[level]] += count
        if len(names) > 1:
            differing.append(level)
            if max(names.values()) < MOST * names.total():
                levels.append(level)
    return levels or differing


def held_out_classes(below: list[Parts], level: int, known: set[str]) -> Iterator[str | None]:
    """The class of each folder of a held-out split: one of training, wherever its name stands, or another.

    A single folder that is no class of training holds images without labels, as ImageNet's `val` is unpacked.
    """
    others = {parts[level] for parts in below if len(parts) > level}
    flat = others.isdisjoint(known) and len(others) == 1
    for parts in below:
        name = next((part for part in reversed(parts) if part in known), None)
        if name is None and len(parts) > level and not flat:
            name = parts[level]
        yield name


def outer_classes(below: list[Parts], levels: list[int]) -> list[str]:
    """What else could be the classes, where folders on several levels have different names; and folders of the same
    name, in different folders, that are one class."""
    inner, outer = ({parts[level] for parts in below if len(parts) > level} for level in (levels[-1], levels[0]))
    ways = f"data.label_folder outer takes the outer ones ({len(outer)}: {shortened(sorted(outer))})"
    parents: dict[str, set[Parts]] = {}
    for parts in below:
        if len(parts) > levels[-1]:
            parents.setdefault(parts[levels[-1]], set()).add(parts[: levels[-1]])
    several = {name: sorted(around) for name, around in parents.items() if len(around) > 1}
    same = ""
    if several:
        name, around = min(several.items())
        places = shortened(["/".join((*parts, name)) for parts in around])
        more = f", and so with {len(several) - 1} more" if len(several) > 1 else ""
        same = f"; {places} are one class{more}"
    return [f"classes are the innermost folders ({len(inner)}: {shortened(sorted(inner))}){same}; {ways}"]


def suspicious_names(below: list[Parts]) -> list[str]:
    """Warnings of folders that look like splits or masks, and are taken for folders of images."""
    names = sorted({part for parts in below for part in parts})
    warnings = []
    if splits := [name for name in names if SPLIT_LIKE.search(name.lower())]:
        rule = "splits are folders train, val and test at the top, of whatever is below them"
        warnings.append(f"folders look like splits and are none: {shortened(splits)}; {rule}: rename or move them")
    if masks := [name for name in names if MASK_LIKE.search(name.lower())]:
        ways = "move them away, or list the images in a metadata.csv"
        warnings.append(f"folders look like masks and count as images: {shortened(masks)}; {ways}")
    return warnings
