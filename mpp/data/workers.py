"""Loader processes: what each is reading, for when one dies, and what signals mean to them.

torch's DataLoader leaves all this to its user, and no library has it (tests/test_faults.py breaks a run without it):

- The notes, memory that a loader process shares with its parent. A decoder that crashes takes its process with it, and
  torch says its number and nothing else. What it was reading stands in the notes.
- What a user is told is one line. torch hands on a loader process's error with its traceback for a message.
- Signals are ignored. A terminal and a job scheduler send them to all processes, and the training process wants to
  finish its step with what is loaded.
- They are killed at exit, and where a run fails. A loader process that ignores SIGTERM would otherwise be waited for,
  for ever where it hangs in a decoder.
- They are started again where one does not begin. Python 3.10 may leave a fork waiting for a lock that another thread
  of its parent held, such as one of a process group. The parent would wait for its batches for ever.
"""

import copy
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mpp.config.imports import import_words, take_imports
from mpp.errors import UserError
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.output import steady_output
from mpp.runtime.signals import SIGNALS

FORKS = sys.platform == "linux"
"""Whether loader processes are forks, which share the images that are kept decoded: elsewhere, each has its copy."""
DEAD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(.*)")
PROCESS_NAME = "image loader"
NOTHING = -1
BEGINS = 60.0  # seconds in which a loader process does, on any machine
STARTS = 3  # how often it is tried


@dataclass
class Notes:
    """What a process notes: in a loader process, where its parent and those beside it see it."""

    reading: np.ndarray  # [its pid, the index of the image that it reads]
    said: np.ndarray  # [whether a warning that concerns all was printed]


notes = Notes(np.zeros(2, np.int64), np.zeros(1, np.int64))  # this process's
alive: "WeakSet[WatchedLoader]" = WeakSet()  # torch's error, raised wherever the main thread is, names no loader


def note_reading(index: int) -> None:
    """Note which image is being read, or NOTHING."""
    notes.reading[1] = index


def say_once(warning: str) -> None:
    """Print a warning, unless this process or a loader process beside it has, since `forget_said`."""
    if not notes.said[0]:
        notes.said[0] = 1
        print(warning, file=sys.stderr, flush=True)


def forget_said() -> None:
    """What was said is over; said again, it is news."""
    notes.said[0] = 0


def start_worker(watch: Tensor, told: Tensor, imports: list[str], worker: int) -> None:
    """Start a loader process (see DataLoader's worker_init_fn)."""
    steady_output()  # a fork has it from its parent
    take_imports(imports)  # likewise
    notes.reading, notes.said = watch[worker].numpy(), told.numpy()
    notes.reading[:] = os.getpid(), NOTHING
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers(spared: Collection[multiprocessing.Process] = ()) -> None:
    """End this process's loader processes, which listen to nobody else and have nothing to lose."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # nobody else may handle signals
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if in_main_thread else None  # torch's calls it a failure
    for child in multiprocessing.active_children():
        if child.name == PROCESS_NAME and child not in spared:
            child.kill()
            child.join(1)
    if in_main_thread:
        signal.signal(signal.SIGCHLD, handler)


class WatchedLoader:
    """torch's loader, of which `deaths_explained` can say which image a loader process died of.

    Args:
        dataset: calls `note_reading` before each image and after it.
        name: index of an image to what a person finds it by.
        options: DataLoader's.
    """

    def __init__(self, dataset: Any, name: Callable[[int], str], **options: Any):
        self.name, self.begun = name, options["num_workers"] == 0
        self.watch = torch.zeros(max(1, options["num_workers"]), 2, dtype=torch.int64).share_memory_()
        told = torch.zeros(1, dtype=torch.int64).share_memory_()
        own = torch.Generator().manual_seed(0)  # the loader would draw from the global one
        options = dict(pin_memory=uses_gpu()) | options
        if options["num_workers"]:
            context = copy.copy(multiprocessing.get_context("fork" if FORKS else None))  # 3.14 would not fork
            context.Process = partial(context.Process, name=PROCESS_NAME)
            options["multiprocessing_context"] = context
        shared = dict(generator=own, worker_init_fn=partial(start_worker, self.watch, told, import_words()))
        self.build = partial(DataLoader, dataset, **shared, **options)
        self.loader = self.build()
        alive.add(self)
        Finalize(None, kill_workers, exitpriority=0)  # runs before multiprocessing waits for its children

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Batches. Loader processes start now, not with the first batch: a fork beside other threads may hang."""
        return self.explained(iter(self.loader) if self.begun else self.start())

    def start(self) -> Iterator[Any]:
        """torch's iterator, all of whose loader processes have begun; UserError where they do not."""
        for _ in range(STARTS):
            others, end = multiprocessing.active_children(), time.monotonic() + BEGINS
            self.watch.zero_()
            batches = iter(self.loader)
            while not self.watch[:, 0].all() and time.monotonic() < end:
                time.sleep(0.001)
            if self.watch[:, 0].all():
                self.begun = self.loader.persistent_workers
                return batches
            del batches
            kill_workers(spared=others)
            self.loader = self.build()  # the other one remembers those that are dead
        where = "" if FORKS else "; a script, which each of them begins with, needs `if __name__ == '__main__':`"
        raise UserError(f"loader processes do not begin within {BEGINS:.0f} s; data.workers 0 has none{where}")

    def explained(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches  # a generator keeps this object, and so its watch, alive
        except UserError as error:
            last = str(error).rstrip().rsplit("\n", 1)[-1]
            raise type(error)(last.removeprefix(f"{type(error).__module__}.{type(error).__qualname__}: ")) from error


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
        found = DEAD.search(str(error))
        if found is None:
            raise
        dead = [int(pid) for pid in found[1].split(",")]
        read = [loader.name(i) for loader in alive for pid, i in loader.watch.tolist() if pid in dead and i != NOTHING]
        what = f"while it read {', '.join(read)}; take this image out or, if" if read else "between two images; if"
        message = f"a loader process died ({found[2].strip(' .')}) {what} memory ran out, use fewer data.workers"
        raise UserError(message) from error
