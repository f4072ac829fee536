"""Loader processes: the image that each is reading, in case it dies, and how they start, end and treat signals.

torch's DataLoader leaves all this to its user, and no library has it (tests/test_faults.py breaks a run without it):

- The notes, memory that a loader process shares with its parent. A decoder that crashes takes its process with it, and
  torch's error has its number and nothing else. The notes have the image that it was reading.
- A user's errors are one line. torch hands on a loader process's error with its traceback for a message.
- Signals are ignored. A terminal and a job scheduler send them to all processes, and the training process wants to
  finish its step with the batches that are loaded.
- They are killed at exit, and when a run fails. A loader process that ignores SIGTERM would otherwise be waited for,
  for ever where it hangs in a decoder.
- One that cannot hand over its batch ends. Python drops the batch, and the training process would wait for it.
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
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mpp.config import SourceConfig
from mpp.config.imports import import_words, take_imports
from mpp.errors import UserError, one_line
from mpp.runtime.hardware import cores, share_of_cores, uses_gpu
from mpp.runtime.messages import steady_output
from mpp.runtime.signals import SIGNALS

WORKERS_ARE_FORKS = sys.platform == "linux"
"""Whether loader processes are forks, which share the images that are kept decoded: elsewhere, each has its copy."""
DEATH_MESSAGE = "DataLoader worker (pid"  # torch's errors begin so
PROCESS_NAME = "image loader"
NO_IMAGE = -1  # in the notes, between two images
START_TIMEOUT_S = 60.0  # a loader process that has not begun by then hangs, on any machine
START_ATTEMPTS = 3
MAX_DEFAULT_WORKERS = 16  # per training process: more are seldom busy, and each holds batches in shared memory
CPU_WORKERS = 2  # more would take the cores that train


notes = np.zeros((2, 2), np.int64)
"""A row for each loader process, [its id, index of the image that it reads]; and [1 where a warning that concerns all
was printed, 0]. A loader process shares them with its parent and its siblings."""
row = 0  # of this process
loaders: "WeakSet[WatchedLoader]" = WeakSet()  # torch raises its error anywhere in the main thread, and names no loader


def loader_processes(data: SourceConfig) -> int:
    """Number of loader processes of this process: `data.workers` or, where it is null, the number for the device."""
    if data.workers is not None:
        return data.workers
    if uses_gpu():
        return min(MAX_DEFAULT_WORKERS, max(1, share_of_cores() - 1))
    return min(CPU_WORKERS, cores())


def note_reading(index: int | None) -> None:
    """Note the image that is being read; None: no image."""
    notes[row, 1] = NO_IMAGE if index is None else index


def warn_once(warning: str) -> None:
    """Print a warning, unless this process or another process of the same loader has printed one before."""
    if not notes[-1, 0]:
        notes[-1, 0] = 1
        print(warning, file=sys.stderr, flush=True)


def allow_warning_again() -> None:
    """The cause of the last warning is over: the next one is printed again."""
    notes[-1, 0] = 0


def start_worker(shared: Tensor, imports: list[str], worker: int) -> None:
    """Start a loader process (see DataLoader's worker_init_fn).

    Args:
        shared: (workers + 1, 2): see `notes`.
        imports: words of the command line that import code of the user.
    """
    global notes, row
    steady_output()  # a fork has it from its parent
    take_imports([word for word in imports if word not in import_words()])  # likewise
    notes, row = shared.numpy(), worker
    notes[row] = os.getpid(), NO_IMAGE
    sys.excepthook = lambda *error: None  # of the thread that hands over batches: its reader may be gone
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers(spared: Collection[multiprocessing.Process] = ()) -> None:
    """End this process's loader processes: they ignore signals, and have nothing to lose."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # other threads may not handle signals
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
        dataset: calls `note_reading` with each image before it reads it, and with None after it.
        image_name: index of an image -> its name in messages.
        options: DataLoader's.
    """

    def __init__(self, dataset: Any, image_name: Callable[[int], str], **options: Any):
        workers = options["num_workers"]
        self.image_name = image_name
        self.notes = torch.zeros(workers + 1, 2, dtype=torch.int64).share_memory_()
        options.setdefault("pin_memory", uses_gpu())
        options["worker_init_fn"] = partial(start_worker, self.notes, import_words())
        options["generator"] = torch.Generator().manual_seed(0)  # the loader would draw from the global one
        if workers:
            options["multiprocessing_context"] = worker_context()
        self.build = partial(DataLoader, dataset, **options)
        self.loader = self.build()
        loaders.add(self)
        Finalize(None, kill_workers, exitpriority=0)  # runs before multiprocessing waits for its children

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Batches. Loader processes start now, not with the first batch: a fork may hang once other threads run."""
        are_running = self.loader.persistent_workers and self.all_begun()
        return self.with_short_errors(iter(self.loader) if are_running else self.start())

    def start(self) -> Iterator[Any]:
        """torch's iterator, after all of its loader processes have begun; raises UserError where they do not."""
        for _ in range(START_ATTEMPTS):
            others = multiprocessing.active_children()
            end = time.monotonic() + START_TIMEOUT_S
            self.notes.zero_()
            batches = iter(self.loader)
            while not self.all_begun() and time.monotonic() < end:
                time.sleep(0.001)
            if self.all_begun():
                return batches
            del batches
            kill_workers(spared=others)
            self.loader = self.build()  # the other one remembers the processes that are dead
        raise UserError(
            f"loader processes did not start within {START_TIMEOUT_S:.0f} s; data.workers 0 starts none "
            "(where they are no forks, a script needs `if __name__ == '__main__':`)"
        )

    def all_begun(self) -> bool:
        """Whether each loader process has noted its number."""
        return bool(self.notes[:-1, 0].all())

    def with_short_errors(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; of a loader process's error only the last line, its message, is raised."""
        try:
            yield from batches  # a generator keeps this object, and so its notes, alive
        except (EOFError, ConnectionError) as error:
            raise UserError(f"a loader process died (it did not hand over its batch: {one_line(error)})") from error
        except (UserError, OSError) as error:  # such as a full disk
            last_line = str(error).rstrip().rsplit("\n", 1)[-1]
            message = re.sub(rf"^([\w.]+\.)?{type(error).__qualname__}: ", "", last_line)
            raise (type(error) if isinstance(error, UserError) else OSError)(message) from error

    def unfinished_images(self, running: Collection[int]) -> list[str]:
        """Names of the images that processes were reading which are not among the `running` ones."""
        notes = self.notes[:-1].tolist()
        return [self.image_name(index) for process, index in notes if process and process not in running and index >= 0]


class BatchQueue(Queue):
    """Queue of batches. A loader process that cannot send one ends, for want of shared memory, say."""

    def _on_queue_feeder_error(self, error: Exception, batch: Any) -> None:
        if multiprocessing.current_process().name != PROCESS_NAME:
            super()._on_queue_feeder_error(error, batch)
        elif isinstance(batch, tuple):  # otherwise the queue is being closed, and nothing is waited for
            print(f"error: a loader process cannot send its batch: {one_line(error)}", file=sys.stderr, flush=True)
            os._exit(1)


def worker_context() -> Any:
    """The way in which loader processes are started, with a name by which they are found."""
    context = copy.copy(multiprocessing.get_context("fork" if WORKERS_ARE_FORKS else None))  # 3.14 would not fork
    context.Process = partial(context.Process, name=PROCESS_NAME)
    context.Queue = partial(BatchQueue, ctx=context)
    return context


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
        if not str(error).startswith(DEATH_MESSAGE):
            raise
        running = {process.pid for process in multiprocessing.active_children()}
        images = [name for loader in loaders for name in loader.unfinished_images(running)]
        place = f"while it read {', '.join(images)}; take this image out" if images else "between two images"
        message = f"a loader process died ({one_line(error)}) {place}; if memory ran out, use fewer data.workers"
        raise UserError(message) from error
