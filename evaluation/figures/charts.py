"""Style of all figures, readable at the width of a README and by colour-blind readers; tables in Markdown; charts."""

import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray

from evaluation.metrics.scoring import ClassTable, Outcomes, kind_of
from mpp.runtime.files import complete

CLASSES_SUFFIX = ".classes.csv"
CONFUSION_FILE = ".confusion.png"
VALUE_COLORS = matplotlib.colormaps["cividis"].with_extremes(bad="0.9")  # grey: no value
LINE_COLORS = ("#006BA4", "#FF800E", "#ABABAB", "#595959", "#5F9ED1", "#C85200", "#898989", "#A2C8EC", "#FFBC79")
"""Those of tableau-colorblind10."""
MARKERS = "osD^vPX"
WIDTH = 7.5  # inches
DPI = 110
FALLBACK_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "Droid Sans Fallback"),
    *("Hiragino Sans", "PingFang SC", "Apple SD Gothic Neo", "Yu Gothic", "Microsoft YaHei", "Malgun Gothic"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Arial Unicode MS"),
)
"""Fonts of other scripts, of Linux, macOS and Windows, for letters that matplotlib's own font lacks."""


@cache
def settings_of_figures() -> dict[str, Any]:
    """matplotlib's settings while one of our figures is drawn or written."""
    installed = set(font_manager.get_font_names())
    return {
        "font.family": ["DejaVu Sans", *(font for font in FALLBACK_FONTS if font in installed)],
        "text.parse_math": False,  # a user's name with two dollars is not a formula
        "svg.fonttype": "none",  # text stays text, which is smaller
        "svg.hashsalt": "mpp",  # the same figure is the same file
        "pdf.fonttype": 42,  # fonts that journals accept
    }


@contextmanager
def figure_style() -> Iterator[None]:
    """While open, or around a function that draws or writes a figure: our style, instead of the program's."""
    with matplotlib.rc_context(settings_of_figures()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)  # it is drawn as a box
        yield


def style_of_line(number: int) -> dict[str, str]:
    """Colour and marker of the line of this number, from 0."""
    return {"color": LINE_COLORS[number % len(LINE_COLORS)], "marker": MARKERS[number % len(MARKERS)]}


@figure_style()
def write_plot(figure: Figure, folder: Path, name: str) -> list[str]:
    """Write NAME.png for screens and NAME.pdf for papers, and return these file names."""
    files = [f"{name}.png", f"{name}.pdf"]
    for file in files:
        with complete(folder / file) as partial:
            figure.savefig(partial, format=file.rpartition(".")[2], dpi=DPI)
    return files


# --- tables ---


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column aligned to the left and the others to the right."""
    lines = [[" ".join(cell.splitlines()).replace("|", r"\|") for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    text = []
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def without_empty_columns(headings: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns that have no value ("-" in all rows); with all columns where none has one."""
    has_value = [any(row[place] != "-" for row in rows) for place in range(len(headings))]
    if not any(has_value):
        return headings, rows
    return [*compress(headings, has_value)], [[*compress(row, has_value)] for row in rows]


# --- charts ---

MAX_MARKERS = 30  # of a line
IN_PERCENT = "(%)"
PANELS_IN_A_ROW = 4
MAX_CONFUSED_NAMED = 60  # classes of a confusion matrix
MAX_CONFUSED_NUMBERED = 25  # whose cells have their shares
MAX_SIDE = 11.0  # of a confusion matrix, in inches
MAX_TICKS = 12
Statistics = dict[str, float]
"""`mean` and `std` of a score."""
Curves = dict[str, dict[str, dict[float, Statistics]]]
"""Panel -> line -> x -> statistics of a score."""


class ScoreAxis(NamedTuple):
    """The axis of a score, such as accuracy."""

    label: str
    factor: int
    """By which a score is multiplied: 100 of a share, which is in percent."""


ACCURACY = ScoreAxis("accuracy (%)", 100)
ScoreAxes = Mapping[str, ScoreAxis]
"""Panel -> the axis of its score; of those that are not named it is accuracy."""


@figure_style()
def plot_series(lines: Mapping[str, Mapping[float, float]], y_label: str, x_label: str = "steps") -> Figure:
    """Scalars of a run or of an encoder: name -> x -> y; y values are shares if their label ends in (%)."""
    figure = Figure(figsize=(4.6, 3.1), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(alpha=0.25)
    factor = 100 if y_label.endswith(IN_PERCENT) else 1
    for number, (name, line) in enumerate(lines.items()):
        every = math.ceil(len(line) / MAX_MARKERS)
        y_values = [factor * y for y in line.values()]
        axes.plot(list(line), y_values, label=name, markersize=3.5, markevery=every, **style_of_line(number))
    if len(lines) > 1:
        figure.legend(fontsize=7.5, ncols=3, loc="outside lower center")
    return figure


def plot_by_depth(by_depth: dict[int, dict[str, Statistics]], case: str, score_axis: ScoreAxis) -> Figure:
    """Score by depth, a line for each case.

    Args:
        by_depth: depth -> value of the case -> score.
        case: name of the case, such as `shots` or `reading`.
    """
    lines = {}
    for value in next(iter(by_depth.values())):
        lines[f"{case} {value}"] = {depth: scores[value] for depth, scores in by_depth.items()}
    return plot_depths({"": lines}, {"": score_axis})


def plot_depths(curves: Curves, score_axes: ScoreAxes | None = None) -> Figure:
    """Evaluation -> encoder -> depth -> score; an encoder with one depth is a horizontal line."""
    at_no_place = {}
    for panel, lines in curves.items():
        at_no_place[panel] = {name: {0: line[min(line)]} if len(line) == 1 else line for name, line in lines.items()}
    return plot_panels(at_no_place, "depth (blocks)", score_axes or {})


def plot_lines(curves: Curves, x_label: str, score_axes: ScoreAxes | None = None) -> Figure:
    """Evaluation -> case -> x -> score, with a logarithmic x-axis; scores at 0 are horizontal lines."""
    return plot_panels(curves, x_label, score_axes or {}, is_log=True)


@figure_style()
def plot_panels(curves: Curves, x_label: str, score_axes: ScoreAxes, is_log: bool = False) -> Figure:
    """A panel for each key, and one legend of all lines; scores at x = 0 are horizontal lines."""
    across = min(PANELS_IN_A_ROW, len(curves))
    rows = math.ceil(len(curves) / across)
    figure = Figure(figsize=(WIDTH * 1.2, 2 + 2.6 * rows), layout="constrained")
    numbers: dict[str, int] = {}  # of a line, the same in all panels
    legend: dict[str, Artist] = {}
    for place, (title, lines) in enumerate(curves.items(), start=1):
        axis = score_axes.get(title, ACCURACY)
        panel = figure.add_subplot(rows, across, place)
        panel.set(title=title, xlabel=x_label, ylabel=axis.label)
        panel.grid(alpha=0.3)
        for name, scores in lines.items():
            number = numbers.setdefault(name, len(numbers))
            legend |= draw_line(panel, scores, name, number, axis.factor)
        places = sorted(x for x in set().union(*lines.values()) if x)
        if places and is_log:
            panel.set_xscale("log")
        panel.xaxis.set_major_locator(FixedLocator(places, nbins=MAX_TICKS))
        panel.xaxis.set_major_formatter("{x:,g}")
        panel.minorticks_off()
    legend.pop("", None)
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def draw_line(panel: Axes, scores: dict[float, Statistics], name: str, number: int, factor: int) -> dict[str, Artist]:
    """Draw x -> mean and standard deviation as a line with error bars, and a score at 0 as a horizontal line.

    A band would shrink towards points that were measured once.

    Returns:
        Name in the legend -> what is drawn.
    """
    style = style_of_line(number)
    drawn = {}
    points = {x: score for x, score in scores.items() if x}
    if points:
        means = [factor * score["mean"] for score in points.values()]
        deviations = [factor * score["std"] for score in points.values()]
        drawn[name] = panel.errorbar(list(points), means, deviations, label=name, ms=5, **style)
    if 0 in scores:
        label = f"{name}, at 0" if points else name
        drawn[label] = panel.axhline(factor * scores[0]["mean"], linestyle="--", color=style["color"], label=label)
    return drawn


@figure_style()
def plot_bars(accuracies: dict[str, dict[str, Statistics]], score_axes: ScoreAxes | None = None) -> Figure:
    """Encoder -> column -> score: a panel for each column, a bar for each encoder with its standard deviation."""
    columns = list(dict.fromkeys(column for cells in accuracies.values() for column in cells))
    figure = Figure(figsize=(2.2 + 2.2 * len(columns), 0.8 + 0.4 * len(accuracies)), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for panel, column in zip(panels, columns, strict=True):
        label, factor = (score_axes or {}).get(column, ACCURACY)
        cells = [of_encoder.get(column, {"mean": math.nan, "std": 0}) for of_encoder in accuracies.values()]
        deviations = [factor * cell["std"] for cell in cells]
        bars = panel.barh(list(accuracies), [factor * cell["mean"] for cell in cells], xerr=deviations)
        panel.bar_label(bars, fmt="%.1f" if factor == 100 else "%.3f", padding=4, fontsize=8)
        panel.set(title=textwrap.fill(column, 20), xlabel=label)
        panel.margins(x=0.28)
    panels[0].invert_yaxis()
    return figure


@figure_style()
def plot_confusion(confusion: NDArray[np.int64], names: Sequence[str]) -> Figure:
    """A confusion matrix: the share of each true class (rows) that each class (columns) is predicted for.

    Args:
        confusion: (C, C) numbers of images or pixels.
        names: of the classes.
    """
    classes = len(names)
    with np.errstate(invalid="ignore"):  # a class may have no images
        shares = 100 * confusion / confusion.sum(1, keepdims=True)
    side = min(MAX_SIDE, 2.6 + 0.34 * classes)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    colors = axes.imshow(shares, cmap=VALUE_COLORS, vmin=0, vmax=100)
    figure.colorbar(colors, label="share of the class (%)", shrink=0.8)
    axes.set(xlabel="predicted", ylabel="true")
    if classes <= MAX_CONFUSED_NAMED:
        axes.set_xticks(range(classes), [name[:24] for name in names], rotation=90, fontsize=8)
        axes.set_yticks(range(classes), [name[:24] for name in names], fontsize=8)
    if classes <= MAX_CONFUSED_NUMBERED:
        for (row, column), share in np.ndenumerate(shares):
            if share > 0:
                color = "black" if share > 50 else "white"
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=7, color=color)
    return figure


@figure_style()
def write_details(path: Path, outcomes: Outcomes, by_class: ClassTable | None) -> list[Path]:
    """Write the table by class and the confusion matrix of these outcomes, next to the report at `path`."""
    written = []
    if by_class is not None:
        written.append(path.with_name(f"{path.stem}{CLASSES_SUFFIX}"))
        with complete(written[-1], shared=True) as partial:
            pd.DataFrame(by_class.columns()).to_csv(partial, index=False)
    figure = draw_confusion(outcomes)
    if figure is not None:
        written.append(path.with_name(f"{path.stem}{CONFUSION_FILE}"))
        with complete(written[-1], shared=True) as partial:
            figure.savefig(partial, format="png", dpi=DPI)
    return written


def draw_confusion(outcomes: Outcomes) -> Figure | None:
    """The confusion matrix; None: the kind of label has none."""
    confusion = kind_of(outcomes).confusion(outcomes)
    if confusion is None:
        return None
    return plot_confusion(confusion, outcomes.names(len(confusion)))
