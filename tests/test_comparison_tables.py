"""Tables and plots of a comparison: what a mean is over, which columns there are, and where lines go."""

import numpy as np
import pytest

from evaluation.comparison.entries import Question
from evaluation.comparison.files import write_comparison
from evaluation.comparison.plots import plot_question
from evaluation.comparison.remarks import (
    describe_masked_baselines,
    describe_not_plotted,
    describe_other_tasks,
    describe_spread,
)
from evaluation.comparison.tables import cells_by_encoder, cells_of
from evaluation.figures.charts import plot_depths, plot_lines
from evaluation.frozen import probing
from evaluation.frozen.features import LabelledFeatures

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


@pytest.fixture
def charted():
    """A point of a chart."""
    return {"mean": 0.5, "std": 0.1}


def visible_panels(figure):
    """Panels of a figure that are drawn."""
    return [axes for axes in figure.axes if axes.get_visible()]


def test_seeds_that_diverged_are_no_part_of_a_mean_and_are_counted():
    rows = [ROW, ROW | {"encoder_seed": 1}, ROW | {"encoder_seed": 2, "kind": "diverged"}]
    numbers = cells_by_encoder(rows)
    assert numbers["a"]["kNN 20"] == {"mean": 0.5, "std": 0, "count": 2, "diverged": 1}
    _, cells = cells_of(numbers)
    assert cells == [["a", "50.0 ± 0.0 (1 diverged)"]]


@pytest.mark.parametrize(
    ("encoder_seeds", "draws", "sentences"),
    [
        (1, 1, []),
        (2, 1, ["± is the standard deviation over seeds."]),
        (1, 3, ["± is the standard deviation over draws in few-shot."]),
        (2, 3, ["± is the standard deviation over seeds, over seeds and draws in few-shot."]),
    ],
)
def test_a_sentence_says_what_the_spread_is_over(encoder_seeds, draws, sentences):
    rows = []
    for seed in range(encoder_seeds):
        rows.append(ROW | {"encoder_seed": seed, "seed": seed})  # fine-tuning's seed is that of the encoder
        rows += [ROW | {"encoder_seed": seed, "seed": draw, "evaluation": "few-shot"} for draw in range(draws)]
    assert describe_spread(rows) == sentences


def test_rank_and_dev_accuracy_are_columns_but_no_bars():
    """The rank of the deepest features: of k directions that are equally strong it is k."""
    ranks = probing.rank_by_depth({1: features_with_rank(2), 2: features_with_rank(4)})
    assert ranks == pytest.approx({1: 2, 2: 4})
    rows = [ROW | {"kind": "rank", "depth": depth, "rank": rank} for depth, rank in ranks.items()]
    rows.append(ROW | {"kind": "dev", "accuracy": 0.25})
    rows.append(ROW)
    numbers = cells_by_encoder(rows)
    assert numbers["a"]["rank"] == {"mean": pytest.approx(4), "std": 0, "count": 1}
    headings, cells = cells_of(numbers)
    assert headings[-2:] == ["kNN, dev", "rank"]
    assert cells == [["a", "50.0", "25.0", "4"]]
    assert len(plot_question(Question("bars"), rows, numbers).axes) == 1


def test_baselines_of_masked_patches_are_a_sentence_and_no_columns():
    """They depend on the images and masks, not on the encoder."""
    masked = ROW | {"evaluation": "masked", "case": "model"}
    rows = [masked, masked | {"case": "nearest", "accuracy": 0.25}]
    rows += [row | {"encoder": "b"} for row in (masked, rows[1] | {"accuracy": 0.3})]
    assert cells_of(cells_by_encoder(rows)) == (["accuracy (%)", "masked model"], [["a", "50.0"], ["b", "50.0"]])
    assert describe_masked_baselines(rows) == ["Baselines of masked, which need no encoder: nearest 25.0 to 30.0%."]
    assert describe_masked_baselines(rows[:2]) == ["Baselines of masked, which need no encoder: nearest 25.0%."]
    assert describe_masked_baselines([ROW]) == []


def test_masked_patches_that_differ_between_encoders_are_not_comparable():
    """Of more visible neighbours, or of fewer colours, any prediction is right more often."""
    rows = []
    for encoder, nearest in (("a", 0.25), ("b", 0.3)):
        masked = ROW | {"evaluation": "masked", "encoder": encoder}
        rows += [masked | {"case": "model"}, masked | {"case": "nearest", "accuracy": nearest}, ROW]
    (sentence,) = describe_other_tasks(rows)
    assert sentence.startswith("Accuracies of masked are not comparable: masks, images or colours differ")
    assert sentence.endswith("(nearest 25.0 to 30.0%).")
    assert describe_other_tasks(rows[:3]) == describe_other_tasks([*rows[:3], rows[1] | {"encoder": "b"}]) == []


def test_a_column_names_its_dataset_where_the_evaluation_has_several():
    rows = [ROW, ROW | {"dataset": "other"}, ROW | {"evaluation": "masked", "case": "model"}]
    headings, _ = cells_of(cells_by_encoder(rows))
    assert headings[1:] == [f"{ROW['dataset']} kNN 20", "other kNN 20", "masked model"]


def features_with_rank(directions):
    """Test features that point in as many directions, each as often."""
    train_labels = np.arange(6) % 2
    test_labels = np.arange(60) % 2
    test = np.eye(6)[np.arange(60) % directions]
    return LabelledFeatures(np.eye(6), train_labels, test, test_labels)


def test_a_mean_over_data_sets_is_over_all_of_them_or_is_not():
    row = ROW | {"case": "", "group": "natural"}
    easy = row | {"dataset": "easy", "accuracy": 0.9}
    hard = row | {"dataset": "hard", "accuracy": 0.3}
    of_seed_1 = row | {"dataset": "easy", "accuracy": 0.5, "encoder_seed": 1}
    other = row | {"dataset": "easy", "accuracy": 0.85, "encoder": "b"}
    numbers = cells_by_encoder([easy, hard, of_seed_1, other])
    assert numbers["a"]["mean natural kNN"] == {"mean": pytest.approx(0.6), "std": 0, "count": 1}
    assert numbers["a"]["easy kNN"]["count"] == 2
    assert "mean natural kNN" not in numbers["b"]
    assert numbers["b"]["easy kNN"]["mean"] == 0.85
    groups = {"natural": {"easy", "hard", "gone"}}
    unmeasured = cells_by_encoder([easy, hard, of_seed_1], groups=groups)
    assert "mean natural kNN" not in unmeasured["a"]
    assert unmeasured["a"]["hard kNN"]["mean"] == 0.3


def test_a_plot_of_lines_has_a_panel_for_each_column_and_no_more(charted):
    lines = {"5": {1: charted, 2: charted}, "25": {1: charted}}
    figure = plot_lines({str(name): lines for name in range(5)}, "steps")
    assert len(visible_panels(figure)) == 5


def test_panels_with_the_same_lines_have_one_legend(charted):
    lines = {"masked": {1: charted}, "labels": {1: charted}}
    same = plot_lines({"few-shot": lines, "linear": lines}, "images")
    assert len(same.legends) == 1 and not any(panel.get_legend() for panel in same.axes)
    others = plot_lines({"few-shot": lines, "linear": {"masked": {1: charted}}}, "images")
    assert not others.legends and all(panel.get_legend() for panel in others.axes)


def test_each_case_has_its_panel_with_all_lines():
    lines = {"one": ["a"], "two": ["b"]}
    question = Question("q", encoders={"a": 1, "b": 2}, plot="lines", x="images", lines=lines)
    rows = [ROW | {"encoder": name, "evaluation": "few-shot", "case": case} for name in "ab" for case in ("5", "25")]
    figure = plot_question(question, rows, {})
    assert [panel.get_title() for panel in figure.axes] == ["few-shot 5", "few-shot 25"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]


def test_a_line_without_compute_is_drawn_across_the_panel():
    lines = {"trained": ["a"], "random weights": ["b"], "pixels": ["c"]}
    question = Question("q", encoders=list("abc"), plot="lines", x="compute", lines=lines)
    row = ROW | {"evaluation": "kNN", "case": "", "dataset": "d"}
    rows = [row | {"encoder": "a", "accuracy": 0.5, "training_pflop": 1.0}]
    rows += [row | {"encoder": "b", "accuracy": 0.3, "training_pflop": 0.0}, row | {"encoder": "c", "accuracy": 0.2}]
    (panel,) = plot_question(question, rows, {}).axes
    across = {line.get_label(): list(line.get_ydata()) for line in panel.lines if list(line.get_xdata()) == [0, 1]}
    assert across == {"random weights": [30, 30], "pixels": [20, 20]}
    assert [text.get_text() for text in panel.get_legend().get_texts()] == list(lines)


@pytest.mark.parametrize(("x", "numbers"), [("compute", list("abc")), ("images", {"a": 1, "b": 1, "c": 2})])
@pytest.mark.parametrize("lines", [None, {"20": ["a", "b", "c"]}])
def test_encoders_at_the_same_place_of_a_line_are_drawn_apart(x, numbers, lines):
    """Methods of equal compute: their mean would be the accuracy of none."""
    question = Question("q", encoders=numbers, plot="lines", x=x, lines=lines)
    accuracies = {"a": (0.9, 1.0), "b": (0.1, 1.0), "c": (0.5, 2.0)}
    rows = []
    for name, (accuracy, pflop) in accuracies.items():
        row = ROW | {"encoder": name, "accuracy": accuracy, "training_pflop": pflop}
        rows += [row, row | {"seed": 1}]
    (panel,) = plot_question(question, rows, {}).axes
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in panel.containers}
    assert drawn == {"20, a": [[1, pytest.approx(90)]], "20, b": [[1, pytest.approx(10)]], "20": [[2, 50]]}


def test_random_weights_alone_are_drawn_at_no_compute(charted):
    figure = plot_lines({"few-shot": {"random weights": {0: charted}}}, "pflop")
    assert len(figure.axes[0].lines) == 1


def test_random_weights_on_a_line_are_drawn_across_the_panel(charted):
    """A logarithmic axis has no 0: the line would come from the left at the height of its next point."""
    lines = {"5": {0: charted | {"mean": 0.2}, 1: charted, 2: charted}, "25": {1: charted}}
    (panel,) = plot_lines({"few-shot": lines}, "pflop").axes
    across = {line.get_label(): list(line.get_ydata()) for line in panel.lines if list(line.get_xdata()) == [0, 1]}
    assert across == {"5, at 0": [20, 20]}
    drawn = {bars.get_label(): bars.lines[0].get_xdata().tolist() for bars in panel.containers}
    assert drawn == {"5": [1, 2], "25": [1]}
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["5", "5, at 0", "25"]


def test_a_panel_has_all_lines(charted):
    lines = {str(case): {1: charted} for case in range(9)}
    figure = plot_lines({"many": lines}, "steps")
    assert len(figure.axes[0].lines) == 9


def test_a_plot_by_depth_has_a_panel_for_each_column_and_no_more(charted):
    curve = {1: charted, 2: charted}
    figure = plot_depths({"one": {"a": curve, "floor": {1: charted}}, "two": {"a": curve}})
    assert len(visible_panels(figure)) == 2


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
    question = Question("q", plot="lines", x="total compute", lines=lines)
    axes = plot_question(question, fine_tuned, {}).axes[0]
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axes.containers}
    short = [3.0, pytest.approx(10)]
    long = [6.0, pytest.approx(30)]
    scratch = [2.0, pytest.approx(20)]
    assert drawn == {"pre-trained": [short, long], "from scratch": [scratch], "both": [scratch, short]}
    assert axes.get_xticks().tolist() == [2, 3, 6]


def test_the_table_of_a_plot_against_compute_has_a_column_of_compute(fine_tuned, tmp_path):
    lines = {"pre-trained": ["long", "short"], "from scratch": ["scratch"]}
    question = Question("q", encoders=["long", "scratch"], plot="lines", x="total compute", lines=lines)
    write_comparison(tmp_path, [question], fine_tuned, {})
    text = (tmp_path / "table.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    headings, _, *cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert "Without intervals, so no difference is told apart: tuned." in text
    assert headings == ["accuracy (%)", "tuned", "tuned, PFLOP"]
    assert cells == [["long", "30.0", "6"], ["scratch", "20.0", "2"]]


def test_encoders_that_a_plot_leaves_out_are_named(fine_tuned):
    """They are in the table: without compute, or on no line."""
    unknown = {key: value for key, value in fine_tuned[0].items() if key != "training_pflop"} | {"encoder": "floor"}
    rows = [*fine_tuned, unknown]
    against_compute = Question("q", plot="lines", x="compute")
    assert describe_not_plotted(rows, against_compute) == ["Not in the plot, since their compute is unknown: floor."]
    on_lines = Question("q", plot="lines", x="compute", lines={"a": ["long"], "b": ["scratch", "floor"]})
    assert describe_not_plotted(rows, on_lines) == ["Not in the plot, since they are on none of its lines: short."]
    assert describe_not_plotted(rows, Question("q")) == describe_not_plotted(fine_tuned, against_compute) == []


def test_device_hours_stand_beside_the_compute_where_they_are_known(fine_tuned):
    """Rows of an earlier version have none; a sum with an unknown part is not known either."""
    short, long, scratch = fine_tuned
    rows = [
        short | {"training_device_hours": 10.0, "device_hours": 0.5},
        long | {"training_device_hours": 40.0},
        scratch,
    ]
    for x, expected in (("total compute", ["10.5", "-", "-"]), ("compute", ["10", "40", "-"])):
        question = Question("q", encoders=["short", "long", "scratch"], plot="lines", x=x)
        headings, body = cells_of(cells_by_encoder(rows, question))
        assert headings == ["accuracy (%)", "tuned", "tuned, PFLOP", "tuned, device-hours"]
        assert [line[-1] for line in body] == expected
    probed = {key: value for key, value in rows[0].items() if key not in ("pflop", "device_hours")}
    _, body = cells_of(cells_by_encoder([probed], Question("q", plot="lines", x="total compute")))
    assert body == [["short", "10.0", "1", "10"]]  # a probe trains nothing
