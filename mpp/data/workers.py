"""Loader processes: what each is reading, for when one dies, and what signals mean to them.

Why each part has to be (tests/test_faults.py breaks a run without it):

- The watch, shared memory with a place for each loader process. A decoder that crashes takes its process with it, and
  torch says its number and nothing else. What it was reading stands in the watch.
- What a user is told is one line. torch hands on a loader process's error with its traceback for a message.
- Signals are ignored. A terminal and a job scheduler send them to all processes, and the training process wants to
  finish its step with what is loaded.
- They are killed at exit, and where a run fails. A loader process that ignores SIGTERM would otherwise be waited for,
  for ever where it hangs in a decoder.
"""

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mpp.errors import UserError
from mpp.runtime.hardware import uses_gpu

FORKS = sys.platform == "linux"
"""Whether loader processes are forks, which share the images that are kept decoded: elsewhere, each has its copy."""
DEAD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(.*)")
NOTHING = -1
slot: np.ndarray | None = None  # in a loader process: [its pid, the index of the image that it reads]
said = np.zeros(1, dtype=np.int64)  # whether a warning that concerns all was printed; loader processes share it
alive: "WeakSet[WatchedLoader]" = WeakSet()
left: set[int] = set()  # processes of loaders that may be gone while torch's iterator, held by an error, is not
cleared_by = 0  # the process whose exit ends its loader processes


def note_reading(index: int) -> None:
    """Note which image is being read, or NOTHING."""
    if slot is not None:
        slot[1] = index


def say_once(warning: str) -> None:
    """Print a warning, unless this process or a loader process beside it has, since `forget_said`."""
    if not said[0]:
        said[0] = 1
        print(warning, file=sys.stderr, flush=True)


def forget_said() -> None:
    """What was said is over; said again, it is news."""
    said[0] = 0


def start_worker(watch: Tensor, told: Tensor, worker: int) -> None:
    """Start a loader process (see DataLoader's worker_init_fn).

    Signals are its parent's affair, which may want to finish a step with what is loaded: a terminal and a job scheduler
    send them to all processes.
    """
    global slot, said
    slot, said = watch[worker].numpy(), told.numpy()
    slot[:] = os.getpid(), NOTHING
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """End this process's loader processes, which listen to nobody else and have nothing to lose."""
    watched = left | {pid for loader in alive for pid, _ in loader.watch.tolist()}
    with deaths_unnoticed():
        for child in multiprocessing.active_children():
            if child.pid in watched:
                child.kill()
                child.join(1)


@contextmanager
def deaths_unnoticed() -> Iterator[None]:
    """While open, torch's handler does not call the end of a loader process a failure."""
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


class WatchedLoader:
    """torch's loader, of which `explain` can say which image a loader process died of.

    Args:
        dataset: calls `note_reading` before each image and after it.
        name: index of an image to what a person finds it by.
        options: DataLoader's.
    """

    def __init__(self, dataset: Any, name: Callable[[int], str], **options: Any):
        global cleared_by
        self.name = name
        self.watch = torch.zeros(max(1, options["num_workers"]), 2, dtype=torch.int64).share_memory_()
        told = torch.zeros(1, dtype=torch.int64).share_memory_()
        own = torch.Generator().manual_seed(0)  # the loader would draw from the global one
        options = dict(pin_memory=uses_gpu()) | options
        if FORKS and options["num_workers"]:  # whatever this Python would choose: 3.14 starts new processes
            options["multiprocessing_context"] = "fork"
        shared = dict(generator=own, worker_init_fn=partial(start_worker, self.watch, told))
        self.loader = DataLoader(dataset, **shared, **options)
        alive.add(self)
        if cleared_by != os.getpid():
            cleared_by = os.getpid()
            Finalize(None, kill_workers, exitpriority=0)  # runs before multiprocessing waits for its children

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.loader  # a generator keeps this object, and so its watch, alive
        except UserError as error:
            last = str(error).rstrip().rsplit("\n", 1)[-1]
            raise type(error)(last.removeprefix(f"{type(error).__module__}.{type(error).__qualname__}: ")) from error
        finally:
            left.update(pid for pid, _ in self.watch.tolist() if pid)


@contextmanager
def deaths_explained() -> Iterator[None]:
    """While open, the death of a loader process is an error that names the image which it read.

    torch raises its own error wherever the main thread is, not where the batch was asked for: open this around all.

    Raises:
        UserError: a loader process died.
    """
    try:
        yield
    except RuntimeError as error:
        message = explain(error)
        if message is None:
            raise
        raise UserError(message) from error


def explain(error: RuntimeError) -> str | None:
    """In one line, with the image's name, why a loader process died; None: the error is another.

    torch raises it wherever the main thread is, not where the batch was asked for.
    """
    found = DEAD.search(str(error))
    if found is None:
        return None
    dead = [int(pid) for pid in found[1].split(",")]
    images = [loader.name(i) for loader in alive for pid, i in loader.watch.tolist() if pid in dead and i != NOTHING]
    what = f"while it read {', '.join(images)}; take this image out or, if" if images else "between two images; if"
    return f"a loader process died ({found[2].strip(' .')}) {what} memory ran out, use fewer data.workers"
