"""Layouts of images: folders, lists and tar shards, and what a dataset makes of each: its splits, and every label.

The colour of an image says what it shows, so that an image with another one's label is seen.
"""

import csv
import gzip
import json
import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from colours import colour, in_train, kind_of, load, seen, splits_of, write
from conftest import refused
from file_names import ACUTE, CLASS_NAMES, DECOMPOSED, FILE_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import decode_with, tar, write_tar
from torchvision.datasets import ImageFolder

from mpp.config import ImagesConfig
from mpp.data.folder import walk
from mpp.data.lists import list_images, read_list

FEW = settings(max_examples=12, derandomize=True)
QUICK = settings(max_examples=30, derandomize=True)
TEXTS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=6)
LABELS = (
    st.sampled_from(["NA", "None", "null", "nan", "", " ", "-1", "01", "1", "a;b", "a,b", '"', "a\nb", "é"]) | TEXTS
)
"""Cells of a table."""


def samples(numbers, end: str = "png", form: str = "PNG", key: str = "{:06d}"):
    """Images of three colours with their classes as `cls`."""
    members = []
    for number in numbers:
        members.append((f"{key.format(number)}.{end}", colour(number % 3, form)))
        members.append((f"{key.format(number)}.cls", str(number % 3).encode()))
    return members


TWO = "a.png b.png"
CAT_AND_DOG = "cat/1.png dog/1.png"
LIST = "file_name,label\n"


class Layout(NamedTuple):
    """Files, and what they are taken for."""

    images: str
    """Names of images of a colour each."""
    expected: str
    """What mpp takes them for, as `label: images; label: images | the next split`; or what a refusal says."""
    others: Mapping[str, str | bytes] = MappingProxyType({})
    """Name -> content of files that are no images."""
    settings: Mapping[str, str] = MappingProxyType({})


def table(*rows: str):
    """A list of images."""
    return {"labels.csv": LIST + "".join(f"{row}\n" for row in rows)}


def shard(*members: tuple[str, bytes]) -> dict[str, bytes]:
    return {"a.tar": tar(members)}


RIGHT = {
    "flat": Layout(TWO, "-: a.png b.png"),
    "classes": Layout(f"{CAT_AND_DOG} dog/more/2.PNG", "cat: cat/1.png; dog: dog/1.png dog/more/2.PNG"),
    "stray": Layout(f"{CAT_AND_DOG} view.png", "cat: cat/1.png; dog: dog/1.png; -: view.png"),
    "splits": Layout(
        "Train/cat/1.png Train/dog/1.png val/dog/2.png val/owl/1.png",
        "cat: Train/cat/1.png; dog: Train/dog/1.png | dog: val/dog/2.png; owl: val/owl/1.png",
    ),
    "around": Layout(
        "data/pets/train/cat/1.png data/pets/train/dog/1.png data/pets/val/cat/2.png",
        "cat: data/pets/train/cat/1.png; dog: data/pets/train/dog/1.png | cat: data/pets/val/cat/2.png",
    ),
    "inner": Layout(
        "x/cat/1.png y/cat/1.png y/dog/1.png",
        "cat: x/cat/1.png y/cat/1.png; dog: y/dog/1.png",
        settings={"label_folder": "inner"},
    ),
    "outer, the same names inside": Layout(
        "train/0/1/a.png train/1/0/b.png test/0/1/c.png test/1/0/d.png",
        "0: train/0/1/a.png; 1: train/1/0/b.png | 0: test/0/1/c.png; 1: test/1/0/d.png",
        settings={"label_folder": "outer"},
    ),
    "list": Layout(f"{TWO} c.png", "NA: a.png; x: b.png; -: c.png", table("a.png,NA", "b.png, x ", "c.png,")),
    "list of splits": Layout(
        f"{TWO} c.png",
        "x: a.png; z: c.png | y: b.png",
        {"labels.csv": "File;Label;Split\na.png;x;train\nb.png;y; Val\nc.png;z;\n"},
    ),
    "list of one split": Layout(
        "train/cat/1.png train/dog/1.png test/1.png",
        "cat: train/cat/1.png; dog: train/dog/1.png | dog: test/1.png",
        {"test/metadata.csv": f"{LIST}1.png,dog\n"},
    ),
    "list of some": Layout(f"{TWO} c.png", "p: a.png; q: b.png", table("a.png,p", "b.png,q")),
    "list without labels": Layout(
        CAT_AND_DOG,
        "cat: cat/1.png; dog: dog/1.png",
        {"metadata.csv": "file_name,age\ncat/1.png,3\ndog/1.png,4\n"},
    ),
    "list of a column": Layout(
        TWO,
        "1: a.png; 2: b.png",
        {"metadata.jsonl": '{"photo": "a.png", "kind": 1}\n{"photo": "b.png", "kind": 2.0}\n'},
        {"file_column": "photo", "label_column": "kind"},
    ),
    "spellings": Layout(
        f"x/a.png y/b.png y/c.png {DECOMPOSED}.png",
        f"p: x/a.png {DECOMPOSED}.png; q: y/b.png; r: y/c.png",
        table(r"x\a.png,p", "b,q", "c.png,r", "b,q", f"{ACUTE}.png,p"),
    ),
    "utf-16": Layout(
        TWO,
        "é: a.png; q: b.png",
        {"labels.csv": f"{LIST}a.png,é\nb.png,q\n".encode("utf-16")},
        {"labels_encoding": "utf-16"},
    ),
    "marked": Layout(TWO, "é: a.png; q: b.png", {"labels.csv": f"\ufeff{LIST}a.png,é\n\nb.png,q\n"}),
    "skipped": Layout(
        TWO,
        "p: a.png; q: b.png",
        table("a.png,p", "b.png,q", "gone.png,q"),
        {"missing": "skip"},
    ),
    "masks": Layout(
        TWO,
        "p: a.png; q: b.png",
        {
            "m/a.png": colour(2),
            "m/b.png": colour(2),
            "metadata.csv": "file_name,label,mask_file_name\na.png,p,m/a.png\nb.png,q,m/b.png\n",
        },
    ),
}


REFUSED = {
    "two levels": Layout("x/cat/1.png y/dog/1.png", r"label_folder is null.*outer.*x, y.*inner.*cat, dog"),
    "nothing": Layout("", r"holds no images; left out: \.txt files \(1: a\.txt\)", {"a.txt": "x"}),
    "images and tars": Layout("a.png", "move some away", {"b.tar": "x"}),
    "two kinds of shards": Layout("", r"it has \.parquet and \.tar", {"a.parquet": "x", "b.tar": "x"}),
    "missing": Layout(TWO, "names 1 .*: gone.png; .*data.missing skip", table("a.png,p", "gone.png,q")),
    "a name of two": Layout("x/a.png y/a.png", "the name of several: a.png", table("a.png,p")),
    "an image of another folder": Layout(
        "train/a.png test/q/1.png", "train/l.* names 1 .*: 1.png", {"train/labels.csv": f"{LIST}a.png,p\n1.png,p\n"}
    ),
    "two labels": Layout(TWO, "two rows of .*a.png with other labels", table("a.png,p", "b.png,q", "a.png,q")),
    "two lists": Layout(TWO, "data.labels must name", table("a.png,p") | {"metadata.csv": f"{LIST}a.png,p\n"}),
    "no names": Layout(
        TWO, "file_column is None; .* file names in a.csv, which has a, b", {"a.csv": "a,b\n1,2\n"}, {"labels": "a.csv"}
    ),
    "a cell too many": Layout(TWO, "labels.csv cannot be read: .*line 3", table("a.png,p", "b.png,q,r")),
    "latin-1": Layout(
        TWO,
        "labels.csv cannot be read: .*data.labels_encoding is utf-8",
        {"labels.csv": f"{LIST}a.png,é\n".encode("latin-1")},
    ),
    "no encoding": Layout(TWO, "data.labels_encoding is utf-99", table(), {"labels_encoding": "utf-99"}),
    "no column": Layout(TWO, "data.label_column is kind", table("a.png,p"), {"label_column": "kind"}),
    "names with dots": Layout(
        "", "sample img has several pictures .*first dot", shard(*samples(range(3), key="img.v1.{}"))
    ),
    "a joined tar": Layout("", "a.tar cannot be read: more follows", {"a.tar": 2 * tar(samples(range(3)))}),
    "one name twice": Layout(
        "",
        "a.tar cannot be read: 000000.png: .* next to each other .*different endings",
        shard(*samples(range(3)), *samples(range(1))),
    ),
    "broken JSON": Layout(
        "", "0.json cannot be read", shard(("0.png", colour(0)), ("0.json", b"{")), {"label_column": "kind"}
    ),
    "no picture": Layout("", "no images .*; its shards hold cls", shard(("0.cls", b"0"))),
}


def lay_out(layout: Layout, folder: Path):
    """Write the files of a layout; name -> colour of its images."""
    colours = {name: number for number, name in enumerate(layout.images.split())}
    write(folder, {**colours, **layout.others})
    return colours


@pytest.mark.parametrize("name", RIGHT)
def test_images_have_the_splits_and_labels_of_their_layout(tmp_path, name):
    layout = RIGHT[name]
    colours = lay_out(layout, tmp_path)
    found = seen(tmp_path, **layout.settings)
    expected = []
    for split in layout.expected.split(" | "):
        pairs = (text.split(": ") for text in split.split("; "))
        classes = {image: label for label, images in pairs for image in images.split()}
        expected.append({image: (colours[image], None if of == "-" else of) for image, of in classes.items()})
    held_out = [word for word in ("validation", "test") if word in found]
    assert [found.pop(split) for split in ("train", *held_out)] == expected
    assert not found


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_say_no_one_thing_are_refused(tmp_path, monkeypatch, name):
    layout = REFUSED[name]
    lay_out(layout, tmp_path)
    monkeypatch.chdir(tmp_path)
    with refused(layout.expected):
        load(tmp_path, **layout.settings)


# folders --------------------------------------------------------------------------------------------------------------


@FEW
@given(st.dictionaries(CLASS_NAMES, st.lists(FILE_NAMES, min_size=1, max_size=3, unique=True), min_size=2, max_size=4))
def test_plain_folders_are_those_of_torchvision(tree):
    """The same classes, the same images in the same order, of the same classes; whatever the names."""
    with tempfile.TemporaryDirectory() as root:
        for kind, (name, files) in enumerate(sorted(tree.items())):
            write(Path(root) / name, {f"{file}.png": kind for file in files})
        expected = ImageFolder(root)
        listing = list_images(walk(root), ImagesConfig(path=root))
        assert [*listing.splits] == [path for path, _ in expected.samples]
        assert listing.columns["label"] == {path: expected.classes[number] for path, number in expected.samples}
        images = in_train(root)
        assert len(images) == len(expected)
        assert all(sorted(tree)[kind] == label for kind, label in images.values())


def test_pictures_are_known_by_their_endings_or_first_bytes(tmp_path):
    jpeg = colour(1, "JPEG")
    write(tmp_path, {"scan": colour(1), "scan.2": jpeg, "photo.JPeG": jpeg, ".hidden.png": 0, "note": b"text"})
    assert {*in_train(tmp_path)} == {"scan", "scan.2", "photo.JPeG"}


def test_what_is_left_out_is_named(tmp_path, capsys):
    """But for hidden files, and those of operating systems."""
    left_out = {"more/1.png": 2, "x.npy": b"", "y.csv": "", "old.zip": b"PK", "b.dng": b""}
    unseen = {".hidden/0.png": 0, "$RECYCLE.BIN/S-1/$R0.png": 0, "@eaDir/a.png/THUMB_M.jpg": 0}
    write(tmp_path, {"train/a/1.png": 0, "train/b/1.png": 1} | left_out | unseen)
    pq.write_table(pa.table({"url": ["https://x"]}), tmp_path / "c.parquet")
    (tmp_path / "train" / "gone.png").symlink_to("nowhere")
    (tmp_path / "train" / os.fsdecode(b"\xe9.png")).write_bytes(colour(0))
    assert len(in_train(tmp_path)) == 2
    printed = capsys.readouterr().err
    assert all(f"(1: {name})" in printed for name in (*left_out, "c.parquet", "train/gone.png"))
    assert "udce9" in printed and printed.count("left out") == 8


@pytest.mark.parametrize(
    "links, train, test, left_out",  # link -> where it leads; images of the splits; names that do not count
    [
        ({"train/b/0.png": "../b/1.png", "test/a/3.png": "../../train/a/0.png"}, "b/1.png", "a/3.png", 2),
        ({"train/c": "a"}, "a/0.png b/1.png", "", 1),
        ({"train/a/2.png": "../../../store/a/x.png"}, "a/0.png a/2.png b/1.png", "", 0),
        ({"train/b/2.png": "../../.store/x", "test/b/2.png": "../../.store/x"}, "a/0.png b/1.png", "b/2.png", 1),
        ({"train/a/more": "../../../store/a", "train/a/2.png": "more/x.png"}, "a/0.png a/more/x.png b/1.png", "", 1),
    ],
    ids=["in the tree", "a folder of the tree", "elsewhere", "splits, by a hidden store", "a folder"],
)
def test_a_file_counts_once(tmp_path, links, train, test, left_out, capsys):
    """A held-out name before others, then its own, then the first by a link; as a hub's cache has them."""
    write(tmp_path, {"data/train/a/0.png": 0, "data/train/b/1.png": 1, "data/.store/x": colour(0), "store/a/x.png": 0})
    link_all(tmp_path / "data", links)
    found = seen(tmp_path / "data")
    for split, images in (("train", train), ("test", test)):
        assert {name.removeprefix(f"{split}/") for name in found.get(split, ())} == {*images.split()}
    printed = capsys.readouterr().err
    assert printed.count("left out: ") == (left_out > 0) and (not left_out or f"({left_out}: " in printed)


def test_a_link_to_an_image_of_another_class_is_refused(tmp_path):
    write(tmp_path, {"train/a/0.png": 0, "train/b/1.png": 1})
    link_all(tmp_path, {"train/b/2.png": "../a/0.png"})
    with refused(r"b/2.png \(b\) is a link to .*/a/0.png \(a\), of another label"):
        load(tmp_path)


def link_all(folder: Path, links: dict[str, str]) -> None:
    for link, place in links.items():
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).symlink_to(place)


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
            write(Path(folder), {f"{file}.png": number})
            rows.append({"file_name": f"{file}.png", "label": f"class {number}"})
        rng.shuffle(rows)
        write_table(Path(folder) / "metadata.jsonl", rows)
        images = in_train(folder)
    assert len(images) == len(files)
    assert all(image.label == f"class {image.kind}" for image in images.values())


def test_arrays_count_beside_pictures_where_a_list_names_them(tmp_path):
    write(tmp_path, {"a.png": 0, "b.npy": b"", "labels.csv": f"{LIST}a.png,p\nb.npy,q\n"})
    assert len(list_images(walk(str(tmp_path)), ImagesConfig(path=str(tmp_path))).splits) == 2


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_list_anywhere(tmp_path, capsys, place, absolute):
    """Names start from data.path, or from the list; through a link to the images, too."""
    write(tmp_path / "images", {"a.png": 0, "b.png": 1, "labels.csv": f"{LIST}a.png,other\n"})
    (tmp_path / "data").symlink_to("images")
    start = f"{tmp_path}/images/" if absolute else "data/" if place == "outside" else ""
    file = tmp_path / ("images" if place == "inside" else ".") / "any name.csv"
    file.write_text(f"{LIST}{start}a.png,p\n{start}b.png,q\n")
    images = in_train(tmp_path / "data", labels=str(file))
    assert {name: image.label for name, image in images.items()} == {"a.png": "p", "b.png": "q"}
    assert "any name.csv" not in capsys.readouterr().err


# tar shards -----------------------------------------------------------------------------------------------------------


def indexed(path: Path | str, **config):
    """The images of shards: name in its shard -> what it shows, and its label."""
    return {name.partition(".tar: ")[2]: image for name, image in in_train(path, **config).items()}


def streamed(path: Path | str, **config):
    """The same of a stream."""
    (stream,) = splits_of(path, streaming=True, **config).values()
    return {
        row["image"]["path"]: (kind_of(decode_with(row["image"]["bytes"])), row[config.get("label_column", "label")])
        for row in stream
    }


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
    "seg, and a hidden member": (
        [("._0.png", b"x"), ("0.png", colour(0)), ("0.seg.png", colour(1)), ("0.cls", b" x\n"), *samples([1], "jpg")],
        {},
        {"0.png": (0, "x"), "000001.jpg": (1, "1")},
    ),
    "json": (
        [("0.png", colour(0)), ("0.json", b'{"k": "NA"}'), ("1.png", colour(1)), ("1.json", b'{"k": 2.0}')],
        {"label_column": "k"},
        {"0.png": (0, "NA"), "1.png": (1, "2")},
    ),
}


@BOTH
@pytest.mark.parametrize("name", SHARDS)
def test_the_image_and_the_label_of_a_sample(tmp_path, look, name):
    members, config, expected = SHARDS[name]
    write(tmp_path, {"train.tar": tar(members)})
    assert look(tmp_path, **config) == expected


def test_a_picture_of_several_is_chosen_by_its_ending(tmp_path):
    members = [("0.a.png", colour(0)), ("0.b.png", colour(1)), ("0.cls", b"x"), ("1.b.png", colour(2))]
    write(tmp_path, {"train.tar": tar(members)})
    rows = splits_of(tmp_path, image_column="b.png")["train"]
    assert rows.column_names == ["b.png", "label"] and rows["label"][:] == ["x", None]


def test_folders_in_shards_are_classes_and_splits(tmp_path):
    """If they have no labels, and their names say no split."""
    for shard in range(2):
        names = [(f"{split}/{name}/{shard}.png", kind) for split in ("train", "val") for kind, name in enumerate("ab")]
        write(tmp_path, {f"{shard}.tar": tar([(name, colour(kind)) for name, kind in names])})
    found = seen(tmp_path)
    assert [sorted(images.values()) for images in found.values()] == [[(0, "a")] * 2 + [(1, "b")] * 2] * 2
    assert found.keys() == {"train", "validation"}


@pytest.mark.parametrize(
    "shard, split",
    [
        ("val-0.tar", "validation"),
        ("test/val-0.tar", "validation"),
        ("latest-0.tar", "train"),
    ],
)
def test_words_in_names_of_shards_are_splits(tmp_path, shard, split):
    write(tmp_path, {shard: tar(samples(range(2)))})
    ((found, rows),) = splits_of(tmp_path, streaming=True).items()
    assert found == split and sum(1 for _ in rows) == 2


def test_far_shards_are_those_of_this_machine(tmp_path):
    """Their members stand next to each other; else one line says that they must."""
    members = samples(range(6), "jpg", "JPEG")
    url = f"memory://{tmp_path.name}/train.tar"
    for order in (members, members[::2] + members[1::2]):
        write(tmp_path, {"train.tar": tar(order)})
        fsspec.filesystem("memory").pipe(url, tar(order))
        if order is members:
            assert [*streamed(url).items()] == [*streamed(tmp_path).items()]
    for look, place in ((streamed, url), (streamed, tmp_path), (indexed, tmp_path)):
        with refused(r"train\.tar cannot be read: .* must be next to each other"):
            look(place)


@BOTH
def test_a_damaged_shard_is_named(tmp_path, look):
    """It ends too early, or a header in it is broken, which is not the end."""
    whole = tar(samples(range(10)))
    broken = bytearray(whole)
    broken[2048 + 148] ^= 1  # a checksum
    for data in (*(whole[:left] for left in (200, 550, 600, 1100, 1600, 5000)), bytes(broken)):
        write(tmp_path, {"train.tar": data})
        with refused(r"train\.tar cannot be read"):
            look(tmp_path)


def test_links_in_shards_and_compressed_ones_are_refused(tmp_path):
    for kind, said in ((tarfile.SYMTYPE, "1.png is a link"), (tarfile.GNUTYPE_SPARSE, "1.png is .*sparse")):
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as file:
            member = tarfile.TarInfo("1.png")
            member.type = kind
            file.addfile(member)
        with refused(rf"a\.tar cannot be read: {said}"):
            load(tmp_path)
    write(tmp_path, {"a.tar": gzip.compress(tar([]))})
    with refused(r"a\.tar cannot be read: .*decompress"):
        load(tmp_path)
