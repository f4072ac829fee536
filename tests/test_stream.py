"""Streams: every image once an epoch, whichever process reads it; exact resumption; shards of every format."""

import os
import shutil
import tarfile
from dataclasses import replace
from itertools import islice, product, zip_longest
from types import SimpleNamespace
from typing import NamedTuple

import datasets
import fsspec
import pytest
from conftest import Killed, dataset_of, encoded, picture, read_metrics, refused
from torch.testing import assert_close

from mpp.config import CorruptionConfig, DataConfig, ImagesConfig
from mpp.data import shards
from mpp.data.loader import BatchLayout
from mpp.data.shards import ROW_BITS, ROWS_FILE, Shards, list_stream_files, load_streamed, stamp_of
from mpp.data.stream import Cursor, StreamedBatches, stream_workers, streaming_loader
from mpp.data.views import ViewDataset
from mpp.errors import ReadFailed, Undecodable
from mpp.runtime.randomness import Stream, permutation

SHARDS = 6
ROWS = 11  # of a shard
START = Cursor()


@pytest.fixture
def two_places(tmp_path):
    """Folders `a` and `b` with a shard of the same name and size."""
    for place in "ab":
        (tmp_path / place).mkdir()
        (tmp_path / place / "train-0.tar").write_text(place)
    return tmp_path


def listed(path):
    return list_stream_files(ImagesConfig(path=str(path)))


def test_shards_behind_a_link_are_known(two_places):
    folder = two_places / "shards"
    folder.mkdir()
    (folder / "train").symlink_to(two_places / "a")
    before = listed(folder)
    assert [name for name, *_ in before] == ["/train/train-0.tar"]
    os.utime(two_places / "a" / "train-0.tar", (1, 1))
    assert listed(folder) != before


def test_shards_of_a_pattern_with_brackets_are_known(two_places):
    (two_places / "a").rename(two_places / "a [1]")
    assert [name for name, *_ in listed(f"file://{two_places}/a [1]/train-*.tar")] == ["/train-0.tar"]


def test_shards_of_two_servers_are_two():
    """Of servers that say nothing of their files but the size."""
    server = SimpleNamespace(info=lambda name: {"size": 9})
    one, other = (stamp_of(f"https://{place}.org/train-0.tar", {"size": None}, server) for place in "ab")
    assert one != other


class Seen(NamedTuple):
    """A sample that a worker has read."""

    epoch: int
    index: int
    crop: bytes
    corrupted: list[int]  # positions


def image_of(shard, row):
    """A file of 16 x 16 pixels."""
    return encoded(picture(100 * shard + row, (16, 16)))


def rows_of(shard):
    """Eleven images of a shard; their labels tell them apart. Their masks and captions are not to be read."""
    rows = dataset_of([image_of(shard, row) for row in range(ROWS)], label=range(shard * ROWS, shard * ROWS + ROWS))
    masks = dataset_of([b"broken"] * ROWS, caption=["a"] * ROWS).rename_column("image", "mask")
    return datasets.concatenate_datasets([rows, masks], axis=1)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """A folder of six shards to train on and one that is held out."""
    folder = tmp_path_factory.mktemp("parquet")
    for shard in range(SHARDS):
        rows_of(shard).to_parquet(folder / f"train-{shard:05d}-of-00006.parquet")
    rows_of(77).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


def stream(folder, rank=0, processes=1, workers=1, block=4):
    """Batches of two images."""
    data = DataConfig(path=str(folder), streaming=True, workers=workers, shuffle_block=block, image_column="image")
    shards, _, _ = load_streamed(data, 5, 5)
    views = ViewDataset(shards, data, 16, 3, CorruptionConfig(), (2, 2))
    return StreamedBatches(views, BatchLayout(2 * processes, 1, processes, rank), 0, 1000, {}, max(1, workers))


def read(batches, worker, count, cursor=START):
    """The samples that a worker reads from `cursor` on, and the cursor after them."""
    seen = []
    for sample, after in islice(batches.samples(worker, cursor), count):
        crop = sample.images.numpy().tobytes()
        seen.append(Seen(after.epoch, int(sample.indices), crop, sample.corruption.positions.tolist()))
    return seen, after


@pytest.mark.parametrize("processes, workers, block", [(1, 2, 100), (2, 3, 4)])
def test_every_image_is_read_once_an_epoch_and_looks_the_same_whoever_reads_it(parquet, processes, workers, block):
    alone, _ = read(stream(parquet, block=7), 0, 2 * SHARDS * ROWS)
    shared = []
    for rank, worker in product(range(processes), range(workers)):
        reader = stream(parquet, rank, processes, workers, block)
        shared += read(reader, worker, 2 * SHARDS * ROWS // (processes * workers))[0]
    assert sorted(shared) == sorted(alone)
    assert len({(sample.epoch, sample.index) for sample in alone}) == 2 * SHARDS * ROWS


def test_epochs_and_blocks_are_shuffled(parquet):
    seen, _ = read(stream(parquet), 0, 2 * SHARDS * ROWS)
    first, second = ([sample.index for sample in seen if sample.epoch == epoch] for epoch in (0, 1))
    assert second != sorted(second)
    assert [index >> ROW_BITS for index in first] != [index >> ROW_BITS for index in second]
    rows = [index & 0xFFFF for index in first]
    assert rows[:4] != [0, 1, 2, 3] and sorted(rows[:4]) == [0, 1, 2, 3]
    assert max(rows[4:8]) == 7  # blocks stay in order


def test_a_cursor_goes_on_where_it_stands(parquet):
    batches = stream(parquet)
    whole, _ = read(batches, 0, 80)
    cursors = [after for _, after in islice(batches.samples(0, START), 80)]
    for stop in (1, 4, 11, 15, 66, 70):  # in a block, at its end, at a shard's, in the next, at an epoch's
        assert read(batches, 0, 10, cursors[stop - 1])[0] == whole[stop : stop + 10]


def test_batches_have_the_images_of_their_forward_pass(parquet):
    """Three images a step in two passes: one, and two; by one worker or two in turn."""
    views = stream(parquet).views
    layout = BatchLayout(3, 2, 1, 0)
    whole = list(StreamedBatches(views, layout, 0, 4, {}, 1))
    assert [len(batch.indices) for batch in whole] == [1, 2] * 4
    cursors = {0: whole[3].cursor.tolist()[1:]}
    assert_close(list(StreamedBatches(views, layout, 2, 4, cursors, 1)), whole[4:])
    assert len(list(StreamedBatches(views, layout, 1, 4, {}, 2))) == 3  # this process's worker reads every second


def test_as_many_broken_blocks_as_are_let_through_are_named_with_the_next_image(tmp_path, monkeypatch):
    dataset_of([b"nothing", b"nothing", image_of(0, 0)]).to_parquet(tmp_path / "train.parquet")
    dataset_of([image_of(0, 0)]).to_parquet(tmp_path / "test.parquet")
    batches = stream(tmp_path, block=1)
    monkeypatch.setattr("mpp.data.stream.MAX_REPLACEMENTS", 2)
    assert len(next(batches.samples(0, START))[0].unreadable) == 2
    monkeypatch.setattr("mpp.data.stream.MAX_REPLACEMENTS", 1)
    with pytest.raises(Undecodable, match="images in a row"):
        next(batches.samples(0, START))


@pytest.mark.faults
@pytest.mark.parametrize("workers", [0, 3])
def test_batches_come_from_workers_in_turn_and_resume(parquet, workers):
    views = stream(parquet, workers=workers).views
    layout = BatchLayout(2, 1, 1, 0)
    whole = list(streaming_loader(views, layout, 0, 40, {}))
    assert [int(batch.cursor[0]) for batch in whole] == [number % max(1, workers) for number in range(40)]
    for stop in (1, 2, 5, 6, 11, 33, 34):  # in a block, at its end, at a shard's, at an epoch's
        cursors = {}
        for batch in whole[:stop]:
            worker, *cursor = batch.cursor.tolist()
            cursors[worker] = cursor
        assert_close(list(streaming_loader(views, layout, stop, 40, cursors)), whole[stop:])


def test_without_a_held_out_split_some_shards_are_held_out(parquet):
    """And not trained on. These are elsewhere, and named by a pattern."""
    fsspec.filesystem("memory").put(f"{parquet}/train-*", f"/{parquet.name}/")
    data = DataConfig(path=f"memory://{parquet.name}/train-*.parquet", streaming=True, image_column="image")
    shards, known, held_out = load_streamed(data, 20, 1000)
    views = ViewDataset(shards, data, 16, 3, CorruptionConfig(), (2, 2))
    batches = StreamedBatches(views, BatchLayout(1, 1, 1, 0), 0, 1000, {}, 1)
    rows = SHARDS * ROWS - len(held_out)
    seen, after = read(batches, 0, rows)
    assert len({sample.index for sample in seen}) == rows and after.epoch == 0
    assert read(batches, 0, rows + 1)[1].epoch == 1
    assert len(held_out) == ROWS and len(known.labelled()) == 20
    assert held_out.decode(0, ImagesConfig()).shape == (3, 16, 16)
    assert next(shards.blocks(0, 4))[0].keys() == {"image"}


def test_a_worker_that_is_dealt_empty_shards_waits_for_others(parquet):
    batches = stream(parquet, workers=6)
    whole, first = batches.shards.stream, [image_of(0, row) for row in range(ROWS)]
    batches.shards = replace(batches.shards, stream=whole.filter(lambda row: row["image"]["bytes"] in first))
    seen, _ = read(batches, 0, 2 * ROWS)
    assert {sample.index >> ROW_BITS for sample in seen} == {0}
    assert seen[-1].epoch > 1  # its shard was an empty one meanwhile
    batches.shards = replace(batches.shards, stream=whole.filter(lambda _: False))
    with refused("have no rows"):
        read(batches, 0, 1)


def test_unreadable_images_of_a_stream_are_named_and_replaced_until_there_are_no_others(pretrain, tmp_path):
    """With blocks of 4, the ninth image of a shard is alone in its block, where no other can replace it."""
    images = [b"nothing" if row in (3, 8) else encoded(picture(row)) for row in range(9)]
    for shard in range(2):
        dataset_of(images).to_parquet(tmp_path / "data" / f"train-{shard}.parquet")
    options = (f"--data.path={tmp_path / 'data'}", "--data.streaming=true", "--data.shuffle_block=4", "--run.steps=8")
    folder = pretrain(*options)
    assert max(read_metrics(folder)) == 8
    named = (folder / "unreadable.txt").read_text()
    assert "train shard 0 row 3: " in named and "train shard 0 row 8: " in named

    dataset_of([b"nothing"] * 9).to_parquet(tmp_path / "data" / "train-0.parquet")
    (tmp_path / "data" / "train-1.parquet").rename(tmp_path / "data" / "test.parquet")
    with refused(r"cannot be decoded, such as train shard 0 row \d: "):
        pretrain(*options, dir=tmp_path / "other")


def test_what_a_stream_cannot_do_is_said(parquet):
    for name, value in {"train_images": 5, "eval_fraction": 0.95}.items():
        data = DataConfig(path=str(parquet), streaming=True, eval_split=None, image_column="image", **{name: value})
        with refused(f"data.{name} is {value}"):
            load_streamed(data, 5, 5)


def test_a_stream_has_as_many_workers_as_before_or_as_shards_allow(parquet):
    layout = BatchLayout(8, 1, 4, 0)
    views = stream(parquet).views
    five, one = ({0: [workers, 0, 0, 0, 0]} for workers in (5, 1))  # cursors
    free, alone = (replace(views, data=replace(views.data, workers=workers)) for workers in (None, 0))
    assert stream_workers(free, layout, {}) == 1  # six shards, four processes
    assert stream_workers(free, layout, five) == 5
    assert stream_workers(alone, layout, one) == 0
    with refused(r"data\.workers is 1; it must be 5"):
        stream_workers(views, layout, five)
    with refused(r"train has 6 shards; .* 7 data.workers"):
        stream(parquet, workers=7)


# --- samples of a stream that are kept on disk: complete, drawn from many shards, read once ---


SIZES = (3, 9, 1, 7, 5)  # rows of the shards


@pytest.fixture
def folder(tmp_path):
    """Shards of several sizes to train on and one that is held out; an image's label is its number."""
    for number, size in enumerate((*SIZES, 6)):
        labels = list(range(100 * number, 100 * number + size))
        rows = dataset_of([encoded(picture(label, (8, 8))) for label in labels], label=labels)
        name = f"train-{number:05d}-of-00005" if number < 5 else "test-00000-of-00001"
        rows.to_parquet(tmp_path / "data" / f"{name}.parquet")
    return tmp_path / "data"


def load(folder, probed=8, **settings):
    """The numbers of the images that are kept: to train on, and held-out ones."""
    _, *kept = load_streamed(DataConfig(path=str(folder), streaming=True, **settings), probed, 4)
    assert all(images.encoded(0, DataConfig()) for images in kept)
    return tuple([int(kept[0].class_names[label]) for label in images.labels] for images in kept)


@pytest.mark.parametrize("limit", [1, 4, 17, 100])
def test_a_sample_is_the_beginnings_of_shards_in_turn(folder, cache, monkeypatch, limit):
    monkeypatch.setattr(shards, "SHARDS_PER_TURN", 2)
    monkeypatch.setattr(shards, "ROWS_PER_READ", 2)
    order = permutation(Stream.CUT, 0, 1, len(SIZES))
    expected = []
    for pair in (order[:2], order[2:4], order[4:]):
        if len(expected) < limit:
            rows_per_shard = -(-limit // len(pair))
            beginnings = [range(100 * shard, 100 * shard + min(rows_per_shard, SIZES[shard])) for shard in pair]
            expected += [row for turn in zip_longest(*beginnings) for row in turn if row is not None]
    assert load(folder, limit)[0] == expected[:limit]


def test_a_second_start_reads_no_image_also_of_a_copy_unless_a_file_changed(folder, cache, monkeypatch):
    first = load(folder)
    assert load(folder, eval_seed=1)[0] != first[0]
    load(folder, label_column="label")

    def unreadable(*_, **__):
        raise AssertionError("images are read")

    monkeypatch.setattr(Shards, "blocks", unreadable)
    assert load(folder) == first
    assert load(shutil.copytree(folder, folder.parent / "elsewhere")) == first  # with its dates
    assert len(list(cache.rglob(f"stream-*/{ROWS_FILE}"))) == 5  # the held-out images are the same for both seeds
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
