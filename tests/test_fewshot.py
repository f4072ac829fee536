"""The few-shot protocol against independent solvers, to the last prediction."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest, norm
from sklearn.linear_model import Ridge

from evaluation import fewshot, knn, linear
from evaluation.config import FewshotConfig
from evaluation.fewshot import draw_by_class, predict
from evaluation.frozen.features import ARRAY_NAMES, LabelledFeatures, load_features, save_features
from evaluation.metrics.scoring import add_figures
from mpp.data.overview import half_width, note_tested


def evaluate(data, config):
    """Results with their accuracies, without outcomes."""
    scored = add_figures(fewshot.evaluate(data, config))
    return [{key: value for key, value in result.items() if key != "outcomes"} for result in scored]


def features(classes=7, per_class=30, width=20, test=200, seed=0) -> LabelledFeatures:
    """Overlapping clouds, one a class, of very different scales by feature."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, width))
    scale = 10.0 ** rng.uniform(-2, 2, width)
    splits = []
    for count in (classes * per_class, test):
        labels = rng.permutation(np.arange(count) % classes)
        noise = 1.5 * rng.normal(size=(count, width))
        cloud = (centres[labels] + noise) * scale
        splits += [cloud.astype(np.float32), labels]
    return LabelledFeatures(*splits)


def run_on_saved(command, data: LabelledFeatures, folder: Path, *options: str) -> list[dict]:
    """Save features, and evaluate them by a command; its results."""
    save_features(folder / "f.npz", data)
    out = folder / "r.json"
    command.main([f"--features={folder / 'f.npz'}", f"--out={out}", "--threads=1", *options])
    return json.loads(out.read_text())["results"]


def reference(data: LabelledFeatures, shots: int, seed: int, l2: float) -> np.ndarray:
    """Scores by the protocol's words: whiten, add a column of 100, minimise |X w - Y|^2 + l2 |w|^2 by least squares."""
    rng = np.random.default_rng(seed)
    classes = np.arange(data.train_labels.max() + 1)
    chosen = []
    for number in classes:
        images = np.where(data.train_labels == number)[0]
        chosen += list(rng.permutation(images)[:shots])
    support = data.train[chosen].astype(np.float64)
    mean = support.mean(0)
    std = np.sqrt(((support - mean) ** 2).mean(0)) + 1e-5

    def whiten(features):
        return np.c_[(features - mean) / std, np.full(len(features), 100.0)]

    inputs = whiten(support)
    targets = np.where(data.train_labels[chosen][:, None] == classes, 1.0, -1.0)
    width = inputs.shape[1]
    penalised_inputs = np.r_[inputs, np.sqrt(l2) * np.eye(width)]
    penalised_targets = np.r_[targets, np.zeros((width, len(classes)))]
    weights = np.linalg.lstsq(penalised_inputs, penalised_targets, rcond=None)[0]
    return whiten(data.test) @ weights


@pytest.mark.parametrize("l2", [2.0**10, 1.0])
@pytest.mark.parametrize(("shots", "width"), [(25, 20), (5, 20), (1, 20), (3, 20), (5, 300)])
def test_predictions_equal_least_squares_in_both_regimes(shots, width, l2):
    data = features(width=width)
    config = FewshotConfig(shots=(shots,), seeds=(0, 1), l2=(l2,))
    for result, seed in zip(add_figures(fewshot.evaluate(data, config)), (0, 1), strict=True):
        expected = reference(data, shots, seed, l2).argmax(1)
        assert result["accuracy"] == (expected == data.test_labels).mean()
        assert (result["outcomes"].predictions == expected).all()
        chosen = np.concatenate([images[:shots] for images in draw_by_class(data.train_labels, seed)])
        (predicted,) = predict(data.train[chosen], data.train_labels[chosen], data.test, 7, [l2])
        assert (predicted == expected).all()


def test_predictions_equal_scikit_learns_ridge():
    data = features(seed=3)
    features_64 = data.train.astype(np.float64)
    mean = features_64.mean(0)
    std = features_64.std(0) + 1e-5
    train = np.c_[(features_64 - mean) / std, np.full(len(features_64), 100.0)]
    test = np.c_[(data.test - mean) / std, np.full(len(data.test), 100.0)]
    targets = 2.0 * np.eye(7)[data.train_labels] - 1
    ridge = Ridge(alpha=1024.0, fit_intercept=False, solver="cholesky").fit(train, targets)
    (predicted,) = predict(data.train, data.train_labels, data.test, 7, [1024.0])
    assert (predicted == ridge.predict(test).argmax(1)).all()


def test_golden_accuracies():
    """Computed once by `reference` (least squares), to notice if data, draws and solver should drift together."""
    results = evaluate(features(), FewshotConfig(shots=(1, 5, 25), seeds=(0, 1, 2)))
    golden = {
        "1-0": 0.46,
        "5-0": 0.775,
        "25-0": 0.86,
        "1-1": 0.515,
        "5-1": 0.82,
        "25-1": 0.875,
        "1-2": 0.475,
        "5-2": 0.77,
        "25-2": 0.865,
    }
    accuracies = {f"{result['shots']}-{result['seed']}": round(result["accuracy"], 6) for result in results}
    assert accuracies == golden


def test_supports_are_nested_and_drawn_as_the_protocol_says():
    labels = np.array([2, 0, 2, 0, 1, 2, 0, 2])
    rng = np.random.default_rng(5)
    for drawn, number in zip(draw_by_class(labels, 5), range(3), strict=True):
        assert (drawn == rng.permutation(np.where(labels == number)[0])).all()


def test_a_class_with_too_few_gives_what_it_has(capsys):
    data = features(per_class=4)
    config = FewshotConfig(shots=(4, 9), seeds=(0,))
    results = evaluate(data, config)
    assert evaluate(data, config) == results  # the next depth
    assert results[0]["accuracy"] == results[1]["accuracy"]
    note = "note: 7 of 7 classes: fewer than 9 training images; the support set uses all of them\n"
    assert capsys.readouterr().out == note  # once


def test_a_class_that_is_only_tested_is_never_right():
    data = features(classes=3)
    labels = np.where(data.test_labels == 2, 5, data.test_labels)
    data = data._replace(test_labels=labels)
    others = labels != 5
    config = FewshotConfig(shots=(5,), seeds=(0,))
    (of_others,) = evaluate(data._replace(test=data.test[others], test_labels=labels[others]), config)
    (of_all,) = evaluate(data, config)
    assert of_others["accuracy"] > 0
    assert of_all["accuracy"] == pytest.approx(of_others["accuracy"] * others.mean())


FAR_APART = np.array([7, 45123, 998877, 5219404, 10**9, 10**12, 2**62])


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (fewshot, ["--shots=5", "--seeds=0"]),
        (knn, ["--neighbours=5"]),
        (linear, ["--l2=0.01"]),
    ],
)
def test_identifiers_cost_what_as_many_classes_cost(tmp_path, command, options):
    """Millions of columns would take gigabytes; 2**62 of them no machine has."""
    plain = features()
    apart = plain._replace(train_labels=FAR_APART[plain.train_labels], test_labels=FAR_APART[plain.test_labels])
    accuracy_plain = run_on_saved(command, plain, tmp_path, *options)[0]["accuracy"]
    accuracy_apart = run_on_saved(command, apart, tmp_path, *options)[0]["accuracy"]
    assert accuracy_plain == accuracy_apart > 2 / 7  # chance is a seventh


@pytest.mark.parametrize(
    ("test_labels", "train_numbers", "test_numbers", "classes"),
    [
        pytest.param([3, 40, 10**9], [1, 0, 1], [0, 1, 2], [3, 40, 10**9], id="one label"),
        pytest.param(
            [[3, -1], [40, 9], [10**9, 3]], [2, 0, 2], [[0, -1], [2, 1], [3, 0]], [3, 9, 40, 10**9], id="several labels"
        ),
    ],
)
def test_classes_are_numbered_without_gaps_in_their_order(test_labels, train_numbers, test_numbers, classes):
    data = LabelledFeatures(np.zeros((3, 2)), np.array([40, 3, 40]), np.zeros((3, 2)), np.array(test_labels))
    numbered, numbers = data.with_numbered_classes()
    assert numbered.train_labels.tolist() == train_numbers
    assert numbered.test_labels.tolist() == test_numbers
    assert numbers.tolist() == classes


def test_classes_without_a_training_image_are_counted_and_named(capsys):
    train = np.array([0, 1, 1])
    test = np.array([0, 1, 5, 5, 7, 8, 9] * 20)
    note_tested(train, test)
    note_tested(train, test)  # the next run
    note_tested(train, test, ["ash", "beech", "elm", "fir", "fig", "birch", "yew", "oak"])
    lost = "note: 100 of 140 test images are of 4 classes without a training image"
    assert capsys.readouterr().out.splitlines() == [
        f"{lost} (5, 7, 8 and 1 more): they count as wrong",
        f"{lost} (birch, oak, 8 and 1 more): they count as wrong",
    ]
    any_is_right = np.array([[0, 5], [5, -1], [1, -1], [6, 5]] * 30)
    note_tested(train, any_is_right)
    assert "60 of 120 test images are of 2 classes without" in capsys.readouterr().out
    note_tested(train, np.array([0, 1] * 50))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("command", "options"), [(fewshot, ["--shots=5"]), (knn, ["--neighbours=5"]), (linear, ["--l2=0.01"])]
)
def test_every_probe_counts_a_class_that_is_only_tested_as_wrong(tmp_path, capsys, command, options, several):
    data = features(classes=3)
    labels = np.where(data.test_labels == 2, 50, data.test_labels)
    labels = np.c_[labels, np.full(len(labels), -1)] if several else labels
    results = run_on_saved(command, data._replace(test_labels=labels), tmp_path, *options)
    assert "66 of 200 test images are of 1 class without a training image (50)" in capsys.readouterr().out
    assert all(0.3 < each["accuracy"] <= 134 / 200 for each in results)


@pytest.mark.parametrize("count", [1, 48, 99, 1000])
def test_the_interval_of_few_images_is_wilsons(count):
    if count % 2:  # of a share of exactly a half
        z = norm.ppf(0.975)
        expected = z / (1 + z**2 / count) * np.sqrt(0.25 / count + z**2 / (4 * count**2))
    else:
        low, high = binomtest(count // 2, count).proportion_ci(method="wilson")
        expected = (high - low) / 2
    assert half_width(count) == pytest.approx(expected, rel=1e-4)


def test_few_images_are_said_once(tmp_path, capsys):
    for _ in range(2):
        run_on_saved(fewshot, features(test=48), tmp_path, "--shots=5")
    note = "note: 48 held-out images: an accuracy of 50% is known to within 14 points\n"
    assert capsys.readouterr().out.count(note) == 1


def test_labels_of_any_integer_type_are_taken(tmp_path):
    data = features()
    save_features(tmp_path / "f.npz", data._replace(train_labels=data.train_labels.astype(np.uint8)))
    assert load_features(tmp_path / "f.npz").train_labels.dtype == np.int64


def test_any_of_several_right_labels_counts():
    data = features()
    config = FewshotConfig(shots=5, seeds=0)
    plain = evaluate(data, config)[0]["accuracy"]
    padded_labels = np.c_[data.test_labels, np.full(len(data.test_labels), -1)]
    padded = data._replace(test_labels=padded_labels).checked("here")
    assert evaluate(padded, config)[0]["accuracy"] == plain
    all_labels = np.tile(np.arange(7), (len(data.test_labels), 1))
    all_are_right = data._replace(test_labels=all_labels)
    assert evaluate(all_are_right, config)[0]["accuracy"] == 1.0


def test_each_of_several_penalties_has_its_own_results():
    data = features()
    penalties = (1024.0, 1.0, 1e-3)
    together = evaluate(data, FewshotConfig(shots=(5, 1), seeds=(0,), l2=penalties))
    alone = {}
    for l2 in penalties:
        for result in evaluate(data, FewshotConfig(shots=(5, 1), seeds=(0,), l2=(l2,))):
            alone[result["shots"], l2] = result["accuracy"]
    cases = [(result["shots"], result["l2"]) for result in together]
    assert cases == [(shots, l2) for shots in (5, 1) for l2 in penalties]
    assert all(result["accuracy"] == alone[result["shots"], result["l2"]] for result in together)


def test_command_writes_results_summary_and_protocol(tmp_path, capsys):
    save_features(tmp_path / "f.npz", features())
    words = [f"--features={tmp_path / 'f.npz'}", f"--out={tmp_path / 'r.json'}"]
    fewshot.main([*words, "--shots=[5,1]", "--seeds=[0,3]", "--l2=1024"])
    report = json.loads((tmp_path / "r.json").read_text())
    cases = [(result["shots"], result["seed"]) for result in report["results"]]
    assert cases == [(5, 0), (1, 0), (5, 3), (1, 3)]
    of_five_shots = [result["accuracy"] for result in report["results"] if result["shots"] == 5]
    expected = {"mean": np.mean(of_five_shots), "std": np.std(of_five_shots, ddof=1), "count": 2}
    assert {key: report["summary"]["5"][key] for key in expected} == pytest.approx(expected)
    low, high = report["summary"]["5"]["interval"]
    assert low < np.mean(of_five_shots) < high
    assert report["protocol"]["l2"] == [1024.0]
    assert "shots 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_labels": None}, "train_labels"),
        ({"train_features": np.full((210, 20), np.nan)}, "train_features is float64 .* finite"),
        ({"train_labels": np.full(210, -1)}, "train_labels must be integers from 0"),
        ({"test_labels": np.full(200, 2**63, np.uint64)}, "test_labels must be integers from 0 and below"),
        ({"train_labels": np.zeros(210, np.int64)}, "all training images have the same label"),
        ({"train_labels": np.arange(3)}, "as many as labels"),
        ({"test_features": np.zeros((200, 3), np.float32)}, "test_features is .* as wide in both splits"),
        ({"test_features": np.array([{}] * 200)}, "allow_pickle"),
        ({"train_labels": np.zeros(210)}, "integers"),
        ({"test_features": np.full((200, 20), "a")}, "floating-point numbers"),
    ],
)
def test_bad_features_are_named(tmp_path, change, words):
    file = tmp_path / "f.npz"
    arrays = dict(zip(ARRAY_NAMES, features()[:4], strict=True)) | change
    saved = {name: array for name, array in arrays.items() if array is not None}
    np.savez(file, **saved)
    with pytest.raises(ValueError, match=words) as error:
        load_features(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle ran')",)


def test_files_that_are_no_features_are_refused_and_never_run(tmp_path):
    path = tmp_path / "f.npz"
    for content in (b"nonsense", pickle.dumps(Bomb())):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="features is"):
            load_features(path)
    np.save(tmp_path / "f.npy", np.zeros(3))
    with pytest.raises(ValueError, match="cannot be read"):
        load_features(tmp_path / "f.npy")
    save_features(path, features())
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="features is"):
        load_features(path)
    np.savez(path, **{name: np.array([Bomb()], dtype=object) for name in ARRAY_NAMES})
    with pytest.raises(ValueError, match="features is"):
        load_features(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_features(tmp_path / "nowhere.npz")


@pytest.mark.parametrize("argument", ["--shots=[0]", "--seeds=[]", "--l2=0", "--shots=many", "--depth=middle"])
def test_bad_settings_are_named(argument):
    with pytest.raises(ValueError, match=argument.split("=")[0].removeprefix("--")) as error:
        fewshot.main([argument, "--features=nowhere.npz"])
    assert "\n" not in str(error.value)
