"""From a config to a finished run folder: what every training command does around the loop."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, release_memory

from mpp.config.parsing import differing, to_yaml
from mpp.data.hub import resolve_commit
from mpp.data.identity import differences
from mpp.data.loader import BatchLayout
from mpp.data.moments import channel_moments
from mpp.data.workers import deaths_explained, kill_workers
from mpp.errors import UserError, one_line
from mpp.runtime.files import appears
from mpp.runtime.hardware import arithmetic, uses_gpu
from mpp.runtime.lock import exclusive
from mpp.runtime.processes import TRAINING, on_main_process, set_timeout
from mpp.runtime.signals import Preemption
from mpp.runtime.start import check_alike, start
from mpp.runtime.weights import fingerprint
from mpp.training.flops import update_flops
from mpp.training.loop import Loop
from mpp.training.report_process import write_report
from mpp.training.run_folder import (
    CONFIG,
    commit_begun_with,
    is_finished,
    open_run,
    saved_settings,
    write_config,
    write_record,
)
from mpp.training.task import ImageTask

Build = Callable[[Any, Accelerator, BatchLayout], ImageTask]
"""From a config to its task; raises UserError where config and data do not fit."""


def train(config: Any, build: Build) -> Path:
    """Carry out the run that `config` describes, or what is left of it.

    Args:
        config: has `run`, `data` and `optim`.
    Returns:
        The run folder, finished.
    """
    accelerator = start(config.run)
    if config.optim.name == "muon":  # each process does its products itself: else the weights would drift apart
        alike = "all machines must have the same hardware and run.threads, or optim.name be adam"
        threads = "" if uses_gpu() else f", {torch.get_num_threads()} threads"
        check_alike(f"{arithmetic()}{threads} (Muon's products)", alike)
    given, config = config, settled(config, accelerator)
    folder = open_run(config, accelerator)
    if from_main_process(accelerator, lambda: is_finished(folder, config.run.steps)):
        accelerator.print(f"{folder} is finished: {config.run.steps} steps, encoder in {folder / 'encoder'}")
        return folder
    with Preemption(accelerator, folder) as preemption:
        with cleared_up(accelerator), deaths_explained():
            accelerator.print(to_yaml(config) if config.run.print_config else said(given))
            carry_out(config, folder, build, accelerator, preemption)
        accelerator.print(f"wrote {folder}: encoder/ (timm's layout), checkpoints/, metrics.jsonl, config.yaml")
        if config.run.report and accelerator.is_main_process:
            write_report(folder)
        if preemption.asked_of_any():
            preemption.leave("when this run was finished")  # there may be others to come
    return folder


def settled(config: Any, accelerator: Accelerator) -> Any:
    """The config as it is carried out and saved: what was left to the machine and to the length has a value."""
    precision = "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
    run, optim = replace(config.run, precision=precision), config.optim.settled(config.run.steps)
    known = saved_settings(Path(config.run.dir)).get("model", {})  # what was measured when the run began
    return with_moments(replace(config, run=run, optim=optim), known.get("mean"), known.get("std"))


def with_moments(config: Any, mean: Any, std: Any) -> Any:
    """The config with these in the place of `auto`, where they are known."""
    model = getattr(config, "model", None)
    found = {"mean": mean, "std": std}  # what was measured is a list
    known = {name: value for name, value in found.items() if isinstance(value, list)}
    given = {name: value for name, value in known.items() if getattr(model, name, None) == "auto"}
    measured = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return replace(config, model=replace(model, **measured)) if measured else config


def said(config: Any) -> str:
    """A config in a line: the settings that are not the defaults."""
    settings = " ".join(f"{key}={value}" for key, value in differing(config).items())
    return f"settings: {settings or 'the defaults'} (all of them: --run.print_config true)"


def carry_out(config: Any, folder: Path, build: Build, accelerator: Accelerator, preemption: Preemption) -> None:
    """Build the task, and train it in a folder that is ours."""
    layout = BatchLayout.of(
        config.optim.global_batch_size, config.data.batch_size, accelerator.num_processes, accelerator.process_index
    )
    if layout.smallest < layout.batch_size:
        passes = layout.accumulation_steps * layout.world_size
        shares = f"{passes} shares of {layout.smallest} or {layout.batch_size}"
        accelerator.print(f"{layout.images} images an update, in {shares}; the gradient is that of their mean")
    as_begun = at_one_commit(config, folder, accelerator)
    if "auto" in (getattr(getattr(config, "model", None), name, None) for name in ("mean", "std")):
        moments = from_main_process(accelerator, lambda: channel_moments(as_begun.data))
        config, as_begun = (with_moments(each, *moments) for each in (config, as_begun))
        mean, std = map(list, config.model.normalization(config.data.channels))
        accelerator.print(f"measured: model.mean {mean}, model.std {std}")
    task = build(as_begun, accelerator, layout)
    accelerator.print(f"model: {task.describe_model()}\nimages: {task.describe_images()}")
    with exclusive(folder, accelerator):
        on_main_process(accelerator, lambda: write_config(config, folder))
        if not all(gather_object([appears(folder / CONFIG)])):
            raise UserError(f"run.dir is {folder}, which not all processes see; all nodes must share it")
        images = same_on_all_nodes(task.record, accelerator)
        on_main_process(accelerator, lambda: write_record(folder, images | first_weights(config)))
        flops = update_flops(task, layout.images, config.optim)
        set_timeout(TRAINING)
        if accelerator.num_processes > 1:  # several agree before their first step
            preemption.finish_steps()
        Loop(task, config, folder, flops, preemption).train()
        accelerator.wait_for_everyone()


def same_on_all_nodes(record: Callable[[], dict[str, Any]], accelerator: Accelerator) -> dict[str, Any]:
    """Which images the run is of, as each node has it.

    Raises:
        UserError: a node has others: copies on their own disks, say. Its cut and its order would be others.
    """
    own, failure = None, None
    if accelerator.is_local_main_process:
        try:
            own = record()
        except Exception as error:  # the others are told: they would wait for this process
            own, failure = error if isinstance(error, UserError) else UserError(one_line(error)), error
    first, *others = (each for each in gather_object([own]) if each is not None)
    if failure is not None:
        raise failure
    for found in (first, *others):
        if isinstance(found, UserError):
            raise found
        if changed := differences(first, found):
            raise UserError(f"the nodes do not have the same images or weights: {'; '.join(changed)} on another node")
    return first


def at_one_commit(config: Any, folder: Path, accelerator: Accelerator) -> Any:
    """The config with the commit of a hub dataset in the place of a branch.

    It is one for all processes, and that with which the run began: a branch may move in between.
    """
    commit = from_main_process(accelerator, lambda: resolve_commit(config.data, commit_begun_with(folder)))
    return replace(config, data=replace(config.data, revision=commit)) if commit else config


def from_main_process(accelerator: Accelerator, get: Callable[[], Any]) -> Any:
    """What `get` returns on the main process, for all processes."""
    found: list[Any] = []
    on_main_process(accelerator, lambda: found.append(get()))
    return broadcast_object_list(found or [None])[0]


def first_weights(config: Any) -> dict[str, Any]:
    """Which weights a run begins from and is taught by, for its record; nothing of what is random, or not there."""
    objective = getattr(config, "objective", None)
    paths = {"model.init_from": getattr(getattr(config, "model", None), "init_from", None)}
    paths |= {"objective.teacher": objective and (objective.teacher_checkpoint or objective.frozen_teacher)}
    found = {key: fingerprint(Path(path)) if path else None for key, path in paths.items()}
    return {key: {"weights": weights} for key, weights in found.items() if weights}


@contextmanager
def cleared_up(accelerator: Accelerator) -> Iterator[None]:
    """At the end, however it comes: no loader process, tracker or memory is held; the process group stays."""
    try:
        yield
    except BaseException as error:
        kill_workers()
        forget_variables(error)
        raise
    finally:
        for tracker in accelerator.trackers:
            try:
                tracker.finish()
            except OSError as error:  # a full disk, which is not to take the place of what ended the run
                print(f"warning: {tracker.name} cannot be closed: {error}", file=sys.stderr)
        accelerator.free_memory()
        release_memory()  # once more, without accelerate's references: a prepared model refers to itself
        torch.compiler.reset()  # what is compiled for this model would count against the next


def forget_variables(error: BaseException | None) -> None:
    """Let go of what an exception keeps alive while somebody handles it: the variables of the functions it left.

    A model and its gradients are among them, and whoever handles the error, as a comparison does, may train the next.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
