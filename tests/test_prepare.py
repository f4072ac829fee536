"""Datasets made ready for training: what becomes of each image, in parallel, resumed, reported."""

import io
import json
import os
import runpy
import shutil
import tarfile
import warnings
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest
import tifffile
import torch
from conftest import encoded, picture
from PIL import Image
from torchvision.transforms.v2 import functional

from mpp import prepare
from mpp.config import DataConfig, ImagesConfig, PrepareConfig, SourceConfig
from mpp.data.data_path import BIRDS_FOLDER
from mpp.data.decoding.decode import decode
from mpp.data.sources import load_image_datasets
from mpp.data.stream_sources import load_streamed
from mpp.errors import UnreadableImage, UserError
from mpp.prepare import NOTES_FOLDER, main, prepare_image
from mpp.runtime.lock import hold


@pytest.fixture
def folder(tmp_path):
    """Thirty images in two classes: large ones, small ones, an upright one, and two that are broken."""
    for number in range(28):
        size = (40, 48) if number % 2 else (90, 120)
        file = tmp_path / "images" / "train" / ("cat" if number % 3 else "dog") / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(number, size)))
    (tmp_path / "images" / "train" / "cat" / "empty.png").write_bytes(b"")
    (tmp_path / "images" / "train" / "dog" / "text.jpg").write_bytes(b"no image")
    (tmp_path / "images" / "test" / "dog").mkdir(parents=True)
    (tmp_path / "images" / "test" / "dog" / "a.png").write_bytes(encoded(picture(99)))
    return tmp_path / "images"


def options(folder: Path, out: Path, *more: str) -> list[str]:
    return [f"--data.path={folder}", f"--out={out}", "--short_side=60", "--rows=8", "--workers=2", *more]


def test_large_images_are_shrunk_and_small_ones_kept_to_the_byte(folder, tmp_path, capsys):
    main(options(folder, tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*")) == [".lock", NOTES_FOLDER, "data"]
    assert sorted(path.name for path in (tmp_path / "out" / "data").glob("*")) == [
        "test-00000-of-00001.parquet",
        *(f"train-{n:05d}-of-00004.parquet" for n in range(4)),
    ]
    loaded = datasets.load_dataset(str(tmp_path / "out"))
    assert loaded["train"].num_rows == 28
    rows = loaded["train"].cast_column("image", datasets.Image(decode=False))
    seen = {Path(row["image"]["path"]).name: row for row in rows}
    assert list(seen) != sorted(seen)  # shuffled
    for number in range(28):
        row, size = seen[f"{number:02d}.png"], (40, 48) if number % 2 else (90, 120)
        assert row["label"] == ("cat" if number % 3 else "dog")
        assert row["image"]["path"] == f"train/{'cat' if number % 3 else 'dog'}/{number:02d}.png"  # nothing above it
        data, original = row["image"]["bytes"], encoded(picture(number, size))
        if number % 2:
            assert data == original
        else:
            assert data[:2] == b"\xff\xd8" and decode(data, ImagesConfig()).shape == (3, 60, 80)
            expected = Image.fromarray(picture(number, size)).resize((80, 60), Image.Resampling.BILINEAR)
            assert abs(np.array(expected, int) - decode(data, ImagesConfig()).permute(1, 2, 0).numpy()).mean() < 4
    said = capsys.readouterr().out
    assert "29 images" in said and "dropped 2 that cannot be decoded" in said
    dropped = (tmp_path / "out" / NOTES_FOLDER / "dropped.txt").read_text().splitlines()
    assert dropped == [
        "train/cat/empty.png: an empty file instead of an image",
        "train/dog/text.jpg: no image file of a known sort",
    ]


def test_a_line_of_pixels_stays_one(tmp_path):
    for size in ((1, 300), (300, 1)):
        file = io.BytesIO()
        Image.new("RGB", size, (200, 30, 30)).save(file, "PNG")
        config = PrepareConfig(data=ImagesConfig(bands=(1, 2, 3)), out="out", short_side=8)
        with Image.open(io.BytesIO(prepare_image(file.getvalue(), config))) as found:
            assert found.mode == "RGB" and found.size == size


def test_a_turned_tiff_of_many_bands_is_shrunk():
    tifffile.imwrite(file := io.BytesIO(), picture(0, (80, 90)), extratags=[(274, "H", 1, 3, True)])
    config = PrepareConfig(data=SourceConfig(bands=(3, 2, 1, 1), channels=4), out="out", format="npy", short_side=40)
    expected = functional.resize(
        torch.from_numpy(picture(0, (80, 90))[::-1, ::-1, [2, 1, 0, 0]].copy()).permute(2, 0, 1), [40]
    )
    assert torch.equal(decode(prepare_image(file.getvalue(), config), ImagesConfig(channels=4)), expected)


def test_plain_pixels_lose_nothing(folder, tmp_path):
    main(options(folder, tmp_path / "out", "--format=ppm"))
    rows = datasets.load_dataset(str(tmp_path / "out"))["train"].cast_column("image", datasets.Image(decode=False))
    assert len(rows) == 28
    for row in rows:
        number = int(Path(row["image"]["path"]).stem)
        original = torch.from_numpy(picture(number, (40, 48) if number % 2 else (90, 120))).permute(2, 0, 1)
        expected = original if number % 2 else functional.resize(original, [60], antialias=True)
        data = row["image"]["bytes"]
        assert data.startswith(b"P6\n") and torch.equal(decode(data, ImagesConfig()), expected)
        assert np.array_equal(np.array(Image.open(io.BytesIO(data))), expected.permute(1, 2, 0).numpy())


def test_what_is_prepared_is_trained_on_either_way(folder, tmp_path, pretrain):
    main(options(folder, tmp_path / "out"))
    train, test = load_image_datasets(DataConfig(path=str(tmp_path / "out")))
    assert (len(train), len(test)) == (28, 1) and sorted(set(train.labels)) == [0, 1]
    shards, known, _ = load_streamed(DataConfig(path=str(tmp_path / "out"), streaming=True), 9, 9)
    assert shards.count == 4 and len(known) == 9
    pretrain(f"--data.path={tmp_path / 'out'}", "--data.streaming=true")


def test_a_broken_off_command_goes_on(folder, tmp_path, monkeypatch, capsys):
    main(options(folder, tmp_path / "whole"))
    monkeypatch.setattr(prepare, "write_all", lambda shards, workers: stop_after(2, shards))
    with pytest.raises(KeyboardInterrupt):
        main(options(folder, tmp_path / "out"))
    (tmp_path / "out" / "data" / ".train-00003-of-00004.parquet.partial").write_bytes(b"half")
    monkeypatch.undo()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("data/*.parquet")}
    assert len(before) == 2
    capsys.readouterr()
    main(options(folder, tmp_path / "out"))
    assert "5 shards, 2 of them there already" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    files = sorted(path.name for path in (tmp_path / "whole" / "data").glob("*"))
    assert all((tmp_path / "whole/data" / f).read_bytes() == (tmp_path / "out/data" / f).read_bytes() for f in files)


def stop_after(count, shards):
    for number, shard in enumerate(shards):
        if number == count:
            raise KeyboardInterrupt
        prepare.write_shard(shard)
        yield shard


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive_is_a_folder(folder, tmp_path, kind):
    file = tmp_path / f"images.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            for path in sorted((folder / "train").rglob("*.*")):
                archive.write(path, path.relative_to(folder))
    else:
        with tarfile.open(file, "w:gz") as archive:
            archive.add(folder / "train", "train")
    main(options(file, tmp_path / "out"))
    train, _ = load_image_datasets(SourceConfig(path=str(tmp_path / "out"), eval_split=None))
    assert len(train) >= 26 and set(train.labels) == {0, 1}
    paths = [row["image"]["path"] for row in train.rows]
    assert not any(os.path.isabs(path) or ".." in path for path in paths)


def test_an_archive_is_unpacked_whole_and_again_where_it_changed(tmp_path, monkeypatch):
    def write(count):
        with zipfile.ZipFile(file, "w") as archive:
            for number in range(count):
                archive.writestr(f"{number}.png", encoded(picture(number)))
        return SourceConfig(path=str(file), eval_split=None, eval_fraction=0.5)

    def breaks(manager, path):
        (Path(manager.download_config.cache_dir) / "extracted").mkdir(parents=True)
        raise OSError(28, "No space left on device")

    file = tmp_path / "images.zip"
    config = write(4)
    with monkeypatch.context() as broken:
        broken.setattr(datasets.DownloadManager, "extract", breaks)
        with pytest.raises(UserError, match=r"images\.zip, which cannot be loaded: .*No space left"):
            load_image_datasets(config)
    assert sum(map(len, load_image_datasets(config))) == 4
    assert sum(map(len, load_image_datasets(write(6)))) == 6
    file.write_bytes(b"no archive")
    monkeypatch.chdir(tmp_path)
    for path in (str(file), "images.zip"):
        with pytest.raises(UserError, match=r"a single file must be"):
            load_image_datasets(SourceConfig(path=path))
    assert file.read_bytes() == b"no archive"


def test_a_strip_that_jpeg_does_not_hold_is_dropped():
    strip = encoded(np.zeros((3, 120_000, 3), np.uint8))
    with pytest.raises(UnreadableImage, match=r"JPEG does not hold 80000 x 2 pixels; --format ppm or npy does"):
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
        (["--short_side=0"], "short_side is 0; it must be at least 1"),
        (["--quality=101"], "quality is 101; it must be from 1 to 100"),
        (["--data.path=null"], "data.path is null; it must be a dataset"),
        (["--data.path=./nowhere"], "data.path is ./nowhere, which does not exist"),
        (["--data.label_column=kind"], "data.label_column is kind; it must be image, label"),
    ],
)
def test_bad_settings_are_named(folder, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        main([*options(folder, tmp_path / "out"), *settings])
    assert not (tmp_path / "out").exists()


def test_other_settings_are_named_before_images_are_looked_for(folder, tmp_path):
    """The folder may have noted a commit, which these images would not have."""
    main(options(folder, tmp_path / "out"))
    noted = tmp_path / "out" / ".prepare" / "images.json"
    noted.write_text(
        json.dumps({name: of | {"revision": "0" * 40} for name, of in json.loads(noted.read_text()).items()})
    )
    with pytest.raises(UserError, match=r"prepared with another data\.path; choose another out"):
        main([*options(folder, tmp_path / "out"), "--data.path=somebody/else"])


def test_splits_keep_their_names(tmp_path):
    rows = datasets.load_dataset("parquet", data_files=str(BIRDS_FOLDER / "test-00000-of-00001.parquet"), split="train")
    sizes = {"train": 5, "train_extra": 3, "unlabeled": 7}
    parts = datasets.DatasetDict({name: rows.select(range(size)) for name, size in sizes.items()})
    parts.save_to_disk(tmp_path / "saved")
    main([f"--data.path={tmp_path / 'saved'}", f"--out={tmp_path / 'out'}", "--rows=4"])
    loaded = datasets.load_dataset(str(tmp_path / "out"))
    assert {name: split.num_rows for name, split in loaded.items()} == sizes


def test_one_command_a_folder(folder, tmp_path):
    with (
        hold(tmp_path / "out", "out"),
        pytest.raises(ValueError, match=r"out is .*, which process \d+ on .* is writing"),
    ):
        main(options(folder, tmp_path / "out"))


def test_another_folders_shards_are_not_mixed(folder, tmp_path, monkeypatch):
    main(options(folder, tmp_path / "out"))
    with pytest.raises(ValueError, match="prepared with another quality; choose another out"):
        main(options(folder, tmp_path / "out", "--quality=50"))
    with monkeypatch.context() as context:
        context.setattr(prepare, "write_all", lambda *_: pytest.fail("it was prepared"))
        (folder / "train" / "cat" / "more.png").write_bytes(encoded(picture(0)))
        with pytest.raises(ValueError, match=r"prepared of other images .*30.*31"):
            main(options(folder, tmp_path / "out"))
        (folder / "train" / "cat" / "more.png").replace(folder / "train" / "cat" / "empty.png")  # as many as before
        with pytest.raises(ValueError, match="prepared with another rows"):
            main(options(folder, tmp_path / "out", "--rows=9"))
        with pytest.raises(ValueError, match=r"prepared of other images \(train: the files .* changed\)"):
            main(options(folder, tmp_path / "out"))
        shutil.rmtree(folder / "test")
        with pytest.raises(ValueError, match="test: the split is gone"):
            main(options(folder, tmp_path / "out"))
    with pytest.raises(ValueError, match=r"out is .*shards; it must be outside of .*images: its"):
        main(options(folder, folder / "shards"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="which holds something else"):
        main(options(folder, tmp_path / "other"))


def test_other_labels_are_not_mixed(tmp_path):
    files = tmp_path / "data.parquet"
    cells = [{"bytes": encoded(picture(number)), "path": None} for number in range(4)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    words = [f"--data.path={files}", f"--out={tmp_path / 'out'}", "--workers=1"]
    for labels in ([0, 1, 0, 1], [0, 1, 1, 1]):
        datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features).to_parquet(files)
        if labels[2] == 0:
            main(words)
    with pytest.raises(UserError, match=r"prepared of other images \(train: labels changed\)"):
        main(words)


def test_the_command(folder, tmp_path, monkeypatch, capsys):
    """As `python -m mpp.prepare` runs it."""
    monkeypatch.setattr("sys.argv", ["mpp.prepare", *options(folder, tmp_path / "out")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it is imported already
        runpy.run_module("mpp.prepare", run_name="__main__", alter_sys=True)
    assert "next: mpp pretrain --data.path" in capsys.readouterr().out
    notes = json.loads((tmp_path / "out" / NOTES_FOLDER / "test-00000-of-00001.json").read_text())
    assert notes["kept"] == 1
