"""Samples of a stream that are kept on disk, and the cache that keeps them: complete, limited, the user's own.

The cache is that of mpp/data/caches.py.
"""

import multiprocessing
import os
import shutil
import tarfile
import time
from itertools import zip_longest
from pathlib import Path

import datasets
import pytest
from conftest import Killed, dataset_of, encoded, picture

from mpp.config import DataConfig
from mpp.data import caches, shards
from mpp.data.caches import cached
from mpp.data.shards import ROWS_FILE, Shards, load_streamed
from mpp.errors import ReadFailed, UserError
from mpp.runtime.randomness import Stream, permutation

SIZES = (3, 9, 1, 7, 5)  # rows of the shards


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the kept samples in an empty cache of the `datasets` library."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / f"mpp_{os.getuid()}"


@pytest.fixture
def folder(tmp_path):
    """Shards of several sizes to train on and one that is held out; an image's label is its number."""
    for number, size in enumerate((*SIZES, 6)):
        labels = list(range(100 * number, 100 * number + size))
        rows = dataset_of([encoded(picture(label, (8, 8))) for label in labels], label=labels)
        name = f"train-{number:05d}-of-00005" if number < len(SIZES) else "test-00000-of-00001"
        (tmp_path / "data").mkdir(exist_ok=True)
        rows.to_parquet(tmp_path / "data" / f"{name}.parquet")
    return tmp_path / "data"


def load(folder: Path, probed: int = 8, **settings) -> tuple[list[int], list[int]]:
    """The numbers of the images that are kept: to train on, and held-out ones."""
    _, *kept = load_streamed(DataConfig(path=str(folder), streaming=True, **settings), probed, 4)
    assert all(images.encoded(0, DataConfig()) for images in kept)
    return tuple([int(kept[0].class_names[label]) for label in images.labels] for images in kept)


@pytest.fixture
def nothing_is_read(monkeypatch):
    """From now on, no image of a shard can be read."""

    def refuse() -> None:
        def unreadable(*_, **__):
            raise AssertionError("images are read")

        monkeypatch.setattr(Shards, "blocks", unreadable)

    return refuse


@pytest.mark.parametrize("limit", [1, 4, 12, 17, 25, 100])
def test_a_sample_is_the_beginnings_of_shards_in_turn(folder, cache, monkeypatch, limit):
    monkeypatch.setattr(shards, "SHARDS_PER_TURN", 2)
    monkeypatch.setattr(shards, "ROWS_PER_READ", 2)
    order = permutation(Stream.CUT, 0, 1, len(SIZES))
    expected: list[int] = []
    for first in range(0, len(SIZES), 2):
        if len(expected) >= limit:
            break
        pair = order[first : first + 2]
        rows_per_shard = -(-limit // len(pair))
        beginnings = [range(100 * shard, 100 * shard + min(rows_per_shard, SIZES[shard])) for shard in pair]
        for turn in zip_longest(*beginnings):
            expected += [row for row in turn if row is not None]
    assert load(folder, limit)[0] == expected[:limit]


def test_a_second_start_reads_no_image_also_of_a_copy(folder, cache, nothing_is_read):
    first = load(folder)
    assert load(folder, eval_seed=1)[0] != first[0]
    nothing_is_read()
    assert load(folder) == first
    assert load(shutil.copytree(folder, folder.parent / "elsewhere")) == first  # with its dates
    assert len(list(cache.rglob(f"stream-*/{ROWS_FILE}"))) == 3  # the held-out images are the same for both seeds


def test_images_that_nothing_will_look_at_are_not_read(folder, cache):
    assert len(load_streamed(DataConfig(path=str(folder), streaming=True), 0, 4)[1]) == 0
    for file in folder.glob("*.parquet"):
        datasets.Dataset.from_parquet(str(file)).select_columns(["image"]).to_parquet(file)
    _, known, held_out = load_streamed(DataConfig(path=str(folder), streaming=True), 8, 4)
    assert len(known) == 0 and held_out.labels is None and len(held_out) == 4


def test_a_file_that_changed_is_read_again(folder, cache, nothing_is_read):
    load(folder)
    nothing_is_read()
    os.utime(folder / "train-00001-of-00005.parquet", (1, 1))
    with pytest.raises(AssertionError, match="images are read"):
        load(folder)


def test_reads_of_a_sample_that_fail_are_tried_again(folder, cache, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    read_blocks = Shards.read_blocks
    failures = iter([OSError("away"), ConnectionError("reset"), OSError("away")])

    def fails_at_first(self, *shard):
        for error in failures:
            raise error
        yield from read_blocks(self, *shard)

    expected = load(folder)
    shutil.rmtree(cache)
    monkeypatch.setattr(Shards, "read_blocks", fails_at_first)
    assert load(folder, read_retries=3) == expected
    failures = iter([tarfile.ReadError("unexpected end of data")])
    shutil.rmtree(cache)
    with pytest.raises(UserError, match=r"shard \d is damaged after row 0: unexpected end of data"):
        load(folder, read_retries=3)


@pytest.mark.parametrize("error", [Killed("gone"), ReadFailed("gone")])
def test_a_sample_that_was_not_read_to_its_end_is_not_used(folder, cache, monkeypatch, error):
    blocks = Shards.blocks

    def breaks_off(self, shard, size, **options):
        yield next(blocks(self, shard, 3, **options))
        raise error

    with monkeypatch.context() as context, pytest.raises(BaseException, match="gone"):
        context.setattr(Shards, "blocks", breaks_off)
        load(folder)
    assert not list(cache.rglob(f"stream-*/{ROWS_FILE}"))
    assert len(load(folder, 100)[0]) == sum(SIZES)


def test_a_stream_that_cannot_be_listed_is_refused(folder, cache, monkeypatch):
    def unreachable(_):
        raise RuntimeError("out of\nreach")

    monkeypatch.setattr(shards, "list_files", unreachable)
    with pytest.raises(ReadFailed, match="cannot be read: out of reach"):
        load(folder, read_retries=0)


# --- the cache ---


def write(folder: Path) -> None:
    (folder / "file").write_bytes(bytes(1000))


def use_and_stay(key: str, used: multiprocessing.Event, place: Path) -> None:
    """Another process that uses a folder until it is ended."""
    datasets.config.HF_DATASETS_CACHE = place
    cached(key, write)
    used.set()
    time.sleep(60)


def test_folders_that_are_not_used_make_room_the_oldest_first(cache, monkeypatch):
    monkeypatch.setattr(caches, "MAX_BYTES", 3500)
    context = multiprocessing.get_context("spawn")
    used = context.Event()
    process = context.Process(target=use_and_stay, args=("a", used, cache.parent), daemon=True)
    process.start()
    assert used.wait(60)
    for number, name in enumerate("bcde"):
        cached(name, write)
        caches.locks.pop(cache / name).close()  # as at the end of a process
        os.utime(cache / f"{name}.lock", (number, number))
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["a", "d", "e"]
    process.kill()
    process.join()
    os.utime(cache / "a.lock", (0, 0))
    cached("f", write)
    assert not (cache / "a").exists()


def test_processes_wait_for_the_one_that_makes_a_folder(cache, tmp_path):
    def make(folder: Path) -> None:
        time.sleep(0.5)
        (folder / str(os.getpid())).touch()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=cached, args=("key", make)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list((cache / "key").iterdir())) == 1


@pytest.mark.parametrize("problem", ["a file in its place", "others may write there", "a full disk"])
def test_a_cache_that_cannot_be_used_is_named(cache, problem):
    cache.parent.mkdir()
    if problem == "a file in its place":
        cache.touch()
    if problem == "others may write there":
        cache.mkdir()
        cache.chmod(0o777)

    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="HF_DATASETS_CACHE"):
        cached("key", fail)
    assert not (cache / "key").exists()
