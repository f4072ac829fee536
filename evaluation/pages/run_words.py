"""Sentences of a page on a run: its training, the verdict, and next steps."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from evaluation.frozen.run_images import CLASSIFIERS, config_class_of
from evaluation.pages.about import duration
from evaluation.pages.page import Link, Section
from evaluation.pages.run_sections import COMMANDS, begins_from_weights
from mpp.config import TrainingConfig
from mpp.config.parsing import parse_saved
from mpp.errors import UserError
from mpp.training.checkpoint import kept_steps
from mpp.training.history import (
    DEVICE_HOURS,
    HOUR,
    PFLOP,
    History,
    after_training_began,
    best_depth,
    last_logged_step,
    last_value,
    probe_lines,
    series,
    values_by_depth,
)
from mpp.training.run_folder import CONFIG_FILE, read_record, saved_settings
from mpp.training.verdict import (
    BETWEEN_PARTS,
    LOSS_FALLS,
    NOT_COOLED_DOWN,
    PROBES,
    name_of_start,
    read_verdict,
)

MIN_GAIN_OVER_BASELINES = 0.03  # in accuracy
MIN_GAIN_OVER_LAST_DEPTH = 0.01  # in accuracy


def subtitle(folder: Path, history: History) -> str:
    """The model, its training, its images, and how long it was trained."""
    settings = saved_settings(folder)
    record = read_record(folder)
    model = read_verdict(folder).get("model") or settings["model"].get("name") or "a ViT"
    train_images = record["train"].get("images")
    path = settings["data"].get("path") or "mpp's birds"
    images = f"{train_images:,} images" if isinstance(train_images, int) else "images"
    training = f"{describe_method(settings)} on {images} of {path}"
    held_out_images = record["held_out"].get("images")
    if held_out_images:
        training += f" ({held_out_images:,} held out)"
    parts = [str(model), training, describe_progress(settings, history, train_images)]
    hours = last_value(history, "speed/hours")
    if hours:
        parts.append(f"{duration(HOUR * hours)} of training, with its evaluations")
    parts.append(describe_cost(history))
    return "; ".join(part for part in parts if part)


def describe_method(settings: dict[str, Any]) -> str:
    """The objective and the network of a pre-training run; "trained" for any other."""
    objective = settings["objective"].get("name")
    if not objective:
        return "trained"
    network = settings["network"].get("name", "predictor")
    return f"pre-trained by {objective} ({network})"


def describe_progress(settings: dict[str, Any], history: History, train_images: int | None) -> str:
    """Steps done, the batch size, and how often each image was seen, as far as they are known."""
    step = last_logged_step(history)
    steps = settings["run"].get("steps")
    batch_size = settings["optim"].get("global_batch_size")
    progress = f"{step:,} of {steps:,} steps" if isinstance(steps, int) else f"{step:,} steps"
    if batch_size and train_images:
        epochs = step * batch_size / train_images
        progress += f" of {batch_size} images, each image seen {epochs:.3g} times"
    return progress


def verdict_points(folder: Path, history: History, sections: Sequence[Section]) -> list[tuple[str, Link | None]]:
    """Sentences of the verdict, each with a link to the section of the page that shows it."""
    steps = saved_settings(folder)["run"].get("steps")
    done = last_logged_step(history)
    finished = not isinstance(steps, int) or done >= steps
    unfinished = [] if finished else [f"The run is not finished: it logged {done:,} of {steps:,} steps"]
    parts = read_verdict(folder).get("line", "").split(BETWEEN_PARTS)
    parts = [part for part in parts if part and not part.startswith("warnings")]  # which have a place of their own
    names = {section.name for section in sections}
    points: list[tuple[str, Link | None]] = []
    for sentence in [*unfinished, *parts]:
        name = "features" if sentence.startswith(tuple(PROBES.values())) else "curves"
        evidence = Link("why", f"#{name}") if name in names else None
        points.append((capitalized(sentence), evidence))
    for advice in next_steps(folder, history, finished, parts):
        points.append((f"Next: {advice}", None))
    return points


def capitalized(sentence: str) -> str:
    """The sentence with a capital letter, unless it begins with the name kNN."""
    if sentence.startswith("kNN"):
        return sentence
    return sentence[0].upper() + sentence[1:]


def next_steps(folder: Path, history: History, finished: bool, parts: Sequence[str]) -> list[str]:
    """Advice on how to continue.

    Args:
        parts: of the verdict.
    """
    if not finished:
        return ["the command that started the run continues it"]
    advice = []
    if any(part.startswith(LOSS_FALLS) for part in parts):
        falls = "still falls" if LOSS_FALLS in parts else "was still falling before the cooldown"
        advice.append(f"train longer, since the held-out loss {falls}: {advice_to_train_longer(folder)}")
    elif NOT_COOLED_DOWN in parts:
        advice.append(f"cool down before the features are compared, or train longer: {advice_to_train_longer(folder)}")
    if config_class_of(saved_settings(folder)) in CLASSIFIERS:
        return [*advice, f"predict new images: mpp predict --classifier {folder} --data.path NEW_IMAGES"]
    advice += advice_on_features(folder, history)
    if advice:
        return advice
    return [f"evaluate the features with labels (mpp fewshot --encoder {folder}), or fine-tune (mpp finetune)"]


def advice_to_train_longer(folder: Path) -> str:
    """The command that continues a finished run, by its schedule."""
    config_class = config_class_of(saved_settings(folder))
    with suppress(UserError):
        if config_class in COMMANDS:
            return describe_growth(parse_saved(config_class, folder / CONFIG_FILE), folder)
    return "raise run.steps"  # its config.yaml is not one of today's


def advice_on_features(folder: Path, history: History) -> list[str]:
    """Advice drawn from the probe: features hardly above their baselines, or best before the last depth."""
    group, lines = probe_lines(history)
    trained_lines = after_training_began(lines)
    if not trained_lines:
        return []
    advice = []
    first, last = lines[0], trained_lines[-1]
    depth, accuracy = best_depth(last, group)
    if first["step"] == 0:
        _, first_accuracy = best_depth(first, group)
        baseline = max(first_accuracy, first.get(f"{group}/floor_pixels", 0))
        start = name_of_start(begins_from_weights(folder))
        if baseline + MIN_GAIN_OVER_BASELINES >= 1:
            advice.append(
                f"the probe is saturated: {start} or pixel colours already reach {baseline:.1%}, so it cannot "
                "tell features apart; evaluate with harder labels (--data.path, --data.label_column)"
            )
        elif accuracy < baseline + MIN_GAIN_OVER_BASELINES:
            advice.append(
                f"the features are hardly better than {start} or pixel colours: more images, more steps "
                f"or another objective; they may still fine-tune well (mpp finetune --encoder {folder})"
            )
    by_depth = values_by_depth(last, group)
    if accuracy >= by_depth[max(by_depth)] + MIN_GAIN_OVER_LAST_DEPTH:
        advice.append(f"use depth {depth}, which is better than the last (mpp fewshot --encoder {folder} --depth dev)")
    return advice


def describe_cost(history: History) -> str:
    """PFLOP and device-hours of a run so far, such as "0.12 PFLOP, 1.5 device-hours"; "" where neither was logged."""
    costs = {"PFLOP": series(history, PFLOP), "device-hours": series(history, DEVICE_HOURS)}
    return ", ".join(f"{values[-1][1]:.3g} {unit}" for unit, values in costs.items() if values)


def describe_growth(config: TrainingConfig, folder: Path) -> str:
    """The way to continue a finished run, in a line.

    Args:
        config: the run's, resolved.
    """
    if config.is_fine_tuning:
        return "the same command with a larger run.steps and another run.dir"
    steps = config.run.steps
    stable = config.optim.stable_steps(steps)
    if stable not in kept_steps(folder):
        return (
            f"another run from this encoder (--model.init_from {quote(str(folder))}); optim.schedule wsd can continue"
        )
    branch = f"--run.branch_from {quote(f'{folder}@{stable}')} --run.dir NEW --optim.schedule wsd --run.steps N"
    same_folder = "the same command with a larger run.steps; cooled down: " if stable == steps else ""
    return f"{same_folder}{branch}"
