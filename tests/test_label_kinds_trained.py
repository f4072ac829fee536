"""Training with labels that are several classes, or a number."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from classified_images import OF_MODEL, OF_TRAINING
from conftest import read_json, read_metrics, refused
from test_label_kinds import colours, redness, write_images

from evaluation import finetune, supervised
from evaluation.frozen.run_images import find_tested_run, reports_of_training
from evaluation.metrics.scoring import KINDS, load_outcomes, score_of
from evaluation.supervision.classifiers import load_classifier
from evaluation.supervision.learners import learner_of


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
@pytest.mark.parametrize("label, task, kind", [(redness, "auto", "number"), (colours, "several", "several")])
def test_a_run_learns_other_kinds(label, task, kind, tmp_path, capsys, pages):
    folder = tmp_path / "run"
    images = write_images(tmp_path / "images", label)
    common = [*OF_TRAINING, *OF_MODEL, f"--task={task}", f"--data.path={images}"]
    supervised.main([*common, f"--run.dir={folder}", "--run.report=true"])
    assert pages == [(folder, [folder / "supervised.json"])]
    score = KINDS[kind].score
    assert "24 test (21 labelled)" in capsys.readouterr().out
    first_loss = {"number": 1.0, "several": 2 * np.log(2)}[kind]  # of the mean, of even chances for two classes
    assert read_metrics(folder)[1] == pytest.approx(first_loss, rel=0.8 if kind == "number" else 1e-5)
    (result,) = read_json(folder / "supervised.json")["results"]
    assert result["accuracy"] == pytest.approx(read_metrics(folder, f"heldout/{score}")[4], abs=1e-9)
    for about in (read_json(folder / "data.json")["train"], read_json(folder / "encoder" / "config.json")):
        assert about["label_kind"] == kind

    assert len(load_outcomes(folder / "supervised.json")) == 21
    classifier = load_classifier(str(folder), 3, "classifier")
    assert classifier.label_kind == kind
    assert classifier.class_names == ([] if kind == "number" else ["bright", "red"])

    for option in ("--augment.mixup=0.8", f"--distill.teacher={folder}"):
        with refused(f"task is {kind}; it must be class with mixup, CutMix, label smoothing or"):
            supervised.main([*common, option, f"--run.dir={tmp_path}/other"])


def test_finetuning_compares_rates_by_the_score_of_the_kind(tmp_path, capsys, pages):
    images = write_images(tmp_path / "images", redness)
    words = ("--encoder=test_vit", "--init=random", "--img_size=32", "--task=auto", f"--data.path={images}")
    of_run = (f"--run.dir={tmp_path}", "--run.steps=2", "--run.report=true", "--lrs=[0.01, 0.001]")
    finetune.main([*OF_TRAINING, *words, *of_run])
    dev_runs = [(tmp_path / f"dev_lr_{lr}", []) for lr in (0.01, 0.001)]
    report = read_json(tmp_path / "finetune.json")
    (result,) = report["results"]
    assert pages == [*dev_runs, (tmp_path / f"lr_{result['lr']}", [tmp_path / "finetune.json"])]
    assert find_tested_run(tmp_path, "encoder") == tmp_path / f"lr_{result['lr']}"
    assert [row["lr"] for row in report["dev"]] == [0.01, 0.001]
    outcomes = load_outcomes(tmp_path / "finetune.json")
    assert outcomes.kind == "number" and result["accuracy"] == pytest.approx(score_of(outcomes))
    assert "random weights: not evaluated" not in capsys.readouterr().out  # it began from them


def test_an_error_of_numbers_is_in_deviations(rng):
    targets = rng.normal(1000, 10, 50)
    learner = learner_of("number", targets, 0, "l1")
    some = torch.from_numpy(targets[:6])
    assert float(learner.loss(some.float()[:, None] + 5, some)) == pytest.approx(5 / targets.std(), rel=1e-3)
    assert learner_of("number", np.full(3, 7.0), 0).std == 1  # all alike
