"""The words of pages about a run: settings, versions, machine, its training, the verdict, and next steps."""

import platform
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import mpp
from evaluation.config import ContrastiveConfig, SupervisedConfig
from evaluation.frozen.run_images import CLASSIFIERS, config_class_of
from evaluation.pages.page import Block, Link, Table, Text
from mpp.config import Config, TrainingConfig, as_words, flatten
from mpp.config.imports import COPIES, OPTION, files_in, name_of_import
from mpp.config.parsing import as_command_line, parse_saved
from mpp.errors import UserError
from mpp.runtime.hardware import cores, uses_gpu
from mpp.training.checkpoint import kept_steps
from mpp.training.history import (
    PFLOP,
    History,
    after_training_began,
    best_depth,
    last_logged_step,
    last_value,
    probe_lines,
    values_by_depth,
)
from mpp.training.run_folder import CONFIG_FILE, recorded_commit, saved_settings
from mpp.training.verdict import BETWEEN_PARTS, LOSS_FALLS, NOT_COOLED_DOWN, PROBES, name_of_start, read_verdict

LIBRARIES = ("torch", "timm", "accelerate", "datasets", "numpy")
SETTINGS_NOT_SHOWN = ("run.dir", "run.precision")  # where precision is not set, it depends on the machine
COMMANDS = {Config: "pretrain", ContrastiveConfig: "contrastive", SupervisedConfig: "supervised"}
BIRDS = "mpp's birds"
NO_VERDICT = "the run was not evaluated, or verdict.json is gone"
MIN_GAIN_OVER_BASELINES = 0.03  # in accuracy
MIN_GAIN_OVER_LAST_DEPTH = 0.01  # in accuracy


# --- settings, versions, machine ---


def changed_settings_shown(config: Any) -> dict[str, Any]:
    """Setting -> value where it is not the default, without SETTINGS_NOT_SHOWN."""
    defaults = type(config)()
    steps = config.run.steps
    default_values = flatten(replace(defaults, optim=defaults.optim.resolved(steps)))
    values = flatten(replace(config, optim=config.optim.resolved(steps)))
    return {
        key: value for key, value in values.items() if value != default_values[key] and key not in SETTINGS_NOT_SHOWN
    }


def settings_blocks(folder: Path) -> list[Block]:
    """Settings that differ from the defaults, and the command that repeats the run."""
    text = (folder / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
    config_class = config_class_of(saved_settings(folder))
    if config_class is None:
        return [Text(text, code=True)]
    try:
        config = parse_saved(config_class, folder / CONFIG_FILE)
    except UserError as error:
        return [Text(f"{CONFIG_FILE} is from another version of mpp: {error}"), Text(text, code=True)]
    rows = [[key, as_words(value)] for key, value in changed_settings_shown(config).items()]
    blocks: list[Block] = [Table(["setting", "value"], rows, "Settings that differ from the defaults")]
    if config_class in COMMANDS:
        blocks.append(Text(command_to_repeat(config, folder), code=True))
    return [*blocks, Text("config.yaml in the run folder has all settings.")]


def command_to_repeat(config: TrainingConfig, folder: Path) -> str:
    """The command that repeats a run in a folder next to its own, with the run's precision and revision of the data.

    A branch is repeated from its first step: the bits are the same, and its trunk may be gone.
    """
    settings = changed_settings_shown(config)
    settings.pop("run.branch_from", None)
    settings["run.precision"] = config.run.precision
    commit = recorded_commit(folder)
    if commit:
        settings["data.revision"] = commit
    names = dict.fromkeys(map(name_of_import, files_in(folder / COPIES)))
    imports = [f"{OPTION}={name}" for name in names]
    command = COMMANDS[type(config)]
    return shlex.join(["mpp", command, *imports, *as_command_line(settings), f"--run.dir={folder}_again"])


def recorded_versions() -> dict[str, str]:
    """Versions of mpp, Python and the libraries in this process; results that it took over may be of others."""
    own = {"mpp": mpp.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in LIBRARIES}


def machine_blocks() -> list[Block]:
    """Versions and hardware of the process that writes the page."""
    gpu = torch.cuda.get_device_name() if uses_gpu() else "none"
    facts = recorded_versions() | {"system": platform.platform(), "cores": str(cores()), "GPU": gpu}
    return [Table(["", ""], [*map(list, facts.items())], "Process that wrote this page")]


# --- the run ---


def subtitle(folder: Path, history: History) -> str:
    """The model, its training, its images, and how long it was trained."""
    settings, verdict = saved_settings(folder), read_verdict(folder)
    objective = settings["objective"].get("name")
    method = f"pre-trained by {objective} ({settings['network'].get('name', 'predictor')})" if objective else "trained"
    step, steps = last_logged_step(history), settings["run"].get("steps")
    batch_size = settings["optim"].get("global_batch_size")
    progress = f"{step:,} of {steps:,} steps" if isinstance(steps, int) else f"{step:,} steps"
    hours, pflop = last_value(history, "speed/hours"), last_value(history, PFLOP)
    parts = [
        verdict.get("model") or settings["model"].get("name"),
        f"{method} on {settings['data'].get('path') or BIRDS}",
        verdict.get("images"),
        f"{progress} of {batch_size} images" if batch_size else progress,
        hours and f"{hours:.3g} hours of training, with its evaluations",
        pflop and f"{pflop:.3g} PFLOP",
    ]
    return "; ".join(map(str, filter(None, parts)))


def verdict_points(folder: Path, history: History) -> list[tuple[str, Link | None]]:
    """Sentences of the verdict, each with a link to the section of the page that shows it, and next steps."""
    steps = saved_settings(folder)["run"].get("steps")
    done = last_logged_step(history)
    finished = not isinstance(steps, int) or done >= steps
    parts = read_verdict(folder).get("line", NO_VERDICT).split(BETWEEN_PARTS)
    parts = [part for part in parts if not part.startswith("warnings")]  # which have a place of their own
    unfinished = [] if finished else [f"the run is not finished: it logged {done:,} of {steps:,} steps"]
    points: list[tuple[str, Link | None]] = []
    for sentence in [*unfinished, *parts]:
        evidence = "features" if sentence.startswith(tuple(PROBES.values())) else "curves"
        points.append((sentence, Link("why", f"#{evidence}")))
    return [*points, *((f"Next: {advice}", None) for advice in next_steps(folder, history, finished, parts))]


# --- next steps ---


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
    return advice or [
        f"evaluate the features with labels (mpp fewshot --encoder {folder}), or fine-tune (mpp finetune)"
    ]


def advice_to_train_longer(folder: Path) -> str:
    """The command that continues a finished run, by its schedule."""
    config_class = config_class_of(saved_settings(folder))
    with suppress(UserError):
        if config_class in COMMANDS:
            return describe_growth(parse_saved(config_class, folder / CONFIG_FILE), folder)
    return "raise run.steps"  # its config.yaml is not one of today's


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
        start = shlex.quote(str(folder))
        return f"another run from this encoder (--model.init_from {start}); optim.schedule wsd can continue"
    trunk = shlex.quote(f"{folder}@{stable}")
    branch = f"--run.branch_from {trunk} --run.dir NEW --optim.schedule wsd --run.steps N"
    return f"the same command with a larger run.steps; cooled down: {branch}" if stable == steps else branch


def begins_from_weights(folder: Path) -> bool:
    """Whether a run began from weights (`model.init_from`), and not with random ones."""
    return bool(saved_settings(folder)["model"].get("init_from"))


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
        baseline = max(best_depth(first, group)[1], first.get(f"{group}/floor_pixels", 0))
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
