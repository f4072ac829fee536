"""Trainings that make a comparison's encoders: their commands, and the compute that they take."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from timm import is_model

from evaluation import contrastive, supervised
from evaluation.config import ContrastiveConfig, SupervisedConfig
from evaluation.frozen.manifest import parent_encoders
from evaluation.frozen.run_images import find_run
from evaluation.supervision.classifiers import TEACHER_SETTING, with_teacher_digest
from mpp.config import Config, TrainingConfig, require
from mpp.config.parsing import to_yaml
from mpp.data.loader import BatchLayout
from mpp.pretrain import Pretraining
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.weights import HUB, ZOO
from mpp.training.flops import flops_of_step
from mpp.training.history import PFLOP
from mpp.training.log import last_scalars
from mpp.training.run_folder import branch_point, saved_settings
from mpp.training.task import ImageTask

PETA = 1e15


class Training(NamedTuple):
    """A command that trains an encoder."""

    config_class: type
    build_task: Callable[[Any, Accelerator, BatchLayout], ImageTask]
    resolve: Callable[[Any], Any] = lambda config: config
    """Add to a config the digests of weights that it depends on."""


TRAININGS: dict[str, Training] = {
    "pretrain": Training(Config, Pretraining),
    "supervised": Training(SupervisedConfig, supervised.build_task, with_teacher_digest),
    "contrastive": Training(ContrastiveConfig, contrastive.Contrastive),
}
KNOWN_STEP_FLOPS: dict[str, int] = {}
"""FLOPs of a step by command and settings: to count them, the images are loaded and the model is built."""


def step_flops(command: str, config: TrainingConfig) -> int:
    """FLOPs that a step of this training executes."""
    key = f"{command}\n{to_yaml(config)}"
    if key not in KNOWN_STEP_FLOPS:
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=not uses_gpu())
        layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, 1, 0)
        task = TRAININGS[command].build_task(config, accelerator, layout)
        KNOWN_STEP_FLOPS[key] = flops_of_step(task, layout.global_batch_size, config.optim)
    return KNOWN_STEP_FLOPS[key]


def with_compute(command: str, config: TrainingConfig, pflop: float) -> TrainingConfig:
    """The training with as many steps as execute this compute.

    Raises:
        UserError: it is not enough for a step.
    """
    of_any_run = replace(config, run=replace(config.run, dir="", seed=0))
    flops = step_flops(command, of_any_run)
    steps = round(PETA * pflop / flops)
    require(steps > 0, "compute", pflop, f"at least {flops / PETA:.2g}, the PFLOP of a step")
    return replace(config, run=replace(config.run, steps=steps))


def parent_settings(config: TrainingConfig) -> dict[str, Path]:
    """The settings that name a training's first weights and its frozen teacher -> their folders or files.

    Published models are left out.
    """
    named = {"model.init_from": config.model.init_from}
    if isinstance(config, SupervisedConfig):
        named[TEACHER_SETTING] = config.distill.teacher
    objective = config.objective
    if objective is not None and objective.frozen_teacher:
        named["objective.teacher"] = objective.teacher_checkpoint or objective.teacher
    parents = {setting: local_encoder(encoder) for setting, encoder in named.items() if encoder is not None}
    return {setting: parent for setting, parent in parents.items() if parent is not None}


def local_encoder(encoder: str) -> Path | None:
    """The folder or file of an encoder; None: it is a published model, by its name in timm or on the hub."""
    run = find_run(encoder)
    if run is None and (is_model(encoder) or encoder.startswith((HUB, ZOO))):
        return None
    return run or Path(encoder)


def cost_with_ancestors(run: Path, scalar: str) -> float:
    """The cost of a run and of all that it was made from, each once. A branch's counts from its first step on.

    Args:
        scalar: that grows with training: PFLOP or DEVICE_HOURS.
    Raises:
        UserError: one of them has no record of it.
    """
    return sum(last_scalars(each, scalar)[scalar] for each in with_ancestors(run))


def with_ancestors(run: Path) -> list[Path]:
    """A run, the runs that it began from and learned from, and theirs, each once; published models are left out."""
    found: dict[Path, Path] = {}
    waiting = [run]
    while waiting:
        each = waiting.pop(0)
        if each.resolve() in found:
            continue
        found[each.resolve()] = each
        parents = [local_encoder(encoder) for encoder in parent_encoders(each).values()]
        waiting += [parent for parent in parents if parent is not None]
    return list(found.values())


def published_ancestors(run: Path) -> list[str]:
    """The published models that a run, or one that it was made from, began from or learned from: no cost has theirs."""
    parents = [name for each in with_ancestors(run) for name in parent_encoders(each).values()]
    return [name for name in dict.fromkeys(parents) if local_encoder(name) is None]


def pflop_without_trunk(run: Path) -> float:
    """PFLOP that a run executed itself: a branch without the steps of the trunk that it continued from.

    Raises:
        UserError: there is no record of it.
    """
    last = last_scalars(run, PFLOP)
    branch_from = saved_settings(run)["run"].get("branch_from")
    taken = branch_point(branch_from)[1] if branch_from else 0
    if last["step"] <= taken:  # it has logged no step of its own yet
        return 0.0
    return last[PFLOP] * (1 - taken / last["step"])
