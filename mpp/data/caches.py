"""Folders of derived data that are made once and kept for later starts: samples of streams. Listings are made again.

They lie in the cache of `datasets` (HF_DATASETS_CACHE), in a folder that only its user may write to. All processes of a
machine share them. The kernel's lock on a file says which process makes one and which use it: it ends with its process.
"""

import fcntl
import os
import random
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import datasets

from mpp.errors import UserError
from mpp.runtime.files import complete, delete, partial_path

CACHE_NAME = "mpp"
ROWS_FILE = "rows.arrow"
"""Of a table in such a folder."""
MAX_BYTES = 20e9
"""Of all folders together, but for those that are in use."""
locks: dict[Path, IO[str]] = {}
"""Of the folders that this process uses, to its end."""


def cached(key: str, make: Callable[[Path], None], is_kept: bool = True) -> Path:
    """The folder of a key: complete, and not removed while this process or a fork of it lives.

    Args:
        key: the name of the folder, which tells its content from any other.
        make: fills an empty folder with files, none of them in folders. One process calls it, and the others wait.
        is_kept: whether it outlives the processes that use it. If not, one that a killed process left is made again.
    Raises:
        UserError: the cache cannot be written, or it is not the user's own.
    """
    cache = Path(datasets.config.HF_DATASETS_CACHE) / f"{CACHE_NAME}_{os.getuid()}"
    folder = cache / key
    if folder in locks and folder.exists():
        return folder
    try:
        require_own(cache)
        lock = locks[folder] = (cache / f"{key}.lock").open("a+")
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no other process uses it
                if not (is_kept and folder.exists()):
                    delete(folder)
                    with complete(folder) as partial:
                        partial.mkdir()
                        make(partial)
                    remove_unused(cache)
            fcntl.flock(lock, fcntl.LOCK_SH)  # waits for one that makes it
            if folder.exists():
                break
            fcntl.flock(lock, fcntl.LOCK_UN)  # several had it shared: one of them is to make it
            time.sleep(random.uniform(0, 0.1))
        os.utime(lock.fileno())  # the time of its last use
    except BaseException as error:
        if folder in locks:
            locks.pop(folder).close()  # the other processes make it, or fail themselves
        if isinstance(error, OSError):
            raise UserError(f"HF_DATASETS_CACHE: {cache} cannot be written: {error}; choose another") from error
        raise
    return folder


def discard(folder: Path) -> None:
    """Remove a folder that this process used, unless another process uses it: the last one removes it."""
    if folder not in locks:
        return
    with locks.pop(folder) as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        delete(folder)
        delete(folder.with_name(f"{folder.name}.lock"))


def require_own(cache: Path) -> None:
    """Make the folder of this user; raise OSError if another user could have written to it."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = cache.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError("others can write there, or it is no folder")


def remove_unused(cache: Path) -> None:
    """Remove the folders that were used longest ago, until all take MAX_BYTES; none that a process uses."""
    folders = sorted((cache / file.stem for file in cache.glob("*.lock")), key=last_use)
    sizes = {folder: size_of(folder) + size_of(partial_path(folder)) for folder in folders}
    excess = sum(sizes.values()) - MAX_BYTES
    for folder in folders:
        if excess <= 0:
            return
        if folder in locks:
            continue
        with (cache / f"{folder.name}.lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            delete(folder)
            delete(partial_path(folder))  # of a process that was killed
            excess -= sizes[folder]


def last_use(folder: Path) -> float:
    """The time at which a process last began to use a folder."""
    with suppress(FileNotFoundError):
        return folder.with_name(f"{folder.name}.lock").stat().st_mtime
    return 0.0


def size_of(folder: Path) -> int:
    """Bytes of a folder's files; 0: it is not there, or goes away meanwhile."""
    with suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0
