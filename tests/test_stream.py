"""Streams: every image once an epoch, whichever process reads it; exact resumption; shards of every format."""

import io
import json
import os
import shutil
import tarfile
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import datasets
import fsspec
import pytest
import torch
from conftest import TINY, Killed, dataset_of, encoded, kill_at, picture, read_metrics
from image_files import write_tar
from server import Command

import mpp.training.run
from evaluation import visualize
from mpp.config import CorruptionConfig, DataConfig, ImagesConfig
from mpp.data.loader import BatchLayout
from mpp.data.shards import ROW_BITS, Shards, load_streamed, open_shards
from mpp.data.stream import Cursor, StreamedBatches, stream_workers, streaming_loader
from mpp.data.views import ViewDataset
from mpp.errors import UserError

SHARDS = 6
ROWS = 11  # of a shard
START = Cursor()


class Seen(NamedTuple):
    """A sample that a worker has read."""

    epoch: int
    index: int
    crop: bytes
    corrupted: list[int]  # positions


def image_of(shard: int, row: int) -> bytes:
    """A file of 16 x 16 pixels."""
    return encoded(picture(100 * shard + row, (16, 16)))


def rows_of(shard: int) -> datasets.Dataset:
    """Eleven images of a shard; their labels tell them apart."""
    images = [image_of(shard, row) for row in range(ROWS)]
    return dataset_of(images, label=[shard * ROWS + row for row in range(ROWS)])


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """A folder of six shards to train on and one that is held out."""
    folder = tmp_path_factory.mktemp("parquet")
    for shard in range(SHARDS):
        rows_of(shard).to_parquet(folder / f"train-{shard:05d}-of-00006.parquet")
    rows_of(77).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


def stream(folder, rank=0, processes=1, workers=1, block=4) -> StreamedBatches:
    """Batches of two images."""
    data = DataConfig(path=str(folder), streaming=True, workers=workers, shuffle_block=block)
    shards, _, _ = load_streamed(data, 5, 5)
    views = ViewDataset(shards, data, 16, 3, CorruptionConfig(), (2, 2))
    return StreamedBatches(views, BatchLayout(2 * processes, 1, processes, rank), 0, 1000, {}, max(1, workers))


def read(batches: StreamedBatches, worker: int, count: int, cursor: Cursor = START) -> tuple[list[Seen], Cursor]:
    """The samples that a worker reads from `cursor` on, and the cursor after them."""
    seen = []
    for sample, after in islice(batches.samples(worker, cursor), count):
        crop = sample.images.numpy().tobytes()
        seen.append(Seen(after.epoch, int(sample.indices), crop, sample.corruption.positions.tolist()))
    return seen, after


def read_epoch(batches: StreamedBatches) -> list[int]:
    """Indices of the images that worker 0 reads in the first epoch."""
    indices = []
    for sample, after in batches.samples(0, START):
        if after.epoch:
            break
        indices.append(int(sample.indices))
    return indices


@pytest.mark.parametrize(("processes", "workers", "block"), [(1, 2, 100), (2, 3, 4)])
def test_every_image_is_read_once_an_epoch_and_looks_the_same_whoever_reads_it(parquet, processes, workers, block):
    alone, _ = read(stream(parquet, block=7), 0, 2 * SHARDS * ROWS)
    shared: list[Seen] = []
    for rank in range(processes):
        for worker in range(workers):
            reader = stream(parquet, rank, processes, workers, block)
            count = 2 * SHARDS * ROWS // (processes * workers)
            shared += read(reader, worker, count)[0]
    assert sorted(shared) == sorted(alone)
    assert len({(sample.epoch, sample.index) for sample in alone}) == 2 * SHARDS * ROWS


def test_epochs_and_blocks_are_shuffled(parquet):
    seen, _ = read(stream(parquet), 0, 2 * SHARDS * ROWS)
    first, second = ([sample.index for sample in seen if sample.epoch == epoch] for epoch in (0, 1))
    assert first != second != sorted(second)
    orders = [list(dict.fromkeys(index >> ROW_BITS for index in indices)) for indices in (first, second)]
    assert orders[0] != orders[1]
    rows = [index & 0xFFFF for index in first]
    assert rows[:4] != [0, 1, 2, 3] and sorted(rows[:4]) == [0, 1, 2, 3]
    assert max(rows[4:8]) == 7  # blocks stay in order


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
        resumed = list(streaming_loader(views, layout, stop, 40, cursors))
        assert [batch.indices.tolist() for batch in resumed] == [batch.indices.tolist() for batch in whole[stop:]]
        assert torch.equal(resumed[0].images, whole[stop].images)


# --- formats of shards ---


def write_webdataset(tmp_path: Path) -> str:
    for shard in range(SHARDS):
        with tarfile.open(tmp_path / f"train-{shard:04d}.tar", "w") as tar:
            for row in range(ROWS):
                for end, data in (("png", image_of(shard, row)), ("cls", str(row % 3).encode())):
                    member = tarfile.TarInfo(f"{shard}_{row}.{end}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return str(tmp_path)


def write_arrow(tmp_path: Path) -> str:
    (tmp_path / "arrow").mkdir()
    for shard in range(SHARDS):
        rows_of(shard).save_to_disk(tmp_path / "parts")
        (tmp_path / "parts" / "data-00000-of-00001.arrow").rename(tmp_path / "arrow" / f"train-{shard}.arrow")
    return str(tmp_path / "arrow")


def write_to_url(tmp_path: Path) -> str:
    memory = fsspec.filesystem("memory")
    for shard in range(SHARDS):
        buffer = io.BytesIO()
        rows_of(shard).to_parquet(buffer)
        memory.pipe(f"/{tmp_path.name}/train-{shard:05d}-of-00006.parquet", buffer.getvalue())
    return f"memory://{tmp_path.name}"


SOURCES = {
    "webdataset": write_webdataset,
    "arrow": write_arrow,
    "url": write_to_url,
    "pattern": lambda tmp_path: f"{write_to_url(tmp_path)}/train-*.parquet",
}
"""Kind of a dataset -> writes one, and returns its path."""


@pytest.mark.parametrize("kind", SOURCES)
def test_every_sort_of_source(tmp_path, kind):
    """Without a held-out split, one shard is held out and not trained on."""
    settings = {"label_column": "cls"} if kind == "webdataset" else {}
    path = SOURCES[kind](tmp_path)
    data = DataConfig(path=path, streaming=True, workers=0, shuffle_block=4, **settings)
    shards, known, held_out = load_streamed(data, 20, 1000)
    indices = read_epoch(StreamedBatches(ViewDataset(shards, data, 16), BatchLayout(1, 1, 1, 0), 0, 1000, {}, 1))
    assert len(indices) == len(set(indices)) == SHARDS * ROWS - len(held_out)
    assert len(known) == 20
    assert len(held_out) >= 7
    assert known.labelled() is not None
    assert held_out.decode(0, ImagesConfig()).shape == (3, 16, 16)


def test_a_later_sample_with_two_pictures_is_no_damage(tmp_path):
    members = [(f"{number}.png", encoded(picture(number))) for number in range(8)]
    write_tar(tmp_path / "train-0.tar", [*members, ("8.png", members[0][1]), ("8.bmp", members[0][1])])
    write_tar(tmp_path / "test-0.tar", members)
    shards, _ = open_shards(DataConfig(path=str(tmp_path), streaming=True))
    with pytest.raises(UserError, match=r"^sample 8 has several pictures .*data\.image_column"):
        list(shards.blocks(0, 4))


def test_a_folder_of_files_is_made_into_shards_first(image_folder):
    with pytest.raises(UserError, match="mpp prepare"):
        load_streamed(DataConfig(path=str(image_folder), streaming=True, eval_split=None), 5, 5)


@pytest.mark.faults
def test_training_on_a_stream_resumes_with_the_same_bits(pretrain, parquet, tmp_path, monkeypatch):
    options = [f"--data.path={parquet}", "--data.streaming=true", "--run.steps=24", "--data.shuffle_block=4"]
    options += ["--data.workers=2", "--probe.every=24", "--run.eval_every=24"]
    whole = pretrain(*options, without="--data.workers")
    lines = read_metrics(whole, "heldout/loss") | read_metrics(whole, "knn/depth_01")
    assert set(lines) == {0, 24}
    for stop in (3, 17):  # in the first epoch, and in the second
        with monkeypatch.context() as context, pytest.raises(BaseException, match="killed"):
            kill_at(context, stop)
            pretrain(*options, dir=tmp_path / "stopped", without="--data.workers")
    stopped = pretrain(*options, dir=tmp_path / "stopped", without="--data.workers")
    weights = Path("encoder", "model.safetensors")
    assert (whole / weights).read_bytes() == (stopped / weights).read_bytes()
    assert read_metrics(whole) == read_metrics(stopped)


def test_a_worker_that_is_dealt_empty_shards_waits_for_others(tmp_path):
    rows = rows_of(0)
    rows.to_parquet(tmp_path / "train-0.parquet")
    rows.select([]).to_parquet(tmp_path / "train-1.parquet")
    rows.to_parquet(tmp_path / "test.parquet")
    files = "{split: train, path: train-*.parquet}, {split: test, path: test.parquet}"
    card = f"configs:\n- {{config_name: default, data_files: [{files}]}}"
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")  # of folders without one, they are left out
    seen, _ = read(stream(tmp_path, workers=2), 0, 2 * ROWS)
    assert len(seen) == 2 * ROWS
    assert max(sample.epoch for sample in seen) > 1  # its shard was the empty one meanwhile
    empty = stream(tmp_path, workers=2)
    empty.shards = replace(empty.shards, stream=empty.shards.stream.filter(lambda _: False))
    with pytest.raises(UserError, match="have no rows"):
        read(empty, 0, 1)


@pytest.mark.faults
def test_pictures_and_files_of_a_streamed_run_load_what_it_kept(pretrain, parquet, tmp_path, monkeypatch, capsys):
    folder = pretrain(f"--data.path={parquet}", "--data.streaming=true", dir=tmp_path / "run")
    monkeypatch.setattr("evaluation.frozen.run_images.load_image_datasets", None)
    visualize.main([f"--encoder={folder}", "--pictures=[neighbours]", "--precision=fp32"])
    assert "neighbours.png" in capsys.readouterr().out


def test_unreadable_images_of_a_stream_are_named_and_replaced(pretrain, tmp_path):
    """With blocks of 4, the ninth image of a shard is alone in its block, where no other can replace it."""
    images = [b"nothing" if row in (3, 8) else encoded(picture(row)) for row in range(9)]
    for shard in range(2):
        dataset_of(images).to_parquet(tmp_path / "data" / f"train-{shard}.parquet")
    options = (f"--data.path={tmp_path / 'data'}", "--data.streaming=true", "--data.shuffle_block=4", "--run.steps=8")
    folder = pretrain(*options, dir=tmp_path / "run")
    assert max(read_metrics(folder)) == 8
    named = (folder / "unreadable.txt").read_text()
    assert "train shard 0 row 3: " in named and "train shard 0 row 8: " in named


def test_images_that_are_all_unreadable_end_a_stream(pretrain, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, data in (("train", b"nothing"), ("test", encoded(picture(1)))):
        dataset_of([data] * 9).to_parquet(folder / f"{name}.parquet")
    options = (f"--data.path={folder}", "--data.streaming=true", "--data.shuffle_block=4")
    with pytest.raises(UserError, match=r"cannot be decoded, such as train shard 0 row \d: "):
        pretrain(*options, dir=tmp_path / "run")


@pytest.mark.faults
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_is_named_and_the_run_goes_on_later(pretrain, parquet, tmp_path, monkeypatch, workers):
    data = shutil.copytree(parquet, tmp_path / "data")
    options = ["--data.streaming=true", f"--data.workers={workers}", f"--data.path={data}"]
    options += ["--run.steps=20", "--run.checkpoint_every=20", "--run.eval_every=20"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 1)
        pretrain(*options)  # the images to evaluate on are read now
    file = data / "train-00003-of-00006.parquet"
    whole, date = file.read_bytes(), file.stat()
    file.write_bytes(whole[: len(whole) // 2])
    file.open("ab").truncate(len(whole))  # as a file that was not downloaded to its end
    os.utime(file, ns=(date.st_atime_ns, date.st_mtime_ns))
    with pytest.raises(UserError, match=r"train-00003-of-00006\.parquet cannot be read"):
        pretrain(*options)
    file.write_bytes(whole)
    os.utime(file, ns=(date.st_atime_ns, date.st_mtime_ns))
    assert max(read_metrics(pretrain(*options))) == 20


def begin_on(machines: int, cache: Path) -> None:
    """Two processes on one machine, or on two with their own disks; they print their reads of evaluated images."""
    start, blocks = mpp.training.run.start, Shards.blocks

    def start_there(run):
        rank = os.environ["RANK"]
        datasets.config.HF_DATASETS_CACHE = cache / (rank if machines == 2 else "0")
        os.environ["LOCAL_RANK"] = "0" if machines == 2 else rank
        return start(run)

    def blocks_said(self, *args, **options):
        if "label" in self.stream.features:  # training needs no labels
            print(f"process {os.environ['RANK']} reads {self.split}")
        return blocks(self, *args, **options)

    mpp.training.run.start, Shards.blocks = start_there, blocks_said


@pytest.mark.faults
@pytest.mark.parametrize("machines", [1, 2])
def test_two_processes_read_a_stream_together(parquet, tmp_path, machines):
    """One process of each machine reads the images to evaluate on; the others have them from the machine's cache."""
    options = [*TINY, f"--data.path={parquet}", "--data.streaming=true", "--run.steps=8", "--data.workers=2"]
    options += [f"--run.dir={tmp_path / 'two'}", "--probe.every=8", "--run.eval_every=8"]
    prepare = partial(begin_on, machines, tmp_path / "cache")
    run = Command("pretrain", *options, processes=2, prepare=prepare)
    assert run.wait() == [0, 0], run.said
    readers = {line for line in run.said.splitlines() if " reads " in line}
    assert readers == {f"process {rank} reads {split}" for rank in range(machines) for split in ("train", "test")}
    assert len(list((tmp_path / "cache").rglob("stream-*/rows.arrow"))) == 2 * machines
    cursors = json.loads((tmp_path / "two" / "checkpoints" / "step_00000008" / "cursors.json").read_text())
    assert [sorted(each) for each in cursors] == [["0", "1"]] * 2
    assert 8 in read_metrics(tmp_path / "two", "knn/depth_01")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--data.workers=7"], "train has 6 shards; .* 7 data.workers"),
        (["--data.train_images=5"], "data.train_images is 5"),
        (["--data.split=training"], "data.split is training"),
        (["--data.image_column=label"], "data.image_column is label"),
        (["--data.eval_split=null", "--data.eval_fraction=0.95"], "data.eval_fraction is 0.95"),
    ],
)
def test_what_a_stream_cannot_do_is_said(pretrain, parquet, settings, words):
    with pytest.raises(ValueError, match=words):
        pretrain(f"--data.path={parquet}", "--data.streaming=true", *settings)


def test_workers_that_are_not_given_are_as_many_as_before_or_as_shards_allow(parquet):
    data = DataConfig(path=str(parquet), streaming=True)
    shards, _, _ = load_streamed(data, 5, 5)
    views = ViewDataset(shards, data, 16)
    layout = BatchLayout(8, 1, 4, 0)
    assert stream_workers(views, layout, {}) == 1  # six shards, four processes
    assert stream_workers(views, layout, {0: [5, 0, 0, 0, 0]}) == 5


@pytest.mark.faults
def test_a_stream_is_resumed_as_it_was(pretrain, parquet, tmp_path):
    copy = shutil.copytree(parquet, tmp_path / "data")
    options = [f"--data.path={copy}", "--data.streaming=true"]
    folder = pretrain(*options)
    shutil.rmtree(folder / "encoder")
    with pytest.raises(ValueError, match=r"data\.workers is 3; it must be 1"):
        pretrain(*options, "--data.workers=3")
    (copy / "train-00003-of-00006.parquet").unlink()
    with pytest.raises(ValueError, match=r"train: shards was 6, is 5"):
        pretrain(*options)
    shutil.copy2(parquet / "train-00003-of-00006.parquet", copy)
    (copy / "README.md").write_text("what this is")
    pretrain(*options)


def test_other_columns_and_other_files_do_not_matter(tmp_path):
    masks = dataset_of([b"broken"] * 8).rename_column("image", "mask")
    rows = dataset_of([encoded(picture(1, (8, 8)))] * 8, caption=["a"] * 8)
    for shard in range(3):
        datasets.concatenate_datasets([rows, masks], axis=1).to_parquet(tmp_path / f"train-{shard}.parquet")
    for path in (str(tmp_path / "train-*.parquet"), f"file://{tmp_path}"):
        data = DataConfig(path=path if "://" in path else f"file://{path}", streaming=True, image_column="image")
        shards, _, _ = load_streamed(data, 5, 5)
        assert next(shards.blocks(0, 4))[0].keys() == {"image"}
