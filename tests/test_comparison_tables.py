"""Tables and plots of a comparison: what a mean is over, which columns there are, units, and where lines go."""

import numpy as np
import pytest
from comparisons import FAST, SmallComparison
from matplotlib.collections import LineCollection
from test_label_kinds import colours, redness, write_images

from evaluation.comparison.differences import difference_table, differences_from_best
from evaluation.comparison.rows import frame_of
from evaluation.comparison.tables import cells_by_encoder, plot_question, remarks_on, table_of
from evaluation.config.comparing import Question
from evaluation.frozen import results
from evaluation.frozen.features import LabelledFeatures
from evaluation.metrics.scoring import KINDS

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


def cells(*rows, x=""):
    return cells_by_encoder(frame_of(rows), x)


def remarks(*rows, **question):
    return remarks_on(frame_of(rows), Question("q", **question))


def plotted(question, *rows):
    return plot_question(question, frame_of(rows))


def lines_in(panel):
    """The points of each line with error bars, by its label."""
    return {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in panel.containers}


def rows_of(*kinds):
    """Scores of two encoders: an evaluation for each kind of label."""
    rows = []
    for kind in kinds:
        score = {} if kind == "class" else {"score": KINDS[kind].score_heading}
        row = ROW | {"evaluation": kind, "case": "", "images": 10, **score}
        rows.append(row | {"interval": [0.375, 0.625]})
        rows.append(row | {"encoder": "b", "accuracy": -0.25, "interval": [-0.375, -0.125]})
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
    test = np.eye(6)[np.arange(60) % 4]
    features = LabelledFeatures(np.eye(6), np.arange(6) % 2, test, np.arange(60) % 2)
    ranks = {1: 2, 2: results.rank_of_test_features(features)}
    rows = [ROW | {"kind": "rank", "depth": depth, "rank": rank} for depth, rank in ranks.items()]
    rows += [ROW | {"kind": "dev", "accuracy": 0.25}, ROW]
    numbers = cells(*rows)
    assert numbers["a"]["rank"] == {"mean": pytest.approx(4), "std": 0, "count": 1}
    headings, body = table_of(numbers)
    assert headings[-2:] == ["kNN, dev", "rank"] and body == [["a", "50.0", "25.0", "4"]]
    assert len(plotted(Question("bars"), *rows).axes) == 1


def test_a_mean_over_data_sets_is_over_all_of_them_or_is_not():
    """A column names its dataset where the evaluation has several."""
    row = ROW | {"case": "", "group": "natural"}
    easy = row | {"dataset": "easy", "accuracy": 0.9}
    hard = row | {"dataset": "hard", "accuracy": 0.3}
    rows = [easy, easy | {"seed": 1}, hard, hard | {"seed": 1, "accuracy": 0.5}]
    rows += [easy | {"accuracy": 0.5, "encoder_seed": 1}, easy | {"accuracy": 0.85, "encoder": "b"}]
    of_two_kinds = [easy | {"encoder": "c"}, hard | {"encoder": "c", "score": "R2"}]
    numbers = cells(*rows, *of_two_kinds, ROW | {"evaluation": "masked"})
    assert list(numbers["a"]) == ["easy kNN", "hard kNN", "masked 20", "mean natural kNN"]
    spread = pytest.approx(0.05 * 2**0.5)  # of 0.6 and 0.7
    of_group = numbers["a"]["mean natural kNN"]
    assert (of_group["mean"], of_group["std"], of_group["count"]) == (pytest.approx(0.65), spread, 2)
    assert numbers["a"]["easy kNN"]["count"] == 3
    assert "mean natural kNN" not in numbers["b"] | numbers["c"] and numbers["b"]["easy kNN"]["mean"] == 0.85


@pytest.mark.parametrize(
    "kinds, headings, body, difference",
    [
        (("several",), ["mAP, macro (%)", "several"], ["50.0 (37.5 to 62.5)"], "+75.0 (+5"),
        (
            ("class", "number"),
            ["encoder", "class: accuracy (%)", "number: explained variance (R2)"],
            ["50.0 (37.5 to 62.5)", "0.500 (0.375 to 0.625)"],
            "+0.750 (+0.5",
        ),
    ],
)
def test_a_table_has_the_name_and_the_unit_of_each_score(kinds, headings, body, difference):
    frame = frame_of(rows_of(*kinds))
    named, lines = table_of(cells_by_encoder(frame))
    assert named == headings and lines[0] == ["a", *body]
    _, found = difference_table(differences_from_best(frame))
    assert any(row[0] == f"a, {kinds[-1]}" and row[2].startswith(difference) for row in found)


def test_baselines_are_a_sentence_and_no_columns():
    """They depend on the images and masks, not on the encoder."""
    masked = ROW | {"evaluation": "masked", "case": "model"}
    nearest = masked | {"case": "nearest", "accuracy": 0.25}
    rows = [masked, nearest, masked | {"encoder": "b"}, nearest | {"encoder": "b", "accuracy": 0.3}]
    assert table_of(cells(*rows)) == (["accuracy (%)", "masked model"], [["a", "50.0"], ["b", "50.0"]])
    reached, not_comparable = remarks(*rows)
    assert reached == "Without an encoder: nearest 25.0 to 30.0% in masked."
    assert not_comparable.startswith("Accuracies of masked patches are not comparable")
    labelled = ROW | {"baselines": {"largest class": 0.253}}
    assert remarks(labelled) == ["Without an encoder: largest class 25.3% on birds."]


def test_encoders_that_a_plot_leaves_out_are_named(fine_tuned):
    """They are in the table: those without compute."""
    (sentence,) = remarks(*fine_tuned, ROW | {"encoder": "floor"}, plot="lines", x="compute")
    assert sentence.endswith(": floor.")


# --- plots ---


def is_dots(line):
    return (line.get_linestyle(), line.get_marker()) == ("None", "o")


@pytest.mark.parametrize("plot", ["bars", "lines"])
def test_intervals_are_bars_and_seeds_are_dots(plot):
    rows = [ROW | {"encoder_seed": seed, "accuracy": 0.4 + seed / 5, "interval": [0.3, 0.8]} for seed in (0, 1)]
    once = ROW | {"encoder": "b", "accuracy": 0.7, "interval": [0.65, 0.8]}
    (panel,) = plotted(Question("q", plot=plot, x="size", encoders={"a": 1.0, "b": 2.0}), *rows, once).axes
    (bars,) = (each for each in panel.collections if isinstance(each, LineCollection))
    across = int(plot == "lines")
    assert np.allclose([ends[:, across] for ends in bars.get_segments()], [[30, 80], [65, 80]])
    dots = [line.get_xydata()[:, across].tolist() for line in panel.lines if is_dots(line)]
    assert [each for each in dots if each] == [pytest.approx([40, 60])]  # of one seed the mean says it


@pytest.mark.parametrize("plot", ["bars", "lines", "depth"])
def test_bars_lines_and_curves_have_the_unit_of_their_score(plot):
    kinds = ({"kind": "test"}, {"kind": "dev", "depth": 1}, {"kind": "dev", "depth": 2})
    rows = [row | kind for row in rows_of("several", "number") for kind in kinds]
    several, number = plotted(Question("q", plot=plot, x="images", encoders={"a": 1.0, "b": 2.0}), *rows).axes
    if plot == "bars":
        shown = [(each.get_xlabel(), [bar.get_width() for bar in each.patches]) for each in (several, number)]
        assert shown == [("mAP, macro (%)", [50, -25]), ("explained variance (R2)", [0.5, -0.25])]
    else:
        on_dev, drawn = ("", [50, -25]) if plot == "lines" else (" on the dev split", [50, 50])
        assert several.get_ylabel() == f"mAP, macro (%){on_dev}"
        assert number.get_ylabel() == f"explained variance (R2){on_dev}"
        assert several.lines[0].get_ydata().tolist() == drawn
        assert number.lines[0].get_ydata().tolist() == [each / 100 for each in drawn]


def test_a_line_without_compute_is_drawn_across_the_panel():
    """Of random weights, or on a line of others: a logarithmic axis has no 0."""
    lines = {"trained": ["a", "b"], "random weights": ["b"], "pixels": ["c"]}
    question = Question("q", encoders=list("abc"), plot="lines", x="compute", lines=lines)
    row = ROW | {"case": ""}
    rows = [
        row | {"encoder": "a", "training_pflop": 1},
        row | {"encoder": "b", "training_pflop": 0, "accuracy": 0.3},
        row | {"encoder": "c", "accuracy": 0.2},
    ]
    (panel,) = plotted(question, *rows).axes
    across = {line.get_label(): list(line.get_ydata()) for line in panel.lines if list(line.get_xdata()) == [0, 1]}
    assert across == {"trained, at 0": [30, 30], "random weights": [30, 30], "pixels": [20, 20]}
    assert lines_in(panel) == {"trained": [[1, 50]]}


def test_encoders_at_the_same_place_of_a_line_are_drawn_apart():
    """Methods of equal compute: their mean would be the accuracy of none."""
    question = Question("q", encoders=list("abc"), plot="lines", x="compute")
    of_each = (("a", 0.9, 1.0), ("b", 0.1, 1.0), ("c", 0.5, 2.0))
    rows = [ROW | {"encoder": name, "accuracy": share, "training_pflop": pflop} for name, share, pflop in of_each]
    (panel,) = plotted(question, *rows, *(row | {"seed": 1} for row in rows)).axes
    assert lines_in(panel) == {"20, a": [[1, pytest.approx(90)]], "20, b": [[1, pytest.approx(10)]], "20": [[2, 50]]}


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
    short, long, scratch = ([place, pytest.approx(value)] for place, value in ((3.0, 10), (6.0, 30), (2.0, 20)))
    assert lines_in(axes) == {"pre-trained": [short, long], "from scratch": [scratch], "both": [scratch, short]}


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
    kinds = {"several": colours, "number": redness}
    small = SmallComparison(tmp_path)
    del small.config["encoders"][:-1]
    small.config["evaluations"] = [{"name": "kNN", "command": "knn", "options": FAST | {"neighbours": 5}}]
    for dataset, (kind, label) in zip(small.config["datasets"], kinds.items(), strict=True):
        path = str(write_images(tmp_path / kind, label))
        dataset |= {"name": kind, "group": None, "options": {"data.path": path, "task": kind}}
    small.compare()
    text = small.table()
    headings = [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]]
    assert headings == ["encoder", *(f"{kind} kNN 5: {KINDS[kind].score_title}" for kind in kinds)]
    assert "always predicting the mean 0.000 on number" in text
