"""File names and extensions: which are images, shards, lists of images or neither."""

import os
import re

from mpp.data.decoding.formats import OPTIONAL_EXTENSIONS

ALWAYS_READ_EXTENSIONS = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif"),
        *(".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"),
    )
)
PICTURE_EXTENSIONS = ALWAYS_READ_EXTENSIONS | OPTIONAL_EXTENSIONS.keys()
"""Of pictures; of some, the decoder may be absent."""
ARRAY_EXTENSIONS = frozenset((".npy", ".npz"))
IMAGE_EXTENSIONS = PICTURE_EXTENSIONS | ARRAY_EXTENSIONS
SHARD_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
"""Extension of a shard -> the builder that `datasets` reads it with."""
TABLE_EXTENSIONS = frozenset((".parquet", ".arrow"))
UNSUPPORTED_EXTENSIONS = frozenset(
    (
        *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".rw2", ".orf", ".pef", ".srw"),
        *(".psd", ".svg", ".eps", ".exr", ".hdr"),
    )
)
"""Of phones, cameras, scanners and drawings: no decoder here reads them."""
LIST_EXTENSIONS = (".csv", ".tsv", ".jsonl")
LIST_NAME = re.compile(r"(metadata|labels)\.(csv|tsv|jsonl|parquet)")
"""Names of files that list the images of a folder and their labels."""
EXTENSION = re.compile(r"\.[a-z][a-z0-9]{1,6}")
SYSTEM_FILES = frozenset(
    (
        *("__MACOSX", "Thumbs.db", "desktop.ini"),
        *("$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle", "#snapshot"),
    )
)
"""Of operating systems and network disks: thumbnails, deleted files, older states."""


def extension_of(name: str) -> str:
    """A file name's extension in lower case: ".jpg"; "" where the text after its last dot is none, as in "scan.2"."""
    extension = os.path.splitext(name)[1].lower()
    return extension if EXTENSION.fullmatch(extension) else ""


def without_extension(name: str) -> str:
    """A file name, or a path, without its extension."""
    return name[: len(name) - len(extension_of(name))]


def is_list(name: str) -> bool:
    """Whether a file's name is that of a list of images."""
    return LIST_NAME.fullmatch(name.lower()) is not None
