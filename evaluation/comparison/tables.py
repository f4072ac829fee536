"""Views of rows of results: the cells of a question's table, as Markdown, sentences below it, and its plot."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from evaluation.config.comparing import MEASURED_AXES, Question
from evaluation.figures.charts import Curves, ScoreAxis, plot_bars, plot_depths, plot_lines
from evaluation.metrics.scoring import ONE_CLASS, LabelKind, interval_over_draws, kind_of_score, summarize_values

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
RANK = "rank"
COST_UNITS = {"pflop": "PFLOP", "device_hours": "device-hours"}
"""Entry of a cell -> its unit, for headings."""
SAME_TASK = 1e-6
"""Largest difference of a baseline's accuracies on the same masked patches."""


def kind_of_scores(scores: Iterable[Any]) -> LabelKind:
    """The kind of label whose score has one of these headings; accuracy has none."""
    return kind_of_score(next((score for score in scores if isinstance(score, str)), None))


# --- cells ---


def cells_by_encoder(frame: pd.DataFrame, question: Question | None = None) -> Cells:
    """The cells of a table.

    Args:
        question: where it plots against compute, each cell has the mean PFLOP and device-hours of its accuracies.
    """
    cells: Cells = {}
    for (encoder, column), rows in in_columns(frame).groupby(["encoder", "column"], sort=False):
        cells.setdefault(encoder, {})[column] = cell_of(rows, question)
    for encoder, rows in frame.groupby("encoder") if frame.dataset.nunique() == 1 else []:
        if encoder in cells:
            cells[encoder] |= cells_beside(rows)
    return cells


def in_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Scores, means over groups of datasets, and what diverged, with the heading of the `column` that each is in.

    It names the dataset where an evaluation has several. Baselines of masked patches are in none: no encoder made them.
    A training that diverged is in each column of its evaluation.
    """
    scores = frame[frame.kind.isin(SCORES) & ~frame.case.isin(MASKED_BASELINES)]
    diverged = frame[frame.kind == "diverged"].drop(columns="case")
    diverged = diverged.merge(scores[["evaluation", "case"]].drop_duplicates(), "left").fillna({"case": ""})
    parts = [part for part in (scores, means_of_groups(scores), diverged) if len(part)]
    scored = pd.concat(parts) if parts else scores
    is_one = scored.groupby("evaluation").dataset.transform("nunique") == 1
    words = zip(scored.dataset.mask(is_one, ""), scored.evaluation, scored.case, strict=True)
    return scored.assign(column=[" ".join(filter(None, each)) for each in words])


def means_of_groups(scores: pd.DataFrame) -> pd.DataFrame:
    """Means over the datasets of each group, as rows of a dataset: of the seeds that have a score on all of them."""
    keys = ["encoder", "encoder_seed", "seed", "evaluation", "case", "kind", "group"]
    by_seed = scores.groupby(keys, sort=False)  # without rows that are in no group
    means = by_seed.agg({"accuracy": "mean", "dataset": "nunique", "score": "first"}).reset_index()
    is_complete = means.dataset == means.group.map(scores.groupby("group").dataset.nunique())
    means = means.assign(dataset="mean " + means.group.astype(str), group=None)
    return means[is_complete].reindex(columns=scores.columns)


def cell_of(rows: pd.DataFrame, question: Question | None = None) -> Cell:
    """The numbers of an encoder's results in a column."""
    scored = rows[rows.kind.isin(SCORES)]
    cell = mean_and_spread(scored) if len(scored) else {}
    diverged = rows[rows.kind == "diverged"].encoder_seed.nunique()
    if diverged:
        cell["diverged"] = diverged
    for name in COST_UNITS if question is not None and question.x in MEASURED_AXES else ():
        costs = costs_of(scored, question, name).dropna()
        if len(costs):
            cell[name] = float(np.mean(costs.to_numpy()))
    return cell


def mean_and_spread(rows: pd.DataFrame) -> Cell:
    """Mean and standard deviation over seeds, of the encoder and of the draws.

    With the 95 % `interval` over test images and draws, where all rows have one: the mean over the encoder's seeds.
    """
    by_seed = rows.groupby(["encoder_seed", "seed"], sort=False).accuracy
    cell: Cell = summarize_values([each.to_numpy(float).mean() for _, each in by_seed])
    kind = kind_of_scores(rows.score)
    if kind is not ONE_CLASS:
        cell["score"] = kind.score_heading
    if rows.interval.notna().all():
        of_seeds = [interval_over_draws(draws.to_dict("records")) for _, draws in rows.groupby("encoder_seed")]
        cell["interval"] = np.mean(of_seeds, 0).tolist()
    return cell


def costs_of(rows: pd.DataFrame, question: Question, name: str) -> pd.Series:
    """The `pflop` or `device_hours` of training the encoder, with fine-tuning's for `total compute`; NaN: unknown."""
    training = rows[f"training_{name}"].astype(float)
    of_tuning = rows[name].where(rows.pflop.notna(), 0.0).astype(float)  # other evaluations train nothing
    return training if question.x == "compute" else training + of_tuning


def cells_beside(rows: pd.DataFrame) -> dict[str, Cell]:
    """Of an encoder: fine-tuning's accuracy on training images that it left out, the rank of the deepest features."""
    on_dev = rows[(rows.kind == "dev") & rows.depth.isna()].groupby("evaluation", sort=False)
    cells = {f"{evaluation}, dev": mean_and_spread(dev) for evaluation, dev in on_dev}
    ranks = rows[rows.kind == RANK]
    if len(ranks):
        deepest = ranks[ranks.depth == ranks.depth.max()]
        cells[RANK] = mean_and_spread(deepest.assign(accuracy=deepest[RANK]))
    return cells


# --- words ---


def table_of(cells: Cells) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table: accuracies, and next to them their compute, where that is known."""
    names = list(dict.fromkeys(name for of_encoder in cells.values() for name in of_encoder))
    names.sort(key=lambda name: name == RANK)
    columns = {name: [of_encoder.get(name, {}) for of_encoder in cells.values()] for name in names}
    titles = {name: kind_of_scores(cell.get("score") for cell in columns[name]).score_title for name in names}
    titles.pop(RANK, None)
    has_one_score = len(set(titles.values())) <= 1
    headings = [next(iter(titles.values()), ONE_CLASS.score_title) if has_one_score else "encoder"]
    lines = [list(cells)]
    for name, column in columns.items():
        headings.append(name if has_one_score or name == RANK else f"{name}: {titles[name]}")
        lines.append([text_of(cell, name) for cell in column])
        for cost, unit in COST_UNITS.items():
            if any(cost in cell for cell in column):
                headings.append(f"{name}, {unit}")
                lines.append([f"{cell[cost]:.3g}" if cost in cell else "-" for cell in column])
    return headings, [list(line) for line in zip(*lines, strict=True)]


def text_of(cell: Cell, column: str = "") -> str:
    """A cell as the table has it; a single measurement has no spread."""
    if "mean" not in cell:
        return "diverged" if cell else "-"
    if column == RANK:
        return f"{cell['mean']:.0f} ± {cell['std']:.0f}" if cell["count"] > 1 else f"{cell['mean']:.0f}"
    diverged = f" ({cell['diverged']} diverged)" if "diverged" in cell else ""
    return kind_of_scores([cell.get("score")]).text_of_scores(cell) + diverged


def remarks_on(frame: pd.DataFrame, question: Question) -> list[str]:
    """Sentences below a table: what ± is over, what is reached without an encoder, what the plot leaves out."""
    tested = frame[frame.kind.isin(SCORES)]
    sentences = []
    by_cell = tested.groupby(["encoder", "evaluation", "dataset", "case"])
    if (by_cell[["encoder_seed", "seed"]].nunique() > 1).any(axis=None):
        sentences.append("± is the standard deviation over seeds and draws.")
    reached = baselines_in_words(tested)
    if reached:
        sentences.append(f"Without an encoder: {'; '.join(reached)}.")
    masked = tested[tested.case.isin(MASKED_BASELINES)].groupby(["evaluation", "case"]).accuracy
    if (masked.max() - masked.min() > SAME_TASK).any():
        sentences.append("Accuracies of masked patches are not comparable: masks, images or colours differ.")
    if question.plot == "lines":
        left_out = [name for name in tested.encoder.unique() if name not in set(placed(tested, question).encoder)]
        if left_out:
            sentences.append(f"Not in the plot, on none of its lines or of unknown compute: {', '.join(left_out)}.")
    return sentences


def baselines_in_words(tested: pd.DataFrame) -> list[str]:
    """The scores on each dataset without looking at images, and on masked patches without an encoder."""
    words: dict[str, None] = {}
    for row in tested[tested.baselines.notna()].itertuples():
        for name, value in row.baselines.items():
            words[f"{kind_of_scores([row.score]).describe_baseline(name, value)} on {row.dataset}"] = None
    masked = tested[tested.case.isin(MASKED_BASELINES)]
    for (evaluation, case), rows in masked.groupby(["evaluation", "case"], sort=False):
        ends = dict.fromkeys(f"{100 * end:.1f}" for end in (rows.accuracy.min(), rows.accuracy.max()))
        words[f"{case} {' to '.join(ends)}% in {evaluation}"] = None
    return list(words)


# --- plots ---


def plot_question(question: Question, frame: pd.DataFrame) -> Figure | None:
    """The plot of a question, by the rows that it is about; None: there is nothing to draw yet."""
    if question.plot == "depth":
        drawn = frame[(frame.kind == "dev") & frame.depth.notna()]
        axes = axes_of(drawn, panels_of(drawn), "{} on the dev split")
        return plot_depths(curves_of(drawn, "encoder", "depth"), axes) if len(drawn) else None
    scores = frame[frame.kind.isin(SCORES)]
    if question.plot == "lines":
        drawn = placed(scores, question)
        label = MEASURED_AXES.get(question.x, question.x)
        axes = axes_of(drawn, panels_of(drawn))
        return plot_lines(curves_of(drawn, "case", "x"), label, axes) if len(drawn) else None
    drawn = in_columns(scores)
    bars: Cells = {}
    for (encoder, column), rows in drawn.groupby(["encoder", "column"], sort=False):
        bars.setdefault(encoder, {})[column] = mean_and_spread(rows)
    return plot_bars(bars, axes_of(drawn, drawn.column)) if bars else None


def placed(tested: pd.DataFrame, question: Question) -> pd.DataFrame:
    """The rows that a plot of lines draws, each with its position `x` and the name of its line as `case`.

    A line is a case or, with `lines`, one of these, which has a panel for each case; an encoder may be on several; one
    whose x is unknown is at 0, as random weights are. Of encoders at the same x of a line, each has a line of
    its own: a mean of them is no encoder's.
    """
    if question.x in MEASURED_AXES:
        places = costs_of(tested, question, "pflop")
    else:
        places = tested.encoder.map(dict(question.encoders or {})).astype(float)
    rows = tested.assign(x=places)
    if question.lines is None:
        rows = rows.dropna(subset="x")
    else:
        panels = [f"{name} {case}".strip() for name, case in zip(rows.evaluation, rows.case, strict=True)]
        rows = rows.assign(evaluation=panels).fillna({"x": 0.0})
        rows = pd.concat([rows[rows.encoder.isin(names)].assign(case=line) for line, names in question.lines.items()])
    is_shared = rows.groupby(["dataset", "evaluation", "case", "x"]).encoder.transform("nunique") > 1
    apart = [", ".join(filter(None, names)) for names in zip(rows.case, rows.encoder, strict=True)]
    return rows.assign(case=rows.case.where(~is_shared, apart))


def curves_of(rows: pd.DataFrame, line: str, x: str) -> Curves:
    """Accuracies as curves: panel -> value of the column `line` -> value of the column `x`, ascending."""
    curves: Curves = {}
    for (panel, name), of_line in rows.groupby([panels_of(rows), line], sort=False):
        points = {place: mean_and_spread(at_place) for place, at_place in of_line.groupby(x)}
        curves.setdefault(panel, {})[name] = points
    return curves


def axes_of(rows: pd.DataFrame, panels: pd.Series, words: str = "{}") -> dict[str, ScoreAxis]:
    """The axis of each panel."""
    by_panel = rows.groupby(panels, sort=False).score
    return {panel: words.format(kind_of_scores(scores).score_title) for panel, scores in by_panel}


def panels_of(rows: pd.DataFrame) -> pd.Series:
    """The evaluation that a panel shows; of several datasets with its own."""
    return rows.dataset + " " + rows.evaluation if rows.dataset.nunique() > 1 else rows.evaluation
