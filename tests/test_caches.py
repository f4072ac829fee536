"""Folders of derived data: one process of a machine makes one, all share it, nothing is left; the user's own."""

import atexit
import fcntl
import multiprocessing
import os

import pytest
from colours import CATS_AND_DOGS, save_classes, splits_of
from conftest import put_picture, refused, run_command

from mpp.data import caches
from mpp.data.caches import cached

context = multiprocessing.get_context("fork")
SOON = 60  # seconds


def start(act):
    """What `act` returns in two processes that one launcher starts together."""

    def run(rank):
        atexit._clear()  # what the tests have registered
        os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_PORT": "29500"}
        together.wait(SOON)
        results.put(act())
        together.wait(SOON)
        atexit._run_exitfuncs()

    results, together = context.Queue(), context.Barrier(2)
    processes = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=SOON) for _ in processes]
    for process in processes:
        process.join(SOON)
        assert process.exitcode == 0
    return found


def paths(path):
    return [cell["path"] for rows in splits_of(path).values() for cell in rows["image"]]


# --- listings of folders of images ---


def test_processes_that_start_together_walk_once(cache, tmp_path):
    """And have the same images in the same order; the next start has a listing of its own."""
    save_classes(tmp_path / "data", CATS_AND_DOGS, 20)
    walks, scandir = tmp_path / "walks", os.scandir

    def act():
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
        put_picture(tmp_path / "data" / "cat" / "new.png")
        walks.unlink()


# --- the folders ---


def write(folder):
    (folder / str(os.getpid())).write_bytes(bytes(1000))


def test_a_folder_that_another_process_uses_is_not_removed(cache):
    folder = cached("listing", write)
    with folder.with_name("listing.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        caches.discard(folder)
        assert [*folder.iterdir()]
    assert cached("listing", lambda folder: None) == folder
    caches.discard(folder)
    assert not [*folder.parent.iterdir()]


def test_what_a_killed_process_left_is_made_again_unless_it_is_to_be_kept(cache):
    for is_kept in (True, False):
        folders = []
        for _ in range(2):
            folder = cached(f"listing-{is_kept}", folders.append, is_kept)
            caches.locks.pop(folder).close()  # as the kernel does where the process is killed
        assert len(folders) == (1 if is_kept else 2)


def test_folders_that_are_not_used_make_room_the_oldest_first(cache, monkeypatch):
    monkeypatch.setattr(caches, "MAX_BYTES", 3500)
    cached("a", write)
    with caches.locks.pop(cache / "a"):  # as of another process, which still uses it
        for number, name in enumerate("bcde"):
            cached(name, write)
            caches.locks.pop(cache / name).close()  # as at the end of a process
            os.utime(cache / f"{name}.lock", (number, number))
        assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["a", "d", "e"]
    os.utime(cache / "a.lock", (0, 0))
    cached("f", write)
    assert not (cache / "a").exists()


@pytest.mark.parametrize("problem", ["a link", "others may write there", "another user's", "a full disk"])
def test_a_cache_that_cannot_be_used_or_trusted_is_named(cache, problem):
    cache.parent.mkdir()
    if problem == "a link":
        cache.symlink_to(cache.parent)
    elif problem != "a full disk":
        cache.mkdir()
        cache.chmod(0o777 if problem == "others may write there" else 0o700)
    if problem == "another user's":
        if os.getuid():
            pytest.skip("only root makes files of others")
        os.chown(cache, 12345, 12345)

    def fail(_):
        raise OSError(28, "No space left on device")

    reason = "No space left" if problem == "a full disk" else "others can write there"
    with refused(rf"HF_DATASETS_CACHE: .* cannot be written: .*{reason}"):
        cached("key", fail)
    assert not (cache / "key").exists()


@pytest.mark.faults
@pytest.mark.parametrize(
    "words",
    [
        ("pretrain", "--run.dir={}/run"),
        ("knn", "--encoder=hf-hub:timm/none"),
        ("pretrain", "--run.dir={}/run", "--run.compile=true"),
    ],
    ids=["images", "weights", "compiled code"],
)
def test_a_home_that_cannot_be_written_is_one_line(monkeypatch, tmp_path, words, tally):
    home = "/etc/passwd"  # a file: not even root can write below it
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", home)
    if "--run.compile=true" in words:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{home}/inductor")
    ended = run_command("mpp", *(word.format(tmp_path) for word in words))
    error = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 2 and error.startswith("error: "), ended.stderr
    assert f"'{home}/" in error and "Traceback" not in ended.stderr
    tally("a home that cannot be written")
