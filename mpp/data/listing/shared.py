"""A table that one process of a machine makes, and all processes of the same start map into memory.

It lies in a temporary file, which goes with the process that wrote it. Nothing is kept between starts.
"""

import atexit
import glob
import hashlib
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

PREFIX = "mpp-images"
ROWS = 10_000  # of a record batch
LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
LAUNCH += ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
asked: Counter[str] = Counter()  # how often this process has asked for a table, by its key


def shared_rows(make: Callable[[], pa.Table], key: str) -> tuple[datasets.Dataset, dict[bytes, bytes]]:
    """The rows of a table, mapped from disk, and its metadata. Of the processes of a machine that start together, one
    calls `make`.

    Args:
        make: makes the table, in memory.
        key: what the table is of. A process that asks again for the same gets a new one.
    Raises:
        UserError: there is no room for it.
    """
    asked[key] += 1
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    start = os.getpid() if alone else tuple(map(os.environ.get, LAUNCH))
    digest = hashlib.sha256(repr((start, key, asked[key])).encode(errors="surrogateescape")).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"{PREFIX}-{os.getuid()}-{socket.gethostname()}-{digest}"
    lock = FileLock(f"{place}.lock")
    with place_named(place):
        lock.acquire()
    try:
        file = written(place)
        if file is None:
            table = make()
            with place_named(place):
                file = write(table, place)
        rows = datasets.Dataset.from_file(str(file))
        with pa.memory_map(str(file)) as source:
            about = pa.ipc.open_stream(source).schema.metadata
    finally:
        lock.release()
        if alone:
            Path(lock.lock_file).unlink(missing_ok=True)
    return rows, about


@contextmanager
def place_named(place: Path) -> Iterator[None]:
    """Say where a table cannot be written."""
    try:
        yield
    except OSError as error:
        what = f"the table of images cannot be written to {place.parent} ({error})"
        raise UserError(f"{what}; TMPDIR names another place") from error


def written(place: Path) -> Path | None:
    """The table of this start, where a process that is alive has written it; those of others that are dead go."""
    known = glob.escape(str(place).rpartition("-")[0])
    files = [*map(Path, [*glob.glob(f"{known}-*.arrow"), *glob.glob(f"{known}-*.partial")])]
    dead = {each for each in set(map(writer_of, files)) if not is_alive(each)}
    for file in files:
        if writer_of(file) in dead:
            file.unlink(missing_ok=True)
            lock_of(file).unlink(missing_ok=True)
    return next(map(Path, glob.glob(f"{glob.escape(str(place))}.*.arrow")), None)


def lock_of(file: Path) -> Path:
    """What is locked while a table is written, by its file."""
    return Path(f"{str(file).rpartition('.')[0].rpartition('.')[0]}.lock")


def writer() -> str:
    """This process, as the name of a file has it: its number and when it began."""
    return f"{os.getpid()}_{psutil.Process().create_time():.2f}".replace(".", "_")


def writer_of(file: Path) -> str:
    """The process that wrote a table."""
    return file.name.split(".")[-2]


def is_alive(writer: str) -> bool:
    """Whether the process that wrote a table is alive."""
    number, *began = writer.split("_")
    with suppress(psutil.Error, ValueError):
        return f"{psutil.Process(int(number)).create_time():.2f}".split(".") == began
    return False


def write(table: pa.Table, place: Path) -> Path:
    """Write a table, complete or not at all; it goes when this process ends."""
    file, aside = (Path(f"{place}.{writer()}.{end}") for end in ("arrow", "partial"))
    try:
        with aside.open("wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=ROWS)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    atexit.register(remove, file, os.getpid())
    return file


def remove(file: Path, pid: int) -> None:
    """Remove a table at the end of the process that wrote it, not of its forks."""
    if os.getpid() == pid:
        file.unlink(missing_ok=True)
        lock_of(file).unlink(missing_ok=True)
