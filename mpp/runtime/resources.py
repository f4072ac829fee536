"""Room on a machine, checked before a run needs it: shared memory, memory, disk."""

import math
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from mpp.errors import UserError
from mpp.runtime.hardware import local_processes, uses_gpu

SHARED_MEMORY = Path("/dev/shm")  # where Linux keeps the batches that loader processes hand over
CGROUPS = Path("/sys/fs/cgroup")
PREFETCHED_BATCHES = 2  # of each loader process, waiting or being loaded: torch's prefetch_factor
BATCHES_IN_USE = 2  # by the training process: that of this forward pass, and the next
MORE_SHARED_MEMORY = "start the container with `docker run --shm-size={gib}g`"


class LoaderRoom(NamedTuple):
    """The loader processes of each training process whose batches fit into shared memory."""

    workers: int
    evaluation_workers: int
    shortage: str = ""
    """Shared memory that those asked for need, and that is free; empty where they fit."""


def loader_bytes(workers: int, evaluation_workers: int, batch_bytes: int) -> int:
    """Shared memory that the batches of this machine's training processes take at most."""
    loaders = workers + evaluation_workers
    batches = PREFETCHED_BATCHES * loaders
    if loaders and not uses_gpu():  # for a GPU, a thread copies each batch to pinned memory at once
        batches += BATCHES_IN_USE
    return local_processes() * batches * batch_bytes


def loader_room(workers: int, evaluation_workers: int, batch_bytes: int) -> LoaderRoom:
    """As many of these loader processes as fit; those of evaluations come second.

    To be called before any process of this machine has some.
    """
    asked = LoaderRoom(workers, evaluation_workers)
    if sys.platform != "linux" or not SHARED_MEMORY.is_dir():
        return asked
    memory = shutil.disk_usage(SHARED_MEMORY)
    needed = loader_bytes(workers, evaluation_workers, batch_bytes)
    is_unlimited = memory.total == 0
    if is_unlimited or needed <= memory.free:
        return asked
    while loader_bytes(workers, 0, batch_bytes) > memory.free:
        workers -= 1
    while loader_bytes(workers, evaluation_workers, batch_bytes) > memory.free:
        evaluation_workers -= 1
    gib = math.ceil((memory.used + needed) / 2**30)
    shortage = f"all need up to {in_units(needed)} of shared memory, and {SHARED_MEMORY} has {in_units(memory.free)}"
    return LoaderRoom(workers, evaluation_workers, f"{shortage}; {MORE_SHARED_MEMORY.format(gib=gib)}")


def available_memory() -> int:
    """Bytes of memory that processes here can still get: of the machine, within the limits of their control groups."""
    available = psutil.virtual_memory().available
    for folder in memory_cgroups():
        for limit_file, used_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # of version 1
        ):
            try:
                limit = (folder / limit_file).read_text(encoding="utf-8").strip()
                used = int((folder / used_file).read_text(encoding="utf-8"))
                statistics = dict(
                    line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                )
            except OSError:  # another version's, or not for us to read
                continue
            if limit != "max":
                reclaimable = int(statistics.get(cache, 0))  # pages of files that were read
                available = min(available, max(0, int(limit) - used + reclaimable))
    return available


def memory_cgroups() -> list[Path]:
    """Folders of the control groups that limit this process's memory, those above its own included."""
    folders = []
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    for group in groups:
        _, controllers, name = group.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = CGROUPS / controllers
        folder = root / name.lstrip("/")
        folders += [parent for parent in (folder, *folder.parents) if parent.is_relative_to(root)]
    return folders


def free_disk(folder: Path) -> float:
    """Free bytes on the disk of a folder that may not exist yet; infinite where its file system does not say."""
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    return disk.free if disk.total else math.inf


def disk_shortage(folder: Path, checkpoints: int, checkpoint_bytes: int, encoder_bytes: int) -> str:
    """Warning where the disk of a run folder cannot take so many more checkpoints and the encoder; else empty.

    Raises:
        UserError: not even one checkpoint fits.
    """
    free = free_disk(folder)
    needed = checkpoints * checkpoint_bytes + encoder_bytes
    if free >= needed:
        return ""
    shortage = f"{in_units(free)} are free on the disk of run.dir {folder}"
    if free < checkpoint_bytes:
        raise UserError(f"{shortage}, and a checkpoint takes {in_units(checkpoint_bytes)}; choose another run.dir")
    return (
        f"{shortage}, and its checkpoints and encoder take up to {in_units(needed)} more; choose another run.dir, or "
        "lower run.keep_checkpoints"
    )


def in_units(size: float) -> str:
    """Bytes as MB or GB."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
