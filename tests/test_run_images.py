"""Images that evaluation takes: those of the encoder's run, as the run read them, wherever they are now."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import yaml
from accelerate import Accelerator
from classified_images import OF_TRAINING
from comparisons import noted
from conftest import CUT, FAST, encoded, picture, put_picture, read_json, refused, write_pictures
from PIL import Image

from evaluation import fewshot, finetune, knn
from evaluation.config import FewshotConfig, FinetuneConfig, KnnConfig, LinearConfig, SegmentationConfig
from evaluation.frozen.results import report_path, report_suffix
from evaluation.frozen.run_images import find_run, load_images_of, parse_and_load
from mpp.data import sources
from mpp.pretrain import reopen

ONE_SHOT = (*FAST, "--shots=1", "--seeds=0")


def own_images(run, *words):
    """The settings of the images that an encoder is evaluated on."""
    return parse_and_load(FewshotConfig, [f"--encoder={run}", *words])[0].data


@pytest.fixture
def of_a_relative_path(pretrain, image_folder, tmp_path, monkeypatch):
    """A run that was given its images as `images`, from the folder where these are."""
    monkeypatch.chdir(tmp_path)
    return pretrain("--data.path=images", *CUT, "--data.cut_seed=3", "--run.steps=1")


def test_fine_tuning_shows_images_as_the_run_did(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {path: here, channels: 1, flip: false, eval_crop: 1.0}")
    (tmp_path / "own.yaml").write_text("data: {eval_crop: 0.5}")
    (tmp_path / "encoder").mkdir()
    words = [f"--encoder={tmp_path}", "--data.path=elsewhere"]
    for more, expected in (
        ((), (False, 1.0)),
        (("--data.flip=true", "--data.eval_crop=0.875"), (True, 0.875)),
        ((f"--config={tmp_path / 'own.yaml'}",), (False, 0.5)),
    ):
        data = parse_and_load(FinetuneConfig, [*words, *more])[0].data
        assert (data.flip, data.eval_crop) == expected
    assert parse_and_load(KnnConfig, words)[0].data.channels == 1


def test_reports_on_other_images_and_by_other_settings_are_named_after_them(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {path: here}")
    (tmp_path / "encoder").mkdir()
    encoder = f"--encoder={tmp_path}"

    def suffix(*words, of=KnnConfig, of_all=False):
        return report_suffix(parse_and_load(of, [encoder, *words])[0], of_all)

    assert suffix() == ""
    assert suffix("--data.path=elsewhere", "--data.label_column=kind") == "_path_elsewhere_label_column_kind"
    assert report_suffix(KnnConfig.of(encoder=str(tmp_path))) == "_path_None"  # from Python: the package's images
    encoder = "--encoder=floor:pixels"
    for words, expected in (
        ("--threads=1 --data.workers=0", ""),
        ("--random=true --seed=3 --img_size=16", "_random_3_img_size_16"),
        ("--data.train_images=200 --shots=[1,5]", "_train_images_200_shots_1-5"),
        ("--checkpoint=dino/model.safetensors", "_checkpoint_dino-model.safetensors"),
    ):
        assert suffix(*words.split(), of=FewshotConfig, of_all=True) == expected
    rates = ([step / number for number in range(1, 30)] for step in (1, 2))
    suffixes = {suffix(f"--l2={each}", of=LinearConfig, of_all=True) for each in rates}
    assert [len(each) for each in suffixes] == [len("_l2_123456")] * 2


def test_a_run_may_have_any_name_and_random_weights_are_of_none(tmp_path, monkeypatch):
    run = tmp_path / "checkpoints" / "classifier"
    (run / "encoder").mkdir(parents=True)
    (run / "encoder" / "config.json").touch()
    (run / "config.yaml").write_text("data: {path: here}")
    monkeypatch.chdir(run)
    assert find_run(str(run)) == find_run(f"{run}/encoder") == run and find_run("") is None


def test_evaluation_takes_the_runs_own_images(pretrain, image_folder, capsys):
    cut = (*CUT, "--data.cut_seed=3", "--data.train_images=8")
    folder = pretrain(f"--data.path={image_folder}", *cut, "--run.steps=1")
    capsys.readouterr()
    report = fewshot.main([f"--encoder={folder}", *ONE_SHOT])
    printed = capsys.readouterr().out
    assert f"the images of {folder}: --data.path {image_folder} --data.eval_split null --data.eval_fraction" in printed
    assert "9 labelled images to learn from, 3 to evaluate on" in printed
    data = report["protocol"]["data"]
    assert (data["path"], data["cut_seed"], data["train_images"]) == (str(image_folder), 3, None)
    assert own_images(folder / "encoder").cut_seed == 3
    (folder / "birds.yaml").write_text("data: {path: null}")
    for given, path in ((f"config={folder}/birds.yaml", None), ("data.path=elsewhere", "elsewhere")):
        others = own_images(folder, f"--{given}")
        assert (others.path, others.cut_seed) == (path, 0)
    assert own_images("floor:pixels") == FewshotConfig().data
    steps = own_images(folder / "checkpoints" / "step_00000001" / "model.safetensors")
    assert (steps.path, steps.cut_seed) == (str(image_folder), 3)


def test_a_dataset_of_the_hub_never_becomes_a_folder_of_that_name(trained, tmp_path, monkeypatch):
    """The run noted a commit, which a folder does not have."""
    saved = yaml.safe_load((trained / "config.yaml").read_text())
    saved["data"]["path"] = "some/set"
    (trained / "config.yaml").write_text(yaml.safe_dump(saved))
    commit = {"revision": "0" * 40}
    records = {split: record | commit for split, record in read_json(trained / "data.json").items()}
    (trained / "data.json").write_text(json.dumps(records))
    monkeypatch.chdir(tmp_path)
    assert own_images(trained).revision == commit["revision"]
    write_pictures(tmp_path / "some" / "set", 40)
    with refused(f"set no longer holds the images of {trained}"):
        own_images(trained)
    here = own_images(trained, "--data.path=./some/set")
    assert (here.path, here.revision) == ("./some/set", None)


def test_a_run_is_evaluated_on_its_own_images_from_any_folder(of_a_relative_path, image_folder, tmp_path, monkeypatch):
    """Also where the folder has others of this name. Others in their place are refused."""
    shutil.copytree(image_folder / "cat", tmp_path / "elsewhere" / "images" / "cat")
    monkeypatch.chdir(tmp_path / "elsewhere")
    images = own_images(of_a_relative_path)
    assert (images.path, images.cut_seed) == (str(image_folder), 3)
    others = replace(KnnConfig().data, path="images")
    assert report_suffix(KnnConfig.of(encoder=str(of_a_relative_path), data=others)) != ""

    put_picture(new := image_folder / "cat" / "00.png", 99)
    with refused(rf"{image_folder} no longer holds the images of {of_a_relative_path}"):
        fewshot.main([f"--encoder={of_a_relative_path}", *ONE_SHOT])
    new.unlink()
    put_picture(image_folder / "cat" / "01.png", 98)
    with refused(r"train: files changed"):
        own_images(of_a_relative_path)
    assert own_images(of_a_relative_path, f"--data.path={image_folder}").cut_seed == 0  # named by the user


OF_RATES = (*OF_TRAINING, "--run.dir={}/finetuned", "--run.steps=1", "--lrs=[0.1, 0.01]", "--dev_fraction=0.3")


@pytest.mark.parametrize("evaluate, words", [(knn.main, ["--data.workers=0"]), (finetune.main, OF_RATES)])
def test_an_evaluation_lists_the_images_of_its_run_once(of_a_relative_path, monkeypatch, tmp_path, evaluate, words):
    """To compare them with those that the run began with, and to extract features of them."""
    listed = noted(monkeypatch, sources, "load_local")
    evaluate([f"--encoder={of_a_relative_path}", *(word.format(tmp_path) for word in words)])
    assert len(listed) == 1


def test_masks_that_pre_training_took_for_images_are_no_change(pretrain, tmp_path):
    """They lie outside the folder of the list that names them, so only segmentation knows that they are masks."""
    folder, lines = tmp_path / "set", ["file_name,mask"]
    write_pictures(folder / "images", 12)
    write_pictures(folder / "masks", 12)
    for file in (folder / "masks").iterdir():
        file.write_bytes(encoded(Image.open(file).convert("1")))
        lines.append(f"{file.name},../masks/{file.name}")
    (folder / "images" / "metadata.csv").write_text("\n".join(lines))
    run = pretrain(f"--data.path={folder}", *CUT)
    words = [f"--encoder={run}", "--data.mask_column=mask"]
    assert parse_and_load(SegmentationConfig, words)[0].data.path == str(folder)
    put_picture(folder / "masks" / "00.png", 99)
    with refused(rf"{folder} no longer holds the images of {run}"):
        parse_and_load(SegmentationConfig, words)


def test_images_that_moved_are_named_and_known(of_a_relative_path, image_folder, tmp_path):
    """A folder that is gone never becomes a name of the hub: also where an earlier version saved the relative one."""
    saved, moved = of_a_relative_path / "config.yaml", tmp_path / "moved"
    image_folder.rename(moved)
    absolute = saved.read_text()
    for text in (absolute.replace(str(image_folder), "images"), absolute):
        saved.write_text(text)
        gone = rf"of {of_a_relative_path} were at {image_folder}, which is gone; give their new place with --data\.path"
        with refused(gone):
            own_images(of_a_relative_path)
    images = own_images(of_a_relative_path, f"--data.path={moved}")
    assert (images.path, images.cut_seed, images.eval_split) == (str(moved), 3, None)
    put_picture(moved / "cat" / "00.png", 99)
    assert own_images(of_a_relative_path, f"--data.path={moved}").cut_seed == 0


def test_the_images_of_a_stream_are_compared_by_files_and_others_are_none(
    pretrain, two_shards, image_folder, monkeypatch
):
    run = pretrain(f"--data.path={two_shards}", "--data.streaming=true")
    data = own_images(run)
    with monkeypatch.context() as patch:
        patch.setattr("evaluation.frozen.run_images.load_image_datasets", None)
        train, held_out = load_images_of(str(run), data)
    assert (data.path, len(train), len(held_out)) == (str(two_shards), 0, 8)
    others = reopen(run, replace(data, path=str(image_folder)), 2, Accelerator(cpu=True))
    assert len(others.held_out) == 1  # of the twelve
    file = sorted(two_shards.glob("*.parquet"))[0]
    file.rename(file.with_name(file.name.replace("0", "9", 1)))
    with refused(rf"{two_shards} no longer holds the images .*train: files changed"):
        own_images(run)


def test_an_encoder_says_how_its_files_were_read(pretrain, tmp_path):
    """Where its run is not there; what is given wins."""
    (arrays := tmp_path / "arrays").mkdir()
    for number in range(8):
        np.save(arrays / f"{number}.npy", 1000 + 10 * picture(number).astype(np.uint16)[..., :2])
    options = "--data.channels=2", "--data.range=[1000,3550]", "--data.nodata=7"
    folder = pretrain(f"--data.path={arrays}", "--data.eval_split=null", *options)
    copy = shutil.copytree(folder / "encoder", tmp_path / "elsewhere" / "encoder")
    data = own_images(copy, "--data.path=other")
    assert (data.channels, tuple(data.range), data.nodata) == (2, (1000, 3550), 7)
    assert own_images(copy, "--data.path=other", "--data.nodata=null").nodata is None


def test_where_nothing_can_be_written_is_said_before_anything_is_done(tmp_path):
    (tmp_path / "file").touch()
    with refused(r"file/evaluation/x\.json cannot be written \(.*\); choose another place with --out"):
        report_path(str(tmp_path / "file" / "evaluation" / "x.json"), "runs/birds", "x.json")
    assert report_path(None, str(tmp_path), "x.json") == tmp_path / "evaluation" / "x.json"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
