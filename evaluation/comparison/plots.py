"""The plot of a comparison's question."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from evaluation.comparison.entries import MEASURED_AXES, Question
from evaluation.comparison.reports import ResultRow
from evaluation.comparison.tables import (
    CellsByEncoder,
    columns_of,
    diverged_cases,
    grouped,
    of_kind,
    spread,
    unique,
    x_of,
)
from evaluation.figures.charts import Curves, plot_bars, plot_depths, plot_lines


def plot_question(question: Question, rows: list[ResultRow], numbers: CellsByEncoder) -> Figure | None:
    """The plot of a question; None: there is nothing to draw yet.

    Args:
        rows: the results that it is about.
        numbers: those of its table.
    """
    tested = of_kind(rows, "test")
    if question.plot == "depth":
        by_depth = [row for row in of_kind(rows, "dev") if "depth" in row]
        return plot_depths(curves_of(by_depth, "encoder", "depth")) if by_depth else None
    if question.plot == "lines":
        return plot_against_x(question, tested)
    headings = [column.heading for column in columns_of([*tested, *diverged_cases(rows)])]
    bars = {}
    for encoder, cells in numbers.items():
        bars[encoder] = {heading: cells[heading] for heading in headings if heading in cells}
    return plot_bars(bars) if bars else None


def plot_against_x(question: Question, tested: list[ResultRow]) -> Figure | None:
    """Accuracies against the question's x: a line for each case, or for each of its `lines`."""
    drawn = [row | {"x": x_of(row, question)} for row in tested]
    drawn = [row for row in drawn if row["x"] is not None]
    if question.lines is not None:
        drawn = on_lines(drawn, question.lines)
    if not drawn:
        return None
    return plot_lines(curves_of(drawn, "case", "x"), MEASURED_AXES.get(question.x, question.x))


def on_lines(rows: list[ResultRow], lines: Mapping[str, Sequence[str]]) -> list[ResultRow]:
    """The rows with the name of their line before their case; an encoder may be on several lines."""
    named = []
    for line, encoders in lines.items():
        for row in rows:
            if row["encoder"] in encoders:
                named.append(row | {"case": f"{line} {row['case']}".strip()})
    return named


def curves_of(rows: list[ResultRow], line: str, x: str) -> Curves:
    """Accuracies as curves: evaluation (of a dataset) -> value of the key `line` -> value of the key `x`, ascending."""
    several_datasets = len(unique(rows, "dataset")) > 1
    curves: Curves = {}
    for (dataset, evaluation, name), of_line in grouped(rows, "dataset", "evaluation", line).items():
        panel = f"{dataset} {evaluation}" if several_datasets else evaluation
        points = sorted(grouped(of_line, x).items())
        curves.setdefault(panel, {})[name] = {place: spread(at_place) for (place,), at_place in points}
    return curves
