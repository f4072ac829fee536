"""Branches: a run that continues from a kept checkpoint of another run, the trunk, in a folder of its own.

A branch is a copied checkpoint, and a comparison of all settings but four (`GROWING_SETTINGS`).
"""

import shutil
from contextlib import suppress
from pathlib import Path

from mpp.config import OptimConfig, RunConfig, TrainingConfig, require
from mpp.errors import UserError
from mpp.features.drift import START_FILE
from mpp.runtime.files import complete, hold
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

NOT_COOLED_DOWN = "not cooled down yet"
COPIED_FILES = (METRICS_FILE, UNREADABLE_FILE, RECORD_FILE, START_FILE)


# --- beginning a branch ---


def origin_of(config: TrainingConfig) -> tuple[str | None, Path]:
    """The checkpoint that a run branches from, and the folder with the settings of its steps so far.

    Returns:
        FOLDER@STEP, as it is given or, otherwise, as the run's folder says; None: it is no branch.
        The run's own folder or, where it is to begin as a branch, the trunk's.
    """
    folder = Path(config.run.dir)
    origin = config.run.branch_from or group_of(saved_settings(folder), "run").get("branch_from")
    if origin is None:
        return None, folder
    trunk, step = branch_point(origin)
    return f"{trunk}@{step}", folder if newest_step(folder) else trunk


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
        require(saved == origin, "run.branch_from", origin, f"{saved or 'left out'}, as when the run in {folder} began")
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
    kept = kept_steps(trunk)
    listed = ", ".join(map(str, kept)) or "there are none"
    allowed = f"FOLDER@STEP with a kept step of a run: {listed} (run.keep_at keeps some)"
    require(step in kept, "run.branch_from", f"{trunk}@{step}", allowed)
    refuse_other_settings(config, trunk, step)


def copy_beginning(trunk: Path, folder: Path, step: int) -> None:
    """Copy a checkpoint, verified, and before it the files that belong to it. The copies may be written."""
    for name in COPIED_FILES:
        if (trunk / name).is_file():
            with complete(folder / name) as partial:
                shutil.copyfile(trunk / name, partial)
    drop_after(folder, step)
    with complete(checkpoint_path(folder, step)) as partial:
        partial.mkdir(parents=True)
        for file in checkpoint_path(trunk, step).iterdir():
            shutil.copyfile(file, partial / file.name)
        damaged = damaged_files(partial)
        if damaged:
            raise OSError(f"{', '.join(damaged)} is damaged")


# --- checkpoints to branch from ---


def steps_to_keep(optim: OptimConfig, run: RunConfig) -> set[int]:
    """Steps of a run whose checkpoints are written and always stay: of `run.keep_at`, and where a cooldown begins."""
    kept = {*(run.keep_at or ()), optim.stable_steps(run.steps)}
    return kept - {None, run.steps}  # the last is the newest


# --- the cooldown ---


def is_cooled_down(steps: int, stable: int | None, done: int) -> bool:
    """Whether the rate has fallen to its end after `done` steps, or falls all along, as with cosine.

    Args:
        stable: see `OptimConfig.stable_steps`.
    """
    return stable is None or stable < steps <= done


def saved_schedule(folder: Path) -> tuple[int, int | None]:
    """Steps of a run, and those up to its cooldown, by its config.yaml; (0, None): it says neither."""
    settings = saved_settings(folder)
    with suppress(UserError, KeyError, TypeError):  # no settings of today's
        steps, optim = settings["run"]["steps"], settings["optim"]
        return steps, OptimConfig(schedule=optim["schedule"], cooldown=optim["cooldown"]).stable_steps(steps)
    return 0, None
