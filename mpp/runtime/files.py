"""Files that survive the machine."""

import os
import shutil
import stat
import time
from pathlib import Path

from mpp.runtime.output import printable

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
    """Write a file that is complete or absent: UTF-8, whatever the locale and whatever names of files are in it."""
    aside = aside_of(file)
    aside.write_text(printable(text), encoding="utf-8")
    sync(aside)
    aside.replace(file)


def appears(file: Path) -> bool:
    """Whether a file that another machine may have written is there: NFS looks again after a minute at the latest."""
    end = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.2)
    return file.exists()


def share(file: Path) -> None:
    """Give a file the permissions of any new file beside it: safetensors writes for the owner only."""
    usual = file.with_name(f".{file.name}.usual")
    usual.touch()  # asks the umask, which other threads may not see changed, and the folder's access control list
    mode = usual.stat().st_mode
    usual.unlink()
    if file.stat().st_mode != mode:  # not all file systems let modes be set
        file.chmod(stat.S_IMODE(mode))


def put(aside: Path, folder: Path) -> None:
    """Let a folder of files that was written aside take the place of `folder`, if there is one; durably.

    Both lie in the same folder. At every moment `folder` is whole or absent. Its files have the permissions of any
    new file.

    Raises:
        OSError: the files cannot be written.
    """
    files = list(aside.iterdir())
    for file in files:
        share(file)
    for path in (*files, aside):
        sync(path)
    earlier = folder.with_name(f".{folder.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        os.replace(folder, earlier)  # not deleted where it lies: a crash could leave half of it
    os.replace(aside, folder)
    sync(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)
