"""Folders of images: one walk, and the splits and classes that the names of folders say. The rules: mpp/data.md."""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpp.config import ImagesConfig
from mpp.data.decoding.formats import ARRAY_ENDINGS, IMAGE_ENDINGS, KIND_BYTES, is_image, missing_decoder
from mpp.errors import UserError
from mpp.runtime.messages import progress_bar, shortened

TABLE_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
SHARD_BUILDERS = TABLE_BUILDERS | {".tar": "webdataset"}
"""Ending of a shard -> the builder that `datasets` reads it with."""
ARCHIVE_ENDINGS = (".zip", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
LIST_NAME = re.compile(r"(metadata|labels)\.(csv|tsv|jsonl|parquet)")
"""Names of files that list the images of a folder."""
LIST_ENDINGS = (".csv", ".tsv", ".jsonl")
ENDING = re.compile(r"\.[a-z][a-z0-9]{1,6}")
SYSTEM_FILES = frozenset(
    (
        *("__MACOSX", "Thumbs.db", "desktop.ini"),
        *("$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle", "#snapshot"),
    )
)
"""Of operating systems and network disks: thumbnails, deleted files, older states."""
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Word -> split."""
USUAL_SPLITS = [*dict.fromkeys(SPLIT_WORDS.values())]
SPLIT_WORD_INSIDE = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLIT_WORDS)})(?![a-z])")
SPLIT_WORD_AT_END = re.compile(rf"{SPLIT_WORD_INSIDE.pattern}$")
NUMBERED_SHARD = re.compile(r"(\w+)-\d+-of-\d+\.")
SHARD_OF_SET = re.compile(r"(.*?([^/]+))-(\d+)-of-(\d+)\.\w+")
"""Path of a shard that says how many there are: its beginning, the set's name, the shard's number, the set's size."""
Parts = tuple[str, ...]
"""Names of nested folders, from the top of a tree on."""


@dataclass
class Tree:
    """The files below a folder by their kind, as paths from there on."""

    root: str
    images: dict[str, list[str]] = field(default_factory=dict)
    """Folder, such as "" or "train/cat/" -> names of its images; both sorted."""
    lists: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> files that are not used."""

    def leave_out(self, reason: str, *names: str) -> None:
        """Note files that are not used, by their names in the tree or their paths."""
        start = self.root.rstrip("/") + "/"
        self.left_out.setdefault(reason, []).extend(name.removeprefix(start) for name in names)

    def lines(self) -> list[str]:
        """A line for each reason: "left out: .txt files (2: a.txt, b.txt)"."""
        lines = []
        for reason, names in self.left_out.items():
            if not names:
                continue
            more = ", ..." if len(names) > 3 else ""
            lines.append(f"left out: {reason} ({len(names)}: {', '.join(sorted(names)[:3])}{more})")
        return lines

    def paths(self) -> list[str]:
        """Absolute paths of the images."""
        start = self.root.rstrip("/") + "/"
        return [start + folder + name for folder, names in self.images.items() for name in names]


def walk(root: str) -> Tree:
    """The files below a folder. Links to folders are followed, unless they lead into a folder that is walked anyway.

    Pictures are the images; arrays where there are no pictures.

    Raises:
        OSError: a folder cannot be listed.
        UserError: an image is a link to another image of the tree.
    """
    tree = Tree(root)
    files: dict[str, dict[str, list[str]]] = {}  # kind -> folder -> names
    tops = [os.path.realpath(root)]
    unlisted = [("", tops[0])]  # folders, and where they are without links
    links: list[str] = []  # to folders: they come last, in the order of their names
    real_folders: dict[str, str] = {}
    linked: dict[str, str] = {}  # file -> the file that it leads to
    readable = {ending for ending in IMAGE_ENDINGS if missing_decoder(ending) is None}
    with progress_bar(desc="looking for images", unit=" folders", delay=1, leave=False) as bar:
        while unlisted or links:
            if not unlisted:
                link = min(links)
                links.remove(link)
                target = os.path.realpath(os.path.join(root, link))
                if any(is_below(target, top) or is_below(top, target) for top in tops):
                    tree.leave_out("links to folders of the same tree", link)
                    continue
                tops.append(target)
                unlisted.append((f"{link}/", target))
            folder, real = unlisted.pop()
            real_folders[folder] = real
            bar.update()
            pictures = files.setdefault("picture", {}).setdefault(folder, [])
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in entries:
                    name = entry.name
                    if name[0] == "." or name in SYSTEM_FILES:
                        continue
                    is_picture = name[name.rfind(".") :].lower() in readable
                    if is_picture and name.isascii() and entry.is_file(follow_symlinks=False):  # most files, fast
                        pictures.append(name)
                        continue
                    is_link = entry.is_symlink()
                    if not is_text(name):
                        tree.leave_out("names that are not UTF-8; rename them, such as by convmv", ascii(folder + name))
                    elif entry.is_dir() and is_link:
                        links.append(folder + name)
                    elif entry.is_dir():
                        unlisted.append((f"{folder}{name}/", f"{real}/{name}"))
                    elif not entry.is_file():
                        tree.leave_out("dangling links, and entries that are no files", folder + name)
                    else:
                        files.setdefault(kind_of(name, entry.path), {}).setdefault(folder, []).append(name)
                        if is_link:
                            linked[folder + name] = os.path.realpath(entry.path)
    images = {folder: names for folder, names in files.pop("picture").items() if names}
    arrays = files.pop("array", {})
    if images and arrays:
        tree.leave_out("arrays next to pictures", *paths_of(arrays))
    images = images or arrays
    for folder in sorted(images, key=lambda folder: folder.split("/")):
        tree.images[folder] = sorted(images[folder])
    refuse_linked(tree, linked, real_folders)
    tree.lists, tree.tables, tree.tars = (sorted(paths_of(files.pop(kind, {}))) for kind in ("list", "table", "tar"))
    for reason, others in files.items():
        tree.leave_out(reason, *paths_of(others))
    return tree


def paths_of(files: dict[str, list[str]]) -> list[str]:
    """Paths of files from the top of a tree, by their folders."""
    return [folder + name for folder, names in files.items() for name in names]


def is_text(name: str) -> bool:
    """Whether a file's name is UTF-8."""
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def refuse_linked(tree: Tree, linked: dict[str, str], real_folders: dict[str, str]) -> None:
    """Raise UserError where an image of a tree is a link to another one: both would count.

    Args:
        linked: file -> the file that it leads to, with all links resolved.
        real_folders: folder -> its path with all links resolved.
    """
    if not linked:
        return
    there = {f"{real_folders[folder]}/{name}" for folder, names in tree.images.items() for name in names}
    twice = [f"{name} is {target}" for name, target in sorted(linked.items()) if target in there]
    if twice:
        rule = "give the folder of the links, or that of the files, as data.path"
        raise UserError(
            f"{tree.root} has links to files of its own, which would count twice ({shortened(twice)}); {rule}"
        )


def is_below(path: str, folder: str) -> bool:
    """Whether a path is that of a folder, or below it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def kind_of(name: str, path: str) -> str:
    """The kind of a file: picture, array, list, table, tar; else the reason why it is left out.

    By its name; where that has no ending, as of scans, by its first bytes.
    """
    ending = name[name.rfind(".") :].lower()
    if ending in IMAGE_ENDINGS:
        package = missing_decoder(ending)
        return f"{ending} files, which need {package}: pip install {package}" if package else "picture"
    if ending in ARRAY_ENDINGS:
        return "array"
    if LIST_NAME.fullmatch(name.lower()):
        return "list"
    if ending in SHARD_BUILDERS:
        return "table" if ending in TABLE_BUILDERS else "tar"
    if ending in ARCHIVE_ENDINGS:
        return "archives: unpack them"
    if ending_of(name):
        return f"{ending} files" + ("; data.labels names a list of images" if ending in LIST_ENDINGS else "")
    head = first_bytes(path)
    if not is_image(head):
        return "files without an ending"
    package = missing_decoder(head)
    return f"pictures that need {package}: pip install {package}" if package else "picture"


def ending_of(name: str) -> str:
    """A file name's ending in lower case: ".jpg"; "" where the text after its last dot is none, as in "scan.2"."""
    ending = os.path.splitext(name)[1].lower()
    return ending if ENDING.fullmatch(ending) else ""


def first_bytes(path: str) -> bytes:
    """The bytes of a file that tell its kind; none where it cannot be opened."""
    try:
        with open(path, "rb") as file:
            return file.read(KIND_BYTES)
    except OSError:
        return b""


# --- splits and classes ---


def split_order(name: str) -> tuple[int, str]:
    """A key that sorts splits in the usual order: training first."""
    return USUAL_SPLITS.index(name) if name in USUAL_SPLITS else len(USUAL_SPLITS), name


def split_of_cell(value: Any) -> str | None:
    """The split that a list's cell names; None: the cell is blank."""
    text = "" if value is None else str(value).strip()
    return SPLIT_WORDS.get(text.lower(), text) or None


def split_of_shard(path: str, folders: Sequence[str] = ()) -> str:
    """The split of a shard by its name: NAME of NAME-00000-of-00012, or a word such as train, val or test.

    Args:
        folders: names of the folders around it, whose words count if its own name has none.
    Returns:
        train, where there is no such word and no NAME.
    """
    name = os.path.basename(path)
    numbered = NUMBERED_SHARD.match(name)
    says_split = not numbered or SPLIT_WORD_AT_END.search(numbered[1].lower())
    for text in ([name] if says_split else []) + [*reversed(folders)]:
        word = SPLIT_WORD_INSIDE.search(text.lower())
        if word:
            return SPLIT_WORDS[word[1]]
    return numbered[1] if numbered else "train"


def shards_by_split(shards: Iterable[str], start: str) -> dict[str, list[str]]:
    """Split -> shards, which are paths or URLs from `start` on; training first."""
    splits: dict[str, list[str]] = {}
    for shard in shards:
        split = split_of_shard(shard, os.path.dirname(shard).split("/"))
        splits.setdefault(split, []).append(start + shard)
    return {split: splits[split] for split in sorted(splits, key=split_order)}


def incomplete_sets(paths: Iterable[str]) -> list[str]:
    """Lines about sets of shards of which some are not there, or that are there in several sizes, by their names."""
    sets: dict[tuple[str, str], dict[int, set[str]]] = {}
    for path in paths:
        if shard := SHARD_OF_SET.fullmatch(path):
            sets.setdefault((shard[1], shard[2]), {}).setdefault(int(shard[4]), set()).add(shard[3])
    lines = []
    for (_, name), sizes in sets.items():
        for size, numbers in sizes.items():
            if len(numbers) < size:
                lines.append(f"{len(numbers)} of {size} shards are there of {name}: the others' images are missing")
        if len(sizes) > 1:
            counts = " and ".join(map(str, sorted(sizes)))
            lines.append(f"there are sets of {counts} shards of {name}: their images may count twice")
    return lines


@dataclass
class Place:
    """The split and the class of the images of a folder, by its name."""

    split: str | None
    """None: the folder is next to those of splits."""
    name: str | None = None
    """Name of the class; None: the images have no label."""


def find_places(folders: Collection[str], config: ImagesConfig) -> dict[str, Place]:
    """The split and the class of each folder of a tree, such as "train/cat/".

    Raises:
        UserError: inner and outer folders would be different classes, and `data.label_folder` does not say which.
    """
    paths: dict[str, Parts] = {folder: tuple(folder.split("/")[:-1]) for folder in folders}
    top = 0  # the level of splits: below the folders that are around all others
    for names in zip(*paths.values(), strict=False):
        if len({*names}) > 1 or names[0].lower() in SPLIT_WORDS:
            break
        top += 1
    places = {}
    for folder, parts in paths.items():
        places[folder] = Place(SPLIT_WORDS.get(parts[top].lower()) if len(parts) > top else None)
    if any(place.split for place in places.values()):
        top += 1
    else:
        places = {folder: Place("train") for folder in paths}
    below = {folder: parts[top:] for folder, parts in paths.items()}

    splits = {place.split for place in places.values()} - {None}
    training_splits = {"train"} & splits or splits
    training = [folder for folder, place in places.items() if place.split in training_splits]
    levels = differing_levels([below[folder] for folder in training])
    if not levels:
        return places
    is_outer = config.label_folder == "outer"
    level = levels[0] if is_outer else levels[-1]
    if config.label_folder is None and len(levels) > 1:
        refuse_two_levels([below[folder] for folder in training], levels, config)
    for folder in training:
        parts = below[folder]
        if len(parts) > level:
            places[folder].name = parts[level]
        elif parts and not is_outer:
            places[folder].name = parts[-1]
    known = {places[folder].name for folder in training} - {None}
    for split in splits - training_splits:
        held_out = [folder for folder, place in places.items() if place.split == split]
        names = {below[folder][level] for folder in held_out if len(below[folder]) > level}
        has_others = len(names) > 1 or not names.isdisjoint(known)  # else they are around all, as of a flat `val`
        for folder in held_out:
            parts = below[folder]
            of_training = [part for part in parts if part in known]
            if of_training:
                places[folder].name = of_training[-1]
            elif has_others and len(parts) > level:
                places[folder].name = parts[level]
    return places


def differing_levels(below: Sequence[Parts]) -> list[int]:
    """The levels at which folders have different names."""
    deepest = max(map(len, below), default=0)
    names = [{parts[level] for parts in below if len(parts) > level} for level in range(deepest)]
    return [level for level in range(deepest) if len(names[level]) > 1]


def refuse_two_levels(below: Sequence[Parts], levels: Sequence[int], config: ImagesConfig) -> None:
    """Raise UserError, which names the classes by the inner and by the outer folders."""
    outer, inner = (
        sorted({parts[level] for parts in below if len(parts) > level}) for level in (levels[0], levels[-1])
    )
    problem = f"{config.group_name}.label_folder is null, and folders inside each other have different names"
    choices = f"outer ({len(outer)} classes: {shortened(outer)}) or inner ({len(inner)}: {shortened(inner)})"
    raise UserError(f"{problem}; it must be {choices}")
