"""The plot of a comparison's question."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from evaluation.comparison.entries import MEASURED_AXES, Question
from evaluation.comparison.reports import ResultRow, kind_of_scores
from evaluation.comparison.rows import grouped, of_kind, unique
from evaluation.comparison.tables import CellsByEncoder, columns_of, diverged_cases, mean_and_spread, x_of
from evaluation.figures.charts import Curves, ScoreAxis, plot_bars, plot_depths, plot_lines
from evaluation.frozen.results import score_axis


def plot_question(question: Question, rows: list[ResultRow], numbers: CellsByEncoder) -> Figure | None:
    """The plot of a question; None: there is nothing to draw yet.

    Args:
        rows: the results that it is about.
        numbers: those of its table.
    """
    tested = of_kind(rows, "test")
    if question.plot == "depth":
        by_depth = [row for row in of_kind(rows, "dev") if "depth" in row]
        score_axes = score_axes_of(by_depth, "{} on the dev split")
        return plot_depths(curves_of(by_depth, "encoder", "depth"), score_axes) if by_depth else None
    if question.plot == "lines":
        return plot_against_x(question, tested)
    headings = [column.heading for column in columns_of([*tested, *diverged_cases(rows)])]
    bars = {}
    for encoder, cells in numbers.items():
        bars[encoder] = {heading: cells[heading] for heading in headings if heading in cells}
    score_axes = {}
    for heading in headings:
        score_axes[heading] = score_axis(kind_of_scores(cells[heading] for cells in bars.values() if heading in cells))
    return plot_bars(bars, score_axes) if bars else None


def score_axes_of(rows: list[ResultRow], words: str = "{}") -> dict[str, ScoreAxis]:
    """The axis of each panel of curves: see `curves_of`."""
    score_axes = {}
    for (dataset, evaluation), of_panel in grouped(rows, "dataset", "evaluation").items():
        score_axes[panel_name(rows, dataset, evaluation)] = score_axis(kind_of_scores(of_panel), words)
    return score_axes


def plot_against_x(question: Question, tested: list[ResultRow]) -> Figure | None:
    """Accuracies against the question's x: a line for each case, or for each of its `lines` with a panel for each case.

    With `lines`, encoders whose x is unknown are at 0, as random weights are.
    """
    drawn = [row | {"x": x_of(row, question)} for row in tested]
    if question.lines is None:
        drawn = [row for row in drawn if row["x"] is not None]
    else:
        drawn = [row | {"x": row["x"] or 0} for row in on_lines(drawn, question.lines)]
    if not drawn:
        return None
    drawn = apart_at_one_place(drawn)
    return plot_lines(curves_of(drawn, "case", "x"), MEASURED_AXES.get(question.x, question.x), score_axes_of(drawn))


def on_lines(rows: list[ResultRow], lines: Mapping[str, Sequence[str]]) -> list[ResultRow]:
    """The rows of each line, with the line's name as case, and their own case in the evaluation's name.

    An encoder may be on several lines.
    """
    named = []
    for line, encoders in lines.items():
        for row in rows:
            if row["encoder"] in encoders:
                evaluation = f"{row['evaluation']} {row['case']}".strip()
                named.append(row | {"case": line, "evaluation": evaluation})
    return named


def apart_at_one_place(rows: list[ResultRow]) -> list[ResultRow]:
    """The rows; of encoders at the same x of a line, each has a line of its own: a mean of them is no encoder's."""
    apart = []
    for at_place in grouped(rows, "dataset", "evaluation", "case", "x").values():
        is_shared = len(unique(at_place, "encoder")) > 1
        for row in at_place:
            name = ", ".join(filter(None, [row["case"], row["encoder"]]))
            apart.append(row | {"case": name} if is_shared else row)
    return apart


def curves_of(rows: list[ResultRow], line: str, x: str) -> Curves:
    """Accuracies as curves: evaluation (of a dataset) -> value of the key `line` -> value of the key `x`, ascending."""
    curves: Curves = {}
    for (dataset, evaluation, name), of_line in grouped(rows, "dataset", "evaluation", line).items():
        panel = panel_name(rows, dataset, evaluation)
        points = sorted(grouped(of_line, x).items())
        curves.setdefault(panel, {})[name] = {place: mean_and_spread(at_place) for (place,), at_place in points}
    return curves


def panel_name(rows: list[ResultRow], dataset: str, evaluation: str) -> str:
    """The evaluation that a panel shows; of several datasets with its own."""
    return f"{dataset} {evaluation}" if len(unique(rows, "dataset")) > 1 else evaluation
