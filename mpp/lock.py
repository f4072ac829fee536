"""One run, one folder: a second process that would write into it is refused."""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

NAME = ".lock"


class Held(ValueError):
    """Another process holds the folder."""


held: set[int] = set()  # descriptors; loader processes inherit them, and must not outlive the run as its holders


def let_go() -> None:
    """Close the inherited locks, in a new child: the parent keeps them."""
    while held:
        os.close(held.pop())


os.register_at_fork(after_in_child=let_go)


@contextmanager
def hold(folder: Path, key: str, wait: bool = False) -> Iterator[None]:
    """Hold a folder while open; the kernel lets go when the process dies.

    Args:
        key: the setting that names the folder.
        wait: until another process that holds it lets go.
    Raises:
        Held: another process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            message = f"{key} is {folder}, which {holder} is writing; wait for it, or choose another {key}"
            raise Held(message) from None
        except OSError as error:  # Lustre mounted without flock, say
            print(f"warning: {folder} cannot be locked ({error}): start no second run in it", file=sys.stderr)
        yield
    finally:
        held.discard(descriptor)
        os.close(descriptor)


@contextmanager
def exclusive(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the run folder while open, for all processes of this run.

    Raises:
        Held: on every process, where another run holds it.
    """
    with ExitStack() as stack:
        refusal = None
        if accelerator.is_main_process:
            try:
                stack.enter_context(hold(folder, "run.dir"))
            except Held as error:
                refusal = str(error)
        refusals = [each for each in gather_object([refusal]) if each]
        if refusals:
            raise Held(refusals[0])
        yield
