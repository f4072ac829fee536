"""Layouts of images: folders, lists and tar shards, and what a dataset makes of each: its splits, and every label.

The colour of an image says what it shows, so that an image with another one's label is seen.
"""

import csv
import io
import json
import os
import random
import tarfile
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from colours import colour, in_train, load, save, seen
from file_names import ACUTE, CLASS_NAMES, DECOMPOSED, FILE_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import write_tar
from torchvision.datasets import ImageFolder

from evaluation.config.frozen import MaskedDataConfig, ProbeDataConfig
from mpp.config import DataConfig, ImagesConfig
from mpp.data.folder import SPLIT_WORDS, split_of_shard, walk
from mpp.data.lists import list_images, read_list
from mpp.data.sources import load_splits
from mpp.errors import UserError

FEW = settings(max_examples=12, deadline=None, derandomize=True)
QUICK = settings(max_examples=30, deadline=None, derandomize=True)
TEXTS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=6)
LABELS = (
    st.sampled_from(["NA", "None", "null", "nan", "", " ", "-1", "01", "1", "a;b", "a,b", '"', "a\nb", "é"]) | TEXTS
)
"""Cells of a table."""


def write(root: Path, files: dict[str, int | str | bytes]) -> Path:
    """Files by their names: images of a colour by its number, and texts."""
    for name, content in files.items():
        if isinstance(content, int):
            save(root / name, content)
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def labels(root: Path | str, **config) -> dict[str, dict[str, tuple[int, str | None]]]:
    """Split -> name -> colour and label."""
    return {
        split: {name: (*image,) for name, image in images.items()} for split, images in seen(root, **config).items()
    }


def tar_bytes(members: list[tuple[str, bytes]]) -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return file.getvalue()


def samples(numbers, end: str = "png", form: str = "PNG", key: str = "{:06d}") -> list[tuple[str, bytes]]:
    """Images of three colours with their classes as `cls`."""
    members = []
    for number in numbers:
        members.append((f"{key.format(number)}.{end}", colour(number % 3, form)))
        members.append((f"{key.format(number)}.cls", str(number % 3).encode()))
    return members


TWO = {"a.png": 0, "b.png": 1}
CAT_AND_DOG = {"cat/1.png": 0, "dog/1.png": 1}
LIST = "file_name,label\n"

RIGHT = {
    # name: (files, settings, {split: {image: label}}); images that are not there have no label
    "flat": (TWO, {}, {"train": {}}),
    "classes": (
        {**CAT_AND_DOG, "dog/2.PNG": 1},
        {},
        {"train": {"cat/1.png": "cat", "dog/1.png": "dog", "dog/2.PNG": "dog"}},
    ),
    "codes": ({"NA/1.png": 0, "None/1.png": 1}, {}, {"train": {"NA/1.png": "NA", "None/1.png": "None"}}),
    "stray": ({**CAT_AND_DOG, "view.png": 2}, {}, {"train": {"cat/1.png": "cat", "dog/1.png": "dog"}}),
    "splits": (
        {"Train/cat/1.png": 0, "Train/dog/1.png": 1, "val/dog/2.png": 1, "val/owl/1.png": 2},
        {},
        {
            "train": {"Train/cat/1.png": "cat", "Train/dog/1.png": "dog"},
            "validation": {"val/dog/2.png": "dog", "val/owl/1.png": "owl"},
        },
    ),
    "flat val": (
        {"train/cat/1.png": 0, "train/dog/1.png": 1, "val/images/1.png": 2},
        {},
        {"train": {"train/cat/1.png": "cat", "train/dog/1.png": "dog"}, "validation": {}},
    ),
    "inner folder": (
        {"train/cat/images/1.png": 0, "train/dog/images/1.png": 1, "val/cat/2.png": 0},
        {},
        {
            "train": {"train/cat/images/1.png": "cat", "train/dog/images/1.png": "dog"},
            "validation": {"val/cat/2.png": "cat"},
        },
    ),
    "around": (
        {"data/pets/cat/1.png": 0, "data/pets/dog/1.png": 1},
        {},
        {"train": {"data/pets/cat/1.png": "cat", "data/pets/dog/1.png": "dog"}},
    ),
    "deeper": (
        {**CAT_AND_DOG, "dog/more/2.png": 1},
        {},
        {"train": {"cat/1.png": "cat", "dog/1.png": "dog", "dog/more/2.png": "dog"}},
    ),
    "inner": (
        {"x/cat/1.png": 0, "y/cat/1.png": 0, "y/dog/1.png": 1},
        {"label_folder": "inner"},
        {"train": {"x/cat/1.png": "cat", "y/cat/1.png": "cat", "y/dog/1.png": "dog"}},
    ),
    "outer, the same names inside": (
        {"train/0/1/a.png": 0, "train/1/0/b.png": 1, "test/0/1/c.png": 0, "test/1/0/d.png": 1},
        {"label_folder": "outer"},
        {
            "train": {"train/0/1/a.png": "0", "train/1/0/b.png": "1"},
            "test": {"test/0/1/c.png": "0", "test/1/0/d.png": "1"},
        },
    ),
    "an image above the only folder": (
        {"c/cover.png": 2, "c/data/train/cat/1.png": 0, "c/data/train/dog/1.png": 1, "c/data/val/cat/2.png": 0},
        {},
        {
            "train": {"c/data/train/cat/1.png": "cat", "c/data/train/dog/1.png": "dog"},
            "validation": {"c/data/val/cat/2.png": "cat"},
        },
    ),
    "outer": (
        {"x/cat/1.png": 0, "y/cat/1.png": 0, "y/dog/1.png": 1},
        {"label_folder": "outer"},
        {"train": {"x/cat/1.png": "x", "y/cat/1.png": "y", "y/dog/1.png": "y"}},
    ),
    "list": (
        {**TWO, "c.png": 2, "metadata.csv": f"{LIST}a.png,NA\nb.png, x \nc.png,\n"},
        {},
        {"train": {"a.png": "NA", "b.png": "x"}},
    ),
    "list of splits": (
        {**TWO, "c.png": 2, "labels.csv": "File;Label;Split\na.png;x;train\nb.png;y; Val\nc.png;z;\n"},
        {},
        {"train": {"a.png": "x", "c.png": "z"}, "validation": {"b.png": "y"}},
    ),
    "list of one split": (
        {
            **{f"train/{name}": kind for name, kind in CAT_AND_DOG.items()},
            "test/1.png": 1,
            "test/metadata.csv": f"{LIST}1.png,dog\n",
        },
        {},
        {"train": {"train/cat/1.png": "cat", "train/dog/1.png": "dog"}, "test": {"test/1.png": "dog"}},
    ),
    "lists of splits": (
        {
            "train/1.png": 0,
            "train/metadata.csv": f"{LIST}1.png,x\n",
            "val/1.png": 1,
            "val/metadata.csv": f"{LIST}1.png,y\n",
        },
        {},
        {"train": {"train/1.png": "x"}, "validation": {"val/1.png": "y"}},
    ),
    "list without labels": (
        {**CAT_AND_DOG, "metadata.csv": "file_name,age\ncat/1.png,3\ndog/1.png,4\n"},
        {},
        {"train": {"cat/1.png": "cat", "dog/1.png": "dog"}},
    ),
    "list of a column": (
        {**TWO, "metadata.jsonl": '{"photo": "a.png", "kind": 1}\n{"photo": "b.png", "kind": 2.0}\n'},
        {"file_column": "photo", "label_column": "kind"},
        {"train": {"a.png": "1", "b.png": "2"}},
    ),
    "backslashes": (
        {"x/a.png": 0, "x/b.png": 1, "labels.csv": f"{LIST}x\\a.png,p\nx\\b.png,q\n"},
        {},
        {"train": {"x/a.png": "p", "x/b.png": "q"}},
    ),
    "without endings": (
        {**TWO, "labels.tsv": "id.1\timage\tlabel\n1\ta\tp\n2\tb\tq\n"},
        {},
        {"train": {"a.png": "p", "b.png": "q"}},
    ),
    "bare names": (
        {"x/a.png": 0, "y/b.png": 1, "labels.csv": f"{LIST}a,p\nb.png,q\n"},
        {},
        {"train": {"x/a.png": "p", "y/b.png": "q"}},
    ),
    "decomposed": (
        {f"{DECOMPOSED}.png": 0, "b.png": 1, "labels.csv": f"{LIST}{ACUTE}.png,p\nb.png,q\n"},
        {},
        {"train": {f"{DECOMPOSED}.png": "p", "b.png": "q"}},
    ),
    "repeated": (
        {**TWO, "labels.csv": f"{LIST}a.png,p\nb.png,q\na.png,p\n"},
        {},
        {"train": {"a.png": "p", "b.png": "q"}},
    ),
    "utf-16": (
        {**TWO, "labels.csv": f"{LIST}a.png,é\nb.png,q\n".encode("utf-16")},
        {"labels_encoding": "utf-16"},
        {"train": {"a.png": "é", "b.png": "q"}},
    ),
    "marked": (
        {**TWO, "labels.csv": f"\ufeff{LIST}a.png,é\n\nb.png,q\n"},
        {"labels_encoding": "UTF8"},
        {"train": {"a.png": "é", "b.png": "q"}},
    ),
    "skipped": (
        {**TWO, "labels.csv": f"{LIST}a.png,p\nb.png,q\ngone.png,q\n"},
        {"missing": "skip"},
        {"train": {"a.png": "p", "b.png": "q"}},
    ),
    "masks": (
        {
            **TWO,
            "m/a.png": 2,
            "m/b.png": 2,
            "metadata.csv": "file_name,label,mask_file_name\na.png,p,m/a.png\nb.png,q,m/b.png\n",
        },
        {},
        {"train": {"a.png": "p", "b.png": "q"}},
    ),
}

REFUSED = {
    # name: (files, settings, what the line says)
    "two levels": (
        {"x/cat/1.png": 0, "y/dog/1.png": 1},
        {},
        r"label_folder is null.*outer.*x, y.*inner.*cat, dog",
    ),
    "nothing": ({"a.txt": "x"}, {}, r"holds no images; left out: \.txt files \(1: a\.txt\)"),
    "zip": ({"images.zip": "PK"}, {}, r"holds no images; left out: archives: unpack them \(1: images\.zip\)"),
    "images and tars": ({"a.png": 0, "b.tar": "x"}, {}, "move some away"),
    "two kinds of shards": ({"a.parquet": "x", "b.tar": "x"}, {}, r"it has \.parquet and \.tar"),
    "missing": ({**TWO, "labels.csv": f"{LIST}a.png,p\ngone.png,q\n"}, {}, "names 1 .*: gone.png; .*data.missing skip"),
    "a name of two": ({"x/a.png": 0, "y/a.png": 1, "labels.csv": f"{LIST}a.png,p\n"}, {}, "the name of several: a.png"),
    "an image of another folder": (
        {"train/a.png": 0, "train/labels.csv": f"{LIST}a.png,p\n1.png,p\n", "test/q/1.png": 1},
        {},
        "train/labels.csv names 1 .*: 1.png",
    ),
    "two labels": (
        {**TWO, "labels.csv": f"{LIST}a.png,p\nb.png,q\na.png,q\n"},
        {},
        "two rows of .*a.png with other labels",
    ),
    "two splits": (
        {**TWO, "labels.csv": "file,split\na.png,train\nb.png,test\na.png,test\n"},
        {},
        "two rows of .*a.png with other labels",
    ),
    "two lists": (
        {**TWO, "labels.csv": f"{LIST}a.png,p\n", "metadata.csv": f"{LIST}a.png,p\n"},
        {},
        "data.labels must name",
    ),
    "a list in a list": (
        {"x/a.png": 0, "labels.csv": f"{LIST}x/a.png,p\n", "x/labels.csv": f"{LIST}a.png,p\n"},
        {},
        "data.labels must name",
    ),
    "no names": ({**TWO, "a.csv": "a,b\n1,2\n"}, {"labels": "a.csv"}, "file_column is None; .* file names in a.csv"),
    "no such names": ({**TWO, "labels.csv": "a,b\n1,2\n"}, {"file_column": "c"}, "data.file_column is c"),
    "a cell too many": (
        {**TWO, "labels.csv": f"{LIST}a.png,p\nb.png,q,r\n"},
        {},
        "labels.csv cannot be read: .*line 3",
    ),
    "cells too many": ({**TWO, "labels.csv": f"{LIST}a.png,p,r\nb.png,q,r\n"}, {}, "labels.csv cannot be read"),
    "an open quote": ({**TWO, "labels.csv": f'{LIST}a.png,"p\nb.png,q\n'}, {}, "labels.csv cannot be read"),
    "half an object": ({**TWO, "metadata.jsonl": '{"file_name": "a.png"\n'}, {}, "metadata.jsonl cannot be read"),
    "latin-1": (
        {**TWO, "labels.csv": f"{LIST}a.png,é\n".encode("latin-1")},
        {},
        "labels.csv cannot be read: .*data.labels_encoding is utf-8",
    ),
    "another ending": (
        {"p/a.JPG": 0, "p/b.jpeg": 1, "labels.csv": f"{LIST}a.jpg,p\nb.jpg,q\n"},
        {},
        r"names 2 that .*: a\.jpg, b\.jpg \(did you mean .*/p/a\.JPG\?\)",
    ),
    "no list": ({**TWO, "list.csv": LIST}, {"labels": "lists.csv"}, r"lists\.csv cannot be read"),
    "no encoding": ({**TWO, "labels.csv": LIST}, {"labels_encoding": "utf-99"}, "data.labels_encoding is utf-99"),
    "no column": (
        {**TWO, "labels.csv": f"{LIST}a.png,p\nb.png,q\n"},
        {"label_column": "kind"},
        "data.label_column is kind",
    ),
    "names with dots": (
        {"a.tar": tar_bytes(samples(range(3), key="img.v1.{}"))},
        {},
        "sample img has several pictures .*first dot",
    ),
    "a joined tar": (
        {"a.tar": tar_bytes(samples(range(3))) + tar_bytes(samples(range(3)))},
        {},
        "a.tar cannot be read: more follows",
    ),
    "one name twice": (
        {"a.tar": tar_bytes(samples(range(3)) + samples(range(1)))},
        {},
        "a.tar cannot be read: 000000.png: .* next to each other .*different endings",
    ),
    "two of one ending": (
        {"a.tar": tar_bytes([*samples(range(2)), ("000001.PNG", colour(1))])},
        {},
        "a.tar cannot be read: 000001.PNG: .* different endings",
    ),
    "broken JSON": (
        {"a.tar": tar_bytes([("0.png", colour(0)), ("0.json", b"{")])},
        {"label_column": "kind"},
        "0.json cannot be read",
    ),
    "no picture": ({"a.tar": tar_bytes([("0.cls", b"0")])}, {}, "no images .*; its shards hold cls"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_images_have_the_splits_and_labels_of_their_layout(tmp_path, monkeypatch, name):
    files, config, expected = RIGHT[name]
    expected = dict(expected)
    found = labels(write(tmp_path, files), **config)
    assert {
        split: {image: label for image, (_, label) in images.items() if label} for split, images in found.items()
    } == expected
    named = {f for f in files if f.lower().endswith(".png") and not f.startswith("m/") and "cover" not in f}
    assert {image for images in found.values() for image in images} == named
    for images in found.values():
        for image, (kind, _) in images.items():
            assert kind == files[image], image


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_say_no_one_thing_are_refused(tmp_path, monkeypatch, name):
    files, config, words = REFUSED[name]
    monkeypatch.chdir(write(tmp_path, files))
    with pytest.raises(UserError, match=words) as error:
        load(tmp_path, **config)
    assert "\n" not in str(error.value)


# folders --------------------------------------------------------------------------------------------------------------


@FEW
@given(st.dictionaries(CLASS_NAMES, st.lists(FILE_NAMES, min_size=1, max_size=3, unique=True), min_size=2, max_size=4))
def test_plain_folders_are_those_of_torchvision(tree):
    """The same classes, the same images in the same order, of the same classes; whatever the names."""
    with tempfile.TemporaryDirectory() as root:
        for kind, (name, files) in enumerate(sorted(tree.items())):
            for file in files:
                save(f"{root}/{name}/{file}.png", kind)
        expected = ImageFolder(root)
        listing = list_images(walk(root), ImagesConfig(path=root))
        assert [*listing.splits] == [path for path, _ in expected.samples]
        assert listing.columns["label"] == {path: expected.classes[number] for path, number in expected.samples}
        images = in_train(root)
        assert len(images) == len(expected)
        assert all(sorted(tree)[kind] == label for kind, label in images.values())


@pytest.mark.parametrize("word", SPLIT_WORDS)
def test_splits_are_folders_of_their_names(tmp_path, word):
    write(tmp_path, {f"{word}/1.png": 0, f"{word}/2.png": 1})
    assert [*load_splits(ImagesConfig(path=str(tmp_path)))] == [SPLIT_WORDS[word]]


@pytest.mark.parametrize(
    ("name", "form", "count"),
    [
        ("scan", "PNG", 1),
        ("scan.2", "JPEG", 1),
        ("photo.JPeG", "JPEG", 1),
        (".hidden.png", "PNG", 0),
        ("note", None, 0),
    ],
)
def test_pictures_are_known_by_their_endings_or_first_bytes(tmp_path, name, form, count):
    write(tmp_path, {"a.png": 0, "b.png": 0, name: colour(1, form) if form else b"text"})
    assert len(in_train(tmp_path)) == 2 + count


def test_what_is_left_out_is_named(tmp_path, capsys):
    write(
        tmp_path, {"train/a/1.png": 0, "train/b/1.png": 1, "more/1.png": 2, "x.npy": b"", "y.csv": "", "old.zip": b"PK"}
    )
    (tmp_path / "train" / "gone.png").symlink_to("nowhere")
    (tmp_path / "train" / os.fsdecode(b"\xe9.png")).write_bytes(colour(0))
    assert len(in_train(tmp_path)) == 2
    printed = capsys.readouterr().err
    for name in ("more/1.png", "x.npy", "y.csv", "old.zip", "train/gone.png", "udce9"):
        assert name in printed
    assert "train/a/1.png" not in printed


@pytest.mark.parametrize(
    "links, expected, left_out",  # link -> where it leads; split -> its images; names that do not count
    [
        ({"train/b/2.png": "../b/1.png", "test/a/3.png": "../../train/a/0.png"}, ["b/1.png", "a/3.png"], 2),
        ({"train/c": "a"}, ["a/0.png b/1.png", ""], 1),
        ({"train/a/2.png": "../../../store/a/x.png"}, ["a/0.png a/2.png b/1.png", ""], 0),
        ({"train/b/2.png": "../../../store/a/x.png", "test/b/2.png": "../../../store/a/x.png"}, None, 1),
        ({"train/a/2.png": "../../.store/x", "train/b/3.png": "../../.store/x"}, ["a/0.png a/2.png b/1.png", ""], 1),
        ({"train/a/more": "../../../store/a", "train/a/2.png": "more/x.png"}, ["a/0.png a/2.png b/1.png", ""], 1),
        ({"train/b/2.png": "../a/0.png"}, r"b/2.png \(b\) is a link to .*/a/0.png \(a\), of another label", 0),
    ],
    ids=["in the tree", "a folder of the tree", "elsewhere", "splits", "a hidden store", "a folder", "classes"],
)
def test_a_file_counts_once(tmp_path, links, expected, left_out, capsys):
    """Of its names by links the first counts, and one that is held out before others; as a hub's cache has them."""
    write(tmp_path / "data", {"train/a/0.png": 0, "train/b/1.png": 1, ".store/x": colour(0)})
    write(tmp_path / "store", {"a/x.png": 0})
    for link, place in links.items():
        (tmp_path / "data" / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / link).symlink_to(place)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            labels(tmp_path / "data")
        return
    found = labels(tmp_path / "data")
    train, test = expected or ["a/0.png b/1.png", "b/2.png"]
    images = {split: {name.removeprefix(f"{split}/") for name in found.get(split, ())} for split in ("train", "test")}
    assert images == {"train": {*train.split()}, "test": {*test.split()}}
    printed = capsys.readouterr().err
    assert printed.count("left out: ") == (left_out > 0) and (not left_out or f"({left_out}: " in printed)


def test_the_order_of_a_file_system_does_not_matter(tmp_path, monkeypatch):
    for number in range(40):
        save(tmp_path / "data" / f"{number % 3}" / f"{number}.png", number % 3)
    (tmp_path / "data" / "x").symlink_to(tmp_path / "data" / "1")
    expected = walk(str(tmp_path / "data"))
    scandir = os.scandir

    class Shuffled:
        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = [*entries]
            random.Random(len(str(path))).shuffle(self.entries)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr("mpp.data.folder.os.scandir", Shuffled)
    assert walk(str(tmp_path / "data")) == expected


# lists ----------------------------------------------------------------------------------------------------------------


def write_table(file: Path, rows: list[dict]) -> None:
    """A list as Python's own modules write it."""
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    else:
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, [*rows[0]], delimiter="\t" if file.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)


@pytest.mark.parametrize("name", ["metadata.csv", "labels.tsv", "labels.jsonl", "Metadata.parquet"])
@QUICK
@given(st.lists(LABELS, min_size=1, max_size=5))
def test_text_is_text_and_only_a_blank_is_no_label(name, texts):
    rows = [{"file_name": f"{number}.png", "label": text} for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / name, rows)
        table = read_list(os.path.join(folder, name), ImagesConfig())
    assert table["image"] == [row["file_name"] for row in rows]
    assert table["label"] == [text.strip() or None for text in texts]


@FEW
@given(st.lists(FILE_NAMES, min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_names_of_files_are_found_as_they_are(files, rng):
    """Whatever other names are near; rows in any order."""
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for number, file in enumerate(files):
            save(f"{folder}/{file}.png", number)
            rows.append({"file_name": f"{file}.png", "label": f"class {number}"})
        rng.shuffle(rows)
        write_table(Path(folder) / "metadata.jsonl", rows)
        images = in_train(folder)
    assert len(images) == len(files)
    assert all(image.label == f"class {image.kind}" for image in images.values())


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_list_anywhere(tmp_path, place, absolute):
    """Names start from data.path, or from the list; through a link to the images, too."""
    write(tmp_path / "images", TWO)
    (tmp_path / "data").symlink_to("images")
    start = f"{tmp_path}/images/" if absolute else "data/" if place == "outside" else ""
    file = tmp_path / ("images" if place == "inside" else ".") / "any name.csv"
    file.write_text(f"{LIST}{start}a.png,p\n{start}b.png,q\n")
    images = in_train(tmp_path / "data", labels=str(file))
    assert {name: image.label for name, image in images.items()} == {"a.png": "p", "b.png": "q"}


def test_lists_of_labels_are_several_right_answers(tmp_path):
    write(
        tmp_path,
        {
            **TWO,
            "metadata.jsonl": '{"file_name": "a.png", "label": ["p", "q"]}\n{"file_name": "b.png", "label": "q"}\n',
        },
    )
    rows = load_splits(ImagesConfig(path=str(tmp_path)))["train"]
    assert rows["label"][:] == [["p", "q"], ["q"]]


# tar shards -----------------------------------------------------------------------------------------------------------


def indexed(path: Path | str, **config) -> dict[str, tuple[int, str | None]]:
    """The images of shards: name in its shard -> what it shows, and its label."""
    return {name.partition(".tar: ")[2]: (*image,) for name, image in in_train(path, **config).items()}


def streamed(path: Path | str, **config) -> dict[str, tuple[int, str | None]]:
    """The same of a stream."""
    config = DataConfig(path=str(path), streaming=True, **config)
    images = {}
    for stream in load_splits(config, streaming=True).values():
        for row in stream:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "0.png").write_bytes(row["image"]["bytes"])
                Path(folder, "1.png").write_bytes(colour(0))
                images[row["image"]["path"]] = (in_train(folder)["0.png"].kind, row[config.label_column or "label"])
    return images


BOTH = pytest.mark.parametrize("look", [indexed, streamed])
KEYS = FILE_NAMES.filter(lambda name: "." not in name and "\\" not in name and len(os.fsencode(name)) < 90)


@FEW
@given(st.lists(KEYS, min_size=2, max_size=5, unique=True), st.sampled_from(["jpg", "png", "webp", "JPEG"]))
def test_well_formed_shards_are_those_of_webdataset(keys, end):
    with tempfile.TemporaryDirectory() as folder:
        form = {"png": "PNG", "webp": "WEBP"}.get(end, "JPEG")
        members = [
            m
            for number, key in enumerate(keys)
            for m in samples([number], end, form, key.replace("{", "{{").replace("}", "}}"))
        ]
        write_tar(Path(folder) / "train.tar", members)
        expected = {
            s["__key__"]: s["cls"].decode() for s in webdataset.WebDataset(f"{folder}/train.tar", shardshuffle=False)
        }
        for look in (indexed, streamed):
            found = {name.removesuffix(f".{end}"): label for name, (_, label) in look(folder).items()}
            assert found == expected


SHARDS = {
    # name: (members, settings, {image: (colour, label)})
    "two endings": (
        [*samples([0], "jpg", "JPEG"), *samples([1])],
        {},
        {"000000.jpg": (0, "0"), "000001.png": (1, "1")},
    ),
    "seg": (
        [("0.png", colour(0)), ("0.seg.png", colour(1)), ("0.cls", b" x\n"), *samples([1])],
        {},
        {"0.png": (0, "x"), "000001.png": (1, "1")},
    ),
    "chosen": (
        [("0.a.png", colour(0)), ("0.b.png", colour(1)), ("0.cls", b"x"), ("1.b.png", colour(2))],
        {"image_column": "b.png"},
        None,
    ),
    "json": (
        [("0.png", colour(0)), ("0.json", b'{"k": "NA"}'), ("1.png", colour(1)), ("1.json", b'{"k": 2.0}')],
        {"label_column": "k"},
        {"0.png": (0, "NA"), "1.png": (1, "2")},
    ),
    "member": (
        [("0.png", colour(0)), ("0.kind", b"x"), ("1.png", colour(1)), ("1.kind", b" ")],
        {"label_column": "kind"},
        {"0.png": (0, "x"), "1.png": (1, None)},
    ),
    "hidden": ([("._000000.png", b"x"), *samples(range(2))], {}, {f"{i:06d}.png": (i, str(i)) for i in range(2)}),
}


@BOTH
@pytest.mark.parametrize("name", SHARDS)
def test_the_image_and_the_label_of_a_sample(tmp_path, look, name):
    members, config, expected = SHARDS[name]
    write(tmp_path, {"train.tar": tar_bytes(members)})
    if expected is None:
        rows = load_splits(DataConfig(path=str(tmp_path), **config))["train"]
        assert rows.column_names == ["b.png", "label"] and rows["label"][:] == ["x", None]
    else:
        assert look(tmp_path, **config) == expected


def test_folders_in_a_shard_are_classes(tmp_path):
    """If it has no labels."""
    write(
        tmp_path,
        {
            "images.tar": tar_bytes(
                [(f"{name}/{i}.png", colour(kind)) for kind, name in enumerate("ab") for i in range(2)]
            )
        },
    )
    assert indexed(tmp_path) == {f"{name}/{i}.png": (kind, name) for kind, name in enumerate("ab") for i in range(2)}


@pytest.mark.parametrize("shards", [1, 2])
def test_folders_in_shards_whose_names_say_no_split_are_splits(tmp_path, shards):
    names = [f"{split}/{i}.png" for split in ("train", "val") for i in range(4)]
    for shard in range(shards):
        write(tmp_path, {f"{shard}.tar": tar_bytes([(name, colour(0)) for name in names[shard::shards]])})
    splits = load_splits(DataConfig(path=str(tmp_path)))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 4, "validation": 4}


def test_two_masks_of_an_image_are_refused(tmp_path):
    rows = "file_name,mask_file_name\na.png,m/a.png\na.png,m/b.png\nb.png,m/b.png\n"
    write(tmp_path, {**TWO, "m/a.png": 2, "m/b.png": 2, "metadata.csv": rows})
    with pytest.raises(UserError, match=r"two rows of .*a\.png with other"):
        load_splits(MaskedDataConfig(path=str(tmp_path)))


def test_held_out_labels_of_another_name_leave_the_folders_of_training(tmp_path):
    train = [(f"{name}/{i}.png", colour(0)) for name in ("cat", "dog") for i in range(2)]
    val = [("cat/0.png", colour(0)), ("cat/0.json", b'{"real": "dog"}')]
    write(tmp_path, {"train.tar": tar_bytes(train), "val.tar": tar_bytes(val)})
    rows = load_splits(ProbeDataConfig(path=str(tmp_path), eval_label_column="real"))["train"]
    assert sorted(rows["label"]) == ["cat", "cat", "dog", "dog"]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train-0.tar", "val-0.tar"), ["train", "validation"]),
        (("train/0.tar", "test/0.tar"), ["train", "test"]),
        (("a-00000-of-00002.tar", "a-00001-of-00002.tar"), ["a"]),
        (("my-train-00000-of-00001.tar", "b-test-00000-of-00001.tar"), ["train", "test"]),
        (("0.tar", "1.tar"), ["train"]),
    ],
)
def test_words_in_names_of_shards_are_splits(tmp_path, names, splits):
    write(tmp_path / "near", dict.fromkeys(names, tar_bytes(samples(range(2)))))
    for name in names:
        fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/{name}", tar_bytes(samples(range(2))))
    for path in (tmp_path / "near", f"memory://{tmp_path.name}"):
        loaded = load_splits(ImagesConfig(path=str(path)), streaming=True)
        assert [*loaded] == splits
        assert sum(1 for rows in loaded.values() for _ in rows) == 4
    assert split_of_shard("latest-0.tar") == "train"


def test_far_shards_are_those_of_this_machine(tmp_path):
    """Their members stand next to each other; else one line says that they must."""
    members = samples(range(6), "jpg", "JPEG")
    url = f"memory://{tmp_path.name}/train.tar"
    for order in (members, members[::2] + members[1::2]):
        write(tmp_path, {"train.tar": tar_bytes(order)})
        fsspec.filesystem("memory").pipe(url, tar_bytes(order))
        if order is members:
            assert [*streamed(url).items()] == [*streamed(tmp_path).items()]
    for look, place in ((streamed, url), (streamed, tmp_path), (indexed, tmp_path)):
        with pytest.raises(UserError, match=r"train\.tar cannot be read: .* must be next to each other"):
            look(place)


@BOTH
@pytest.mark.parametrize("left", [200, 550, 600, 1100, 1600, 5000])
def test_a_shard_that_ends_too_early_is_named(tmp_path, look, left):
    write(tmp_path, {"train.tar": tar_bytes(samples(range(10)))[:left]})
    with pytest.raises(UserError, match=r"train\.tar cannot be read"):
        look(tmp_path)


@BOTH
def test_a_broken_header_is_not_the_end(tmp_path, look):
    data = bytearray(tar_bytes(samples(range(10))))
    data[2048 + 148] ^= 1  # its checksum
    write(tmp_path, {"train.tar": bytes(data)})
    with pytest.raises(UserError, match=r"train\.tar cannot be read"):
        look(tmp_path)


def test_links_in_shards_and_compressed_ones_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        link = tarfile.TarInfo("1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "0.png"
        tar.addfile(link)
        sparse = tarfile.TarInfo("2.png")
        sparse.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(UserError, match=r"a\.tar cannot be read: 1\.png is a link"):
        load(tmp_path)
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(sparse)
    with pytest.raises(UserError, match=r"a\.tar cannot be read: 2\.png is .*sparse"):
        load(tmp_path)
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(UserError, match=r"a\.tar cannot be read: .*decompress"):
        load(tmp_path)


def test_streams_are_of_shards(tmp_path):
    write(tmp_path, TWO)
    with pytest.raises(UserError, match=r"no shards: .*mpp prepare"):
        load_splits(DataConfig(path=str(tmp_path), streaming=True), streaming=True)


def test_images_are_read_where_they_stand(tmp_path):
    """In their shard: nothing is copied."""
    write(tmp_path, {"train.tar": tar_bytes(samples(range(3)))})
    rows = load_splits(ImagesConfig(path=str(tmp_path)))["train"]
    assert all(cell["bytes"] is None for cell in rows["image"])
    assert np.unique([cell["path"].split("::")[0] for cell in rows["image"]]).tolist() == [
        f"tar://{tmp_path}/train.tar"
    ]
