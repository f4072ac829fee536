"""Labels that are several classes, or a number: read, learned by probes, and measured, against scikit-learn."""

import json
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from conftest import FAST, encoded, refused
from datasets import ClassLabel, List, Value
from numpy.testing import assert_allclose
from PIL import Image
from scipy.special import ndtr
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import average_precision_score, mean_absolute_error, r2_score
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import normalize
from test_intervals import measure

from evaluation import features, fewshot, knn, linear
from evaluation.comparison.rows import frame_of
from evaluation.config import KnnConfig, LinearConfig
from evaluation.figures.charts import markdown_table
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.results import describe_baselines, write_report
from evaluation.metrics.scoring import KINDS, Outcomes, add_figures, best_choice, result_entries, summarize_accuracies
from evaluation.supervision.learners import learner_of
from mpp.config import DataConfig
from mpp.data.labels import find_label_kind, find_labels, read_labels


def read(kind, feature, *splits):
    """The labels of splits as arrays, and the names of classes."""
    columns = []
    for values in splits:
        rows = datasets.Dataset.from_dict({"label": values}, features=datasets.Features({"label": feature}))
        columns.append(find_labels(DataConfig(label_column="label"), rows))
    numbered = read_labels(columns, kind)
    return [part.tolist() for part in numbered.parts], numbered.class_names


@pytest.mark.parametrize(
    "feature, values",
    [
        (Value("string"), ["cat; dog", "dog", None, " ", ";", "cat;cat;"]),
        (List(Value("string")), [["cat", "dog"], ["dog"], None, None, [], ["cat"]]),
        (List(ClassLabel(names=["cat", "dog"])), [[0, 1], [1], None, None, [], [0]]),
        (List(Value("int64")), [[0, 1], [1], None, None, [], [0]]),  # numbers of classes, not a mark for each
    ],
)
def test_an_empty_list_is_an_image_of_no_class_and_a_blank_is_missing(feature, values):
    (marks,), names = read("several", feature, values)
    assert names in (["cat", "dog"], ["0", "1"])
    assert marks == [[1, 1], [0, 1], [-1, -1], [-1, -1], [0, 0], [1, 0]]
    assert read("several", List(Value("int8")), [[0], [1]])[0] == [[[1, 0], [0, 1]]]  # one class each, not a mark


def test_one_class_an_image_may_be_learned_as_several():
    (train, test), names = read("several", Value("int64"), [3, -1, 1], [7, 3, None])
    assert names == ["1", "3", "7"]
    assert train == [[0, 1, 0], [-1, -1, -1], [1, 0, 0]]
    assert test == [[0, 0, 1], [0, 1, 0], [-1, -1, -1]]


@pytest.mark.parametrize(
    "feature, values",
    [
        (Value("float64"), [1.5, None, np.nan, np.inf, -2.0]),
        (Value("string"), ["1.5", " ", None, "nan", " -2e0 "]),
    ],
)
def test_what_is_no_finite_number_is_missing(feature, values):
    (numbers,), names = read("number", feature, values)
    assert numbers == pytest.approx([1.5, np.nan, np.nan, np.nan, -2.0], nan_ok=True) and names == []


@pytest.mark.parametrize(
    "kind, feature, values, message",
    [
        ("number", Value("string"), ["1.5", "big"], "big.*it must hold numbers"),
        ("number", ClassLabel(names=["a", "b"]), [0, 1], "it must hold numbers"),
        ("several", Value("float64"), [1.5, 2.0], "it must hold lists of classes, or text with ;"),
        ("several", List(Value("int8")), [[0, 1], None, [1, 1]], "holds lists of a 0 or a 1 for each class"),
    ],
)
def test_a_column_of_another_kind_is_named(kind, feature, values, message):
    with refused(f"data.label_column is label, which .*{message}"):
        read(kind, feature, values)


@pytest.mark.parametrize(
    "values, kind",
    [([1.0, 2.0, None], "class"), ([1.0, 2.5, None], "number"), (["1", "2.5"], "number"), (["a", "2.5"], "class")],
)
def test_auto_is_classes_unless_numbers_have_fractions(values, kind):
    rows = datasets.Dataset.from_dict({"label": values})
    assert find_label_kind("auto", find_labels(DataConfig(), rows)) == kind


def test_average_precision_is_scikit_learns_with_ties_and_without_empty_classes(rng):
    targets = (rng.random((60, 5)) < np.linspace(0.5, 0.1, 5)).astype(np.int8)
    targets[:, 2] = 0
    scores = np.round(0.3 * targets + rng.random((60, 5)), 1)
    outcomes = Outcomes("several", targets, scores)
    kept = [0, 1, 3, 4]
    by_class = average_precision_score(targets[:, kept], scores[:, kept], average=None)
    expected = {"macro_map": by_class.mean(), "micro_map": average_precision_score(targets, scores, average="micro")}
    assert measure(outcomes) == pytest.approx(expected, abs=1e-12)
    counts, shares = KINDS["several"].class_table(outcomes).to_numpy().T
    assert counts[2] == 0 and shares / 100 == pytest.approx(np.insert(by_class, 2, np.nan), abs=1e-12, nan_ok=True)


def test_images_that_a_head_is_sure_of_are_ranked():
    marks = np.array([[0], [1], [1]], np.int8)
    predicted = learner_of("several", marks, 1).predict(torch.tensor([[18.0], [19.0], [25.0]]))
    assert measure(Outcomes("several", marks, predicted.numpy()))["macro_map"] == 1


def test_the_interval_of_a_mean_average_precision_stays_a_share_and_is_wide_where_nothing_was_wrong():
    targets = np.arange(20)[:, None] % [2, 4] == 0
    perfect = Outcomes("several", targets.astype(np.int8), targets + 0.0)
    few = perfect.select(np.arange(8))
    for name, (_, low, high) in KINDS["several"].estimates(perfect).items():
        assert 0.6 < low < 0.95 and high == pytest.approx(1)
        assert KINDS["several"].estimates(few)[name][1] < low
    unknown = KINDS["several"].estimates(Outcomes("several", np.zeros((5, 2), np.int8), np.ones((5, 2))))
    assert np.isnan([ends for _, *ends in unknown.values()]).all()


def test_figures_of_numbers_are_scikit_learns_and_missing_ones_do_not_count(rng):
    targets = rng.normal(20, 5, 50)
    predictions = targets + rng.normal(0, 2, 50)
    targets[::7] = np.nan
    pairs = np.array([targets, predictions])[:, np.isfinite(targets)]
    result = result_entries(Outcomes("number", targets, predictions))
    low, high = result["interval"]
    assert low < result["accuracy"] < high
    assert result["accuracy"] == pytest.approx(r2_score(*pairs), abs=1e-12)
    assert result["figures"]["mae"][0] == pytest.approx(mean_absolute_error(*pairs))
    with refused("none of the 50 test images has a label"):
        result_entries(Outcomes("number", np.full(50, np.nan), predictions))


def draw_several(distance, correlation, rng, images):
    """Three classes, whose positive images have scores that lie so far above those of others.

    Args:
        correlation: of the labels of an image, and of its scores.
    """

    def draw_normal():
        shared, own = rng.normal(size=(images, 1)), rng.normal(size=(images, 3))
        return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own

    targets = (ndtr(draw_normal()) < [0.5, 0.3, 0.2]).astype(np.int8)
    return Outcomes("several", targets, distance * targets + draw_normal())


def draw_numbers(rng, images):
    targets = rng.normal(0, 2, images)
    return Outcomes("number", targets, targets + rng.normal(0, 1, images))


COVERAGES = [
    (draw_numbers, {"r2": 1 - 1 / 4, "mae": np.sqrt(2 / np.pi)}, 0.92),  # closed forms
    (partial(draw_several, 0.3, 0), {"macro_map": 0.3977, "micro_map": 0.4029}, 0.905),  # of a million images
    (partial(draw_several, 2, 0.5), {"macro_map": 0.8531, "micro_map": 0.8662}, 0.905),
]


@pytest.mark.faults
@pytest.mark.parametrize("images, simulations", [(50, 1000), (286, 300)])
@pytest.mark.parametrize("draw, truth, least", COVERAGES)
def test_intervals_of_other_kinds_cover_the_truth(draw, truth, least, images, simulations, rng):
    covered = dict.fromkeys(truth, 0)
    for _ in range(simulations):
        outcomes = draw(rng, images)
        for name, (_, low, high) in KINDS[outcomes.kind].estimates(outcomes).items():
            covered[name] += low <= truth[name] <= high
    for name, count in covered.items():
        assert least <= count / simulations <= 0.99, name


def test_intervals_of_numbers_stay_within_the_bounds_of_their_figures():
    """R2 is 1 at most, and an error 0 at least; few images widen intervals beyond the resamples."""
    for images in (3, 8):
        numbers = np.arange(images)
        errors = np.where(numbers == 1, 1.0, 0.1)
        result = result_entries(Outcomes("number", 3.0 * numbers, 3 * numbers + errors))
        assert result["interval"][1] <= 1 and result["figures"]["mae"][1] >= 0


def test_figures_that_images_do_not_have_are_null_in_files_and_a_dash_in_tables(tmp_path):
    """The baseline of a number is to predict the mean, whose R2 is 0 by definition."""
    outcomes = Outcomes("number", np.full(5, 3.0), np.arange(5.0))
    report = {"results": add_figures([{"seed": 0, "outcomes": outcomes}, {"seed": 1, "outcomes": outcomes}])}
    report["summary"] = summarize_accuracies(report["results"], "seed")
    path = tmp_path / "linear.json"
    written = write_report(path, report)
    assert describe_baselines(written) == "always predicting the mean 0.000"
    rows = KINDS["number"].rows(written["results"][0])
    assert [row[1].split()[0] for row in rows] == ["-", "1.40"]
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [result["accuracy"] for result in read["results"]] == [None, None]
    assert KINDS["number"].rows(read["results"][0]) == rows
    row = frame_of([{"kind": "test"} | read["results"][0]]).iloc[0]
    assert row.isna().accuracy and row.isna().interval
    assert best_choice({1: np.nan, 2: -3.0, 3: np.nan}) == 2 and best_choice({1: np.nan, 2: np.nan}) == 1


@pytest.fixture
def clouds(rng):
    cloud = rng.normal(size=(300, 8)).astype(np.float32)
    weights = rng.normal(size=(8, 3))
    return cloud, cloud @ weights + rng.normal(0, 0.5, (300, 3))


def test_several_classes_are_a_logistic_regression_each_and_numbers_a_ridge_regression_in_their_own_unit(clouds):
    cloud, scores = clouds
    marks = (scores > [0, 1, -1]).astype(np.int8)
    learner = learner_of("several", marks, 3)
    layer = linear.fit(torch.from_numpy(cloud), torch.from_numpy(marks), learner, LinearConfig(), 0.01)
    for number in range(3):
        reference = LogisticRegression(C=1 / (0.01 * len(cloud)), tol=1e-8, max_iter=1000).fit(cloud, marks[:, number])
        assert_allclose(layer.weight[number].detach(), reference.coef_[0], atol=1e-3)
        assert float(layer.bias[number]) == pytest.approx(reference.intercept_[0], abs=1e-3)
    targets = 1000 + 50 * scores[:, 0]
    learner = learner_of("number", targets, 0)
    layer = linear.fit(torch.from_numpy(cloud), torch.from_numpy(targets), learner, LinearConfig(), 0.1)
    reference = Ridge(alpha=0.1 / 2 * len(cloud)).fit(cloud, targets)
    assert_allclose(layer.weight[0].detach(), reference.coef_, rtol=1e-3, atol=0.02)
    assert float(layer.bias[0]) == pytest.approx(reference.intercept_, rel=1e-5)


@pytest.mark.parametrize("kind", ["class", "number", "several"])
def test_neighbours_are_scikit_learns(clouds, kind):
    """On the unit sphere |a - b|^2 = 2 - 2 cos."""
    cloud, scores = clouds
    marks = (scores == scores.max(1, keepdims=True) if kind == "class" else scores > 0).astype(np.int8)
    targets = scores[:, 0] if kind == "number" else marks
    units = normalize(cloud)
    labels = scores.argmax(1) if kind == "class" else targets
    data = LabelledFeatures(cloud[:200], labels[:200], cloud[200:], labels[200:], kind=kind)
    for neighbours, result in zip((5, 30), knn.evaluate(data, KnnConfig(neighbours=(5, 30))), strict=True):
        reference = KNeighborsRegressor(neighbours, weights=lambda far: np.exp((1 - far**2 / 2) / 0.07))
        expected = reference.fit(units[:200], targets[:200]).predict(units[200:])
        predictions = result["outcomes"].predictions
        assert_allclose(predictions, expected.argmax(1) if kind == "class" else expected, atol=1e-4)


def write_images(folder, label, count=24):
    """Images that are more or less red, with labels in a CSV of splits."""
    folder.mkdir(parents=True)
    lines = ["file_name,split,label"]
    for number in range(2 * count):
        red = number % count / count
        split = "train" if number < count else "test"
        image = Image.new("RGB", (16, 16), (int(255 * red), 10 * (number % 7), 0))
        (folder / f"{number:03d}.png").write_bytes(encoded(image))
        lines.append(f"{number:03d}.png,{split},{label(number, red)}")
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


def redness(number, red):
    return "" if number % 8 == 3 else f"{3 + 7 * red:.2f}"


def colours(number, red):
    names = ["bright"] * (red > 0.3) + ["red"] * (red > 0.6)
    return "" if number % 8 == 3 else ";".join(names) or ";"


@pytest.mark.parametrize(
    "label, task, figure, names", [(redness, "auto", "R2", []), (colours, "several", "mAP, macro", ["bright", "red"])]
)
def test_probes_of_other_kinds_report_their_figures_and_count_missing_labels(
    label, task, figure, names, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    images = write_images(tmp_path / "images", label)
    common = ("--encoder=floor:pixels", f"--data.path={images}", f"--task={task}", *FAST)
    of_linear = linear.main([*common, "--out=linear.json"])
    printed = capsys.readouterr().out
    assert "24 train (21 labelled), 24 test (21 labelled)" in printed and figure in printed
    of_knn = knn.main([*common, "--neighbours=5", "--out=knn.json"])
    for report, least in ((of_linear, 0.9), (of_knn, 0.2)):
        assert report["results"][-1]["accuracy"] > least
        assert (report["labels"]["images"], report["labels"]["class_names"]) == (21, names)
    with refused(r"task is \w+; it must be class"):
        fewshot.main([*common, "--out=fewshot.json"])
    features.main([*common, "--out=f.npz"])
    (result,) = linear.main(["--features=f.npz", "--threads=1", "--out=again.json"])["results"]
    (before,) = of_linear["results"]
    assert before | result == before  # of features no depth is known


def test_a_name_does_not_break_a_table():
    """Neither a bar nor a new line ends a cell of Markdown: of classes, encoders, files."""
    lines = markdown_table(["class", "images"], [["a|b", "1"], ["c\nd", "2"]]).splitlines()
    assert [line.split() for line in lines[2:]] == [["|", r"a\|b", "|", "1", "|"], ["|", "c", "d", "|", "2", "|"]]
