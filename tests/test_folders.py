"""Folders of images: what their names say of splits and classes, whatever these names are."""

import itertools
import os
import random
import shutil
import tempfile
import zipfile
from collections import Counter
from functools import partial

import pytest
from colours import CATS_AND_DOGS, Seen, colour, in_train, load, save, save_classes, seen
from file_names import ACUTE, AWKWARD_NAMES, CLASS_NAMES, DECOMPOSED, FILE_NAMES, NO_UTF8_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from mpp.data.listing.images import list_images
from mpp.data.listing.tree import walk_folder
from torchvision.datasets import ImageFolder

from mpp import prepare
from mpp.config import ImagesConfig
from mpp.data.folder import SPLIT_WORDS
from mpp.data.identity import identify_images
from mpp.errors import UserError
from mpp.runtime.messages import printable

FEW = settings(max_examples=12, deadline=None, derandomize=True)


def labels_of(images: dict[str, Seen]) -> Counter:
    """How many images show what, and have which class."""
    return Counter(images.values())


# classes --------------------------------------------------------------------------------------------------------------


@FEW
@given(st.dictionaries(CLASS_NAMES, st.lists(FILE_NAMES, min_size=1, max_size=3, unique=True), min_size=2, max_size=4))
def test_plain_folders_are_those_of_torchvision(tree):
    """The same classes, the same images in the same order, of the same classes; whatever the names."""
    with tempfile.TemporaryDirectory() as root:
        for kind, (name, files) in enumerate(sorted(tree.items())):
            for file in files:
                save(f"{root}/{name}/{file}.png", kind)
        expected = ImageFolder(root)
        columns = list_images(walk_folder(root), ImagesConfig(path=root)).columns
        assert columns["image"] == [path for path, _ in expected.samples]
        assert columns["label"].to_pylist() == [expected.classes[number] for _, number in expected.samples]
        images = in_train(root)
        assert len(images) == len(expected)
        assert all(sorted(tree)[kind] == label for kind, label in images.values())


@pytest.mark.parametrize(
    "names", [["KE", "NA", "TZ"], ["None", "nan", "null"], ["-", "n.a.", "true"], ["1", "9", "10"]]
)
def test_names_of_classes_are_text(tmp_path, names):
    """Not one of them is a missing value; numbers are in the order of numbers."""
    save_classes(tmp_path, names)
    train, _ = load(tmp_path)
    assert train.class_names == names
    assert labels_of(in_train(tmp_path)) == {(kind, name): 2 for kind, name in enumerate(names)}


@pytest.mark.parametrize("inside", ["images", "a/b", ""])
def test_a_level_that_is_the_same_for_all_is_no_class(tmp_path, inside):
    """As Tiny-ImageNet has `train/NAME/images`, and `val/images` without labels."""
    for kind, above in enumerate(("train/p", "train/q", "train/r", "val")):
        for number in range(3):
            save(tmp_path / "data" / above / inside / f"{number}.png", kind)
    images = seen(tmp_path)
    assert labels_of(images["train"]) == {(0, "p"): 3, (1, "q"): 3, (2, "r"): 3}
    assert labels_of(images["validation"]) == {(3, None): 3}


def test_a_flat_split_takes_nobodys_labels_away(tmp_path, capsys):
    """As ImageNet is unpacked; the test split has classes, one of which training lacks."""
    save_classes(tmp_path / "train", ["n01", "n02"], 3)
    for number in range(4):
        save(tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", 5, "JPEG")
    save_classes(tmp_path / "test", ["n01", "n02", "n03"], 1)
    images = seen(tmp_path) | seen(tmp_path, eval_split="test")
    assert labels_of(images["train"]) == {(0, "n01"): 3, (1, "n02"): 3}
    assert labels_of(images["validation"]) == {(5, None): 4}
    assert labels_of(images["test"]) == {(kind, f"n0{kind + 1}"): 1 for kind in range(3)}
    said = capsys.readouterr().out
    assert "6 train (labelled), 4 validation (no labels), 3 test (not used); 2 classes: n01, n02" in said


@pytest.mark.parametrize("split", ["train", ""])
def test_images_beside_class_folders_are_unlabelled(tmp_path, capsys, split):
    save_classes(tmp_path / split, CATS_AND_DOGS, 8)
    save(tmp_path / split / "overview.png", 3)
    save(tmp_path / split / "cat" / "more" / "deep.png", 0)
    assert labels_of(in_train(tmp_path)) == {(0, "cat"): 9, (1, "dog"): 8, (3, None): 1}
    assert "18 train (17 labelled); 2 classes: cat, dog" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["Train", "training", "VAL", "valid", "validation", "dev", "testing", "Test"])
def test_splits_are_folders_of_their_names_at_the_top(tmp_path, place):
    """Also below one single folder, and not deeper."""
    save_classes(tmp_path / "data" / "train", CATS_AND_DOGS, 2)
    save_classes(tmp_path / "data" / place, CATS_AND_DOGS, 3)
    save(tmp_path / "data" / "train" / "cat" / "test" / "a.png", 0)
    split = SPLIT_WORDS[place.lower()]
    images = seen(tmp_path)
    if split == "train":
        assert images.keys() == {"train"}
        assert labels_of(images["train"]) == {(0, "cat"): 6, (1, "dog"): 5}
    else:
        assert labels_of(images["train"]) == {(0, "cat"): 3, (1, "dog"): 2}
        assert labels_of(images[split]) == {(0, "cat"): 3, (1, "dog"): 3}


@pytest.mark.parametrize("place", ["train2", "my train", "trainset", "val_images", "latest", "tests"])
def test_other_folders_are_no_splits_and_said(tmp_path, capsys, place):
    save_classes(tmp_path / "train", CATS_AND_DOGS, 2)
    save_classes(tmp_path / place, CATS_AND_DOGS, 3)
    assert labels_of(in_train(tmp_path)) == {(0, "cat"): 2, (1, "dog"): 2}
    assert f"images in no split's folder (6: {place}/cat/0.png, {place}/dog/0.png, ...)" in capsys.readouterr().err


def test_words_in_names_of_files_make_no_splits(tmp_path):
    for number, name in enumerate(["train-0.png", "test.png", "val_1.png", "validation.png", "my test.png"]):
        save(tmp_path / name, number)
    assert len(in_train(tmp_path)) == 5


PLANTS = ("apple/healthy", "apple/rot", "grape/healthy", "grape/rot")


@pytest.mark.parametrize(
    ("way", "classes"), [("inner", "healthy rot healthy rot"), ("outer", "apple apple grape grape")]
)
def test_the_same_name_below_several_folders_is_one_class_and_said(tmp_path, capsys, way, classes):
    for kind, place in enumerate(PLANTS):
        save(tmp_path / place / "0.png", kind)
    images = in_train(tmp_path, label_folder=way)
    assert [images[f"{place}/0.png"].label for place in PLANTS] == classes.split()
    said = (
        "apple/healthy, grape/healthy are one class, and so with 1 more; data.label_folder outer takes the outer ones"
    )
    assert (said in capsys.readouterr().err) == (way == "inner")


def test_classes_of_sites_are_the_same_in_another_place(tmp_path):
    """A held-out split whose folders are on another level: a class is known by its name."""
    save_classes(tmp_path / "train", CATS_AND_DOGS)
    for kind, name in enumerate([*CATS_AND_DOGS, "owl"]):
        save(tmp_path / "test" / "site 9" / name / "0.png", kind)
    assert labels_of(seen(tmp_path)["test"])[(0, "cat")] == 1


# names ----------------------------------------------------------------------------------------------------------------


def written(shards, workers):
    """As `prepare.write_all`, in this process."""
    for shard in shards:
        prepare.write_shard(shard)
        yield shard


@pytest.mark.parametrize("place", ["root", "class", "file"])
def test_any_name_that_the_system_takes(tmp_path, monkeypatch, place):
    """It is read as it is, and prepared shards have the same images of the same classes."""
    monkeypatch.setattr("mpp.prepare.write_all", written)
    names = [*AWKWARD_NAMES, *NO_UTF8_NAMES, "x" * 251, "é" * 125 + "x"]
    root = tmp_path / "data"
    if place == "root":
        root = tmp_path / "br [v1] {a,b} #1 100% a::b é"
        save_classes(root, CATS_AND_DOGS)
        expected = {(0, "cat"): 2, (1, "dog"): 2}
    elif place == "class":
        save_classes(root, names[:6])
        expected = {(kind, name): 2 for kind, name in enumerate(names[:6])}
    else:
        for name in names:
            save(f"{root}/cat/{name}.png", 0)
        save(root / "dog" / "0.png", 1)
        expected = {(0, "cat"): len(names), (1, "dog"): 1}
    images = in_train(root)
    assert labels_of(images) == expected
    prepare.main([f"--data.path={root}", f"--out={tmp_path / 'out'}", "--workers=1"])
    prepared = in_train(tmp_path / "out")
    assert labels_of(prepared) == expected
    if place == "file":
        assert set(images) == {f"cat/{name}.png" for name in names} | {"dog/0.png"}
        assert {*prepared} == {*map(printable, images)}


@pytest.mark.parametrize("name", [ACUTE, NO_UTF8_NAMES[0]])
def test_images_that_are_moved_are_the_same(tmp_path, name):
    """Of some, the names are no UTF-8."""
    save_classes(tmp_path / "here", CATS_AND_DOGS)
    save(tmp_path / "here" / "cat" / f"{name}.png")
    known = []
    for place in (tmp_path / "here", shutil.copytree(tmp_path / "here", tmp_path / "else" / "where")):
        train, held_out = load(place)
        known.append([identify_images(part, with_labels=True) for part in (train, held_out)])
    assert known[0] == known[1]


def test_classes_whose_names_are_no_text_stay_apart(tmp_path):
    save_classes(tmp_path, NO_UTF8_NAMES)
    images = in_train(tmp_path)
    for kind, name in enumerate(NO_UTF8_NAMES):
        for number in range(2):
            assert images[f"{name}/{number}.png"].kind == kind
    assert {each.label for each in images.values()} == {*map(printable, NO_UTF8_NAMES)}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *itertools.product(("a.Jpg", "a.JPEG", "a.jpe", "a.JFIF"), ["JPEG"]),
        ("a.PNG", "PNG"),
        ("a.webp", "WEBP"),
        ("a.BMP", "BMP"),
        ("a.TiF", "TIFF"),
        ("a.b.c.png", "PNG"),
        *itertools.product(("5f1d", "scan.2", "a.", "Dr. No"), ("JPEG", "PNG", "WEBP")),
        ("no ending.of a picture", "PNG"),
    ],
)
def test_pictures_are_known_by_their_endings_or_first_bytes(tmp_path, name, form):
    save(tmp_path / "a" / name, 4, form)
    save(tmp_path / "b" / "0.png", 1)
    (tmp_path / "a" / "Makefile").write_text("all:")
    assert in_train(tmp_path) == {f"a/{name}": (4, "a"), "b/0.png": (1, "b")}


@pytest.mark.parametrize("link", ["file", "folder", "root"])
def test_links_are_followed(tmp_path, link):
    save_classes(tmp_path / "store", ["x1", "x2"])
    (tmp_path / "data" / "cat").mkdir(parents=True)
    (tmp_path / "data" / "dog").symlink_to("../store/x2")
    for number in range(2):
        (tmp_path / "data" / "cat" / f"{number}.png").symlink_to(tmp_path / "store" / "x1" / f"{number}.png")
    (tmp_path / "there").symlink_to("data")
    root = tmp_path / ("there" if link == "root" else "data")
    assert labels_of(in_train(root)) == {(0, "cat"): 2, (1, "dog"): 2}


def test_dangling_links_are_counted_and_named(tmp_path, capsys):
    save_classes(tmp_path, CATS_AND_DOGS)
    for number in range(4):
        (tmp_path / "cat" / f"gone{number}.png").symlink_to("/nonexistent/object")
    assert labels_of(in_train(tmp_path)) == {(0, "cat"): 2, (1, "dog"): 2}
    assert "left out: dangling links (4: cat/gone0.png, cat/gone1.png, cat/gone2.png, ...)" in capsys.readouterr().err


@pytest.mark.parametrize("end", [".dng", ".NEF", ".CR2", ".svg"])
def test_pictures_that_nothing_reads_are_counted_and_named(tmp_path, capsys, end):
    save_classes(tmp_path, CATS_AND_DOGS)
    (tmp_path / "cat" / f"a{end}").write_bytes(b"x")
    assert len(in_train(tmp_path)) == 4
    said = f"left out: {end.lower()} files, which mpp does not read; convert them to JPEG, PNG or TIFF (1: cat/a{end})"
    assert said in capsys.readouterr().err


def test_a_folder_without_images_says_what_it_has(tmp_path):
    (tmp_path / "a.dng").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds no images; left out: \.dng .*a\.dng\); left out: \.txt files \(1: n"):
        load(tmp_path)


# order and effort -----------------------------------------------------------------------------------------------------


class Shuffled:
    """As os.scandir, in another order."""

    def __init__(self, path, scandir, order: int):
        with scandir(path) as entries:
            self.entries = sorted(entries, key=lambda entry: entry.name)
        random.Random(order).shuffle(self.entries)

    def __enter__(self):
        return iter(self.entries)

    def __exit__(self, *_):
        pass


def test_the_order_of_a_file_system_does_not_matter(tmp_path, monkeypatch):
    """Nor which of several links to the same images comes first."""
    save_classes(tmp_path / "store", ["x", "y", "y/z", "w"], 3)
    for place, target in (("a", "x"), ("b", "y"), ("c", "y/z"), ("d", "w"), ("e", "x")):
        (tmp_path / "data" / place).mkdir(parents=True)
        (tmp_path / "data" / place / "link").symlink_to(tmp_path / "store" / target)
        for number in range(3):
            (tmp_path / "data" / place / f"{number}.dng").write_bytes(b"x")
            (tmp_path / "data" / place / f"{number}.txt").write_bytes(b"x")
            save(tmp_path / "data" / place / f"{number}.png")
    listings = []
    scandir = os.scandir
    for order in range(5):
        monkeypatch.setattr("mpp.data.listing.tree.os.scandir", partial(Shuffled, scandir=scandir, order=order))
        listing = list_images(walk_folder(str(tmp_path / "data")), ImagesConfig())
        listings.append((listing.columns["image"], sorted(listing.notes), sorted(listing.warnings)))
    assert all(each == listings[0] for each in listings)


@pytest.fixture
def calls(monkeypatch):
    """How often this process asks a file system for what is in a folder, or of what sort a file is."""
    counts: Counter[str] = Counter()

    def counted(name):
        real = getattr(os, name)

        def call(*args, **options):
            counts[name] += 1
            return real(*args, **options)

        return call

    for name in ("stat", "lstat", "scandir", "listdir", "access"):
        monkeypatch.setattr(os, name, counted(name))
    return counts


@pytest.mark.parametrize("kind", ["folders", "list", "backslashes", "decomposed", "without endings", "missing"])
def test_the_file_system_is_asked_little(tmp_path, calls, kind):
    """At most two calls a file."""
    count = 300
    names = [f"{'abc'[number % 3]}/é{number}.png" for number in range(count)]
    for name in names:
        save(tmp_path / name)
    changed = {
        "backslashes": [name.replace("/", "\\") for name in names],
        "decomposed": [name.replace("é", "e\u0301") for name in names],
        "without endings": [name.removesuffix(".png") for name in names],
        "missing": names[:2] + [f"{name}.gone" for name in names[2:]],
    }
    if kind != "folders":
        (tmp_path / "metadata.csv").write_text("\n".join(["file_name", *changed.get(kind, names)]))
    calls.clear()
    train, _ = load(tmp_path, eval_split=None, missing="skip")
    assert len(train.origin.rows) == (2 if kind == "missing" else count)
    assert calls["scandir"] >= 4 and sum(calls.values()) <= 2 * count, calls


# archives -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["images.zip", "Images.ZIP", "train.zip"])
@pytest.mark.parametrize("inside", ["", "images/"])
def test_an_archive_in_a_folder_is_its_images(tmp_path, name, inside):
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / name, "w") as archive:
        for kind in range(2):
            archive.writestr(f"{inside}{CATS_AND_DOGS[kind]}/0.png", colour(kind))
    assert labels_of(in_train(tmp_path / "data")) == {(0, "cat"): 1, (1, "dog"): 1}


def test_backslashes_between_folders_of_a_zip_are_slashes(tmp_path):
    """As Windows PowerShell 5 writes them. An entry that leads out is found inside."""
    file = tmp_path / "cats and dogs.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("pets\\train\\", b"")
        for kind, name in enumerate(CATS_AND_DOGS):
            archive.writestr(f"pets\\train\\{name}\\0.png", colour(kind))
            archive.writestr(f"pets/test\\{name}/0.png", colour(kind))
        archive.writestr("..\\..\\..\\pets\\train\\cat\\out.png", colour(0))
        archive.writestr(f"\\pets\\test\\{'x' * 200}\\{'y' * 200}\\0.png", colour(0))
    images = seen(file)
    assert labels_of(images["train"]) == {(0, "cat"): 2, (1, "dog"): 1}
    assert len(images["test"]) == 3


def test_archives_of_splits_are_splits(tmp_path):
    for split in ("train", "val"):
        with zipfile.ZipFile(tmp_path / f"{split}.zip", "w") as archive:
            for kind in range(2):
                archive.writestr(f"{CATS_AND_DOGS[kind]}/0.png", colour(kind))
    images = seen(tmp_path)
    assert labels_of(images["train"]) == labels_of(images["validation"]) == {(0, "cat"): 1, (1, "dog"): 1}


def test_a_level_that_is_the_same_for_nearly_all_is_no_class(tmp_path):
    """A folder of boxes that lost a picture does not make classes of `images` and `boxes`."""
    for kind, name in enumerate("abc"):
        for number in range(10):
            save(tmp_path / "train" / name / "images" / f"{number}.png", kind)
    save(tmp_path / "train" / "a" / "boxes" / "0.png", 0)
    assert all(image.label == "abc"[image.kind] for image in in_train(tmp_path, eval_split=None).values())


def test_where_two_levels_may_be_the_classes_both_are_said(tmp_path, capsys):
    for kind, name in enumerate(("benign", "malignant")):
        for patient in range(4):
            save(tmp_path / name / f"p{kind}{patient}" / "0.png", kind)
    assert len({image.label for image in in_train(tmp_path).values()}) == 8
    said = (
        "classes are the innermost folders (8: p00, p01, p02 and 5 more); data.label_folder outer takes the outer ones"
    )
    assert f"{said} (2: benign, malignant)" in capsys.readouterr().err
    images = in_train(tmp_path, label_folder="outer")
    assert all(image.label == ("benign", "malignant")[image.kind] for image in images.values())


def test_the_outer_folders_may_be_the_classes_though_one_has_nearly_all_images(tmp_path, capsys):
    for patient in range(24):
        save(tmp_path / ("ill" if patient == 0 else "well") / f"p{patient % 2}" / f"{patient}.png", int(patient > 0))
    assert {image.label for image in in_train(tmp_path).values()} == {"p0", "p1"}
    assert "data.label_folder outer takes the outer ones (2: ill, well)" in capsys.readouterr().err
    images = in_train(tmp_path, label_folder="outer")
    assert all(image.label == ("ill", "well")[image.kind] for image in images.values())


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (["train/Dog", "train/cat", "val/dog", "val/cat"], "'Dog' and 'dog'"),
        (["old car", "old  car"], "'old  car' and 'old car'"),
        ([f"{ACUTE}t{ACUTE}", f"{DECOMPOSED}t{DECOMPOSED}"], "forms of letters"),
        (["A", "a", "old car", "oldcar"], ""),
    ],
)
def test_classes_whose_names_look_the_same_are_named(tmp_path, capsys, names, alike):
    save_classes(tmp_path, names)
    load(tmp_path)
    warned = capsys.readouterr().err
    assert alike in warned and ("are they one?" in warned) == bool(alike)


@pytest.mark.parametrize(
    ("names", "masks"),
    [
        (["a/1.png", "a/1_mask.png", "a/2.png", "a/2_mask.png"], "such as a/1_mask.png, a/2_mask.png;"),
        (["1.png", "1-Seg.tif"], "such as 1-Seg.tif;"),
        (["mask.png", "1_mask.png", "2_mask.png", "gas_mask.png", "gas/1.png", "masked.png"], ""),
    ],
)
def test_files_that_look_like_masks_of_others_are_named(tmp_path, capsys, names, masks):
    for number, name in enumerate(names):
        save(tmp_path / name, number)
    load(tmp_path)
    warned = capsys.readouterr().err
    assert masks in warned and ("look like masks" in warned) == bool(masks)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train2017", "val2017"], "folders look like splits but are not: train2017, val2017;"),
        (["cars_test", "cars_train"], "folders look like splits but are not: cars_test, cars_train;"),
        (["cat/train", "dog/val"], "folders look like splits but are not: train, val;"),
        (["JPEGImages", "SegmentationClass"], "folders look like masks and count as images: SegmentationClass;"),
        (["images", "annotations"], "folders look like masks and count as images: annotations;"),
        (["trainer", "protest", "valley"], ""),
    ],
)
def test_folders_that_look_like_splits_or_masks_are_named(tmp_path, capsys, names, said):
    save_classes(tmp_path, names)
    in_train(tmp_path)
    warned = capsys.readouterr().err
    assert said in warned and ("look like" in warned) == bool(said)
