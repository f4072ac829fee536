"""Files: crash-safe writes (a temporary path, sync, rename), locks of folders, digests.

The lock is filelock's: the kernel releases it when the process dies, and loader processes do not inherit it. A folder
on a file system without such locks is refused: filelock's substitute, a file that names the holder, would outlive a
killed process.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mpp.errors import UserError
from mpp.runtime.messages import printable

BLOCK_BYTES = 2**20  # of a file that are read at a time
LOCK = ".lock"
"""File of the lock in a folder that is or was held."""


class Held(UserError):
    """Another process holds the folder."""


def read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file; empty where it is missing or cannot be read."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return {}


@contextmanager
def complete(path: Path, shared: bool = False) -> Iterator[Path]:
    """Write a file or a folder that is complete or absent at every moment, even if the machine crashes.

    The caller writes to the temporary path that this yields, which lies next to `path`. At the end of the `with` block
    it is synced and replaces any earlier `path`. After an exception it is deleted, and `path` is as before.
    Files in a folder get the permissions of any new file.

    Args:
        shared: whether other processes may write the same path at the same time; each then has a temporary path of
            its own.
    Raises:
        OSError: the file or folder cannot be written.
    """
    partial = partial_path(path.with_name(f"{path.name}.{os.getpid()}") if shared else path)
    delete(partial)
    try:
        yield partial
        if partial.is_dir():
            finish_folder(partial)
            move_aside(path)
        else:
            sync(partial)
        os.replace(partial, path)
        sync(path.parent)
        delete(earlier_path(path))
    except BaseException:
        delete(partial)
        raise


def partial_path(path: Path) -> Path:
    """The temporary path next to `path`, at which it is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


def earlier_path(path: Path) -> Path:
    """The path next to `path` to which a folder is moved while another one replaces it."""
    return path.with_name(f".{path.name}.earlier")


def clear_leftovers(path: Path) -> None:
    """Delete the partial files that a killed process left next to `path`; no other process may write there now.

    A folder that was moved aside, and whose successor did not take its place, takes it again.
    """
    delete(partial_path(path))
    earlier = earlier_path(path)
    if earlier.exists() and not path.exists():
        os.replace(earlier, path)
    delete(earlier)


def write_complete(file: Path, text: str) -> None:
    """Write a text file that is complete or absent: UTF-8, whatever the locale and whatever file names are in it."""
    with complete(file) as partial:
        partial.write_text(printable(text), encoding="utf-8")


def finish_folder(folder: Path) -> None:
    """Give a folder's files the usual permissions, and sync all to disk."""
    files = list(folder.iterdir())
    for file in files:
        use_default_permissions(file)
    for path in (*files, folder):
        sync(path)


def move_aside(folder: Path) -> None:
    """Move a folder that is to be replaced: deleted where it lies, a crash could leave half of it."""
    delete(earlier_path(folder))
    if folder.exists():
        os.replace(folder, earlier_path(folder))


def delete(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file or a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def use_default_permissions(file: Path) -> None:
    """Give a file the permissions of any new file next to it: safetensors writes for the owner only."""
    probe = file.with_name(f".{file.name}.usual")
    probe.touch()  # asks the umask, which other threads may not see changed, and the folder's access control list
    with suppress(OSError):  # not all file systems let modes be set
        shutil.copymode(probe, file)
    probe.unlink()


@contextmanager
def hold(folder: Path, key: str, wait: bool = False) -> Iterator[None]:
    """Hold a folder for the `with` block.

    Args:
        key: the setting that names the folder.
        wait: wait until another process that holds it releases it.
    Raises:
        Held: another process holds it.
        UserError: the folder cannot be locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=-1 if wait else 0, is_singleton=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        problem = f"{key} is {folder}, which another process is writing"
        raise Held(f"{problem}; wait for it, or choose another {key}") from None
    except OSError as error:  # Lustre mounted without flock, say, or a folder of another user
        allowed = "a folder that you may write to, on a file system that has locks"
        raise UserError(f"{key} is {folder}, which cannot be locked ({error}); it must be {allowed}") from error
    try:
        yield
    finally:
        lock.release()


def short_digest(pieces: Iterable[bytes], digits: int = 16) -> str:
    """The first hexadecimal digits of the SHA-256 of all pieces."""
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()[:digits]


def sha256_of(file: Path) -> str:
    """SHA-256 of a file as 64 hexadecimal digits; empty where the file is missing."""
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        return short_digest(iter(lambda: opened.read(BLOCK_BYTES), b""), digits=64)
