"""The verdict: one line on how a run is doing, of three parts: the prediction, the features, and its progress."""

from collections.abc import Iterable

from mpp.config import TrainingConfig
from mpp.data.overview import FEW_TEST_IMAGES
from mpp.features.drift import ALL_WEIGHTS, MOVEMENT
from mpp.runtime.messages import counted
from mpp.training.branch import NOT_COOLED_DOWN, Phases
from mpp.training.health import FEWEST_STEPS, is_moving
from mpp.training.history import (
    EVALUATED,
    GENERAL_KNN,
    History,
    after_training_began,
    best_depth,
    copy_baseline,
    copy_baseline_beaten_since,
    evaluations,
    has_copy_baseline,
    last_logged_step,
    lines_with,
    probe_lines,
    series,
)

SCORES = {
    "heldout/macro_map": "held-out mAP",
    "heldout/r2": "held-out R2",
    "heldout/accuracy": "held-out accuracy",
    EVALUATED: "held-out loss",
}
"""Scalars by which an evaluation is described, the first that it has, and how they are called."""
SHARES = ("heldout/macro_map", "heldout/accuracy")
ACCURACY_BASELINES = {"heldout/largest_class": "largest class", "heldout/chance": "chance"}
"""Baselines of the accuracy of supervised and of contrastive training, and how they are called."""
BASELINES = ACCURACY_BASELINES | {"heldout/any_order_of_the_images": "any order"}
PROBES = {"knn": "kNN", "agreement": "neighbour agreement", GENERAL_KNN: "kNN of general images"}
LOSS_FALLS = "held-out loss still falling"
LOSS_FLAT = "held-out loss flat"
LOSS_RISES = "held-out loss rising"
FLAT_LOSS_CHANGE = 0.005  # relative, since the evaluation before


def verdict(history: History, config: TrainingConfig, warnings: Iterable[str] = (), probed: int = 0) -> str:
    """A run in one line.

    Args:
        warnings: their names.
        probed: see `describe_features`.
    """
    steps = config.run.steps
    phases = Phases(steps, config.optim.stable_steps(steps))
    parts = [
        describe_prediction(history),
        describe_features(history, begins_from_weights(config), probed),
        describe_trend(history, is_moving(config), phases.cooldown),
        NOT_COOLED_DOWN if phases.lacks_cooldown(last_logged_step(history)) else "",
        describe_shortness(steps),
        ", ".join(warnings) and f"warnings: {', '.join(warnings)}",
    ]
    return "; ".join(part for part in parts if part)


def begins_from_weights(config: TrainingConfig) -> bool:
    """Whether a run did not begin with random weights."""
    return config.model is not None and config.model.init_from is not None


def describe_prediction(history: History) -> str:
    """Accuracy, mAP, R2 or loss of the last evaluation, with its baselines."""
    lines = evaluations(history)
    if not lines:
        return "not evaluated yet"
    last = lines[-1]
    if has_copy_baseline(last):
        return describe_copying(history, last["heldout/accuracy"], copy_baseline(last))
    name = next(name for name in SCORES if name in last)
    score = percent(last[name]) if name in SHARES else f"{last[name]:.4g}"
    baselines = {label: last[baseline] for baseline, label in BASELINES.items() if baseline in last}
    return f"{SCORES[name]} {score}{in_brackets(baselines)}"


def describe_copying(history: History, accuracy: float, copying: float) -> str:
    """Accuracy on masked patches, next to that of copying the nearest visible ones."""
    since = copy_baseline_beaten_since(history)
    beaten = "not beaten" if since is None else f"beaten since step {since}"
    if percent(accuracy) == percent(copying):
        beaten = "matched"
    return f"masked-patch accuracy {percent(accuracy)} (copy baseline {percent(copying)}, {beaten})"


def describe_features(history: History, from_weights: bool, probed: int = 0) -> str:
    """The best block's probe on own and on general images, with baselines, and how far the weights have moved.

    Args:
        from_weights: whether the run began from weights.
        probed: own images that are probed; 0: unknown. An accuracy on few is uncertain.
    """
    start = name_of_start(from_weights)
    own, _ = probe_lines(history)
    parts = [describe_probe(history, group, start) for group in (own, GENERAL_KNN)]
    if parts[0] and has_few_images(probed):
        parts[0] += f" on only {counted(probed, 'image')}"
    moved = series(history, f"{MOVEMENT}/{ALL_WEIGHTS}")
    if moved:
        parts.append(f"the weights moved by {percent(moved[-1][1])}")
    return ", ".join(part for part in parts if part)


def name_of_start(from_weights: bool) -> str:
    """The name of the weights at step 0."""
    return "the start" if from_weights else "random weights"


def has_few_images(probed: int) -> bool:
    """Whether a probe is of so few images that its accuracy is uncertain by 10 points or more."""
    return 0 < probed < FEW_TEST_IMAGES


def describe_probe(history: History, group: str, start: str) -> str:
    """The best block's probe, with its baselines; "" where nothing was probed since training began.

    Args:
        group: of scalars by depth.
        start: the name of the weights at step 0.
    """
    lines = lines_with(history, group)
    if not after_training_began(lines):
        return ""
    first, last = lines[0], lines[-1]
    block, value = best_depth(last, group)
    baselines = {}
    if first["step"] == 0:
        baselines[start] = best_depth(first, group)[1]
        if f"{group}/floor_pixels" in first:
            baselines["pixel colours"] = first[f"{group}/floor_pixels"]
    if f"{group}/chance" in last:
        baselines["chance"] = last[f"{group}/chance"]
    return f"{PROBES[group]} {percent(value)} at block {block}{in_brackets(baselines)}"


def describe_trend(history: History, moving: bool, cooldown: int | None = None) -> str:
    """Whether the held-out loss changed by half a percent since the evaluation before; "" where there is none.

    Args:
        moving: whether targets move: they may be easier, or harder, than before, and there is no trend.
        cooldown: steps that are done when the cooldown begins; None: there is none. The loss falls faster in it,
            whatever more steps would bring: the trend is then that of the evaluations before.
    """
    lines = evaluations(history)
    before = [line for line in lines if cooldown is None or line["step"] <= cooldown]
    losses = [line[EVALUATED] for line in before]
    if len(losses) < 2 or moving:
        return ""
    change = (losses[-1] - losses[-2]) / (abs(losses[-2]) or 1)
    trend = LOSS_FLAT
    if change < -FLAT_LOSS_CHANGE:
        trend = LOSS_FALLS
    elif change > FLAT_LOSS_CHANGE:
        trend = LOSS_RISES
    return trend if len(before) == len(lines) else f"{trend} before the cooldown"


def describe_shortness(steps: int) -> str:
    """A remark on a run of too few steps; "" of any other."""
    return f"fewer than {FEWEST_STEPS} steps, too few to evaluate learning" if steps < FEWEST_STEPS else ""


def has_best_features(history: History) -> bool:
    """Whether the last evaluation has the best features so far, by the probe.

    Without a probe: by the held-out accuracy, or the loss where there is none.
    """
    lines = evaluations(history)
    group, probed = probe_lines(lines)
    if group:
        scores = {line["step"]: best_depth(line, group)[1] for line in probed}
    else:
        scores = {line["step"]: line.get("heldout/accuracy", -line[EVALUATED]) for line in lines}
    last = scores.pop(last_logged_step(lines), None)
    return last is not None and all(last > before for before in scores.values())


def percent(share: float) -> str:
    """A share as "45.3%"."""
    return f"{100 * share:.1f}%"


def in_brackets(baselines: dict[str, float]) -> str:
    """Baselines as " (chance 10.0 %, ...)"; "" if there are none."""
    listed = ", ".join(f"{name} {percent(share)}" for name, share in baselines.items())
    return f" ({listed})" if listed else ""
