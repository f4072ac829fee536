"""Where images come from, and the endless sequence they are read in."""

import collections
import itertools
import json
import multiprocessing
import os
import resource
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import dataset_of, encoded, picture
from torch.utils.data import DataLoader

from mpp.config import CorruptionConfig, DataConfig, ImagesConfig
from mpp.data.columns import decode_cell
from mpp.data.dataset import ImageDataset
from mpp.data.decoded_cache import cache_decoded
from mpp.data.decoding.decode import decode
from mpp.data.hub import announce_hub_lookup
from mpp.data.loader import BatchLayout, HeldOutLoader, TrainingBatchSampler, held_out_batches, training_loader
from mpp.data.sources import load_image_datasets, load_splits
from mpp.data.views import ViewDataset
from mpp.data.workers import deaths_explained, kill_workers
from mpp.errors import UnreadableImage, UserError
from mpp.pretrain import Pretraining
from mpp.runtime.randomness import FIXED


def views(dataset, **settings) -> ViewDataset:
    return ViewDataset(dataset, DataConfig(**settings), 32, 0, CorruptionConfig(), grid=(4, 4))


def rows(count=12, column="image", **more) -> datasets.Dataset:
    images = [encoded(picture(number)) for number in range(count)]
    return dataset_of(images, **more).rename_columns({"image": column})


def test_birds_are_the_default():
    train, test = load_image_datasets(DataConfig())
    assert (len(train), len(test)) == (633, 286)
    assert (train.labels >= 0).sum() == 430 and (test.labels >= 0).all()
    assert train.decode(0, ImagesConfig()).shape == (3, 120, 120)
    assert len(train.labelled()) == 430


LISTED = b'file_name,mask_file_name\nb.png,"masks/b2, left.png"\n'
LISTED_HERE = b"file_name\nb.png\n"


@pytest.mark.parametrize(
    ("names", "used", "said"),
    [
        (
            ["car/0.png", "plane/0.png", "train/0.png"],
            1,
            "images in no split's folder (2: car/0.png, plane/0.png)",
        ),
        (["spring.png", "steam train.png", "train.png"], 3, ""),
        (["a.png", "b.npy", "c.npy"], 1, "arrays next to pictures (2: b.npy, ...)"),
        (["a.png", "b.png", "c.png", "labels.csv"], 1, "files that no list names (2: a.png, c.png)"),
        (["b.png", "masks/b2, left.png", "metadata.csv"], 1, ""),
        (["a/b.png", "c/b.png", "a/labels.csv"], 2, ""),
        (["a.png", "test.png", "c.parquet", "metadata.json"], 2, "tables without images (1: c.parquet)"),
        (["a.png", "b.png", "old.tar"], 2, "tars next to images (1: old.tar)"),
        (
            ["a.png", "b.png", "old.zip"],
            2,
            "archives next to images, or in one; unpack them or move them away (1: old.zip)",
        ),
        (["train/a/0.png", "train/b/0.png", "test/a/0.png"], 2, ""),
        (["a/0.png", "b/0.png", ".hidden/0.png", "__MACOSX/a.png"], 2, ""),
    ],
)
def test_what_is_left_out_is_counted_and_named(tmp_path, capsys, names, used, said):
    for name in names:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        lists = {"metadata.csv": LISTED, "labels.csv": LISTED_HERE}
        file.write_bytes(lists.get(file.name, encoded(picture(1))))
    assert len(load_splits(DataConfig(path=str(tmp_path)))["train"]) == used
    warned = capsys.readouterr().err
    assert said in warned and ("warning" in warned) == bool(said)


def test_folder_of_images_is_cut_by_a_seed(image_folder):
    config = DataConfig(path=str(image_folder), eval_fraction=0.25)
    train, held_out = load_image_datasets(config)
    names = [[p.name(i) for i in range(len(p))] for p in (train, held_out)]
    assert [len(n) for n in names] == [9, 3] and not set(names[0]) & set(names[1])
    assert sorted(train.labels.tolist() + held_out.labels.tolist()) == [0] * 6 + [1] * 6
    again = load_image_datasets(config)[1]
    assert [again.name(i) for i in range(3)] == names[1]
    other = load_image_datasets(DataConfig(path=str(image_folder), eval_fraction=0.25, cut_seed=1))[1]
    assert [other.name(i) for i in range(3)] != names[1]
    assert (train.decode(0, ImagesConfig()).shape) == (3, 40, 48)


@pytest.mark.parametrize("kind", ["parquet file", "parquet folder", "arrow file", "saved", "saved with splits"])
def test_other_layouts_on_disk(tmp_path, kind):
    table, path = rows(), tmp_path / "data"
    if kind == "parquet file":
        path = path.with_suffix(".parquet")
        table.to_parquet(path)
    elif kind == "parquet folder":
        path.mkdir()
        table.to_parquet(path / "train-00000-of-00001.parquet")
        rows(4).to_parquet(path / "validation-00000-of-00001.parquet")
    elif kind == "arrow file":
        table.save_to_disk(path)
        path = next(path.glob("*.arrow"))
    elif kind == "saved":
        table.save_to_disk(path)
    else:
        datasets.DatasetDict(train=table, test=rows(4)).save_to_disk(path)
    train, held_out = load_image_datasets(DataConfig(path=str(path)))
    named_split = kind in ("parquet folder", "saved with splits")
    assert (len(train), len(held_out)) == ((12, 4) if named_split else (11, 1))
    assert train.decode(0, ImagesConfig()).shape == (3, 40, 48)


def test_columns_of_other_names_and_text_labels(tmp_path):
    kinds = ["owl", "cat", None, "owl"] * 3
    rows(column="photo", species=kinds).to_parquet(tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    train, _ = load_image_datasets(DataConfig(path=path, eval_fraction=0.1))
    assert train.labels is None
    train, held_out = load_image_datasets(DataConfig(path=path, image_column="photo", label_column="species"))
    assert collections.Counter([*train.labels, *held_out.labels]) == {1: 6, 0: 3, -1: 3}


def test_several_labels_may_be_right_on_the_held_out_split(tmp_path):
    for split, labels in (("train", [[0], [1], [2]] * 4), ("test", [[0, 2], [], [1]] * 4)):
        single = [label[0] for label in labels] if split == "train" else [-1] * 12
        table = rows().add_column("label", single).add_column("real", labels)
        table.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    train, test = load_image_datasets(DataConfig(path=str(tmp_path), eval_label_column="real"))
    assert train.labels.tolist() == [0, 1, 2] * 4
    assert test.labels.tolist() == [[0, 2], [-1, -1], [1, -1]] * 4
    assert test.labelled().labels.tolist() == [[0, 2], [1, -1]] * 4
    assert views(test)[FIXED, 0].labels.tolist() == [0, 2]
    for settings, words in (
        (dict(eval_label_column="rael"), r"data\.eval_label_column is rael; .* has image, label, real"),
        (dict(eval_label_column="real", eval_split=None), r"data\.eval_label_column is real; it must be left out"),
        (dict(revision="v2"), r"data\.revision is v2; it must be left out: .* is no dataset of the hub"),
    ):
        with pytest.raises(UserError, match=words):
            load_image_datasets(DataConfig(path=str(tmp_path), **settings))


def test_something_else_called_label_is_no_label_unless_asked_for(tmp_path):
    rows().add_column("label", [0.5] * 12).to_parquet(tmp_path / "a.parquet")
    assert load_image_datasets(DataConfig(path=str(tmp_path / "a.parquet")))[0].labels is None
    with pytest.raises(ValueError, match=r"data\.label_column is label, which holds no classes"):
        load_image_datasets(DataConfig(path=str(tmp_path / "a.parquet"), label_column="label"))


def test_what_lies_beside_pictures_is_none(tmp_path, capsys):
    """Texts beside them, sidecars and overviews. Links to folders are followed, but not into the same tree."""
    for number in range(8):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        file = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        for name, data in (
            (file, encoded(picture(number))),
            (f"{file}.ovr", encoded(picture(1))),
            (f"{file}.xmp", b"x"),
        ):
            Path(name).write_bytes(data)
        file.with_suffix(".txt").write_text("0 0.5 0.5 1 1")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "8.png").write_bytes(encoded(picture(8)))
    (tmp_path / "images" / "c").symlink_to(tmp_path / "c")
    (tmp_path / "images" / "b" / "up").symlink_to(tmp_path / "images")
    (tmp_path / "c" / "again").symlink_to(tmp_path / "c")
    train, held_out = load_image_datasets(DataConfig(path=str(tmp_path / "images"), eval_fraction=0.25))
    names = [Path(part.name(index)).name for part in (train, held_out) for index in range(len(part))]
    assert sorted(names) == [f"{number}.png" for number in range(9)] and train.names == ["a", "b", "c"]
    assert "links to folders of the same tree (2: b/up, c/again)" in capsys.readouterr().err


def test_videos_are_no_images_and_pictures_that_nobody_reads_are_counted(tmp_path, capsys):
    """As a phone's folder has them; its README.md is no dataset card."""
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number)))
        for end in ("mov", "heic"):
            (tmp_path / f"{number}.{end}").write_bytes(b"x")
    (tmp_path / "README.md").write_text("My photographs")
    assert load_splits(DataConfig(path=str(tmp_path)))["train"].num_rows == 3
    assert (
        ".heic files, which mpp does not read; convert them to JPEG, PNG or TIFF (3: 0.heic, 1.heic, 2.heic)"
        in capsys.readouterr().err
    )
    for file in tmp_path.glob("*.mov"):
        file.with_suffix(".txt").write_text("x")
        file.unlink()
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: mine\n    path: '*.png'\n---\n"
    (tmp_path / "README.md").write_text(card)
    assert load_splits(DataConfig(path=str(tmp_path)))["mine"].num_rows == 3


def test_pictures_of_several_lists_are_in_the_order_of_their_names(tmp_path):
    for part in "dbca":
        (tmp_path / part).mkdir()
        for number in range(3):
            (tmp_path / part / f"{number}.png").write_bytes(encoded(picture(number)))
        (tmp_path / part / "metadata.csv").write_text("file_name\n2.png\n0.png\n1.png\n")
    splits = load_splits(DataConfig(path=str(tmp_path)))
    rows = splits["train"].cast_column("image", datasets.Image(decode=False))
    assert [row["image"]["path"] for row in rows] == [f"{tmp_path}/{p}/{n}.png" for p in "abcd" for n in range(3)]


def test_a_seeded_choice_of_training_images(image_folder):
    config = DataConfig(path=str(image_folder), eval_fraction=0.25)
    train, _ = load_image_datasets(config)
    names = [[chosen.name(i) for i in range(len(chosen))] for chosen in (train.choose(4, seed) for seed in (0, 0, 1))]
    assert len(names[0]) == 4 and names[0] == names[1] != names[2]
    assert len({name.split("/")[-2] for name in names[0]}) == 2  # not the first of files that come sorted by class
    assert train.choose(None, 0) is train


def test_a_share_to_hold_out_is_refused_where_a_split_is_held_out():
    with pytest.raises(ValueError, match=r"data\.eval_fraction is 0\.5; it must be left out, because test is held out"):
        load_image_datasets(DataConfig(eval_fraction=0.5))
    _, held_out = load_image_datasets(DataConfig(eval_fraction=0.5, eval_split=None))
    assert len(held_out) == 316  # of 633


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "/nowhere/at/all"}, ["data.path", "/nowhere/at/all", "does not exist"]),
        ({"path": "{file}", "image_column": "photo"}, ["data.image_column", "photo", "image, id"]),
        ({"path": "{file}", "image_column": "id"}, ["data.image_column", "id", "no images"]),
        ({"path": "{file}", "label_column": "kind"}, ["data.label_column", "kind", "image, id"]),
        ({"path": "{file}", "split": "dev"}, ["data.split", "dev", "train"]),
        ({"path": "{file}", "eval_split": "dev"}, ["data.eval_split", "dev", "train"]),
        ({"path": "{text}"}, ["data.path", "parquet"]),
        ({"path": "{empty}"}, ["data.path", "empty"]),
    ],
)
def test_bad_sources_are_named(tmp_path, settings, words):
    table = rows(4).add_column("id", [1, 2, 3, 4])
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "text.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    places = {"file": tmp_path / "a.parquet", "text": tmp_path / "text.txt", "empty": tmp_path / "empty"}
    settings["path"] = settings["path"].format(**places)
    with pytest.raises(ValueError) as error:
        load_image_datasets(DataConfig(**settings))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_every_epoch_shows_every_image_once_in_another_order():
    layout = BatchLayout.of(6, 3, world_size=1, rank=0)
    keys = [key for batch in TrainingBatchSampler(9, seed=0, layout=layout, start=0, stop=6) for key in batch]
    assert len(keys) == 36
    epochs = [[index for epoch, index in keys if epoch == e] for e in range(4)]
    assert all(sorted(order) == list(range(9)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 4


@pytest.mark.parametrize(
    ("batch", "processes"), [(None, 1), (2, 1), (5, 1), (1, 3), (3, 3), (4, 3), (None, 4), (None, 5), (None, 7), (2, 5)]
)
def test_an_updates_images_do_not_depend_on_how_they_are_shared_out(batch, processes):
    def updates(batch, processes, start):
        layouts = [BatchLayout.of(12, batch, processes, rank) for rank in range(processes)]
        parts = [list(TrainingBatchSampler(7, 0, layout, start, 5)) for layout in layouts]
        passes = layouts[0].accumulation_steps
        return [
            [key for m in range(passes) for part in parts for key in part[update * passes + m]]
            for update in range(5 - start)
        ]

    whole = updates(None, 1, 0)
    assert all(len(update) == 12 for update in whole)
    assert updates(batch, processes, 0) == whole
    assert updates(batch, processes, 3) == whole[3:]  # resumed


def test_shares_differ_by_one_image_at_most_and_fit():
    for images, batch, processes in itertools.product(range(1, 70), (None, 1, 2, 3, 8, 99), (1, 2, 3, 5, 7, 8)):
        if images < processes or (batch == 1 and images % processes):
            continue
        layouts = [BatchLayout.of(images, batch, processes, rank) for rank in range(processes)]
        passes = range(layouts[0].accumulation_steps)
        sizes = [len(layout.share(forward)) for forward in passes for layout in layouts]
        assert sum(sizes) == images and len(passes) == -(-images // (processes * (batch or images)))
        assert (min(sizes), max(sizes)) == (layouts[0].smallest, layouts[0].batch_size)
        assert 0 < max(sizes) <= min(min(sizes) + 1, batch or images)


@pytest.mark.parametrize(
    ("images", "batch", "processes", "message"),
    [
        (12, None, 13, r"optim\.global_batch_size is 12; it must be at least 13, an image for each process"),
        (
            *(64, 1, 3),
            r"data\.batch_size is 1, by which 3 processes cannot share 64 images; it must be at least 2, or "
            r"optim\.global_batch_size 63 or 66",
        ),
    ],
)
def test_a_global_batch_that_cannot_be_shared_out_is_an_error(images, batch, processes, message):
    with pytest.raises(ValueError, match=message):
        BatchLayout.of(images, batch, processes, 0)


def test_samples_do_not_depend_on_workers():
    train, _ = load_image_datasets(DataConfig())
    layout = BatchLayout.of(4, 4, 1, 0)
    batches = [list(training_loader(views(train, workers=workers), layout, 158, 160)) for workers in (0, 2)]
    for here, there in zip(*batches, strict=True):
        assert torch.equal(here.images, there.images) and torch.equal(here.indices, there.indices)
        assert all(torch.equal(a, b) for a, b in zip(here.corruption, there.corruption, strict=True))


def test_loading_draws_nothing_from_torchs_generator():
    train, _ = load_image_datasets(DataConfig())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    next(iter(training_loader(views(train, workers=0), BatchLayout.of(2, 2, 1, 0), 0, 1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_held_out_images_are_each_seen_once_in_one_view():
    _, test = load_image_datasets(DataConfig())
    test = test.choose(11, 0)
    parts = [list(held_out_batches(views(test, workers=0), 4, 2, rank)) for rank in range(2)]
    assert sorted(int(i) for part in parts for batch in part for i in batch.indices) == list(range(11))
    assert torch.equal(views(test)[FIXED, 3].images, views(test)[FIXED, 3].images)
    assert not torch.equal(views(test)[0, 3].images, views(test)[1, 3].images)


def test_loader_processes_are_forked_before_there_are_threads_and_none_is_left(pretrain, tmp_path, monkeypatch):
    """But for the one that waits for signals: a fork beside a thread that runs may hang. Evaluations fork none."""
    forks, fork, evaluate = [], os.fork, Pretraining.evaluate
    threads_of_others = {thread.name for thread in threading.enumerate()}

    def counted(self, model, step, tracker):
        before = len(forks)
        scalars = evaluate(self, model, step, tracker)
        in_evaluations.append(len(forks) - before)
        return scalars

    def run(workers: int) -> list[dict]:
        options = ("--run.eval_every=2", "--probe.every=2", "--probe.images=20", f"--data.workers={workers}")
        folder = pretrain(*options, dir=tmp_path / str(workers), without="--data.workers")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        judged = ("heldout", "features", "knn")
        return [{name: value for name, value in line.items() if name.startswith(judged)} for line in lines]

    in_evaluations: list[int] = []
    monkeypatch.setattr(os, "fork", lambda: forks.append(threading.enumerate()) or fork())
    monkeypatch.setattr(Pretraining, "evaluate", counted)
    loaded = run(workers=1)
    assert in_evaluations == [0, 0] and not multiprocessing.active_children()
    beside = {thread.name for threads in forks for thread in threads} - threads_of_others
    assert len(forks) == 2 and all("listen" in name for name in beside), beside
    for line, expected in zip(loaded, run(workers=0), strict=True):
        assert line == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_sets_are_loaded_again_and_again(workers):
    train, test = load_image_datasets(DataConfig())
    loader = HeldOutLoader(4, workers, world_size=2, rank=1)
    sets = [loader.add(views(part.choose(count, 0))) for part, count in ((train, 11), (test, 5))]
    for each in (0, 1, 0, 0, 1):
        for found, expected in zip(loader.batches(sets[each]), held_out_batches(sets[each], 4, 2, 1), strict=True):
            assert torch.equal(found.images, expected.images) and torch.equal(found.indices, expected.indices)
        next(iter(loader.batches(sets[1 - each])))  # one that is left early


def test_the_death_of_a_process_that_stays_names_an_image_of_the_set_that_it_loads(image_folder, monkeypatch):
    dataset, _ = load_image_datasets(DataConfig(path=str(image_folder), eval_split=None))
    loader = HeldOutLoader(2, workers=1)
    fine, deadly = (loader.add(views(dataset.select(np.array(chosen)))) for chosen in ([0, 1], [2, 3]))
    data = dataset.rows[3]["image"]["bytes"] or Path(dataset.name(3)).read_bytes()

    def dies(given, most):
        return os.kill(os.getpid(), 9) if given == data else decode(given, most)

    monkeypatch.setattr("mpp.data.decoding.decode.decode", dies)
    assert len(list(loader.batches(fine))) == 1
    with (
        pytest.raises(UserError, match=f"a loader process died .* while it read {dataset.name(3)};"),
        deaths_explained(),
    ):
        list(loader.batches(deadly))
    kill_workers()


def test_unreadable_images_are_named_and_replaced(image_folder):
    (image_folder / "cat" / "broken.png").write_bytes(b"nothing")
    (image_folder / "cat" / "text.jpg").write_text("this is no image")
    config = DataConfig(path=str(image_folder), eval_fraction=0.01)
    train, _ = load_image_datasets(config)
    dataset = views(train)
    names = [train.name(i) for i in range(len(train))]
    broken = [i for i, name in enumerate(names) if name.endswith(("broken.png", "text.jpg"))]
    for index in broken:
        sample = dataset[0, index]
        assert int(sample.indices) not in broken
        assert names[index] in sample.unreadable[0]
        assert torch.equal(sample.images, dataset[0, index].images)  # always replaced by the same
    fine = next(i for i in range(len(train)) if i not in broken)
    assert dataset[0, fine].unreadable == []


def test_views_fit_torchs_own_loader():
    _, test = load_image_datasets(DataConfig())
    crops = [sample.images for sample in DataLoader(views(test), sampler=[(0, 0), (0, 1)], batch_size=None)]
    assert np.shape(crops) == (2, 3, 32, 32)


def test_a_cell_may_hold_a_url(image_folder):
    file = image_folder / "cat" / "01.png"
    cells = [
        {"bytes": file.read_bytes(), "path": "anything"},
        *({"bytes": None, "path": p} for p in (str(file), f"file://{file}")),
    ]
    first, *others = (decode_cell(cell, ImagesConfig()) for cell in cells)
    assert all(torch.equal(first, other) for other in others)
    for nothing in (None, {"bytes": None, "path": None}, {"bytes": None, "path": ""}):
        with pytest.raises(UnreadableImage, match="no bytes"):
            decode_cell(nothing, ImagesConfig())


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_are_held_in_memory_are_the_same(image_folder, workers):
    (image_folder / "cat" / "01.png").write_bytes(b"no image")
    dataset, _ = load_image_datasets(DataConfig(path=str(image_folder), eval_split=None))
    held = cache_decoded(dataset, DataConfig(workers=workers))
    broken = [index for index in range(len(dataset)) if dataset.name(index).endswith("01.png")]
    for index in set(range(len(dataset))) - set(broken):
        assert torch.equal(held.decode(index, ImagesConfig()), dataset.decode(index, ImagesConfig()))
        assert held.decode(index, ImagesConfig(max_pixels=1)).shape == (3, 40, 48)  # it is not decoded again
    for index in broken:
        with pytest.raises(UnreadableImage):
            held.decode(index, ImagesConfig())
    needed = sum(held.decoded.shapes.prod(1))
    assert cache_decoded(dataset, DataConfig(workers=workers, cache_gb=needed / 1e9)).decoded
    assert not cache_decoded(dataset, DataConfig(workers=workers, cache_gb=(needed - 1) / 1e9)).decoded
    dataset.rows = None  # nothing is read for nothing
    assert cache_decoded(dataset, DataConfig(workers=workers, cache_gb=0)) is dataset


def test_holding_many_images_opens_few_files():
    """What a loader process hands over is a file: 64 images each."""
    cell = {"bytes": encoded(picture(1, (4, 4))), "path": None}
    rows = dataset_of([cell["bytes"]] * 64 * 60).cast_column("image", datasets.Image(decode=False))
    dataset = ImageDataset(rows, "image", None, "train")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        held = cache_decoded(dataset, DataConfig(workers=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert held.decode(3839, ImagesConfig()).shape == (3, 4, 4)


@pytest.mark.parametrize("empty", ["train", "test"])
def test_a_split_without_images_is_named(tmp_path, empty):
    for name in ("train", "test"):
        rows(0 if name == empty else 1).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match=rf"{tmp_path}.*{empty}"):
        load_image_datasets(DataConfig(path=str(tmp_path)))


def test_offline_nothing_is_waited_for(monkeypatch):
    for name in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("mpp.data.retry.time.sleep", None)
    with pytest.raises(UserError, match=r"data.path is nobody/nothing, which cannot be loaded"):
        load_image_datasets(DataConfig(path="nobody/nothing"))


def test_shards_have_the_split_of_their_name(tmp_path):
    """One that is no word of ours, too, and not the training images."""
    sizes = {"train": 5, "test": 4, "extra": 3, "train_extra": 2}
    (tmp_path / "data").mkdir()
    for name, size in sizes.items():
        rows(size).to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    assert {name: len(part) for name, part in load_splits(DataConfig(path=str(tmp_path))).items()} == sizes


def test_a_card_says_what_the_splits_are(tmp_path):
    for name in ("alpha", "beta"):
        rows(4).to_parquet(tmp_path / f"{name}.parquet")
    files = "{split: train, path: alpha.parquet}, {split: test, path: beta.parquet}"
    configs = f"configs:\n- {{config_name: default, data_files: [{files}]}}"
    (tmp_path / "README.md").write_text(f"---\n{configs}\n---\n")
    assert {name: len(part) for name, part in load_splits(DataConfig(path=str(tmp_path))).items()} == dict(
        train=4, test=4
    )
    (tmp_path / "README.md").unlink()
    with pytest.raises(UserError, match=r"data\.name is b; it must be left out: .* has no README\.md with configs"):
        load_splits(DataConfig(path=str(tmp_path), name="b"))


@pytest.mark.parametrize("where", ["another split", "the same split"])
def test_classes_that_tables_declare_in_another_order_keep_their_names(tmp_path, where):
    """The library takes the first file's for all."""
    for number, names in enumerate((["owl", "cat"], ["cat", "owl"])):
        labels = [names.index("owl"), names.index("cat")] * 2
        part = rows(4).add_column("label", labels).cast_column("label", datasets.ClassLabel(names=names))
        split = ("train", "test")[number] if where == "another split" else "train"
        part.to_parquet(tmp_path / f"{split}-{number}.parquet")
    if where == "the same split":
        with pytest.raises(
            UserError, match=r"train-1\.parquet declares other classes in label than .*train-0\.parquet"
        ):
            load_image_datasets(DataConfig(path=str(tmp_path)))
    else:
        for part in load_image_datasets(DataConfig(path=str(tmp_path))):
            assert [part.names[number] for number in part.labels] == ["owl", "cat"] * 2


def test_a_name_of_the_hub_is_said_at_once_and_what_is_none_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    announce_hub_lookup(ImagesConfig(path="photo"))
    assert "the hub is asked for it; did you mean photos?" in capsys.readouterr().out
    for path in ("my photos", "photos/a b", "x" * 200):
        with pytest.raises(UserError, match=r"does not exist: there is no such file or folder in"):
            announce_hub_lookup(ImagesConfig(path=path))
