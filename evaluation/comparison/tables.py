"""Tables of a comparison's results: means and spreads by encoder and column, as Markdown, and sentences on them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from evaluation.comparison.entries import MEASURED_AXES, Question
from evaluation.comparison.reports import ResultRow, kind_of_scores, name_of_score
from evaluation.metrics.scoring import ONE_CLASS, mean_interval
from evaluation.metrics.summaries import summarize_values

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
MASKED_BASELINES = ("two nearest", "nearest", "most frequent")
"""Cases of masked patches that no encoder made."""
SAME_TASK = 1e-6
"""Largest difference of a baseline's accuracies on the same masked patches."""


class TableColumn(NamedTuple):
    """A column of accuracies: those on a dataset, or their mean over a group of datasets."""

    heading: str
    group: str | None
    """The group; None: the column is about one dataset."""
    rows: list[ResultRow]


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


def numbers_of(rows: list[ResultRow], question: Question | None = None, groups: Groups | None = None) -> CellsByEncoder:
    """The numbers of a table.

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
    cell = spread(rows) if rows else {}
    if diverged:
        cell["diverged"] = count_seeds(diverged)
    if question is not None and question.x in MEASURED_AXES:
        for name in COST_UNITS:
            costs = [cost_of(row, question, name) for row in rows]
            known = [cost for cost in costs if cost is not None]
            if known:
                cell[name] = float(np.mean(known))
    return cell


def spread(rows: Iterable[ResultRow], key: str = "accuracy") -> Cell:
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
            numbers[encoder][f"{evaluation}, dev"] = spread(dev)


def add_ranks(numbers: CellsByEncoder, rows: list[ResultRow]) -> None:
    """Add a column of the effective rank of the deepest features."""
    for (encoder,), ranks in grouped(of_kind(rows, "rank"), "encoder").items():
        deepest = max(row["depth"] for row in ranks)
        numbers[encoder][RANK_COLUMN] = spread([row for row in ranks if row["depth"] == deepest], "rank")


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


def describe_spread(rows: list[ResultRow]) -> list[str]:
    """A sentence on what ± is over, where an encoder has several results: seeds, draws, or both together."""
    tested = of_kind(rows, "test")
    has_seeds = any(count_seeds(same) > 1 for same in grouped(tested, "encoder").values())
    drawn = []
    for (evaluation, *_), same in grouped(tested, "evaluation", "encoder", "encoder_seed").items():
        if len(unique(same, "seed")) > 1:
            drawn.append(evaluation)
    names = ", ".join(dict.fromkeys(drawn))
    over = ["over seeds"] if has_seeds else []
    if drawn:
        over.append(f"over {'seeds and draws' if has_seeds else 'draws'} in {names}")
    return [f"± is the standard deviation {', '.join(over)}."] if over else []


def describe_label_baselines(rows: list[ResultRow]) -> list[str]:
    """A sentence for each dataset whose rows have baselines: published rows of earlier versions have none."""
    sentences = []
    for (dataset,), of_dataset in grouped(of_kind(rows, "test"), "dataset").items():
        reached = ", ".join(label_baselines(of_dataset))
        if reached:
            sentences.append(f"Baselines on {dataset}, which use no image: {reached}.")
    return sentences


def label_baselines(rows: list[ResultRow]) -> list[str]:
    """The score of each baseline of the rows, in words: `largest class 25.3%`."""
    described = []
    for row in rows:
        kind = kind_of_scores([row])
        described += [kind.describe_baseline(name, value) for name, value in row.get("baselines", {}).items()]
    return list(dict.fromkeys(described))


def describe_masked_baselines(rows: list[ResultRow]) -> list[str]:
    """A sentence for each evaluation of masked patches: the accuracies of its baselines, over all encoders' masks."""
    baselines = [row for row in of_kind(rows, "test") if row["case"] in MASKED_BASELINES]
    sentences = []
    for (evaluation,), of_evaluation in grouped(baselines, "evaluation").items():
        reached = ", ".join(masked_baselines(of_evaluation))
        sentences.append(f"Baselines of {evaluation}, which need no encoder: {reached}.")
    return sentences


def describe_other_tasks(rows: list[ResultRow]) -> list[str]:
    """A sentence for each evaluation of masked patches whose encoders have different ones: its baselines differ."""
    sentences = []
    for (evaluation,), of_evaluation in grouped(of_kind(rows, "test"), "evaluation").items():
        by_case = grouped([row for row in of_evaluation if row["case"] in MASKED_BASELINES], "case")
        accuracies = [[row["accuracy"] for row in of_case] for of_case in by_case.values()]
        if any(max(of_case) - min(of_case) > SAME_TASK for of_case in accuracies):
            reached = ", ".join(masked_baselines(of_evaluation))
            sentences.append(
                f"Accuracies of {evaluation} are not comparable: masks, images or colours differ between these "
                f"encoders, so the same prediction scores differently ({reached})."
            )
    return sentences


def masked_baselines(rows: list[ResultRow]) -> list[str]:
    """The accuracy of each baseline of masked patches among the rows, in words."""
    baselines = [row for row in rows if row["case"] in MASKED_BASELINES]
    return [f"{case} {share_range(of_case)}" for (case,), of_case in grouped(baselines, "case").items()]


def share_range(rows: list[ResultRow]) -> str:
    """The accuracies in percent, from the lowest to the highest."""
    accuracies = [row["accuracy"] for row in rows]
    low = f"{100 * min(accuracies):.1f}"
    high = f"{100 * max(accuracies):.1f}"
    return f"{low}%" if low == high else f"{low} to {high}%"


def describe_not_plotted(rows: list[ResultRow], question: Question) -> list[str]:
    """A sentence on the encoders of the table that a plot of lines leaves out: without compute, or on none of them."""
    if question.plot != "lines":
        return []
    tested = of_kind(rows, "test")
    if question.lines is None:
        drawn = {row["encoder"] for row in tested if x_of(row, question) is not None}
        reason = "their compute is unknown"
    else:
        drawn = {encoder for encoders in question.lines.values() for encoder in encoders}
        reason = "they are on none of its lines"
    left_out = [encoder for encoder in unique(tested, "encoder") if encoder not in drawn]
    return [f"Not in the plot, since {reason}: {', '.join(left_out)}."] if left_out else []


def describe_uncounted(rows: list[ResultRow], question: Question) -> list[str]:
    """A sentence on the published models whose training no compute has, where the question plots against compute."""
    began = {row["encoder"]: row["training_without"] for row in rows if row.get("training_without")}
    if question.x not in MEASURED_AXES or not began:
        return []
    named = "; ".join(f"{encoder} ({', '.join(models)})" for encoder, models in began.items())
    return [f"Compute is without that of the published models that an encoder builds on: {named}."]
