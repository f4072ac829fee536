"""The registry of evaluations: what it names exists, and a file of a user adds another evaluation."""

import json
import sys
from importlib import import_module

import numpy as np
import pytest
from comparisons import write_cats_and_dogs
from conftest import ROOT, refused

from evaluation import cli, compare, registry
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.results import write_json
from evaluation.metrics.scoring import load_outcomes
from evaluation.registry import EVALUATIONS, Evaluation
from mpp.config import flatten, imports


@pytest.mark.parametrize("evaluation", EVALUATIONS.values(), ids=EVALUATIONS)
def test_an_evaluation_has_a_command_a_config_and_a_line_of_help(evaluation):
    module = import_module(evaluation.module)
    assert callable(module.run)
    assert {"encoder", "out"} <= flatten(evaluation.config_class()()).keys()
    is_command = evaluation.kind != "masked patches"  # which is for comparisons
    assert hasattr(module, "main") == is_command
    assert cli.commands().get(evaluation.name) == (evaluation.help if is_command else None)


def test_a_name_is_given_once():
    other = Evaluation("knn", "elsewhere", "elsewhere.Config", "frozen features", "another kNN")
    with refused(r"evaluation knn is already that of evaluation\.knn; choose another name"):
        registry.register(other)


@pytest.fixture
def nearest_centroid(monkeypatch):
    """The example of evaluation/README.md."""
    file = ROOT / "tests" / "nearest_centroid.py"
    monkeypatch.setattr(imports, "_modules", {})
    yield file
    imports.imported.clear()
    EVALUATIONS.pop("centroid", None)
    sys.modules.pop("nearest_centroid", None)


def test_the_page_shows_the_example(nearest_centroid):
    _, _, shown = nearest_centroid.read_text().partition("def evaluate")
    assert shown in (ROOT / "evaluation" / "README.md").read_text()


@pytest.fixture
def images(tmp_path):
    """Images of two classes, which colours tell apart."""
    write_cats_and_dogs(tmp_path / "images")
    return tmp_path / "images"


def test_the_example_of_an_evaluation_is_a_command(nearest_centroid, images, tmp_path, monkeypatch, capsys):
    words = ["--encoder=floor:pixels", "--img_size=32", f"--data.path={images}", "--data.eval_fraction=0.25"]
    words.append(f"--import={nearest_centroid}")
    monkeypatch.setattr(sys, "argv", ["mpp", "centroid", *words, "--threads=1", f"--out={tmp_path / 'report.json'}"])
    cli.main()
    report = json.loads((tmp_path / "report.json").read_text())
    (result,) = report["results"]
    assert (result["order"], result["accuracy"], result["depth"], result["outcomes"]) == (2, 1.0, 1, 0)
    assert load_outcomes(tmp_path / "report.json").class_names == ["cat", "dog"]
    monkeypatch.setattr(sys, "argv", ["mpp", "--help", f"--import={nearest_centroid}"])
    cli.main()
    assert "  centroid     nearest-centroid accuracy\n" in capsys.readouterr().out


def test_the_example_of_an_evaluation_is_compared(nearest_centroid, images, tmp_path):
    (tmp_path / "compare.yaml").write_text(
        f"""
        dir: {tmp_path / "compared"}
        encoders: [{{name: colours, encoder: floor:pixels, options: {{img_size: 32}}}}]
        evaluations: [{{name: nearest centroid, command: centroid, options: {{threads: 1}}}}]
        datasets: [{{name: pets, options: {{data.path: {images}, data.eval_fraction: 0.25}}}}]
        """
    )
    words = [f"--import={nearest_centroid}", "--config", str(tmp_path / "compare.yaml")]
    compare.main(words)
    summary = json.loads((tmp_path / "compared" / "results.json").read_text())["summary"]
    cell = summary["comparison"]["colours"]["nearest centroid 2"]
    assert (cell["mean"], cell["std"], cell["count"]) == (1.0, 0.0, 1) and cell["interval"][1] == 1.0


LABELS = np.array([0, 2, 4, 2])
FEATURES = LabelledFeatures(np.zeros((4, 3)), LABELS, np.zeros((4, 3)), LABELS)


@pytest.mark.parametrize(
    "predicted, given",
    [
        (np.int64(2), r"int64 of shape \(\); it must be one for each of 4 test images"),
        (LABELS + 0.3, r"float64 of shape \(4,\); it must be \(4,\) whole numbers, each a class of the labels"),
        (np.zeros((4, 5), int), r"int64 of shape \(4, 5\); it must be \(4,\) whole numbers"),
        (np.array([0, 9, 4, 2]), r"int64 of shape \(4,\); it must be \(4,\) whole numbers, each a class of the labels"),
    ],
)
def test_predictions_that_are_no_classes_are_refused(predicted, given):
    """Each would count as the next class: 1.3 and 1 as class 2."""
    with refused(f"^the array of an evaluation's predictions is {given}"):
        FEATURES.outcomes(predicted)


def test_an_accuracy_of_numpy_is_written(tmp_path):
    results = [{"accuracy": np.float32(0.5), "shots": np.int64(5)}, {"accuracy": np.float32("nan")}]
    write_json(tmp_path / "mine.json", {"results": results})
    written = json.loads((tmp_path / "mine.json").read_text())
    assert written == {"results": [{"accuracy": 0.5, "shots": 5}, {"accuracy": None}]}
