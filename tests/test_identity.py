"""Which images a run is of: told apart, held to, and taken by evaluation."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import Killed, dataset_of, encoded, kill_at, picture, read_metrics

from evaluation import fewshot, supervised
from evaluation.config import FinetuneConfig, KnnConfig
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.provenance import check_labels_unseen
from evaluation.frozen.results import report_path, report_suffix
from mpp.config import DataConfig, ModelConfig, SourceConfig
from mpp.data import sources
from mpp.data.identity import differences, identify_images
from mpp.data.sources import load_image_datasets
from mpp.errors import UserError
from mpp.models.encoder import build_encoder
from mpp.models.exporting import export_encoder

CUT = ("--data.eval_split=null", "--data.eval_fraction=0.25")
FAST = ("--data.workers=0", "--precision=fp32", "--threads=1", "--shots=1", "--seeds=0")


def test_fine_tuning_shows_images_as_the_run_did(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {path: here, channels: 1, flip: false, eval_crop: 1.0}")
    (tmp_path / "own.yaml").write_text("data: {eval_crop: 0.5}")
    (tmp_path / "encoder").mkdir()
    words = [f"--encoder={tmp_path}", "--data.path=elsewhere"]
    for more, shown in (
        ((), (False, 1.0)),
        (("--data.flip=true", "--data.eval_crop=0.875"), (True, 0.875)),
        ((f"--config={tmp_path / 'own.yaml'}",), (False, 0.5)),
    ):
        data = parse_with_images(FinetuneConfig, [*words, *more], "finetune").data
        assert (data.flip, data.eval_crop) == shown
    assert parse_with_images(KnnConfig, words, "knn").data.channels == 1
    named = [report_suffix(parse_with_images(KnnConfig, given, "knn")) for given in (words, words[:1])]
    named += [report_suffix(KnnConfig(encoder=str(tmp_path)))]  # the package's, from Python
    named += [report_suffix(parse_with_images(KnnConfig, [*words, "--data.label_column=kind"], "knn"))]
    assert [name.rpartition("_")[0] for name in named] == ["_elsewhere", "", "_birds", "_elsewhere"]
    assert named[1] == "" and named[0] != named[3]  # the run's own images are as usual


def test_a_hub_that_did_not_answer_at_the_start_does_not_keep_a_run_from_going_on():
    one, other = ({"train": {"revision": revision, "files": "same"}} for revision in ("1" * 40, "2" * 40))
    assert differences({"train": {"revision": None, "files": "same"}}, one) == []
    assert differences(other, one) == [f"train: revision on the hub was {'2' * 40}, is {'1' * 40}"]


def test_a_run_inside_its_images_is_refused(pretrain, image_folder):
    with pytest.raises(UserError, match=r"run\.dir is .*run, inside data\.path .*: its pictures would join the images"):
        pretrain(f"--data.path={image_folder}", dir=image_folder / "some" / "run")
    assert not (image_folder / "some").exists()


def test_where_nothing_can_be_written_is_said_before_anything_is_done(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"file/evaluation/x\.json cannot be written \(.*\); name another place by --out"
    ):
        report_path(str(tmp_path / "file" / "evaluation" / "x.json"), "runs/birds", "x.json")
    assert report_path(None, str(tmp_path), "x.json") == tmp_path / "evaluation" / "x.json"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def both(folder, **settings) -> dict:
    """The record of a folder's images, as a run that learns from labels has it."""
    parts = load_image_datasets(DataConfig(path=str(folder), eval_split=None, eval_fraction=0.25, **settings))
    return {name: identify_images(part, labels=True) for name, part in zip(("train", "held_out"), parts, strict=True)}


def test_a_record_tells_data_apart_and_not_places(image_folder, tmp_path):
    known = both(image_folder)
    assert differences(known, both(image_folder)) == []
    shutil.copytree(image_folder, tmp_path / "moved" / "elsewhere")
    assert differences(known, both(tmp_path / "moved" / "elsewhere")) == []
    assert differences(known, both(image_folder, cut_seed=1)) == [
        f"{part}: {word} changed" for part in known for word in ("which of them are chosen", "labels")
    ]
    file = image_folder / "cat" / "01.png"
    file.write_bytes(encoded(picture(99)))
    assert all("the files" in line for line in differences(known, both(image_folder)))
    assert len(differences(known, both(image_folder))) == 2
    file.rename(image_folder / "dog" / "01.png")
    assert any("labels changed" in line for line in differences(known, both(image_folder)))
    (image_folder / "cat" / "00a.png").write_bytes(encoded(picture(98)))
    assert "train: number of images was 9, is 10" in differences(known, both(image_folder))


def test_a_run_does_not_go_on_with_other_images(pretrain, tmp_path, image_folder, monkeypatch):
    """A file that sorts first shifts all others, and with them what is held out."""
    options = (f"--data.path={image_folder}", *CUT)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 3)
        pretrain(*options)
    new = image_folder / "cat" / "00.png"
    new.write_bytes(encoded(picture(99)))
    with pytest.raises(
        UserError,
        match=r"started with other images or weights: train: number of images was 9, is 10; .*files",
    ):
        pretrain(*options)
    assert max(read_metrics(tmp_path / "run")) == 3
    new.unlink()
    folder = pretrain(*options)
    assert json.loads((folder / "data.json").read_text())["train"]["images"] == 9


def test_a_run_does_not_go_on_from_other_weights(pretrain, tmp_path, monkeypatch):
    first, other = (export(tmp_path / name, seed) for seed, name in enumerate(("first", "other")))
    options = (f"--model.init_from={first}",)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 3)
        pretrain(*options)
    weights = (first / "model.safetensors").read_bytes()
    shutil.copy(other / "model.safetensors", first)
    with pytest.raises(UserError, match=r"started with other images or weights: model\.init_from: weights changed; "):
        pretrain(*options)
    (first / "model.safetensors").write_bytes(weights)
    assert max(read_metrics(pretrain(*options))) == 4


def export(folder, seed):
    """An encoder of TINY's size with random weights."""
    torch.manual_seed(seed)
    encoder = build_encoder(ModelConfig(img_size=32, width=16, depth=2, heads=2))
    export_encoder(encoder, folder, 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    return folder


def test_replicates_never_move_the_test_set():
    def held_out(**settings):
        _, test = load_image_datasets(DataConfig(eval_split=None, **settings))
        return test.choose(10, DataConfig(**settings).cut_seed).origin.indices.tolist()

    assert held_out() == held_out(eval_seed=1) != held_out(cut_seed=1)


def test_evaluation_takes_the_runs_own_images(pretrain, image_folder, tmp_path, capsys):
    folder = pretrain(f"--data.path={image_folder}", *CUT, "--data.cut_seed=3", "--data.train_images=8")
    capsys.readouterr()
    fewshot.main([f"--encoder={folder}", *FAST])
    said = capsys.readouterr().out
    assert f"the images of {folder}: --data.path {image_folder} --data.eval_split null --data.eval_fraction" in said
    assert "8 labelled images to learn from, 3 to judge by" in said
    protocol = json.loads(next((folder / "evaluation").glob("fewshot*.json")).read_text())["protocol"]
    assert protocol["data"]["path"] == str(image_folder) and protocol["data"]["cut_seed"] == 3
    told = parse_with_images(fewshot.FewshotConfig, [f"--encoder={folder / 'encoder'}", "--data.train_images=null"], "")
    assert told.data.train_images is None and told.data.cut_seed == 3
    for other in ("null", "elsewhere"):
        named = parse_with_images(fewshot.FewshotConfig, [f"--encoder={folder}", f"--data.path={other}"], "")
        assert named.data.path == (None if other == "null" else other) and named.data.cut_seed == 0
    of_nothing = parse_with_images(fewshot.FewshotConfig, ["--encoder=floor:pixels"], "")
    assert of_nothing.data == fewshot.FewshotConfig().data


def test_a_dataset_of_the_hub_never_becomes_a_folder_of_that_name(trained, tmp_path, monkeypatch):
    """The run noted a commit, which a folder does not have."""
    saved = yaml.safe_load((trained / "config.yaml").read_text())
    saved["data"]["path"] = "some/set"
    (trained / "config.yaml").write_text(yaml.safe_dump(saved))
    noted = json.loads((trained / "data.json").read_text())
    noted = {part: of | {"revision": "0" * 40} for part, of in noted.items()}
    (trained / "data.json").write_text(json.dumps(noted))
    monkeypatch.chdir(tmp_path)
    assert parse_with_images(fewshot.FewshotConfig, [f"--encoder={trained}"], "").data.revision == "0" * 40
    (tmp_path / "some" / "set").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"{trained} was trained on the hub's dataset some/set, but .*set is here"):
        parse_with_images(fewshot.FewshotConfig, [f"--encoder={trained}"], "")
    named = parse_with_images(fewshot.FewshotConfig, [f"--encoder={trained}", "--data.path=./some/set"], "")
    assert (named.data.path, named.data.revision) == ("./some/set", None)


def own_images(run, *words):
    """The settings of the images by which a run is judged."""
    return parse_with_images(fewshot.FewshotConfig, [f"--encoder={run}", *words], "").data


@pytest.fixture
def of_a_relative_path(pretrain, image_folder, tmp_path, monkeypatch):
    """A run that was given its images as `images`, from the folder where these are."""
    monkeypatch.chdir(tmp_path)
    return pretrain("--data.path=images", *CUT, "--data.cut_seed=3")


def test_a_run_is_judged_by_its_own_images_from_wherever_it_is(of_a_relative_path, image_folder, tmp_path, monkeypatch):
    others = tmp_path / "elsewhere" / "images" / "cat"
    others.mkdir(parents=True)
    (others / "00.png").write_bytes(encoded(picture(50)))
    monkeypatch.chdir(others.parents[1])
    found = own_images(of_a_relative_path)
    assert (found.path, found.cut_seed) == (str(image_folder), 3)
    assert (
        report_suffix(KnnConfig(encoder=str(of_a_relative_path), data=replace(KnnConfig().data, path="images"))) != ""
    )


def test_other_images_in_the_place_of_a_runs_own_are_refused(of_a_relative_path, image_folder):
    new = image_folder / "cat" / "00.png"
    new.write_bytes(encoded(picture(99)))
    with pytest.raises(UserError, match=rf"{image_folder} no longer holds the images that {of_a_relative_path} began"):
        fewshot.main([f"--encoder={of_a_relative_path}", *FAST])
    new.unlink()
    file = image_folder / "cat" / "01.png"
    file.write_bytes(encoded(picture(98)))
    with pytest.raises(UserError, match=r"train: the files .* changed"):
        own_images(of_a_relative_path)
    assert own_images(of_a_relative_path, f"--data.path={image_folder}").cut_seed == 0  # named by somebody


def test_an_evaluation_lists_the_images_of_its_run_once(of_a_relative_path, monkeypatch):
    """To compare them with what the run began with, and to extract features of them."""
    listed = []
    load_local = sources.load_local
    monkeypatch.setattr(sources, "load_local", lambda path, *given: listed.append(path) or load_local(path, *given))
    fewshot.main([f"--encoder={of_a_relative_path}", *FAST])
    assert len(listed) == 1


def test_images_that_moved_are_named_and_known(of_a_relative_path, image_folder, tmp_path, capsys):
    moved, gone = (
        tmp_path / "moved" / "to",
        rf"the images of {of_a_relative_path} were at {image_folder}, which is gone",
    )
    moved.parent.mkdir()
    image_folder.rename(moved)
    with pytest.raises(UserError, match=rf"{gone}; name where they are now by --data\.path"):
        own_images(of_a_relative_path)
    found = own_images(of_a_relative_path, f"--data.path={moved}")
    assert (found.path, found.cut_seed, found.eval_split) == (str(moved), 3, None)
    assert (
        report_suffix(KnnConfig(encoder=str(of_a_relative_path), data=replace(KnnConfig().data, path=str(moved)))) == ""
    )
    other = tmp_path / "other"
    shutil.copytree(moved, other)
    (other / "cat" / "00.png").write_bytes(encoded(picture(99)))
    capsys.readouterr()
    assert own_images(of_a_relative_path, f"--data.path={other}").cut_seed == 0
    assert f"{gone}; those at {other} are others: train: the files" in capsys.readouterr().out


def test_a_folder_that_is_gone_never_becomes_a_name_of_the_hub(of_a_relative_path, image_folder, tmp_path):
    """Also where the run's config has the relative spelling of an earlier version."""
    image_folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=rf"were at {image_folder}, which is gone"):
        own_images(of_a_relative_path)
    saved = of_a_relative_path / "config.yaml"
    saved.write_text(saved.read_text().replace(str(image_folder), "images"))
    with pytest.raises(UserError, match=rf"were at {image_folder}, which is gone"):
        own_images(of_a_relative_path)


def test_a_run_goes_on_by_any_spelling_of_its_paths(pretrain, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = export(tmp_path / "first", 0)
    run = pretrain("--data.path=images", "--model.init_from=first", *CUT)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["data"]["path"], saved["model"]["init_from"]) == (str(image_folder), str(first))
    for path in ("images", "./images", str(image_folder)):
        pretrain(f"--data.path={path}", "--model.init_from=first", *CUT)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(tmp_path) + "/", ""))
    pretrain("--data.path=images", "--model.init_from=first", *CUT)  # as earlier versions saved it
    with pytest.raises(UserError, match=r"another config: model\.init_from differ"):
        pretrain("--data.path=images", f"--model.init_from={export(tmp_path / 'other', 1)}", *CUT)


def test_a_run_goes_on_where_its_images_moved_to(of_a_relative_path, pretrain, image_folder, tmp_path):
    options = (*CUT, "--data.cut_seed=3")
    image_folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=rf"data\.path is images; .* were at {image_folder}, which is gone"):
        pretrain("--data.path=images", *options)
    pretrain("--data.path=moved", *options)
    (tmp_path / "moved" / "cat" / "01.png").unlink()
    with pytest.raises(UserError, match=r"another config: data\.path differ"):
        pretrain("--data.path=moved", *options)


@pytest.mark.parametrize("stream", ["of shards", "of a folder"])
def test_the_images_of_a_stream_are_compared_by_its_files(pretrain, shards, image_folder, stream):
    place = shards if stream == "of shards" else image_folder
    more = () if stream == "of shards" else ("--data.eval_split=null",)
    run = pretrain(f"--data.path={place}", "--data.streaming=true", *more)
    assert own_images(run).path == str(place)
    file = sorted(place.rglob("*.p*"))[0]
    file.rename(file.with_name(file.name.replace("0", "9", 1)))
    with pytest.raises(UserError, match=rf"{place} no longer holds the images .*train: the files .* changed"):
        own_images(run)


@pytest.fixture
def supervised_run(image_folder, tmp_path):
    """A run that learned the labels of nine of the twelve images."""
    options = ["--run.steps=1", "--run.threads=1", "--data.workers=0", "--optim.global_batch_size=4"]
    options += ["--optim.warmup_steps=0", "--model.width=16", "--model.depth=1", "--model.img_size=16"]
    folder = tmp_path / "labelled"
    supervised.main([*options, "--run.report=false", f"--data.path={image_folder}", *CUT, f"--run.dir={folder}"])
    return folder


def judged(run, path, **settings) -> tuple:
    """The arguments of `check_labels_unseen` for the images at a path."""
    source = SourceConfig(path=str(path), **{"eval_split": None, "eval_fraction": 0.25} | settings)
    return str(run), source, *load_image_datasets(source)


@pytest.mark.parametrize("original", ["there", "gone"])
def test_labels_of_a_copy_are_known_too(supervised_run, image_folder, tmp_path, original):
    copy = shutil.copytree(image_folder, tmp_path / "copy")
    if original == "gone":
        shutil.rmtree(image_folder)
    check_labels_unseen(*judged(supervised_run, copy))  # what was held out
    with pytest.raises(UserError, match=rf"labels of [123] of these 3 test images; .*--data\.path {copy}"):
        check_labels_unseen(*judged(supervised_run, copy, cut_seed=1))


def in_another_container(image_folder, tmp_path, keep=lambda name: True):
    """The same image files as a parquet file, without their names and in another order."""
    files = [file for file in sorted(image_folder.rglob("*.png"), key=lambda file: file.name) if keep(file.name)]
    rows = dataset_of([file.read_bytes() for file in files], label=[number % 2 for number in range(len(files))])
    rows.to_parquet(tmp_path / "set.parquet")
    return tmp_path / "set.parquet"


def test_labels_of_the_same_images_in_another_container_are_known(supervised_run, image_folder, tmp_path):
    train, _ = load_image_datasets(judged(supervised_run, image_folder)[1])
    learned = {name.rpartition("/")[2] for name in map(train.name, range(len(train)))}
    for part, message in ((learned, r"labels of 2 of these 2 test images"), (set(), None)):
        file = in_another_container(image_folder, tmp_path, lambda name, part=part: (name in learned) == bool(part))
        arguments = judged(supervised_run, file)
        if message is None:
            check_labels_unseen(*arguments)  # held-out images alone
        else:
            with pytest.raises(UserError, match=message):
                check_labels_unseen(*arguments)


def test_a_few_duplicates_are_no_reason_to_refuse(supervised_run, image_folder, tmp_path, capsys):
    train, _ = load_image_datasets(judged(supervised_run, image_folder)[1])
    cells = [encoded(picture(100 + number)) for number in range(200)]
    own = dataset_of([*cells[:100], Path(train.name(0)).read_bytes()], label=[0, 1] * 50 + [0])
    dataset_of(cells, label=[0, 1] * 100).to_parquet(tmp_path / "set" / "train.parquet")
    own.to_parquet(tmp_path / "set" / "test.parquet")
    capsys.readouterr()
    check_labels_unseen(*judged(supervised_run, tmp_path / "set", eval_split="test"))
    assert "was trained with the labels of 1 of these 101 test images: duplicates" in capsys.readouterr().out


def test_an_encoder_says_how_its_files_were_read(pretrain, tmp_path):
    """Where its run is not there; what is given wins."""
    for number in range(8):
        file = tmp_path / "arrays" / f"{number}.npy"
        file.parent.mkdir(exist_ok=True)
        np.save(file, 1000 + 10 * picture(number).astype(np.uint16)[..., :2])
    options = "--data.channels=2", "--data.range=[1000,3550]", "--data.nodata=7"
    folder = pretrain(f"--data.path={tmp_path / 'arrays'}", "--data.eval_split=null", *options)
    copy = shutil.copytree(folder / "encoder", tmp_path / "elsewhere" / "encoder")
    for words, expected in (([], (2, (1000, 3550), 7)), (["--data.nodata=null"], (2, (1000, 3550), None))):
        data = parse_with_images(fewshot.FewshotConfig, [f"--encoder={copy}", "--data.path=other", *words], "").data
        assert (data.channels, tuple(data.range), data.nodata) == expected


def test_test_images_whose_labels_were_learned_are_refused(image_folder, tmp_path, capsys, pretrain):
    options = ["--run.steps=1", "--run.threads=1", "--data.workers=0", "--optim.global_batch_size=4"]
    options += ["--optim.warmup_steps=0", "--model.width=16", "--model.depth=1", "--model.img_size=16"]
    options += ["--run.report=false"]
    folder = tmp_path / "supervised"
    supervised.main([*options, f"--data.path={image_folder}", *CUT, f"--run.dir={folder}"])
    capsys.readouterr()
    fewshot.main([f"--encoder={folder}", *FAST])
    assert "was trained with labels of these training images" in capsys.readouterr().out
    moved = [f"--encoder={folder}", f"--data.path={image_folder}", *CUT, "--data.cut_seed=1", *FAST]
    with pytest.raises(UserError, match=rf"trained with the labels of [123] of these 3 test images; .*{image_folder}"):
        fewshot.main(moved)
    fewshot.main([*moved, "--random=true"])
    weights = folder / "encoder" / "model.safetensors"
    refused = rf"was trained with the labels of [123] of these 3 test images; .*{image_folder}"
    other = SourceConfig(path=str(image_folder), eval_split=None, eval_fraction=0.25, cut_seed=1)
    with pytest.raises(UserError, match=refused):  # as --checkpoint has it
        check_labels_unseen(str(weights), other, *load_image_datasets(other))
    with pytest.raises(UserError, match=rf"encoder is {folder}.*{refused}"):  # to begin from it is to know them, too
        supervised.main([*options, *moved[1:5], f"--run.dir={tmp_path / 'second'}", f"--model.init_from={folder}"])
    began = pretrain(*options, *moved[1:5], f"--model.init_from={weights}", dir=tmp_path / "began")
    with pytest.raises(UserError, match=rf"encoder is {began}, which builds on {weights}, which {refused}"):
        fewshot.main([f"--encoder={began}", *FAST])
    assert check_labels_unseen("floor:pixels", other, None, None) is None


def test_a_stream_is_known_by_its_files(pretrain, tmp_path, image_folder, monkeypatch):
    options = (f"--data.path={image_folder}", "--data.eval_split=null", "--data.streaming=true")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 3)
        pretrain(*options)
    new = image_folder / "cat" / "00.png"
    new.write_bytes(encoded(picture(99)))
    with pytest.raises(UserError, match=r"started with other images or weights: train: the files .* changed"):
        pretrain(*options)
    new.unlink()
    first = image_folder / "cat" / "01.png"
    assert first.is_file()
    renamed = first.rename(first.with_name("99.png"))  # all others shift
    with pytest.raises(UserError, match=r"started with other images or weights: train: the files .* changed"):
        pretrain(*options)
    renamed.rename(first)
    assert max(read_metrics(pretrain(*options))) == 4


@pytest.fixture
def shards(tmp_path):
    """A folder of two shards to train on and one that is held out."""
    rows = dataset_of([encoded(picture(row)) for row in range(8)])
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        rows.to_parquet(tmp_path / "shards" / f"{name}.parquet")
    return tmp_path / "shards"


@pytest.mark.parametrize("unlisted", ["now", "when the run began"])
def test_a_stream_that_cannot_be_listed_is_not_compared(pretrain, shards, monkeypatch, capsys, unlisted):
    def files_of(*_):
        if unlisted == "now":
            raise OSError("the hub is out of reach")
        return []

    options = (f"--data.path={shards}", "--data.streaming=true")
    with monkeypatch.context() as patch:
        if unlisted == "when the run began":
            patch.setattr("mpp.data.kept_samples.list_files", files_of)
        kill_at(patch, 3)
        with pytest.raises(Killed):
            pretrain(*options)
    noted = shards.parent / "run" / "data.json"
    began = json.loads(noted.read_text())["train"]["files"]
    assert (began is None) == (unlisted == "when the run began")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        if unlisted == "now":
            patch.setattr("mpp.data.kept_samples.list_files", files_of)
        pretrain(*options)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "whether they are those" in line]
    assert len(warnings) == 1 and f"train: the files could not be listed {unlisted}; " in warnings[0]
    known = json.loads(noted.read_text())["train"]["files"]
    assert known and known == (began or known)
    (shards / "train-00001-of-00002.parquet").rename(shards / "train-00002-of-00002.parquet")
    (noted.parent / "encoder").rename(noted.parent / "moved")
    with pytest.raises(UserError, match=r"started with other images or weights: train: the files .* changed"):
        pretrain(*options)
