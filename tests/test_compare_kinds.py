"""Comparisons of labels that are several classes, or numbers: every score has its name and unit wherever shown."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from comparisons import FAST
from test_comparison_tables import ROW
from test_label_kinds import colours, redness, write_images

from evaluation import compare
from evaluation.comparison.differences import compare_rows, describe_difference
from evaluation.comparison.entries import Question
from evaluation.comparison.files import best_encoders
from evaluation.comparison.plots import plot_question
from evaluation.comparison.remarks import describe_label_baselines
from evaluation.comparison.tables import cells_by_encoder, cells_of
from evaluation.metrics.scoring import KINDS, kind_of_score

SCORES = {name: kind.score_heading for name, kind in KINDS.items()}


def rows_of(*kinds: str) -> list[dict]:
    """Scores of two encoders: an evaluation for each kind of label."""
    rows = []
    for kind in kinds:
        for encoder, value in (("a", 0.5), ("b", -0.25)):
            score = {} if kind == "class" else {"score": SCORES[kind]}
            row = ROW | {"encoder": encoder, "evaluation": kind, "case": "", "accuracy": value, **score}
            rows.append(row | {"interval": [value - 0.125, value + 0.125], "images": 10})
    return rows


@pytest.mark.parametrize(
    ("kinds", "headings", "cells"),
    [
        (("class",), ["accuracy (%)", "class"], ["50.0 (37.5 to 62.5)"]),
        (("several",), ["mAP, macro (%)", "several"], ["50.0 (37.5 to 62.5)"]),
        (("number",), ["explained variance (R2)", "number"], ["0.500 (0.375 to 0.625)"]),
        (("pixels",), ["mean IoU (%)", "pixels"], ["50.0 (37.5 to 62.5)"]),
        (
            ("class", "number", "pixels"),
            ["encoder", "class: accuracy (%)", "number: explained variance (R2)", "pixels: mean IoU (%)"],
            ["50.0 (37.5 to 62.5)", "0.500 (0.375 to 0.625)", "50.0 (37.5 to 62.5)"],
        ),
    ],
)
def test_a_table_has_the_name_and_the_unit_of_each_score(kinds, headings, cells):
    named, body = cells_of(cells_by_encoder(rows_of(*kinds)))
    assert named == headings and body[0] == ["a", *cells]


def test_a_case_that_ends_in_its_score_has_it_once():
    rows = [row | {"case": f"5 {row['score']}"} if "score" in row else row for row in rows_of("class", "several")]
    assert cells_of(cells_by_encoder(rows))[0] == ["encoder", "class: accuracy (%)", "several 5: mAP, macro (%)"]


def test_bars_lines_and_curves_have_the_unit_of_their_score():
    rows = rows_of("several", "number")
    several, number = plot_question(Question("bars"), rows, cells_by_encoder(rows)).axes
    assert several.get_xlabel() == "mAP, macro (%)" and number.get_xlabel() == "explained variance (R2)"
    assert [bar.get_width() for bar in several.patches] == [50, -25]
    assert [bar.get_width() for bar in number.patches] == [0.5, -0.25]
    assert several.get_xlim() != number.get_xlim()

    question = Question("lines", plot="lines", x="images", encoders={"a": 1.0, "b": 2.0})
    several, number = plot_question(question, rows, {}).axes
    assert several.get_ylabel() == "mAP, macro (%)" and number.get_ylabel() == "explained variance (R2)"
    assert number.lines[0].get_ydata().tolist() == [0.5, -0.25]

    on_dev = [row | {"kind": "dev", "depth": depth} for row in rows_of("number") for depth in (1, 2)]
    (curve,) = plot_question(Question("depth", plot="depth"), on_dev, {}).axes
    assert curve.get_ylabel() == "explained variance (R2) on the dev split"
    assert curve.lines[0].get_ydata().tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("kind", "difference", "best"),
    [
        ("class", "a - b: +75.0 (+57.3 to +92.7)", "best is a with 50.0 (37.5 to 62.5)% (next to b -25.0%)"),
        ("number", "a - b: +0.750 (+0.573 to +0.927)", "best is a with 0.500 (0.375 to 0.625) (next to b -0.250)"),
    ],
)
def test_differences_and_the_verdict_have_the_unit_of_the_score(kind, difference, best, tmp_path):
    one, other = ([row for row in rows_of(kind) if row["encoder"] == name] for name in "ab")
    described = describe_difference(compare_rows("column", one, other, tmp_path))
    assert described.startswith(f"{difference}, 10 images, not paired")
    assert best_encoders([*one, *other]) == [f"{kind} on birds: {best}"]
    assert kind_of_score(SCORES[kind]).name == kind and kind_of_score("from elsewhere").name == "class"


def test_a_comparison_of_several_kinds_is_carried_out(tmp_path):
    labels = {"several": colours, "number": redness, "class": lambda number, red: "red" if red > 0.5 else "dull"}
    datasets = []
    for kind, label in labels.items():
        images = write_images(tmp_path / kind, label)
        datasets.append({"name": kind, "options": {"data.path": str(images), "task": kind}})
    encoders = [
        {"name": name, "encoder": f"floor:{name}", "options": {"img_size": 32}} for name in ("pixels", "colors")
    ]
    evaluations = [{"name": "kNN", "command": "knn", "options": FAST | {"neighbours": [5]}}]
    out = tmp_path / "out"
    config = {"dir": str(out), "encoders": encoders, "evaluations": evaluations, "datasets": datasets}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    compare.main(["--config", str(tmp_path / "c.yaml")])
    headings = [cell.strip() for cell in (out / "table.md").read_text().splitlines()[0].split("|")[1:-1]]
    titles = [f"{kind} kNN 5: {KINDS[kind].score_title}" for kind in labels]
    assert headings == ["encoder", *titles]
    page = (out / "report.html").read_text()
    assert all(title in page for title in titles)
    results = json.loads((out / "results.json").read_text())
    tested = [row for row in results["results"] if row["kind"] == "test" and row["dataset"] == "number"]
    of_number = {row["encoder"]: row for row in tested}
    text = KINDS["number"].text("r2", of_number["pixels"]["accuracy"], *of_number["pixels"]["interval"])
    assert f" {text} |" in (out / "table.md").read_text()
    assert np.isfinite([row["accuracy"] for row in of_number.values()]).all()
    baselines = baselines_in_words(out)
    assert list(baselines) == ["several", "number", "class"] and baselines["class"].startswith("largest class ")
    assert baselines["number"] == "always predicting the mean of the test images: R2 0.000"
    for dataset, words in baselines.items():
        assert f"\nBaselines on {dataset}, which use no image: {words}.\n" in (out / "table.md").read_text()
        assert f"<p>Baselines on {dataset}, which use no image: {words}.</p>" in page
        assert f"; without an encoder: {words}</li>" in page.replace(' <a class="why" href="#question_0">why</a>', "")


def baselines_in_words(folder: Path) -> dict[str, str]:
    """Dataset -> the baseline of its reports."""
    words = {}
    rows = json.loads((folder / "results.json").read_text())["results"]
    for row in [row for row in rows if row["kind"] == "test"]:
        report = json.loads((folder / row["outcomes"]["report"]).read_text())
        ((name, value),) = report["labels"]["baselines"].items()
        words[row["dataset"]] = KINDS[report["labels"]["kind"]].describe_baseline(name, value)
    return words


def test_the_verdict_names_what_is_reached_without_an_encoder():
    row = ROW | {"accuracy": 0.215, "baselines": {"largest class": 0.253}}
    masked = ROW | {"evaluation": "masked", "case": "model", "accuracy": 0.106}
    rows = [row, masked, masked | {"case": "two nearest", "accuracy": 0.233}]
    assert best_encoders(rows) == [
        "kNN 20 on birds: best is a with 21.5%; without an encoder: largest class 25.3%",
        "masked model on birds: best is a with 10.6%; without an encoder: two nearest 23.3%",
    ]
    assert describe_label_baselines([row, row | {"encoder": "b"}, masked]) == [
        "Baselines on birds, which use no image: largest class 25.3%."
    ]
    assert describe_label_baselines([masked]) == []  # as published results of earlier versions
