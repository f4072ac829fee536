"""Samples of a stream that are kept on disk: complete, drawn from many shards, read once."""

import os
import shutil
import tarfile
from itertools import zip_longest
from pathlib import Path

import datasets
import pytest
from conftest import Killed, dataset_of, encoded, picture, refused

from mpp.config import DataConfig
from mpp.data import shards
from mpp.data.shards import ROWS_FILE, Shards, load_streamed
from mpp.errors import ReadFailed
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


@pytest.mark.parametrize("limit", [1, 4, 17, 100])
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


def test_a_second_start_reads_no_image_also_of_a_copy_unless_a_file_changed(folder, cache, monkeypatch):
    first = load(folder)
    assert load(folder, eval_seed=1)[0] != first[0]

    def unreadable(*_, **__):
        raise AssertionError("images are read")

    monkeypatch.setattr(Shards, "blocks", unreadable)
    assert load(folder) == first
    assert load(shutil.copytree(folder, folder.parent / "elsewhere")) == first  # with its dates
    assert len(list(cache.rglob(f"stream-*/{ROWS_FILE}"))) == 3  # the held-out images are the same for both seeds
    os.utime(folder / "train-00001-of-00005.parquet", (1, 1))
    with pytest.raises(AssertionError, match="images are read"):
        load(folder)


def test_images_that_nothing_will_look_at_are_not_read(folder, cache):
    assert len(load_streamed(DataConfig(path=str(folder), streaming=True), 0, 4)[1]) == 0
    for file in folder.glob("*.parquet"):
        datasets.Dataset.from_parquet(str(file)).select_columns(["image"]).to_parquet(file)
    _, known, held_out = load_streamed(DataConfig(path=str(folder), streaming=True), 8, 4)
    assert len(known) == 0 and held_out.labels is None and len(held_out) == 4


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
    with refused(r"shard \d is damaged after row 0: unexpected end of data"):
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
