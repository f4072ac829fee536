"""Charts of a run's scalars, each with its numbers: histories in, blocks of a page out."""

import math
from collections.abc import Sequence

import numpy as np

from evaluation.figures.charts import plot_series
from evaluation.pages.page import Chart, Missing, Table, chart
from mpp.features.drift import ALL_WEIGHTS, MOVEMENT, STEM
from mpp.runtime.messages import counted
from mpp.training.history import (
    EVALUATED,
    GENERAL_KNN,
    History,
    Line,
    after_training_began,
    best_depth,
    lines_with,
    probe_lines,
    series,
    values_by_depth,
)
from mpp.training.verdict import ACCURACY_BASELINES

MAX_POINTS_OF_A_LINE = 200
MAX_ROWS_OF_A_TABLE = 12
PROBE_TITLES = {
    "knn": "kNN accuracy",
    "agreement": "Neighbour agreement between two crops",
    GENERAL_KNN: "kNN accuracy on general images",
}
Lines = dict[str, dict[float, float]]
"""Name -> x -> y."""


def curves_of_run(history: History) -> list[Chart | Missing]:
    """Loss, accuracy with its baselines, a teacher's targets, learning rate, gradient norm, speed, waiting."""
    trained = after_training_began(history)
    accuracies = {
        "held out": "heldout/accuracy",
        "training": "accuracy",
        "two nearest": "heldout/two_nearest",
        "nearest": "heldout/nearest",
        "most frequent": "heldout/most_frequent",
    } | {name: scalar for scalar, name in ACCURACY_BASELINES.items()}
    of_images = any(series(trained, scalar) for scalar in ACCURACY_BASELINES)
    title = "Accuracy" if of_images else "Accuracy on masked patches"
    accuracy_chart = chart_of(title, trained, accuracies, "accuracy", percent=True)
    average_precisions = {"macro": "heldout/macro_map", "micro": "heldout/micro_map"}
    of_other_labels = [
        chart_of("Mean average precision", trained, average_precisions, "mAP, held out", percent=True),
        chart_of("Explained variance", trained, {"held out": "heldout/r2"}, "R2"),
        chart_of("Mean absolute error", trained, {"held out": "heldout/mae"}, "error"),
    ]
    deviations = {"targets": "target_deviation", "predictions": "prediction_deviation"}
    charts = [
        chart_of("Loss", trained, {"training": "loss", "held out": EVALUATED}, "loss"),
        accuracy_chart,
        *of_other_labels,
        chart_of("Deviation of features over patches", trained, deviations, "deviation"),
        chart_of("Effective rank of the targets", trained, {"targets": "target_rank"}, "effective rank"),
        chart_of("Learning rate", trained, {"learning rate": "optim/lr"}, "learning rate"),
        chart_of("Gradient norm", trained, {"gradient norm": "optim/grad_norm"}, "norm, before clipping", scale="log"),
        chart_of("Speed", trained, {"images/s": "speed/images_per_second"}, "images/s"),
        chart_of("Waiting for data", trained, {"waiting": "speed/data_wait"}, "share of the time", percent=True),
    ]
    blocks: list[Chart | Missing] = [each for each in charts if each]
    if accuracy_chart is None and not any(of_other_labels):
        reason = "this run predicts no colours: see the loss and the features"
        blocks.append(Missing("Accuracy on masked patches", reason))
    if not series(trained, EVALUATED):
        blocks.append(Missing("Held-out figures", "the run has not been evaluated yet"))
    return blocks


def features_of_run(history: History, start: str) -> list[Chart | Missing]:
    """kNN accuracy (without labels: the neighbours' agreement) and effective rank, over steps and by depth.

    Besides, kNN accuracy on general images and the drift since the start, where they were measured.

    Args:
        start: the name of the weights at step 0: see `name_of_start`.
    """
    group, lines = probe_lines(history)
    if not lines:
        return [Missing("kNN, agreement, rank", "not probed (probe.every)")]
    depths = some_depths(lines[-1], group)
    ranks = {f"depth {depth}": f"features/rank/depth_{depth:02d}" for depth in depths}
    charts = [
        *charts_of_probe(history, group, start),
        *charts_of_probe(history, GENERAL_KNN, start),
        chart_of("Effective rank", history, ranks, "effective rank"),
        *charts_of_drift(history),
    ]
    blocks: list[Chart | Missing] = [each for each in charts if each]
    if group == "agreement":
        blocks.append(Missing("kNN accuracy", "the images have no labels"))
    return blocks


def charts_of_probe(history: History, group: str, start: str) -> list[Chart | None]:
    """A probe over steps at some depths, and by depth; none where nothing was probed."""
    lines = lines_with(history, group)
    if not lines:
        return []
    probed = {f"depth {depth}": f"{group}/depth_{depth:02d}" for depth in some_depths(lines[-1], group)}
    title = PROBE_TITLES[group]
    return [
        chart_of(title, history, probed, "share", percent=True),
        chart_by_depth(f"{title} by depth", lines, group, start),
    ]


def some_depths(line: Line, group: str) -> list[int]:
    """The first depth of a probe, one in the middle, the last, and the best."""
    depths = sorted(values_by_depth(line, group))
    best, _ = best_depth(line, group)
    return sorted({depths[0], depths[len(depths) // 2], depths[-1], best})


def charts_of_drift(history: History) -> list[Chart | None]:
    """Movement of the weights since the start, over steps and by depth."""
    lines = lines_with(history, MOVEMENT)
    if not lines:
        return []
    moved = "Movement of the weights since the start"
    last = lines[-1]
    of_stem = {0: last[f"{MOVEMENT}/{STEM}"]} if f"{MOVEMENT}/{STEM}" in last else {}
    moved_by_depth: Lines = {"relative movement": of_stem | values_by_depth(last, MOVEMENT)}
    parts = {"all weights": f"{MOVEMENT}/{ALL_WEIGHTS}", "before the blocks": f"{MOVEMENT}/{STEM}"}
    return [
        chart_of(moved, history, parts, "relative to their norm", percent=True),
        chart_of_lines(f"{moved}, by depth", moved_by_depth, "relative to their norm", "depth (0: before the blocks)"),
    ]


def chart_of_lines(title: str, lines: Lines, label: str, x_label: str) -> Chart:
    """A chart of shares by depth, with its numbers."""
    figure = plot_series(lines, label, percent=True, x_label=x_label)
    return chart(title, figure, chart_table(lines, "depth", percent=True))


def chart_of(
    title: str,
    history: History,
    scalars: dict[str, str],
    label: str,
    scale: str = "linear",
    percent: bool = False,
) -> Chart | None:
    """A chart of scalars over steps, name of the line -> name of the scalar; None where none of them was logged."""
    lines: Lines = {}
    for name, scalar in scalars.items():
        points = [(step, value) for step, value in series(history, scalar) if math.isfinite(value)]
        if points:
            lines[name] = dict(evenly_chosen(points, MAX_POINTS_OF_A_LINE))
    if not lines:
        return None
    figure = plot_series(lines, label, scale, percent)
    return chart(title, figure, chart_table(lines, "steps", percent))


def chart_by_depth(title: str, lines: History, group: str, start: str) -> Chart:
    """A chart of the last probe by depth, with the encoder at step 0, by its name, and pixel colours."""
    first, last = lines[0], lines[-1]
    trained = values_by_depth(last, group)
    curves: Lines = {f"after {counted(int(last['step']), 'step')}": trained}
    if first["step"] == 0 and len(lines) > 1:
        curves[start] = values_by_depth(first, group)
    colors = first.get(f"{group}/floor_pixels")
    if colors is not None:
        curves["pixel colours"] = dict.fromkeys(trained, colors)
    return chart_of_lines(title, curves, "share", "depth (blocks)")


def chart_table(lines: Lines, x_label: str, percent: bool) -> Table:
    """The numbers of a chart at some x values, the last among them: the latest value of each line."""
    x_values = sorted(set().union(*lines.values()))
    rows = []
    for x in evenly_chosen(x_values, MAX_ROWS_OF_A_TABLE):
        values = [latest_value(line, x, percent) for line in lines.values()]
        rows.append([f"{x:g}", *values])
    return Table([x_label, *lines], rows)


def latest_value(line: dict[float, float], x: float, percent: bool) -> str:
    """The value of a line at `x`, or else the last before it."""
    before = [y for place, y in line.items() if place <= x]
    if not before:
        return "-"
    return f"{100 * before[-1]:.1f}%" if percent else f"{before[-1]:.4g}"


def evenly_chosen(values: Sequence, count: int) -> list:
    """At most `count` of these values, evenly, the first and the last among them."""
    indices = np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int)
    return [values[index] for index in np.unique(indices)]
