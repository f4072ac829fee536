"""One run, one folder: a second process that would write into it is refused.

The lock is filelock's: the kernel releases it when the process dies, and loader processes do not inherit it. A folder
on a file system without such locks is refused: filelock's substitute, a file that names the holder, would outlive a
killed process.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from mpp.errors import UserError
from mpp.runtime.processes import on_main_process

LOCK = ".lock"
HOLDER = ".lock.holder"
LOCK_FILES = {LOCK, HOLDER}
"""Files of the lock in a folder that is or was held."""
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class Held(UserError):
    """Another process holds the folder."""


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
        message = f"{key} is {folder}, which {holder_of(folder)} is writing; wait for it, or choose another {key}"
        raise Held(message) from None
    except OSError as error:  # Lustre mounted without flock, say, or a folder of another user
        allowed = "that you may write to" if error.errno in FORBIDDEN else "on a file system that has locks"
        raise UserError(f"{key} is {folder}, which cannot be locked ({error}); choose a {key} {allowed}") from error
    try:
        with suppress(OSError):  # only for messages
            (folder / HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink()
        lock.release()


def holder_of(folder: Path) -> str:
    """The holder of a folder, for a message."""
    try:
        return (folder / HOLDER).read_text(encoding="utf-8") or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"


@contextmanager
def exclusive(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the run folder for the `with` block, for all processes of this run.

    Raises:
        Held: on every process, where another run holds it.
        UserError: on every process, where it cannot be locked.
    """
    with ExitStack() as stack:
        on_main_process(accelerator, lambda: stack.enter_context(hold(folder, "run.dir")))
        yield
