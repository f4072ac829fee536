"""Tables and plots of a comparison: what a mean is over, which columns there are, units, and where lines go."""

import itertools
import json

import numpy as np
import pytest
import yaml
from comparisons import FAST
from test_label_kinds import colours, redness, write_images

from evaluation import compare
from evaluation.comparison.differences import difference_table, differences_from_best
from evaluation.comparison.rows import frame_of
from evaluation.comparison.tables import cells_by_encoder, plot_question, remarks_on, table_of
from evaluation.config.comparing import Question
from evaluation.figures.charts import plot_lines
from evaluation.frozen import results
from evaluation.frozen.features import LabelledFeatures
from evaluation.metrics.scoring import KINDS, kind_of_score

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
SCORES = {name: kind.score_heading for name, kind in KINDS.items()}


def cells(*rows, x=""):
    return cells_by_encoder(frame_of(rows), x)


def plotted(question, *rows):
    return plot_question(question, frame_of(rows))


def rows_of(*kinds):
    """Scores of two encoders: an evaluation for each kind of label."""
    rows = []
    for kind in kinds:
        for encoder, value in (("a", 0.5), ("b", -0.25)):
            score = {} if kind == "class" else {"score": SCORES[kind]}
            row = ROW | {"encoder": encoder, "evaluation": kind, "case": "", "accuracy": value, **score}
            rows.append(row | {"interval": [value - 0.125, value + 0.125], "images": 10})
    return rows


# --- cells ---


def test_seeds_that_diverged_are_no_part_of_a_mean_and_are_counted():
    numbers = cells(ROW, ROW | {"encoder_seed": 1}, ROW | {"encoder_seed": 2, "kind": "diverged"})
    assert numbers["a"]["kNN 20"] == {"mean": 0.5, "std": 0, "count": 2, "diverged": 1}
    assert table_of(numbers)[1] == [["a", "50.0 ± 0.0 (1 diverged)"]]
    wild = {key: ROW[key] for key in ROW if key not in ("case", "accuracy")} | {"kind": "diverged", "encoder": "b"}
    assert cells(ROW, wild)["b"] == {"kNN 20": {"diverged": 1}}
    (bars,) = plotted(Question("bars"), ROW, wild).axes
    assert [bar.get_width() for bar in bars.patches] == [50]


def test_rank_and_dev_accuracy_are_columns_but_no_bars():
    """The rank of the deepest features: of k directions that are equally strong it is k."""
    ranks = {depth: results.rank_of_test_features(features_with_rank(2 * depth)) for depth in (1, 2)}
    assert ranks == pytest.approx({1: 2, 2: 4})
    rows = [ROW | {"kind": "rank", "depth": depth, "rank": rank} for depth, rank in ranks.items()]
    rows += [ROW | {"kind": "dev", "accuracy": 0.25}, ROW]
    numbers = cells(*rows)
    assert numbers["a"]["rank"] == {"mean": pytest.approx(4), "std": 0, "count": 1}
    headings, body = table_of(numbers)
    assert headings[-2:] == ["kNN, dev", "rank"] and body == [["a", "50.0", "25.0", "4"]]
    assert len(plotted(Question("bars"), *rows).axes) == 1


def features_with_rank(directions):
    """Test features that point in as many directions, each as often."""
    test = np.eye(6)[np.arange(60) % directions]
    return LabelledFeatures(np.eye(6), np.arange(6) % 2, test, np.arange(60) % 2)


def test_a_column_names_its_dataset_where_the_evaluation_has_several():
    numbers = cells(ROW, ROW | {"dataset": "other"}, ROW | {"evaluation": "masked", "case": "model"})
    assert list(numbers["a"]) == ["birds kNN 20", "other kNN 20", "masked model"]


def test_a_mean_over_data_sets_is_over_all_of_them_or_is_not():
    row = ROW | {"case": "", "group": "natural"}
    easy = row | {"dataset": "easy", "accuracy": 0.9}
    hard = row | {"dataset": "hard", "accuracy": 0.3}
    of_seed_1 = row | {"dataset": "easy", "accuracy": 0.5, "encoder_seed": 1}
    other = row | {"dataset": "easy", "accuracy": 0.85, "encoder": "b"}
    numbers = cells(easy, hard, of_seed_1, other)
    assert numbers["a"]["mean natural kNN"] == {"mean": pytest.approx(0.6), "std": 0, "count": 1}
    assert numbers["a"]["easy kNN"]["count"] == 2
    assert "mean natural kNN" not in numbers["b"] and numbers["b"]["easy kNN"]["mean"] == 0.85


@pytest.mark.parametrize(
    ("kinds", "headings", "body"),
    [
        (("class",), ["accuracy (%)", "class"], ["50.0 (37.5 to 62.5)"]),
        (("several",), ["mAP, macro (%)", "several"], ["50.0 (37.5 to 62.5)"]),
        (("number",), ["explained variance (R2)", "number"], ["0.500 (0.375 to 0.625)"]),
        (
            ("class", "number", "pixels"),
            ["encoder", "class: accuracy (%)", "number: explained variance (R2)", "pixels: mean IoU (%)"],
            ["50.0 (37.5 to 62.5)", "0.500 (0.375 to 0.625)", "50.0 (37.5 to 62.5)"],
        ),
    ],
)
def test_a_table_has_the_name_and_the_unit_of_each_score(kinds, headings, body):
    named, lines = table_of(cells(*rows_of(*kinds)))
    assert named == headings and lines[0] == ["a", *body]


@pytest.mark.parametrize(("kind", "words"), [("class", "+75.0 (+5"), ("number", "+0.750 (+0.5")])
def test_differences_have_the_unit_of_the_score(kind, words):
    _, ((names, other, shown, *_),) = difference_table(differences_from_best(frame_of(rows_of(kind))))
    assert (names, other) == (f"a, {kind}", "b") and shown.startswith(words)
    assert kind_of_score(SCORES[kind]).name == kind and kind_of_score("from elsewhere").name == "class"


def test_ticks_are_at_measured_places_and_their_names_do_not_overlap():
    places = (0.0593, 0.0602, 0.122, 0.25, 0.5, 0.97)
    score = {"mean": 0.5, "std": 0.0}
    figure = plot_lines({"few-shot": {"mean_color": dict.fromkeys(places, score)}}, "PFLOP", AXES)
    (panel,) = figure.axes
    figure.canvas.draw()
    ends = [label.get_window_extent() for label in panel.get_xticklabels()]
    assert set(panel.get_xticks()) == set(places) - {0.0602}
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(ends))


# --- sentences ---


def test_baselines_are_a_sentence_and_no_columns():
    """They depend on the images and masks, not on the encoder."""
    masked = ROW | {"evaluation": "masked", "case": "model"}
    rows = [masked, masked | {"case": "nearest", "accuracy": 0.25}]
    rows += [row | {"encoder": "b"} for row in (masked, rows[1] | {"accuracy": 0.3})]
    assert table_of(cells(*rows)) == (["accuracy (%)", "masked model"], [["a", "50.0"], ["b", "50.0"]])
    reached, not_comparable = remarks_on(frame_of(rows), Question("q"))
    assert reached == "Without an encoder: nearest 25.0 to 30.0% in masked."
    assert not_comparable.startswith("Accuracies of masked patches are not comparable")
    assert remarks_on(frame_of(rows[:2]), Question("q")) == ["Without an encoder: nearest 25.0% in masked."]
    labelled = ROW | {"baselines": {"largest class": 0.253}}
    assert remarks_on(frame_of([labelled]), Question("q")) == ["Without an encoder: largest class 25.3% on birds."]
    assert remarks_on(frame_of([ROW]), Question("q")) == []


@pytest.mark.parametrize("key", ["seed", "encoder_seed"])
def test_a_sentence_says_what_the_spread_is_over(key):
    (sentence,) = remarks_on(frame_of([ROW, ROW | {key: 1}]), Question("q"))
    assert sentence == "± is the standard deviation over seeds and draws."


def test_encoders_that_a_plot_leaves_out_are_named(fine_tuned):
    """They are in the table: without compute, or on no line."""
    unknown = {key: value for key, value in fine_tuned[0].items() if key != "training_pflop"} | {"encoder": "floor"}
    frame = frame_of([*fine_tuned, unknown])
    against_compute = Question("q", plot="lines", x="compute")
    (sentence,) = remarks_on(frame, against_compute)
    assert sentence.startswith("Not in the plot") and sentence.endswith(": floor.")
    on_lines = Question("q", plot="lines", x="compute", lines={"a": ["long"], "b": ["scratch", "floor"]})
    (sentence,) = remarks_on(frame, on_lines)
    assert sentence.endswith(": short.")
    assert remarks_on(frame, Question("q")) == remarks_on(frame_of(fine_tuned), against_compute) == []


# --- plots ---


def test_bars_lines_and_curves_have_the_unit_of_their_score():
    rows = rows_of("several", "number")
    several, number = plotted(Question("bars"), *rows).axes
    assert several.get_xlabel() == "mAP, macro (%)" and number.get_xlabel() == "explained variance (R2)"
    assert [bar.get_width() for bar in several.patches] == [50, -25]
    assert [bar.get_width() for bar in number.patches] == [0.5, -0.25]

    several, number = plotted(Question("lines", plot="lines", x="images", encoders={"a": 1.0, "b": 2.0}), *rows).axes
    assert several.get_ylabel() == "mAP, macro (%)" and number.get_ylabel() == "explained variance (R2)"
    assert number.lines[0].get_ydata().tolist() == [0.5, -0.25]

    on_dev = [row | {"kind": "dev", "depth": depth} for row in rows for depth in (1, 2)]
    several, number = plotted(Question("depth", plot="depth"), *on_dev).axes
    assert number.get_ylabel() == "explained variance (R2) on the dev split"
    assert several.lines[0].get_ydata().tolist() == [50, 50]
    assert number.lines[0].get_ydata().tolist() == [0.5, 0.5]


AXES = {"few-shot": "accuracy (%)", "linear": "accuracy (%)"}


def test_lines_have_their_colours_in_all_panels_and_one_legend():
    score = {1: {"mean": 0.5, "std": 0.1}}
    figure = plot_lines({"few-shot": {"labels": score}, "linear": {"masked": score, "labels": score}}, "images", AXES)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["labels", "masked"]
    colours = [{bars.get_label(): bars.lines[0].get_color() for bars in panel.containers} for panel in figure.axes]
    assert colours[0]["labels"] == colours[1]["labels"] != colours[1]["masked"]


def test_each_case_has_its_panel_with_all_lines():
    lines = {"one": ["a"], "two": ["b"]}
    question = Question("q", encoders={"a": 1, "b": 2}, plot="lines", x="images", lines=lines)
    rows = [ROW | {"encoder": name, "evaluation": "few-shot", "case": case} for name in "ab" for case in ("5", "25")]
    figure = plotted(question, *rows)
    assert [panel.get_title() for panel in figure.axes] == ["few-shot 5", "few-shot 25"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]


def test_a_line_without_compute_is_drawn_across_the_panel():
    lines = {"trained": ["a"], "random weights": ["b"], "pixels": ["c"]}
    question = Question("q", encoders=list("abc"), plot="lines", x="compute", lines=lines)
    row = ROW | {"evaluation": "kNN", "case": ""}
    rows = [row | {"encoder": "a", "accuracy": 0.5, "training_pflop": 1.0}]
    rows += [row | {"encoder": "b", "accuracy": 0.3, "training_pflop": 0.0}, row | {"encoder": "c", "accuracy": 0.2}]
    (panel,) = plotted(question, *rows).axes
    across = {line.get_label(): list(line.get_ydata()) for line in panel.lines if list(line.get_xdata()) == [0, 1]}
    assert across == {"random weights": [30, 30], "pixels": [20, 20]}


@pytest.mark.parametrize(("x", "numbers"), [("compute", list("abc")), ("images", {"a": 1, "b": 1, "c": 2})])
@pytest.mark.parametrize("lines", [None, {"20": ["a", "b", "c"]}])
def test_encoders_at_the_same_place_of_a_line_are_drawn_apart(x, numbers, lines):
    """Methods of equal compute: their mean would be the accuracy of none."""
    question = Question("q", encoders=numbers, plot="lines", x=x, lines=lines)
    rows = []
    for name, (accuracy, pflop) in {"a": (0.9, 1.0), "b": (0.1, 1.0), "c": (0.5, 2.0)}.items():
        row = ROW | {"encoder": name, "accuracy": accuracy, "training_pflop": pflop}
        rows += [row, row | {"seed": 1}]
    (panel,) = plotted(question, *rows).axes
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in panel.containers}
    assert drawn == {"20, a": [[1, pytest.approx(90)]], "20, b": [[1, pytest.approx(10)]], "20": [[2, 50]]}


@pytest.mark.parametrize("is_log", [True, False])
def test_a_plot_has_a_panel_for_each_column_and_no_more(is_log):
    point = {"mean": 0.5, "std": 0.1}
    lines = {"5": {1: point, 2: point}, "25": {1: point}}
    figure = plot_lines(
        {str(name): lines for name in range(5)}, "steps", {str(name): "R2" for name in range(5)}, is_log
    )
    assert len([axes for axes in figure.axes if axes.get_visible()]) == 5


def test_random_weights_on_a_line_are_drawn_across_the_panel():
    """A logarithmic axis has no 0: the line would come from the left at the height of its next point."""
    point = {"mean": 0.5, "std": 0.1}
    lines = {"5": {0: point | {"mean": 0.2}, 1: point, 2: point}, "25": {1: point}}
    (panel,) = plot_lines({"few-shot": lines}, "pflop", AXES).axes
    across = {line.get_label(): list(line.get_ydata()) for line in panel.lines if list(line.get_xdata()) == [0, 1]}
    assert across == {"5, at 0": [20, 20]}
    drawn = {bars.get_label(): bars.lines[0].get_xdata().tolist() for bars in panel.containers}
    assert drawn == {"5": [1, 2], "25": [1]}


@pytest.fixture
def fine_tuned():
    """Accuracies after fine-tuning, which took 2 PFLOP, of encoders whose training took more or less."""
    row = ROW | {"evaluation": "tuned", "case": "", "pflop": 2.0}
    return [
        row | {"encoder": "short", "accuracy": 0.1, "training_pflop": 1.0},
        row | {"encoder": "long", "accuracy": 0.3, "training_pflop": 4.0},
        row | {"encoder": "scratch", "accuracy": 0.2, "training_pflop": 0.0},
    ]


def test_lines_go_through_encoders_against_all_compute(fine_tuned):
    lines = {"pre-trained": ["long", "short"], "from scratch": ["scratch"], "both": ["scratch", "short"]}
    axes = plotted(Question("q", plot="lines", x="total compute", lines=lines), *fine_tuned).axes[0]
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axes.containers}
    short, long, scratch = ([place, pytest.approx(value)] for place, value in ((3.0, 10), (6.0, 30), (2.0, 20)))
    assert drawn == {"pre-trained": [short, long], "from scratch": [scratch], "both": [scratch, short]}


def test_costs_stand_beside_the_accuracies_where_they_are_known(fine_tuned):
    """Rows of an earlier version have none; a sum with an unknown part is not known either."""
    short, long, scratch = fine_tuned
    hours = {"training_device_hours": 10.0, "device_hours": 0.5}
    rows = [short | hours, long | {"training_device_hours": 40.0}, scratch]
    for x, pflop, expected in (("total compute", "362", ["10.5", "-", "-"]), ("compute", "140", ["10", "40", "-"])):
        headings, body = table_of(cells(*rows, x=x))
        assert headings == ["accuracy (%)", "tuned", "tuned, PFLOP", "tuned, device-hours"]
        assert [line[-1] for line in body] == expected and "".join(line[-2] for line in body) == pflop
    probed = {key: value for key, value in rows[0].items() if key not in ("pflop", "device_hours")}
    _, body = table_of(cells(probed, x="total compute"))
    assert body == [["short", "10.0", "1", "10"]]  # a probe trains nothing


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
    text = (out / "table.md").read_text()
    headings = [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]]
    titles = [f"{kind} kNN 5: {KINDS[kind].score_title}" for kind in labels]
    assert headings == ["encoder", *titles]
    rows = json.loads((out / "results.json").read_text())["results"]
    of_number = [row for row in rows if (row["kind"], row["dataset"], row["encoder"]) == ("test", "number", "pixels")]
    assert f" {KINDS['number'].text('r2', of_number[0]['accuracy'], *of_number[0]['interval'])} |" in text
    for name, value in of_number[0]["baselines"].items():
        assert f"{KINDS['number'].describe_baseline(name, value)} on number" in text
