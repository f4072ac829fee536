"""Figures of test images and their intervals, beside scikit-learn and by simulation."""

import numpy as np
import pytest
from conftest import refused
from numpy.testing import assert_allclose
from scipy import stats
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix, f1_score, jaccard_score

from evaluation.frozen.results import write_report
from evaluation.metrics.intervals import interval, wilson
from evaluation.metrics.scoring import (
    KINDS,
    Outcomes,
    add_figures,
    image_scores,
    interval_over_draws,
    labelled_outcomes,
    load_outcomes,
    save_outcomes,
    score_of,
)
from evaluation.patches.features import count_confusion
from mpp.features.metrics import COUNTS_FILE, load_masked_counts, save_masked_counts

KIND = KINDS["class"]
PIXELS = KINDS["pixels"]
SIMULATIONS = 400


def draw(rng, images, accuracy, classes, shares=None):
    """Outcomes of images, each right with the same probability; of as many of each class, or by their shares."""
    truth = rng.choice(classes, images, p=shares)
    others = (truth + rng.integers(1, classes, images)) % classes
    predicted = np.where(rng.random(images) < accuracy, truth, others)
    return Outcomes("class", truth, predicted, [f"name {number}" for number in range(classes)])


def measure(outcomes):
    """All figures."""
    return {name: value for name, (value, _) in KINDS[outcomes.kind].scores(outcomes).items()}


def intervals(outcomes):
    """The interval of each figure."""
    return {name: tuple(ends) for name, (_, *ends) in KINDS[outcomes.kind].estimates(outcomes).items()}


@pytest.mark.parametrize("seed", range(2))
def test_figures_are_those_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    outcomes = draw(rng, 60, 0.6, 6, rng.dirichlet(np.ones(6)))  # often a class without test images
    truth, predicted = outcomes.targets, outcomes.predictions
    figures = measure(outcomes)
    assert figures["accuracy"] == accuracy_score(truth, predicted)
    assert figures["class_mean"] == pytest.approx(balanced_accuracy_score(truth, predicted), abs=1e-12)
    assert figures["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro"), abs=1e-12)
    assert (KIND.confusion(outcomes) == confusion_matrix(truth, predicted, labels=range(6))).all()


@pytest.mark.parametrize("right, count", [(0, 1), (50, 50), (7, 50), (9700, 10_000)])
def test_wilson_is_that_of_scipy(right, count):
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert_allclose(wilson(right, count), (expected.low, expected.high), atol=1e-12)


@pytest.mark.parametrize("images, accuracy, classes", [(50, 0.97, 2), (50, 0.7, 5), (286, 0.97, 5)])
def test_intervals_cover_the_truth(images, accuracy, classes):
    """About 95 of 100 of them. Of macro F1 and the mean over classes, the truth is that of a million images."""
    rng = np.random.default_rng(3)
    truth = measure(draw(rng, 10**6, accuracy, classes))
    covered = dict.fromkeys(truth, 0)
    for _ in range(SIMULATIONS):
        for name, (low, high) in intervals(draw(rng, images, accuracy, classes)).items():
            covered[name] += low <= truth[name] <= high
    for name, count in covered.items():
        assert 0.915 <= count / SIMULATIONS <= 0.99, name


def test_means_over_classes_of_few_images_have_no_interval():
    """With fewer than five images a class, it would hold in 79 of 100 cases."""
    rng = np.random.default_rng(3)
    few, enough = (intervals(draw(rng, images, 0.7, 20)) for images in (50, 200))
    assert np.isnan([few["macro_f1"], few["class_mean"]]).all() and np.isfinite(few["accuracy"]).all()
    assert np.isfinite(list(enough.values())).all()


@pytest.mark.parametrize("kind", ["class", "several", "number", "pixels"])
def test_the_mean_of_the_scores_of_images_is_the_figure_and_their_variance_its_error(kind):
    """As many copies of an image tell by finite differences."""
    outcomes = unlearned(kind, 60)
    more = measure(outcomes.select([*np.tile(np.arange(60), 100), 7]))
    for name, (value, scores) in KINDS[kind].scores(outcomes).items():
        assert scores.mean() == pytest.approx(value, abs=1e-9)
        assert 6001 * (more[name] - value) == pytest.approx(scores[7] - value, abs=0.05 * max(1, abs(scores[7])))
    right = draw(np.random.default_rng(0), 50, 0.7, 5)
    assert_allclose(image_scores(right), right.predictions == right.targets, atol=1e-12)


def test_the_interval_of_a_mean_is_students(rng):
    sample = rng.normal(size=20)
    expected = stats.ttest_1samp(sample, 0).confidence_interval(0.95)
    assert_allclose(interval(sample, is_share=False, count=20), expected, rtol=1e-9)
    assert np.isnan(interval(np.full(3, np.nan), is_share=True, count=3)).all()


def test_the_interval_over_draws_covers_the_truth_over_images_and_draws():
    """Of few-shot: each draw has an accuracy of its own, and all are tested on the same images."""
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(SIMULATIONS):
        of_draws = np.clip(rng.normal(0.4, 0.05, (3, 1)) + rng.normal(0, 0.2, 300), 0, 1)
        right = rng.random(of_draws.shape) < of_draws
        results = [{"accuracy": each.mean(), "interval": wilson(each.sum(), len(each))} for each in right]
        low, high = interval_over_draws(results)
        covered += low <= 0.4 <= high
    assert covered >= 0.93 * SIMULATIONS


def test_the_interval_over_draws_is_students_where_images_add_nothing():
    values = [0.45, 0.5, 0.52]
    low, high = interval_over_draws([{"accuracy": value, "interval": [value, value]} for value in values])
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 2, np.mean(values), stats.sem(values)), abs=1e-12)
    assert interval_over_draws([{"accuracy": 0.2, "interval": [0.1, 0.3]}]) == pytest.approx([0.1, 0.3])
    assert interval_over_draws([{"accuracy": value, "interval": [value, value]} for value in (0, 1)]) == [0, 1]


def test_cases_by_hand():
    names = ["ant", "bee", "cat"]
    without_bee = Outcomes("class", np.array([0, 0, 2, 2]), np.array([0, 1, 2, 2]), names)
    table = KIND.class_table(without_bee)
    assert list(table.index) == names
    np.testing.assert_array_equal(table.loc["bee"], [0, 1, np.nan, np.nan, np.nan, 0, 0])
    assert table.loc["cat", ["right (%)", "right (%), from", "right (%), to"]].round(1).tolist() == [100, 34.2, 100]
    assert measure(Outcomes("class", np.array([[0, 2], [1, -1]]), np.array([2, 0]), names))["accuracy"] == 0.5


def test_each_class_of_pixels_has_its_iou_with_an_interval():
    """Of two images: class a is half right in each, b is in the second one only, so without an interval, c nowhere."""
    targets = np.array([[4, 0, 0], [2, 2, 0]])
    predictions = np.zeros((2, 3, 3), int)
    predictions[0] = [[2, 2, 0], [0, 0, 0], [0, 0, 0]]
    predictions[1] = [[1, 1, 0], [0, 2, 0], [0, 0, 0]]
    table = PIXELS.class_table(Outcomes("pixels", targets, predictions, ["a", "b", "c"]))
    assert table[["pixels", "predicted"]].T.to_dict("list") == {"a": [6, 3], "b": [2, 5], "c": [0, 0]}
    assert table["IoU (%), from"].notna().tolist() == [True, False, False]


def test_intervals_of_a_rare_class_of_pixels_cover_the_truth(rng):
    """About 4 of 50 images have it; as wide as if all 50 had it, they held in 70 of 100 cases."""
    truth = np.zeros((2000, 30), int)
    truth[rng.random(2000) < 0.08, :10] = 1
    is_right = rng.random(truth.shape) < rng.random((2000, 1))  # images differ in how well they are predicted
    all_images = outcomes_of_masks(truth, np.where(is_right, truth, 0))
    expected = jaccard_score(truth.ravel(), np.where(is_right, truth, 0).ravel())
    covered = []
    for _ in range(100):
        table = PIXELS.class_table(all_images.select(rng.integers(2000, size=50)))
        low, high = table.iloc[1][["IoU (%), from", "IoU (%), to"]] / 100
        if np.isfinite(low):
            covered.append(low <= expected <= high)
    assert len(covered) > 80 and 0.87 <= np.mean(covered) <= 0.99


def unlearned(kind, images):
    """Outcomes of an encoder that has learned nothing of nine classes: always the same prediction, or noise."""
    classes = 9
    rng = np.random.default_rng(0)
    truth = np.arange(images) % classes
    marks = np.eye(classes, dtype=np.int8)[truth]
    always_first = marks[..., None] * np.eye(classes, dtype=int)[0]
    targets, predictions = {
        "class": (truth, np.zeros_like(truth)),
        "several": (marks, rng.random((images, classes))),
        "number": (rng.normal(size=images), np.zeros(images)),
        "pixels": (9 * marks, 9 * always_first),
    }[kind]
    return Outcomes(kind, targets, predictions, [str(number) for number in range(classes)])


@pytest.mark.parametrize("kind", ["class", "several", "number", "pixels"])
def test_an_interval_contains_its_value(kind):
    for name, (value, low, high) in KINDS[kind].estimates(unlearned(kind, 9)).items():
        assert np.isnan(low + high) or low <= value <= high, name


def test_images_without_a_label_are_left_out_and_none_with_one_is_refused():
    outcomes = Outcomes("class", np.array([0, -1, 1]), np.array([0, 0, 1]), ["a", "b"], ["x", "y", "z"])
    assert len(labelled_outcomes(outcomes)) == 2 and labelled_outcomes(outcomes).images == ["x", "z"]
    assert score_of(outcomes) == 1
    with refused("none of the 3 test images has a label"):
        score_of(Outcomes("class", np.full(3, -1), np.zeros(3, int)))
    truth = np.array([[-1, -1], [0, -1], [1, 2]])  # masks: the first has no pixel that counts
    assert len(labelled_outcomes(outcomes_of_masks(truth, np.zeros_like(truth)))) == 2


def test_outcomes_are_kept_beside_a_report(tmp_path):
    targets, names, images = np.array([0, 1, 1]), ["ant", "bée"], ["a/1.jpg", "a/2.jpg", "b/1.jpg"]
    of_seeds = [Outcomes("class", targets, np.array(each), names, images) for each in ([0, 1, 0], [1, 1, 1])]
    results = [{"outcomes": of_seeds[0]}, {"accuracy": 0.5}, {"outcomes": of_seeds[1]}]
    kept = write_report(tmp_path / "knn.json", {"results": add_figures(results)})["results"]
    assert [result.get("outcomes") for result in kept] == [0, None, 1]
    assert [result["accuracy"] for result in kept] == pytest.approx([2 / 3, 0.5, 2 / 3])
    loaded = load_outcomes(tmp_path / "knn.json", 1)
    assert (loaded.targets == targets).all() and (loaded.predictions == 1).all()
    assert (loaded.class_names, loaded.images, loaded.kind) == (names, images, "class")
    assert load_outcomes(tmp_path / "other.json") is None
    save_outcomes(tmp_path / "knn.json", of_seeds[:1])
    with refused(r"knn.outcomes.npz cannot be read: .*; evaluate again"):
        load_outcomes(tmp_path / "knn.json", 1)


@pytest.mark.parametrize("damage", [slice(300), None], ids=["cut off", "other bytes"])
def test_damaged_files_of_outcomes_and_counts_are_named(damage, tmp_path):
    zeros = np.zeros(1000)
    file = save_outcomes(tmp_path / "knn.json", [Outcomes("patches", zeros, zeros)])
    save_masked_counts(tmp_path, 7, np.zeros((1000, 4)), [])
    for each in (file, tmp_path / COUNTS_FILE):
        content = each.read_bytes()
        start = content.index(b".npy") + 30  # of compressed numbers
        each.write_bytes(content[:start] + bytes(20) + content[start + 20 :] if damage is None else content[damage])
    with refused(r"knn.outcomes.npz cannot be read: .*; evaluate again"):
        load_outcomes(tmp_path / "knn.json")
    with refused(f"{COUNTS_FILE} cannot be read: .*; delete it to evaluate without intervals"):
        load_masked_counts(tmp_path, 7)


def outcomes_of_masks(truth, predicted):
    counts = np.stack([count_confusion(*pair, 3) for pair in zip(truth, predicted, strict=True)])
    return Outcomes("pixels", counts.sum(2), counts)


def test_intervals_of_a_share_stay_within_it_however_few_the_images():
    """Of three images nearly no masked patch is right, and nearly no pixel."""
    predicted = np.ones((3, 30), int)
    predicted[2, :6] = 0
    pixels = outcomes_of_masks(np.zeros_like(predicted), predicted)
    for few in (pixels, Outcomes("patches", np.full(3, 30), np.array([0, 1, 6]))):
        assert all(0 <= low < high <= 1 for low, high in intervals(few).values())
    assert not (PIXELS.class_table(pixels) < 0).any(axis=None)
