"""The plot of a comparison's question."""

from collections.abc import Callable

from matplotlib.figure import Figure

from evaluation.comparison.entries import MEASURED_AXES, Question
from evaluation.comparison.reports import ResultRow
from evaluation.comparison.tables import CellsByEncoder, columns_of, diverged_cases, of_kind, spread, unique, x_of
from evaluation.figures.charts import Curves, plot_bars, plot_depths, plot_lines


def plot_question(question: Question, rows: list[ResultRow], numbers: CellsByEncoder) -> Figure | None:
    """The plot of a question; None: there is nothing to draw yet.

    Args:
        rows: the results that it is about.
        numbers: those of its table.
    """
    if question.plot == "depth":
        by_depth = [row for row in of_kind(rows, "dev") if "depth" in row]
        return plot_depths(curves_of(by_depth, "encoder", lambda row: row["depth"])) if by_depth else None
    if question.plot == "lines":
        return plot_against_x(question, rows)
    headings = [column.heading for column in columns_of([*of_kind(rows, "test"), *diverged_cases(rows)])]
    bars = {}
    for encoder, cells in numbers.items():
        bars[encoder] = {heading: cells[heading] for heading in headings if heading in cells}
    return plot_bars(bars) if bars else None


def plot_against_x(question: Question, rows: list[ResultRow]) -> Figure | None:
    """Accuracies against the question's x: a line for each case, or for each of its `lines`."""
    drawn = [row for row in of_kind(rows, "test") if x_of(row, question) is not None]
    if not drawn:
        return None
    if question.lines is not None:
        drawn = on_lines(drawn, question.lines.items())
    curves = curves_of(drawn, "case", lambda row: x_of(row, question))
    return plot_lines(curves, MEASURED_AXES.get(question.x, question.x))


def on_lines(rows: list[ResultRow], lines) -> list[ResultRow]:
    """The rows with the name of their line before their case; an encoder may be on several lines.

    Args:
        lines: pairs of a name and encoders.
    """
    named = []
    for line, encoders in lines:
        for row in rows:
            if row["encoder"] in encoders:
                named.append(row | {"case": f"{line} {row['case']}".strip()})
    return named


def curves_of(rows: list[ResultRow], line: str, x: Callable[[ResultRow], float]) -> Curves:
    """Evaluation (of a dataset) -> value of the key `line` -> x, ascending -> mean and standard deviation."""
    several = len(unique(rows, "dataset")) > 1
    panels: dict[str, dict[str, dict[float, list[ResultRow]]]] = {}
    for row in rows:
        panel = f"{row['dataset']} {row['evaluation']}" if several else row["evaluation"]
        points = panels.setdefault(panel, {}).setdefault(row[line], {})
        points.setdefault(x(row), []).append(row)
    curves: Curves = {}
    for panel, lines in panels.items():
        curves[panel] = {name: curve_of(points) for name, points in lines.items()}
    return curves


def curve_of(points: dict[float, list[ResultRow]]) -> dict[float, dict[str, float]]:
    """x, ascending -> mean and standard deviation of the rows there."""
    return {x: spread(points[x]) for x in sorted(points)}
