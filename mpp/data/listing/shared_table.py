"""A table that one process of a machine makes, and all processes of the same start map into memory.

It lies in a temporary file, which goes with the process that wrote it. Nothing is kept between starts.
"""

import atexit
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import datasets
import psutil
import pyarrow as pa
from filelock import FileLock

from mpp.errors import UserError
from mpp.runtime.files import short_digest

TABLE_PREFIX = "mpp-images"
ROWS_PER_BATCH = 10_000
LAUNCH_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
"""Environment variables that together differ from start to start, and are the same for all processes of one."""
calls_by_key: Counter[str] = Counter()  # of `share_table` in this process


def share_table(make: Callable[[], pa.Table], key: str) -> tuple[datasets.Dataset, dict[bytes, bytes]]:
    """The rows of a table, mapped from disk, and its metadata.

    Args:
        make: makes the table, in memory. Of the processes of a machine that start together, one calls it.
        key: text that identifies the table among others. A process that asks again for the same key gets a new table.
    Raises:
        UserError: there is no room for the table.
    """
    calls_by_key[key] += 1
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    start = os.getpid() if is_alone else tuple(os.environ.get(name) for name in LAUNCH_VARIABLES)
    identity = repr((start, key, calls_by_key[key]))
    digest = short_digest([identity.encode(errors="surrogateescape")])
    place = Path(tempfile.gettempdir()) / f"{TABLE_PREFIX}-{os.getuid()}-{socket.gethostname()}-{digest}"
    lock = FileLock(f"{place}.lock")
    with naming_folder(place):
        lock.acquire()
    try:
        remove_orphans(place)
        file = find_written(place)
        if file is None:
            table = make()
            with naming_folder(place):
                file = write_shared_table(table, place)
        rows = datasets.Dataset.from_file(str(file))
        with pa.memory_map(str(file)) as source:
            metadata = pa.ipc.open_stream(source).schema.metadata
    finally:
        lock.release()
        if is_alone:
            Path(lock.lock_file).unlink(missing_ok=True)
    return rows, metadata


@contextmanager
def naming_folder(place: Path) -> Iterator[None]:
    """Raise UserError with the folder where a table cannot be written."""
    try:
        yield
    except OSError as error:
        problem = f"the table of images cannot be written to {place.parent} ({error})"
        raise UserError(f"{problem}; set TMPDIR to another place") from error


def find_written(place: Path) -> Path | None:
    """The table of this start, if a process has written it."""
    return next(place.parent.glob(f"{place.name}.*.arrow"), None)


def remove_orphans(place: Path) -> None:
    """Remove tables of this user and machine whose writers are dead."""
    start = place.name.rpartition("-")[0]
    for file in list(place.parent.glob(f"{start}-*.*")):
        *_, writer, extension = file.name.split(".")
        if extension in ("arrow", "partial") and not is_alive(writer):
            remove_with_lock(file)


def remove_with_lock(file: Path) -> None:
    """Remove a table, whole or partly written, and its lock."""
    file.unlink(missing_ok=True)
    place = str(file).rsplit(".", 2)[0]
    Path(f"{place}.lock").unlink(missing_ok=True)


def writer_name(process: psutil.Process) -> str:
    """A process by its number and by when it began, since numbers are given again."""
    began = f"{process.create_time():.2f}"
    return f"{process.pid}_{began.replace('.', '_')}"


def is_alive(writer: str) -> bool:
    """Whether the process that wrote a table is alive."""
    with suppress(psutil.Error, ValueError):
        return writer_name(psutil.Process(int(writer.partition("_")[0]))) == writer
    return False


def write_shared_table(table: pa.Table, place: Path) -> Path:
    """Write a table, complete or not at all; it goes when this process ends."""
    file = Path(f"{place}.{writer_name(psutil.Process())}.arrow")
    partial = file.with_suffix(".partial")
    try:
        with partial.open("wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=ROWS_PER_BATCH)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    atexit.register(remove_at_exit, file, os.getpid())
    return file


def remove_at_exit(file: Path, pid: int) -> None:
    """Remove a table at the end of the process `pid` that wrote it, not of its forks."""
    if os.getpid() == pid:
        remove_with_lock(file)
