"""The listing of a folder: one process of a machine makes it, all of the same start share it, and nothing is left."""

import atexit
import fcntl
import multiprocessing
import os
from functools import partial
from pathlib import Path

import datasets
import pytest
from colours import CATS_AND_DOGS, save, save_classes

from mpp.config import ImagesConfig
from mpp.data import caches, listing
from mpp.data.columns import read_cell
from mpp.data.sources import load_splits
from mpp.errors import ReadFailed, UnreadableImage, UserError

context = multiprocessing.get_context("fork")
SOON = 60  # seconds


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where listings lie."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def start(act, count: int = 2) -> list:
    """What `act` returns in processes that one launcher starts together."""

    def run(rank: int) -> None:
        atexit._clear()  # what the tests have registered
        os.environ |= {"WORLD_SIZE": str(count), "RANK": str(rank), "MASTER_PORT": "29500"}
        together.wait(SOON)
        results.put((rank, act(rank)))
        together.wait(SOON)
        atexit._run_exitfuncs()

    results, together = context.Queue(), context.Barrier(count)
    processes = [context.Process(target=run, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    by_rank = dict(results.get(timeout=SOON) for _ in processes)
    for process in processes:
        process.join(SOON)
        assert process.exitcode == 0
    return [by_rank[rank] for rank in range(count)]


def paths(path: Path) -> list[str]:
    return [cell["path"] for rows in load_splits(ImagesConfig(path=str(path))).values() for cell in rows["image"]]


def test_processes_that_start_together_walk_once(cache, tmp_path):
    """And have the same images in the same order; the next start has a listing of its own."""
    save_classes(tmp_path / "data", CATS_AND_DOGS, 20)
    walks, scandir = tmp_path / "walks", os.scandir

    def act(rank):
        def counted(path):
            with walks.open("a") as file:
                file.write(f"{path}\n")
            return scandir(path)

        os.scandir = counted
        return paths(tmp_path / "data")

    for count in (40, 41):
        first, second = start(act)
        assert first == second and len(first) == count
        walked = [line for line in walks.read_text().splitlines() if line.startswith(str(tmp_path / "data"))]
        assert len(walked) == 3 and len({*walked}) == 3
        assert not [*cache.rglob("*.arrow")]
        save(tmp_path / "data" / "cat" / "new.png")
        walks.unlink()


def test_a_folder_that_another_process_uses_is_not_removed(cache):
    folder = caches.cached("listing", lambda folder: (folder / "rows").touch())
    with folder.with_name("listing.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        caches.discard(folder)
        assert (folder / "rows").exists()
    assert caches.cached("listing", lambda folder: None) == folder
    caches.discard(folder)
    assert not [*folder.parent.iterdir()]


def test_processes_that_look_at_the_same_time_do_not_wait_for_each_others_end(cache):
    """The one that makes it keeps its lock to its end, for which the others do not wait."""
    assert (
        start(lambda rank: caches.cached("listing", lambda folder: (folder / "rows").touch()).name, 6)
        == ["listing"] * 6
    )


def test_what_a_killed_process_left_is_made_again_unless_it_is_to_be_kept(cache):
    for is_kept in (True, False):
        folders = []
        for _ in range(2):
            folder = caches.cached(f"listing-{is_kept}", folders.append, is_kept)
            caches.locks.pop(folder).close()  # as the kernel does where the process is killed
        assert len(folders) == (1 if is_kept else 2)


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of others")
def test_a_cache_that_is_a_link_or_another_users_is_not_trusted(cache, tmp_path):
    cache.mkdir()
    (tmp_path / "elsewhere").mkdir()
    place = cache / f"mpp_{os.getuid()}"
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be written"):
        caches.cached("listing", lambda folder: None)
    place.unlink()
    place.mkdir()
    os.chown(place, 12345, 12345)
    with pytest.raises(UserError, match="cannot be written"):
        caches.cached("listing", lambda folder: None)


def test_starts_at_the_same_time_share_nothing(cache, tmp_path, monkeypatch):
    save_classes(tmp_path / "data", CATS_AND_DOGS, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    keys = set()

    def noted(key, make, is_kept):
        keys.add(key)
        raise UserError("enough")

    monkeypatch.setattr(listing, "cached", noted)
    for port, restart in (("1", "0"), ("2", "0"), ("2", "1")):
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        with pytest.raises(UserError):
            paths(tmp_path / "data")
    monkeypatch.setattr(listing.os, "getppid", os.getpid)
    with pytest.raises(UserError):
        paths(tmp_path / "data")
    assert len(keys) == 4


def test_a_folder_of_another_user_is_not_trusted(cache, tmp_path, monkeypatch):
    save_classes(tmp_path / "data", CATS_AND_DOGS, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    (cache / f"mpp_{os.getuid()}").mkdir(parents=True)
    (cache / f"mpp_{os.getuid()}").chmod(0o777)
    with pytest.raises(UserError, match=r"HF_DATASETS_CACHE.*others"):
        paths(tmp_path / "data")


def test_a_mistake_is_said_by_all_and_leaves_nothing(cache, tmp_path):
    (tmp_path / "data").mkdir()

    def act(rank):
        with pytest.raises(UserError, match="holds no images"):
            paths(tmp_path / "data")
        return True

    assert start(act) == [True, True]
    assert not [*cache.rglob("*.arrow")]


# reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "folder of the file"])
def test_a_missing_file_below_a_root_that_is_there_is_unreadable_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("mpp.data.retry.time.sleep", None)
    save(tmp_path / "data" / "a" / "1.png")
    name = "a/gone.png" if kind == "file" else "b/gone.png"
    cell = {"bytes": None, "path": str(tmp_path / "data" / name)}
    with pytest.raises(UnreadableImage, match=r"gone\.png"):
        read_cell(cell, 6, source=str(tmp_path / "data"))


@pytest.mark.parametrize("away", ["gone", "empty"])
def test_a_root_that_is_away_is_waited_for(tmp_path, monkeypatch, away):
    """The place of a disk that is not mounted may be empty."""
    pauses = []
    file = tmp_path / "data" / "a" / "1.png"
    if away == "empty":
        (tmp_path / "data").mkdir()
    read = partial(read_cell, {"bytes": None, "path": str(file)}, 6, source=str(tmp_path / "data"))

    def comes_back(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            save(file)

    monkeypatch.setattr("mpp.data.retry.time.sleep", comes_back)
    assert read() == file.read_bytes() and pauses == [1, 2]
    with pytest.raises(ReadFailed):
        read_cell({"bytes": None, "path": str(tmp_path / "nowhere" / "1.png")}, 0)
