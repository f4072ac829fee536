"""Samples of a stream that are kept on disk: read once, by one process of a machine, and never used torn."""

import errno
import io
import itertools
import os
import shutil
import tarfile
from collections.abc import Iterator
from itertools import zip_longest

import datasets
import numpy as np
import pyarrow as pa
import pytest
from conftest import Killed, encoded

from mpp.config import DataConfig, ImagesConfig
from mpp.data.dataset import ImageDataset
from mpp.data.shards import CACHE_FOLDER, NOTES_FILE, ROWS_FILE, Shards, load_streamed
from mpp.errors import ReadFailed, UserError
from mpp.runtime.randomness import Stream, permutation

SIZES = (3, 9, 1, 7, 5)  # rows of the shards


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the `datasets` library."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def shards(tmp_path):
    """A folder of shards of several sizes to train on and one that is held out; an image's label is its number."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        random_rows(rng, 100 * number, size).to_parquet(folder / f"train-{number:05d}-of-00005.parquet")
    random_rows(rng, 100 * len(SIZES), 6).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


def random_rows(rng: np.random.Generator, first: int, count: int) -> datasets.Dataset:
    """Images of noise, their numbers as labels, and masks."""
    kinds = {"image": datasets.Image(), "label": datasets.Value("int64"), "mask": datasets.Image()}
    pixels = [rng.integers(0, 256, (64, 64, 3), np.uint8) for _ in range(count)]
    images = [{"bytes": encoded(each), "path": None} for each in pixels]
    rows = {"image": images, "label": list(range(first, first + count)), "mask": images}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def load(folder, probed=8, evaluated=4, **settings):
    config = DataConfig(path=str(folder), streaming=True, image_column="image", **settings)
    return load_streamed(config, probed, evaluated)


def kept(cache) -> list:
    """Folders of the samples in the cache."""
    return sorted((cache / CACHE_FOLDER).glob("*"))


def unreadable(*_, **__):
    raise AssertionError("images are read")


def assert_same_labels(some: list[ImageDataset], others: list[ImageDataset]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.labels.tolist() == other.labels.tolist()


def assert_same_rows(some: list[ImageDataset], others: list[ImageDataset]) -> None:
    for one, other in zip(some, others, strict=True):
        assert list(one.rows) == list(other.rows)


@pytest.mark.parametrize("limit", [1, 4, 7, 12, 17, 24, 25, 100])
def test_a_sample_is_the_beginnings_of_shards_in_turn(shards, cache, monkeypatch, limit):
    monkeypatch.setattr("mpp.data.shards.SHARDS_PER_TURN", 2)
    monkeypatch.setattr("mpp.data.shards.ROWS_PER_READ", 2)
    order = permutation(Stream.CUT, 0, 1, len(SIZES))
    expected: list[int] = []
    for first in range(0, len(SIZES), 2):
        if len(expected) >= limit:
            break
        pair = order[first : first + 2]
        rows_per_shard = -(-limit // len(pair))
        beginnings = []
        for shard in pair:
            rows = min(rows_per_shard, SIZES[shard])
            beginnings.append(range(100 * shard, 100 * shard + rows))
        for turn in zip_longest(*beginnings):
            expected += [row for row in turn if row is not None]
    _, known, _ = load(shards, probed=limit)
    assert [int(known.class_names[number]) for number in known.labels] == expected[:limit]


def test_a_second_start_reads_no_image_and_has_the_same(shards, cache, monkeypatch):
    _, *first = load(shards)
    with monkeypatch.context() as context:
        context.setattr(Shards, "blocks", unreadable)
        _, *second = load(shards)
        assert_same_labels(first, second)
        assert_same_rows(first, second)
        assert len(kept(cache)) == 2
        assert all("mask" not in part.rows.features for part in first)
        copied = shutil.copytree(shards, shards.parent / "elsewhere")  # with its dates
        assert load(copied)[1].labels.tolist() == first[0].labels.tolist()
    assert load(shards, eval_seed=1)[1].labels.tolist() != first[0].labels.tolist()
    assert len(kept(cache)) == 3  # the held-out images are the same


def test_a_sample_is_mapped_not_held(shards, cache):
    before = pa.total_allocated_bytes()
    _, known, held_out = load(shards, 25, 6)
    size = sum(len(row["image"]["bytes"]) for part in (known, held_out) for row in part.rows)
    assert size > 300_000
    assert pa.total_allocated_bytes() - before < size / 10


def test_images_that_nothing_will_look_at_are_not_read(shards, cache, tmp_path):
    assert len(load(shards, probed=0)[1]) == 0
    unlabelled = tmp_path / "unlabelled"
    unlabelled.mkdir()
    for file in shards.glob("*.parquet"):
        datasets.Dataset.from_parquet(str(file)).select_columns(["image"]).to_parquet(unlabelled / file.name)
    _, known, held_out = load(unlabelled)
    assert len(known) == 0 and known.labelled() is None and len(held_out) == 4


def test_other_data_are_other_samples(shards, cache, monkeypatch):
    _, known, _ = load(shards)
    file = shards / "train-00001-of-00005.parquet"
    date = file.stat().st_mtime
    os.utime(file, (date, date + 1))
    with monkeypatch.context() as context, pytest.raises(AssertionError, match="images are read"):
        context.setattr(Shards, "blocks", unreadable)
        load(shards)
    (shards / "train-00004-of-00005.parquet").unlink()
    assert load(shards)[1].labels.tolist() != known.labels.tolist()


def names_of(rows) -> set[str]:
    """Names of the image files."""
    return {row["image"]["path"] for row in rows}


def all_rows(shards: Shards) -> Iterator[dict]:
    for shard in range(shards.count):
        yield from itertools.chain.from_iterable(shards.blocks(shard, 9))


@pytest.mark.parametrize("settings", [{}, {"cut_seed": 1}])
def test_a_folders_replicates_hold_out_the_same_and_never_train_on_it(tmp_path, cache, settings):
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for number in range(64):
        (folder / f"{number:02d}.png").write_bytes(encoded(rng.integers(0, 256, (8, 8, 3), np.uint8)))
    held_out = []
    for seed in (0, 1):
        shards, _, others = load(folder, eval_split=None, eval_seed=seed, evaluated=64, **settings)
        trained = names_of(all_rows(shards))
        evaluated = names_of(others.rows)
        assert len(trained) + len(evaluated) == 64
        assert not trained & evaluated
        held_out.append(evaluated)
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) == 8
    _, _, others = load(folder, eval_split=None, evaluated=64, cut_seed=2)
    assert names_of(others.rows) != held_out[0]


def test_a_damaged_shard_is_an_error_in_a_line(shards, cache):
    file = shards / "test-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"data.path .*cannot be loaded: |test shard 0 is damaged after row 0: "):
        load(shards)


TEARS = {  # left by a crash, or by a disk
    "truncated": lambda rows, notes: rows.write_bytes(rows.read_bytes()[:-100]),
    "without its notes": lambda rows, notes: notes.unlink(),
    "with torn notes": lambda rows, notes: notes.write_bytes(notes.read_bytes()[:10]),
    "half written": lambda rows, notes: (rows.rename(rows.with_name(f"{ROWS_FILE}.partial")), notes.unlink()),
    "without rows": lambda rows, notes: rows.unlink(),
}


@pytest.mark.parametrize("how", TEARS)
def test_a_torn_sample_is_read_anew(shards, cache, how):
    _, *first = load(shards)
    for folder in kept(cache):
        TEARS[how](folder / ROWS_FILE, folder / NOTES_FILE)
    _, *second = load(shards)
    assert_same_labels(first, second)
    assert all(sample.decode(0, ImagesConfig()).shape == (3, 64, 64) for sample in second)


def test_reads_of_a_sample_that_fail_are_tried_again(shards, cache, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    read_blocks = Shards.read_blocks
    failures = iter([OSError("away"), ConnectionError("reset"), OSError("away")])

    def fails_at_first(self, *shard):
        for error in failures:
            raise error
        yield from read_blocks(self, *shard)

    _, *expected = load(shards)
    shutil.rmtree(cache)
    monkeypatch.setattr(Shards, "read_blocks", fails_at_first)
    _, *retried = load(shards, read_retries=3)
    assert_same_labels(retried, expected)
    failures = iter([tarfile.ReadError("unexpected end of data")])
    shutil.rmtree(cache)
    with pytest.raises(UserError, match=r"shard \d is damaged after row 0: unexpected end of data; replace it"):
        load(shards, read_retries=3)


@pytest.mark.parametrize(("error", "words"), [(Killed("killed"), "killed"), (ReadFailed("gone"), "^gone$")])
def test_a_sample_that_was_not_read_to_its_end_is_not_used(shards, cache, monkeypatch, error, words):
    monkeypatch.setattr("mpp.data.shards.ROWS_PER_WRITE", 2)
    blocks = Shards.blocks

    def breaks_off(self, shard, size, **options):
        yield next(blocks(self, shard, 3, **options))
        raise error

    with monkeypatch.context() as context, pytest.raises(BaseException, match=words):
        context.setattr(Shards, "blocks", breaks_off)
        load(shards, probed=100)
    assert not list(cache.rglob("*.partial"))
    assert not list(cache.rglob(ROWS_FILE))
    _, known, _ = load(shards, probed=100)
    assert len(known) == 25


class FullDisk(io.BytesIO):
    """A fake of a disk that has room for the first rows."""

    def write(self, data) -> int:
        if self.tell() > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("how", ["a full disk", "a file in its place"])
def test_a_cache_that_cannot_be_written_is_named(shards, cache, monkeypatch, how):
    if how == "a full disk":
        aside = FullDisk()
        monkeypatch.setattr(pa, "OSFile", lambda *_: aside)
    else:
        cache.mkdir()
        (cache / CACHE_FOLDER).write_text("")
    with pytest.raises(ValueError, match=r"HF_DATASETS_CACHE is .*cache; .* cannot be kept there: .*; choose another"):
        load(shards)
    assert not list(cache.rglob(ROWS_FILE))


def test_what_cannot_be_listed_is_read_at_every_start(shards, cache, monkeypatch, capsys):
    _, *first = load(shards)
    kept_before = kept(cache)

    def unreachable(*_):
        raise RuntimeError("the hub is\nout of reach")

    monkeypatch.setattr("mpp.data.shards.list_files", unreachable)
    _, *second = load(shards)
    assert_same_rows(first, second)
    assert len(load(shards, probed=0)[1]) == 0
    assert "cannot be listed (the hub is out of reach)" in capsys.readouterr().err
    assert kept(cache) == kept_before
