"""Branches: a run that goes on from a kept checkpoint of another run, the trunk, in a folder of its own."""

import shutil
from pathlib import Path
from typing import Any

from mpp.config import require
from mpp.config.imports import refuse_other_code, require_imports
from mpp.config.saved import describe_changes, parse_saved
from mpp.errors import UserError
from mpp.runtime.files import complete
from mpp.runtime.lock import hold
from mpp.training.checkpoint import checkpoint_path, damaged_files, kept_steps, newest_step
from mpp.training.growth import GROWING_SETTINGS, refuse_other_rates
from mpp.training.log import METRICS_FILE, UNREADABLE_FILE, drop_after
from mpp.training.record import RECORD_FILE
from mpp.training.run_folder import CONFIG_FILE, leave_out, saved_settings, settings_changed_since, write_config
from mpp.training.user_code import imports_used

COPIED_FILES = (METRICS_FILE, UNREADABLE_FILE, RECORD_FILE)


def branch_point(branch_from: str) -> tuple[Path, int]:
    """The trunk's folder and the step: "runs/trunk@8000"."""
    folder, _, step = branch_from.rpartition("@")
    return Path(folder).expanduser(), int(step)


def first_folder(config: Any) -> Path:
    """Folder with the settings of a run's steps so far: its own or, where it is to begin as a branch, the trunk's."""
    folder = Path(config.run.dir)
    if config.run.branch_from is None or (folder / CONFIG_FILE).is_file():
        return folder
    trunk, _ = branch_point(config.run.branch_from)
    return trunk


def begin_branch(config: Any, folder: Path) -> None:
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
    with hold(folder, "run.dir"):
        write_config(config, folder)
        for name in COPIED_FILES:
            if (trunk / name).is_file():
                with complete(folder / name) as partial:
                    shutil.copyfile(trunk / name, partial)
        drop_after(folder, step)
        copy_checkpoint(trunk, folder, step)


def refuse_other_branch(folder: Path, trunk: Path, step: int) -> None:
    """Raise UserError if a run did not begin at this checkpoint."""
    saved = (saved_settings(folder).get("run") or {}).get("branch_from")
    now = f"{trunk.absolute()}@{step}"
    if saved != now:
        origin = f"branched from {saved}" if saved else "began with its first step"
        raise UserError(f"run.branch_from is {now}, and the run in {folder} {origin}; choose another run.dir")


def refuse_other_trunk(config: Any, trunk: Path, step: int) -> None:
    """Raise UserError if a run cannot go on from this checkpoint."""
    key, value = "run.branch_from", f"{trunk}@{step}"
    require((trunk / CONFIG_FILE).is_file(), key, value, "FOLDER@STEP with the folder of a run")
    kept = kept_steps(trunk)
    allowed = f"one of the kept steps of that run: {', '.join(map(str, kept)) or 'there are none'}"
    require(step in kept, key, value, f"{allowed} (run.keep_at keeps some)")
    require_imports(trunk)
    refuse_other_code(trunk, imports_used(config))
    different = leave_out(settings_changed_since(config, trunk), GROWING_SETTINGS)
    if different:
        allowed = f"a run that differs in nothing but {', '.join(sorted(GROWING_SETTINGS))}"
        raise UserError(f"{key} is {value}, a run with {describe_changes(different, 'it')}; it must be {allowed}")
    refuse_other_rates(config, parse_saved(type(config), trunk / CONFIG_FILE), trunk, step)


def copy_checkpoint(trunk: Path, folder: Path, step: int) -> None:
    """Copy a checkpoint, verified; UserError where it is damaged."""
    source = checkpoint_path(trunk, step)
    target = checkpoint_path(folder, step)
    target.parent.mkdir(exist_ok=True)
    with complete(target) as partial:
        shutil.copytree(source, partial)
        damaged = damaged_files(partial)
        if damaged:
            raise UserError(f"{source} is damaged ({', '.join(damaged)}): no run can branch from it")
