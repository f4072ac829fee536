"""Views of rows of results: the cells of a table, as Markdown, sentences below it, and plots; the files of these.

A table has a row for each encoder, and a column for each evaluation, case and, where these are several, dataset.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from evaluation.comparison.differences import difference_table, differences_from_best
from evaluation.comparison.rows import (
    MASKED_BASELINES,
    SCORED_KINDS,
    Row,
    frame_of,
    in_columns,
    kind_of_scores,
    rows_asked,
    write_scores,
)
from evaluation.config.comparing import MEASURED_AXES, Question
from evaluation.figures.charts import Curves, ScoreAxis, Statistics, markdown_table, plot_bars, plot_lines, save_figure
from evaluation.frozen.results import write_json
from evaluation.metrics.scoring import ONE_CLASS, interval_over_draws, summarize_values
from evaluation.pages.page import recorded_versions
from mpp.runtime.files import write_complete

Cell = dict[str, Any]
"""Mean, standard deviation (std) and count; `interval` over test images, where it is known; pflop and
device_hours, where asked; `diverged`, the number of seeds that did, where any; `score`, its name, where it is no
accuracy."""
Cells = dict[str, dict[str, Cell]]
"""Encoder -> column -> cell.

Columns are accuracies; of a single dataset also those on training images that fine-tuning or a probe left out, and the
rank of the deepest features where a probe measured it.
"""
RANK = "rank"
COST_UNITS = {"pflop": "PFLOP", "device_hours": "device-hours"}
"""Entry of a cell -> its unit, for headings."""
DIFFERENCES = "Differences from the best, with 95% intervals that hold for all of the table at once:"
PLOT_ENDINGS = (".png", ".pdf")
"""Of plots for screens and for papers."""
SAME_TASK = 1e-6
"""Largest difference of a baseline's accuracies on the same masked patches."""


# --- files ---


def write_comparison(
    folder: Path, questions: Sequence[Question], rows: list[Row], about: dict[str, Any], sentences: Sequence[str]
) -> dict[str, Any]:
    """Write results.json, the scores of images, table.md, table.csv and the plots, and print the tables.

    Args:
        rows: all results: table.csv has a line for each.
        about: further entries of results.json.
        sentences: below the tables.
    Returns:
        What results.json has: `results`, the rows, `summary`: question -> encoder -> column -> numbers, and `about`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frame = frame_of(rows)
    summary: dict[str, Cells] = {}
    texts: list[str] = []
    for question in questions:
        asked = rows_asked(frame, question)
        cells = summary[question.name] = cells_by_encoder(asked, question.x)
        texts.append(f"### {question.title or question.name}")
        if not cells:
            texts.append("no results yet")
        elif question.plot != "depth":  # of the dev split
            texts += [markdown_table(*table_of(cells)), *remarks_on(asked, question)]
            found = differences_from_best(asked)
            texts += [DIFFERENCES, markdown_table(*difference_table(found))] if found else []
        plot = plot_question(question, asked)
        for ending in PLOT_ENDINGS if plot is not None else ():
            save_figure(plot, folder / f"{question.name}{ending}")
    write_scores(folder, rows)
    rows = [{key: value for key, value in row.items() if key != "scores"} for row in rows]
    results = {"summary": summary, "results": rows, "versions": recorded_versions()} | about
    write_json(folder / "results.json", results)
    text = "\n\n".join([*texts, *sentences])
    write_complete(folder / "table.md", f"{text}\n")
    write_complete(folder / "table.csv", frame.drop(columns=["figures", "scores"]).to_csv(index=False))
    print(f"\n{text}\nwrote {folder}: results.json, table.md, table.csv, plots; see reports/")
    return results


# --- cells ---


def cells_by_encoder(frame: pd.DataFrame, x: str = "") -> Cells:
    """The cells of a table.

    Args:
        x: of a question; where it is compute, each cell has the mean PFLOP and device-hours of its accuracies.
    """
    cells: Cells = {}
    for (encoder, column), rows in in_columns(frame).groupby(["encoder", "column"], sort=False):
        cells.setdefault(encoder, {})[column] = cell_of(rows, x)
    for encoder, rows in frame.groupby("encoder") if frame.dataset.nunique() == 1 else []:
        if encoder in cells:
            cells[encoder] |= cells_beside(rows)
    return cells


def cell_of(rows: pd.DataFrame, x: str) -> Cell:
    """The numbers of an encoder's results in a column."""
    scored = rows[rows.kind.isin(SCORED_KINDS)]
    cell = mean_and_spread(scored) if len(scored) else {}
    diverged = rows[rows.kind == "diverged"].encoder_seed.nunique()
    if diverged:
        cell["diverged"] = diverged
    for name in COST_UNITS if x in MEASURED_AXES else ():
        costs = costs_of(scored, x, name).dropna()
        if len(costs):
            cell[name] = float(np.mean(costs.to_numpy()))
    return cell


def mean_and_spread(rows: pd.DataFrame) -> Cell:
    """Mean and standard deviation over seeds, of the encoder and of the draws.

    With the 95 % `interval` over test images and draws, where all rows have one: the mean over the encoder's seeds.
    """
    cell: Cell = summarize_values(values_of_seeds(rows))
    kind = kind_of_scores(rows.score)
    if kind is not ONE_CLASS:
        cell["score"] = kind.score_heading
    if rows.interval.notna().all():
        of_seeds = [interval_over_draws(draws.to_dict("records")) for _, draws in rows.groupby("encoder_seed")]
        cell["interval"] = np.mean(of_seeds, 0).tolist()
    return cell


def values_of_seeds(rows: pd.DataFrame) -> list[float]:
    """The mean of each seed of the encoder and draw."""
    by_seed = rows.groupby(["encoder_seed", "seed"], sort=False).accuracy
    return [float(each.to_numpy(float).mean()) for _, each in by_seed]


def costs_of(rows: pd.DataFrame, x: str, name: str) -> pd.Series:
    """The `pflop` or `device_hours` of training the encoder, with fine-tuning's for `total compute`; NaN: unknown."""
    training = rows[f"training_{name}"].astype(float)
    of_tuning = rows[name].where(rows.pflop.notna(), 0.0).astype(float)  # other evaluations train nothing
    return training if x == "compute" else training + of_tuning


def cells_beside(rows: pd.DataFrame) -> dict[str, Cell]:
    """Of an encoder: accuracies on training images left out to choose by, the rank of the deepest features."""
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
    names = sorted(dict.fromkeys(name for of_encoder in cells.values() for name in of_encoder), key=RANK.__eq__)
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
        return f"{cell['mean']:.0f}" + (f" ± {cell['std']:.0f}" if cell["count"] > 1 else "")
    diverged = f" ({cell['diverged']} diverged)" if "diverged" in cell else ""
    return kind_of_scores([cell.get("score")]).text_of_scores(cell) + diverged


def remarks_on(frame: pd.DataFrame, question: Question) -> list[str]:
    """Sentences below a table: what ± is over, what is reached without an encoder, what the plot leaves out."""
    tested = frame[frame.kind.isin(SCORED_KINDS)]
    sentences = []
    by_cell = tested.groupby(["encoder", "evaluation", "dataset", "case"])
    if (by_cell[["encoder_seed", "seed"]].nunique() > 1).any(axis=None):
        sentences.append("± is the standard deviation over seeds and draws.")
    reached: dict[str, None] = {}
    for row in tested[tested.baselines.notna()].itertuples():
        for name, value in row.baselines.items():
            reached[f"{kind_of_scores([row.score]).describe_baseline(name, value)} on {row.dataset}"] = None
    masked = tested[tested.case.isin(MASKED_BASELINES)].groupby(["evaluation", "case"], sort=False).accuracy
    for (evaluation, case), ends in masked.agg(["min", "max"]).iterrows():
        words = " to ".join(dict.fromkeys(f"{100 * end:.1f}" for end in ends))
        reached[f"{case} {words}% in {evaluation}"] = None
    if reached:
        sentences.append(f"Without an encoder: {'; '.join(reached)}.")
    if (masked.max() - masked.min() > SAME_TASK).any():
        sentences.append("Accuracies of masked patches are not comparable: masks, images or colours differ.")
    if question.plot == "lines":
        left_out = [name for name in tested.encoder.unique() if name not in set(placed(tested, question).encoder)]
        if left_out:
            sentences.append(f"Not in the plot, on none of its lines or of unknown compute: {', '.join(left_out)}.")
    return sentences


# --- plots ---


def plot_question(question: Question, frame: pd.DataFrame) -> Figure | None:
    """The plot of a question, by the rows that it is about; None: there is nothing to draw yet."""
    scores = frame[frame.kind.isin(SCORED_KINDS)]
    if question.plot == "bars":
        rows = in_columns(scores)
        bars: Cells = {}
        for (encoder, column), of_cell in rows.groupby(["encoder", "column"], sort=False):
            bars.setdefault(encoder, {})[column] = drawn_score(of_cell)
        return plot_bars(bars, axes_of(rows)) if bars else None
    is_log = question.plot == "lines"
    if is_log:
        drawn, label, words = placed(scores, question), MEASURED_AXES.get(question.x, question.x), "{}"
    else:
        of_depths = frame[(frame.kind == "dev") & frame.depth.notna()]
        drawn = of_depths.assign(x=of_depths.depth, case=of_depths.encoder)
        label, words = "depth (blocks)", "{} on the dev split"
    of_several = drawn.dataset.nunique() > 1
    drawn = drawn.assign(column=drawn.dataset + " " + drawn.evaluation if of_several else drawn.evaluation)
    return plot_lines(curves_of(drawn), label, axes_of(drawn, words), is_log) if len(drawn) else None


def placed(tested: pd.DataFrame, question: Question) -> pd.DataFrame:
    """The rows that a plot of lines draws, each with its position `x` and the name of its line as `case`.

    A line is a case or, with `lines`, one of these, which has a panel for each case; an encoder may be on several; one
    whose x is unknown is at 0, as random weights are. Of encoders at the same x of a line, each has a line of
    its own: a mean of them is no encoder's.
    """
    if question.x in MEASURED_AXES:
        places = costs_of(tested, question.x, "pflop")
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


def drawn_score(rows: pd.DataFrame) -> Statistics:
    """The mean, interval and values of a bar or a point."""
    return mean_and_spread(rows) | {"values": values_of_seeds(rows)}


def curves_of(rows: pd.DataFrame) -> Curves:
    """Accuracies as curves: column, which is a panel -> case, which is a line -> x, ascending."""
    curves: Curves = {}
    for (panel, name), line in rows.groupby(["column", "case"], sort=False):
        curves.setdefault(panel, {})[name] = {x: drawn_score(at_x) for x, at_x in line.groupby("x")}
    return curves


def axes_of(rows: pd.DataFrame, words: str = "{}") -> dict[str, ScoreAxis]:
    """The axis of each column."""
    by_column = rows.groupby("column").score
    return {name: words.format(kind_of_scores(scores).score_title) for name, scores in by_column}
