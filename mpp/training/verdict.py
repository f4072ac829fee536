"""The verdict: one line on how a run is doing, of three parts: the prediction, the features, and its progress.

After each evaluation a run prints it, with each warning that is new; verdict.json has it, with all warnings.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mpp.config import TrainingConfig
from mpp.features.probe import GENERAL_KNN, PIXEL_COLOURS
from mpp.models.descriptions import saved_config
from mpp.runtime.files import read_json, write_complete
from mpp.runtime.weights import BEST
from mpp.training.health import FEWEST_STEPS, find_warnings
from mpp.training.history import (
    EVALUATED,
    History,
    Line,
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
from mpp.training.log import Tracker, read_history
from mpp.training.task import ImageTask

VERDICT = "verdict.json"
BETWEEN_PARTS = "; "
"""Between the parts of a verdict."""
SCORE_TEXTS = {
    "heldout/macro_map": "held-out mAP {:.1%}",
    "heldout/r2": "held-out R2 {:.4g}",
    "heldout/accuracy": "held-out accuracy {:.1%}",
    EVALUATED: "held-out loss {:.4g}",
}
"""Scalars by which an evaluation is described, by the first that it has."""
ACCURACY_BASELINES = {"heldout/largest_class": "largest class", "heldout/chance": "chance"}
"""Baselines of the accuracy of supervised and of contrastive training, and how they are called."""
BASELINES = ACCURACY_BASELINES | {"heldout/any_order_of_the_images": "any order"}
PROBES = {"knn": "kNN", "agreement": "neighbour agreement", GENERAL_KNN: "kNN of general images"}
LOSS_FALLS = "held-out loss still falling"
NOT_COOLED_DOWN = "not cooled down yet"
TOO_SHORT = f"fewer than {FEWEST_STEPS} steps, too few to evaluate learning"
FLAT_LOSS_CHANGE = 0.005  # relative, since the evaluation before


@dataclass
class Watch:
    """Reports how a run is doing while it trains, on the main process."""

    task: ImageTask
    tracker: Tracker
    config: TrainingConfig

    def warn_of_settings(self) -> None:
        """Print the warnings that follow from the settings, before the first step."""
        if self.tracker.accelerator.is_main_process:
            print_warnings(find_warnings([], self.config))

    def report(self, step: int) -> None:
        """Report how the run is doing after an evaluation that is logged. An error in here does not end the run."""
        if not self.tracker.accelerator.is_main_process:
            return
        try:
            self.write_verdict(step)
        except Exception as error:
            print_warnings({f"no verdict after step {step}": f"{type(error).__name__}: {error}"})

    def write_verdict(self, step: int) -> None:
        """The verdict and the new warnings, to the console, TensorBoard and verdict.json."""
        folder = self.tracker.folder
        history = read_history(folder)
        warnings = find_warnings(history, self.config)
        since = dict.fromkeys(find_warnings([], self.config), 0)
        since |= {each["check"]: each["step"] for each in read_verdict(folder).get("warnings", [])}
        print_warnings({name: message for name, message in warnings.items() if name not in since})
        line = verdict(history, self.config, warnings)
        tqdm.write(f"step {step} of {self.config.run.steps}: {line}")
        self.tracker.log_text(step, "verdict", line)
        saved = {
            "model": self.task.describe_model(),
            "images": self.task.describe_images(),
            "step": step,
            "line": line,
            "warnings": [
                {"check": name, "step": since.get(name, step), "message": message} for name, message in warnings.items()
            ],
        }
        write_complete(folder / VERDICT, json.dumps(saved, indent=1))

    def is_best(self) -> bool:
        """Whether the evaluation that was logged last has better features than the encoder that is kept as the best."""
        folder, probe = self.tracker.folder, self.config.probe
        kept = saved_config(folder / BEST).get("step")
        lines = evaluations(read_history(folder))
        of_kept = next((line for line in lines if line["step"] == kept), None)
        return has_better_features(lines[-1], of_kept, bool(probe and probe.every))


def print_warnings(warnings: dict[str, str]) -> None:
    """Print warnings, name -> message, above the progress bar."""
    for name, message in warnings.items():
        tqdm.write(f"warning: {name}: {message}", file=sys.stderr)


def read_verdict(folder: Path) -> dict[str, Any]:
    """A run's latest verdict: `model`, `images`, `step`, `line`, `warnings`; {} if there is none."""
    return read_json(folder / VERDICT)


def verdict(history: History, config: TrainingConfig, warnings: Iterable[str] = ()) -> str:
    """A run in one line.

    Args:
        warnings: their names.
    """
    steps = config.run.steps
    stable = config.optim.stable_steps(steps)
    cooled_down = stable is None or stable < steps <= last_logged_step(history)
    start = name_of_start(config.model and config.model.init_from)
    probes = [describe_probe(history, group, start) for group in PROBES]
    parts = [
        describe_prediction(history),
        ", ".join(filter(None, probes)),
        describe_trend(history, config.moves_teacher, stable),
        "" if cooled_down else NOT_COOLED_DOWN,
        TOO_SHORT if steps < FEWEST_STEPS else "",
        ", ".join(warnings) and f"warnings: {', '.join(warnings)}",
    ]
    return BETWEEN_PARTS.join(filter(None, parts))


# --- the prediction ---


def describe_prediction(history: History) -> str:
    """Accuracy, mAP, R2 or loss of the last evaluation, with its baselines."""
    lines = evaluations(history)
    if not lines:
        return "not evaluated yet"
    last = lines[-1]
    if has_copy_baseline(last):
        accuracy, copying = f"{last['heldout/accuracy']:.1%}", f"{copy_baseline(last):.1%}"
        since = copy_baseline_beaten_since(history)
        beaten = "not beaten" if since is None else f"beaten since step {since}"
        return f"masked-patch accuracy {accuracy} (copy baseline {copying}, {beaten})"
    score = next(name for name in SCORE_TEXTS if name in last)
    return SCORE_TEXTS[score].format(last[score]) + in_brackets({BASELINES[name]: last.get(name) for name in BASELINES})


def in_brackets(baselines: dict[str, float | None]) -> str:
    """The baselines that are known as " (chance 10.0%, ...)"; "" if there are none."""
    listed = ", ".join(f"{name} {share:.1%}" for name, share in baselines.items() if share is not None)
    return f" ({listed})" if listed else ""


# --- the features ---


def name_of_start(init_from: str | None) -> str:
    """The name of the weights at step 0, by `model.init_from`."""
    return "the start" if init_from else "random weights"


def describe_probe(history: History, group: str, start: str) -> str:
    """The best block's probe, with its baselines; "" where nothing was probed since training began.

    Args:
        group: of scalars by depth.
        start: the name of the weights at step 0.
    """
    lines = lines_with(history, group)
    if not lines or lines[-1]["step"] == 0:
        return ""
    first, last = lines[0], lines[-1]
    block, value = best_depth(last, group)
    baselines = {
        start: best_depth(first, group)[1] if first["step"] == 0 else None,
        "pixel colours": first.get(f"{group}/{PIXEL_COLOURS}"),
        "chance": last.get(f"{group}/chance"),
    }
    return f"{PROBES[group]} {value:.1%} at block {block}{in_brackets(baselines)}"


def has_better_features(line: Line, kept: Line | None, is_probed: bool) -> bool:
    """Whether an evaluation has better features than the one whose encoder is kept; None: there is none.

    Args:
        is_probed: whether the run probes: then by the probe, which not every evaluation has; otherwise by the score.
    """
    score = score_of_features(line, is_probed)
    of_kept = None if kept is None else score_of_features(kept, is_probed)
    return score is not None and (of_kept is None or score > of_kept)


def score_of_features(line: Line, is_probed: bool) -> float | None:
    """The accuracy of an evaluation's probe, None without one; or the first of SCORE_TEXTS, the greater the better."""
    if is_probed:
        group, probed = probe_lines([line])
        return best_depth(line, group)[1] if probed else None
    name = next(name for name in SCORE_TEXTS if name in line)
    return -line[name] if name == EVALUATED else line[name]


# --- its progress ---


def describe_trend(history: History, moving: bool, stable: int | None = None) -> str:
    """Whether the held-out loss changed by half a percent since the evaluation before; "" where there is none.

    Args:
        moving: whether targets move: they may be easier, or harder, than before, and there is no trend.
        stable: steps up to the cooldown; None: there is none. The loss falls faster in it, whatever more steps would
            bring: the trend is then that of the evaluations before.
    """
    losses = series(history, EVALUATED)
    before = [loss for step, loss in losses if stable is None or step <= stable]
    if len(before) < 2 or moving:
        return ""
    change, flat = before[-1] - before[-2], FLAT_LOSS_CHANGE * abs(before[-2])
    trend = "held-out loss flat"
    if abs(change) > flat:
        trend = "held-out loss rising" if change > 0 else LOSS_FALLS
    return trend if len(before) == len(losses) else f"{trend} before the cooldown"
