"""Choices of a comparison's rows of results: those of a question, a kind, an encoder."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from evaluation.comparison.entries import Question
from evaluation.comparison.reports import ResultRow

MASKED_BASELINES = ("two nearest", "nearest", "most frequent")
"""Cases of masked patches that no encoder made."""


def rows_asked(rows: list[ResultRow], question: Question) -> list[ResultRow]:
    """The rows that a question is about, encoders in its order."""
    encoders = unique(rows, "encoder") if question.encoders is None else list(question.encoders)
    evaluations = question.evaluations or unique(rows, "evaluation")
    asked = [row for row in rows if row["encoder"] in encoders and row["evaluation"] in evaluations]
    return sorted(asked, key=lambda row: (encoders.index(row["encoder"]), evaluations.index(row["evaluation"])))


def of_kind(rows: Iterable[ResultRow], kind: str) -> list[ResultRow]:
    """The accuracies on `test` images, those on the `dev` split, the `rank` by depth, or rows that `diverged`."""
    return [row for row in rows if row["kind"] == kind]


def of_encoder(rows: Iterable[ResultRow], encoder: str) -> list[ResultRow]:
    """The results of an encoder."""
    return [row for row in rows if row["encoder"] == encoder]


def diverged_with(rows: Iterable[ResultRow], row: ResultRow) -> list[ResultRow]:
    """The rows that diverged in the evaluation and on the dataset of this row."""
    diverged = of_kind(rows, "diverged")
    return [each for each in diverged if all(each[key] == row[key] for key in ("evaluation", "dataset"))]


def unique(rows: Iterable[ResultRow], key: str) -> list[Any]:
    """The different values of a key, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def count_seeds(rows: Iterable[ResultRow]) -> int:
    """The number of seeds that the rows of an encoder are of."""
    return len(unique(rows, "encoder_seed"))


def grouped(rows: Iterable[ResultRow], *keys: str) -> dict[tuple, list[ResultRow]]:
    """The rows by their values of these keys, in order."""
    groups = defaultdict(list)
    for row in rows:
        values = tuple(row[key] for key in keys)
        groups[values].append(row)
    return dict(groups)
