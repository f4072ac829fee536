"""Views of rows of results: the cells of a question's table, as Markdown, sentences below it, and its plot."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from evaluation.config.comparing import MEASURED_AXES, Question
from evaluation.figures.charts import Curves, ScoreAxis, plot_bars, plot_depths, plot_lines
from evaluation.frozen.results import score_axis
from evaluation.metrics.scoring import ONE_CLASS, LabelKind, kind_of_score, mean_interval, summarize_values

Cell = dict[str, Any]
"""Mean, standard deviation (std) and count; `interval` over test images, where it is known; pflop and
device_hours, where asked; `diverged`, the number of seeds that did, where any; `score`, its name, where it is no
accuracy."""
Cells = dict[str, dict[str, Cell]]
"""Encoder -> column -> cell.

Columns are accuracies; of a single dataset also that of fine-tuning on training images that it left out, and the rank
of the deepest features where a probe measured it.
"""
SCORES = ("test", "validation")
"""Kinds of rows whose scores a table has."""
MASKED_BASELINES = ("two nearest", "nearest", "most frequent")
"""Cases of masked patches that no encoder made."""
RANK_COLUMN = "rank"
COST_UNITS = {"pflop": "PFLOP", "device_hours": "device-hours"}
"""Entry of a cell -> its unit, for headings."""
SAME_TASK = 1e-6
"""Largest difference of a baseline's accuracies on the same masked patches."""


def groups_of(frame: pd.DataFrame, *keys: str) -> Iterator[tuple[tuple, pd.DataFrame]]:
    """The rows by their values of these columns, in order."""
    return iter(frame.groupby(list(keys), sort=False, dropna=False))


def kind_of_scores(scores: Iterable[Any]) -> LabelKind:
    """The kind of label whose score has one of these headings; accuracy has none."""
    return kind_of_score(next((score for score in scores if isinstance(score, str)), None))


# --- cells ---


def cells_by_encoder(
    frame: pd.DataFrame, question: Question | None = None, groups: Mapping[str, set[str]] | None = None
) -> Cells:
    """The cells of a table.

    Args:
        question: where it plots against compute, each cell has the mean PFLOP and device-hours of its accuracies.
        groups: the datasets of each group; a mean over a group is one over all of them.
    """
    scored = with_columns(frame)
    cells: Cells = {encoder: {} for encoder in scored.encoder.unique()}
    for (column, group), of_column in groups_of(scored, "column", "mean_over"):
        datasets = set(of_column.dataset[of_column.kind.isin(SCORES)]) | (groups or {}).get(group, set())
        for encoder, of_encoder in of_column.groupby("encoder", sort=False):
            cell = cell_of(of_encoder, datasets if isinstance(group, str) else None, question)
            if cell:
                cells[encoder][column] = cell
    if frame.dataset.nunique() == 1:
        for encoder, of_encoder in frame[frame.encoder.isin(cells)].groupby("encoder", sort=False):
            cells[encoder] |= cells_on_dev(of_encoder)
    return cells


def with_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Scores and what diverged, with the `column` that each is in; those of groups of datasets also in their mean's.

    A column names its dataset where the evaluation has several. Baselines of masked patches are in none: no encoder
    made them. What diverged is in each column of its evaluation.
    """
    scores = frame[frame.kind.isin(SCORES) & ~frame.case.isin(MASKED_BASELINES)]
    diverged = frame[frame.kind == "diverged"].drop(columns="case")
    diverged = diverged.merge(scores[["evaluation", "case"]].drop_duplicates(), "left").fillna({"case": ""})
    scored = pd.concat([scores, diverged]) if len(diverged) else scores
    has_several = scored.groupby("evaluation").dataset.transform("nunique") > 1
    places = scored.dataset.where(has_several, "")
    means = scored[scored.group.notna()]
    columns = [
        scored.assign(column=headings(places, scored), mean_over=None),
        means.assign(column=headings("mean " + means.group.astype(str), means), mean_over=means.group),
    ]
    return pd.concat(columns) if len(means) else columns[0]


def headings(places: pd.Series, rows: pd.DataFrame) -> list[str]:
    """Place, evaluation and case of each row."""
    words = zip(places, rows.evaluation, rows.case, strict=True)
    return [" ".join(filter(None, each)) for each in words]


def cell_of(rows: pd.DataFrame, datasets: set[str] | None = None, question: Question | None = None) -> Cell:
    """The numbers of an encoder's results in a column; empty: there are none.

    Args:
        datasets: those of a mean over several: only seeds that have all count.
    """
    scored = rows[rows.kind.isin(SCORES)]
    if datasets:
        found = scored.groupby(["encoder_seed", "seed"]).dataset.transform(lambda each: set(each) == datasets)
        scored = scored[found.astype(bool)]
    cell = mean_and_spread(scored) if len(scored) else {}
    diverged = rows[rows.kind == "diverged"].encoder_seed.nunique()
    if diverged:
        cell["diverged"] = diverged
    if question is not None and question.x in MEASURED_AXES:
        for name in COST_UNITS:
            costs = costs_of(scored, question, name).dropna()
            if len(costs):
                cell[name] = float(np.mean(costs.to_numpy(float)))
    return cell


def mean_and_spread(rows: pd.DataFrame, key: str = "accuracy") -> Cell:
    """Mean and standard deviation over seeds, of the encoder and of the draws; over datasets, the mean is taken.

    Of one dataset with the 95 % `interval` over its test images, where all rows have one.
    """
    by_seed = rows.groupby(["encoder_seed", "seed"], sort=False, dropna=False)[key]
    cell: Cell = summarize_values([each.to_numpy(float).mean() for _, each in by_seed])
    kind = kind_of_scores(rows.score)
    if key == "accuracy" and kind is not ONE_CLASS:
        cell["score"] = kind.score_heading
    if rows.dataset.nunique() == 1 and rows.interval.notna().all():
        cell["interval"] = mean_interval([{"interval": each} for each in rows.interval])
    return cell


def costs_of(rows: pd.DataFrame, question: Question, name: str) -> pd.Series:
    """The `pflop` or `device_hours` of training the encoder, with fine-tuning's for `total compute`; NaN: unknown."""
    training = rows[f"training_{name}"].astype(float)
    if question.x == "compute":
        return training
    return training + rows[name].where(rows.pflop.notna(), 0.0).astype(float)  # other evaluations train nothing


def cells_on_dev(rows: pd.DataFrame) -> dict[str, Cell]:
    """Of an encoder: fine-tuning's accuracy on training images that it left out, the rank of the deepest features."""
    cells = {}
    on_dev = rows[(rows.kind == "dev") & rows.depth.isna()]
    for evaluation, dev in on_dev.groupby("evaluation", sort=False):
        test = rows[(rows.kind == "test") & (rows.evaluation == evaluation)]
        if set(dev.encoder_seed) == set(test.encoder_seed):
            cells[f"{evaluation}, dev"] = mean_and_spread(dev)
    ranks = rows[rows.kind == "rank"]
    if len(ranks):
        cells[RANK_COLUMN] = mean_and_spread(ranks[ranks.depth == ranks.depth.max()], "rank")
    return cells


# --- Markdown ---


def table_of(cells: Cells) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table: accuracies, and next to them their compute, where that is known."""
    names = list(dict.fromkeys(name for of_encoder in cells.values() for name in of_encoder))
    names.sort(key=lambda name: name == RANK_COLUMN)
    columns = {name: [of_encoder.get(name, {}) for of_encoder in cells.values()] for name in names}
    kinds = {name: kind_of_scores(cell.get("score") for cell in columns[name]) for name in names if name != RANK_COLUMN}
    titles = {kind.score_title: None for kind in kinds.values()}
    has_one_score = len(titles) <= 1
    heads = [next(iter(titles), ONE_CLASS.score_title) if has_one_score else "encoder"]
    body = [[encoder] for encoder in cells]
    for name, column in columns.items():
        heads.append(name if has_one_score or name == RANK_COLUMN else with_title(name, kinds[name].score_title))
        texts = [[text_of(cell, name) for cell in column]]
        for cost, unit in COST_UNITS.items():
            if any(cost in cell for cell in column):
                heads.append(f"{name}, {unit}")
                texts.append([f"{cell[cost]:.3g}" if cost in cell else "-" for cell in column])
        for line, *added in zip(body, *texts, strict=True):
            line += added
    return heads, body


def with_title(name: str, title: str) -> str:
    """The name of a column with its score and unit, which a case may end in: "linear mAP, macro (%)"."""
    return f"{name.removesuffix(title.removesuffix(' (%)')).rstrip()}: {title}"


def text_of(cell: Cell, column: str = "") -> str:
    """A cell as the table has it; a single measurement has no spread."""
    if not cell or "mean" not in cell:
        return "diverged" if cell else "-"
    if column == RANK_COLUMN:
        return f"{cell['mean']:.0f} ± {cell['std']:.0f}" if cell["count"] > 1 else f"{cell['mean']:.0f}"
    diverged = f" ({cell['diverged']} diverged)" if "diverged" in cell else ""
    return kind_of_scores([cell.get("score")]).text_of_scores(cell) + diverged


# --- sentences ---


def remarks_on(frame: pd.DataFrame, question: Question) -> list[str]:
    """Sentences below a table: what ± is over, baselines that are of no encoder, what is left out."""
    tested = frame[frame.kind.isin(SCORES)]
    sentences = [*describe_spread(tested), *describe_baselines(tested)]
    if question.plot == "lines":
        drawn = tested[places_of(tested, question).notna()] if question.lines is None else on_lines(tested, question)
        left_out = [name for name in tested.encoder.unique() if name not in set(drawn.encoder)]
        reason = "their compute is unknown" if question.lines is None else "they are on none of its lines"
        if left_out:
            sentences.append(f"Not in the plot, since {reason}: {', '.join(left_out)}.")
    return sentences


def describe_spread(tested: pd.DataFrame) -> list[str]:
    """A sentence on what ± is over, where an encoder has several results: seeds, draws, or both together."""
    has_seeds = (tested.groupby("encoder").encoder_seed.nunique() > 1).any()
    draws = tested.groupby(["evaluation", "encoder", "encoder_seed"], sort=False).seed.nunique()
    drawn = dict.fromkeys(draws[draws > 1].index.get_level_values("evaluation"))
    over = ["over seeds"] if has_seeds else []
    if drawn:
        over.append(f"over {'seeds and draws' if has_seeds else 'draws'} in {', '.join(drawn)}")
    return [f"± is the standard deviation {', '.join(over)}."] if over else []


def describe_baselines(tested: pd.DataFrame) -> list[str]:
    """Sentences on what is reached without an encoder, on each dataset, and on each evaluation's masked patches."""
    sentences = []
    for dataset, of_dataset in tested.groupby("dataset", sort=False):
        reached = baselines_in_words(of_dataset[~of_dataset.case.isin(MASKED_BASELINES)])
        if reached:
            sentences.append(f"Baselines on {dataset}, which use no image: {reached}.")
    for evaluation, of_evaluation in tested[tested.case.isin(MASKED_BASELINES)].groupby("evaluation", sort=False):
        reached = baselines_in_words(of_evaluation)
        sentences.append(f"Baselines of {evaluation}, which need no encoder: {reached}.")
        accuracies = of_evaluation.groupby("case").accuracy
        if (accuracies.max() - accuracies.min() > SAME_TASK).any():
            sentences.append(
                f"Accuracies of {evaluation} are not comparable: masks, images or colours differ between these "
                "encoders, so the same prediction scores differently."
            )
    return sentences


def baselines_in_words(rows: pd.DataFrame) -> str:
    """Each baseline's score: `largest class 25.3%`; of masked patches from the lowest to the highest."""
    words: dict[str, None] = {}
    for score, given in zip(rows.score, rows.baselines, strict=True):
        for name, value in given.items() if isinstance(given, dict) else ():
            words[kind_of_scores([score]).describe_baseline(name, value)] = None
    for case, of_case in rows[rows.case.isin(MASKED_BASELINES)].groupby("case", sort=False):
        ends = dict.fromkeys(f"{100 * end:.1f}" for end in (of_case.accuracy.min(), of_case.accuracy.max()))
        words[f"{case} {' to '.join(ends)}%"] = None
    return ", ".join(words)


# --- plots ---


def plot_question(question: Question, frame: pd.DataFrame, cells: Cells) -> Figure | None:
    """The plot of a question; None: there is nothing to draw yet.

    Args:
        frame: the rows that it is about.
        cells: those of its table.
    """
    if question.plot == "depth":
        by_depth = frame[(frame.kind == "dev") & frame.depth.notna()]
        axes = axes_of(by_depth, "{} on the dev split")
        return plot_depths(curves_of(by_depth, "encoder", "depth"), axes) if len(by_depth) else None
    if question.plot == "lines":
        return plot_against_x(question, frame[frame.kind.isin(SCORES)])
    columns = list(dict.fromkeys(with_columns(frame).column))
    bars = {encoder: {name: of[name] for name in columns if name in of} for encoder, of in cells.items()}
    axes = {}
    for name in columns:
        axes[name] = score_axis(kind_of_scores(of[name].get("score") for of in bars.values() if name in of))
    return plot_bars(bars, axes) if bars else None


def places_of(rows: pd.DataFrame, question: Question) -> pd.Series:
    """Position of each row's accuracy on the question's x-axis; NaN: unknown."""
    if question.x in MEASURED_AXES:
        return costs_of(rows, question, "pflop")
    return rows.encoder.map(dict(question.encoders or {})).astype(float)


def plot_against_x(question: Question, tested: pd.DataFrame) -> Figure | None:
    """Accuracies against the question's x: a line for each case, or for each of its `lines` with a panel for each case.

    With `lines`, encoders whose x is unknown are at 0, as random weights are. Of encoders at the same x of a line, each
    has a line of its own: a mean of them is no encoder's.
    """
    drawn = tested.assign(x=places_of(tested, question))
    drawn = drawn.dropna(subset="x") if question.lines is None else on_lines(drawn.fillna({"x": 0.0}), question)
    if not len(drawn):
        return None
    is_shared = drawn.groupby(["dataset", "evaluation", "case", "x"]).encoder.transform("nunique") > 1
    apart = [", ".join(filter(None, names)) for names in zip(drawn.case, drawn.encoder, strict=True)]
    drawn = drawn.assign(case=drawn.case.where(~is_shared, apart))
    return plot_lines(curves_of(drawn, "case", "x"), MEASURED_AXES.get(question.x, question.x), axes_of(drawn))


def on_lines(rows: pd.DataFrame, question: Question) -> pd.DataFrame:
    """The rows of each line, with the line's name as case, and their own case in the evaluation's name.

    An encoder may be on several lines.
    """
    evaluations = [f"{name} {case}".strip() for name, case in zip(rows.evaluation, rows.case, strict=True)]
    rows = rows.assign(evaluation=evaluations)
    return pd.concat([rows[rows.encoder.isin(names)].assign(case=line) for line, names in question.lines.items()])


def curves_of(rows: pd.DataFrame, line: str, x: str) -> Curves:
    """Accuracies as curves: panel -> value of the column `line` -> value of the column `x`, ascending."""
    curves: Curves = {}
    for (panel, name), of_line in groups_of(rows.assign(panel=panels_of(rows)), "panel", line):
        points = {place: mean_and_spread(at_place) for place, at_place in of_line.groupby(x)}
        curves.setdefault(panel, {})[name] = points
    return curves


def axes_of(rows: pd.DataFrame, words: str = "{}") -> dict[str, ScoreAxis]:
    """The axis of each panel of curves."""
    by_panel = rows.groupby(panels_of(rows), sort=False).score
    return {panel: score_axis(kind_of_scores(scores), words) for panel, scores in by_panel}


def panels_of(rows: pd.DataFrame) -> pd.Series:
    """The evaluation that a panel shows; of several datasets with its own."""
    return rows.dataset + " " + rows.evaluation if rows.dataset.nunique() > 1 else rows.evaluation
