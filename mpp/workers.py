"""Loader processes: what each is reading, for when one dies, and what signals mean to them."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

DEAD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(.*)")
mine: np.ndarray | None = None  # in a loader process: [its pid, the index of the image that it reads]


def reading(index: int) -> None:
    """Note which image is about to be decoded."""
    if mine is not None:
        mine[1] = index


def begin(watch: Tensor, ending: Tensor, worker: int) -> None:
    """Start a loader process (see DataLoader's worker_init_fn).

    It leaves signals to its parent, which may want to finish a step with what it loads: a terminal and a job scheduler
    send them to all processes. SIGTERM ends it only when the parent is ending.
    """
    global mine
    mine = watch[worker].numpy()
    mine[0] = os.getpid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if ending.item() else None)


class WatchedLoader:
    """torch's loader, which names the image when a loader process dies of it.

    Args:
        dataset: calls `reading` before each image.
        name: index of an image to what a person finds it by.
        options: DataLoader's.
    """

    def __init__(self, dataset: Any, name: Callable[[int], str], **options: Any):
        self.name = name
        self.watch = torch.zeros(max(1, options["num_workers"]), 2, dtype=torch.int64).share_memory_()
        ending = torch.zeros((), dtype=torch.bool).share_memory_()  # whether this loader, or its process, is
        Finalize(
            self, ending.fill_, args=(True,), exitpriority=0
        )  # before multiprocessing ends its children by SIGTERM
        self.loader = DataLoader(dataset, worker_init_fn=partial(begin, self.watch, ending), **options)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.loader
        except RuntimeError as error:
            found = DEAD.search(str(error))
            if found is None:
                raise
            dead = [int(pid) for pid in found[1].split(",")]
            images = [self.name(index) for pid, index in self.watch.tolist() if pid in dead]
            raise ValueError(
                f"a loader process died ({found[2].strip(' .')}) while it read {', '.join(images) or 'an image'}; take "
                "this image out or, if memory ran out, use fewer data.workers"
            ) from error
