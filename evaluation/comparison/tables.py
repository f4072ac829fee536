"""Tables of a comparison's results: means and spreads by encoder and column, and these as Markdown."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from evaluation.comparison.entries import MEASURED_AXES, Question
from evaluation.comparison.reports import ResultRow
from evaluation.frozen.results import format_percent, table

Cell = dict[str, float]
"""Mean, standard deviation (std) and count; PFLOP, where asked; `diverged`, the number of seeds that did, where any."""
CellsByEncoder = dict[str, dict[str, Cell]]
"""Encoder -> column -> cell.

Columns are accuracies; of a single dataset also that of fine-tuning on training images that it left out, and the rank
of the deepest features where a probe measured it.
"""
Groups = Mapping[str | None, set[str]]
"""Group -> its datasets, measured or not."""

RANK_COLUMN = "rank"


class TableColumn(NamedTuple):
    """A column of accuracies: those of a dataset, or their mean over a group of datasets."""

    heading: str
    key: str
    """`dataset` or `group`: the entry of a row that `value` is of."""
    value: str
    evaluation: str
    case: str

    def has(self, row: ResultRow) -> bool:
        """Whether a result belongs to the column."""
        return (row[self.key], row["evaluation"], row["case"]) == (self.value, self.evaluation, self.case)


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


def unique(rows: Iterable[ResultRow], key: str) -> list[Any]:
    """The different values of a key, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def x_of(row: ResultRow, question: Question) -> float | None:
    """Position of an accuracy on the question's x-axis; None: unknown."""
    if question.x not in MEASURED_AXES:
        return dict(question.encoders or {}).get(row["encoder"])
    training = row.get("training_pflop")
    if training is None:
        return None
    return training + (row.get("pflop", 0) if question.x == "total compute" else 0)


def spread(rows: Iterable[ResultRow], key: str = "accuracy") -> Cell:
    """Mean and standard deviation over seeds, of the encoder and of the draws; over datasets, the mean is taken."""
    by_seed: dict[tuple, list[float]] = {}
    for row in rows:
        by_seed.setdefault((row["encoder_seed"], row["seed"]), []).append(row[key])
    means = [np.mean(values) for values in by_seed.values()]
    return {"mean": float(np.mean(means)), "std": float(np.std(means)), "count": len(means)}


def columns_of(rows: list[ResultRow]) -> list[TableColumn]:
    """Columns of accuracies: each dataset's cases, then the means over groups of datasets."""
    several = len(unique(rows, "dataset")) > 1
    columns: dict[str, TableColumn] = {}
    for key in ("dataset", "group"):
        for row in rows:
            value = row[key]
            if not value:
                continue
            shown = f"mean {value}" if key == "group" else value
            if key == "dataset" and not several:
                shown = ""
            heading = " ".join(part for part in (shown, row["evaluation"], row["case"]) if part)
            columns[heading] = TableColumn(heading, key, value, row["evaluation"], row["case"])
    return list(columns.values())


def numbers_of(rows: list[ResultRow], question: Question | None = None, groups: Groups | None = None) -> CellsByEncoder:
    """The numbers of a table.

    Args:
        question: where it plots against compute, each cell has the mean PFLOP that its accuracies took.
        groups: the datasets of each group; a mean over a group is one over all of them.
    """
    tested, diverged = of_kind(rows, "test"), diverged_cases(rows)
    numbers: CellsByEncoder = {encoder: {} for encoder in unique([*tested, *diverged], "encoder")}
    for column in columns_of([*tested, *diverged]):
        in_column = [row for row in tested if column.has(row)]
        datasets = set(unique(in_column, "dataset"))
        if column.key == "group" and in_column:
            datasets |= (groups or {}).get(column.value, set())
        for encoder, cells in numbers.items():
            lost = [row for row in of_encoder(diverged, encoder) if column.has(row)]
            complete = of_complete_seeds(of_encoder(in_column, encoder), datasets)
            cell = cell_of(complete, lost, question)
            if cell:
                cells[column.heading] = cell
    if len(unique(rows, "dataset")) == 1:
        add_dev_accuracies(numbers, rows)
        add_ranks(numbers, rows)
    return numbers


def cell_of(rows: list[ResultRow], diverged: list[ResultRow], question: Question | None) -> Cell:
    """The numbers of an encoder's results in a column; empty: there are none."""
    cell = spread(rows) if rows else {}
    lost_seeds = {row["encoder_seed"] for row in diverged}
    if lost_seeds:
        cell["diverged"] = len(lost_seeds)
    if question is not None and question.x in MEASURED_AXES:
        compute = [x for x in (x_of(row, question) for row in rows) if x is not None]
        if compute:
            cell["pflop"] = float(np.mean(compute))
    return cell


def add_dev_accuracies(numbers: CellsByEncoder, rows: list[ResultRow]) -> None:
    """Add columns of fine-tuning's accuracy on training images that it left out, where all tested seeds have it."""
    on_dev = [row for row in of_kind(rows, "dev") if "depth" not in row]
    tested = of_kind(rows, "test")
    for encoder in unique(on_dev, "encoder"):
        for evaluation in unique(of_encoder(on_dev, encoder), "evaluation"):
            dev = [row for row in of_encoder(on_dev, encoder) if row["evaluation"] == evaluation]
            test = [row for row in of_encoder(tested, encoder) if row["evaluation"] == evaluation]
            if set(unique(dev, "encoder_seed")) == set(unique(test, "encoder_seed")):
                numbers[encoder][f"{evaluation}, dev"] = spread(dev)


def add_ranks(numbers: CellsByEncoder, rows: list[ResultRow]) -> None:
    """Add a column of the effective rank of the deepest features."""
    ranked = of_kind(rows, "rank")
    for encoder in unique(ranked, "encoder"):
        own = of_encoder(ranked, encoder)
        deepest = max(row["depth"] for row in own)
        numbers[encoder][RANK_COLUMN] = spread([row for row in own if row["depth"] == deepest], "rank")


def diverged_cases(rows: list[ResultRow]) -> list[ResultRow]:
    """Rows that diverged, once for each case that their evaluation has for other encoders; if it has none, for `""`."""
    cases: dict[str, list[str]] = {}
    for row in of_kind(rows, "test"):
        known = cases.setdefault(row["evaluation"], [])
        if row["case"] not in known:
            known.append(row["case"])
    diverged = []
    for row in of_kind(rows, "diverged"):
        diverged += [row | {"case": case} for case in cases.get(row["evaluation"], [""])]
    return diverged


def of_complete_seeds(rows: list[ResultRow], datasets: set[str]) -> list[ResultRow]:
    """Results of the seeds that have all of these datasets: a mean over some would pass for one over all."""
    known: dict[tuple, set[str]] = {}
    for row in rows:
        known.setdefault((row["encoder_seed"], row["seed"]), set()).add(row["dataset"])
    return [row for row in rows if known[row["encoder_seed"], row["seed"]] == datasets]


def markdown_of(numbers: CellsByEncoder) -> str:
    """The numbers as a Markdown table."""
    return table(*cells_of(numbers))


def cells_of(numbers: CellsByEncoder) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table; beside accuracies, the compute that they took, where that is known."""
    names: dict[str, None] = {}
    for cells in numbers.values():
        names |= dict.fromkeys(sorted(cells, key=lambda name: name == RANK_COLUMN))  # the rank last
    headings = ["accuracy (%)"]
    body = [[encoder] for encoder in numbers]
    for name in names:
        column = [cells.get(name) for cells in numbers.values()]
        has_compute = any("pflop" in cell for cell in column if cell is not None)
        headings += [name, f"{name}, PFLOP"] if has_compute else [name]
        for line, cell in zip(body, column, strict=True):
            line.append(rank_text(cell) if name == RANK_COLUMN else accuracy_text(cell))
            if has_compute:
                line.append(compute_text(cell))
    return headings, body


def accuracy_text(cell: Cell | None) -> str:
    """An accuracy as the table has it; a single measurement has no spread."""
    if cell is None:
        return "-"
    if "mean" not in cell:
        return "diverged"
    return f"{format_percent(cell)} ({cell['diverged']} diverged)" if "diverged" in cell else format_percent(cell)


def rank_text(cell: Cell | None) -> str:
    """An effective rank as the table has it."""
    if cell is None:
        return "-"
    return f"{cell['mean']:.0f} ± {cell['std']:.0f}" if cell["count"] > 1 else f"{cell['mean']:.0f}"


def compute_text(cell: Cell | None) -> str:
    """The compute of an accuracy as the table has it."""
    return "-" if cell is None or "pflop" not in cell else f"{cell['pflop']:.3g}"
