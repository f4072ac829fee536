"""Datasets made ready for training: images shrunk or kept, in parallel, resumed, reported."""

import io
import json
import re
import runpy
import shutil
import warnings
from pathlib import Path

import datasets
import numpy as np
import pytest
import tifffile
import torch
from colours import save
from conftest import encoded, picture
from PIL import Image
from torchvision.transforms.v2 import functional

from mpp import prepare
from mpp.config import DataConfig, ImagesConfig, PrepareConfig, SourceConfig
from mpp.data.data_path import BIRDS_FOLDER
from mpp.data.decoding.decode import decode
from mpp.data.shards import load_streamed
from mpp.data.sources import load_image_datasets
from mpp.errors import UnreadableImage, UserError
from mpp.prepare import NOTES_FOLDER, main, prepare_image
from mpp.runtime.files import hold

ORIENTATION = 274  # TIFF's tag
UPSIDE_DOWN = 3
OTHERS = "begun with these settings and images"


def pixels_of(number: int) -> np.ndarray:
    """An image (H, W, 3): those of even numbers are large."""
    return picture(number, (40, 48) if number % 2 else (90, 120))


def class_of(number: int) -> str:
    return "cat" if number % 3 else "dog"


@pytest.fixture
def folder(tmp_path):
    """Thirty images in two classes: large ones, small ones, and two that are broken; and one that is held out."""
    train, test = tmp_path / "images" / "train", tmp_path / "images" / "test"
    for class_folder in (train / "cat", train / "dog", test / "dog"):
        class_folder.mkdir(parents=True)
    for number in range(28):
        (train / class_of(number) / f"{number:02d}.png").write_bytes(encoded(pixels_of(number)))
    (train / "cat" / "empty.png").write_bytes(b"")
    (train / "dog" / "text.jpg").write_bytes(b"no image")
    (test / "dog" / "a.png").write_bytes(encoded(picture(99)))
    return tmp_path / "images"


def options(folder: Path, out: Path, *more: str) -> list[str]:
    return [f"--data.path={folder}", f"--out={out}", "--short_side=60", "--rows=8", "--workers=2", *more]


def prepared_rows(out: Path) -> datasets.Dataset:
    """The training images, as files."""
    return datasets.load_dataset(str(out))["train"].cast_column("image", datasets.Image(decode=False))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_large_images_are_shrunk_and_small_ones_kept_to_the_byte(folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(options(folder, out))
    assert names_in(out) == [".lock", NOTES_FOLDER, "data"]
    train_shards = [f"train-{number:05d}-of-00004.parquet" for number in range(4)]
    assert names_in(out / "data") == ["test-00000-of-00001.parquet", *train_shards]
    by_name = {Path(row["image"]["path"]).name: row for row in prepared_rows(out)}
    assert len(by_name) == 28
    assert list(by_name) != sorted(by_name)  # shuffled
    for number in range(28):
        row = by_name[f"{number:02d}.png"]
        assert row["label"] == class_of(number)
        assert row["image"]["path"] == f"train/{class_of(number)}/{number:02d}.png"  # nothing above it
        data, original = row["image"]["bytes"], pixels_of(number)
        if number % 2:
            assert data == encoded(original)
            continue
        assert data.startswith(b"\xff\xd8")  # JPEG
        shrunk = decode(data, ImagesConfig()).permute(1, 2, 0).numpy()
        assert shrunk.shape == (60, 80, 3)
        expected = Image.fromarray(original).resize((80, 60), Image.Resampling.BILINEAR)
        assert abs(np.array(expected, int) - shrunk).mean() < 4
    printed = capsys.readouterr().out
    assert "29 images" in printed
    assert "dropped 2 that cannot be decoded" in printed
    notes = [json.loads(file.read_text()) for file in (out / NOTES_FOLDER).glob("*.json")]
    assert sorted(line for of_shard in notes for line in of_shard["dropped"]) == [
        "train/cat/empty.png: an empty file instead of an image",
        "train/dog/text.jpg: no image file of a known sort",
    ]


def test_a_line_of_pixels_stays_one(tmp_path):
    for size in ((1, 300), (300, 1)):
        file = io.BytesIO()
        Image.new("RGB", size, (200, 30, 30)).save(file, "PNG")
        config = PrepareConfig(data=ImagesConfig(bands=(1, 2, 3)), out="out", short_side=8)
        with Image.open(io.BytesIO(prepare_image(file.getvalue(), config))) as prepared:
            assert prepared.mode == "RGB"
            assert prepared.size == size


def test_a_turned_tiff_of_many_bands_is_shrunk():
    pixels = picture(0, (80, 90))
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, extratags=[(ORIENTATION, "H", 1, UPSIDE_DOWN, True)])
    config = PrepareConfig(data=SourceConfig(bands=(3, 2, 1, 1), channels=4), out="out", format="npy", short_side=40)
    upright = pixels[::-1, ::-1, [2, 1, 0, 0]].copy()
    expected = functional.resize(torch.from_numpy(upright).permute(2, 0, 1), [40])
    prepared = prepare_image(file.getvalue(), config)
    assert torch.equal(decode(prepared, ImagesConfig(channels=4)), expected)


def test_plain_pixels_lose_nothing(folder, tmp_path):
    main(options(folder, tmp_path / "out", "--format=ppm"))
    rows = prepared_rows(tmp_path / "out")
    assert len(rows) == 28
    for row in rows:
        number = int(Path(row["image"]["path"]).stem)
        expected = torch.from_numpy(pixels_of(number)).permute(2, 0, 1)
        if number % 2 == 0:
            expected = functional.resize(expected, [60], antialias=True)
        data = row["image"]["bytes"]
        assert data.startswith(b"P6\n")
        assert torch.equal(decode(data, ImagesConfig()), expected)
        assert np.array_equal(np.array(Image.open(io.BytesIO(data))), expected.permute(1, 2, 0).numpy())


def test_prepared_images_are_trained_on_indexed_or_streamed(folder, tmp_path, pretrain):
    out = tmp_path / "out"
    main(options(folder, out))
    train, test = load_image_datasets(DataConfig(path=str(out)))
    assert (len(train), len(test)) == (28, 1)
    assert sorted(set(train.labels)) == [0, 1]
    shards, known, _ = load_streamed(DataConfig(path=str(out), streaming=True), 9, 9)
    assert shards.count == 4
    assert len(known) == 9
    pretrain(f"--data.path={out}", "--data.streaming=true")


def test_a_broken_off_command_continues(folder, tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    main(options(folder, whole))
    main(options(folder, out))
    for number in (1, 3):
        (out / "data" / f"train-{number:05d}-of-00004.parquet").unlink()
    (out / "data" / ".train-00003-of-00004.parquet.partial").write_bytes(b"half")
    written_at = {path: path.stat().st_mtime_ns for path in (out / "data").glob("*.parquet")}
    capsys.readouterr()
    main(options(folder, out))
    assert "5 shards, 3 of them there already" in capsys.readouterr().out
    kept = [path for path, time in written_at.items() if path.stat().st_mtime_ns == time]
    assert len(written_at) == len(kept) == 3
    for file in (whole / "data").iterdir():
        assert file.read_bytes() == (out / "data" / file.name).read_bytes()


def test_a_strip_that_jpeg_does_not_hold_is_dropped():
    strip = encoded(np.zeros((3, 120_000, 3), np.uint8))
    with pytest.raises(UnreadableImage, match=r"jpeg does not hold 80000 x 2 pixels; --format ppm or npy does"):
        prepare_image(strip, PrepareConfig(short_side=2))


def test_names_that_lead_out_write_nothing_there(tmp_path):
    features = datasets.Features({"image": datasets.Image(decode=False)})
    cells = [{"bytes": encoded(picture(1)), "path": "../../../../tmp/evil.png"}] * 2
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"image": cells}, features=features).to_parquet(tmp_path / "data" / "train.parquet")
    before = {path for path in tmp_path.rglob("*")}
    main([f"--data.path={tmp_path / 'data'}", f"--out={tmp_path / 'out'}", "--data.image_column=image"])
    assert {path for path in tmp_path.rglob("*") if "out" not in path.parts} == before
    assert datasets.load_dataset(str(tmp_path / "out"))["train"].num_rows == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--short_side=0"], "short_side is 0; it must be a"),
        (["--quality=101"], "quality is 101; it must be a"),
        (["--data.path=null"], "data.path is null; it must be a dataset"),
        (["--out=~/shards"], "out is ~/shards; it must be a path on this machine"),
        (["--out=gs://bucket/shards"], "out is gs://bucket/shards; it must be a path on this machine"),
        (["--data.path=./nowhere"], "data.path is ./nowhere, which does not exist"),
        (["--data.label_column=kind"], "data.label_column is kind; data.path .* has image, label"),
    ],
)
def test_bad_settings_are_named(folder, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        main([*options(folder, tmp_path / "out"), *settings])
    assert not (tmp_path / "out" / "data").exists()


def test_splits_keep_their_names(tmp_path):
    rows = datasets.load_dataset("parquet", data_files=str(BIRDS_FOLDER / "test-00000-of-00001.parquet"), split="train")
    sizes = {"train": 5, "train_extra": 3, "unlabeled": 7}
    parts = datasets.DatasetDict({name: rows.select(range(size)) for name, size in sizes.items()})
    parts.save_to_disk(tmp_path / "saved")
    main([f"--data.path={tmp_path / 'saved'}", f"--out={tmp_path / 'out'}", "--rows=4"])
    loaded = datasets.load_dataset(str(tmp_path / "out"))
    assert {name: split.num_rows for name, split in loaded.items()} == sizes


@pytest.mark.parametrize(
    ("split", "read_as"),
    [
        ("hold-out", "train"),
        ("held out", "train"),
        ("extra_train", "train"),
        ("test set 2", "test"),
        ("extra.val", "validation"),
        ("site/1", "1"),
        ("../1", "1"),
    ],
)
def test_splits_that_would_be_read_as_others_are_refused(tmp_path, split, read_as):
    splits = ("train", split)
    lines = [f"{number}.png,{splits[number % 2]}" for number in range(4)]
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number)))
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,split", *lines]))
    out = tmp_path.parent / f"{tmp_path.name}-out"
    with pytest.raises(UserError, match=f"would be read as .*{read_as}.*; it must be splits"):
        main([f"--data.path={tmp_path}", f"--out={out}"])
    assert not (out / "data").exists()


def test_words_for_usual_splits_are_these_splits(tmp_path):
    rows = datasets.load_dataset("parquet", data_files=str(BIRDS_FOLDER / "test-00000-of-00001.parquet"), split="train")
    parts = {name: rows.select(range(4)) for name in ("Train", "val", "dev")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "three")
    with pytest.raises(UserError, match="would be read as train, validation, validation"):
        main([f"--data.path={tmp_path / 'three'}", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out" / "data").exists()
    datasets.DatasetDict({name: parts[name] for name in ("Train", "val")}).save_to_disk(tmp_path / "two")
    main([f"--data.path={tmp_path / 'two'}", f"--out={tmp_path / 'out'}"])
    train, held_out = load_image_datasets(SourceConfig(path=str(tmp_path / "out")))
    assert (len(train), len(held_out), held_out.split) == (4, 4, "validation")


def test_one_command_a_folder(folder, tmp_path):
    with (
        hold(tmp_path / "out", "out"),
        pytest.raises(ValueError, match=r"out is .*, which another process is writing"),
    ):
        main(options(folder, tmp_path / "out"))


def test_another_folders_shards_are_not_mixed(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    main(options(folder, out))
    monkeypatch.setattr(prepare, "write_missing", lambda *_: pytest.fail("it was prepared"))
    with pytest.raises(ValueError, match=OTHERS):
        main(options(folder, out, "--quality=50"))
    new = folder / "train" / "cat" / "more.png"
    new.write_bytes(encoded(picture(0)))
    with pytest.raises(ValueError, match=OTHERS):
        main(options(folder, out))
    new.replace(folder / "train" / "cat" / "empty.png")  # as many as before
    with pytest.raises(ValueError, match=OTHERS):
        main(options(folder, out, "--rows=9"))
    with pytest.raises(ValueError, match=OTHERS):
        main(options(folder, out))
    shutil.rmtree(folder / "test")
    with pytest.raises(ValueError, match=OTHERS):
        main(options(folder, out))


def test_shards_are_not_written_among_the_images_or_other_files(folder, tmp_path):
    with pytest.raises(ValueError, match=r"out is .*shards; it must be outside of .*images: its"):
        main(options(folder, folder / "shards"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"out is .*other; it must be a new folder"):
        main(options(folder, tmp_path / "other"))


def test_shards_are_written_to_a_folder_of_any_name(tmp_path):
    file = tmp_path / "data.parquet"
    write_labelled(file, [0, 1])
    out = tmp_path / "2026 ~ [a]*"
    main([f"--data.path={file}", f"--out={out}", "--workers=1"])
    assert names_in(out / "data") == ["train-00000-of-00001.parquet"]
    train, test = load_image_datasets(SourceConfig(path=str(out)))
    assert (len(train), len(test)) == (1, 1)


def test_images_that_are_all_broken_are_no_dataset(tmp_path, capsys):
    for number in range(3):
        save(tmp_path / "images" / f"{number}.png", number)
    with pytest.raises(UserError, match=r"out is .*out; it must be of images of which some can be decoded"):
        main([f"--data.path={tmp_path / 'images'}", f"--out={tmp_path / 'out'}", "--workers=1", "--data.bands=[7,8,9]"])
    output = capsys.readouterr().out
    assert "0.png: 3 bands; data.bands asks for 9" in output
    assert "next:" not in output


def test_names_are_from_the_folder_on_whatever_way_leads_there(tmp_path):
    cell = {"bytes": None, "path": str(tmp_path / "images" / "cat" / "1.png")}
    for way in (tmp_path / "images", f"{tmp_path}/shards/../images"):
        assert prepare.relative_name(cell, str(way)) == "cat/1.png"
    assert prepare.relative_name(cell, str(tmp_path / "elsewhere")) == "1.png"


def test_columns_that_shards_leave_out_are_named(folder, tmp_path, capsys):
    rows = [f"cat/{number:02d}.png,Felis,Rome" for number in (1, 2, 4)]
    (folder / "train" / "labels.csv").write_text("\n".join(["file,species,city", *rows]))
    main(options(folder, tmp_path / "out"))
    assert "without species, city; data.label_column names the labels\n" in capsys.readouterr().out
    main(options(folder, tmp_path / "species", "--data.label_column=species"))
    assert "without city; data.label_column names" in capsys.readouterr().out


def test_other_labels_are_not_mixed(tmp_path):
    file = tmp_path / "data.parquet"
    arguments = [f"--data.path={file}", f"--out={tmp_path / 'out'}", "--workers=1"]
    write_labelled(file, [0, 1, 0, 1])
    main(arguments)
    write_labelled(file, [0, 1, 1, 1])
    with pytest.raises(UserError, match=OTHERS):
        main(arguments)


def write_labelled(file: Path, labels: list[int]) -> None:
    """Write the same images with these labels."""
    cells = [{"bytes": encoded(picture(number)), "path": None} for number in range(len(labels))]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features).to_parquet(file)


def test_the_command(folder, tmp_path, monkeypatch, capsys):
    """As `python -m mpp.prepare` runs it."""
    monkeypatch.setattr("sys.argv", ["mpp.prepare", *options(folder, tmp_path / "out")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it is imported already
        runpy.run_module("mpp.prepare", run_name="__main__", alter_sys=True)
    assert re.search(r"next: mpp pretrain --data.path \S+/\w+ ", capsys.readouterr().out)
    notes = json.loads((tmp_path / "out" / NOTES_FOLDER / "test-00000-of-00001.json").read_text())
    assert notes["kept"] == 1
