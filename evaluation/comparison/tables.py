"""Tables of a comparison's results: means and spreads by encoder and column, as Markdown."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from evaluation.comparison.entries import MEASURED_AXES, Question
from evaluation.comparison.reports import ResultRow, kind_of_scores, name_of_score
from evaluation.comparison.rows import MASKED_BASELINES, count_seeds, grouped, of_encoder, of_kind, unique
from evaluation.metrics.scoring import ONE_CLASS, mean_interval, summarize_values

Cell = dict[str, Any]
"""Mean, standard deviation (std) and count; `interval` over test images, where it is known; pflop and
device_hours, where asked; `diverged`, the number of seeds that did, where any; `score`, its name, where it is no
accuracy."""
CellsByEncoder = dict[str, dict[str, Cell]]
"""Encoder -> column -> cell.

Columns are accuracies; of a single dataset also that of fine-tuning on training images that it left out, and the rank
of the deepest features where a probe measured it.
"""
Groups = Mapping[str | None, set[str]]
"""Group -> its datasets, measured or not."""

RANK_COLUMN = "rank"
COST_UNITS = {"pflop": "PFLOP", "device_hours": "device-hours"}
"""Entry of a cell -> its unit, for headings."""


class TableColumn(NamedTuple):
    """A column of accuracies: those on a dataset, or their mean over a group of datasets."""

    heading: str
    group: str | None
    """The group; None: the column is about one dataset."""
    rows: list[ResultRow]


def cells_by_encoder(
    rows: list[ResultRow], question: Question | None = None, groups: Groups | None = None
) -> CellsByEncoder:
    """The cells of a table.

    Args:
        question: where it plots against compute, each cell has the mean PFLOP and device-hours of its accuracies.
        groups: the datasets of each group; a mean over a group is one over all of them.
    """
    scored = [*of_kind(rows, "test"), *diverged_cases(rows)]
    numbers: CellsByEncoder = {encoder: {} for encoder in unique(scored, "encoder")}
    for column in columns_of(scored):
        tested = of_kind(column.rows, "test")
        diverged = of_kind(column.rows, "diverged")
        datasets = set(unique(tested, "dataset"))
        if column.group is not None:
            datasets |= (groups or {}).get(column.group, set())
        for encoder, cells in numbers.items():
            complete = of_complete_seeds(of_encoder(tested, encoder), datasets)
            cell = cell_of(complete, of_encoder(diverged, encoder), question)
            if cell:
                cells[column.heading] = cell
    if len(unique(rows, "dataset")) == 1:
        add_dev_accuracies(numbers, rows)
        add_ranks(numbers, rows)
    return numbers


def diverged_cases(rows: list[ResultRow]) -> list[ResultRow]:
    """Rows that diverged, once for each case that their evaluation has for other encoders; if it has none, for `""`."""
    tested = grouped(of_kind(rows, "test"), "evaluation")
    diverged = []
    for row in of_kind(rows, "diverged"):
        cases = unique(tested.get((row["evaluation"],), []), "case") or [""]
        diverged += [row | {"case": case} for case in cases]
    return diverged


def columns_of(rows: list[ResultRow]) -> list[TableColumn]:
    """Columns of accuracies: each dataset's cases, then the means over groups of datasets.

    A column names its dataset where the evaluation has several; masked patches are of a run's own images, and have one.
    Without baselines of masked patches, which no encoder made: see `describe_masked_baselines`.
    """
    rows = [row for row in rows if row["case"] not in MASKED_BASELINES]
    datasets = {name: unique(of_one, "dataset") for (name,), of_one in grouped(rows, "evaluation").items()}
    columns = []
    for (dataset, evaluation, case), in_column in grouped(rows, "dataset", "evaluation", "case").items():
        words = [dataset if len(datasets[evaluation]) > 1 else "", evaluation, case]
        columns.append(TableColumn(" ".join(filter(None, words)), None, in_column))
    for (group, evaluation, case), in_column in grouped(rows, "group", "evaluation", "case").items():
        if group:
            words = [f"mean {group}", evaluation, case]
            columns.append(TableColumn(" ".join(filter(None, words)), group, in_column))
    return columns


def of_complete_seeds(rows: list[ResultRow], datasets: set[str]) -> list[ResultRow]:
    """Results of the seeds that have all of these datasets: a mean over some would pass for one over all."""
    complete = []
    for seed, of_seed in grouped(rows, "encoder_seed", "seed").items():
        if set(unique(of_seed, "dataset")) == datasets:
            complete.append(seed)
    return [row for row in rows if (row["encoder_seed"], row["seed"]) in complete]


def cell_of(rows: list[ResultRow], diverged: list[ResultRow], question: Question | None = None) -> Cell:
    """The numbers of an encoder's results in a column; empty: there are none."""
    cell = mean_and_spread(rows) if rows else {}
    if diverged:
        cell["diverged"] = count_seeds(diverged)
    if question is not None and question.x in MEASURED_AXES:
        for name in COST_UNITS:
            costs = [cost_of(row, question, name) for row in rows]
            known = [cost for cost in costs if cost is not None]
            if known:
                cell[name] = float(np.mean(known))
    return cell


def mean_and_spread(rows: Iterable[ResultRow], key: str = "accuracy") -> Cell:
    """Mean and standard deviation over seeds, of the encoder and of the draws; over datasets, the mean is taken.

    Of one dataset with the 95 % `interval` over its test images, where all rows have one.
    """
    rows = list(rows)
    means = []
    for of_seed in grouped(rows, "encoder_seed", "seed").values():
        means.append(np.mean([row[key] for row in of_seed]))
    cell: Cell = summarize_values(means)
    if key == "accuracy":
        cell |= name_of_score(kind_of_scores(rows))
    interval = mean_interval(rows) if len(unique(rows, "dataset")) == 1 else None
    return cell if interval is None else cell | {"interval": interval}


def cost_of(row: ResultRow, question: Question, name: str) -> float | None:
    """The `pflop` or `device_hours` of training the encoder, with fine-tuning's for `total compute`; None: unknown."""
    training = row.get(f"training_{name}")
    if training is None or question.x == "compute":
        return training
    fine_tuning = 0.0 if "pflop" not in row else row.get(name)  # other evaluations train nothing
    return None if fine_tuning is None else training + fine_tuning


def x_of(row: ResultRow, question: Question) -> float | None:
    """Position of an accuracy on the question's x-axis; None: unknown."""
    if question.x not in MEASURED_AXES:
        return dict(question.encoders or {}).get(row["encoder"])
    return cost_of(row, question, "pflop")


def add_dev_accuracies(numbers: CellsByEncoder, rows: list[ResultRow]) -> None:
    """Add columns of fine-tuning's accuracy on training images that it left out, where all tested seeds have it."""
    on_dev = [row for row in of_kind(rows, "dev") if "depth" not in row]
    tested = grouped(of_kind(rows, "test"), "encoder", "evaluation")
    for (encoder, evaluation), dev in grouped(on_dev, "encoder", "evaluation").items():
        test = tested.get((encoder, evaluation), [])
        if set(unique(dev, "encoder_seed")) == set(unique(test, "encoder_seed")):
            numbers[encoder][f"{evaluation}, dev"] = mean_and_spread(dev)


def add_ranks(numbers: CellsByEncoder, rows: list[ResultRow]) -> None:
    """Add a column of the effective rank of the deepest features."""
    for (encoder,), ranks in grouped(of_kind(rows, "rank"), "encoder").items():
        deepest = max(row["depth"] for row in ranks)
        numbers[encoder][RANK_COLUMN] = mean_and_spread([row for row in ranks if row["depth"] == deepest], "rank")


def cells_of(numbers: CellsByEncoder) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table: accuracies, and next to them their compute, where that is known."""
    names: dict[str, None] = {}
    for cells in numbers.values():
        rank_last = sorted(cells, key=lambda name: name == RANK_COLUMN)
        names |= dict.fromkeys(rank_last)
    columns = {name: [cells.get(name, {}) for cells in numbers.values()] for name in names}
    titles = {name: kind_of_scores(column).score_title for name, column in columns.items() if name != RANK_COLUMN}
    has_one_score = len(set(titles.values())) <= 1
    headings = [next(iter(titles.values()), ONE_CLASS.score_title) if has_one_score else "encoder"]
    body = [[encoder] for encoder in numbers]
    for name, column in columns.items():
        text_of_cell = rank_text if name == RANK_COLUMN else score_text
        headings.append(name if has_one_score or name == RANK_COLUMN else with_title(name, titles[name]))
        for line, cell in zip(body, column, strict=True):
            line.append(text_of_cell(cell) if cell else "-")
        for cost, unit in COST_UNITS.items():
            if not any(cost in cell for cell in column):
                continue
            headings.append(f"{name}, {unit}")
            for line, cell in zip(body, column, strict=True):
                line.append(f"{cell[cost]:.3g}" if cost in cell else "-")
    return headings, body


def with_title(name: str, title: str) -> str:
    """The name of a column with its score and unit, which a case may end in: "linear mAP, macro (%)"."""
    heading = title.removesuffix(" (%)")
    return f"{name.removesuffix(heading).rstrip()}: {title}"


def score_text(cell: Cell) -> str:
    """An accuracy, or another score, as the table has it; a single measurement has no spread."""
    if "mean" not in cell:
        return "diverged"
    return kind_of_scores([cell]).text_of_scores(cell) + diverged_text(cell)


def score_in_words(cell: Cell) -> str:
    """The same in a sentence, with its sign."""
    kind = kind_of_scores([cell])
    return f"{kind.text_of_scores(cell)}{kind.sign}{diverged_text(cell)}"


def mean_in_words(cell: Cell) -> str:
    """The same without spread and interval."""
    return score_in_words(cell | {"count": 1, "interval": (None, None)})


def diverged_text(cell: Cell) -> str:
    """The number of seeds that diverged, in brackets; "" where none did."""
    return f" ({cell['diverged']} diverged)" if "diverged" in cell else ""


def rank_text(cell: Cell) -> str:
    """An effective rank as the table has it."""
    mean = f"{cell['mean']:.0f}"
    return f"{mean} ± {cell['std']:.0f}" if cell["count"] > 1 else mean
