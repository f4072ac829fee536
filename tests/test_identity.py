"""Records of images: what they tell apart, and runs that continue only on the same images and weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import CUT, Killed, encoded, kill_at, picture, read_metrics

from mpp.config import Config, DataConfig, ModelConfig
from mpp.config.parsing import parse
from mpp.data.identity import differences, identify_images
from mpp.data.sources import load_image_datasets
from mpp.errors import UserError
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder
from mpp.training.run_folder import write_beginning


def test_a_hub_that_did_not_answer_at_the_start_does_not_keep_a_run_from_continuing():
    unknown = {"train": {"revision": None, "files": "same"}}
    one = {"train": {"revision": "1" * 40, "files": "same"}}
    other = {"train": {"revision": "2" * 40, "files": "same"}}
    assert differences(unknown, one) == []
    assert differences(other, one) == [f"train: revision was {'2' * 40}, is {'1' * 40}"]


def test_a_run_inside_its_images_is_refused(pretrain, image_folder):
    with pytest.raises(UserError, match=r"run\.dir is .*run, inside the images"):
        pretrain(f"--data.path={image_folder}", dir=image_folder / "some" / "run")
    assert not (image_folder / "some").exists()


def test_nodes_with_other_images_are_refused(tmp_path):
    """Copies on their own disks, say."""
    config = parse(Config, [f"--run.dir={tmp_path / 'run'}"])
    records = [{"train": {"files": "some"}}, {"train": {"files": "others"}}]
    with pytest.raises(UserError, match=r"other images or weights: train: files changed; or another node has others"):
        write_beginning(config, tmp_path / "run", records)
    assert not (tmp_path / "run").exists()
    write_beginning(config, tmp_path / "run", records[:1] * 2)
    with pytest.raises(UserError, match=r"other images or weights: train: files changed"):
        write_beginning(config, tmp_path / "run", records[1:])


def records_of(folder: Path, **settings) -> dict:
    """The records of a folder's images, as a run that learns from labels has them."""
    config = DataConfig(path=str(folder), eval_split=None, eval_fraction=0.25, **settings)
    train, held_out = load_image_datasets(config)
    return {"train": identify_images(train, with_labels=True), "held_out": identify_images(held_out, with_labels=True)}


def test_a_record_tells_data_apart_and_not_places(image_folder, tmp_path):
    before = records_of(image_folder)

    def changes(folder: Path = image_folder, **settings) -> list[str]:
        return differences(before, records_of(folder, **settings))

    assert changes() == []
    copy = shutil.copytree(image_folder, tmp_path / "moved" / "elsewhere")
    assert changes(copy) == []
    assert changes(cut_seed=1) == [
        "train: chosen changed",
        "train: labels changed",
        "held_out: chosen changed",
        "held_out: labels changed",
    ]
    file = image_folder / "cat" / "01.png"
    file.write_bytes(encoded(picture(99)))
    assert len(changes()) == 2
    assert all("files" in line for line in changes())
    file.rename(image_folder / "dog" / "01.png")
    assert any("labels changed" in line for line in changes())
    (image_folder / "cat" / "00a.png").write_bytes(encoded(picture(98)))
    assert "train: images was 9, is 10" in changes()


def test_a_run_does_not_continue_on_other_images(pretrain, tmp_path, image_folder, monkeypatch):
    """A file that sorts first shifts all others, and with them the held-out images."""
    options = (f"--data.path={image_folder}", *CUT)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 3)
        pretrain(*options)
    new = image_folder / "cat" / "00.png"
    new.write_bytes(encoded(picture(99)))
    with pytest.raises(UserError, match=r"train: images was 9, is 10; .*files"):
        pretrain(*options)
    assert max(read_metrics(tmp_path / "run")) == 3
    new.unlink()
    folder = pretrain(*options)
    assert json.loads((folder / "data.json").read_text())["train"]["images"] == 9


def test_a_run_does_not_continue_from_other_weights(pretrain, tmp_path, monkeypatch):
    first = export_random(tmp_path / "first", 0)
    other = export_random(tmp_path / "other", 1)
    options = (f"--model.init_from={first}",)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 3)
        pretrain(*options)
    weights = (first / "model.safetensors").read_bytes()
    shutil.copy(other / "model.safetensors", first)
    with pytest.raises(UserError, match=r"model.init_from: weights changed"):
        pretrain(*options)
    (first / "model.safetensors").write_bytes(weights)
    assert max(read_metrics(pretrain(*options))) == 4


def export_random(folder: Path, seed: int) -> Path:
    """Export an encoder of TINY's size with random weights."""
    torch.manual_seed(seed)
    encoder = build_encoder(ModelConfig(img_size=32, width=16, depth=2, heads=2))
    export_encoder(encoder, folder, 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    return folder


def test_replicates_never_move_the_test_set():
    def held_out(**settings):
        _, test = load_image_datasets(DataConfig(eval_split=None, **settings))
        return test.choose(10, DataConfig(**settings).cut_seed).origin.indices.tolist()

    assert held_out() == held_out(eval_seed=1) != held_out(cut_seed=1)


def test_a_run_continues_with_any_spelling_of_its_paths(pretrain, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = export_random(tmp_path / "first", 0)
    run = pretrain("--data.path=images", "--model.init_from=first", *CUT)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["data"]["path"], saved["model"]["init_from"]) == (str(image_folder), str(first))
    for path in ("images", "./images", str(image_folder)):
        pretrain(f"--data.path={path}", "--model.init_from=first", *CUT)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(tmp_path) + "/", ""))
    pretrain("--data.path=images", "--model.init_from=first", *CUT)  # as earlier versions saved it
    with pytest.raises(UserError, match=r"model.init_from"):
        pretrain("--data.path=images", f"--model.init_from={export_random(tmp_path / 'other', 1)}", *CUT)


def test_a_run_continues_where_its_images_moved_to(pretrain, image_folder, tmp_path, monkeypatch):
    """Also a finished one: otherwise other images would pass for those that it was trained on."""
    monkeypatch.chdir(tmp_path)
    options = (*CUT, "--data.cut_seed=3")
    run = pretrain("--data.path=images", *options)
    encoder = (run / "encoder" / "model.safetensors").read_bytes()
    image_folder.rename(tmp_path / "moved")
    pretrain("--data.path=moved", *options)
    saved = (run / "config.yaml").read_text()
    assert f"path: {tmp_path}/moved\n" in saved and (run / "encoder" / "model.safetensors").read_bytes() == encoder
    other = shutil.copytree(tmp_path / "moved", tmp_path / "other")
    (other / "cat" / "01.png").unlink()
    with pytest.raises(UserError, match=r"other images or weights: train: images was \d+, is"):
        pretrain("--data.path=other", *options)
    assert (run / "config.yaml").read_text() == saved


def test_a_stream_is_known_by_its_files(pretrain, two_shards, monkeypatch):
    """Their contents and dates do not count: a file of the same size may have been copied."""
    options = (f"--data.path={two_shards}", "--data.streaming=true")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 3)
        pretrain(*options)
    file = two_shards / "train-00001-of-00002.parquet"
    whole = file.read_bytes()
    file.rename(file.with_name("train-00002-of-00002.parquet"))
    with pytest.raises(UserError, match=r"other images or weights: train: files changed"):
        pretrain(*options)
    file.with_name("train-00002-of-00002.parquet").unlink()
    file.write_bytes(whole)
    record = two_shards.parent / "run" / "data.json"
    known = json.loads(record.read_text())
    record.write_text(json.dumps(known | {"train": known["train"] | {"files": None}}))  # as one that was not listed
    assert max(read_metrics(pretrain(*options))) == 4
    assert json.loads(record.read_text()) == known
