"""From data.path to images: layouts on disk, splits, labels, and the files that are left out."""

import collections
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from colours import load, splits_of
from conftest import dataset_of, encoded, picture, refused, refused_with, views_of
from image_files import unreadable, write_tar

from mpp.config import DataConfig, ImagesConfig, SourceConfig
from mpp.data.columns import read_cell
from mpp.data.overview import warn_of_labels
from mpp.data.remote import announce_hub_lookup
from mpp.data.sources import find_held_out_split, image_arguments, label_images, load_image_datasets, load_splits
from mpp.runtime.randomness import FIXED_VIEW


def rows(count=12, column="image", **more):
    """Images of 40 x 48 pixels, and other columns."""
    images = [encoded(picture(number)) for number in range(count)]
    return dataset_of(images, **more).rename_columns({"image": column})


def names_of(dataset):
    return [dataset.image_name(index) for index in range(len(dataset))]


def sizes_of_splits(folder):
    return {name: split.num_rows for name, split in splits_of(folder).items()}


def write_card(folder, **paths):
    """A dataset card that declares splits: split -> pattern of its files."""
    files = [f"{{split: {split}, path: '{path}'}}" for split, path in paths.items()]
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- {{config_name: default, data_files: [{', '.join(files)}]}}\n---\n"
    )


def test_birds_are_the_default():
    train, test = load_image_datasets(DataConfig())
    assert (len(train), len(test)) == (633, 286)
    assert len(test.labelled()) == 286
    assert (train.labels >= 0).sum() == len(train.labelled()) == 430
    assert train.decode(0, ImagesConfig()).shape == (3, 120, 120)
    _, held_out = load_image_datasets(DataConfig(eval_fraction=0.5, eval_split=None))
    assert len(held_out) == 316


def test_a_folder_of_images_is_cut_and_chosen_from_by_seeds(image_folder, capsys):
    (image_folder / "cat" / "up").symlink_to(image_folder)
    train, held_out = load(image_folder, eval_fraction=0.25)
    assert (len(train), len(held_out)) == (9, 3)
    assert "links to folders of the same tree (1: cat/up)" in capsys.readouterr().err
    assert not set(names_of(train)) & set(names_of(held_out))
    assert sorted([*train.labels, *held_out.labels]) == [0] * 6 + [1] * 6
    again, other = (load(image_folder, eval_fraction=0.25, cut_seed=seed)[1] for seed in (0, 1))
    assert names_of(again) == names_of(held_out) != names_of(other)

    chosen, same, others = (names_of(train.choose(4, seed)) for seed in (0, 0, 1))
    assert len(chosen) == 4 and same == chosen != others
    assert len({Path(name).parent for name in chosen}) == 2  # not the first of files that come sorted by class
    after = names_of(train.choose(9, seed=0, after=4))
    assert sorted([*chosen, *after]) == sorted(names_of(train)) and sorted(after) == after
    assert train.choose(None, seed=0) is train.choose(9, seed=0) is train
    one, other = train.select(np.arange(2)).cut(0.1, 0, "held out")
    assert len(one) == len(other) == 1
    with refused("too few to hold 1 out"):
        one.cut(0.1, 0, "held out")


def write_arrow_file(path):
    """In arrow's format of files, which is not the one of `datasets`."""
    table = rows().with_format("arrow")[:]
    with pa.ipc.new_file(path / "a.arrow", table.schema) as written:
        written.write_table(table)
    return path / "a.arrow"


@pytest.mark.parametrize(
    "write, sizes",
    [
        (write_arrow_file, (11, 1)),
        (lambda path: rows(id=[1] * 12).with_format("numpy", columns=["id"]).save_to_disk(path) or path, (11, 1)),
        (lambda path: datasets.DatasetDict(train=rows(), test=rows(4)).save_to_disk(path) or path, (12, 4)),
    ],
)
def test_other_layouts_on_disk(tmp_path, write, sizes):
    train, held_out = load(write(tmp_path))
    assert (len(train), len(held_out)) == sizes
    assert train.decode(0, ImagesConfig()).shape == (3, 40, 48)


# --- labels ---


def test_columns_of_other_names_and_text_labels(tmp_path):
    rows(column="photo", species=["owl", "cat", None, "owl"] * 3).to_parquet(tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet")[0].labels is None
    train, held_out = load(tmp_path / "a.parquet", image_column="photo", label_column="species")
    assert collections.Counter([*train.labels, *held_out.labels]) == {1: 6, 0: 3, -1: 3}


def test_labels_that_may_be_names_of_images_are_doubted(capsys):
    """More than five classes, and more than half as many as images."""
    birds, _ = load_image_datasets(DataConfig(), announce=False)
    for images, classes, is_doubted in ((12, 6, False), (12, 7, True), (5, 5, False), (6, 6, True)):
        warn_of_labels(replace(birds, labels=np.append(np.arange(images) % classes, -1)))
        assert ("are these names of images" in capsys.readouterr().err) == is_doubted


def test_several_labels_may_be_right_on_the_held_out_split(tmp_path):
    rows(label=[0, 1, 2] * 4, real=[[0], [1], [2]] * 4).to_parquet(tmp_path / "train-00000-of-00001.parquet")
    rows(label=[-1] * 12, real=[[0, 2], [], [1]] * 4).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    train, test = load(tmp_path, eval_label_column="real")
    assert train.labels.tolist() == [0, 1, 2] * 4
    assert test.labels.tolist() == [[0, 2], [-1, -1], [1, -1]] * 4
    assert test.labelled().labels.tolist() == [[0, 2], [1, -1]] * 4
    alone = {"test": load_splits(ImagesConfig(path=str(tmp_path)))["test"]}
    (predicted,) = label_images(DataConfig(path=str(tmp_path), eval_label_column="real"), alone, "image")
    assert predicted.labels.tolist() == test.labels.tolist()
    assert views_of(test)[FIXED_VIEW, 0].labels.tolist() == [0, 2]


# --- splits ---


@pytest.mark.parametrize(
    "others, held_out",
    [("test valid", "valid"), ("test dev validation", "validation"), ("Testing", "Testing"), ("valves", None)],
)
def test_a_split_is_held_out_by_any_word_for_it(others, held_out):
    """As datasets of the hub have it. A test split would be tuned on. Without one, a part of the other is cut off."""
    assert find_held_out_split(DataConfig(), ["train", *others.split()]) == held_out


def test_arguments_name_the_images_and_not_how_they_are_loaded():
    source = SourceConfig(path="my images", cut_seed=3, read_retries=2)
    assert image_arguments(source) == " --data.path 'my images' --data.cut_seed 3"


def test_datasets_that_were_saved_to_folders_of_splits_are_these_splits(tmp_path, capsys):
    """The library calls all of their shards `data`, and keeps what it made of them beside them."""
    for split, size in {"train": 5, "test": 4}.items():
        rows(size).save_to_disk(tmp_path / split)
    datasets.load_from_disk(tmp_path / "train").map(lambda row: row | {"more": 1})
    assert sizes_of_splits(tmp_path) == {"train": 5, "test": 4}
    assert "left out: cached results of datasets (1: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "names, said, path, streaming",
    [
        ("train-0-of-3 train-2-of-3 test-0-of-1", "2 of 3 shards are there of train:", "{}", False),
        ("train/x-1-of-2 train/x-2-of-2 test/x-1-of-2", "1 of 2 shards are there of x:", "file://{}", True),
        ("train-0-of-1 train-0-of-2 train-1-of-2", "1 of 1 shards are there of train:", "{}", True),
        ("a-train-0-of-1 b-train-0-of-1 train-7 test-1-of-1", None, "{}", False),
    ],
)
def test_sets_of_shards_that_are_not_whole_are_named(tmp_path, capsys, names, said, path, streaming):
    """As where a download, or mpp prepare, was broken off. A shard that is named by itself is no set."""
    names = names.split()
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows(4).to_parquet(tmp_path / f"{name}.parquet")
    path = path.format(tmp_path)
    splits_of(path, streaming)
    errors = capsys.readouterr().err
    assert (f"warning: data.path {path}: {said}" in errors) if said else ("shards" not in errors)
    splits_of(f"file://{tmp_path}/{names[0]}.parquet", streaming)
    assert "shards" not in capsys.readouterr().err


def test_a_card_says_what_the_splits_are(image_folder):
    write_card(image_folder, train="cat/*", mine="dog/*")
    assert sizes_of_splits(image_folder) == {"train": 6, "mine": 6}
    with refused(r"data\.path holds image files, no shards: leave out data\.streaming"):
        splits_of(image_folder, streaming=True)


def test_tar_shards_of_a_card_are_read_indexed_and_streamed(tmp_path, capsys):
    """As those of the hub."""
    members = [("img-1.png", encoded(picture(1))), ("img-1.cls", b"owl"), ("img-2.png", encoded(picture(2)))]
    write_tar(tmp_path / "data" / "x-0-of-2.tar", members)
    write_card(tmp_path, train="data/*.tar")
    for streaming in (False, True):
        assert [row["label"] for row in splits_of(tmp_path, streaming)["train"]] == ["owl", None]
    assert f"data.path {tmp_path}: 1 of 2 shards are there of x:" in capsys.readouterr().err


# --- tables that contradict each other ---


def owls_and_cats(names, **more):
    """Four images, owls and cats in turn, with classes that are declared in this order."""
    labels = [names.index("owl"), names.index("cat")] * 2
    return rows(4, label=labels, **more).cast_column("label", datasets.ClassLabel(names=names))


def test_tables_of_two_splits_keep_their_classes_and_those_of_one_that_differ_are_named(tmp_path):
    """The library takes the first file's for all. Of a table with fewer columns, the values are missing."""
    owls_and_cats(["owl", "cat"]).to_parquet(tmp_path / "train-0.parquet")
    rows(4).to_parquet(tmp_path / "train-1.parquet")
    owls_and_cats(["cat", "owl"]).to_parquet(tmp_path / "test-0.parquet")
    train, test = load(tmp_path)
    assert [train.class_names[number] for number in train.labelled().labels] == ["owl", "cat"] * 2
    assert [test.class_names[number] for number in test.labels] == ["owl", "cat"] * 2
    others = {"label": owls_and_cats(["cat", "owl"]), "site": owls_and_cats(["owl", "cat"], site=[1, 2, 1, 2])}
    for streaming, (column, table) in enumerate(others.items()):
        table.to_parquet(tmp_path / "train-2.parquet")
        with refused(rf"^{tmp_path}/train-2\.parquet has {column} otherwise than {tmp_path}/train-0\.parquet"):
            splits_of(tmp_path, bool(streaming))


# --- what is refused ---


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"image_column": "id"}, "data.image_column | id | a column of images"),
        ({"label_column": "kind"}, "data.label_column | kind | image, id"),
        ({"eval_label_column": "id"}, "data.eval_label_column is id; it must be left out"),
        ({"split": "dev"}, "data.split | dev | train"),
        ({"eval_split": "train"}, "data.eval_split | train"),
        ({"path": None, "eval_fraction": 0.5}, "data.eval_fraction is 0.5; it must be left out | test is held out"),
        ({"revision": "v2"}, "data.revision is v2; it must be left out | is not a dataset of the hub"),
        ({"path": "list.csv"}, "data.path | parquet | data.labels names a list of images"),
        ({"path": "pointer.parquet"}, "pointer.parquet cannot be read: a Git LFS pointer"),
        ({"path": "carded"}, "carded, which cannot be loaded | Parquet magic bytes"),
        ({"path": "carded", "labels": "a.csv"}, "data.labels is a.csv; it must be left out"),
        ({"path": "without"}, "without | test"),
    ],
)
def test_bad_sources_are_named_in_a_line(tmp_path, settings, words):
    rows(4, id=[1, 2, 3, 4]).to_parquet(tmp_path / "a.parquet")
    for size, name in enumerate(("test", "train")):
        rows(size).to_parquet(tmp_path / "without" / f"{name}.parquet")
    (tmp_path / "list.csv").write_text("file,label\n")
    (tmp_path / "carded").mkdir()
    write_card(tmp_path / "carded", train="a.parquet")
    for name in ("pointer.parquet", "carded/a.parquet"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345678\n")
    path = settings.get("path", "a.parquet")
    with refused_with(words):
        load_image_datasets(DataConfig(**settings | {"path": path and str(tmp_path / path)}))


# --- the hub ---


def test_the_hub_is_announced_at_once_and_its_error_names_the_folder_that_was_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    announce_hub_lookup(ImagesConfig(path="photo"))
    assert "looking for it on the hub" in capsys.readouterr().out
    with refused(rf"cannot be loaded: .* \(and {tmp_path} has no such folder or file\)"):
        splits_of("my photos")


def test_offline_nothing_is_waited_for(monkeypatch):
    for name in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("mpp.data.retry.time.sleep", None)
    with refused(r"data.path owner/nothing \(not a file or folder in .*\) cannot be read"):
        load("owner/nothing")


# --- cells of a column of images ---


def test_a_cell_may_hold_a_url(image_folder):
    file = image_folder / "cat" / "01.png"
    assert read_cell({"bytes": b"file", "path": "anything"}, 0) == b"file"
    for path in (str(file), f"file://{file}"):
        assert read_cell({"bytes": None, "path": path}, 0) == file.read_bytes()


@pytest.mark.parametrize(
    "cell, words",
    [
        ({"bytes": None, "path": ""}, "no bytes"),
        ({"bytes": None, "path": "cat/01.png"}, r"cat/01\.png is a relative path; give a table .* as data\.labels"),
    ],
)
def test_a_cell_without_an_image_is_unreadable(image_folder, monkeypatch, cell, words):
    """A relative path in a table starts nowhere, though it may be there."""
    monkeypatch.chdir(image_folder)
    with unreadable(words):
        read_cell(cell, 0)
