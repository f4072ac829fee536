"""Folders of images: one walk, and the splits and classes that the names of folders say. The rules: mpp/data.md."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from mpp.config import ImagesConfig
from mpp.data.decoding.formats import ARRAY_ENDINGS, IMAGE_ENDINGS, KIND_BYTES, is_image
from mpp.errors import UserError
from mpp.runtime.messages import printable, progress_bar, shortened

TABLE_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
SHARD_BUILDERS = TABLE_BUILDERS | {".tar": "webdataset"}
"""Ending of a shard -> the builder that `datasets` reads it with."""
ARCHIVE_ENDINGS = (".zip", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
KINDS = {
    **dict.fromkeys(IMAGE_ENDINGS, "pictures"),
    **dict.fromkeys(ARRAY_ENDINGS, "arrays"),
    **dict.fromkeys(TABLE_BUILDERS, "tables"),
    ".tar": "tars",
    **dict.fromkeys(ARCHIVE_ENDINGS, "archives: unpack them"),
    **dict.fromkeys((".csv", ".tsv", ".jsonl"), "tables; data.labels names a list of images"),
}
"""Ending -> kind of file, or the reason why it is left out."""
LIST_NAME = re.compile(r"(metadata|labels)\.(csv|tsv|jsonl|parquet)")
"""Names of files that list the images of a folder."""
ENDING = re.compile(r"\.[a-z][a-z0-9]{1,6}")
SYSTEM_FILES = {"__MACOSX", "Thumbs.db", "desktop.ini", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
SYSTEM_FILES |= {"@eaDir", "#recycle", "#snapshot"}
"""Of operating systems and network disks: thumbnails, deleted files, older states."""
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Word -> split."""
USUAL_SPLITS = ["train", "validation", "test"]
SPLIT_WORD_INSIDE = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLIT_WORDS)})(?![a-z])")
SPLIT_WORD_AT_END = re.compile(rf"{SPLIT_WORD_INSIDE.pattern}$")
NUMBERED_SHARD = re.compile(r"(\w+)-\d+-of-\d+\.")
SHARD_OF_SET = re.compile(r"(?P<set>.*?)-\d+-of-(?P<size>\d+)\.\w+")
"""Path of a shard that says how many there are."""


@dataclass
class Tree:
    """The files below a folder by their kind, as paths from there on, folder by folder."""

    root: str
    images: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> files that are not used."""
    links: dict[str, str] = field(default_factory=dict)
    """Image that is a link -> the file that it is, by its path in the tree where it has one."""
    arrays: list[str] = field(default_factory=list)
    """Those of the images that are arrays: next to pictures they count where a list names them."""

    def leave_out(self, reason: str, *names: str) -> None:
        """Note files that are not used, by their names in the tree or their paths."""
        start = os.path.join(self.root, "")
        self.left_out.setdefault(reason, []).extend(name.removeprefix(start) for name in names)

    def paths(self) -> list[str]:
        """Absolute paths of the images."""
        start = os.path.join(self.root, "")
        return [start + image for image in self.images]

    def lines(self) -> list[str]:
        """A line for each reason: "left out: .txt files (2: a.txt, b.txt)"."""
        reasons = {reason: names for reason, names in self.left_out.items() if names}
        return [
            printable(f"left out: {why} ({len(names)}: {shortened(sorted(names))})") for why, names in reasons.items()
        ]


def walk(root: str) -> Tree:
    """The files below a folder. Links to folders are followed, unless they lead into a folder that is walked anyway.

    Pictures and arrays are the images.

    Raises:
        OSError: a folder cannot be listed.
    """
    links: dict[str, str] = {}  # path of an image -> the file that it is
    files: dict[str, list[str]] = {}  # kind, or the reason why they are left out -> paths
    tops = {real_folder(root): ""}  # folder without links -> its path in the tree
    folders = [""]
    with progress_bar(desc="looking for images", unit=" folders", delay=1, leave=False) as bar:
        while folders:
            folder = folders.pop()
            bar.update()
            below = []
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in sorted(entries, key=attrgetter("name")):
                    if entry.name[0] == "." or entry.name in SYSTEM_FILES:
                        continue
                    path = folder + entry.name
                    kind = kind_of(entry)
                    if kind == "folders" and entry.is_symlink():
                        target = real_folder(entry.path)
                        if any(target.startswith(top) or top.startswith(target) for top in tops):
                            kind = "links to folders of the same tree"
                        else:
                            tops[target] = f"{path}/"
                    elif entry.is_symlink() and kind in ("pictures", "arrays"):
                        links[path] = os.path.realpath(entry.path)
                    if kind == "folders":
                        below.append(f"{path}/")
                    else:
                        files.setdefault(kind, []).append(path)
            folders += reversed(below)
    for path, file in links.items():
        top = next(filter(file.startswith, tops), "")
        links[path] = os.path.join(root, tops.get(top, ""), file[len(top) :])
    arrays = files.pop("arrays", [])
    images = files.pop("pictures", []) + arrays
    others = (sorted(files.pop(kind, [])) for kind in ("lists", "tables", "tars"))
    return Tree(root, images, *others, files, links, arrays)


def real_folder(path: str) -> str:
    """A folder's path without links, ending in /."""
    return os.path.join(os.path.realpath(path), "")


def is_text(name: str) -> bool:
    """Whether a file's name is UTF-8."""
    return name.isascii() or printable(name) == name


def kind_of(entry: os.DirEntry) -> str:
    """The kind of an entry of a folder: folders, pictures, arrays, lists, tables, tars; else why it is left out.

    By its name; where that has no ending, as of scans, by its first bytes.
    """
    name = entry.name
    if not is_text(name):
        return "names that are not UTF-8; rename them, such as by convmv"
    if entry.is_dir():
        return "folders"
    if not entry.is_file():
        return "dangling links, and entries that are no files"
    if LIST_NAME.fullmatch(name.lower()):
        return "lists"
    ending = name[name.rfind(".") :].lower()
    if ending in KINDS:
        return KINDS[ending]
    if ending_of(name):
        return f"{ending} files"
    return "pictures" if is_image(first_bytes(entry.path)) else "files without an ending"


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
    text = str(value or "").strip()
    return SPLIT_WORDS.get(text.lower(), text) or None


def split_of_shard(path: str) -> str:
    """The split of a shard by its name: NAME of NAME-00000-of-00012, or a word such as train, val or test.

    Words of the folders around it count if its own name has none. Without a word and a NAME it is train.
    """
    *folders, name = path.split("/")
    numbered = NUMBERED_SHARD.match(name)
    own = SPLIT_WORD_AT_END.search(numbered[1].lower()) if numbered else SPLIT_WORD_INSIDE.search(name.lower())
    words = [own, *(SPLIT_WORD_INSIDE.search(folder.lower()) for folder in reversed(folders))]
    word = next(filter(None, words), None)
    if word:
        return SPLIT_WORDS[word[1]]
    return numbered[1] if numbered else "train"


def shards_by_split(shards: Iterable[str], start: str) -> dict[str, list[str]]:
    """Split -> shards, which are paths or URLs from `start` on; training first."""
    splits: dict[str, list[str]] = defaultdict(list)
    for shard in shards:
        splits[split_of_shard(shard)].append(start + shard)
    return {split: splits[split] for split in sorted(splits, key=split_order)}


def incomplete_sets(paths: Iterable[str]) -> list[str]:
    """A line for each set of shards, by their names, of which some are not there, or that is there in several sizes."""
    shards = filter(None, map(SHARD_OF_SET.fullmatch, paths))
    counts = Counter((shard["set"], int(shard["size"])) for shard in shards)
    sizes = Counter(name for name, _ in counts)
    return [
        f"{count} of {size} shards are there of {os.path.basename(name)}: images are missing, or in two sets"
        for (name, size), count in counts.items()
        if count < size or sizes[name] > 1
    ]


def find_places(folders: Collection[str], config: ImagesConfig) -> tuple[dict[str, str | None], dict[str, str]]:
    """The splits and the classes of the folders of a tree, such as "train/cat/".

    Returns:
        Folder -> split, None for a folder next to those of splits; and folder -> class, without folders of no class.
    Raises:
        UserError: inner and outer folders would be different classes, and `data.label_folder` does not say which.
    """
    paths = {folder: folder.split("/")[:-1] for folder in folders}
    top = 0  # the level of splits: below the folders that are around all others
    for level in zip_longest(*paths.values()):
        names = {*level} - {None}
        if len(names) > 1 or min(names).lower() in SPLIT_WORDS:
            break
        top += 1
    splits = {folder: SPLIT_WORDS.get("".join(parts[top : top + 1]).lower()) for folder, parts in paths.items()}
    if any(splits.values()):
        top += 1
    else:
        splits = dict.fromkeys(paths, "train")
    below = {folder: parts[top:] for folder, parts in paths.items() if splits[folder]}
    training = {folder: parts for folder, parts in below.items() if splits[folder] == "train"} or below

    names_of_levels = [{*names} - {None} for names in zip_longest(*training.values())]
    levels = [level for level, names in enumerate(names_of_levels) if len(names) > 1]
    if not levels:
        return splits, {}
    is_outer = config.label_folder == "outer"
    if config.label_folder is None and len(levels) > 1:
        outer, inner = (shortened(sorted(names_of_levels[level])) for level in (levels[0], levels[-1]))
        problem = f"{config.group_name}.label_folder is null, and folders inside each other have different names"
        raise UserError(f"{problem}; it must be outer (classes {outer}) or inner ({inner})")
    level = levels[0] if is_outer else levels[-1]
    classes = {
        folder: parts[: level + 1][-1]
        for folder, parts in training.items()
        if parts and (len(parts) > level or not is_outer)
    }
    known = {*classes.values()}
    held_out = {folder: parts for folder, parts in below.items() if folder not in training}
    pairs = {(splits[folder], parts[level]) for folder, parts in held_out.items() if len(parts) > level}
    counts = Counter(split for split, _ in pairs)
    for folder, parts in held_out.items():
        of_training = [part for part in (*parts, *parts[level : level + 1]) if part in known]
        if of_training:
            classes[folder] = of_training[-1]
        elif len(parts) > level and counts[splits[folder]] > 1:  # one folder is around all, as of a flat `val`
            classes[folder] = parts[level]
    return splits, classes
