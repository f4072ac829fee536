"""Charts of numbers: scalars over steps, accuracies by depth or compute, bars, and a map of features."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from evaluation.figures.style import (
    VALUE_COLORS,
    WIDTH,
    color_of_line,
    drawable,
    figure_style,
    legend_name,
    marker_of_line,
)

SERIES_COLORS = ["#1b7fd6", "#e07b00", "#8c96a0", "#c2569c", "#2aa198", "#b58900", "#6c5fc7"]
MAX_MARKED_POINTS = 30
PANELS_IN_A_ROW = 4
MAX_CLASSES_NAMED = 24
MAX_CONFUSED_NAMED = 60  # classes of a confusion matrix
MAX_CONFUSED_COUNTED = 25  # whose cells have their numbers
FIRST_LONG_COUNT = 10_000  # which no cell has room for: they have shares in percent
MAX_SIDE = 11.0  # of a confusion matrix, in inches
MIN_TICK_DISTANCE = 0.06  # of the length of a logarithmic axis
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
DEV_ACCURACY = ScoreAxis("accuracy on the dev split (%)", 100)
ScoreAxes = Mapping[str, ScoreAxis]
"""Panel -> the axis of its score; of those that are not named it is accuracy."""


@figure_style()
def plot_series(
    lines: dict[str, dict[float, float]],
    y_label: str,
    scale: str = "linear",
    percent: bool = False,
    x_label: str = "steps",
) -> Figure:
    """Scalars that a run logged: name -> x -> y.

    Args:
        percent: the y values are shares, and shown in percent.
    """
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.add_subplot()
    factor = 100 if percent else 1
    for number, (name, line) in enumerate(lines.items()):
        y_values = [factor * y for y in line.values()]
        marker = marker_of_line(number) if len(line) <= MAX_MARKED_POINTS else None
        color = SERIES_COLORS[number % len(SERIES_COLORS)]
        style = dict(color=color, marker=marker, markersize=3.5, linewidth=1.6)
        axes.plot(list(line), y_values, label=name, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    unit = " (%)" if percent else ""
    axes.set(xlabel=x_label, ylabel=y_label + unit, yscale=scale)
    if scale == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if len(lines) > 4:  # a legend inside would hide lines
        axes.legend(fontsize=7.5, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    elif len(lines) > 1:
        axes.legend(fontsize=7.5)
    return figure


@figure_style()
def plot_map(places: NDArray, labels: NDArray[np.int64], names: Sequence[str] = ()) -> Figure:
    """Images as dots on a plane, coloured by their classes.

    Args:
        places: (N, 2).
        labels: (N,), -1: no class.
        names: of the classes by number, as far as they are known.
    """
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(*places[labels < 0].T, s=12, color="0.55", alpha=0.7, linewidths=0)
    classes = np.unique(labels[labels >= 0])
    colors = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(classes)))
    for number, (label, color) in enumerate(zip(classes, colors, strict=True)):
        of_class = places[labels == label]
        style = dict(s=16, color=[color], marker=marker_of_line(number), linewidths=0)
        number_name = f"class {label}"
        name = drawable(names[label], number_name) if label < len(names) else number_name
        axes.scatter(*of_class.T, label=legend_name(name), **style)
    axes.set(xticks=[], yticks=[], xlabel="first principal component", ylabel="second")
    axes.spines[["top", "right"]].set_visible(False)
    if 0 < len(classes) <= MAX_CLASSES_NAMED:
        axes.legend(fontsize=7, ncols=1 + len(classes) // 12, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@figure_style()
def plot_by_depth(by_depth: dict[int, dict[str, Statistics]], case: str, score_axis: ScoreAxis) -> Figure:
    """Score by depth, a line for each case.

    Args:
        by_depth: depth -> value of the case -> score.
        case: name of the case, such as `shots` or `reading`.
    """
    values = next(iter(by_depth.values()))
    lines = {}
    for value in values:
        lines[f"{case} {value}"] = {depth: scores[value] for depth, scores in by_depth.items()}
    return plot_depths({"": lines}, {"": score_axis})


@figure_style()
def plot_depths(curves: Curves, score_axes: ScoreAxes | None = None) -> Figure:
    """Evaluation -> encoder -> depth -> score; an encoder with one depth is a horizontal line.

    Args:
        score_axes: of the score; None: accuracy on the dev split.
    """
    score_axes = score_axes or dict.fromkeys(curves, DEV_ACCURACY)
    figure, panels = panels_side_by_side(curves, "depth (blocks)")
    numbers: dict[str, int] = {}  # of an encoder's line, the same in all panels
    legend = {}
    for panel, (column, encoders) in zip(panels, curves.items(), strict=True):
        factor = score_axes.get(column, ACCURACY).factor
        for name, accuracies in encoders.items():
            number = numbers.setdefault(name, len(numbers))
            if len(accuracies) == 1:
                draw_level(panel, accuracies, name, number, factor)
            else:
                draw_line(panel, accuracies, name, number, factor)
                panel.set_xticks(list(accuracies))
        handles, names = panel.get_legend_handles_labels()
        legend |= zip(names, handles, strict=True)
    label_scores(panels, curves, score_axes)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


@figure_style()
def plot_lines(curves: Curves, x_label: str, score_axes: ScoreAxes | None = None) -> Figure:
    """Evaluation -> case -> x -> score, with a logarithmic x-axis; scores at 0 are horizontal lines."""
    score_axes = score_axes or {}
    curves = {column: levels_apart(cases) for column, cases in curves.items()}
    figure, panels = panels_side_by_side(curves, x_label)
    for panel, (column, cases) in zip(panels, curves.items(), strict=True):
        factor = score_axes.get(column, ACCURACY).factor
        for number, (name, accuracies) in enumerate(cases.items()):
            if set(accuracies) == {0}:
                draw_level(panel, accuracies, name, number, factor)
            else:
                draw_line(panel, accuracies, name, number, factor)
        places = sorted(place for place in set().union(*cases.values()) if place > 0)  # random weights are at 0
        if places:
            panel.set_xscale("log")
            ticks = readable_ticks(places)
            names = [f"{tick:,.0f}" if tick >= 100 else f"{tick:.3g}" for tick in ticks]
            panel.set_xticks(ticks, names, fontsize=7)
        panel.minorticks_off()
    label_scores(panels, curves, score_axes)
    lines_of_panels = {tuple(cases) for cases in curves.values()}
    if len(panels) > 1 and len(lines_of_panels) == 1 and any(cases):
        figure.legend(**legend_of(panels[0], cases), loc="outside lower center", ncols=3, fontsize=8)
        return figure
    for panel, cases in zip(panels, curves.values(), strict=True):
        if any(cases):  # below the error bars
            panel.legend(**legend_of(panel, cases), fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def levels_apart(cases: dict[str, dict[float, Statistics]]) -> dict[str, dict[float, Statistics]]:
    """The lines of a panel, of which those with 0 and other places are two: "NAME, at 0" is the score at 0."""
    apart = {}
    for name, accuracies in cases.items():
        above = {place: each for place, each in accuracies.items() if place != 0}
        if above:
            apart[name] = above
        if 0 in accuracies:
            apart[f"{name}, at 0" if above else name] = {0: accuracies[0]}
    return apart


def legend_of(panel: Axes, names: Iterable[str]) -> dict[str, list[Any]]:
    """The legend's arguments with the lines in the order of `names`: of itself it has horizontal lines first."""
    handles, labels = panel.get_legend_handles_labels()
    by_name = dict(zip(labels, handles, strict=True))
    ordered = [name for name in map(legend_name, names) if name in by_name]
    return {"handles": [by_name[name] for name in ordered], "labels": ordered}


def label_scores(panels: Sequence[Axes], columns: Iterable[str], score_axes: ScoreAxes) -> None:
    """Label the axes of scores: the first one, or each where they differ."""
    labels = [score_axes.get(column, ACCURACY).label for column in columns]
    for number, (panel, label) in enumerate(zip(panels, labels, strict=True)):
        if number == 0 or len(set(labels)) > 1:
            panel.set_ylabel(label)


def readable_ticks(places: list[float]) -> list[float]:
    """The ascending places whose names do not overlap on a logarithmic axis."""
    min_distance = MIN_TICK_DISTANCE * math.log(places[-1] / places[0])
    ticks = places[:1]
    for place in places[1:]:
        if math.log(place / ticks[-1]) >= min_distance:
            ticks.append(place)
    return ticks


@figure_style()
def plot_confusion(confusion: NDArray[np.int64], names: Sequence[str]) -> Figure:
    """A confusion matrix: the share of each true class (rows) that each class (columns) is predicted for.

    Args:
        confusion: (C, C) numbers of images or pixels.
        names: of the classes.
    """
    classes = len(names)
    of_class = confusion.sum(1, keepdims=True)
    shares = np.divide(100 * confusion, of_class, out=np.full(confusion.shape, np.nan), where=of_class > 0)
    side = min(MAX_SIDE, 2.6 + 0.34 * classes)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    colors = axes.imshow(shares, cmap=VALUE_COLORS, vmin=0, vmax=100)
    figure.colorbar(colors, label="share of the class (%)", shrink=0.8)
    axes.set(xlabel="predicted", ylabel="true")
    if classes <= MAX_CONFUSED_NAMED:
        short = [short_name(name, number) for number, name in enumerate(names)]
        axes.set_xticks(range(classes), short, rotation=90, fontsize=8)
        axes.set_yticks(range(classes), short, fontsize=8)
    if classes <= MAX_CONFUSED_COUNTED:
        counts_are_long = confusion.max() >= FIRST_LONG_COUNT
        for (row, column), count in np.ndenumerate(confusion):
            if count:
                text = f"{shares[row, column]:.0f} %" if counts_are_long else str(count)
                color = "black" if shares[row, column] > 50 else "white"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    return figure


def short_name(name: str, number: int) -> str:
    """A class's name next to a matrix: its beginning, or its number where no font has its letters."""
    name = drawable(name, f"class {number}")
    return textwrap.shorten(name, 24, placeholder="...") if " " in name else name[:24]


def panels_side_by_side(curves: Curves, x_label: str) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel for each key: four of them two by two, more of them four in a row."""
    across = 2 if len(curves) == 4 else min(PANELS_IN_A_ROW, len(curves))
    rows = math.ceil(len(curves) / across)
    size = (WIDTH, 4.4) if len(curves) == 1 else (WIDTH * 1.2, 0.8 + 2.6 * rows)
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)  # tick labels keep clear of the panel before
    panels = []
    for place, name in enumerate(curves, start=1):
        panel = figure.add_subplot(rows, across, place)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(x_label, fontsize=9)
        panel.grid(alpha=0.3)
        panels.append(panel)
    return figure, panels


def draw_line(panel: Axes, accuracies: dict[float, Statistics], name: str, number: int, factor: int) -> None:
    """Draw x -> mean and standard deviation as a line with error bars.

    A band would shrink towards points that were measured once.
    """
    means = [factor * each["mean"] for each in accuracies.values()]
    deviations = [factor * each["std"] for each in accuracies.values()]
    style = dict(marker=marker_of_line(number), ms=5, color=color_of_line(number))
    panel.errorbar(list(accuracies), means, deviations, label=legend_name(name), **style)


def draw_level(panel: Axes, accuracies: dict[float, Statistics], name: str, number: int, factor: int) -> None:
    """Draw the mean of the only entry across the panel."""
    (accuracy,) = accuracies.values()
    panel.axhline(factor * accuracy["mean"], linestyle="--", color=color_of_line(number), label=legend_name(name))


@figure_style()
def plot_bars(accuracies: dict[str, dict[str, Statistics]], score_axes: ScoreAxes | None = None) -> Figure:
    """Encoder -> column -> score: a panel for each column, a bar for each encoder with its standard deviation."""
    score_axes = score_axes or {}
    columns = list(dict.fromkeys(column for cells in accuracies.values() for column in cells))
    size = (2.2 + 2.2 * len(columns), 0.8 + 0.4 * len(accuracies))
    figure = Figure(figsize=size, layout="constrained")
    has_one_scale = len({score_axes.get(column, ACCURACY).factor for column in columns}) == 1
    panels = figure.subplots(1, len(columns), sharex=has_one_scale, sharey=True, squeeze=False)[0]
    colors = VALUE_COLORS(np.linspace(0, 0.9, len(accuracies)))
    for panel, column in zip(panels, columns, strict=True):
        score_axis = score_axes.get(column, ACCURACY)
        means = []
        deviations = []
        for cells in accuracies.values():
            cell = cells.get(column, {})
            means.append(score_axis.factor * cell.get("mean", np.nan))
            deviations.append(score_axis.factor * cell.get("std", 0))
        bars = panel.barh(list(accuracies), means, xerr=deviations, color=colors)
        panel.bar_label(bars, fmt="%.1f" if score_axis.factor == 100 else "%.3f", padding=4, fontsize=8)
        panel.set(title=textwrap.fill(column, 20), xlabel=score_axis.label)
        panel.margins(x=0.28)
    panels[0].invert_yaxis()
    return figure
