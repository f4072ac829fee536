"""Tables of predictions: names, figures, resumed to the same bytes; of the right encoder, or none."""

import csv
import os
import shutil
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import timm
from classified_images import NAMES, OF_MODEL, OF_TRAINING, TO_KEEP, predict_to, read_csv, write_images
from comparisons import noted
from conftest import FAST, interrupted_after, put_picture, read_json, refused
from safetensors.torch import load_file, save_file
from server import Command

from evaluation import embed, linear, predict, supervised, tables
from evaluation.config import PredictConfig
from evaluation.frozen.kept_heads import load_head
from evaluation.metrics.intervals import wilson
from evaluation.metrics.scoring import load_outcomes
from evaluation.supervision.classifiers import distinct_class_names, timm_names


@pytest.fixture(scope="module")
def head(run_with_head):
    return run_with_head / "evaluation" / "birds_head"


def test_a_supervised_run_predicts_what_it_was_tested_with(class_images, tmp_path):
    words = (f"--data.path={class_images}", "--data.eval_fraction=0.3", f"--run.dir={tmp_path}", "--optim.lr=0.01")
    supervised.main([*OF_TRAINING, *OF_MODEL, *words])
    rows = read_csv(predict_to(tmp_path / "p.csv", tmp_path, class_images))
    places = [f"{name}{place}" for place in ("", "_2", "_3") for name in ("class", "probability")]
    assert list(rows[0]) == ["file", "split", *places, *(f"p_{name}" for name in sorted(NAMES)), "error"]
    predicted = {Path(row["file"]).name: row["class"] for row in rows}
    outcomes = load_outcomes(tmp_path / "supervised.json")
    assert len(outcomes) > 2
    for image, number in zip(outcomes.images, outcomes.predictions, strict=True):
        assert predicted[Path(image).name] == sorted(NAMES)[number]


SMALL_BATCHES = "--data.batch_size=2"


def test_an_interrupted_table_is_finished_to_the_same_bytes(head, class_images, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BATCHES_PER_PART", 3)
    whole = predict_to(tmp_path / "whole.csv", head, class_images, SMALL_BATCHES)
    out = tmp_path / "p.csv"
    with interrupted_after(tables.ImageBatch, "table", 5):  # 6 of the 12 images are in a part
        predict_to(out, head, class_images, SMALL_BATCHES)
    assert not out.exists()
    batches = noted(monkeypatch, tables.ImageBatch, "table")
    predict_to(out, head, class_images, SMALL_BATCHES)
    assert len(batches) == 3 and out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob(".*"))


def small_parts():
    tables.BATCHES_PER_PART = 3


def die_in_the_second_part():
    """SIGKILL to all of the command, loader processes included, when a part of its table is written."""
    table, calls = tables.ImageBatch.table, count()

    def table_or_death(self, *given):
        if next(calls) == 4:
            os.killpg(0, signal.SIGKILL)
        return table(self, *given)

    tables.ImageBatch.table = table_or_death
    small_parts()


@pytest.mark.faults
def test_a_killed_command_is_finished_to_the_same_bytes(head, class_images, tmp_path, tally):
    words = (f"--classifier={head}", f"--data.path={class_images}", *FAST, SMALL_BATCHES, "--data.workers=2")
    whole, killed = tmp_path / "whole.csv", tmp_path / "killed.csv"
    run = Command("predict", *words, f"--out={killed}", prepare=die_in_the_second_part)
    assert run.wait() == [-signal.SIGKILL] and not killed.exists(), run.said
    assert [file.name for file in (tmp_path / ".killed.csv.parts").rglob("*.parquet")] == ["000000000000.parquet"]
    for out in (killed, whole):
        run = Command("predict", *words, f"--out={out}", prepare=small_parts)
        assert run.wait() == [0], run.said
    assert killed.read_bytes() == whole.read_bytes() and len(read_csv(killed)) == 12
    tally("a kill of mpp predict")


def test_labels_give_figures_and_unknown_ones_are_named(head, image_folder, tmp_path, capsys):
    """Of unknown labels alone there are none, nor those of an earlier table of this name."""
    images = write_images(tmp_path / "named")
    for number in range(2):
        put_picture(images / "zebra" / f"{number}.png", number)
    out = predict_to(tmp_path / "p.csv", head, images)
    rows = read_csv(out)
    right = np.mean([Path(row["file"]).parent.name == row["class"] for row in rows])
    said = capsys.readouterr()
    low, high = wilson(round(14 * right), 14)
    assert f"{100 * right:.1f} ({100 * low:.1f} to {100 * high:.1f})" in said.out
    assert "the classifier does not know the labels zebra" in said.err
    figures = read_json(tmp_path / "p.csv.json")["figures"]["all"]
    assert figures["accuracy"] == pytest.approx(right) and figures["images"] == 14
    assert [row["class"] for row in read_csv(tmp_path / "p.all.classes.csv")] == [*sorted(NAMES), "zebra"]
    out.unlink()
    predict_to(out, head, image_folder)
    assert not {"figures", "note"} & read_json(tmp_path / "p.csv.json").keys()
    assert "the classifier does not know the labels cat, dog: there are no figures" in capsys.readouterr().err


def test_a_list_of_images_is_predicted_without_labels_and_not_written_over(head, class_images, tmp_path):
    """CSV in, names of species out."""
    names = [str(file.relative_to(class_images)) for file in sorted(class_images.rglob("*.png"))][:7]
    with (tmp_path / "sites.csv").open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([["file_name", "site"], *([name, "river, north"] for name in names)])
    out = predict_to(tmp_path / "p.csv", head, class_images, f"--data.labels={tmp_path / 'sites.csv'}")
    rows, before = read_csv(out), out.read_bytes()
    assert [row["file"] for row in rows] == names and {row["class"] for row in rows} <= {*NAMES}
    for name, allowed in (("p.csv", "a new file"), ("p.txt", r"a file whose name ends in \.csv or \.parquet")):
        with refused(rf"out is .*{name}; it must be {allowed}"):
            predict_to(tmp_path / name, head, class_images, f"--data.labels={tmp_path / 'sites.csv'}", "--top=2")
    assert out.read_bytes() == before


@pytest.mark.parametrize("way", ["..", "tar"])
def test_files_are_named_from_the_folder_on(way, head, class_images, tmp_path, monkeypatch):
    """Also where `data.path` has `..`, and in a shard."""
    monkeypatch.chdir(class_images)
    path = f"../{class_images.name}" if way == ".." else shutil.make_archive(tmp_path / "images", way, class_images)
    rows = read_csv(predict_to(tmp_path / "p.csv", head, path))
    names = {str(file.relative_to(class_images)) for file in class_images.rglob("*.png")}
    shard = "images.tar: " if way == "tar" else ""
    assert {row["file"].replace("./", "") for row in rows} == {f"{shard}{name}" for name in names}


def test_a_table_with_other_names_of_labels_is_another(head, class_images, tmp_path):
    """A misspelt class has the number of the right one."""
    files = sorted(class_images.rglob("*.png"))

    def learned(misspelt):
        lines = [f"{file.relative_to(class_images)}\t{file.parent.name.replace('owl', misspelt)}" for file in files]
        (tmp_path / "labels.tsv").write_text("\n".join(["file_name\tlabel", *lines]))
        predict_to(tmp_path / "p.csv", head, class_images, f"--data.labels={tmp_path / 'labels.tsv'}")
        return read_json(tmp_path / "p.all.json")["labels"]["class_names"]

    assert learned("owll") == [*sorted(NAMES), "owll"]
    with refused("the existing one is from other images, weights, labels or settings"):
        learned("owl")


# --- the encoder of a kept head, and how it read its images ---


def test_an_encoder_may_move_with_its_head_or_without(run_with_head, head, class_images, tmp_path):
    expected = predict_to(tmp_path / "a.csv", head, class_images).read_bytes()
    moved = shutil.copytree(run_with_head, tmp_path / "moved")
    away = run_with_head.rename(run_with_head.with_name("away"))
    try:
        inside = moved / "evaluation" / "birds_head"
        assert predict_to(tmp_path / "b.csv", inside, class_images).read_bytes() == expected
        alone = shutil.copytree(inside, tmp_path / "alone")
        with refused(r".*alone was trained on .* is not at .*run: choose it with --encoder"):
            predict_to(tmp_path / "c.csv", alone, class_images)
        words = (alone, class_images, f"--encoder={away}")
        assert predict_to(tmp_path / "c.csv", *words).read_bytes() == expected
    finally:
        away.rename(run_with_head)


def test_the_encoder_of_a_head_on_published_weights_is_no_other(run_with_head, head):
    """They have a name, and no digest here by which another encoder would be known; of random ones the name is all."""
    kept = load_head(head)
    published = replace(kept.description, encoder="vit_tiny_patch16_224", weights="")
    kept = replace(kept, description=published)
    assert predict.find_encoder_of_head(kept, None).frozen.encoder == "vit_tiny_patch16_224"
    with refused(r"encoder is .*run; it must be null or vit_tiny_patch16_224, which .*birds_he"):
        predict.find_encoder_of_head(kept, str(run_with_head))
    random = replace(kept, description=replace(published, random=True))
    assert predict.find_encoder_of_head(random, str(run_with_head)).frozen.encoder == str(run_with_head)


def test_an_encoder_of_the_hub_that_has_changed_is_another(run_with_head, class_images, tmp_path, monkeypatch):
    """Neither does an earlier head read its features, nor does a table of them continue."""
    published = shutil.copytree(run_with_head / "encoder", tmp_path / "published")
    monkeypatch.setattr("mpp.runtime.weights.snapshot_download", lambda name, allow_patterns: str(published))
    common = ["--encoder=hf-hub:me/mine", f"--data.path={class_images}", *FAST]
    linear.main([*common, *TO_KEEP, f"--out={tmp_path / 'l.json'}"])
    of_features = [*common, f"--out={tmp_path / 'f.parquet'}"]
    embed.main(of_features)
    embed.main(of_features)
    predict_to(tmp_path / "p.csv", tmp_path / "l_head", class_images)
    weights = load_file(published / "model.safetensors")
    save_file({name: tensor + 0.1 for name, tensor in weights.items()}, published / "model.safetensors")
    with refused(r"the encoder that .*l_head was trained on .* is not at .*hf-hub:me/mine"):
        predict_to(tmp_path / "q.csv", tmp_path / "l_head", class_images)
    with refused(r"out is .*f\.parquet; it must be a new file"):
        embed.main(of_features)


@pytest.mark.parametrize("has_run", [True, False])
def test_images_are_read_as_those_that_a_kept_head_learned(has_run, finished_run, class_images, tmp_path):
    """Whatever the range and nodata of its encoder, with its run or without; a setting that is named wins."""
    encoder = shutil.copytree(finished_run if has_run else finished_run / "encoder", tmp_path / "one")
    words = (f"--encoder={encoder}", f"--data.path={class_images}", "--data.range=[0, 51]", "--data.nodata=7")
    linear.main([*FAST, *TO_KEEP, *words, f"--out={tmp_path}/l.json"])
    for options, nodata in ([], 7), (["--data.nodata=null"], None):
        words = [f"--classifier={tmp_path / 'l_head'}", f"--data.path={class_images}", *options]
        config, _ = predict.parse_classifier(PredictConfig, words)
        assert (config.data.range, config.data.nodata) == ((0, 51), nodata)


def test_what_is_no_classifier_and_no_encoder_of_one_is_refused(run_with_head, head, finished_run, tmp_path):
    (tmp_path / "finetune.json").write_text('{"results": []}')
    other = shutil.copytree(finished_run, tmp_path / "other")
    (other / "supervised.json").write_text("{}")
    for classifier, encoder, said in [
        (head, "zoo:simclr_cifar10", rf"the encoder that {head} was trained on .* is not at zoo:simclr_cifar10"),
        (other, run_with_head, r"it must be null with .*, which has its own encoder"),
        (finished_run, "null", r"classifier is .*; it must be the folder of a finished supervised or fine-tu"),
        (tmp_path, "null", "which only compared rates"),
    ]:
        with refused(said):
            predict_to(tmp_path / "p.csv", classifier, tmp_path, f"--encoder={encoder}")


def test_classes_of_timm_have_names_and_each_is_unique():
    names = distinct_class_names(timm_names(timm.create_model("resnet18")), 1000)
    assert names[1].startswith("goldfish") and len(set(names)) == 1000
    assert [name for name in names if name.startswith("crane")] == ["crane (134)", "crane (517)"]
    assert distinct_class_names(["a"], 2) == ["a", "1"]
