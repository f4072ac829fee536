"""Differences of encoders: which of them a table tells apart, over test images and over seeds.

K encoders, S seeds, M images. Intervals hold all at once, for all pairs of a table in 95 of 100 tables: Tukey's, for
encoders that are correlated, since they are tested on the same images. Columns share the error (Bonferroni).

Of 16,000 simulated tables of equal encoders (8 or 12, on 286 or 2,000 images; shares and squares of errors, correlated
by .2 to .5) 5.0 % tell some two apart: 4.9 of 8 encoders, 5.2 of 12 (each ± .25). Of 4,000 tables with three seeds they
are .3 %, since the noise of an image in one seed is in the errors over images and over seeds.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import wishart

from evaluation.comparison.rows import SCORED_KINDS, in_columns, kind_of_scores
from evaluation.metrics.intervals import Z
from evaluation.metrics.scoring import LabelKind, best_choice

ERROR = 0.05
"""Share of tables of equal encoders that tell any two apart."""
INFINITE = 10**9
DRAWS, ROUNDS = 1000, 10
"""Of encoders that are equal, for the quantile of their largest difference; in rounds, for less memory."""
TINY = 1e-12
"""Variance by which encoders that are the same differ in draws."""


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


def differences_from_best(frame: pd.DataFrame) -> list[Difference]:
    """The difference of the best encoder of each column from every other one, in the order of the rows.

    Encoders without intervals, such as older ones, have none; nor has a column whose best encoder is without.

    Args:
        frame: rows of a question.
    """
    scored = in_columns(frame)
    scored = scored[scored.kind.isin(SCORED_KINDS) & scored.dataset.isin(frame.dataset)]
    columns = [(name, rows) for name, rows in scored.groupby("column", sort=False) if rows.encoder.nunique() > 1]
    return [each for name, rows in columns for each in differences_in(name, rows, ERROR / len(columns))]


def differences_in(column: str, rows: pd.DataFrame, error: float) -> list[Difference]:
    """The differences in a column.

    Args:
        error: share of columns of equal encoders that may tell any two apart.
    """
    means = {name: float(scores.to_numpy().mean()) for name, scores in rows.groupby("encoder", sort=False).accuracy}
    best = best_choice(means)
    known = rows[~rows.encoder.isin(rows.encoder[rows.interval.isna()])]
    names = list(known.encoder.unique())
    if best not in names or len(names) < 2:
        return []
    place = names.index(best)
    covariance, tested = covariance_over_images(known)
    has_seeds = known.groupby("encoder").encoder_seed.nunique().max() > 1
    variances, counts, freedom = variances_over_seeds(known, "encoder_seed" if has_seeds else "seed")
    is_paired = tested < INFINITE  # otherwise the intervals of each have Student's quantile
    known_by = min([tested, *known.known_by.dropna()]) if is_paired else INFINITE
    halves = half_widths(covariance, variances, (int(known_by) - 1, freedom), error)[place].tolist()
    images = f"same {tested:,} images" if is_paired else "images, not paired"
    repeated = "draws" if max(counts) > 1 and not has_seeds else "seeds"
    kind = kind_of_scores(rows.score)
    found = []
    for name, half, count in zip(names, halves, counts, strict=True):
        over = f"{images}; {counts[place]} and {count} {repeated}"
        found.append(Difference(column, kind, best, name, means[best] - means[name], half, over))
    return [each for each in found if each.other != best]


def covariance_over_images(rows: pd.DataFrame) -> tuple[NDArray, int]:
    """The covariance (K, K) of the encoders' mean scores over test images, and the number of these images.

    Without the scores of all, on the same images, it is as if each encoder had images of its own, and INFINITE many.
    """
    encoders = rows.groupby("encoder", sort=False)
    if rows.scores.notna().all() and rows.tested.nunique() == 1:
        scores = np.array([np.mean(of_one.tolist(), axis=0) for _, of_one in encoders.scores])
        return np.cov(scores) / scores.shape[1], scores.shape[1]
    ends = np.array([np.mean(of_one.tolist(), axis=0) for _, of_one in encoders.interval], float)
    return np.diag(np.square((ends[:, 1] - ends[:, 0]) / (2 * Z))), INFINITE


def variances_over_seeds(rows: pd.DataFrame, seed: str = "encoder_seed") -> tuple[NDArray, list[int], int]:
    """The variances (K,) of means over seeds, 0 of one seed; the numbers of seeds; the degrees of freedom.

    If all encoders of several have the same seeds, these are paired: what a seed does to all, such as the choice of
    their labels, is no part of it. Of two encoders it is half of the variance of their differences, by n - 1. Otherwise
    it is the pooled variance around the mean of each.

    Args:
        seed: column of the seeds: of the encoders or, with "seed", of draws such as those of few-shot.
    """
    by_seed = rows.pivot_table("accuracy", "encoder", seed, sort=False)
    seeds = by_seed.count(axis=1)
    several = by_seed[seeds > 1]
    paired = several.dropna(axis=1, how="all").to_numpy()
    if len(paired) > 1 and not np.isnan(paired).any():
        residuals = paired - paired.mean(1, keepdims=True) - paired.mean(0) + paired.mean()
        freedom = (paired.shape[0] - 1) * (paired.shape[1] - 1)
    else:
        residuals = several.sub(several.mean(axis=1), axis=0).to_numpy()
        freedom = max(1, int(seeds[seeds > 1].sum()) - len(several))
    variances = np.nansum(np.square(residuals)) / freedom / seeds
    return variances.where(seeds > 1, 0.0).to_numpy(), seeds.tolist(), freedom


def half_widths(covariance: NDArray, variances: NDArray, freedom: tuple[int, int], error: float) -> NDArray:
    """Half-widths (K, K) of the intervals of all differences, which hold all at once.

    Their ratio to the standard errors is a quantile of the largest one between encoders that are equal, whose errors
    are estimated alike: over images each pair's by itself, where a studentized range has one error of all.

    Args:
        covariance: of the figures over images, (K, K).
        variances: of the figures over seeds, (K,).
        freedom: degrees of freedom that both are known by.
        error: share of cases in which one of the intervals may not hold.
    """
    random = np.random.default_rng(0)
    count = len(covariance)
    one, other = np.triu_indices(count, 1)
    known_by = max(freedom[0], count)
    of_images, of_seeds = covariance + TINY * np.eye(count), np.diag(variances)
    largest = []
    for _ in range(ROUNDS):
        figures = random.multivariate_normal(np.zeros(count), of_images + of_seeds, DRAWS)
        estimated = of_differences(wishart.rvs(known_by, of_images, DRAWS, random)) / known_by
        estimated += of_differences(of_seeds) * random.chisquare(freedom[1], (DRAWS, 1, 1)) / freedom[1]
        gaps = np.square(figures[:, one] - figures[:, other])
        largest.append((gaps / estimated[:, one, other]).max(1))
    return np.sqrt(np.quantile(largest, 1 - error) * of_differences(covariance + of_seeds))


def of_differences(covariance: NDArray) -> NDArray:
    """The variances of the differences of all pairs, (..., K, K)."""
    own = covariance.diagonal(axis1=-2, axis2=-1)
    return (own[..., :, None] + own[..., None, :] - 2 * covariance).clip(0)


def difference_table(differences: Collection[Difference]) -> tuple[list[str], list[list[str]]]:
    """Headings and a row for each difference: of which encoders, its interval, and whether they are told apart."""
    body = []
    for each in differences:
        ends = (each.value, each.value - each.half, each.value + each.half)
        numbers = [each.kind.text_of_number(each.kind.score, end) for end in ends]
        words = "{} ({} to {})".format(*(text if text.startswith("-") else f"+{text}" for text in numbers))
        verdict = "told apart" if each.is_told_apart else "not told apart"
        body.append([f"{each.best}, {each.column}", each.other, words, verdict, each.over])
    return ["best, and in which column", "minus", "difference", "", "over"], body
