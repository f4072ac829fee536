"""Differences of encoders: which a comparison tells apart, over test images and over seeds.

Encoders that were tested on the same images are paired image by image, where their reports kept the outcomes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from evaluation.comparison.reports import ResultRow, kind_of_scores
from evaluation.comparison.rows import count_seeds, diverged_with, of_encoder, of_kind, unique
from evaluation.comparison.tables import columns_of
from evaluation.metrics.intervals import Difference, Interval, paired
from evaluation.metrics.scoring import (
    LabelKind,
    Outcomes,
    best_choice,
    image_scores,
    kind_of,
    labelled_outcomes,
    load_outcomes,
    mean_interval,
)


class EncoderDifference(NamedTuple):
    """The accuracy of an encoder minus that of another, in one column of a table."""

    column: str
    kind: LabelKind
    """Kind of label, whose score is compared."""
    one: str
    other: str
    over_images: Difference
    is_paired: bool
    """Whether the same images are compared one by one; otherwise the interval is that of two sets of images."""
    seeds: tuple[int, int]
    """Numbers of encoders, of different seeds."""
    over_seeds: Difference | None
    """The same difference with its interval over seeds; None: an encoder has one seed."""
    diverged: tuple[int, int] = (0, 0)
    """Numbers of further seeds whose training diverged, and which no mean has."""

    @property
    def are_methods_told_apart(self) -> bool:
        """Whether neither other test images nor other seeds explain the difference; a best one that diverged does."""
        if self.over_seeds is None or self.diverged[0]:
            return False
        return self.over_images.is_told_apart and self.over_seeds.is_told_apart


def differences_from_best(rows: list[ResultRow], folder: Path) -> list[EncoderDifference]:
    """The difference of the best encoder of each column from every other one, in the order of the rows.

    Encoders without intervals, such as older ones, have none; nor has a column whose best encoder is without.

    Args:
        rows: results of a question.
        folder: of the comparison, whose reports have the outcomes.
    """
    found = []
    for column in columns_of(of_kind(rows, "test")):
        if column.group is not None:
            continue
        encoders = {name: of_encoder(column.rows, name) for name in unique(column.rows, "encoder")}
        means = {name: float(np.mean([row["accuracy"] for row in of_one])) for name, of_one in encoders.items()}
        best = best_choice(means)
        diverged = diverged_with(rows, column.rows[0])
        failed_seeds = {name: count_seeds(of_encoder(diverged, name)) for name in encoders}
        for name, of_other in encoders.items():
            if name != best and all("interval" in row for row in (*encoders[best], *of_other)):
                difference = compare_rows(column.heading, encoders[best], of_other, folder)
                found.append(difference._replace(diverged=(failed_seeds[best], failed_seeds[name])))
    return found


def describe_not_compared(rows: list[ResultRow], differences: Sequence[EncoderDifference]) -> list[str]:
    """Sentences on the columns of several encoders without a difference, and on the encoders without one elsewhere.

    The best encoder of such a column has no interval, or all others have none.
    """
    compared: dict[str, set[str]] = {}
    for each in differences:
        compared.setdefault(each.column, set()).update((each.one, each.other))
    columns = [column for column in columns_of(of_kind(rows, "test")) if len(unique(column.rows, "encoder")) > 1]
    others = [column.heading for column in columns if column.heading not in compared]
    sentences = [f"Without intervals, so no difference is told apart: {', '.join(others)}."] if others else []
    for column in columns:
        known = compared.get(column.heading, set())
        left_out = [name for name in unique(column.rows, "encoder") if name not in known]
        if known and left_out:
            sentences.append(f"{column.heading}: without an interval, so not compared: {', '.join(left_out)}.")
    return sentences


def compare_rows(column: str, one: list[ResultRow], other: list[ResultRow], folder: Path) -> EncoderDifference:
    """The difference of two encoders' results in a column: means over the seeds of encoders and draws."""
    paired = paired_difference(outcomes_of(one, folder), outcomes_of(other, folder))
    return EncoderDifference(
        column,
        kind_of_scores(one),
        one[0]["encoder"],
        other[0]["encoder"],
        paired or unpaired_difference(one, other),
        paired is not None,
        (count_seeds(one), count_seeds(other)),
        difference_over_seeds(one, other),
    )


def outcomes_of(rows: list[ResultRow], folder: Path) -> list[Outcomes]:
    """The outcomes of all rows; empty where one has none."""
    outcomes = []
    for row in rows:
        kept = row.get("outcomes")
        loaded = load_outcomes(folder / kept["report"], kept["number"]) if kept else None
        if loaded is None:
            return []
        outcomes.append(labelled_outcomes(loaded))
    return outcomes


def paired_difference(one: Sequence[Outcomes], other: Sequence[Outcomes]) -> Difference | None:
    """The difference on the same images; None: there are none, or other ones."""
    if not one or not other:
        return None
    first = one[0]
    for each in (*one, *other):
        same_images = list(each.images) == list(first.images) and np.array_equal(each.targets, first.targets)
        if each.kind != first.kind or not same_images:
            return None
    scores = [np.mean([image_scores(each) for each in of_encoder], 0) for of_encoder in (one, other)]
    return paired(*scores, kind_of(first).is_share)


def unpaired_difference(one: list[ResultRow], other: list[ResultRow]) -> Difference:
    """The difference as if it were of two sets of images, from the intervals of both (Newcombe, 1998, method 10)."""
    values = [float(np.mean([row["accuracy"] for row in rows])) for rows in (one, other)]
    (low, high), (other_low, other_high) = mean_interval(one), mean_interval(other)
    value = values[0] - values[1]
    below = math.hypot(values[0] - low, other_high - values[1])
    above = math.hypot(high - values[0], values[1] - other_low)
    return Difference(value, (value - below, value + above), min(one[0].get("images", 0), other[0].get("images", 0)))


def difference_over_seeds(one: list[ResultRow], other: list[ResultRow]) -> Difference | None:
    """The difference of the means over seeds, with Welch's interval.

    None: one of them has one seed, or each has the same score at all of its seeds: an interval without width would say
    that seeds tell them apart, where they are few test images, or seeds on which nothing depends.
    """
    by_seed = []
    for rows in (one, other):
        seeds = unique(rows, "encoder_seed")
        by_seed.append([np.mean([row["accuracy"] for row in rows if row["encoder_seed"] == seed]) for seed in seeds])
    are_alike = all(len(set(values)) == 1 for values in by_seed)  # whose variance may be 1e-33, by rounding
    if min(map(len, by_seed)) < 2 or are_alike:
        return None
    variances = [np.var(values, ddof=1) / len(values) for values in by_seed]
    value = float(np.mean(by_seed[0]) - np.mean(by_seed[1]))
    variance = sum(variances)
    terms = [each**2 / (len(values) - 1) for each, values in zip(variances, by_seed, strict=True)]
    half = float(stdtrit(variance**2 / sum(terms), 0.975)) * math.sqrt(variance)
    return Difference(value, (value - half, value + half), 0)


def describe_difference(each: EncoderDifference) -> str:
    """In words: `A - B: +2.1 (+0.9 to +3.3), same 10,000 images; one seed each: methods not told apart`."""
    methods = "told apart" if each.are_methods_told_apart else "not told apart"
    return (
        f"{each.one} - {each.other}: {describe_amount(each)}, {describe_test_images(each)}; {describe_seeds(each)}: "
        f"methods {methods}"
    )


def describe_test_images(each: EncoderDifference) -> str:
    """The images, and whether they are compared one by one."""
    images = f"{each.over_images.images:,} images" if each.over_images.images else "images"
    return f"same {images}" if each.is_paired else f"{images}, not paired"


def describe_seeds(each: EncoderDifference) -> str:
    """The seeds of both, and the interval over them."""
    one, other = each.seeds
    diverged = " and ".join(map(str, each.diverged))
    more = f", {diverged} more diverged" if any(each.diverged) else ""
    if each.over_seeds is None:
        return ("one seed each" if one == other == 1 else f"{one} and {other} seeds") + more
    return f"{one} and {other} seeds ({signed_interval(each.kind, each.over_seeds.interval)}){more}"


def difference_table(differences: Sequence[EncoderDifference]) -> tuple[list[str], list[list[str]]]:
    """Headings and a row for each difference: of which encoders, and whether images and seeds tell them apart."""
    headings = ["best, and in which column", "minus", "difference", "test images", "encoders", "seeds", "methods"]
    rows = []
    for each in differences:
        encoders = "told apart" if each.over_images.is_told_apart else "not told apart"
        methods = "told apart" if each.are_methods_told_apart else "not told apart"
        names = [f"{each.one}, {each.column}", each.other]
        rows.append(
            [*names, describe_amount(each), describe_test_images(each), encoders, describe_seeds(each), methods]
        )
    return headings, rows


def told_apart_table(differences: Sequence[EncoderDifference]) -> tuple[list[str], list[list[str]]]:
    """Headings and a row for each column: its best encoder, and the others by how they are told apart from it."""
    headings = ["column", "best", "not told apart", "by test images only", "by test images and seeds"]
    by_column: dict[str, list[EncoderDifference]] = {}
    for each in differences:
        by_column.setdefault(each.column, []).append(each)
    rows = []
    for column, of_column in by_column.items():
        cells: tuple[list[str], ...] = ([], [], [])
        for each in sorted(of_column, key=lambda difference: difference.over_images.value):
            cells[each.over_images.is_told_apart + each.are_methods_told_apart].append(each.other)
        rows.append([column, of_column[0].one, *("; ".join(names) or "-" for names in cells)])
    return headings, rows


def runners_up(differences: Sequence[EncoderDifference]) -> list[EncoderDifference]:
    """Of each column the difference from the second best."""
    by_column: dict[str, EncoderDifference] = {}
    for each in differences:
        known = by_column.setdefault(each.column, each)
        if each.over_images.value < known.over_images.value:
            by_column[each.column] = each
    return list(by_column.values())


def describe_amount(each: EncoderDifference) -> str:
    """A difference over images with its interval, in the unit of the score."""
    difference = each.over_images
    return f"{signed(each.kind, difference.value)} ({signed_interval(each.kind, difference.interval)})"


def signed_interval(kind: LabelKind, interval: Interval) -> str:
    """The ends of a difference's interval."""
    low, high = interval
    return f"{signed(kind, low)} to {signed(kind, high)}"


def signed(kind: LabelKind, value: float) -> str:
    """A difference of scores with its sign."""
    text = kind.text_of_number(kind.score, value)
    return text if text.startswith("-") else f"+{text}"
