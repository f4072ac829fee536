"""The registry of evaluations: what it names exists, and a file of a user adds another evaluation."""

import json
import shutil
import sys
from importlib import import_module

import pytest
from comparisons import write_cats_and_dogs
from conftest import ROOT

from evaluation import cli, compare, registry
from evaluation.metrics.outcomes import load_outcomes
from evaluation.registry import EVALUATIONS, Evaluation
from mpp.config import imports
from mpp.errors import UserError


@pytest.mark.parametrize("evaluation", EVALUATIONS.values(), ids=EVALUATIONS)
def test_an_evaluation_has_a_command_a_config_and_a_line_of_help(evaluation):
    module = import_module(evaluation.module)
    assert callable(module.main) and callable(module.run)
    config = evaluation.config_class()()
    assert hasattr(config, "encoder") and hasattr(config, "out")
    assert cli.commands()[evaluation.name] == evaluation.help


def test_a_name_is_given_once():
    other = Evaluation("knn", "elsewhere", "elsewhere.Config", "frozen features", "another kNN")
    with pytest.raises(UserError, match=r"evaluation knn is already that of evaluation\.knn; choose another name"):
        registry.register(other)


@pytest.fixture
def nearest_centroid(tmp_path, monkeypatch):
    """The example of evaluation/README.md, in a user's folder."""
    file = tmp_path / "nearest_centroid.py"
    shutil.copy(ROOT / "tests" / file.name, file)
    monkeypatch.setattr(imports, "_imports", {})
    yield file
    del EVALUATIONS["centroid"]
    del sys.modules["nearest_centroid"]


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
    with pytest.raises(SystemExit):
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
    cell = summary["comparison"]["colours"]["nearest centroid"]
    assert (cell["mean"], cell["std"], cell["count"]) == (1.0, 0.0, 1) and cell["interval"][1] == 1.0
