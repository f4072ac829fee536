"""Which files are images, shards, lists of images or neither, by their names."""

import os
import re

PICTURES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif"),
        *(".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"),
    )
)
ARRAYS = frozenset((".npy", ".npz"))
SHARDS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}  # and the library's name for each
TABLES = frozenset((".parquet", ".arrow"))
UNREADABLE_PICTURES = frozenset(
    (
        *(".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".jpx", ".jpf"),
        *(".dcm", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".psd", ".svg"),
        *(".eps", ".exr", ".hdr"),
    )
)
"""Of phones, cameras, scanners and drawings: no decoder here reads them."""
LISTS = re.compile(r"(metadata|labels)\.(csv|tsv|jsonl|parquet)")
"""Names of files that say which images of a folder count, and what they show."""
AN_ENDING = re.compile(r"\.[a-z][a-z0-9]{1,6}")
OF_THE_SYSTEM = ("__MACOSX", "Thumbs.db", "desktop.ini")


def ending(name: str) -> str:
    """A file name's ending in small letters: ".jpg"; "" where what follows its last dot is none, as in "scan.2"."""
    end = os.path.splitext(name)[1].lower()
    return end if AN_ENDING.fullmatch(end) else ""


def is_list(name: str) -> bool:
    """Whether a file's name is that of a list of images."""
    return LISTS.fullmatch(name.lower()) is not None
