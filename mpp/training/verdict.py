"""The verdict: one line on how a run is doing, made of its history and its warnings' names."""

from collections.abc import Sequence
from typing import NamedTuple

from mpp.data.overview import FEW_TEST_IMAGES, half_width
from mpp.features.drift import ALL_WEIGHTS, MOVEMENT
from mpp.runtime.messages import counted
from mpp.training.facts import RunFacts
from mpp.training.history import (
    EVALUATED,
    GENERAL_KNN,
    HOUR,
    History,
    best_depth,
    copy_baseline,
    copy_baseline_beaten_since,
    evaluations,
    has_copy_baseline,
    last_logged_step,
    lines_with,
    probe_lines,
    series,
    values_by_depth,
)
from mpp.training.learning_warnings import FEWEST_STEPS
from mpp.training.phases import Phases

ACCURACY_BASELINES = {"heldout/largest_class": "largest class", "heldout/chance": "chance"}
"""Baselines of the accuracy of supervised and of contrastive training, and how they are called."""
ANY_ORDER = "heldout/any_order_of_the_images"
"""Baseline of mAP, of training with several classes an image."""
PROBES = {"knn": "kNN", "agreement": "neighbour agreement", GENERAL_KNN: "kNN"}
PROBED_IMAGES = {"knn": "own images", GENERAL_KNN: "general images"}
"""The images that kNN accuracy is of, by its group of scalars."""
LOSS_FALLS = "held-out loss still falling"
LOSS_FLAT = "held-out loss flat"
LOSS_RISES = "held-out loss rising"
FLAT_LOSS_CHANGE = 0.005  # relative, since the evaluation before
DURATION_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def has_best_features(history: History) -> bool:
    """Whether the last evaluation has the best features so far, by the probe.

    Without a probe: by the held-out accuracy, or the loss where there is none.
    """
    scores = scores_of_features(history)
    lines = evaluations(history)
    if not scores or scores[-1][0] != lines[-1]["step"]:
        return False
    *before, (_, last) = scores
    return all(last > score for _, score in before)


def scores_of_features(history: History) -> list[tuple[int, float]]:
    """(step, score) of the evaluations that are compared to find the best features: see `has_best_features`."""
    lines = evaluations(history)
    group, probed = probe_lines(lines)
    if group:
        return [(int(line["step"]), best_depth(line, group)[1]) for line in probed]
    return [(int(line["step"]), line.get("heldout/accuracy", -line[EVALUATED])) for line in lines]


def verdict(history: History, facts: RunFacts, warnings: Sequence[str] = ()) -> str:
    """A run in one line: prediction, features, trend, cooldown, time left, warnings.

    Of a run that begins from weights, features before and after come first.

    Args:
        warnings: their names.
    """
    phases = Phases(facts.steps, facts.stable)
    done = last_logged_step(history)
    parts = [
        *(sentence.text for sentence in describe_learning(history, begins_from_weights=bool(facts.weights_of))),
        describe_trend(history, facts.moving, phases.cooldown),
        phases.describe_cooldown(done) if phases.lacks_cooldown(done) else "",
        describe_time_left(history, facts),
        describe_shortness(facts.steps),
        describe_few_images(history, facts.evaluated),
    ]
    if warnings:
        parts.append(f"warnings: {', '.join(warnings)}")
    return "; ".join(part for part in parts if part)


def describe_shortness(steps: int) -> str:
    """A remark on a run of too few steps; "" of any other."""
    return f"fewer than {FEWEST_STEPS} steps, too few to evaluate learning" if steps < FEWEST_STEPS else ""


def describe_few_images(history: History, evaluated: int) -> str:
    """A remark on a probe of too few images, with half the 95 % interval of an accuracy of 50 %; "" of any other.

    Args:
        evaluated: images of the probe; 0: unknown.
    """
    group, _ = probe_lines(history)
    if not group or not 0 < evaluated < FEW_TEST_IMAGES:
        return ""
    points = 100 * half_width(evaluated)
    images = counted(evaluated, "held-out image")
    return f"{PROBES[group]} is of only {images} and uncertain by up to {points:.0f} points"


class Sentence(NamedTuple):
    """A part of the verdict."""

    text: str
    """"" where there is nothing to say."""
    is_of_features: bool
    """Whether it is about the features, and not about the prediction."""


def describe_learning(history: History, begins_from_weights: bool) -> list[Sentence]:
    """The prediction, the features on own and on general images, and the drift.

    Args:
        begins_from_weights: whether the run did not begin with random weights. Features then come first.
    """
    prediction = Sentence(describe_prediction(history), is_of_features=False)
    own, general = describe_features(history, begins_from_weights), describe_general(history, begins_from_weights)
    if not begins_from_weights:
        return [prediction, Sentence(own, True), Sentence(general, True)]
    group, _ = probe_lines(history)
    features = [own, general] if group == "knn" else [general, own]
    return [*(Sentence(text, True) for text in (*features, describe_drift(history))), prediction]


def describe_prediction(history: History) -> str:
    """Accuracy, mAP or R2 of the last evaluation with its baselines, or its loss."""
    lines = [line for line in history if EVALUATED in line]
    if not lines:
        return "not evaluated yet"
    last = lines[-1]
    if "heldout/macro_map" in last:
        baselines = {"any order": last[ANY_ORDER]} if ANY_ORDER in last else {}
        return f"held-out mAP {percent(last['heldout/macro_map'])}{in_brackets(baselines)}"
    if "heldout/r2" in last:
        return f"held-out R2 {last['heldout/r2']:.3f}"
    if "heldout/accuracy" not in last:
        return f"held-out loss {last[EVALUATED]:.4g}"
    accuracy = last["heldout/accuracy"]
    if not has_copy_baseline(last):
        baselines = {label: last[name] for name, label in ACCURACY_BASELINES.items() if name in last}
        return f"held-out accuracy {percent(accuracy)}{in_brackets(baselines)}"
    copying = copy_baseline(last)
    since = copy_baseline_beaten_since(history)
    if round(100 * (accuracy - copying), 1) == 0:
        beaten = "matched"
    elif since is None:
        beaten = "not beaten"
    else:
        beaten = f"beaten since step {since}"
    return f"masked-patch accuracy {percent(accuracy)} (copy baseline {percent(copying)}, {beaten})"


def describe_features(history: History, begins_from_weights: bool = False) -> str:
    """The best block's probe on own images, with its baselines; "" where nothing was probed."""
    group, lines = probe_lines(history)
    if not lines or lines[-1]["step"] == 0:
        return ""
    if group == "knn" and begins_from_weights:
        return describe_change(lines, group)
    first, last = lines[0], lines[-1]
    if last.get("agreement/chance", 0) == 1:
        return "too few held-out images to compare neighbours"
    text = describe_probe(lines, group, name_of_start(begins_from_weights))
    ranks = values_by_depth(last, "features/rank")
    if group == "agreement" and ranks:
        deepest = max(ranks)
        text += f", effective rank {ranks[deepest]:.1f}"
        first_rank = values_by_depth(first, "features/rank").get(deepest)
        if first["step"] == 0 and first_rank:
            text += f" ({name_of_start(begins_from_weights)} {first_rank:.1f})"
    return text


def describe_general(history: History, begins_from_weights: bool) -> str:
    """kNN accuracy on general images; "" where it was not probed."""
    lines = lines_with(history, GENERAL_KNN)
    if not lines or lines[-1]["step"] == 0:
        return ""
    if begins_from_weights:
        return describe_change(lines, GENERAL_KNN)
    return f"{PROBED_IMAGES[GENERAL_KNN]}: {describe_probe(lines, GENERAL_KNN, name_of_start(begins_from_weights))}"


def name_of_start(begins_from_weights: bool) -> str:
    """The name of the weights at step 0."""
    return "the start" if begins_from_weights else "random weights"


def describe_probe(lines: History, group: str, start: str) -> str:
    """The best block's probe, with its baselines.

    Args:
        lines: of the probes.
        start: the name of the weights at step 0.
    """
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


def describe_change(lines: History, group: str) -> str:
    """kNN accuracy of the best blocks at the start and now: "own images: kNN 61.2% -> 68.9% at block 4".

    Args:
        lines: of the probes. If the start is not among them, the sentence has only the present accuracy.
    """
    first = lines[0]
    block, value = best_depth(lines[-1], group)
    before = f"{percent(best_depth(first, group)[1])} -> " if first["step"] == 0 else ""
    colours = first.get(f"{group}/floor_pixels")
    baselines = {} if colours is None else {"pixel colours": colours}
    return f"{PROBED_IMAGES[group]}: {PROBES[group]} {before}{percent(value)} at block {block}{in_brackets(baselines)}"


def describe_drift(history: History) -> str:
    """Movement of the weights since the start; "" where it was not measured."""
    moved = series(history, f"{MOVEMENT}/{ALL_WEIGHTS}")
    return f"the weights moved by {percent(moved[-1][1])}" if moved else ""


def describe_trend(history: History, moving: bool, cooldown: int | None = None) -> str:
    """Whether the held-out loss changed by half a percent since the evaluation before; "" where there is none.

    "" too where targets move (see `RunFacts`): they may be easier, or harder, than before.

    Args:
        cooldown: steps that are done when the cooldown begins; None: there is none. The loss falls faster in it,
            whatever more steps would bring: the trend is then that of the evaluations before.
    """
    lines = evaluations(history)
    cooling = bool(lines) and cooldown is not None and lines[-1]["step"] > cooldown
    if cooling:
        lines = [line for line in lines if line["step"] <= cooldown]
    losses = [line[EVALUATED] for line in lines]
    if len(losses) < 2 or moving:
        return ""
    change = (losses[-1] - losses[-2]) / (abs(losses[-2]) or 1)
    trend = LOSS_FLAT
    if change < -FLAT_LOSS_CHANGE:
        trend = LOSS_FALLS
    elif change > FLAT_LOSS_CHANGE:
        trend = LOSS_RISES
    return f"{trend} before the cooldown" if cooling else trend


def describe_time_left(history: History, facts: RunFacts) -> str:
    """Time of the remaining steps and evaluations, at the run's speed so far; "" where it is done, or unknown."""
    hours = series(history, "speed/hours")
    steps_left = facts.steps - last_logged_step(history)
    if steps_left <= 0 or len(hours) < 2:
        return ""
    first_step, first_hours = hours[0]  # which include the time of compiling
    last_step, last_hours = hours[-1]
    seconds_per_step = HOUR * (last_hours - first_hours) / (last_step - first_step)
    return f"{duration(steps_left * seconds_per_step)} left"


def duration(seconds: float) -> str:
    """Seconds in the largest unit that fits, such as "8.3 minutes"."""
    for size, unit in DURATION_UNITS:
        if seconds >= 1.5 * size:
            count = seconds / size
            return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"
    return counted(round(seconds), "second")


def percent(share: float) -> str:
    """A share as "45.3%"."""
    return f"{100 * share:.1f}%"


def in_brackets(baselines: dict[str, float]) -> str:
    """Baselines as " (chance 10.0 %, ...)"; "" if there are none."""
    if not baselines:
        return ""
    listed = ", ".join(f"{name} {percent(share)}" for name, share in baselines.items())
    return f" ({listed})"
