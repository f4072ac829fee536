"""Tar shards: samples, their images and labels, indexed and streamed."""

import json
import os
import random
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import datasets
import fsspec
import pytest
import webdataset
from colours import CATS_AND_DOGS, COLOURS, Seen, colour, in_train, load, seen
from file_names import AWKWARD_NAMES, FILE_NAMES, NO_UTF8_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import write_tar

from mpp.config import DataConfig, ImagesConfig
from mpp.data.decoding.decode import decode
from mpp.data.shards import load_streamed
from mpp.data.sources import load_splits
from mpp.errors import UserError
from mpp.runtime.messages import printable

FEW = settings(max_examples=4, deadline=None, derandomize=True)
KEYS = FILE_NAMES.filter(lambda name: "." not in name and "\\" not in name and len(os.fsencode(name)) < 90)
Members = list[tuple[str, bytes]]


def samples(numbers, end: str = "png", form: str = "PNG", key: str = "{:06d}") -> Members:
    """Images of three colours with their classes as `cls`."""
    members = []
    for number in numbers:
        name = key.format(number)
        kind = number % 3
        members.append((f"{name}.{end}", colour(kind, form)))
        members.append((f"{name}.cls", str(kind).encode()))
    return members


def streamed(path: Path | str, **config) -> dict[str, Seen]:
    """The images of a stream: name -> what it shows, and its label."""
    config = DataConfig(path=str(path), streaming=True, **config)
    rows = [row for stream in load_splits(config, streaming=True).values() for row in stream]
    images = {}
    for row in rows:
        pixel = decode(row["image"]["bytes"], ImagesConfig())[:, 4, 4].numpy()
        kind = int(abs(COLOURS - pixel).sum(1).argmin())
        images[row["image"]["path"]] = Seen(kind, row[config.label_column or "label"])
    return images


def indexed(path: Path | str, **config) -> dict[str, Seen]:
    """The same of shards that are indexed; a name is without its shard's."""
    images = in_train(path, **config)
    by_member = {name.partition(".tar: ")[2]: image for name, image in images.items()}
    assert len(by_member) == len(images)
    return by_member


BOTH = pytest.mark.parametrize("look", [indexed, streamed])


def is_right(images: dict[str, Seen], count: int) -> bool:
    """Whether there are so many, all with the class that they show."""
    return len(images) == count and all(image.label == str(image.kind) for image in images.values())


# samples --------------------------------------------------------------------------------------------------------------


@FEW
@given(st.lists(KEYS, min_size=2, max_size=5, unique=True), st.sampled_from(["jpg", "png", "webp", "JPEG"]))
def test_well_formed_shards_are_those_of_webdataset(keys, end):
    """The same samples in the same order, the same bytes, the same classes."""
    form = {"jpg": "JPEG", "JPEG": "JPEG", "png": "PNG", "webp": "WEBP"}[end]
    with tempfile.TemporaryDirectory() as folder:
        members = []
        for number, key in enumerate(keys):
            members.append((f"{key}.{end}", colour(number, form)))
            members.append((f"{key}.cls", str(number).encode()))
            members.append((f"{key}.json", b"{}"))
        write_tar(f"{folder}/train-0.tar", members)
        expected = list(webdataset.WebDataset(f"{folder}/train-0.tar", shardshuffle=False))
        for look in (indexed, streamed):
            images = look(folder)
            assert sorted(images) == sorted(f"{sample['__key__']}.{end}" for sample in expected)
            for number, sample in enumerate(expected):
                assert images[f"{sample['__key__']}.{end}"] == (number, sample["cls"].decode())
        whole = load_splits(DataConfig(path=folder, streaming=True), streaming=True)["train"]
        assert [row["image"]["bytes"] for row in whole] == [sample[end.lower()] for sample in expected]


@BOTH
def test_endings_of_images_may_differ(tmp_path, look):
    """Within a shard, and across shards."""
    write_tar(tmp_path / "train-000.tar", samples(range(7), "jpg", "JPEG") + samples(range(7, 9), "webp", "WEBP"))
    write_tar(tmp_path / "train-001.tar", samples(range(9, 12), "PNG") + samples(range(12, 14), "JpEg", "JPEG"))
    assert is_right(look(tmp_path), 14)


@BOTH
@pytest.mark.parametrize("key", ["img.v1.{:06d}", "a.b/{:06d}", "./{:06d}", "d/e/{:06d}", "{:06d}.v1.0", "x.{:06d}.y"])
def test_names_with_dots(tmp_path, look, key):
    write_tar(tmp_path / "train-000.tar", samples(range(6), key=key))
    assert is_right(look(tmp_path), 6)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False), st.sampled_from(["{:06d}", "img.v1.{:06d}", "a/{:02d}"]))
def test_the_order_of_members_does_not_matter(rng, key):
    """On this machine. A label may be far from its image."""
    members = samples(range(8), key=key)
    rng.shuffle(members)
    with tempfile.TemporaryDirectory() as folder:
        write_tar(f"{folder}/train.tar", members)
        for look in (indexed, streamed):
            images = look(folder)
            assert is_right(images, 8)
            assert all(image.kind == int(name.split(".")[-2][-2:]) % 3 for name, image in images.items())


@BOTH
def test_a_picture_of_several_is_that_without_a_dot(tmp_path, look):
    """`000.jpg` of `000.jpg` and `000.seg.png`: WebDataset's way of naming."""
    members = samples(range(6), "jpg", "JPEG")
    members += [(f"{number:06d}.{end}", colour(5)) for number in range(6) for end in ("seg.png", "depth.left.png")]
    write_tar(tmp_path / "train.tar", sorted(members))
    assert is_right(look(tmp_path), 6)


@BOTH
def test_several_pictures_are_chosen_among_by_a_setting_or_refused(tmp_path, look):
    members = samples(range(6), "jpg", "JPEG") + [(f"{number:06d}.png", colour(5)) for number in range(6)]
    write_tar(tmp_path / "train.tar", sorted(members))
    with pytest.raises(
        UserError, match=r"sample 000000 has several pictures \(jpg, png\): a name is cut .*image_column"
    ):
        look(tmp_path)
    assert is_right(in_train(tmp_path, image_column="jpg"), 6)


def test_of_two_members_of_one_name_the_last_one_counts(tmp_path, capsys):
    """As tar has it: `tar -r` writes a file that has changed once more."""
    write_tar(tmp_path / "train.tar", [("a.png", colour(1)), *samples([2]), ("a.png", colour(0)), ("a.cls", b"0")])
    assert is_right(in_train(tmp_path), 2)
    said = "left out: pictures with the name of a later one (1: train.tar: a.png)\n"
    assert said in capsys.readouterr().err


def test_links_in_a_shard_are_the_files_that_they_lead_to(tmp_path):
    """GNU tar writes files of several names as links."""
    for kind, name in enumerate("ab"):
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "0.png").write_bytes(colour(kind))
        (tmp_path / "src" / name / "1.png").hardlink_to(tmp_path / "src" / name / "0.png")
        (tmp_path / "src" / name / "2.png").symlink_to("0.png")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "src", "src")
    images = in_train(tmp_path / "x.tar")
    assert sorted((image.kind, image.label) for image in images.values()) == [(0, "a")] * 3 + [(1, "b")] * 3


def test_folders_in_a_shard_are_splits_and_classes(tmp_path):
    members = []
    for split in ("train", "val"):
        for kind, name in enumerate("ab"):
            members += [(f"{split}/{name}/{number}.png", colour(kind)) for number in range(3)]
    write_tar(tmp_path / "x.tar", members)
    for path in (tmp_path / "x.tar", tmp_path):
        train, held_out = load(path)
        assert (len(train), len(held_out), held_out.split, train.class_names) == (6, 6, "validation", ["a", "b"])
        assert train.labels.tolist() == held_out.labels.tolist() == [0] * 3 + [1] * 3


def test_folders_in_a_shard_that_are_no_splits_are_left_out_and_named(tmp_path, capsys):
    """As those on a disk are."""
    members = []
    for place in ("train/a", "train/b", "test/a", "extra/a"):
        members += [(f"{place}/{number}.png", colour(number)) for number in range(3)]
    write_tar(tmp_path / "x.tar", members)
    assert {split: len(images) for split, images in seen(tmp_path).items()} == {"train": 6, "test": 3}
    named = f"left out: images in no split's folder (3: {tmp_path}/x.tar: extra/a/0.png, "
    assert named in capsys.readouterr().err


def test_folders_in_a_shard_that_look_like_masks_are_named(tmp_path, capsys):
    write_tar(tmp_path / "x.tar", [(f"{place}/{n}.png", colour(n)) for place in ("images", "masks") for n in range(3)])
    in_train(tmp_path)
    assert "folders look like masks and count as images: masks" in capsys.readouterr().err


def test_samples_without_a_picture_are_counted_and_named(tmp_path, capsys):
    write_tar(tmp_path / "train.tar", [*samples(range(4)), ("a.txt", b"text"), ("b.cls", b"1"), ("c.dng", b"x")])
    assert is_right(in_train(tmp_path), 4)
    said = "left out: samples without a picture (3: train.tar: a, train.tar: b, train.tar: c)"
    assert said in capsys.readouterr().err


@BOTH
def test_pictures_without_an_ending_are_known_by_their_bytes(tmp_path, look):
    members = [(f"{number:06d}", colour(number % 3, "JPEG")) for number in range(4)]
    write_tar(tmp_path / "train.tar", members)
    assert Counter(image.kind for image in look(tmp_path).values()) == {0: 2, 1: 1, 2: 1}


@BOTH
def test_hidden_members_and_other_sorts_are_none(tmp_path, look):
    write_tar(tmp_path / "train.tar", [("._000000.png", b"x"), *samples(range(4)), (".DS_Store", b"x")])
    with tarfile.open(tmp_path / "train.tar", "a") as shard:
        folder = tarfile.TarInfo("a.png")
        folder.type = tarfile.DIRTYPE
        shard.addfile(folder)
    assert is_right(look(tmp_path), 4)


@BOTH
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_any_form_of_a_tar(tmp_path, look, form):
    """Names of over 100 bytes, or of none that is ASCII, have headers of their own."""
    key = "é" * 20 + "/{:06d}" if form == tarfile.USTAR_FORMAT else "é" * 90 + "/" + "x" * 120 + "{:06d}"
    write_tar(tmp_path / "train.tar", samples(range(3), key=key), format=form)
    assert is_right(look(tmp_path), 3)


# labels ---------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("end", ["cls", "label", "CLS"])
def test_text_of_a_member_is_the_label(tmp_path, look, end):
    """Only a blank is no label."""
    texts = {"NA": "NA", "None": "None", " é \n": "é", "7\n": "7", "": None, " \n": None}
    members = []
    for number, text in enumerate(texts):
        members.append((f"{number}.png", colour(number)))
        members.append((f"{number}.{end}", text.encode()))
    write_tar(tmp_path / "train.tar", members)
    assert list(look(tmp_path).values()) == list(enumerate(texts.values()))


@BOTH
@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["NA", "b", "c"], ["NA", "b", "c"]),
        ([45123, 998877, -1], ["45123", "998877", "-1"]),
        ([True, None, 2.0], ["True", None, "2"]),
    ],
)
def test_a_key_of_json_is_the_label(tmp_path, look, values, labels):
    write_with_json(tmp_path / "train.tar", values)
    assert [image.label for image in look(tmp_path, label_column="kind").values()] == labels


def test_a_key_of_json_may_hold_several_labels(tmp_path):
    write_with_json(tmp_path / "train.tar", [[0, 1], [], [2]])
    train, _ = load(tmp_path, label_column="kind", eval_split=None)
    assert {*train.class_names} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"json": b'{"species": "cat", "width": 9}', "txt": b"a cat"}, "txt, species (in json), width (in json)"),
        ({"class.txt": b"3"}, "class.txt"),
        ({"json": b"["}, None),
        ({"cls": b" ", "txt": b"a cat"}, None),
        ({}, None),
    ],
)
def test_members_that_may_be_labels_are_named(tmp_path, capsys, others, named):
    members = [("0.png", colour(0)), *((f"0.{end}", content) for end, content in others.items())]
    write_tar(tmp_path / "train.tar", members)
    load_splits(ImagesConfig(path=str(tmp_path)))
    hint = "no sample has a member `cls` or `label`; data.label_column may name one of "
    output = capsys.readouterr().out
    assert (f"{hint}{named}\n" in output) if named else (hint not in output)


def write_with_json(file: Path, values: list) -> None:
    """Images of several colours with JSON in which the key `kind` has these values."""
    members = []
    for number, value in enumerate(values):
        members.append((f"{number}.png", colour(number)))
        members.append((f"{number}.json", json.dumps({"kind": value}).encode()))
    write_tar(file, members)


def test_json_that_is_none_is_named(tmp_path):
    write_tar(tmp_path / "train.tar", [("0.png", colour(0)), ("0.json", b"{")])
    with pytest.raises(UserError, match=r"0\.json cannot be read"):
        load(tmp_path, label_column="kind")


def test_shards_of_folders_have_their_classes(tmp_path):
    """And nothing else: as `tar cf train.tar cat dog` writes them."""
    members = []
    for kind, name in enumerate(CATS_AND_DOGS):
        members += [(f"./{name}/{number}.png", colour(kind)) for number in range(3)]
    write_tar(tmp_path / "train.tar", members)
    assert Counter(in_train(tmp_path).values()) == {(0, "cat"): 3, (1, "dog"): 3}


# shards ---------------------------------------------------------------------------------------------------------------


def test_words_in_names_of_shards_are_splits(tmp_path):
    for number, name in enumerate(["birds-train-000", "train_001", "val-000", "a/test/000", "my.validation"]):
        write_tar(tmp_path / f"{name}.tar", samples(range(10 * number, 10 * number + 3)))
    write_tar(tmp_path / "latest.tar", samples(range(90, 93)))  # none of these words: to train on
    splits = seen(tmp_path) | seen(tmp_path, eval_split="test")
    assert {split: len(images) for split, images in splits.items()} == {"train": 9, "validation": 6, "test": 3}


@pytest.mark.parametrize("place", ["name", "key"])
@pytest.mark.parametrize("look", [indexed, streamed])
def test_any_name_that_the_system_takes(tmp_path, look, place):
    """Of a folder of shards, and of members: also such as are no UTF-8."""
    names = [*NO_UTF8_NAMES, *(name for name in AWKWARD_NAMES if len(os.fsencode(name)) < 200)]
    if place == "name":
        for name in names[::3]:
            write_tar(tmp_path / name / f"{name}.tar", samples(range(3)))
            assert is_right(look(tmp_path / name), 3), name
    else:
        names = [name for name in names if "a.." not in name]
        members = []
        for number, name in enumerate(names):
            members.append((f"{name}.png", colour(number % 3)))
            members.append((f"{name}.cls", str(number % 3).encode()))
        write_tar(tmp_path / "train.tar", members)
        assert is_right(look(tmp_path), len(names))


@BOTH
@pytest.mark.parametrize("left", [200, 550, 600, 1100, 1600, 5000])
def test_a_shard_that_ends_too_early_is_named(tmp_path, look, left):
    """In the header of a member, in its bytes, or in what fills its last block."""
    write_tar(tmp_path / "train-0.tar", samples(range(6)))
    whole = (tmp_path / "train-0.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(whole[:left])
    with pytest.raises(UserError, match=rf"{tmp_path}/train-0\.tar is damaged: .*; replace it"):
        look(tmp_path)


@BOTH
@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_shard_that_is_compressed_is_named(tmp_path, look, mode):
    with tarfile.open(tmp_path / "train-0.tar", mode) as shard:
        shard.addfile(tarfile.TarInfo("0.png"))
    with pytest.raises(UserError, match=r"train-0\.tar is a compressed tar, .*; decompress it"):
        look(tmp_path)


@BOTH
def test_a_broken_header_is_not_the_end(tmp_path, look):
    """tarfile takes it for that."""
    write_tar(tmp_path / "train-0.tar", samples(range(6)))
    content = bytearray((tmp_path / "train-0.tar").read_bytes())
    header = content.index(b"000003.png")
    content[header + 150 : header + 154] = b"zzzz"
    (tmp_path / "train-0.tar").write_bytes(content)
    with pytest.raises(
        UserError, match=r"train-0\.tar is damaged: (bad checksum|invalid header) of a member; replace it"
    ):
        look(tmp_path)


@BOTH
def test_tars_that_cat_has_joined_are_refused(tmp_path, look):
    for number in range(2):
        write_tar(tmp_path / "parts" / f"{number}.tar", samples(range(3 * number, 3 * number + 3)))
    (tmp_path / "all").mkdir()
    parts = [(tmp_path / "parts" / f"{number}.tar").read_bytes() for number in range(2)]
    (tmp_path / "all" / "train.tar").write_bytes(b"".join(parts))
    with pytest.raises(
        UserError, match=r"train\.tar is damaged: another tar begins behind its end \(byte \d+; `tar -A`"
    ):
        look(tmp_path / "all")


def test_a_url_without_shards_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"^data\.path is memory://.*; it must hold shards of one format of .*: it has none"
    ):
        load(put_at_url(tmp_path, "notes.txt"))
    with pytest.raises(UserError, match=r"it has \.parquet and \.tar"):
        load(put_at_url(tmp_path, "a.tar", "b.parquet"))


def test_any_damaged_shard_is_named(tmp_path):
    for shard in range(3):
        write_tar(tmp_path / f"train-{shard}.tar", samples(range(3 * shard, 3 * shard + 3)))
    (tmp_path / "train-2.tar").write_bytes((tmp_path / "train-2.tar").read_bytes()[:1100])
    with pytest.raises(UserError, match=r"train-2\.tar is damaged: unexpected end of data .*; replace it"):
        load(tmp_path)


def test_many_samples_cost_one_read_of_a_shard(tmp_path, monkeypatch):
    """It is opened once to see how names are cut, and once to index it; no image is read."""
    for shard in range(3):
        write_tar(tmp_path / f"train-{shard}.tar", samples(range(100 * shard, 100 * shard + 100)))
    opened: list[str] = []
    stat_calls = []
    stat = os.stat

    def noted_open(file, *args, **options):
        opened.append(str(file))
        return open(file, *args, **options)

    def noted_stat(*args, **options):
        stat_calls.append(args)
        return stat(*args, **options)

    monkeypatch.setattr("mpp.data.listing.tar_members.open", noted_open, raising=False)
    monkeypatch.setattr(os, "stat", noted_stat)
    rows = load_splits(DataConfig(path=str(tmp_path)))["train"]
    assert len(rows) == 300
    assert len([file for file in opened if file.endswith(".tar")]) == 4
    assert len(stat_calls) <= 300


def test_images_of_a_stream_that_are_kept_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for number in range(2):
        write_tar(tmp_path / "data" / f"train-{number}.tar", samples(range(4), key=f"{NO_UTF8_NAMES[number]}{{}}"))
    _, known, held_out = load_streamed(DataConfig(path=str(tmp_path / "data"), streaming=True), 4, 4)
    for part in (known, held_out):
        assert [part.class_names[label] for label in part.labels] == ["0", "1", "2", "0"]
        assert {part.image_name(index)[:-5] for index in range(4)} <= {*map(printable, NO_UTF8_NAMES)}


def test_far_shards_are_those_of_this_machine(tmp_path):
    """Their members stand next to each other; else one line says that they must."""
    members = [*samples(range(6), "jpg", "JPEG"), ("x.v1.png", colour(0)), ("x.v1.cls", b"0")]
    write_tar(tmp_path / "train.tar", members)
    near = streamed(tmp_path)
    server = fsspec.filesystem("memory")
    far_shard = f"memory://{tmp_path.name}/train.tar"
    server.pipe(far_shard, (tmp_path / "train.tar").read_bytes())
    far = streamed(far_shard)
    assert near == far and len(near) == 7
    random.Random(0).shuffle(members)
    write_tar(tmp_path / "train.tar", members)
    server.pipe(far_shard, (tmp_path / "train.tar").read_bytes())
    with pytest.raises(
        UserError, match=r"is apart from its sample: members of a sample must be next to each other in a remote shard"
    ):
        streamed(far_shard)


def put_at_url(tmp_path: Path, *names: str) -> str:
    """Shards of two images each at a URL, whose folder is returned."""
    write_tar(tmp_path / "two.tar", samples(range(2)))
    for name in names:
        fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/{name}", (tmp_path / "two.tar").read_bytes())
    return f"memory://{tmp_path.name}"


@pytest.mark.parametrize(
    ("names", "shards_by_split"),
    [
        (("train/0.tar", "train/1.tar", "test/0.tar"), {"train": 2, "test": 1}),
        (("train-0.tar", "train-1.tar", "val-0.tar"), {"train": 2, "validation": 1}),
        (("imgs-train-0.tar", "imgs-val-0.tar"), {"train": 1, "validation": 1}),
        (("x/train/0.tar", "x/validation/0.tar"), {"train": 1, "validation": 1}),
        (("train-00000-of-00002.tar", "train-00001-of-00002.tar"), {"train": 2}),
        (("0.tar", "1.tar"), {"train": 2}),
    ],
)
def test_shards_at_a_url_have_the_splits_of_their_names_and_folders(tmp_path, names, shards_by_split):
    splits = load_splits(ImagesConfig(path=put_at_url(tmp_path, *names)), streaming=True)
    assert {split: sum(1 for _ in rows) for split, rows in splits.items()} == {
        split: 2 * shards for split, shards in shards_by_split.items()
    }


def test_only_a_star_makes_a_pattern_of_a_url(tmp_path):
    folder = put_at_url(tmp_path, "[1]-0.tar", "[1]-1.tar", "1-0.tar", "[a]/train-0.tar", "[a]/test-0.tar")
    for name, splits, count in (("[1]-0.tar", 1, 2), ("[1]-*.tar", 1, 4), ("[a]", 2, 4)):
        loaded = load_splits(ImagesConfig(path=f"{folder}/{name}"), streaming=True)
        assert len(loaded) == splits
        assert sum(1 for rows in loaded.values() for _ in rows) == count
    with pytest.raises(UserError, match=r"-9\*\.tar, which cannot be loaded: no file matches .*-9\*\.tar"):
        load_splits(ImagesConfig(path=f"{folder}/1-9*.tar"), streaming=True)


def test_a_server_that_is_away_when_one_shard_is_first_asked_for_is_waited_for(tmp_path, monkeypatch):
    """Whichever request comes first: of what the shard is, or of its bytes."""
    server = type(fsspec.filesystem("memory"))
    shard = f"{put_at_url(tmp_path, '0.tar')}/0.tar"
    requests = []

    def away_at_first(request):
        def answer(*arguments, **more):
            requests.append(request)
            if len(requests) == 1:
                raise ConnectionError("503")
            return request(*arguments, **more)

        return answer

    for name in ("info", "_open"):
        monkeypatch.setattr(server, name, away_at_first(getattr(server, name)))
    monkeypatch.setattr("mpp.data.retry.time.sleep", lambda seconds: None)
    assert len(streamed(shard)) == 2


def test_an_ending_that_no_picture_has_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", [*samples(range(2)), *samples(range(2, 4), "jpg", "JPEG")])
    asked = r"data\.image_column is left\.png, which no picture in the shards of .* has as its ending"
    with pytest.raises(UserError, match=rf"{asked}; it must be one of jpg, png$"):
        load(tmp_path, image_column="left.png")
    assert len(in_train(tmp_path, image_column="jpg")) == 2
    write_tar(tmp_path / "a.tar", [("0.cls", b"0")])
    with pytest.raises(UserError, match=rf"data\.path is {tmp_path}, whose shards hold no images"):
        load(tmp_path)


def test_several_pictures_of_one_label_are_refused_or_chosen(tmp_path):
    """Cut at the last dot each picture would be a sample, and their label would be lost."""
    members = []
    for number in range(6):
        members.append((f"{number}.left.png", colour(number % 2)))
        members.append((f"{number}.right.png", colour(2)))
        members.append((f"{number}.cls", str(number % 2).encode()))
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(UserError, match=r"sample 0 has several pictures \(left\.png, right\.png\): a name is cut at"):
        load(tmp_path)
    assert is_right(in_train(tmp_path, image_column="left.png"), 6)
