"""The table of images: one process of a machine makes it, all of the same start share it, and nothing is left of it."""

import atexit
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from colours import CATS_AND_DOGS, in_train, save, save_classes
from mpp.data.listing.shared_table import TABLE_PREFIX, share_table

from mpp.errors import UserError

context = multiprocessing.get_context("fork")
SOON = 60  # seconds


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where tables lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def table(rows: int = 3) -> pa.Table:
    return pa.table({"number": list(range(rows))})


def files(place: Path) -> list[str]:
    """What is there, by the ends of names."""
    assert all(file.name.startswith(f"{TABLE_PREFIX}-") for file in place.iterdir())
    return sorted(file.suffix for file in place.iterdir())


class Started:
    """Processes as one launcher starts them, each of which does the same.

    Args:
        act: called in each, together, with its rank; what it returns is in `results`.
        environment: of all.
    """

    def __init__(self, act: Callable, count: int = 1, **environment: str):
        self.queue = context.Queue()
        self.done = context.Event()
        together = context.Barrier(count)
        self.act = act
        self.environment = environment | {"WORLD_SIZE": str(count)}
        self.processes = [context.Process(target=self.run, args=(rank, together)) for rank in range(count)]
        for process in self.processes:
            process.start()
        self.results = dict(self.queue.get(timeout=SOON) for _ in self.processes)

    def run(self, rank: int, together) -> None:
        atexit._clear()  # what the tests have registered
        os.environ |= self.environment | {"RANK": str(rank)}
        together.wait(SOON)
        self.queue.put((rank, self.act(rank)))
        self.done.wait(SOON)
        atexit._run_exitfuncs()

    def wait(self) -> None:
        """Let them end."""
        self.done.set()
        for process in self.processes:
            process.join(SOON)
            assert process.exitcode == 0

    def kill(self) -> None:
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join(SOON)


def test_processes_that_start_together_walk_once(place, tmp_path):
    """And have the same images in the same order."""
    save_classes(tmp_path / "data", CATS_AND_DOGS, 20)
    walks, scandir = tmp_path / "walks", os.scandir

    def act(rank):
        def counted(path):
            with walks.open("a") as file:
                file.write(f"{path}\n")
            return scandir(path)

        os.scandir = counted
        return list(in_train(tmp_path / "data").items())

    started = Started(act, 2)
    assert started.results[0] == started.results[1] and len(started.results[0]) == 40
    walked = [line for line in walks.read_text().splitlines() if line.startswith(str(tmp_path / "data"))]
    assert sorted(walked) == [f"{tmp_path}/data{inside}" for inside in ("", "/cat", "/dog")]
    assert files(place) == [".arrow", ".lock"]
    started.wait()
    assert files(place) == []


def test_other_starts_have_tables_of_their_own(place):
    """Of the same images, on the same machine, at the same time."""
    starts = [Started(lambda rank: len(share_table(table, "x")[0]), 2, MASTER_PORT=port) for port in ("1", "2")]
    assert [each.results for each in starts] == [{0: 3, 1: 3}] * 2
    assert files(place).count(".arrow") == 2
    for each in starts:
        each.wait()
    assert files(place) == []


def test_a_table_is_made_anew_each_time(place, tmp_path):
    """What is added to a folder is there at the next start, or where the same process asks again."""
    save_classes(tmp_path / "data", CATS_AND_DOGS)
    assert len(in_train(tmp_path / "data")) == 4
    save(tmp_path / "data" / "cat" / "new.png")
    (tmp_path / "data" / "dog" / "0.png").unlink()
    assert in_train(tmp_path / "data").keys() == {"cat/0.png", "cat/1.png", "cat/new.png", "dog/1.png"}


@pytest.mark.parametrize("writing", [False, True])
def test_a_killed_process_leaves_nothing_for_long(place, monkeypatch, writing):
    """The next start removes what it has left, and nothing of a process that is alive."""

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    alive = Started(lambda rank: len(share_table(table, "x")[0]), 2)
    kept = {*place.iterdir()}
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        if writing:
            patch.setattr(pa.ipc, "new_stream", die)
        dead = context.Process(target=lambda: (share_table(table, "y"), die()))
        dead.start()
        dead.join(SOON)
    assert dead.exitcode == -signal.SIGKILL
    left = {file.suffix for file in {*place.iterdir()} - kept}
    assert left == {".partial" if writing else ".arrow", ".lock"}
    rows, _ = share_table(table, "x")
    assert len(rows) == 3 and kept <= {*place.iterdir()} and files(place) == [".arrow", ".arrow", ".lock"]
    alive.wait()
    assert files(place) == [".arrow"]


def test_a_number_of_a_process_that_is_taken_again_is_another_process(place):
    rows, _ = share_table(table, "x")
    (file,) = place.glob("*.arrow")
    start, writer, end = file.name.rsplit(".", 2)
    other = file.with_name(f"{start[:-4]}0000.{writer.partition('_')[0]}_1_00.{end}")
    other.write_bytes(file.read_bytes())
    share_table(table, "y")
    assert file.exists() and not other.exists() and len(rows) == 3


def test_a_fork_removes_nothing(place):
    rows, _ = share_table(table, "x")

    def end_as_a_loader(_):
        from mpp.data.listing.shared_table import remove_at_exit

        (file,) = place.glob("*.arrow")
        remove_at_exit(file, os.getppid())

    Started(end_as_a_loader).wait()
    assert files(place) == [".arrow"] and rows[2]["number"] == 2


def test_a_disk_that_is_full_is_named(place):
    """And what was begun is gone. Python ignores the signal."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError, match=rf"cannot be written to {place} \(.*too large.*\); set TMPDIR to another"):
            share_table(lambda: table(100_000), "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ".arrow" not in files(place) and ".partial" not in files(place)
    assert len(share_table(lambda: table(100_000), "x")[0]) == 100_000


def test_a_place_that_is_none_is_named(place, monkeypatch):
    (place / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(place / "file" / "in it"))
    with pytest.raises(UserError, match=rf"cannot be written to {place}/file/in it \(.*; set TMPDIR to another place"):
        share_table(table, "x")


def test_what_keeps_a_folder_from_being_listed_is_said(place, image_folder, monkeypatch):
    """It is not where the table lies."""

    def scandir(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("mpp.data.listing.tree.os.scandir", scandir)
    words = rf"data\.path is {image_folder}, which cannot be loaded: .*Permission denied: '{image_folder}'$"
    with pytest.raises(UserError, match=words):
        in_train(image_folder)
    assert files(place) == []


def test_a_mistake_is_said_by_all_and_leaves_nothing(place, tmp_path):
    (tmp_path / "data").mkdir()

    def act(rank):
        with pytest.raises(UserError, match="holds no images") as error:
            in_train(tmp_path / "data")
        return str(error.value)

    started = Started(act, 2)
    assert started.results[0] == started.results[1]
    started.wait()
    assert ".arrow" not in files(place)
