"""Predictions of new images: equal to plain timm's, with names, resumed to the same bytes, broken images named."""

import csv
import json
import os
import shutil
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import timm
import torch
from classified_images import FAST, NAMES, OF_TRAINING, predict_to, read_csv, write_images
from conftest import TINY, encoded, interrupt_after, picture
from PIL import Image
from safetensors.torch import load_file, save_file
from server import Command
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score
from torchvision.transforms import v2

from evaluation import embed, linear, predict, supervised, tables
from evaluation.frozen.kept_heads import load_head
from evaluation.metrics.intervals import wilson
from evaluation.supervision.classifiers import distinct_class_names, timm_names
from mpp.errors import UserError
from mpp.runtime import messages


def plain_view(image: Path) -> torch.Tensor:
    """An image as plain torchvision shows it to a timm model of 32 pixels: (1, 3, 32, 32), normalised."""
    pixels = v2.functional.pil_to_tensor(Image.open(image).convert("RGB"))
    view = v2.Compose([v2.Resize(round(32 / 0.875), antialias=True), v2.CenterCrop(32)])(pixels)
    return ((view / 255 - 0.5) / 0.5)[None]


def plain_model(run: Path) -> torch.nn.Module:
    return timm.create_model(f"local-dir:{run / 'encoder'}", pretrained=True).eval()


def assert_is_predicted(row: dict[str, str], logits: torch.Tensor) -> None:
    """A row has these logits (1, C), by name."""
    probabilities = logits.softmax(-1)[0].tolist()
    by_name = dict(sorted(zip(sorted(NAMES), probabilities, strict=True), key=lambda each: -each[1]))
    assert [float(row[f"p_{name}"]) for name in sorted(NAMES)] == pytest.approx(probabilities, abs=1e-6)
    assert [row["class"], row["class_2"], row["class_3"]] == list(by_name)
    ordered = [float(row[name]) for name in ("probability", "probability_2", "probability_3")]
    assert ordered == pytest.approx(list(by_name.values()), abs=1e-6)


@torch.no_grad()
def test_a_fine_tuned_run_predicts_as_plain_timm_with_its_head(tuned_run, class_images, tmp_path):
    rows = read_csv(predict_to(tmp_path / "p.csv", tuned_run, class_images))
    run = tuned_run / "lr_0.1"
    weights = load_file(next((run / "checkpoints").glob("*4")) / "model.safetensors")
    model = plain_model(run)
    assert len(rows) == 12 and {class_images / row["file"] for row in rows} == {*class_images.rglob("*.png")}
    for row in rows:
        token = model.forward_features(plain_view(class_images / row["file"]))[:, 0]
        assert_is_predicted(row, token @ weights["head.weight"].T + weights["head.bias"])
    about = json.loads((tmp_path / "p.csv.json").read_text(encoding="utf-8"))
    assert about["classes"] == sorted(NAMES) and about["precision"] == "fp32" and about["images"] == 12


@torch.no_grad()
def test_a_kept_head_predicts_as_plain_timm_with_its_weights(run_with_head, class_images, tmp_path):
    head = run_with_head / "evaluation" / "birds_head"
    rows = pq.read_table(predict_to(tmp_path / "p.parquet", head, class_images)).to_pylist()
    weights = load_file(head / "head.safetensors")
    model = plain_model(run_with_head)
    for row in rows:
        (tokens,) = model.forward_intermediates(
            plain_view(class_images / row["file"]), indices=[0], norm=False, intermediates_only=True, output_fmt="NLC"
        )
        features = (tokens.mean(1) - weights["mean"]) / weights["std"]
        assert_is_predicted(row, features @ weights["classify.weight"].T + weights["classify.bias"])


def test_a_supervised_run_predicts_too(class_images, tmp_path):
    small = [each for each in TINY if each.startswith("--model")]
    run = tmp_path / "run"
    words = (f"--data.path={class_images}", "--data.eval_fraction=0.3", f"--run.dir={run}", "--optim.lr=0.01")
    supervised.main([*OF_TRAINING, *small, *words])
    rows = read_csv(predict_to(tmp_path / "p.csv", run, class_images, "--probabilities=false", "--top=1"))
    assert list(rows[0]) == ["file", "split", "class", "probability", "error"]
    assert {row["class"] for row in rows} <= set(NAMES)


SMALL_BATCHES = "--data.batch_size=2"


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_an_interrupted_table_is_finished_to_the_same_bytes(name, run_with_head, class_images, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BATCHES_PER_PART", 3)
    head = run_with_head / "evaluation" / "birds_head"
    whole = predict_to(tmp_path / f"whole_{name}", head, class_images, SMALL_BATCHES)
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        interrupt_after(context, tables.ImageBatch, "table", 5)
        predict_to(tmp_path / name, head, class_images, SMALL_BATCHES)
    assert not (tmp_path / name).exists()
    with monkeypatch.context() as context:
        interrupt_after(context, tables.ImageBatch, "table", 3)  # 6 of the 12 images are in a part
        again = predict_to(tmp_path / name, head, class_images, SMALL_BATCHES)
    assert again.read_bytes() == whole.read_bytes()
    monkeypatch.setattr(tables.ImageBatch, "table", None)  # nothing is left to compute
    assert predict_to(tmp_path / name, head, class_images, SMALL_BATCHES).read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob(".*"))


def small_parts() -> None:
    tables.BATCHES_PER_PART = 3


def die_in_the_second_part() -> None:
    """SIGKILL to all of the command, loader processes included, when a part of its table is written."""
    table, calls = tables.ImageBatch.table, count()

    def table_or_death(self, *given):
        if next(calls) == 4:
            os.killpg(0, signal.SIGKILL)
        return table(self, *given)

    tables.ImageBatch.table = table_or_death
    small_parts()


@pytest.mark.faults
def test_a_killed_command_is_finished_to_the_same_bytes(run_with_head, class_images, tmp_path, tally):
    words = (
        f"--classifier={run_with_head / 'evaluation' / 'birds_head'}",
        f"--data.path={class_images}",
        *FAST,
        SMALL_BATCHES,
        "--data.workers=2",
    )
    whole, killed = tmp_path / "whole.csv", tmp_path / "killed.csv"
    run = Command("predict", *words, f"--out={killed}", prepare=die_in_the_second_part)
    assert run.wait() == [-signal.SIGKILL] and not killed.exists(), run.said
    assert [file.name for file in (tmp_path / ".killed.csv.parts").rglob("*.parquet")] == ["000000000000.parquet"]
    for out in (killed, whole):
        run = Command("predict", *words, f"--out={out}", prepare=small_parts)
        assert run.wait() == [0], run.said
    assert killed.read_bytes() == whole.read_bytes() and len(read_csv(killed)) == 12
    tally("a kill of mpp predict", 1)


def test_a_broken_image_is_named_and_the_others_are_predicted(run_with_head, tmp_path, capsys):
    images = write_images(tmp_path / "images", 11)
    broken = images / "owl" / "02, ü.png"
    head = run_with_head / "evaluation" / "birds_head"
    before = read_csv(predict_to(tmp_path / "before.csv", head, images))
    broken.write_bytes(broken.read_bytes()[:60])
    after = read_csv(predict_to(tmp_path / "after.csv", head, images))
    error = capsys.readouterr().err
    assert "1 image cannot be decoded: owl/02, ü.png: " in error
    (row,) = [row for row in after if row["error"]]
    name = "owl/02, ü.png"
    assert row["file"] == name and row["class"] == row["probability"] == row["p_owl"] == ""
    assert [each for each in after if each is not row] == [each for each in before if each["file"] != name]


def test_labels_give_an_accuracy_and_unknown_ones_are_named(run_with_head, tmp_path, capsys):
    images = write_images(tmp_path / "images")
    for number in range(2):
        file = images / "zebra" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(encoded(picture(number)))
    out = predict_to(tmp_path / "p.csv", run_with_head / "evaluation" / "birds_head", images)
    rows = read_csv(out)
    truth, predicted = [Path(row["file"]).parent.name for row in rows], [row["class"] for row in rows]
    right = [each == name for each, name in zip(predicted, truth, strict=True)]
    said = capsys.readouterr()
    low, high = wilson(sum(right), 14)
    assert f"{100 * np.mean(right):.1f} ({100 * low:.1f} to {100 * high:.1f})" in said.out
    assert "the classifier does not know the labels zebra" in said.err
    about = json.loads((tmp_path / "p.csv.json").read_text(encoding="utf-8"))
    figures = about["figures"]["all"]
    assert figures["accuracy"] == pytest.approx(accuracy_score(truth, predicted)) and figures["images"] == 14
    assert figures["figures"]["class_mean"][0] == pytest.approx(balanced_accuracy_score(truth, predicted))
    assert figures["figures"]["macro_f1"][0] == pytest.approx(f1_score(truth, predicted, average="macro"))
    by_class = {row["class"]: row for row in read_csv(tmp_path / "p.all.classes.csv")}
    assert list(by_class) == [*sorted(NAMES), "zebra"] and by_class["zebra"]["right (%)"] == "0.0"
    f1 = f1_score(truth, predicted, labels=["owl"], average=None)[0]
    assert by_class["owl"]["F1 (%)"] == f"{100 * f1:.1f}" and by_class["owl"]["images"] == "4"
    assert (tmp_path / "p.all.confusion.png").is_file()
    with np.load(tmp_path / "p.all.outcomes.npz") as outcomes:
        assert outcomes["images"].tolist() == [row["file"] for row in rows]
        assert (outcomes["targets"] == outcomes["predictions_0"]).tolist() == right


def test_labels_of_other_classes_give_no_accuracy(run_with_head, image_folder, tmp_path, capsys):
    predict_to(tmp_path / "p.csv", run_with_head / "evaluation" / "birds_head", image_folder)
    assert "figures" not in json.loads((tmp_path / "p.csv.json").read_text(encoding="utf-8"))
    assert "the classifier does not know the labels cat, dog: there are no figures" in capsys.readouterr().err


def test_a_list_of_images_is_predicted_without_labels(run_with_head, class_images, tmp_path):
    """CSV in, names of species out."""
    flat = tmp_path / "flat"
    flat.mkdir()
    files = sorted(class_images.rglob("*.png"))
    for file in files:
        shutil.copy(file, flat)
    with (tmp_path / "sites.csv").open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["file_name", "site"])
        writer.writerows([file.name, "river, north"] for file in files[:7])
    head = run_with_head / "evaluation" / "birds_head"
    rows = read_csv(predict_to(tmp_path / "p.csv", head, flat, f"--data.labels={tmp_path / 'sites.csv'}"))
    assert [row["file"] for row in rows] == sorted(file.name for file in files[:7])
    assert all(row["class"] in NAMES for row in rows)


@pytest.mark.parametrize("way", ["..", "tar"])
def test_files_are_named_from_the_folder_on(way, run_with_head, class_images, tmp_path, monkeypatch):
    """Also where `data.path` has `..`, and in a shard."""
    monkeypatch.chdir(class_images)
    path = f"../{class_images.name}" if way == ".." else shutil.make_archive(tmp_path / "images", way, class_images)
    rows = read_csv(predict_to(tmp_path / "p.csv", run_with_head / "evaluation" / "birds_head", path))
    names = {str(file.relative_to(class_images)) for file in class_images.rglob("*.png")}
    shard = "images.tar: " if way == "tar" else ""
    assert {row["file"].replace("./", "") for row in rows} == {f"{shard}{name}" for name in names}


def test_the_encoder_of_a_head_on_published_weights_is_no_other(run_with_head):
    """They have a name, and no digest here by which another encoder would be known."""
    head = load_head(run_with_head / "evaluation" / "birds_head")
    published = replace(head.description, encoder="vit_tiny_patch16_224", weights="")
    head = replace(head, description=published)
    assert predict.find_encoder_of_head(head, None).frozen.encoder == "vit_tiny_patch16_224"
    with pytest.raises(UserError, match=r"encoder is .*run; it must be null or vit_tiny_patch16_224, which .*birds_he"):
        predict.find_encoder_of_head(head, str(run_with_head))
    random = replace(head, description=replace(published, encoder="gone/run", random=True))
    assert predict.find_encoder_of_head(random, str(run_with_head)).frozen.encoder == str(
        run_with_head
    )  # its architecture


def test_a_table_with_other_names_of_labels_is_another(run_with_head, class_images, tmp_path):
    """A misspelt class has the number of the right one."""
    head = run_with_head / "evaluation" / "birds_head"
    files = sorted(class_images.rglob("*.png"))

    def learned(misspelt: str) -> list[str]:
        lines = [f"{file.relative_to(class_images)}\t{file.parent.name.replace('owl', misspelt)}" for file in files]
        (tmp_path / "labels.tsv").write_text("file_name\tlabel\n" + "".join(f"{line}\n" for line in lines))
        predict_to(tmp_path / "p.csv", head, class_images, f"--data.labels={tmp_path / 'labels.tsv'}")
        return json.loads((tmp_path / "p.all.json").read_text(encoding="utf-8"))["labels"]["class_names"]

    assert learned("owll") == [*sorted(NAMES), "owll"]
    with pytest.raises(UserError, match="the existing one is from other images, weights, labels or settings"):
        learned("owl")
    (tmp_path / "p.csv").unlink()
    assert learned("owl") == sorted(NAMES)


def test_figures_of_an_earlier_table_of_this_name_are_gone(run_with_head, class_images, image_folder, tmp_path):
    head = run_with_head / "evaluation" / "birds_head"
    out = predict_to(tmp_path / "p.csv", head, class_images)
    about = tmp_path / "p.csv.json"
    assert {"figures", "note"} <= json.loads(about.read_text(encoding="utf-8")).keys()
    out.unlink()
    predict_to(out, head, image_folder)
    assert not {"figures", "note"} & json.loads(about.read_text(encoding="utf-8")).keys()


def test_images_that_the_classifier_learned_are_noted(tuned_run, class_images, tmp_path, capsys):
    """By their folder, and in a copy of it."""
    for number, folder in enumerate([class_images, shutil.copytree(class_images, tmp_path / "copy")]):
        messages.tell.cache_clear()
        out = predict_to(tmp_path / f"{number}.csv", tuned_run, folder)
        assert "note: the classifier learned some of these images" in capsys.readouterr().out
        assert "learned" in json.loads(out.with_name(f"{out.name}.json").read_text(encoding="utf-8"))["note"]


def test_another_table_is_not_written_over(run_with_head, class_images, tmp_path):
    head = run_with_head / "evaluation" / "birds_head"
    out = predict_to(tmp_path / "p.csv", head, class_images)
    before = out.read_bytes()
    with pytest.raises(UserError, match=r"out is .*p\.csv; it must be a new file"):
        predict_to(out, head, class_images, "--top=2")
    assert out.read_bytes() == before
    (tmp_path / "own.csv").write_text("my,notes\n")
    with pytest.raises(UserError, match=r"out is .*own\.csv; it must be a new file"):
        predict_to(tmp_path / "own.csv", head, class_images)
    with pytest.raises(UserError, match=r"out is .*; it must be a file whose name ends in \.csv or \.parquet"):
        predict_to(tmp_path / "p.txt", head, class_images)


def test_an_encoder_may_move_with_its_head_or_without(run_with_head, class_images, tmp_path):
    expected = predict_to(tmp_path / "a.csv", run_with_head / "evaluation" / "birds_head", class_images).read_bytes()
    moved = Path(shutil.copytree(run_with_head, tmp_path / "moved"))
    away = run_with_head.rename(run_with_head.with_name("away"))
    try:
        head = moved / "evaluation" / "birds_head"
        assert predict_to(tmp_path / "b.csv", head, class_images).read_bytes() == expected
        alone = Path(shutil.copytree(head, tmp_path / "alone"))
        with pytest.raises(
            UserError, match=r"the encoder that .*alone was trained on .* is not at .*run: choose it with --encoder"
        ):
            predict_to(tmp_path / "c.csv", alone, class_images)
        out = predict_to(tmp_path / "c.csv", alone, class_images, f"--encoder={away}")
        assert out.read_bytes() == expected
    finally:
        away.rename(run_with_head)


@pytest.mark.parametrize("has_run", [True, False])
def test_images_are_read_as_those_that_a_kept_head_learned(has_run, finished_run, class_images, tmp_path, monkeypatch):
    """Whatever the range and nodata of its encoder, with its run or without; a setting that is named wins."""
    encoder = Path(shutil.copytree(finished_run if has_run else finished_run / "encoder", tmp_path / "one"))
    words = (f"--encoder={encoder}", "--data.eval_fraction=0.3", "--data.range=[0, 51]", "--data.nodata=7")
    linear.main([*FAST, f"--data.path={class_images}", *words, "--l2=0.01", "--save=true", f"--out={tmp_path}/l.json"])
    named = (f"--classifier={tmp_path / 'l_head'}", f"--data.path={class_images}", *FAST)
    with monkeypatch.context() as context:
        context.setattr(predict, "predict", lambda config, loaded: config.data)
        for words, nodata in ([], 7), (["--data.nodata=null"], None):
            data = predict.main([*named, *words])
            assert (data.range, data.nodata) == ((0, 51), nodata)
    assert predict_to(tmp_path / "p.csv", tmp_path / "l_head", class_images).is_file()


def test_images_of_another_depth_than_the_classifiers_are_named(run_with_head, class_images, tmp_path, capsys):
    head = run_with_head / "evaluation" / "birds_head"
    predict_to(tmp_path / "p.csv", head, class_images, "--data.range=[0, 4095]")
    assert "reach 255, and 4095 becomes white" in capsys.readouterr().err


def test_a_head_of_another_encoder_is_refused_by_name(run_with_head, tuned_run, class_images, tmp_path):
    head = run_with_head / "evaluation" / "birds_head"
    other = tuned_run / "lr_0.1"
    with pytest.raises(UserError, match=rf"the encoder that {head} was trained on .* is not at {other}"):
        predict_to(tmp_path / "p.csv", head, class_images, f"--encoder={other}")
    with pytest.raises(UserError, match=r"it must be null with .*, which has its own encoder"):
        predict_to(tmp_path / "p.csv", other, class_images, f"--encoder={run_with_head}")
    assert not list(tmp_path.glob("*"))


def test_an_encoder_of_the_hub_that_has_changed_is_another(run_with_head, class_images, tmp_path, monkeypatch):
    """Neither does an earlier head read its features, nor does a table of them continue."""
    published = Path(shutil.copytree(run_with_head / "encoder", tmp_path / "published"))
    monkeypatch.setattr("mpp.runtime.weights.snapshot_download", lambda name, allow_patterns: str(published))
    common = ["--encoder=hf-hub:me/mine", f"--data.path={class_images}", *FAST]
    linear.main([*common, "--l2=0.01", "--data.eval_fraction=0.3", "--save=true", f"--out={tmp_path / 'l.json'}"])
    of_features = [*common, f"--out={tmp_path / 'f.parquet'}"]
    embed.main(of_features)
    embed.main(of_features)
    predict_to(tmp_path / "p.csv", tmp_path / "l_head", class_images)
    weights = load_file(published / "model.safetensors")
    save_file({name: tensor + 0.1 for name, tensor in weights.items()}, published / "model.safetensors")
    with pytest.raises(UserError, match=r"the encoder that .*l_head was trained on .* is not at .*hf-hub:me/mine"):
        predict_to(tmp_path / "q.csv", tmp_path / "l_head", class_images)
    with pytest.raises(UserError, match=r"out is .*f\.parquet; it must be a new file"):
        embed.main(of_features)


def test_what_is_no_classifier_is_refused(finished_run, class_images, tmp_path):
    with pytest.raises(UserError, match=r"classifier is .*; it must be the folder of a finished supervised or fine-tu"):
        predict_to(tmp_path / "p.csv", finished_run, class_images)
    (tmp_path / "finetune.json").write_text('{"results": []}')
    with pytest.raises(UserError, match="which only compared rates"):
        predict_to(tmp_path / "p.csv", tmp_path, class_images)


def test_classes_of_timm_have_names_and_each_is_unique():
    model = timm.create_model("resnet18")
    names = distinct_class_names(timm_names(model), 1000)
    assert names[1].startswith("goldfish") and len(set(names)) == 1000
    assert [name for name in names if name.startswith("crane")] == ["crane (134)", "crane (517)"]
    assert distinct_class_names(None, 3) == ["0", "1", "2"]
    assert distinct_class_names(["a"], 2) == ["a", "1"]
