"""Differences that a comparison tells apart: of equal encoders hardly ever, on the same images sooner."""

import json

import numpy as np
import pandas as pd
import pytest
from conftest import refused
from scipy.stats import studentized_range, ttest_rel
from test_comparison_tables import ROW

from evaluation.comparison import differences
from evaluation.comparison.differences import (
    ERROR,
    INFINITE,
    difference_table,
    differences_from_best,
    half_widths,
    of_differences,
    variances_over_seeds,
)
from evaluation.comparison.rows import frame_of, read_published, scores_of_images, write_scores
from evaluation.metrics.scoring import Outcomes, add_figures

IMAGES = 500


def right(share, of=None, seed=0):
    """Whether each image is right; with `of`, few of its images change."""
    rng = np.random.default_rng(seed)
    if of is None:
        return rng.random(IMAGES) < share
    changed = of.copy()
    changed[rng.choice(np.flatnonzero(of), round(share * IMAGES), replace=False)] = False
    return changed


def row_of(encoder, is_right, kept=True, first=0):
    """A row of a comparison, with the scores of the images."""
    targets = np.arange(len(is_right)) % 2
    names = [f"{first + number}.png" for number in range(len(is_right))]
    outcomes = Outcomes("class", targets, np.where(is_right, targets, 1 - targets), ["a", "b"], names)
    (result,) = add_figures([{"outcomes": outcomes}])
    row = ROW | {"digest": encoder, "encoder": encoder, "accuracy": result["accuracy"], "interval": result["interval"]}
    return row | (scores_of_images(outcomes) if kept else {})


def differences_of(*rows):
    return differences_from_best(frame_of(rows))


BEST = right(0.7)
OTHER = right(0.02, BEST)


def test_pairs_on_the_same_images_are_told_apart_sooner():
    best, other = row_of("A", BEST), row_of("B", OTHER)
    (paired,) = differences_of(best, other)
    assert paired.over == "same 500 images; 1 and 1 seeds" and paired.is_told_apart
    assert paired.value == pytest.approx(0.02)
    (of_few,) = differences_of(best | {"known_by": 5.0}, other)  # of several labels: images of a class
    assert of_few.half > 1.3 * paired.half
    unkept = row_of("B", OTHER, kept=False)
    (unpaired,) = differences_of(row_of("A", BEST, kept=False), unkept)
    assert unpaired.value == pytest.approx(0.02) and not unpaired.is_told_apart
    assert unpaired.over == "images, not paired; 1 and 1 seeds"
    assert differences_of(best, unkept) == [unpaired]  # one is published
    assert differences_of(best, row_of("B", OTHER, first=1))[0].over == unpaired.over
    _, ((names, name, words, verdict, _),) = difference_table([paired])
    assert (names, name, verdict) == ("A, kNN 20", "B", "told apart") and words.startswith("+2.0 (+0.")


def test_scores_of_images_travel_with_published_rows(tmp_path):
    rows = [row_of("A", BEST), row_of("B", OTHER)]
    write_scores(tmp_path, rows)
    without = [{key: value for key, value in row.items() if key != "scores"} for row in rows]
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"results": [*without, without[0] | {"evaluation": "again"}]}))  # one result, two names
    (published,), (other,) = read_published(str(file)).values()
    assert differences_of(published, other) == differences_of(*rows)
    assert (tmp_path / "scores.npz").stat().st_size < 1000  # 500 images each
    (tmp_path / "scores.npz").write_bytes(b"PK")
    with refused(r"results\.json"):
        read_published(str(file))


def test_of_one_encoder_each_the_draws_are_in_the_interval(rng):
    """And what a draw does to both, such as the choice of their labels, is not."""
    shared, own = rng.normal(0, 0.1, 20), rng.normal(0, 0.02, (2, 20))
    scores = 0.5 + shared + own + np.array([[0.02], [0.0]])
    drawn = frame_of_seeds(scores).rename(columns={"encoder_seed": "seed"})
    variances, draws, freedom = variances_over_seeds(drawn, "seed")
    gains = scores[0] - scores[1]
    assert draws == [20, 20] and freedom == 19
    assert variances.sum() == pytest.approx(gains.var(ddof=1) / 20)


def frame_of_seeds(accuracies):
    """Rows of encoders at several seeds: (K, S)."""
    rows = [(encoder, seed, value) for encoder, of_one in enumerate(accuracies) for seed, value in enumerate(of_one)]
    return pd.DataFrame(rows, columns=["encoder", "encoder_seed", "accuracy"])


def test_two_encoders_have_the_interval_of_paired_seeds():
    """Over seeds alone it is that of Student's test of pairs, which has n - 1."""
    accuracies = np.array([[0.60, 0.64, 0.68, 0.61], [0.50, 0.56, 0.57, 0.52]])
    variances, seeds, freedom = variances_over_seeds(frame_of_seeds(accuracies))
    assert seeds == [4, 4] and freedom == 3
    assert variances.sum() == pytest.approx(np.var(accuracies[0] - accuracies[1], ddof=1) / 4)
    half = half_widths(np.zeros((2, 2)), variances, (1, freedom), 0.05)[0, 1]
    low, high = ttest_rel(*accuracies).confidence_interval(0.95)
    assert half == pytest.approx((high - low) / 2, rel=0.05)  # drawn


def test_seeds_that_are_not_shared_vary_around_the_mean_of_each():
    accuracies = [0.60, 0.64, 0.68]
    variances, _, freedom = variances_over_seeds(frame_of_seeds([accuracies, [0.5]]))
    assert freedom == 2
    assert variances == pytest.approx([np.var(accuracies, ddof=1) / 3, 0])
    fewer = [0.50, 0.58]
    variances, _, freedom = variances_over_seeds(frame_of_seeds([accuracies, fewer]))
    pooled = (2 * np.var(accuracies, ddof=1) + np.var(fewer, ddof=1)) / 3
    assert freedom == 3 and variances == pytest.approx([pooled / 3, pooled / 2])


@pytest.mark.parametrize("encoders", [3, 8])
def test_independent_encoders_have_tukeys_intervals(encoders):
    halves = half_widths(np.eye(encoders) / 100, np.zeros(encoders), (INFINITE, 1), 0.05)
    expected = studentized_range.ppf(0.95, encoders, np.inf) / 10
    assert halves[np.triu_indices(encoders, 1)] == pytest.approx(expected, rel=0.03)


def shares(random, encoders, images):
    """Images that are right: some are easy for all, by which encoders are correlated by .2."""
    return random.random((encoders, images)) < random.beta(2, 2, images)


def families(random, encoders, images):
    """Encoders of two kinds: other images are easy for each."""
    return random.random((encoders, images)) < random.beta(2, 2, (2, images))[np.arange(encoders) % 2]


def errors(random, encoders, images):
    """Squares of errors, half of which all encoders share."""
    return -np.square(random.standard_normal(images) + random.standard_normal((encoders, images)))


@pytest.mark.parametrize("encoders, images", [(8, 286), (12, 2000)])
def test_of_tables_of_equal_encoders_few_tell_any_two_apart(encoders, images):
    """At most 6 of 100 tables. The quantile is that of one table of each kind: it hardly differs between them."""
    random = np.random.default_rng(encoders + images)
    told = []
    for scores_of in (shares, families, errors):
        quantile = 0.0
        for _ in range(500):
            scores = scores_of(random, encoders, images).astype(float)
            covariance = np.cov(scores) / images
            standard_errors = np.sqrt(of_differences(covariance))
            if not quantile:
                halves = half_widths(covariance, np.zeros(encoders), (images - 1, 1), ERROR)
                quantile = halves[0, 1] / standard_errors[0, 1]
            means = scores.mean(1)
            told.append((np.abs(means[:, None] - means) > quantile * standard_errors).any())
    assert np.mean(told) <= 0.06


def test_of_tables_of_equal_methods_few_tell_any_two_apart(monkeypatch):
    """Of three seeds each, which are worth two points: fewer, since noise of images is in both parts of the error."""
    monkeypatch.setattr(differences, "ROUNDS", 1)
    random = np.random.default_rng(0)
    told = 0
    for _ in range(50):
        methods = random.normal(0, 0.02, (8, 3, 1))
        scores = random.random((8, 3, 286)) < np.clip(random.beta(2, 2, 286) + methods, 0, 1)
        variances, _, freedom = variances_over_seeds(frame_of_seeds(scores.mean(2)))
        halves = half_widths(np.cov(scores.mean(1)) / 286, variances, (285, freedom), ERROR)
        means = scores.mean((1, 2))
        told += (np.abs(means[:, None] - means) > halves).any()
    assert told <= 3


def test_the_columns_of_a_table_share_its_error():
    rows = [row_of("A", right(0.7), kept=False), row_of("B", right(0.6, seed=1), kept=False)]
    (alone,) = differences_of(*rows)
    found = differences_of(*(row | {"case": case} for row in rows for case in "12345"))
    assert len(found) == 5 and all(each.half > alone.half for each in found)


@pytest.mark.parametrize("older, told", [("A", []), ("B", [("A", "C")])])
def test_an_encoder_without_an_interval_is_no_lesser_one(older, told):
    """A, which is the best, has no difference from the others without its interval; one of these is left out."""
    shares = {"A": 0.9, "B": 0.7, "C": 0.5}
    rows = [row_of(name, right(share), kept=False) for name, share in shares.items()]
    for row in rows:
        if row["encoder"] == older:
            del row["interval"]
    assert [(each.best, each.other) for each in differences_of(*rows)] == told
