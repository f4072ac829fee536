"""The few-shot protocol against independent solvers, to the last prediction."""

import numpy as np
import pytest
from conftest import read_json
from scipy.stats import binomtest

from evaluation import fewshot, knn, linear
from evaluation.config import FewshotConfig
from evaluation.frozen.features import LabelledFeatures, save_features
from evaluation.metrics.scoring import add_figures
from mpp.data.overview import half_width, note_tested


def features(classes=7, per_class=30, width=20, test=200, seed=0):
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


def run_on_saved(command, data, folder, *options):
    """Save features, and evaluate them by a command; its results."""
    save_features(folder / "f.npz", data)
    words = [f"--features={folder / 'f.npz'}", f"--out={folder / 'r.json'}", "--threads=1"]
    return command.main([*words, *options])["results"]


def reference(data, shots, seed, l2):
    """Scores by the protocol's words: whiten, add a column of 100, minimise |X w - Y|^2 + l2 |w|^2 by least squares."""
    rng = np.random.default_rng(seed)
    classes = np.arange(data.train_labels.max() + 1)
    chosen = []
    for number in classes:
        chosen += [*rng.permutation(np.flatnonzero(data.train_labels == number))[:shots]]
    support = data.train[chosen].astype(np.float64)

    def whiten(features):
        return np.c_[(features - support.mean(0)) / (support.std(0) + 1e-5), np.full(len(features), 100.0)]

    inputs = whiten(support)
    targets = np.where(data.train_labels[chosen][:, None] == classes, 1.0, -1.0)
    width = inputs.shape[1]
    penalised = np.r_[inputs, np.sqrt(l2) * np.eye(width)], np.r_[targets, np.zeros((width, len(classes)))]
    return whiten(data.test) @ np.linalg.lstsq(*penalised, rcond=None)[0]


@pytest.mark.parametrize("shots, width, l2", [(25, 20, 2.0**10), (1, 20, 1.0), (5, 300, 1.0)])
def test_predictions_equal_least_squares_in_both_regimes(shots, width, l2):
    data = features(width=width)
    config = FewshotConfig(shots=(shots,), seeds=(0, 1), l2=(l2, 1e-3))
    results = add_figures(fewshot.evaluate(data, config))
    assert [(result["seed"], result["l2"]) for result in results] == [(0, l2), (0, 1e-3), (1, l2), (1, 1e-3)]
    for result in results:
        expected = reference(data, shots, result["seed"], result["l2"]).argmax(1)
        assert result["accuracy"] == (expected == data.test_labels).mean()
        assert (result["outcomes"].predictions == expected).all()


def test_a_class_with_too_few_gives_what_it_has(capsys):
    data = features(per_class=4)
    config = FewshotConfig(shots=(4, 9), seeds=(0,))
    results = [result for _ in range(2) for result in add_figures(fewshot.evaluate(data, config))]  # of two depths
    assert len(results) == 4 and len({result["accuracy"] for result in results}) == 1
    note = "note: 7 of 7 classes: fewer than 9 training images; the support set uses all of them\n"
    assert capsys.readouterr().out == note  # once


PROBES = [(fewshot, ["--shots=5", "--seeds=0"]), (knn, ["--neighbours=5"]), (linear, ["--l2=0.01"])]


@pytest.mark.parametrize("command, options", PROBES)
def test_every_probe_counts_a_class_that_is_only_tested_as_wrong(tmp_path, capsys, command, options):
    """Identifiers cost what as many classes cost: millions of columns would take gigabytes; 2**62 no machine has."""
    data = features(classes=3)
    labels = np.where(data.test_labels == 2, 3, data.test_labels)
    padded = np.c_[labels, np.full(len(labels), -1)]  # as of images with several right labels
    identifiers = np.array([7, 10**9, 2**62, 50])
    accuracies = []
    for train, test in (
        (data.train_labels, labels),
        (data.train_labels, padded),
        (identifiers[data.train_labels], identifiers[labels]),
    ):
        (result, *_) = run_on_saved(command, data._replace(train_labels=train, test_labels=test), tmp_path, *options)
        accuracies.append(result["accuracy"])
    assert "66 of 200 test images are of 1 class without a training image (50)" in capsys.readouterr().out
    assert accuracies == accuracies[:1] * 3
    assert 0.3 < accuracies[0] <= 134 / 200


def test_classes_without_a_training_image_are_counted_and_named(capsys):
    train = np.array([0, 1, 1])
    test = np.array([0, 1, 5, 5, 7, 8, 9] * 20)
    note_tested(train, test)
    note_tested(train, test, ["ash", "beech", "elm", "fir", "fig", "birch", "yew", "oak"])
    by_number, by_name = capsys.readouterr().out.splitlines()
    assert "100 of 140 test images are of 4 classes without a training image (5, 7, 8 and 1 more)" in by_number
    assert "(birch, oak, 8 and 1 more)" in by_name
    note_tested(train, np.array([[0, 5], [5, -1], [1, -1], [6, 5]] * 30))
    assert "60 of 120 test images are of 2 classes without" in capsys.readouterr().out
    note_tested(train, np.array([0, 1] * 50))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("count", [2, 48, 1000])
def test_the_interval_of_few_images_is_wilsons(count):
    low, high = binomtest(count // 2, count).proportion_ci(method="wilson")
    assert half_width(count) == pytest.approx((high - low) / 2, rel=1e-4)


def test_command_writes_results_summary_and_protocol(tmp_path):
    run_on_saved(fewshot, features(), tmp_path, "--shots=[5,1]", "--seeds=[0,3]", "--l2=1024")
    report = read_json(tmp_path / "r.json")
    assert [(result["shots"], result["seed"]) for result in report["results"]] == [(5, 0), (1, 0), (5, 3), (1, 3)]
    of_five_shots = [result["accuracy"] for result in report["results"] if result["shots"] == 5]
    expected = {"mean": np.mean(of_five_shots), "std": np.std(of_five_shots, ddof=1), "count": 2}
    assert {key: report["summary"]["5"][key] for key in expected} == pytest.approx(expected)
    low, high = report["summary"]["5"]["interval"]
    assert low < np.mean(of_five_shots) < high
    assert report["protocol"]["l2"] == [1024.0]
