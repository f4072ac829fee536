"""From a config to a finished run folder: the parts around the loop that all training commands share."""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, release_memory

from mpp.config import DataConfig, RunConfig, TrainingConfig, changed_settings
from mpp.config.parsing import to_yaml
from mpp.data.identity import differences
from mpp.data.loader import BatchLayout
from mpp.data.moments import channel_moments, with_moments
from mpp.data.remote import resolve_commit
from mpp.data.workers import deaths_explained, kill_workers
from mpp.errors import UserError, one_line
from mpp.features.drift import START_FILE
from mpp.models.loading import moments_of_weights
from mpp.models.plain import has_fused_attention
from mpp.runtime.files import clear_leftovers, hold
from mpp.runtime.hardware import bf16_is_native, uses_gpu
from mpp.runtime.messages import note
from mpp.runtime.processes import TRAINING_TIMEOUT, on_main_process, set_timeout
from mpp.runtime.signals import Preemption
from mpp.runtime.start import check_alike, start
from mpp.runtime.weights import BEST, ENCODER, fingerprint
from mpp.training.branch import begin_branch, first_folder, origin_of
from mpp.training.checkpoint import clear_partial_checkpoints, kept_steps, newest_step
from mpp.training.compilation import compiled_before, describe_compiling, explaining_failures, is_compiled
from mpp.training.cost import describe_cost
from mpp.training.flops import flops_of_step
from mpp.training.growth import SAME_HALF_LIFE, describe_growth, follows_length
from mpp.training.log import METRICS_FILE, check_trackers, read_history
from mpp.training.loop import Loop
from mpp.training.phases import note_growth
from mpp.training.record import RECORD_FILE, recorded_commit, write_record
from mpp.training.report_process import write_run_page
from mpp.training.run_folder import CONFIG_FILE, group_of, is_finished, open_run, saved_settings, write_config
from mpp.training.task import ImageTask
from mpp.training.watch import VERDICT

Build = Callable[[Any, Accelerator, BatchLayout], ImageTask]
"""From a config to its task; raises UserError where config and data do not fit."""
WRITTEN_WHOLE = (CONFIG_FILE, RECORD_FILE, METRICS_FILE, VERDICT, START_FILE, ENCODER, BEST)
"""Files and folders of a run, besides checkpoints, that training writes aside and renames."""
APPEARS_WITHIN_S = 90  # NFS looks for new files of other machines after a minute at the latest


def train(config: TrainingConfig, build: Build, writes_page: bool = True) -> Path:
    """Carry out the run that `config` describes, or its remaining steps.

    Args:
        writes_page: whether to write the run's page, if `run.report` asks for it; a caller that adds figures does so
            later.
    Returns:
        The run folder, finished.
    """
    accelerator = start(config.run)
    check_trackers(config.run)
    if config.optim.name == "muon":
        refuse_unlike_arithmetic()
    resolved = resolve_config(config, accelerator)
    before = compiled_before(first_folder(config))
    folder = open_run(resolved, accelerator)
    if resolved.run.branch_from is not None:
        on_main_process(accelerator, lambda: begin_branch(resolved, folder))
    if on_main_process(accelerator, lambda: is_finished(folder, resolved.run.steps)):
        accelerator.print(f"{folder} is finished: {resolved.run.steps} steps, encoder in {folder / 'encoder'}")
        return folder
    with Preemption(accelerator, folder) as preemption:
        with releasing_resources(accelerator), deaths_explained():
            accelerator.print(to_yaml(resolved) if config.run.print_config else describe_overrides(config))
            compiling = describe_compiling(config.run, resolved.run.compile, before)
            if compiling:
                accelerator.print(compiling)
            if follows_length(resolved):
                note(f"this run cannot grow, since objective.half_life is a share of run.steps; {SAME_HALF_LIFE}")
            build_and_train(resolved, folder, build, accelerator, preemption)
        accelerator.print(f"wrote {folder}: encoder/ (timm's layout), checkpoints/, metrics.jsonl, config.yaml")
        if accelerator.is_main_process:
            print(f"cost: {describe_cost(read_history(folder))}")
        accelerator.print(f"longer: {describe_growth(resolved, folder)}")
        if writes_page and config.run.report and accelerator.is_main_process:
            write_run_page(folder)
        if preemption.agreed():
            preemption.leave("when this run was finished")  # there may be others to come
    return folder


def refuse_unlike_arithmetic() -> None:
    """Refuse processes that round Muon's products in different ways: their weights would drift apart.

    Each process orthogonalises its matrices itself.
    """
    threads = "" if uses_gpu() else f", {torch.get_num_threads()} threads"
    check_alike(
        f"{arithmetic()}{threads} (Muon's products)",
        "all machines must have the same hardware and run.threads, or optim.name be adam",
    )


def arithmetic() -> str:
    """The arithmetic of matrix products: two processes with the same compute the same bits."""
    kind = "bf16" if bf16_is_native() else "fp32"
    if not uses_gpu():
        return f"{kind} by {torch.backends.cpu.get_cpu_capability()}"
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{kind} by CUDA {card.major}.{card.minor} with {card.multi_processor_count} multiprocessors"


def resolve_config(config: TrainingConfig, accelerator: Accelerator) -> TrainingConfig:
    """The config as it is carried out and saved: settings left to the machine and to the run's length have a value."""
    origin = first_folder(config)
    saved = saved_settings(origin)
    precision = "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
    compiled = all(gather_object([is_compiled(config.run, accelerator.device, compiled_before(origin))]))
    run = replace(config.run, precision=precision, compile=compiled, branch_from=origin_of(config))
    run = replace(run, keep_at=steps_kept_for_good(run))
    optim = config.optim
    if optim.warmup_steps is None and newest_step(origin):  # a run that grows keeps the number that it began with
        optim = replace(optim, warmup_steps=saved.get("optim", {}).get("warmup_steps"))
    resolved = replace(config, run=run, optim=optim.resolved(config.run.steps))
    if config.is_fine_tuning:
        return resolved
    if precision == "fp32" and config.model.residual == "bf16":  # run.precision was left to the launcher or the machine
        note("model.residual bf16 has no effect here: run.precision is fp32")
    measured = saved.get("model", {})  # when the run began
    model = with_moments(config.model, measured.get("mean"), measured.get("std"))
    return replace(resolved, model=moments_of_weights(model, config.data.channels))


def steps_kept_for_good(run: RunConfig) -> tuple[int, ...] | None:
    """`run.keep_at`, with the steps of earlier commands whose checkpoints are there: those stay for good."""
    folder = Path(run.dir)
    before = group_of(saved_settings(folder), "run").get("keep_at") or ()
    steps = {*(run.keep_at or ()), *set(before).intersection(kept_steps(folder))}
    within = [step for step in sorted(steps) if step <= run.steps]  # fewer steps than are done are refused later
    return tuple(within) or None


def describe_overrides(config: TrainingConfig) -> str:
    """The settings that are not the defaults, in a line."""
    settings = " ".join(f"{key}={value}" for key, value in changed_settings(config).items())
    return f"settings: {settings or 'the defaults'} (all of them: --run.print_config true)"


def build_and_train(
    config: TrainingConfig, folder: Path, build: Build, accelerator: Accelerator, preemption: Preemption
) -> None:
    """Build the task, and train it in the run's folder, which no other process may write to meanwhile."""
    layout = share_out_batch(config, accelerator)
    data = pin_commit(config.data, folder, accelerator)
    config = with_moments_of_images(config, data, accelerator)
    # config.yaml keeps data.revision as it was given, so that the same command resumes; data.json has the commit.
    for encoder in first_encoders(config).values():
        note_growth(encoder)
    task = build(replace(config, data=data), accelerator, layout)
    accelerator.print(f"model: {task.describe_model()}\nimages: {task.describe_images()}")
    if accelerator.device.type == "cuda":
        accelerator.print(describe_attention(task))
    with exclusive(folder, accelerator):
        on_main_process(accelerator, lambda: clear_killed_run(folder))
        write_beginning(config, folder, task, accelerator)
        flops = flops_of_step(task, layout.global_batch_size, config.optim)
        set_timeout(TRAINING_TIMEOUT)
        if accelerator.num_processes > 1:  # several agree before their first step
            preemption.finishes_steps = True
        with explaining_failures(config.run):
            Loop(task, config, folder, flops, preemption).train()
        accelerator.wait_for_everyone()


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


def share_out_batch(config: TrainingConfig, accelerator: Accelerator) -> BatchLayout:
    """The layout of the images of a step; a line tells of unequal shares."""
    layout = BatchLayout.of(
        config.optim.global_batch_size, config.data.batch_size, accelerator.num_processes, accelerator.process_index
    )
    if layout.smallest_share < layout.largest_share:
        shares = f"{layout.share_count} shares of {layout.smallest_share} or {layout.largest_share}"
        accelerator.print(f"{layout.global_batch_size} images a step, in {shares}; the gradient is that of their mean")
    return layout


def with_moments_of_images(config: TrainingConfig, data: DataConfig, accelerator: Accelerator) -> TrainingConfig:
    """The config with the mean and deviation of the images of `data`, measured where they are not known yet."""
    if config.is_fine_tuning or "auto" not in (config.model.mean, config.model.std):
        return config
    mean, std = on_main_process(accelerator, lambda: channel_moments(data))
    config = replace(config, model=with_moments(config.model, mean, std))
    mean, std = config.model.normalization(config.data.channels)
    accelerator.print(f"measured: model.mean {list(mean)}, model.std {list(std)}")
    return config


def describe_attention(task: ImageTask) -> str:
    """How attention is computed, in a line."""
    return f"attention: {'fused' if has_fused_attention(task.model.encoder) else 'unfused'}"


def clear_killed_run(folder: Path) -> None:
    """Delete half-written files of killed processes in a run's folder, which this process holds.

    Pages and results of evaluations are written by commands that do not hold it, perhaps now: theirs stay.
    """
    for name in WRITTEN_WHOLE:
        clear_leftovers(folder / name)
    clear_partial_checkpoints(folder)


def write_beginning(config: TrainingConfig, folder: Path, task: ImageTask, accelerator: Accelerator) -> None:
    """Write config.yaml and data.json, with the main process.

    Raises:
        UserError: the folder holds another run, or a run of other images, or not all processes see it.
    """
    on_main_process(accelerator, lambda: write_config(config, folder))
    if not all(gather_object([appears(folder / CONFIG_FILE)])):
        raise UserError(f"run.dir is {folder}, which some processes cannot see; all nodes must share it")
    record = identify_on_all_nodes(task.record, accelerator)
    on_main_process(accelerator, lambda: write_record(folder, record | fingerprint_first_weights(config)))


def appears(file: Path) -> bool:
    """Whether a file that another machine may have written is there; waits for it up to APPEARS_WITHIN_S."""
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return file.exists()


def identify_on_all_nodes(identify: Callable[[], dict[str, Any]], accelerator: Accelerator) -> dict[str, Any]:
    """The record of a run's images, which is the same on each node.

    Args:
        identify: makes it; called by one process of a node.
    Raises:
        UserError: a node has other images: copies on their own disks, say. Its split and its order would be others.
    """
    result: dict[str, Any] | UserError | None = None
    failure: Exception | None = None
    if accelerator.is_local_main_process:
        try:
            result = identify()
        except Exception as error:  # the others are told: they would wait for this process
            failure = error
            result = error if isinstance(error, UserError) else UserError(one_line(error))
    results = [each for each in gather_object([result]) if each is not None]
    if failure is not None:
        raise failure
    for each in results:
        if isinstance(each, UserError):
            raise each
        changed = differences(results[0], each)
        if changed:
            raise UserError(f"the nodes do not have the same images or weights: {'; '.join(changed)} on another node")
    return results[0]


def pin_commit(data: DataConfig, folder: Path, accelerator: Accelerator) -> DataConfig:
    """The settings of the images with the commit of a hub dataset instead of a branch.

    It is one for all processes, and that with which the run began: a branch may move in between.
    """
    commit = on_main_process(accelerator, lambda: resolve_commit(data, recorded_commit(folder)))
    return replace(data, revision=commit) if commit else data


def fingerprint_first_weights(config: TrainingConfig) -> dict[str, Any]:
    """Fingerprints of the weights that a run begins from and is taught by; none of random or missing ones."""
    record = {}
    for key, path in first_encoders(config).items():
        weights = fingerprint(Path(path))
        if weights:
            record[key] = {"weights": weights}
    return record


def first_encoders(config: TrainingConfig) -> dict[str, str]:
    """The encoders, or their weights, that a run begins from and is taught by: setting -> its value."""
    given = {}
    if config.model is not None:
        given["model.init_from"] = config.model.init_from
    if config.objective is not None:
        given["objective.teacher"] = config.objective.teacher_checkpoint or config.objective.frozen_teacher
    return {key: value for key, value in given.items() if value}


@contextmanager
def releasing_resources(accelerator: Accelerator) -> Iterator[None]:
    """At the end, also after an error: release loader processes, trackers and memory; the process group stays."""
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
            except OSError as error:  # a full disk, which must not hide the error that ended the run
                print(f"warning: {tracker.name} cannot be closed: {error}", file=sys.stderr)
        accelerator.free_memory()
        release_memory()  # once more, without accelerate's references: a prepared model refers to itself
        torch.compiler.reset()  # code compiled for this model would count against the next


def forget_variables(error: BaseException | None) -> None:
    """Drop the variables of the functions that an exception left: it keeps them alive while it is handled.

    A model and its gradients are among them, and the caller, as a comparison does, may train the next.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
