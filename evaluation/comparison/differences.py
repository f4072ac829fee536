"""Differences of encoders: which of them a table tells apart, over test images and over seeds.

K encoders, S seeds, M images. Intervals hold all at once, for all pairs of a table in 95 of 100 tables: Tukey's, for
encoders that are correlated, since they are tested on the same images. Columns share the error (Bonferroni).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evaluation.comparison.tables import SCORES, in_columns, kind_of_scores
from evaluation.metrics.intervals import Z
from evaluation.metrics.scoring import (
    LabelKind,
    Outcomes,
    best_choice,
    image_scores,
    labelled_outcomes,
    load_outcomes,
)

ERROR = 0.045
"""Share of tables of equal encoders that tell any two apart; as simulated 5 of 100, since variances are estimated."""
INFINITE = 10**9
DRAWS = 10_000
"""Of encoders that are equal, for the quantile of their largest difference."""


class Difference(NamedTuple):
    """The score of the best encoder of a column minus that of another one."""

    column: str
    kind: LabelKind
    best: str
    other: str
    value: float
    half: float
    """Half of the width of the interval: over test images and, of those that have several, over seeds."""
    over: str
    """The population that the interval is over, in words."""

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.value > self.half


def differences_from_best(frame: pd.DataFrame, folder: Path) -> list[Difference]:
    """The difference of the best encoder of each column from every other one, in the order of the rows.

    Encoders without intervals, such as older ones, have none; nor has a column whose best encoder is without.

    Args:
        frame: rows of a question.
        folder: of the comparison, whose reports have the outcomes.
    """
    scored = in_columns(frame)
    scored = scored[scored.kind.isin(SCORES) & ~scored.dataset.str.startswith("mean ")]
    columns = [(name, rows) for name, rows in scored.groupby("column", sort=False) if rows.encoder.nunique() > 1]
    return [each for name, rows in columns for each in differences_in(name, rows, folder, ERROR / len(columns))]


def differences_in(column: str, rows: pd.DataFrame, folder: Path, error: float) -> list[Difference]:
    """The differences in a column.

    Args:
        error: share of columns of equal encoders that may tell any two apart.
    """
    encoders = dict(list(rows.groupby("encoder", sort=False)))
    means = {name: float(of_one.accuracy.to_numpy().mean()) for name, of_one in encoders.items()}
    best = best_choice(means)
    names = [name for name, of_one in encoders.items() if of_one.interval.notna().all()]
    if best not in names or len(names) < 2:
        return []
    covariance, count = covariance_over_images([encoders[name] for name in names], folder)
    variances, seeds, freedom = variances_over_seeds([encoders[name] for name in names])
    halves = half_widths(covariance, variances, (count - 1, freedom), error)[names.index(best)]
    images = f"same {count:,} images" if count < INFINITE else "images, not paired"
    found = []
    for name, half, number in zip(names, halves, seeds, strict=True):
        over = f"{images}; {seeds[names.index(best)]} and {number} seeds"
        value = means[best] - means[name]
        found.append(Difference(column, kind_of_scores(rows.score), best, name, value, float(half), over))
    return [each for each in found if each.other != best]


def covariance_over_images(encoders: Sequence[pd.DataFrame], folder: Path) -> tuple[NDArray, int]:
    """The covariance (K, K) of the encoders' mean scores over test images, and the number of these images.

    Without the outcomes of all, on the same images, it is as if each encoder had images of its own, and INFINITE many.
    """
    outcomes = [[outcomes_of(kept, folder) for kept in rows.outcomes] for rows in encoders]
    same = {images_of(each) for of_one in outcomes for each in of_one}
    if len(same) == 1 and None not in same:
        scores = np.array([np.mean([image_scores(each) for each in of_one], axis=0) for of_one in outcomes])
        return np.cov(scores) / scores.shape[1], scores.shape[1]
    ends = np.array([np.mean(rows.interval.tolist(), axis=0) for rows in encoders], float)
    return np.diag(np.square((ends[:, 1] - ends[:, 0]) / (2 * Z))), INFINITE


def outcomes_of(kept: Any, folder: Path) -> Outcomes | None:
    """The outcomes of the labelled images that a row was tested on; None: it has none."""
    loaded = load_outcomes(folder / kept["report"], kept["number"]) if isinstance(kept, dict) else None
    return loaded and labelled_outcomes(loaded)


def images_of(outcomes: Outcomes | None) -> tuple | None:
    """The key that rows have in common which were tested on the same images."""
    return outcomes and (outcomes.kind, tuple(outcomes.images), outcomes.targets.tobytes())


def variances_over_seeds(encoders: Sequence[pd.DataFrame]) -> tuple[NDArray, list[int], int]:
    """The variances (K,) of means over seeds, 0 of one seed; the numbers of seeds; the degrees of freedom.

    Seeds are paired: what a seed does to all encoders, such as the choice of their labels, is no part of it. Of two
    encoders it is half of the variance of their differences, by n - 1.
    """
    by_seed = [rows.groupby("encoder_seed").accuracy.mean() for rows in encoders]
    seeds = [len(of_one) for of_one in by_seed]
    several = pd.DataFrame([of_one for of_one in by_seed if len(of_one) > 1]).dropna(axis=1).to_numpy()
    if min(several.shape) < 2:
        return np.zeros(len(encoders)), seeds, 1
    residuals = several - several.mean(1, keepdims=True) - several.mean(0) + several.mean()
    freedom = (several.shape[0] - 1) * (several.shape[1] - 1)
    variance = np.square(residuals).sum() / freedom
    return np.array([variance / count if count > 1 else 0.0 for count in seeds]), seeds, freedom


def half_widths(covariance: NDArray, variances: NDArray, freedom: tuple[int, int], error: float) -> NDArray:
    """Half-widths (K, K) of the intervals of all differences, which hold all at once.

    Their ratio to the standard errors is a quantile of the largest one between encoders that are equal.

    Args:
        covariance: of the figures over images, (K, K).
        variances: of the figures over seeds, (K,).
        freedom: degrees of freedom that both are known by.
        error: share of cases in which one of the intervals may not hold.
    """
    random = np.random.default_rng(0)
    drawn = random.multivariate_normal(np.zeros(len(covariance)), covariance + np.diag(variances), DRAWS)
    estimated = random.chisquare(freedom, (DRAWS, 2)) / freedom
    own = np.diag(covariance)
    over_images = own[:, None] + own - 2 * covariance
    over_seeds = variances[:, None] + variances
    one, other = np.triu_indices(len(covariance), 1)
    errors = np.sqrt(estimated @ [over_images[one, other], over_seeds[one, other]])
    gaps = np.abs(drawn[:, one] - drawn[:, other])
    ratios = np.divide(gaps, errors, out=np.zeros_like(gaps), where=errors > 0)
    return np.quantile(ratios.max(1), 1 - error) * np.sqrt(over_images + over_seeds)


def difference_table(differences: Sequence[Difference]) -> tuple[list[str], list[list[str]]]:
    """Headings and a row for each difference: of which encoders, its interval, and whether they are told apart."""
    headings = ["best, and in which column", "minus", "difference", "", "over"]
    body = []
    for each in differences:
        value, low, high = (signed(each, end) for end in (each.value, each.value - each.half, each.value + each.half))
        verdict = "told apart" if each.is_told_apart else "not told apart"
        body.append([f"{each.best}, {each.column}", each.other, f"{value} ({low} to {high})", verdict, each.over])
    return headings, body


def signed(each: Difference, value: float) -> str:
    """A difference of scores with its sign."""
    text = each.kind.text_of_number(each.kind.score, value)
    return text if text.startswith("-") else f"+{text}"
