"""Style of all figures, readable at the width of a README and by colour-blind readers; tables in Markdown; charts."""

import math
import textwrap
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from evaluation.metrics.scoring import Outcomes, kind_of
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
MAX_MARKERS = 30  # of a line
IN_PERCENT = "(%)"
PANELS_IN_A_ROW = 4
MIN_TICK_DISTANCE = 0.2  # of the length of a logarithmic axis
MAX_CONFUSED_NAMED = 60  # classes of a confusion matrix
MAX_CONFUSED_NUMBERED = 25  # whose cells have their shares
MAX_SIDE = 11.0  # of a confusion matrix, in inches
DOTS: dict[str, Any] = {"marker": "o", "markersize": 2.5, "linestyle": "", "zorder": 3}
Statistics = dict[str, Any]
"""`mean` of a score; perhaps its `interval`, which is a bar, and the `values` of seeds and draws, which are dots."""
ScoreAxis = str
"""The label of a score's axis. It has (%) if the score is a share: it is drawn in percent."""
Curves = dict[str, dict[str, dict[float, Statistics]]]
"""Panel -> line -> x -> statistics of a score."""


# --- style ---


@contextmanager
def figure_style() -> Iterator[None]:
    """While open, or around a function that draws or writes a figure: our style, instead of the program's."""
    installed = set(font_manager.get_font_names())
    style = {
        "font.family": ["DejaVu Sans", *(font for font in FALLBACK_FONTS if font in installed)],
        "text.parse_math": False,  # a user's name with two dollars is not a formula
        "svg.fonttype": "none",  # text stays text, which is smaller
        "svg.hashsalt": "mpp",  # the same figure is the same file
        "pdf.fonttype": 42,  # fonts that journals accept
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)  # it is drawn as a box
        yield


def style_of_line(number: int) -> dict[str, str]:
    """Colour and marker of the line of this number, from 0."""
    return {"color": LINE_COLORS[number % len(LINE_COLORS)], "marker": MARKERS[number % len(MARKERS)]}


@figure_style()
def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, complete or not at all, in the format that its name says."""
    with complete(path, shared=True) as partial:
        figure.savefig(partial, format=path.suffix[1:], dpi=DPI)


# --- tables ---


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column aligned to the left and the others to the right."""
    lines = [[" ".join(cell.splitlines()).replace("|", r"\|") for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    aligned = [[first.ljust(widths[0]), *map(str.rjust, others, widths[1:])] for first, *others in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in aligned)


# --- figures by class ---


def write_details(path: Path, outcomes: Outcomes) -> None:
    """Write figures by class and the confusion matrix, and print the names of the files.

    Args:
        path: of the report, next to which they are written.
        outcomes: of images that have a label.
    """
    kind = kind_of(outcomes)
    by_class, confusion = kind.class_table(outcomes), kind.confusion(outcomes)
    files = []
    if by_class is not None:
        file = path.with_name(f"{path.stem}{CLASSES_SUFFIX}")
        with complete(file, shared=True) as partial:
            by_class.to_csv(partial, index_label="class", float_format="%.1f", na_rep="-")
        files.append(file.name)
    if confusion is not None:
        file = path.with_name(f"{path.stem}{CONFUSION_FILE}")
        save_figure(plot_confusion(confusion, outcomes.names(len(confusion))), file)
        files.append(file.name)
    if files:
        print(f"by class, in {path.parent}: {', '.join(files)}")


@figure_style()
def plot_confusion(confusion: NDArray[np.int64], names: Sequence[str]) -> Figure:
    """A confusion matrix: the share of each true class (rows) that each class (columns) is predicted for.

    Args:
        confusion: (C, C) numbers of images or pixels.
        names: of the classes.
    """
    classes = len(names)
    of_class = confusion.sum(1, keepdims=True)
    shares = 100 * confusion / np.where(of_class, of_class, np.nan)  # a class may have no images
    side = min(MAX_SIDE, 2.6 + 0.34 * classes)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    colors = axes.imshow(shares, cmap=VALUE_COLORS, vmin=0, vmax=100)
    figure.colorbar(colors, label="share of the class (%)", shrink=0.8)
    if classes <= MAX_CONFUSED_NAMED:
        short = [name[:24] for name in names]
        axes.set_xticks(range(classes), short, rotation=90, fontsize=8)
        axes.set_yticks(range(classes), short, fontsize=8)
    if classes <= MAX_CONFUSED_NUMBERED:
        for row, column in np.argwhere(shares > 0):
            share = shares[row, column]
            color = "black" if share > 50 else "white"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=7, color=color)
    return figure


# --- charts ---


def factor_of(label: str) -> int:
    """By which the values of an axis are multiplied: 100 of a share, which is in percent."""
    return 100 if IN_PERCENT in label else 1


@figure_style()
def plot_series(lines: Mapping[str, Mapping[float, float]], y_label: str, x_label: str = "steps") -> Figure:
    """Scalars of a run or of an encoder: name -> x -> y; y values are shares if their label has (%)."""
    figure = Figure(figsize=(4.6, 3.1), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(alpha=0.25)
    for number, (name, line) in enumerate(lines.items()):
        points = factor_of(y_label) * pd.Series(line, dtype=float)
        every = math.ceil(len(line) / MAX_MARKERS)
        axes.plot(points, label=name, markersize=3.5, markevery=every, **style_of_line(number))
    if len(lines) > 1:
        figure.legend(fontsize=7.5, ncols=3, loc="outside lower center")
    return figure


def plot_by_depth(by_depth: dict[int, dict[str, Statistics]], case: str, score_axis: ScoreAxis) -> Figure:
    """Score by depth, a line for each case.

    Args:
        by_depth: depth -> value of the case -> score.
        case: name of the case, such as `shots` or `reading`.
    """
    lines = pd.DataFrame(by_depth).T.add_prefix(f"{case} ").to_dict()  # of a depth its scores
    return plot_lines({"": lines}, "depth (blocks)", {"": score_axis}, is_log=False)


@figure_style()
def plot_lines(curves: Curves, x_label: str, score_axes: Mapping[str, ScoreAxis], is_log: bool = True) -> Figure:
    """A panel for each key, and one legend of all lines; scores at x = 0 are horizontal lines.

    Args:
        score_axes: of each panel's score.
        is_log: whether the x-axis is logarithmic; on another, such as of depths, a single score is a horizontal line.
    """
    across = min(PANELS_IN_A_ROW, len(curves))
    rows = math.ceil(len(curves) / across)
    figure = Figure(figsize=(WIDTH * 1.2, 2 + 2.6 * rows), layout="constrained")
    names = list(dict.fromkeys(name for lines in curves.values() for name in lines))
    legend: dict[str, Any] = {}
    for place, (title, lines) in enumerate(curves.items(), start=1):
        panel = figure.add_subplot(rows, across, place, title=title, xlabel=x_label, ylabel=score_axes[title])
        panel.grid(alpha=0.3)
        for name, scores in lines.items():
            if len(scores) == 1 and not is_log:
                scores = {0: next(iter(scores.values()))}
            legend |= draw_line(panel, scores, name, style_of_line(names.index(name)))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        places = sorted({x for scores in lines.values() for x in scores if x})
        if is_log and places:
            panel.set_xscale("log")
            ticks = readable_ticks(places)
            panel.set_xticks(ticks, [f"{tick:,.0f}" if tick >= 100 else f"{tick:.3g}" for tick in ticks], fontsize=7)
        panel.minorticks_off()
    legend.pop("", None)
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def readable_ticks(places: list[float]) -> list[float]:
    """The ascending places whose names do not overlap on a logarithmic axis."""
    ticks = places[:1]
    for place in places[1:]:
        if math.log(place / ticks[-1]) >= MIN_TICK_DISTANCE * math.log(places[-1] / places[0]):
            ticks.append(place)
    return ticks


def draw_line(panel: Axes, scores: dict[float, Statistics], name: str, style: dict[str, str]) -> dict[str, Any]:
    """Draw x -> score as a line of means with intervals and dots, and a score at 0 as a horizontal line.

    Returns:
        Name in the legend -> what is drawn.
    """
    drawn: dict[str, Any] = {}
    factor = factor_of(panel.get_ylabel())
    points = {x: score for x, score in scores.items() if x}
    if points:
        means, errors = means_and_errors(points.values(), factor)
        drawn[name] = panel.errorbar(list(points), means, errors, label=name, ms=5, elinewidth=1, capsize=3, **style)
    for x, score in points.items():
        values = values_of(score, factor)
        panel.plot([x] * len(values), values, color=style["color"], **DOTS)
    if 0 in scores:
        label = f"{name}, at 0" if points else name
        mean = factor * scores[0]["mean"]
        drawn[label] = panel.axhline(mean, linestyle="--", color=style["color"], label=label)
    return drawn


def means_and_errors(scores: Collection[Statistics], factor: int) -> tuple[NDArray, NDArray]:
    """The means (n,), and how far their intervals go down and up, (2, n); NaN where there is none."""
    means = factor * np.array([score.get("mean", math.nan) for score in scores])
    ends = factor * np.array([score.get("interval", (math.nan, math.nan)) for score in scores])
    return means, np.abs(ends.T - means)


def values_of(score: Statistics, factor: int) -> NDArray:
    """The values of a score that are drawn: a single one is the mean."""
    values = score.get("values", ())
    return factor * np.array(values if len(values) > 1 else ())


@figure_style()
def plot_bars(accuracies: dict[str, dict[str, Statistics]], score_axes: Mapping[str, ScoreAxis]) -> Figure:
    """Encoder -> column -> score: a panel for each column, a bar for each encoder, with its interval and dots."""
    columns = list(dict.fromkeys(column for cells in accuracies.values() for column in cells))
    figure = Figure(figsize=(2.2 + 2.2 * len(columns), 0.8 + 0.4 * len(accuracies)), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for panel, column in zip(panels, columns, strict=True):
        factor = factor_of(score_axes[column])
        scores = [cells.get(column, {}) for cells in accuracies.values()]
        means, errors = means_and_errors(scores, factor)
        bars = panel.barh(list(accuracies), means, xerr=errors, error_kw={"elinewidth": 1, "capsize": 3})
        for place, score in enumerate(scores):
            values = values_of(score, factor)
            panel.plot(values, [place] * len(values), color="black", **DOTS)
        panel.bar_label(bars, fmt="%.1f" if factor == 100 else "%.3f", padding=4, fontsize=8)
        panel.set(title=textwrap.fill(column, 20), xlabel=score_axes[column])
        panel.margins(x=0.28)
    panels[0].invert_yaxis()
    return figure
