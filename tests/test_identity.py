"""Records of images: what they tell apart, and runs that continue only on the same images and weights."""

import json
import shutil

import torch
from colours import load
from conftest import CUT, killed_at, put_picture, read_json, read_metrics, refused, weights_of

from mpp.config import ModelConfig
from mpp.config.parsing import read_yaml
from mpp.data.identity import differences, identify_images
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder


def test_a_run_inside_its_images_is_refused(pretrain, image_folder):
    with refused(r"run\.dir is .*run, inside the images"):
        pretrain(f"--data.path={image_folder}", dir=image_folder / "some" / "run")
    assert not (image_folder / "some").exists()


def records_of(folder, **settings):
    """The records of a folder's images, as a run that learns from labels has them."""
    parts = zip(("train", "held_out"), load(folder, eval_fraction=0.25, **settings), strict=True)
    return {name: identify_images(images, with_labels=True) for name, images in parts}


def test_a_record_tells_data_apart_and_not_places(image_folder, tmp_path):
    before = records_of(image_folder)

    def changes(folder=image_folder, **settings):
        return differences(before, records_of(folder, **settings))

    assert changes() == []
    assert changes(shutil.copytree(image_folder, tmp_path / "moved" / "elsewhere")) == []
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


def export_random(folder, seed):
    """Export an encoder of TINY's size with random weights."""
    torch.manual_seed(seed)
    encoder = build_encoder(ModelConfig(img_size=32, width=16, depth=2, heads=2))
    export_encoder(encoder, folder, 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    return folder


def test_a_run_continues_on_its_own_images_from_its_own_weights_alone(pretrain, image_folder, tmp_path, monkeypatch):
    """Also a finished one. A file that sorts first shifts all others, and with them the held-out images."""
    monkeypatch.chdir(tmp_path)
    first, second = (export_random(tmp_path / name, seed) for seed, name in enumerate(("first", "second")))
    new, weights = image_folder / "cat" / "00.png", first / "model.safetensors"

    def train(images="images", start="first"):
        return pretrain(f"--data.path={images}", f"--model.init_from={start}", *CUT, "--data.cut_seed=3")

    with killed_at(3):
        train()
    put_picture(new, 99)
    with refused(r"train: images was 9, is 10; .*files"):
        train()
    new.unlink()
    whole = weights.read_bytes()
    shutil.copy(second / "model.safetensors", first)
    with refused(r"model.init_from: weights changed"):
        train()
    assert max(read_metrics(tmp_path / "run")) == 3
    weights.write_bytes(whole)
    run = train()
    assert max(read_metrics(run)) == 4
    assert read_json(run / "data.json")["train"]["images"] == 9

    file, encoder = run / "config.yaml", weights_of(run)
    saved = read_yaml(file)
    assert (saved["data"]["path"], saved["model"]["init_from"]) == (str(image_folder), str(first))
    train("./images", first)
    file.write_text(file.read_text().replace(f"{tmp_path}/", ""))
    train()  # as earlier versions saved it
    with refused(r"model.init_from"):
        train(start=second)

    image_folder.rename(tmp_path / "moved")
    train("moved")
    text = file.read_text()
    assert f"path: {tmp_path}/moved\n" in text and weights_of(run) == encoder
    others = shutil.copytree(tmp_path / "moved", tmp_path / "other")
    (others / "cat" / "01.png").unlink()
    with refused(r"other images or weights: train: images was \d+, is"):
        train("other")
    shutil.rmtree(tmp_path / "moved")
    train("moved")  # a finished run needs no images
    assert file.read_text() == text


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
