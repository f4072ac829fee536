"""Branches: a run that continues from a kept checkpoint of another run, the trunk, in a folder of its own."""

import shutil
from pathlib import Path

from mpp.config import TrainingConfig, require
from mpp.config.imports import require_imports
from mpp.config.parsing import parse_saved
from mpp.errors import UserError
from mpp.features.drift import START_FILE
from mpp.runtime.files import complete, hold
from mpp.training.checkpoint import checkpoint_path, damaged_files, kept_steps, newest_step
from mpp.training.growth import GROWING_SETTINGS, branch_point, refuse_other_rates
from mpp.training.log import METRICS_FILE, UNREADABLE_FILE, drop_after
from mpp.training.record import RECORD_FILE
from mpp.training.run_folder import (
    CONFIG_FILE,
    describe_changes,
    group_of,
    saved_settings,
    settings_changed_since,
    without_settings,
    write_config,
)

COPIED_FILES = (METRICS_FILE, UNREADABLE_FILE, RECORD_FILE, START_FILE)


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
        UserError: there is no such checkpoint; or the trunk differs in more than its length, or was trained at another
            rate up to there.
    """
    trunk, step = branch_point(config.run.branch_from)
    if newest_step(folder):
        refuse_other_branch(folder, trunk, step)
        return
    refuse_other_trunk(config, trunk, step)
    refuse_damaged(trunk, step)
    with hold(folder, "run.dir"):
        if newest_step(folder):  # another process began it meanwhile
            return
        write_config(config, folder)
        try:
            copy_files(trunk, folder, step)
        except OSError as error:
            raise UserError(describe_failed_copy(trunk, folder, step, error)) from error


def copy_files(trunk: Path, folder: Path, step: int) -> None:
    """Copy a checkpoint, and before it the files that belong to it, from the trunk to a branch's folder."""
    for name in COPIED_FILES:
        if (trunk / name).is_file():
            with complete(folder / name) as partial:
                shutil.copyfile(trunk / name, partial)
    drop_after(folder, step)
    copy_checkpoint(trunk, folder, step)


def describe_failed_copy(trunk: Path, folder: Path, step: int, error: OSError) -> str:
    """Why a checkpoint was not copied, in a line."""
    source = checkpoint_path(trunk, step)
    if not source.is_dir():
        return f"{source} was deleted while it was copied, by its own run; branch from a step of its run.keep_at"
    return f"{folder}: {source} cannot be copied ({error}); nothing is lost, and the same command copies it again"


def refuse_other_branch(folder: Path, trunk: Path, step: int) -> None:
    """Raise UserError if a run did not begin at this checkpoint."""
    saved = group_of(saved_settings(folder), "run").get("branch_from")
    now = f"{trunk}@{step}"
    if saved is None or branch_point(saved) != (trunk, step):
        origin = f"branched from {saved}" if saved else "began with its first step"
        advice = "leave out run.branch_from to continue that run, or choose another run.dir"
        raise UserError(f"run.branch_from is {now}, and the run in {folder} {origin}; {advice}")


def refuse_other_trunk(config: TrainingConfig, trunk: Path, step: int) -> None:
    """Raise UserError if a run cannot continue from this checkpoint."""
    key, value = "run.branch_from", f"{trunk}@{step}"
    require((trunk / CONFIG_FILE).is_file(), key, value, "FOLDER@STEP with the folder of a run")
    kept = kept_steps(trunk)
    allowed = f"one of the kept steps of that run: {', '.join(map(str, kept)) or 'there are none'}"
    require(step in kept, key, value, f"{allowed} (run.keep_at keeps some)")
    steps = config.run.steps
    require(steps >= step, "run.steps", steps, f"at least {step}, where the run branches from {trunk}")
    require_imports(trunk)
    different = without_settings(settings_changed_since(config, trunk), GROWING_SETTINGS)
    if different:
        allowed = f"a run that differs only in {', '.join(sorted(GROWING_SETTINGS))}"
        raise UserError(f"{key} is {value}, a run with {describe_changes(different, 'it')}; it must be {allowed}")
    refuse_other_rates(config, parse_saved(type(config), trunk / CONFIG_FILE), trunk, step)


def refuse_damaged(trunk: Path, step: int) -> None:
    """Raise UserError if a checkpoint is damaged."""
    source = checkpoint_path(trunk, step)
    damaged = damaged_files(source)
    if damaged:
        others = ", ".join(str(kept) for kept in kept_steps(trunk) if kept != step) or "none"
        message = f"{source} is damaged ({', '.join(damaged)}): no run can branch from it; other kept steps: {others}"
        raise UserError(message)


def copy_checkpoint(trunk: Path, folder: Path, step: int) -> None:
    """Copy a checkpoint, verified; UserError where it is damaged. Its copy may be written, even if it may not."""
    source = checkpoint_path(trunk, step)
    target = checkpoint_path(folder, step)
    target.parent.mkdir(exist_ok=True)
    with complete(target) as partial:
        partial.mkdir()
        for file in source.iterdir():
            shutil.copyfile(file, partial / file.name)
        damaged = damaged_files(partial)
        if damaged:
            raise OSError(f"the copies of {', '.join(damaged)} differ")
