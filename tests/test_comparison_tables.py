"""Tables and plots of a comparison: what a mean is over, which columns there are, and where lines go."""

import dataclasses

import numpy as np
import pytest

from evaluation.comparison.entries import Question
from evaluation.comparison.files import write_comparison
from evaluation.comparison.plots import plot_question
from evaluation.comparison.tables import markdown_of, numbers_of
from evaluation.figures.charts import plot_depths, plot_lines
from evaluation.frozen import probing
from evaluation.frozen.labelled_features import LabelledFeatures

ROW = {
    "encoder": "a",
    "encoder_seed": 0,
    "dataset": "birds",
    "group": None,
    "evaluation": "kNN",
    "kind": "test",
    "case": "20",
    "seed": 0,
    "accuracy": 0.5,
}


def test_seeds_that_diverged_are_no_part_of_a_mean_and_are_counted():
    rows = [ROW, ROW | {"encoder_seed": 1}, ROW | {"encoder_seed": 2, "kind": "diverged"}]
    numbers = numbers_of(rows)
    assert numbers["a"]["kNN 20"] == {"mean": 0.5, "std": 0, "count": 2, "diverged": 1}
    assert "50.0 ± 0.0 (1 diverged)" in markdown_of(numbers)


def test_rank_and_dev_accuracy_are_columns_but_no_bars():
    """The rank of the deepest features: of k directions that are equally strong it is k."""
    labels = np.arange(6) % 2

    def features(directions):
        test = np.eye(6)[np.arange(60) % directions]
        return LabelledFeatures(np.eye(6), labels, test, np.arange(60) % 2)

    ranks = probing.rank_by_depth({1: features(2), 2: features(4)})
    assert ranks == pytest.approx({1: 2, 2: 4})
    rows = [ROW | {"kind": "rank", "depth": depth, "rank": rank} for depth, rank in ranks.items()]
    rows += [ROW | {"kind": "dev", "accuracy": 0.25}, ROW]
    numbers = numbers_of(rows)
    assert numbers["a"]["rank"] == {"mean": pytest.approx(4), "std": 0, "count": 1}
    headings, *_, last = (cells_of_line(line) for line in markdown_of(numbers).splitlines())
    assert headings[-2:] == ["kNN, dev", "rank"]
    assert last == ["a", "50.0", "25.0", "4"]
    assert len(plot_question(Question("bars"), rows, numbers).axes) == 1


def test_a_mean_over_data_sets_is_over_all_of_them_or_is_not():
    row = ROW | {"case": "", "group": "natural"}
    easy = row | {"dataset": "easy", "accuracy": 0.9}
    hard = row | {"dataset": "hard", "accuracy": 0.3}
    of_seed_1 = row | {"dataset": "easy", "accuracy": 0.5, "encoder_seed": 1}
    other = row | {"dataset": "easy", "accuracy": 0.85, "encoder": "b"}
    numbers = numbers_of([easy, hard, of_seed_1, other])
    assert numbers["a"]["mean natural kNN"] == {"mean": pytest.approx(0.6), "std": 0, "count": 1}
    assert numbers["a"]["easy kNN"]["count"] == 2
    assert "mean natural kNN" not in numbers["b"] and numbers["b"]["easy kNN"]["mean"] == 0.85
    unmeasured = numbers_of([easy, hard, of_seed_1], groups={"natural": {"easy", "hard", "gone"}})
    assert "mean natural kNN" not in unmeasured["a"] and unmeasured["a"]["hard kNN"]["mean"] == 0.3


def test_plots_show_a_panel_for_each_column_and_no_more():
    cell = {"mean": 0.5, "std": 0.1}
    five_panels = plot_lines({str(name): {"5": {1: cell, 2: cell}, "25": {1: cell}} for name in range(5)}, "steps")
    assert sum(axes.get_visible() for axes in five_panels.axes) == 5
    nine_lines = plot_lines({"many": {str(case): {1: cell} for case in range(9)}}, "steps")
    assert len(nine_lines.axes[0].lines) == 9
    by_depth = plot_depths({"one": {"a": {1: cell, 2: cell}, "floor": {1: cell}}, "two": {"a": {1: cell, 2: cell}}})
    assert sum(axes.get_visible() for axes in by_depth.axes) == 2


def test_lines_go_through_encoders_against_all_compute(tmp_path):
    tuned = ROW | {"evaluation": "tuned", "case": "", "pflop": 2.0}
    rows = [
        tuned | {"encoder": "short", "accuracy": 0.1, "training_pflop": 1.0},
        tuned | {"encoder": "long", "accuracy": 0.3, "training_pflop": 4.0},
        tuned | {"encoder": "scratch", "accuracy": 0.2, "training_pflop": 0.0},
    ]
    lines = {"pre-trained": ["long", "short"], "from scratch": ["scratch"], "both": ["scratch", "short"]}
    question = Question("q", plot="lines", x="total compute", lines=lines)
    axes = plot_question(question, rows, {}).axes[0]
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axes.containers}
    assert drawn["pre-trained"] == [[3.0, pytest.approx(10)], [6.0, pytest.approx(30)]]
    assert drawn["both"] == [[2.0, pytest.approx(20)], [3.0, pytest.approx(10)]]
    assert drawn["from scratch"] == [[2.0, pytest.approx(20)]]
    assert axes.get_xticks().tolist() == [2, 3, 6]

    write_comparison(tmp_path, [dataclasses.replace(question, encoders=["long", "scratch"])], rows, {})
    headings, *cells = (cells_of_line(line) for line in (tmp_path / "table.md").read_text().splitlines())
    assert headings == ["accuracy (%)", "tuned", "tuned, PFLOP"]
    assert ["long", "30.0", "6"] in cells and ["scratch", "20.0", "2"] in cells


def cells_of_line(line):
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.split("|")[1:-1]]
