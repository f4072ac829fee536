"""Folders and archives of this machine: what the library takes for images, and what it leaves out."""

import hashlib
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow.compute as pc
from datasets.packaged_modules import _EXTENSION_TO_MODULE
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from mpp.runtime.lock import hold

SHARD_FILES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}  # and how the library calls them
ARCHIVES = (".zip", ".tar.gz", ".tgz")  # of a folder of images
ARRAY_FILES = (".npy", ".npz")
NOT_READ = (".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw")  # of phones and cameras
SAYS_SPLITS = re.compile(r"\A---\s.*?^(configs|dataset_info):.*?^---", re.DOTALL | re.MULTILINE)
LISTS = {"metadata.csv": pd.read_csv, "metadata.jsonl": partial(pd.read_json, lines=True)}
LISTS |= {"metadata.parquet": pd.read_parquet}
"""What says which images of a folder count, and how it is read: by the library that `datasets` reads it with."""


def unpacked(archive: Path) -> Path:
    """An archive's files in the library's cache, whole: known by the archive's place, size and time.

    The library alone would take what a full disk has left of them, or those of an earlier archive in that place.
    """
    known = archive.resolve(), archive.stat().st_size, archive.stat().st_mtime_ns
    cache = Path(datasets.config.EXTRACTED_DATASETS_PATH).absolute()
    place = cache / hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    whole, aside = place / "files", place / "partial"
    with hold(place, "HF_DATASETS_CACHE", wait=True):
        if not whole.exists():
            shutil.rmtree(aside, ignore_errors=True)
            library = datasets.DownloadManager(download_config=datasets.DownloadConfig(cache_dir=aside))
            made = Path(library.extract(str(archive)))
            if not made.is_relative_to(aside):  # the user's own file, which is no archive
                return archive
            made.replace(whole)
            shutil.rmtree(aside, ignore_errors=True)
    return whole


def load_folder(folder: Path, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A folder's splits: of arrays, of pictures, or what `load` makes of it, which is the library's guess.

    The library goes by the first files' most common extension, so that pictures beside a text or a video each are texts
    or videos to it. It takes `scene.tif.ovr` for a picture, and gives those of several lists in an order that differs
    from process to process.
    """
    names = [name for _, _, names in os.walk(folder) for name in names if name[0] != "."]
    warn_of_what_is_not_read(folder, names)
    lists = sum(name in LISTS for name in names)
    ends = {end_of(name) for name in names if name not in LISTS}
    pictures = not ends.isdisjoint(ImageFolder.EXTENSIONS) and ends.isdisjoint(SHARD_FILES)
    if not pictures:
        arrays = ends.isdisjoint((*ImageFolder.EXTENSIONS, *SHARD_FILES)) and not ends.isdisjoint(ARRAY_FILES)
        return load_arrays(str(folder)) if arrays else load()
    guessed = ends.isdisjoint({*_EXTENSION_TO_MODULE} - {*ImageFolder.EXTENSIONS}) or says_splits(folder)
    splits = load() if guessed else datasets.load_dataset("imagefolder", data_dir=str(folder))
    beside = any(end_of(os.path.splitext(name)[0]) in ImageFolder.EXTENSIONS for name in names)
    return {name: in_order(rows) for name, rows in splits.items()} if beside or lists > 1 else splits


def says_splits(folder: Path) -> bool:
    """Whether the folder's README.md is a card that says what the splits are, as the hub's datasets have it."""
    card = folder / "README.md"
    return card.is_file() and SAYS_SPLITS.match(card.read_text(errors="replace")) is not None


def warn_of_what_is_not_read(folder: Path, names: list[str]) -> None:
    """Say, once, that a folder has pictures of a kind that nobody here decodes: a phone's, or a camera's raw ones."""
    found = Counter(end for end in map(end_of, names) if end in NOT_READ and end not in ImageFolder.EXTENSIONS)
    if found and os.environ.get("RANK", "0") == "0":
        what = ", ".join(f"{count} {end} files" for end, count in found.items())
        print(f"warning: data.path {folder} has {what}, which mpp does not read; convert them to JPEG", file=sys.stderr)


def end_of(name: str) -> str:
    """A file name's last extension."""
    return os.path.splitext(name)[1].lower()


def in_order(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows whose files are pictures, by the names of these."""
    if "image" not in rows.column_names:
        return rows
    paths = pc.struct_field(rows.data.column("image"), "path").to_pylist()
    kept = [index for index, path in enumerate(paths) if end_of(path or "") in ImageFolder.EXTENSIONS]
    return rows.select(sorted(kept, key=lambda index: paths[index])).flatten_indices()


def warn_of_images_left_out(folder: Path, named: str, splits: dict[str, Any]) -> None:
    """Say that the library did not take all images of a folder. It takes `steam train.jpg` for a split."""
    if os.environ.get("RANK", "0") != "0" or not all(hasattr(rows, "num_rows") for rows in splits.values()):
        return
    walked = [each for each in os.walk(folder) if "/." not in each[0][len(str(folder)) :]]
    links = [os.path.join(place, each) for place, folders, _ in walked for each in folders]
    data = os.path.join(str(folder), "data")  # where the library does follow
    if links := [each for each in links if os.path.islink(each) and each != data]:
        unread = "links to folders are not followed; link the files, or copy the folder"
        print(f"warning: data.path {named} has {links[0]}: {unread}", file=sys.stderr)
    files = [(place, name) for place, _, names in walked for name in names if name[0] != "."]
    lists = [file for file in files if file[1] in LISTS]
    listed = {path for place, name in lists for path in named_by(place, name)}
    left = (name for place, name in files if os.path.normpath(os.path.join(place, name)) not in listed)
    found = Counter(os.path.splitext(name)[1].lower() for name in left)
    if any(found[each] for each in SHARD_FILES):
        return
    taken = sum(rows.num_rows for rows in splits.values())
    count = max(sum(found[end] for end in ends) for ends in (ImageFolder.EXTENSIONS, ARRAY_FILES))
    if taken < (count := count + taken * bool(lists)):
        print(
            f"warning: data.path {named} has {count} images, and {taken} are used, as {', '.join(splits)}; a word "
            "such as train, val or test in the name of a folder or file makes a split, and images in no split are left "
            f"out, as arrays beside pictures are, and what {' or '.join(LISTS)} do not list",
            file=sys.stderr,
        )


def named_by(place: str, name: str) -> Iterator[str]:
    """A list in a folder, and the files that it names: images, and what goes with them, such as masks."""
    table = LISTS[name](os.path.join(place, name))
    columns = (table[each] for each in table.columns if each == "file_name" or str(each).endswith("_file_name"))
    yield os.path.normpath(os.path.join(place, name))
    yield from (os.path.normpath(os.path.join(place, str(file))) for column in columns for file in column.dropna())


def load_arrays(folder: str) -> dict[str, Any]:
    """A folder of arrays as the library loads a folder of pictures: splits and labels by the names of folders."""
    pictures, ImageFolder.EXTENSIONS = ImageFolder.EXTENSIONS, list(ARRAY_FILES)
    try:
        return datasets.load_dataset("imagefolder", data_dir=folder)
    finally:
        ImageFolder.EXTENSIONS = pictures
