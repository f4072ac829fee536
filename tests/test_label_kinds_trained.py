"""Training with labels that are several classes, or a number, and predictions of what it made."""

import csv
import json
import re
import subprocess
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import TINY, read_metrics
from test_label_kinds import colours, redness, write_images

from evaluation import finetune, linear, predict, supervised
from evaluation.frozen.run_images import find_tested_run, reports_of_training
from evaluation.metrics.scoring import KINDS, load_outcomes, score_of
from evaluation.patches.masks import OUTLINES_FILE, draw_mask
from evaluation.supervision.classifiers import load_classifier
from evaluation.supervision.learners import learner_of
from mpp.data.data_path import BIRDS_FOLDER
from mpp.errors import UserError

BASE = tuple(argument for argument in TINY if not argument.startswith(("--probe", "--model", "--data.eval_images")))
BIRDS = {split: BIRDS_FOLDER / f"{split}-00000-of-00001.parquet" for split in ("train", "test")}
SMALL = tuple(argument for argument in TINY if argument.startswith("--model"))
OF_KIND = [pytest.param(redness, (), "number", id="number"), pytest.param(colours, ("--task=several",), "several")]


def read_json(path):
    return json.loads(path.read_text())


@pytest.fixture
def pages(monkeypatch):
    """The runs whose page is asked for, with the reports of training that it finds then."""
    written = []

    def write(words, **options):
        run = Path(words[words.index("--encoder") + 1])
        written.append((run, reports_of_training(run)))
        return subprocess.CompletedProcess(words, 0, "wrote report.html\n", "")

    monkeypatch.setattr("mpp.training.run.subprocess.run", write)
    return written


@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
@pytest.mark.parametrize(("label", "arguments", "kind"), OF_KIND)
def test_a_run_learns_other_kinds_and_mpp_predicts_by_it(label, arguments, kind, tmp_path, capsys, pages):
    images = write_images(tmp_path / "images", label)
    folder = tmp_path / "run"
    common = [*BASE, *SMALL, *arguments, f"--data.path={images}", f"--run.dir={folder}"]
    supervised.main([*common, "--run.report=true"])
    assert pages == [(folder, [folder / "supervised.json"])]
    printed = capsys.readouterr().out
    score = KINDS[kind].score
    assert KINDS[kind].headings[score] in printed and "24 test (21 labelled)" in printed
    first_loss = {"number": 1.0, "several": 2 * np.log(2)}[kind]  # of the mean, of even chances for two classes
    assert read_metrics(folder)[1] == pytest.approx(first_loss, rel=0.8 if kind == "number" else 1e-5)
    (result,) = read_json(folder / "supervised.json")["results"]
    assert result["accuracy"] == pytest.approx(read_metrics(folder, f"heldout/{score}")[4], abs=1e-9)
    assert read_json(folder / "data.json")["train"]["label_kind"] == kind
    assert read_json(folder / "encoder" / "config.json")["label_kind"] == kind

    outcomes = load_outcomes(folder / "supervised.json")
    assert len(outcomes) == 21
    classifier = load_classifier(str(folder), 3, "classifier")
    assert classifier.label_kind == kind
    assert classifier.class_names == ([] if kind == "number" else ["bright", "red"])

    out = tmp_path / "predictions.csv"
    predict.main([f"--classifier={folder}", f"--out={out}", "--precision=fp32", f"--data.path={images}"])
    with out.open(newline="") as file:
        rows = {row["file"].rsplit("/", 1)[-1]: row for row in csv.DictReader(file)}
    assert len(rows) == 48
    columns = ["number"] if kind == "number" else ["p_bright", "p_red"]
    for image, predicted in zip(outcomes.images, outcomes.predictions.reshape(21, -1), strict=True):
        row = rows[image.rsplit("/", 1)[-1]]
        assert [float(row[name]) for name in columns] == pytest.approx(predicted.tolist(), abs=1e-4)
        if kind == "several":
            named = [name for name in ("bright", "red") if float(row[f"p_{name}"]) > 0.5]
            assert row["classes"] == ";".join(named)
    of_test = read_json(tmp_path / "predictions.csv.json")["figures"]["test"]
    assert of_test["images"] == 21
    assert of_test["accuracy"] == pytest.approx(result["accuracy"], abs=1e-3)

    other = tmp_path / "other"
    for option in ("--augment.mixup=0.8", f"--distill.teacher={folder}"):
        with pytest.raises(UserError, match=f"task is {kind}; it must be class with mixup, CutMix, label smoothing or"):
            supervised.main([*BASE, *SMALL, *arguments, option, f"--data.path={images}", f"--run.dir={other}"])


@pytest.mark.parametrize(("label", "arguments", "kind"), OF_KIND)
def test_finetuning_compares_rates_by_the_score_of_the_kind(label, arguments, kind, tmp_path, capsys, pages):
    images = write_images(tmp_path / "images", label)
    encoder = ("--encoder=vit_tiny_r_s16_p8_224", "--init=random", "--img_size=32", "--optim.warmup_steps=0")
    common = (*BASE, *encoder, *arguments, f"--data.path={images}", f"--run.dir={tmp_path}", "--run.steps=2")
    finetune.main([*common, "--lrs=[0.01, 0.001]", "--run.checkpoint_every=2", "--run.report=true"])
    dev_runs = [(tmp_path / f"dev_lr_{lr}", []) for lr in (0.01, 0.001)]
    report = read_json(tmp_path / "finetune.json")
    (result,) = report["results"]
    assert pages == [*dev_runs, (tmp_path / f"lr_{result['lr']}", [tmp_path / "finetune.json"])]
    assert find_tested_run(tmp_path, "encoder") == tmp_path / f"lr_{result['lr']}"
    assert [row["lr"] for row in report["dev"]] == [0.01, 0.001]
    outcomes = load_outcomes(tmp_path / "finetune.json")
    assert outcomes.kind == kind
    assert result["accuracy"] == pytest.approx(score_of(outcomes))
    printed = capsys.readouterr().out
    assert KINDS[kind].headings[KINDS[kind].score] in printed
    assert "random weights: not evaluated" not in printed  # it began from them
    finetune.main([*common, "--lrs=[0.01, 0.001]", "--run.checkpoint_every=2", "--test=false"])
    assert f"dev {KINDS[kind].score_title} |" in capsys.readouterr().out
    assert read_json(tmp_path / "finetune.json")["labels"]["kind"] == kind


def test_learners_lose_what_they_say():
    generator = np.random.default_rng(0)
    marks = generator.integers(0, 2, (6, 3)).astype(np.int8)
    outputs = torch.from_numpy(generator.normal(size=(6, 3))).float()
    shares = outputs.sigmoid().numpy()
    expected = -np.where(marks == 1, np.log(shares), np.log(1 - shares)).sum(1).mean()
    loss = learner_of("several", marks, 3).loss(outputs, torch.from_numpy(marks))
    assert float(loss) == pytest.approx(expected, rel=1e-5)

    targets = generator.normal(1000, 10, 50)
    predicted = torch.from_numpy(targets[:6] + 5).float()[:, None]
    for loss, expected in (("l2", (5 / targets.std()) ** 2), ("l1", 5 / targets.std())):
        learner = learner_of("number", targets, 0, loss)
        assert float(learner.loss(predicted, torch.from_numpy(targets[:6]))) == pytest.approx(expected, rel=1e-3)
    head = learner.complete(torch.nn.Identity())
    assert float(head(torch.zeros(1))) == pytest.approx(targets.mean(), rel=1e-6)


GROUPS = {
    "water": ("penguin", "seabird", "wader", "waterfowl"),
    "hunter": ("owl", "raptor", "seabird"),
    "singer": ("songbird",),
}


def write_birds(folder, kind):
    """The birds with several groups each, or none; or with the area of their outline in percent, where it was drawn."""
    splits = datasets.load_dataset("parquet", data_files={name: str(file) for name, file in BIRDS.items()})
    outlines = json.loads(OUTLINES_FILE.read_text())
    for split, rows in splits.items():
        names = rows.features["label"].names
        labels = []
        for bird, number in zip(rows["id"], rows["label"], strict=True):
            known = number is not None and number >= 0
            groups = [group for group, birds in GROUPS.items() if known and names[number] in birds]
            of_kind = {"several": groups if known else None, "number": outlined_area(outlines[split].get(bird))}
            labels.append(of_kind[kind])
        folder.mkdir(exist_ok=True)
        rows = rows.cast_column("image", datasets.Image(decode=False)).remove_columns("label")
        rows.add_column("label", labels).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def outlined_area(outline):
    """Percent of the photograph that is bird; None: no outline was drawn."""
    return None if outline is None else 100 * float(np.asarray(draw_mask(outline)).mean())


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["several", "number"])
def test_a_pretrained_encoder_learns_other_kinds_of_the_birds_beside_its_baselines(kind, trained, tmp_path, capsys):
    """42 outlines are too few to predict the area of a bird: neither colours nor a short training beat the mean."""
    birds = write_birds(tmp_path / "birds", kind)
    common = (f"--data.path={birds}", f"--task={kind}")
    reports = {}
    encoders = {
        "linear_floor": ["--encoder=floor:colors"],
        "linear_random_0": [f"--encoder={trained}", "--random=true"],
        "linear": [f"--encoder={trained}"],
    }
    for name, words in encoders.items():
        path = tmp_path / f"{name}.json"
        linear.main([*common, *words, "--threads=1", f"--out={path}"])
        reports[name] = read_json(path)
        (baseline,) = reports[name]["labels"]["baselines"].values()
        low, high = reports[name]["results"][0]["interval"]
        assert low <= reports[name]["results"][0]["accuracy"] <= high
    assert re.search(r"\| random weights +\| +\d \| +-?\d", capsys.readouterr().out)
    if kind == "several":
        assert reports["linear_floor"]["results"][0]["interval"][0] > baseline
        assert reports["linear"]["results"][0]["accuracy"] > baseline
    else:
        areas = json.loads(OUTLINES_FILE.read_text())["test"].values()
        targets = load_outcomes(tmp_path / "linear.json").targets
        assert sorted(targets) == pytest.approx(sorted(map(outlined_area, areas)))

    folder = tmp_path / "tuned"
    base = [each for each in BASE if not each.startswith(("--run.steps", "--optim.global", "--run.checkpoint"))]
    training = ("--run.steps=60", "--lrs=0.03", f"--encoder={trained}", "--optim.global_batch_size=32")
    finetune.main([*base, *common, *training, f"--run.dir={folder}"])
    assert "random weights: not evaluated (--init random, in another run.dir)" in capsys.readouterr().out
    losses = list(read_metrics(folder / "lr_0.03").values())
    assert np.mean(losses[-10:]) < 0.95 * np.mean(losses[:5])
    (result,) = read_json(folder / "finetune.json")["results"]
    assert result["accuracy"] > (baseline if kind == "several" else -1)
