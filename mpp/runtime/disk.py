"""Files that survive the machine."""

import os
import shutil
import time
from pathlib import Path

PATIENCE = 90  # seconds


def sync(path: Path) -> None:
    """Make a file or a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside_of(path: Path) -> Path:
    """Where a file or folder is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


def write_whole(file: Path, text: str) -> None:
    """Write a file that is complete or absent."""
    aside = aside_of(file)
    aside.write_text(text)
    sync(aside)
    aside.replace(file)


def appears(file: Path) -> bool:
    """Whether a file that another machine may have written is there: NFS looks again after a minute at the latest."""
    end = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.2)
    return file.exists()


def put(aside: Path, folder: Path) -> None:
    """Let a folder of files that was written aside take the place of `folder`, if there is one; durably.

    Both lie in the same folder. At every moment `folder` is whole or absent.

    Raises:
        OSError: the files cannot be written.
    """
    for path in (*aside.iterdir(), aside):
        sync(path)
    earlier = folder.with_name(f".{folder.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        os.replace(folder, earlier)  # not deleted where it lies: a crash could leave half of it
    os.replace(aside, folder)
    sync(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)
