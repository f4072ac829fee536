"""A run in a line, for a person: histories of scalars in, words out. What is off is of mpp/training/health.py."""

from collections.abc import Sequence
from statistics import median

from mpp.training.health import (
    COPYING,
    EVALUATED,
    RECENT,
    Facts,
    History,
    beaten_since,
    best_depth,
    depths_of,
    probed,
    series,
    trained,
)

BESIDE = {"heldout/largest_class": "the largest class has", "heldout/chance": "by chance"}
"""What the accuracy of supervised and of contrastive training is beside."""


def is_best(history: History) -> bool:
    """Whether the features were never better than at the last evaluation: by the probe; by the held-out accuracy, or
    loss, where nothing is probed."""
    lines = [line for line in trained(history) if EVALUATED in line]
    group, of_probe = probed(lines)
    if group:
        if of_probe[-1] is not lines[-1]:
            return False
        values = [best_depth(line, group)[1] for line in of_probe]
    else:
        values = [line.get("heldout/accuracy", -line[EVALUATED]) for line in lines]
    return bool(values) and values[-1] > max(values[:-1], default=float("-inf"))


def verdict(history: History, facts: Facts, off: Sequence[str] = ()) -> str:
    """A run in a line, for a person: what it predicts, what its features know, where it goes, how long it takes yet.

    Args:
        off: names of what is off.
    """
    parts = [
        prediction_said(history),
        features_said(history),
        trend_said(history, facts.moving),
        time_left_said(history, facts),
    ]
    if off:
        parts.append(f"look at: {', '.join(off)}")
    return "; ".join(part for part in parts if part)


def prediction_said(history: History) -> str:
    """How well what was hidden is predicted, beside copying the neighbours."""
    last = next((line for line in reversed(history) if EVALUATED in line), None)
    if last is None:
        return "not evaluated yet"
    if "heldout/accuracy" not in last:
        return f"held-out loss {last[EVALUATED]:.4g}"
    accuracy = f"held-out accuracy {last['heldout/accuracy']:.1%}"
    if COPYING[1] not in last:
        beside = [f"{said} {last[name]:.1%}" for name, said in BESIDE.items() if name in last]
        return f"{accuracy} ({', '.join(beside)})" if beside else accuracy
    copying = max(last[name] for name in COPYING)
    points = round(100 * (last["heldout/accuracy"] - copying), 1)
    if points == 0:
        return f"{accuracy} on masked patches, as good as copying neighbours ({copying:.1%})"
    since = beaten_since(history)
    if since is None:
        return f"{accuracy} on masked patches, {-points:.1f} points worse than copying neighbours ({copying:.1%})"
    return (
        f"{accuracy} on masked patches, {points:.1f} points better than copying neighbours ({copying:.1%}) since step "
        f"{since}"
    )


def features_said(history: History) -> str:
    """What the features know, beside the untrained encoder and colours; nothing where nothing was probed."""
    group, lines = probed(history)
    if not lines or lines[-1]["step"] == 0:
        return ""
    depth, value = best_depth(lines[-1], group)
    said = {"knn": "features: kNN", "agreement": "features: neighbours of two crops agree"}[group]
    said = f"{said} {value:.1%} at depth {depth}"
    beside = {}
    if lines[0]["step"] == 0:
        beside["before training"] = best_depth(lines[0], group)[1]
        if f"{group}/floor_pixels" in lines[0]:
            beside["colours alone"] = lines[0][f"{group}/floor_pixels"]
    if f"{group}/chance" in lines[-1]:
        beside["by chance"] = lines[-1][f"{group}/chance"]
    if beside:
        said += f" ({', '.join(f'{name} {number:.1%}' for name, number in beside.items())})"
    rank = max(depths_of(lines[-1], "features/rank").items(), default=None)
    if group == "agreement" and rank:
        before = depths_of(lines[0], "features/rank").get(rank[0]) if lines[0]["step"] == 0 else None
        said += f", rank {rank[1]:.1f}" + (f" (before training {before:.1f})" if before else "")
    return said


def trend_said(history: History, moving: bool = False) -> str:
    """Whether the held-out loss still falls, by at least half a percent since the evaluation before.

    Nothing where targets move (see `Facts`): they may be easier, or harder, than before.
    """
    losses = [value for _, value in series(trained(history), EVALUATED)]
    if len(losses) < 2 or moving:
        return ""
    change = (losses[-1] - losses[-2]) / (abs(losses[-2]) or 1)
    return "still improving" if change < -0.005 else "getting worse" if change > 0.005 else "hardly changing"


def time_left_said(history: History, facts: Facts) -> str:
    """How long the rest takes at the speed of the latest logged updates."""
    speeds = [speed for _, speed in series(history, "speed/images_per_second")][-RECENT:]
    left = facts.steps - (int(history[-1]["step"]) if history else 0)
    if left <= 0 or not speeds:
        return ""
    return f"{duration(left * facts.images / median(speeds))} left"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}" if seconds < 10 * size else f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds"
