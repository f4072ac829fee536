"""Datasets made ready for training: images shrunk or kept, in parallel, resumed, reported."""

import io
import shutil
from contextlib import nullcontext
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from colours import CATS_AND_DOGS, load, save_classes, splits_of, write
from conftest import dataset_of, encoded, picture, read_json, refused
from image_files import decode_with, unreadable
from PIL import Image
from torchvision.transforms.v2 import functional

from mpp import prepare
from mpp.config import DataConfig, PrepareConfig
from mpp.data.shards import load_streamed
from mpp.prepare import NOTES_FOLDER, main, prepare_image
from mpp.runtime.files import hold


def pixels_of(number):
    """An image (H, W, 3): those of even numbers are large."""
    return picture(number, (40, 48) if number % 2 else (90, 120))


def class_of(number):
    return "cat" if number % 3 else "dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Thirty images in two classes: large ones, small ones, and two that are broken; and one that is held out."""
    files = {f"train/{class_of(number)}/{number:02d}.png": encoded(pixels_of(number)) for number in range(28)}
    files |= {"train/cat/empty.png": b"", "train/dog/text.jpg": b"no image", "test/dog/a.png": encoded(picture(99))}
    return write(tmp_path_factory.mktemp("set") / "images", files)


@pytest.fixture(scope="module")
def prepared(folder):
    """It in shards."""
    main(options(folder, folder.with_name("prepared")))
    return folder.with_name("prepared")


def options(folder, out, *more):
    """Of a folder that is named on a way that leads up and down."""
    way = f"{folder}/../{folder.name}"
    return [f"--data.path={way}", f"--out={out}", "--short_side=60", "--rows=8", "--workers=2", *more]


def test_large_images_are_shrunk_and_small_ones_kept_to_the_byte(folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(options(folder, out))
    train_shards = [f"train-{number:05d}-of-00004.parquet" for number in range(4)]
    assert sorted(file.name for file in (out / "data").iterdir()) == ["test-00000-of-00001.parquet", *train_shards]
    rows = datasets.load_dataset(str(out))["train"].cast_column("image", datasets.Image(decode=False))
    by_name = {row["image"]["path"]: row for row in rows}
    names = [f"train/{class_of(number)}/{number:02d}.png" for number in range(28)]  # nothing above the folder
    assert sorted(by_name) == sorted(names) and list(by_name) != sorted(names)  # shuffled
    for number, name in enumerate(names):
        data, original = by_name[name]["image"]["bytes"], pixels_of(number)
        assert by_name[name]["label"] == class_of(number)
        if number % 2:
            assert data == encoded(original)
            continue
        shrunk = Image.open(io.BytesIO(data))
        assert (shrunk.format, shrunk.size) == ("JPEG", (80, 60))
        expected = Image.fromarray(original).resize(shrunk.size, Image.Resampling.BILINEAR)
        assert abs(np.array(expected, int) - shrunk).mean() < 4
    printed = capsys.readouterr().out
    assert "29 images" in printed and "dropped 2 that cannot be decoded" in printed
    assert f"next: mpp pretrain --data.path {out} " in printed
    notes = map(read_json, (out / NOTES_FOLDER).glob("*.json"))
    assert sorted(line for of_shard in notes for line in of_shard["dropped"]) == [
        "train/cat/empty.png: an empty file instead of an image",
        "train/dog/text.jpg: no image file of a known sort",
    ]


def test_plain_pixels_lose_nothing_and_are_as_long_as_they_are():
    config = PrepareConfig(short_side=60, format="ppm")
    for number in range(2):
        data = prepare_image(encoded(pixels_of(number)), config)
        pixels = torch.from_numpy(pixels_of(number)).permute(2, 0, 1)
        expected = pixels if number else functional.resize(pixels, [60], antialias=True)
        assert data.startswith(b"P6\n") and torch.equal(decode_with(data), expected)
        assert np.array_equal(np.array(Image.open(io.BytesIO(data))), expected.permute(1, 2, 0))
    with unreadable(r"jpeg does not hold 80000 x 2 pixels; --format ppm or npy does"):
        prepare_image(encoded(np.zeros((3, 120_000, 3), np.uint8)), PrepareConfig(short_side=2))


def test_prepared_images_are_trained_on_indexed_or_streamed(prepared, tmp_path, pretrain):
    out = shutil.copytree(prepared, tmp_path / "2026 ~ [a]*")
    train, test = load(out)
    assert (len(train), len(test), sorted(set(train.labels))) == (28, 1, [0, 1])
    shards, known, _ = load_streamed(DataConfig(path=str(out), streaming=True), 9, 9)
    assert (shards.count, len(known)) == (4, 9)
    pretrain(f"--data.path={out}", "--data.streaming=true", "--run.steps=1")


def test_a_broken_off_command_continues(folder, prepared, tmp_path, capsys):
    out = shutil.copytree(prepared, tmp_path / "out")
    for number in (1, 3):
        (out / "data" / f"train-{number:05d}-of-00004.parquet").unlink()
    (out / "data" / ".train-00003-of-00004.parquet.partial").write_bytes(b"half")
    written_at = {path: path.stat().st_mtime_ns for path in (out / "data").glob("*.parquet")}
    main(options(folder, out))
    assert "5 shards, 3 of them there already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in written_at} == written_at
    for file in (prepared / "data").iterdir():
        assert file.read_bytes() == (out / "data" / file.name).read_bytes()


def test_shards_of_other_settings_images_and_labels_are_not_mixed(tmp_path, monkeypatch):
    images = [encoded(picture(number)) for number in range(5)]
    arguments = [f"--data.path={tmp_path}/data.parquet", f"--out={tmp_path}/out", "--workers=1"]
    dataset_of(images, label=[0, 1, 0, 1, 0]).to_parquet(tmp_path / "data.parquet")
    main(arguments)
    monkeypatch.setattr(prepare, "write_missing", lambda *_: pytest.fail("it was prepared"))
    for more in ("--quality=50", "--rows=3", "--seed=1"):
        with refused("begun with these settings and images"):
            main([*arguments, more])
    for others, labels in ((images, [0, 1, 1, 1, 0]), (images[:4], [0, 1, 0, 1]), (images[::-1], [0, 1, 0, 1, 0])):
        dataset_of(others, label=labels).to_parquet(tmp_path / "data.parquet")
        with refused("begun with these settings and images"):
            main(arguments)


@pytest.mark.parametrize(
    "settings, words",
    [
        (["--short_side=0"], "short_side is 0; it must be a"),
        (["--data.path=null"], "data.path is null; it must be a dataset"),
        (["--out=gs://bucket/shards"], "out is gs://bucket/shards; it must be a path on this machine"),
        (["--out={}/shards"], r"out is .*shards; it must be outside of .*images: its"),
        (["--out={}/train/../.."], r"out is .*; it must be a new folder"),  # with other files
        (["--data.path=./nowhere"], "data.path is ./nowhere, which does not exist"),
        (["--data.bands=[7,8,9]", "--workers=1"], "out is .*out; it must be of images of which some can be decoded"),
    ],
)
def test_bad_settings_are_named(tmp_path, settings, words):
    images = tmp_path / "images"
    save_classes(images / "train", CATS_AND_DOGS, 1)
    with refused(words):
        main([*options(images, tmp_path / "out"), *(word.format(images) for word in settings)])
    assert not [*tmp_path.rglob("*.parquet")] or "bands" in settings[0]


@pytest.mark.parametrize(
    "splits, read_as, is_refused",
    [
        (["train", "train_extra", "unlabeled"], "train, train_extra, unlabeled", False),
        (["Train", "val"], "train, validation", False),
        (["train", "held out"], "train, train", True),
        (["train", "../1"], "train, 1", True),
    ],
)
def test_splits_keep_their_names_or_are_refused(tmp_path, splits, read_as, is_refused):
    images, out = tmp_path / "images", tmp_path / "out"
    lines = [f"\n{number}.png,{split}" for number, split in enumerate(splits)]
    files = {f"{number}.png": number for number in range(len(splits))}
    write(images, files | {"metadata.csv": "".join(["file_name,split", *lines])})
    with refused(f"would be read as {read_as}; it must be splits") if is_refused else nullcontext():
        main([f"--data.path={images}", f"--out={out}", "--workers=1"])
    assert (out / "data").exists() != is_refused
    if not is_refused:
        assert ", ".join(splits_of(out)) == read_as


def test_one_command_a_folder(folder, tmp_path):
    with hold(tmp_path / "out", "out"), refused(r"out is .*, which another process is writing"):
        main(options(folder, tmp_path / "out"))


def test_a_full_disk_is_a_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mpp.prepare.complete", Mock(side_effect=OSError(28, "No space left")))
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left$"):
        main(options(folder, tmp_path / "out"))


def test_names_that_lead_out_are_cut(tmp_path):
    cells = [{"bytes": encoded(picture(1)), "path": "../../../../tmp/evil.png"}] * 2
    rows = datasets.Dataset.from_dict({"image": cells}, datasets.Features({"image": datasets.Image()}))
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    main([f"--data.path={tmp_path}/data", f"--out={tmp_path}/out"])
    prepared = splits_of(tmp_path / "out")["train"].cast_column("image", datasets.Image(decode=False))
    assert [cell["path"] for cell in prepared["image"]] == ["evil.png"] * 2
