"""Differences that a comparison tells apart: paired on the same images, or by two intervals; and over seeds."""

import numpy as np
import pytest
from comparisons import cases_in
from conftest import ROOT
from scipy.stats import ttest_ind

from evaluation.comparison.differences import (
    describe_difference,
    describe_not_compared,
    difference_table,
    differences_from_best,
    runners_up,
    told_apart_table,
)
from evaluation.comparison.files import best_encoders
from evaluation.comparison.reports import with_interval
from evaluation.comparison.tables import mean_and_spread, score_text
from evaluation.metrics.intervals import wilson
from evaluation.metrics.scoring import Outcomes, add_figures, keep_outcomes

IMAGES = 500


def right(share, of=None, seed=0):
    """Whether each image is right; with `of`, few of its images change."""
    rng = np.random.default_rng(seed)
    if of is None:
        return rng.random(IMAGES) < share
    changed = of.copy()
    changed[rng.choice(np.flatnonzero(of), round(share * IMAGES), replace=False)] = False
    return changed


def row_of(folder, encoder, is_right, seed=0, kept=True, images=None):
    """A row of a comparison, with outcomes in the folder."""
    targets = np.arange(IMAGES) % 2
    names = [f"{number}.png" for number in (range(IMAGES) if images is None else images)]
    outcomes = Outcomes("class", targets, np.where(is_right, targets, 1 - targets), ["a", "b"], names)
    (result,) = add_figures([{"outcomes": outcomes}])
    row = {"encoder": encoder, "encoder_seed": seed, "seed": 0, "evaluation": "kNN", "case": "20", "dataset": "birds"}
    row |= {"group": None, "kind": "test", "accuracy": result["accuracy"], "interval": result["interval"]}
    row["images"] = IMAGES
    if kept:
        keep_outcomes(folder / f"{encoder}_{seed}.json", [result])
        row["outcomes"] = {"report": f"{encoder}_{seed}.json", "number": 0}
    return row


def test_pairs_on_the_same_images_are_told_apart_sooner(tmp_path):
    best = right(0.7)
    other = right(0.02, best)
    kept = [row_of(tmp_path, "A", best), row_of(tmp_path, "B", other)]
    (paired,) = differences_from_best(kept, tmp_path)
    assert paired.is_paired and paired.over_images.is_told_apart and not paired.are_methods_told_apart
    assert paired.over_images.value == pytest.approx(0.02)
    words = describe_difference(paired)
    assert words.startswith("A - B: +2.0 (+0.") and words.endswith(
        "same 500 images; one seed each: methods not told apart"
    )
    unkept = [{key: value for key, value in row.items() if key != "outcomes"} for row in kept]
    (unpaired,) = differences_from_best(unkept, tmp_path)
    assert unpaired.over_images.value == pytest.approx(0.02)
    assert not unpaired.is_paired and not unpaired.over_images.is_told_apart
    assert "500 images, not paired; one seed each" in describe_difference(unpaired)
    others = [kept[0], row_of(tmp_path, "B", other, images=range(1, IMAGES + 1))]
    assert not differences_from_best(others, tmp_path)[0].is_paired


def test_seeds_tell_methods_apart_by_welchs_interval(tmp_path):
    rows = [row_of(tmp_path, "A", right(0.8, seed=seed), seed) for seed in range(3)]
    rows += [row_of(tmp_path, "B", right(0.5, seed=10 + seed), seed) for seed in range(3)]
    (difference,) = differences_from_best(rows, tmp_path)
    of_a, of_b = ([row["accuracy"] for row in rows if row["encoder"] == name] for name in "AB")
    expected = ttest_ind(of_a, of_b, equal_var=False).confidence_interval(0.95)
    np.testing.assert_allclose(difference.over_seeds.interval, (expected.low, expected.high), rtol=1e-9)
    assert difference.is_paired and difference.are_methods_told_apart and difference.seeds == (3, 3)
    assert difference.over_images.value == pytest.approx(np.mean(of_a) - np.mean(of_b))
    assert "same 500 images; 3 and 3 seeds (+" in describe_difference(difference)
    one_seed = [rows[0], *rows[3:]]
    assert "1 and 3 seeds: methods not told apart" in describe_difference(differences_from_best(one_seed, tmp_path)[0])


@pytest.mark.parametrize(("diverged", "told_apart"), [("A", False), ("B", True)])
def test_a_best_encoder_that_diverged_at_a_seed_is_not_told_apart_as_a_method(diverged, told_apart, tmp_path):
    """At that seed the other one is better."""
    rows = [row_of(tmp_path, "A", right(0.8, seed=seed), seed) for seed in range(3)]
    rows += [row_of(tmp_path, "B", right(0.5, seed=10 + seed), seed) for seed in range(3)]
    rows.append(rows[0] | {"encoder": diverged, "encoder_seed": 3, "kind": "diverged"})
    (difference,) = differences_from_best(rows, tmp_path)
    assert difference.over_images.is_told_apart and difference.are_methods_told_apart == told_apart
    assert ("1 and 0" if diverged == "A" else "0 and 1") + " more diverged: methods" in describe_difference(difference)
    (sentence,) = best_encoders(rows)
    assert ("% (1 diverged) (next to B" if diverged == "A" else "% (1 diverged))") in sentence


@pytest.mark.parametrize("share", [0.79, 0.8])
def test_seeds_that_are_all_alike_tell_nothing_apart(share, tmp_path):
    """Such as those of an encoder that is not trained here. Three times 0.8 has a variance, by rounding."""
    assert (np.var([share] * 3) > 0) == (share == 0.8)
    rows = [row_of(tmp_path, "A", np.arange(IMAGES) < share * IMAGES, seed) for seed in range(3)]
    rows += [row_of(tmp_path, "B", right(0.5, seed=1), seed) for seed in range(2)]
    (difference,) = differences_from_best(rows, tmp_path)
    assert difference.over_images.is_told_apart and not difference.are_methods_told_apart
    assert describe_difference(difference).endswith("; 3 and 2 seeds: methods not told apart")


def test_the_table_has_all_and_the_words_the_second_best(tmp_path):
    rows = [
        row_of(tmp_path, name, right(share, seed=3), kept=False) for name, share in (("A", 0.5), ("B", 0.9), ("C", 0.8))
    ]
    differences = differences_from_best(rows, tmp_path)
    assert [(each.one, each.other) for each in differences] == [("B", "A"), ("B", "C")]
    assert [each.other for each in runners_up(differences)] == ["C"]
    headings, cells = difference_table(differences)
    assert all(len(row) == len(headings) for row in cells) and cells[0][4] == "told apart"


def test_columns_without_intervals_are_named(tmp_path):
    rows = [row_of(tmp_path, name, right(0.5, seed=3), kept=False) for name in "AB"]

    def described(rows):
        return describe_not_compared(rows, differences_from_best(rows, tmp_path))

    assert described(rows) == described(rows[:1]) == []
    unknown = [{key: value for key, value in row.items() if key != "interval"} | {"case": "model"} for row in rows]
    (sentence,) = described([*rows, *unknown])
    assert sentence.endswith(": kNN model.")
    assert described([*rows, unknown[0]]) == []


@pytest.mark.parametrize(("older", "told"), [("A", []), ("B", [("A", "C")])])
def test_an_encoder_without_an_interval_is_no_lesser_one(older, told, tmp_path):
    """A, which is the best, has no difference from the others without its interval; one of these is left out, named."""
    shares = {"A": 0.9, "B": 0.7, "C": 0.5}
    rows = [row_of(tmp_path, name, right(share), kept=False) for name, share in shares.items()]
    rows = [{key: row[key] for key in row if (row["encoder"], key) != (older, "interval")} for row in rows]
    differences = differences_from_best(rows, tmp_path)
    assert [(each.one, each.other) for each in differences] == told
    (sentence,) = describe_not_compared(rows, differences)
    assert sentence.endswith(": kNN 20." if older == "A" else "so not compared: B.")


def test_each_column_has_its_best_and_the_others_by_what_tells_them_apart(tmp_path):
    shares = {"A": 0.5, "B": 0.9, "C": 0.89, "D": 0.3}
    rows = []
    for name, share in shares.items():
        for seed in range(1 if name == "D" else 3):
            rows.append(row_of(tmp_path, name, right(share, seed=seed), seed, kept=False))
    headings, cells = told_apart_table(differences_from_best(rows, tmp_path))
    assert cells == [["kNN 20", "B", "C", "D", "A"]] and len(headings) == 5
    _, cells = told_apart_table(differences_from_best([row for row in rows if row["encoder"] in "BA"], tmp_path))
    assert cells == [["kNN 20", "B", "-", "-", "A"]]


def test_published_rows_get_wilsons_interval_where_the_images_are_known():
    cases = cases_in(ROOT / "configs" / "compare" / "leaderboard_cifar10.yaml")
    case = next(case for case in cases.values() if case.entry.command == "linear")
    row = {"kind": "test", "accuracy": 0.5399, "encoder_seed": 0, "seed": 0, "dataset": "CIFAR-10"}
    known = with_interval(row, case)
    assert known["interval"] == list(wilson(5399, 10_000)) and known["images"] == 10_000
    other_figure = row | {"accuracy": -2.0, "score": "explained variance (R2)"}
    assert with_interval(other_figure, case) == other_figure
    assert score_text(mean_and_spread([known])) == "54.0 (53.0 to 55.0)"
    assert with_interval({"kind": "rank", "rank": 3.0}, case) == {"kind": "rank", "rank": 3.0}
    assert with_interval(known | {"interval": [0.1, 0.2]}, case)["interval"] == [0.1, 0.2]
