"""Branches: a run that continues from a kept checkpoint of another run, the trunk, in a folder of its own.

A branch is a copied checkpoint, and a comparison of all settings but four (`GROWING_SETTINGS`).
"""

import shutil
from contextlib import suppress
from pathlib import Path

from mpp.config import OptimConfig, RunConfig, TrainingConfig, require
from mpp.errors import UserError
from mpp.features.drift import START_FILE
from mpp.models.descriptions import exported_step
from mpp.runtime.files import complete, hold
from mpp.runtime.messages import note
from mpp.runtime.weights import BEST, ENCODER, SAFETENSORS_SUFFIX, run_of
from mpp.training.checkpoint import checkpoint_path, damaged_files, kept_steps, newest_step
from mpp.training.log import METRICS_FILE, UNREADABLE_FILE, drop_after
from mpp.training.run_folder import (
    RECORD_FILE,
    branch_point,
    group_of,
    refuse_other_settings,
    saved_settings,
    write_config,
)

COOLDOWN = "cooldown"
NOT_COOLED_DOWN = "not cooled down yet"
COPIED_FILES = (METRICS_FILE, UNREADABLE_FILE, RECORD_FILE, START_FILE)


# --- beginning a branch ---


def origin_of(config: TrainingConfig) -> str | None:
    """The checkpoint that a run branches from: as it is given or, where it is not, as the run's folder says."""
    saved = group_of(saved_settings(Path(config.run.dir)), "run")
    return config.run.branch_from or saved.get("branch_from")


def first_folder(config: TrainingConfig) -> Path:
    """Folder with the settings of a run's steps so far: its own or, where it is to begin as a branch, the trunk's."""
    folder = Path(config.run.dir)
    origin = origin_of(config)
    if origin is None or newest_step(folder):
        return folder
    trunk, _ = branch_point(origin)
    return trunk


def begin_branch(config: TrainingConfig, folder: Path) -> None:
    """Copy a branch's first checkpoint, and the files that belong to it, from the trunk; afterwards it is resumed.

    A branch with a checkpoint is left as it is. The checkpoint comes last, so an interrupted copy is made again.

    Raises:
        UserError: there is no such checkpoint, or it is damaged; or the trunk has other settings, or had another rate.
    """
    origin = config.run.branch_from
    trunk, step = branch_point(origin)
    if newest_step(folder):
        saved = group_of(saved_settings(folder), "run").get("branch_from")
        is_same = saved is not None and branch_point(saved) == (trunk, step)
        require(is_same, "run.branch_from", origin, f"{saved or 'left out'}, as when the run in {folder} began")
        return
    refuse_other_trunk(config, trunk, step)
    with hold(folder, "run.dir"):
        if newest_step(folder):  # another process began it meanwhile
            return
        write_config(config, folder)
        try:
            copy_beginning(trunk, folder, step)
        except OSError as error:
            raise UserError(f"{origin} cannot be copied ({error}); the same command copies it again") from error


def refuse_other_trunk(config: TrainingConfig, trunk: Path, step: int) -> None:
    """Raise UserError if a run cannot continue from this checkpoint."""
    key, value = "run.branch_from", f"{trunk}@{step}"
    kept = kept_steps(trunk)
    listed = ", ".join(map(str, kept)) or "there are none"
    require(step in kept, key, value, f"FOLDER@STEP with a kept step of a run: {listed} (run.keep_at keeps some)")
    damaged = damaged_files(checkpoint_path(trunk, step))
    require(not damaged, key, value, f"a whole checkpoint: its {', '.join(damaged)} is damaged")
    refuse_other_settings(config, trunk, step, f"{key} is {value}")


def copy_beginning(trunk: Path, folder: Path, step: int) -> None:
    """Copy a checkpoint, verified, and before it the files that belong to it. The copies may be written."""
    for name in COPIED_FILES:
        if (trunk / name).is_file():
            with complete(folder / name) as partial:
                shutil.copyfile(trunk / name, partial)
    drop_after(folder, step)
    target = checkpoint_path(folder, step)
    target.parent.mkdir(exist_ok=True)
    with complete(target) as partial:
        partial.mkdir()
        for file in checkpoint_path(trunk, step).iterdir():
            shutil.copyfile(file, partial / file.name)
        damaged = damaged_files(partial)
        if damaged:
            raise OSError(f"the copies of {', '.join(damaged)} differ")


# --- checkpoints to branch from ---


def steps_to_keep(optim: OptimConfig, run: RunConfig) -> set[int]:
    """Steps of a run whose checkpoints are written and always stay: of `run.keep_at`, and where a cooldown begins."""
    kept = set(run.keep_at or ())
    return kept | {optim.stable_steps(run.steps)} if optim.schedule == "wsd" else kept


# --- phases ---


def phases(run: RunConfig, optim: OptimConfig) -> dict[str, int]:
    """Name of a phase of a run, or of the branch that it is -> the steps that are done when it begins."""
    begin = {}
    if run.branch_from is not None:
        trunk, begin_of_branch = branch_point(run.branch_from)
        begin[f"branch of {trunk.name}"] = begin_of_branch
    stable = optim.stable_steps(run.steps)
    if stable is not None and stable < run.steps:
        begin[COOLDOWN] = stable
    return begin


def is_cooled_down(run: RunConfig, optim: OptimConfig, done: int) -> bool:
    """Whether the rate has fallen to its end after so many steps, or falls all along, as with cosine."""
    stable = optim.stable_steps(run.steps)
    return stable is None or stable < run.steps <= done


def describe_phases(run: RunConfig, optim: OptimConfig, done: int) -> str:
    """The phases after so many steps: "branch of trunk from step 500 on, cooldown from step 800 on"."""
    parts = [f"{name} from step {step} on" for name, step in phases(run, optim).items()]
    return ", ".join(parts if is_cooled_down(run, optim, done) else [*parts, NOT_COOLED_DOWN])


def saved_schedule(folder: Path) -> tuple[RunConfig, OptimConfig]:
    """The settings of a run's phases by its config.yaml, whatever command wrote it; where it has none, the defaults."""
    settings = saved_settings(folder)
    run, optim = group_of(settings, "run"), group_of(settings, "optim")
    with suppress(UserError, KeyError, TypeError):  # no settings of today's
        return (
            RunConfig(steps=run["steps"], branch_from=run.get("branch_from")),
            OptimConfig(schedule=optim["schedule"], cooldown=optim["cooldown"]),
        )
    return RunConfig(), OptimConfig()


def note_growth(encoder: str) -> None:
    """Note that the run of an encoder has continued since it was written.

    Args:
        encoder: any that a setting may name; of a run, its folder, its encoder, or the weights of it.
    """
    path = Path(encoder)
    path = path.parent if path.suffix == SAFETENSORS_SUFFIX else path
    run = run_of(path)
    step, newest = exported_step(run / ENCODER), newest_step(run)
    if path.name != BEST and step is not None and step < newest:
        note(f"{run / ENCODER} is of step {step}, and its run has continued to step {newest}")
