"""Workarounds for faults and oddities of libraries, each with its reason."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, distributed_c10d
from tqdm.std import tqdm


def correct_thread_count() -> None:
    """Make a number of OMP_NUM_THREADS, which Accelerate and we read as one: it may be empty, or a list (4,2)."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdecimal():
        os.environ["OMP_NUM_THREADS"] = first
    else:
        os.environ.pop("OMP_NUM_THREADS", None)


def stop_progress_thread() -> None:
    """Let tqdm start no thread that watches its bars: loader processes would be forked while it runs."""
    tqdm.monitor_interval = 0


@contextmanager
def without_variables(*names: str) -> Iterator[None]:
    """Hide variables of the environment for a while: Accelerate acts on its own as soon as it finds them."""
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def set_group_timeout(timeout: timedelta, group: ProcessGroup) -> None:
    """Set the timeout of a process group: before torch 2.10, the function had a private name."""
    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def compile_blocks_apart(count: int) -> None:
    """Let torch compile a graph for each of `count` blocks, which differ in their rate of drop path.

    They are one function to torch, which compiles it again only so often. From its cache of autograd graphs, torch 2.15
    takes the graph of a block with another rate, without a word.
    """
    from torch._functorch import config as functorch_config

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count + 1)
    functorch_config.enable_autograd_cache = False


@contextmanager
def collect_unexpected_weights() -> Iterator[list[str]]:
    """Collect the names of weights that a file has and the model does not: timm only logs them.

    A program may have turned warnings off, of which timm then makes none.
    """
    unexpected: list[str] = []
    logger = logging.getLogger("timm.models._builder")
    level, disabled = logger.level, logging.root.manager.disable
    shows_warnings = logger.isEnabledFor(logging.WARNING)

    def collect(record: logging.LogRecord) -> bool:
        match = re.match(r"Unexpected keys \((.*)\) found while loading", record.getMessage())
        if match:
            unexpected.extend(match[1].split(", "))
        return match is None and shows_warnings

    logger.addFilter(collect)
    if not shows_warnings:
        logger.setLevel(logging.WARNING)
        logging.disable(logging.NOTSET)
    try:
        yield unexpected
    finally:
        logger.removeFilter(collect)
        logger.setLevel(level)
        logging.disable(disabled)
