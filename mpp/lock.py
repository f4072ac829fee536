"""One run, one folder: a second process that would write into it is refused."""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

NAME = ".lock"
held: set[int] = set()  # descriptors; loader processes inherit them, and must not outlive the run as its holders


def let_go() -> None:
    """Close the inherited locks, in a new child: the parent keeps them."""
    while held:
        os.close(held.pop())


os.register_at_fork(after_in_child=let_go)


@contextmanager
def exclusive(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the run folder while open, for all processes of this run. The kernel lets go when the process dies.

    Raises:
        ValueError: on every process, where another run holds it.
    """
    descriptor, refusal = None, None
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        held.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            refusal = f"run.dir is {folder}, which {holder} is writing; wait for it, or choose another run.dir"
        except OSError as error:  # Lustre mounted without flock, say
            print(f"warning: {folder} cannot be locked ({error}): start no second run in it", file=sys.stderr)
    try:
        refusals = [each for each in gather_object([refusal]) if each]
        if refusals:
            raise ValueError(refusals[0])
        yield
    finally:
        if descriptor is not None:
            held.discard(descriptor)
            os.close(descriptor)
