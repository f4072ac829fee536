"""What a run logged as charts with their numbers: histories in, blocks of a page out."""

from collections.abc import Sequence

import numpy as np

from evaluation.figures import plot_series
from evaluation.pages.page import Chart, Table, chart
from mpp.training.history import (
    EVALUATED,
    History,
    after_training_began,
    best_depth,
    probe_lines,
    series,
    values_by_depth,
)

POINTS = 200  # of a line, at most: more would not be seen
ROWS = 12  # of a table
Lines = dict[str, tuple[Sequence[float], Sequence[float]]]


def curves_of_run(history: History, missing: dict[str, str]) -> list[Chart]:
    """Loss, accuracy with its baselines, a teacher's targets, learning rate, gradient norm, speed, waiting."""
    later = after_training_began(history)
    trivial = {"two nearest": "two_nearest", "nearest": "nearest", "most frequent": "most_frequent"}
    accuracy = {"held out": "heldout/accuracy", "training": "accuracy"}
    accuracy |= {name: f"heldout/{each}" for name, each in trivial.items()}
    deviations = {"targets": "target_deviation", "predictions": "prediction_deviation"}
    charts = [
        drawn("Loss", later, {"training": "loss", "held out": EVALUATED}, "loss"),
        drawn("Accuracy on masked patches", later, accuracy, "accuracy", percent=True),
        drawn("How far features spread over patches", later, deviations, "deviation"),
        drawn("Effective rank of the targets", later, {"targets": "target_rank"}, "effective rank"),
        drawn("Learning rate", later, {"learning rate": "optim/lr"}, "learning rate"),
        drawn("Gradient norm", later, {"gradient norm": "optim/grad_norm"}, "norm, before clipping", scale="log"),
        drawn("Speed", later, {"images/s": "speed/images_per_second"}, "images/s"),
        drawn("Waiting for data", later, {"waiting": "speed/data_wait"}, "share of the time", percent=True),
    ]
    if charts[1] is None:
        missing["Accuracy on masked patches"] = "this run predicts no colours: look at the loss and at the features"
    if not series(later, EVALUATED):
        missing["Held-out figures"] = "the run has not been evaluated yet"
    return [each for each in charts if each]


def features_of_run(history: History, missing: dict[str, str]) -> list[Chart]:
    """kNN accuracy (without labels: the neighbours' agreement) and rank, while training and by depth."""
    group, lines = probe_lines(history)
    if not lines:
        missing["kNN, agreement, rank"] = "nothing was probed (probe.every)"
        return []
    title = {"knn": "kNN accuracy", "agreement": "Neighbours that agree between two crops"}[group]
    if group == "agreement":
        missing["kNN accuracy"] = "the images have no labels"
    depths = sorted(values_by_depth(lines[-1], group))
    few = sorted({depths[0], depths[len(depths) // 2], depths[-1], best_depth(lines[-1], group)[0]})
    names = {f"depth {depth}": f"{group}/depth_{depth:02d}" for depth in few}
    ranks = {f"depth {depth}": f"features/rank/depth_{depth:02d}" for depth in few}
    charts = [
        drawn(title, history, names, "share", percent=True),
        by_depth(f"{title} by depth", lines, group),
        drawn("Effective rank", history, ranks, "effective rank"),
    ]
    return [each for each in charts if each]


def drawn(
    title: str, history: History, names: dict[str, str], label: str, scale: str = "linear", percent: bool = False
) -> Chart | None:
    """Scalars against updates; None where none of them was logged."""
    lines: Lines = {}
    for name, scalar in names.items():
        pairs = [(step, value) for step, value in series(history, scalar) if np.isfinite(value)]
        if pairs:
            kept = np.unique(np.linspace(0, len(pairs) - 1, min(POINTS, len(pairs))).round().astype(int))
            lines[name] = tuple(zip(*(pairs[i] for i in kept), strict=True))
    if not lines:
        return None
    return chart(title, lambda: plot_series(lines, label, scale, percent), numbers_of(lines, "updates", percent))


def by_depth(title: str, lines: History, group: str) -> Chart:
    """The last probe against depth, beside the untrained encoder and colours."""
    last, first = values_by_depth(lines[-1], group), lines[0]
    shown: Lines = {f"after {int(lines[-1]['step'])} updates": (list(last), list(last.values()))}
    if first["step"] == 0 and len(lines) > 1:
        before = values_by_depth(first, group)
        shown["before training"] = (list(before), list(before.values()))
    floor = first.get(f"{group}/floor_pixels")
    if floor is not None:
        shown["colours alone"] = (list(last), [floor] * len(last))
    numbers = numbers_of(shown, "depth", percent=True)
    return chart(title, lambda: plot_series(shown, "share", percent=True, across="depth (blocks)"), numbers)


def numbers_of(lines: Lines, across: str, percent: bool) -> Table:
    """A table of a chart's numbers: at some places, the last among them, what each line had last."""
    places = sorted({step for steps, _ in lines.values() for step in steps})
    kept = [places[i] for i in np.unique(np.linspace(0, len(places) - 1, min(ROWS, len(places))).round().astype(int))]

    def said(place: float, steps: Sequence[float], values: Sequence[float]) -> str:
        before = [value for step, value in zip(steps, values, strict=True) if step <= place]
        return "-" if not before else f"{100 * before[-1]:.1f} %" if percent else f"{before[-1]:.4g}"

    rows = [[f"{place:g}", *(said(place, *line) for line in lines.values())] for place in kept]
    return Table([across, *lines], rows)
