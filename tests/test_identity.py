"""Records of images: what they tell apart, and runs that continue only on the same images and weights."""

import json
import shutil
from pathlib import Path

import torch
from colours import load
from conftest import CUT, put_picture, read_json, read_metrics, refused, weights_of

from mpp.config import ModelConfig
from mpp.config.parsing import read_yaml
from mpp.data.identity import differences, identify_images
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder


def test_a_run_inside_its_images_is_refused(pretrain, image_folder):
    with refused(r"run\.dir is .*run, inside the images"):
        pretrain(f"--data.path={image_folder}", dir=image_folder / "some" / "run")
    assert not (image_folder / "some").exists()


def records_of(folder: Path, **settings) -> dict:
    """The records of a folder's images, as a run that learns from labels has them."""
    parts = zip(("train", "held_out"), load(folder, eval_fraction=0.25, **settings), strict=True)
    return {name: identify_images(images, with_labels=True) for name, images in parts}


def test_a_record_tells_data_apart_and_not_places(image_folder, tmp_path):
    before = records_of(image_folder)

    def changes(folder: Path = image_folder, **settings) -> list[str]:
        return differences(before, records_of(folder, **settings))

    assert changes() == []
    copy = shutil.copytree(image_folder, tmp_path / "moved" / "elsewhere")
    assert changes(copy) == []
    assert changes(cut_seed=1) == [
        f"{part}: {field} changed" for part in ("train", "held_out") for field in ("chosen", "labels")
    ]
    file = image_folder / "cat" / "01.png"
    put_picture(file, 99)
    assert changes() == ["train: files changed", "held_out: files changed"]
    file.rename(image_folder / "dog" / "01.png")
    assert any("labels changed" in line for line in changes())
    put_picture(image_folder / "cat" / "00a.png", 98)
    assert "train: images was 9, is 10" in changes()
    not_asked = {"train": {"revision": None, "files": "same"}}  # of a hub that did not answer at the start
    one, other = ({"train": {"revision": digit * 40, "files": "same"}} for digit in "12")
    assert differences(not_asked, one) == []
    assert differences(other, one) == [f"train: revision was {'2' * 40}, is {'1' * 40}"]


def test_a_run_does_not_continue_on_other_images_or_from_other_weights(pretrain, stopped_at, tmp_path, image_folder):
    """A file that sorts first shifts all others, and with them the held-out images."""
    first, other = (export_random(tmp_path / name, seed) for seed, name in enumerate(("first", "other")))
    options = (f"--data.path={image_folder}", *CUT, f"--model.init_from={first}")
    stopped_at(3, *options)
    new, weights = image_folder / "cat" / "00.png", first / "model.safetensors"
    put_picture(new, 99)
    with refused(r"train: images was 9, is 10; .*files"):
        pretrain(*options)
    new.unlink()
    whole = weights.read_bytes()
    shutil.copy(other / "model.safetensors", first)
    with refused(r"model.init_from: weights changed"):
        pretrain(*options)
    assert max(read_metrics(tmp_path / "run")) == 3
    weights.write_bytes(whole)
    assert max(read_metrics(pretrain(*options))) == 4
    assert read_json(tmp_path / "run" / "data.json")["train"]["images"] == 9


def export_random(folder: Path, seed: int) -> Path:
    """Export an encoder of TINY's size with random weights."""
    torch.manual_seed(seed)
    encoder = build_encoder(ModelConfig(img_size=32, width=16, depth=2, heads=2))
    export_encoder(encoder, folder, 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    return folder


def test_a_run_continues_with_any_spelling_of_its_paths(pretrain, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = export_random(tmp_path / "first", 0)
    run = pretrain("--data.path=images", "--model.init_from=first", *CUT)
    file = run / "config.yaml"
    saved = read_yaml(file)
    assert (saved["data"]["path"], saved["model"]["init_from"]) == (str(image_folder), str(first))
    pretrain("--data.path=./images", f"--model.init_from={first}", *CUT)
    file.write_text(file.read_text().replace(f"{tmp_path}/", ""))
    pretrain("--data.path=images", "--model.init_from=first", *CUT)  # as earlier versions saved it
    with refused(r"model.init_from"):
        pretrain("--data.path=images", f"--model.init_from={export_random(tmp_path / 'other', 1)}", *CUT)


def test_a_run_continues_where_its_images_moved_to(pretrain, image_folder, tmp_path, monkeypatch):
    """Also a finished one: otherwise other images would pass for those that it was trained on."""
    monkeypatch.chdir(tmp_path)
    options = (*CUT, "--data.cut_seed=3")
    run = pretrain("--data.path=images", *options)
    encoder = weights_of(run)
    image_folder.rename(tmp_path / "moved")
    pretrain("--data.path=moved", *options)
    saved = (run / "config.yaml").read_text()
    assert f"path: {tmp_path}/moved\n" in saved and weights_of(run) == encoder
    other = shutil.copytree(tmp_path / "moved", tmp_path / "other")
    (other / "cat" / "01.png").unlink()
    with refused(r"other images or weights: train: images was \d+, is"):
        pretrain("--data.path=other", *options)
    assert (run / "config.yaml").read_text() == saved


def test_a_stream_is_known_by_its_files(pretrain, stopped_at, two_shards):
    """Contents and dates do not count: a file of the same size may have been copied. It goes on with the same bits."""
    options = (f"--data.path={two_shards}", "--data.streaming=true")
    whole = pretrain(*options, dir=two_shards.parent / "whole")
    stopped_at(3, *options)
    file, renamed = (two_shards / f"train-0000{number}-of-00002.parquet" for number in (1, 2))
    file.rename(renamed)
    with refused(r"other images or weights: train: files changed"):
        pretrain(*options)
    file.write_bytes(renamed.read_bytes())
    renamed.unlink()
    (two_shards / "README.md").write_text("what this is")
    record = two_shards.parent / "run" / "data.json"
    known = read_json(record)
    record.write_text(json.dumps(known | {"train": known["train"] | {"files": None}}))  # as one that was not listed
    assert weights_of(pretrain(*options)) == weights_of(whole)
    assert read_json(record) == known
