"""Crash-safe writes: to a temporary path next to the final one, sync, then rename."""

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpp.runtime.output import printable

APPEARS_WITHIN_S = 90  # NFS looks for new files of other machines after a minute at the latest


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
    partial = partial_path(path)
    if shared:
        partial = partial_path(path.with_name(f"{path.name}.{os.getpid()}"))
    delete(partial)
    try:
        yield partial
        if partial.is_dir():
            finish_folder(partial)
            replace_folder(partial, path)
        else:
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
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


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename a finished folder to `folder`, and delete the one that was there."""
    earlier = earlier_path(folder)
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        os.replace(folder, earlier)  # not deleted where it lies: a crash could leave half of it
    os.replace(partial, folder)
    sync(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)


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
    mode = probe.stat().st_mode
    probe.unlink()
    if file.stat().st_mode != mode:  # not all file systems let modes be set
        file.chmod(stat.S_IMODE(mode))


def appears(file: Path) -> bool:
    """Whether a file that another machine may have written is there; waits for it up to APPEARS_WITHIN_S."""
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return file.exists()
