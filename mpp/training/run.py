"""From a config to a finished run folder: the parts around the loop that all training commands share."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import release_memory

from mpp.config import TrainingConfig, changed_settings
from mpp.config.imports import import_words
from mpp.config.parsing import as_command_line, to_yaml
from mpp.data.loader import BatchLayout
from mpp.data.moments import channel_moments, with_moments
from mpp.data.remote import resolve_commit
from mpp.data.workers import deaths_explained, kill_workers
from mpp.models.descriptions import as_saved, how_read
from mpp.models.encoder import moments_of_weights, with_architecture
from mpp.runtime.files import clear_leftovers, hold
from mpp.runtime.messages import note, tell, warn
from mpp.runtime.processes import (
    SHARDED,
    TRAINING_TIMEOUT,
    no_answer,
    on_each_node,
    on_main_process,
    set_timeout,
    wait_for_all,
)
from mpp.runtime.signals import MARKER, Preemption
from mpp.runtime.start import start
from mpp.runtime.weights import BEST, CLASSIFIER, ENCODER, fingerprint
from mpp.training.checkpoint import clear_partial_checkpoints, newest_step
from mpp.training.flops import flops_of_step
from mpp.training.log import check_trackers
from mpp.training.loop import Loop
from mpp.training.run_folder import (
    REPORT_PAGE,
    Saved,
    begin_branch,
    first_encoders,
    is_finished,
    is_run_folder,
    origin_of,
    recorded_commit,
    refuse_other_run,
    saved_settings,
    write_beginning,
)
from mpp.training.task import ImageTask

Build = Callable[[Any, Accelerator, BatchLayout], ImageTask]
"""From a config to its task; raises UserError where config and data do not fit."""
REPORT_SCRIPT = Path(__file__).parents[2] / "evaluation" / "report.py"  # `-m` might find another `evaluation` here
REPORT_TIMEOUT_S = 600  # other processes of the run wait meanwhile, for at most 20 minutes
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PMI_", "OMPI_", "MV2_", "ACCELERATE_MIXED"),
    SHARDED,
)
"""Beginnings of the variables by which launchers tell processes that they belong together."""


def train(config: TrainingConfig, build: Build, writes_page: bool = True) -> Path:
    """Carry out the run that `config` describes, or its remaining steps.

    Args:
        writes_page: whether to write the run's page, if `run.report` asks for it; a caller that adds figures does so
            later.
    Returns:
        The run folder, finished.
    """
    config = config.in_named_folder()
    accelerator = start(config.run)
    check_trackers(config.run)
    folder = Path(config.run.dir)
    if accelerator.is_main_process and is_run_folder(folder):
        (folder / MARKER).unlink(missing_ok=True)  # before anything can fail: a script may repeat a marked run
    resolved = resolve_config(config, accelerator)
    refuse_other_run(resolved, folder)
    if resolved.run.branch_from is not None:
        on_main_process(accelerator, lambda: begin_branch(resolved, folder))
    if on_main_process(accelerator, lambda: is_finished(resolved, folder)):
        accelerator.print(f"{folder} is finished: {config.run.steps} steps, encoder in {folder / ENCODER}")
        return folder
    with Preemption(accelerator, folder) as preemption:
        with releasing_resources(accelerator), deaths_explained():
            accelerator.print(to_yaml(resolved) if config.run.print_config else describe_overrides(config))
            build_and_train(resolved, folder, build, accelerator, preemption)
        accelerator.print(f"wrote {folder}: encoder/ (timm's layout), checkpoints/, metrics.jsonl, config.yaml")
        if writes_page and config.run.report and accelerator.is_main_process:
            write_run_page(folder)
        if preemption.agreed():
            preemption.leave("when this run was finished")  # there may be others to come
    return folder


def resolve_config(config: TrainingConfig, accelerator: Accelerator) -> TrainingConfig:
    """The config as it is carried out and saved: settings left to the machine and to the run's length have a value."""
    branch_from, begun_in = origin_of(config)
    saved = saved_settings(begun_in)
    begun = saved if newest_step(begun_in) else Saved(dict)
    precision = "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
    compiled = config.run.compile is True  # auto: no, since no GPU has measured what it gains
    kept = saved_settings(Path(config.run.dir))["run"].get("keep_at") or ()  # by earlier commands: for good
    keep_at = sorted(step for step in {*kept, *(config.run.keep_at or ())} if step <= config.run.steps)
    changed = dict(precision=precision, compile=compiled, branch_from=branch_from, keep_at=tuple(keep_at) or None)
    run = replace(config.run, **changed)
    optim = config.optim
    begun_with = begun["optim"].get("warmup_steps")
    if optim.warmup_steps is None and (begun_with or 0) < config.run.steps:  # a run that grows keeps its number
        optim = replace(optim, warmup_steps=begun_with)
    resolved = replace(config, run=run, optim=optim.resolved(config.run.steps))
    if config.is_fine_tuning:
        return resolved
    model = config.model
    if precision == "fp32" and model.residual == "bf16":  # run.precision was left to the launcher or the machine
        note("model.residual bf16 has no effect here: run.precision is fp32")
        model = replace(model, residual="fp32")
    measured = saved["model"]  # at its first start
    model = with_moments(model, measured.get("mean"), measured.get("std"))
    return replace(resolved, model=moments_of_weights(with_architecture(model), config.data.channels))


def describe_overrides(config: TrainingConfig) -> str:
    """The run folder and the settings that are not the defaults, in a line, as they are given."""
    words = as_command_line(changed_settings(config))
    return f"settings: {shlex.join(words)} (all of them: --run.print_config true)"


def build_and_train(
    config: TrainingConfig, folder: Path, build: Build, accelerator: Accelerator, preemption: Preemption
) -> None:
    """Build the task, and train it in the run's folder, which no other process may write to meanwhile."""
    batch_size, processes = config.optim.global_batch_size, accelerator.num_processes
    layout = BatchLayout.of(batch_size, config.data.batch_size, processes, accelerator.process_index)
    # The commit of a hub dataset with which the run began, one for all processes: a branch may move in between.
    commit = on_main_process(accelerator, lambda: resolve_commit(config.data, recorded_commit(folder)))
    data = replace(config.data, revision=commit or config.data.revision)
    if not config.is_fine_tuning and "auto" in (config.model.mean, config.model.std):
        mean, std = on_main_process(accelerator, lambda: channel_moments(data))
        config = replace(config, model=with_moments(config.model, mean, std))
        accelerator.print(f"measured: model.mean {config.model.mean}, model.std {config.model.std}")
    # config.yaml keeps data.revision as it was given, so that the same command resumes; data.json has the commit.
    task = build(replace(config, data=data), accelerator, layout)
    note_other_reading(config)
    accelerator.print(f"model: {task.describe_model()}\nimages: {task.describe_images()}")
    with exclusive(folder, accelerator):
        on_main_process(accelerator, lambda: clear_killed_run(folder))
        records = on_each_node(accelerator, task.record)
        weights = fingerprint_first_weights(config)
        on_main_process(accelerator, lambda: write_beginning(config, folder, [each | weights for each in records]))
        flops = flops_of_step(task, layout.global_batch_size, config.optim)
        set_timeout(TRAINING_TIMEOUT)
        if accelerator.num_processes > 1:  # several agree before their first step
            preemption.finishes_steps = True
        Loop(task, config, folder, flops, preemption).train()
        wait_for_all()


@contextmanager
def exclusive(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the run folder for the `with` block, for all processes of this run.

    Raises:
        Held: on every process, where another run holds it.
        UserError: on every process, where it cannot be locked.
    """
    with ExitStack() as stack:
        on_main_process(accelerator, partial(stack.enter_context, hold(folder, "run.dir")))
        yield


def clear_killed_run(folder: Path) -> None:
    """Delete what killed processes left half written in a run's folder, which this process holds, and is large.

    A small file is replaced when it is written again.
    """
    for name in (ENCODER, BEST, CLASSIFIER):
        clear_leftovers(folder / name)
    clear_partial_checkpoints(folder)


def fingerprint_first_weights(config: TrainingConfig) -> dict[str, Any]:
    """Fingerprints of the weights that a run begins from and is taught by; none of random or missing ones."""
    encoders = first_encoders(config).items()
    return {key: {"weights": digest} for key, path in encoders if (digest := fingerprint(Path(path)))}


def note_other_reading(config: TrainingConfig) -> None:
    """Note that a run begins from, or is taught by, an encoder whose images were read in another way."""
    ours = as_saved(config.data.how_read())
    for setting, encoder in first_encoders(config).items():
        theirs = how_read(encoder)
        if theirs and theirs != ours:
            note(f"{setting} learned from images of data {theirs}; here they are {ours or 'as usual'}")


@contextmanager
def releasing_resources(accelerator: Accelerator) -> Iterator[None]:
    """At the end, also after an error: release loader processes, trackers and memory; the process group stays.

    Memory is not released where another process is gone: a GPU that waits for it would not answer.
    """
    are_there = True
    try:
        yield
    except BaseException as error:
        are_there = no_answer(error) is None
        kill_workers()
        raise
    finally:
        for tracker in accelerator.trackers:
            try:
                tracker.finish()
            except OSError as error:  # a full disk, which must not hide the error that ended the run
                print(f"warning: {tracker.name} cannot be closed: {error}", file=sys.stderr)
        if are_there:
            accelerator.free_memory()
            release_memory()  # once more, without accelerate's references: a prepared model refers to itself
        torch.compiler.reset()  # code compiled for this model would count against the next


def write_run_page(folder: Path) -> None:
    """Have `mpp report` write `report.html` in a run folder, in a process of its own; a failure is a warning.

    This is the one place where the package knows of the evaluation. It starts `evaluation/report.py` by its path and
    imports nothing of it: whatever happens to the report, the run is done. The process is without the launcher's
    variables: it is one by itself.
    """
    tell(f"writing {folder / REPORT_PAGE} ...")
    words = (sys.executable, str(REPORT_SCRIPT), "--encoder", str(folder), *import_words())
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    try:
        subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL, timeout=REPORT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):  # it has printed its own error, unless it took too long
        warn(f"the report is not written; `mpp report --encoder {shlex.quote(str(folder))}` writes it")
