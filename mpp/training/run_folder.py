"""The run folder (its files: mpp/README.md): whether a run may write there, and whether the run is finished.

A run continues in its folder if all of its settings that are not operational are the same, its images and first weights
by number and digest, and its copies of the user's code, which are replaced before its first checkpoint. Its length and
schedule may change as far as the steps that are done would have been the same. A branch is a copied checkpoint, and a
comparison of all settings but these.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm

from mpp.config import OptimConfig, RunConfig, TrainingConfig, flatten, rebuild, require, settings_of, show
from mpp.config.imports import COPIES, OPTION, changed_imports, imported
from mpp.config.parsing import parse_saved, read_yaml, to_yaml
from mpp.corruption import PATTERNS
from mpp.data.data_path import is_local
from mpp.data.identity import differences
from mpp.errors import UserError
from mpp.features.drift import START_FILE
from mpp.models.descriptions import saved_config
from mpp.models.encoder import with_architecture
from mpp.models.networks import NETWORKS
from mpp.models.teachers import moving_average_decay
from mpp.objectives import OBJECTIVES
from mpp.runtime.files import complete, delete, hold, read_json, write_complete
from mpp.runtime.signals import MARKER
from mpp.runtime.weights import ENCODER
from mpp.training.checkpoint import checkpoint_path, kept_steps, newest_step
from mpp.training.log import METRICS_FILE, UNREADABLE_FILE, drop_after
from mpp.training.optim import learning_rate

CONFIG_FILE = "config.yaml"
RECORD_FILE = "data.json"
REPORT_PAGE = "report.html"
CHECK_CROPS = "check_crops.png"
BEFORE_CONFIG = {MARKER, CHECK_CROPS, COPIES}
"""Names in a folder in which a run has not begun yet, besides hidden ones."""
PATH_SETTINGS = (
    *("encoder", "checkpoint", "data.path", "data.labels", "model.init_from"),
    *("objective.teacher", "objective.teacher_checkpoint", "probe.path", "distill.teacher"),
)
"""Settings of all commands that may name a local file or folder."""
IN_RECORD = ("data.path", "data.labels", "data.label_folder")
"""Settings that are not compared: the record has digests of the images and, where they are learned, of the labels."""
GROWING_SETTINGS = ("run.steps", "optim.schedule", "optim.cooldown", "optim.warmup_steps")
"""Settings that may differ where the steps that are done would have been the same: `same_until`."""
OURS = ("mpp", "timm")
"""Packages whose parts are not the user's."""
REGISTRIES = (OBJECTIVES, PATTERNS, NETWORKS)
COPIED_FILES = (METRICS_FILE, UNREADABLE_FILE, RECORD_FILE, START_FILE)
"""Files that a branch takes from its trunk, with a checkpoint."""
Changes = dict[str, tuple[Any, Any]]
"""Key of a setting -> its value before, its value now."""


# --- what is saved ---


Saved = defaultdict[str, dict[str, Any]]
"""Saved settings or records by group: one that was not saved is empty."""


def saved_settings(folder: Path) -> Saved:
    """The settings of a run folder's config.yaml, whatever command wrote it; empty if there is none."""
    with suppress(OSError, UserError):  # missing or damaged
        return Saved(dict, read_yaml(folder / CONFIG_FILE))
    return Saved(dict)


def encoders_named(settings: Mapping[str, Any]) -> dict[str, str]:
    """The encoders, or their weights, that a run begins from and is taught by: setting -> its value.

    Args:
        settings: of any training command, by their dotted names.
    """
    teacher = settings.get("objective.teacher")
    is_frozen = settings.get("objective.name") == "features" and teacher != "ema"
    named = {
        "model.init_from": settings.get("model.init_from"),
        "objective.teacher": is_frozen and (settings.get("objective.teacher_checkpoint") or teacher),
        "distill.teacher": settings.get("distill.teacher"),
        "encoder": settings.get("init") == "encoder" and (settings.get("checkpoint") or settings.get("encoder")),
    }
    return {setting: encoder for setting, encoder in named.items() if encoder}


def first_encoders(config: TrainingConfig) -> dict[str, str]:
    """Those of `encoders_named` that no other setting has the digest of."""
    named = encoders_named(flatten(config))
    return {setting: named[setting] for setting in ("model.init_from", "objective.teacher") if setting in named}


def read_record(folder: Path) -> Saved:
    """The record of a run's images; empty if it has none."""
    return Saved(dict, read_json(folder / RECORD_FILE))


def recorded_commit(folder: Path, part: str = "train") -> str | None:
    """The commit of the hub dataset that a run began with; None: its images are from elsewhere, or it has not begun.

    Args:
        part: of the record.
    """
    return read_record(folder)[part].get("revision")


def is_finished(config: TrainingConfig, folder: Path) -> bool:
    """Whether a run is at its end, and its images are named as before, so that they need not be compared.

    Its encoder may be an earlier one, if it has grown.
    """
    steps, encoder = config.run.steps, folder / ENCODER
    if newest_step(folder) != steps or not encoder.is_dir() or saved_config(encoder).get("step") not in (steps, None):
        return False
    saved, now = flatten(parse_saved(type(config), folder / CONFIG_FILE)), flatten(config)
    return all(saved[key] in (now[key], absolute(now[key])) for key in IN_RECORD)


def branch_point(branch_from: str) -> tuple[Path, int]:
    """The trunk's folder, absolute, and the step: of "runs/trunk@8000"."""
    folder, _, step = branch_from.rpartition("@")
    require(folder and step.isdecimal(), "run.branch_from", branch_from, "FOLDER@STEP, such as runs/trunk@8000")
    return Path(folder).expanduser().absolute(), int(step)


# --- code of the user ---


def parts_named(config: TrainingConfig) -> list[Any]:
    """The functions and classes that settings name: of mpp, of timm, or of a file of `--import`.

    Raises:
        UserError: nothing has registered one, or one has `arguments` that is not the user's and takes none.
    """
    settings = flatten(config)
    parts = []
    for registry in REGISTRIES:
        key, name = registry.setting, settings.get(registry.setting)
        if name is not None:
            parts.append(registry[name])
            arguments = f"{key.partition('.')[0]}.arguments"
            takes_any = settings[arguments] is None or is_of_user(parts[-1])
            require(takes_any, arguments, settings[arguments], f"null or left out: {key} {name} takes none")
    model = settings.get("model.name")
    if model and timm.is_model(model):
        parts.append(timm.model_entrypoint(model))
    return parts


def is_of_user(part: Any) -> bool:
    """Whether a function or class is neither mpp's nor timm's."""
    return part.__module__.partition(".")[0] not in OURS


def imports_used(config: TrainingConfig) -> dict[str, bytes]:
    """The imported files that a run depends on: all, if its settings name any part of the user, and else none."""
    return imported if any(map(is_of_user, parts_named(config))) else {}


# --- whether a run may write there ---


def refuse_other_run(config: TrainingConfig, folder: Path) -> None:
    """Raise UserError if a folder holds something else, or a run that cannot continue under this config."""
    refuse_among_images("run.dir", folder, config.data.path)
    refuse_among_images("run.dir", folder, config.probe and config.probe.path)
    require(is_run_folder(folder), "run.dir", folder, "the folder of a run, or a new one: this holds something else")
    if (folder / CONFIG_FILE).is_file():
        refuse_other_settings(config, folder, newest_step(folder))


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is new, or a run's, or has only the files of a check, or of a run that ended before it began."""
    if not folder.is_dir():
        return not folder.exists()
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    return CONFIG_FILE in names or names <= BEFORE_CONFIG


def refuse_among_images(key: str, place: Path, path: str | None) -> None:
    """Raise UserError if a place to write to is inside a folder of images.

    Args:
        key: the setting that names the place.
    """
    images = Path(path or "").expanduser()
    if path and images.is_dir() and place.resolve().is_relative_to(images.resolve()):
        raise UserError(f"{key} is {place}, inside the images of {images}: its pictures would join the images")


def changes(before: Any, now: Any) -> Changes:
    """Settings that are not operational in which two configs of one kind differ."""
    saved = flatten(before)
    relevant = [each for each in settings_of(now) if not each.about["operational"]]
    return {each.key: (saved[each.key], each.value) for each in relevant if each.value != saved[each.key]}


def refuse_other_settings(config: TrainingConfig, folder: Path, done: int) -> None:
    """Raise UserError if `done` steps of the run in a folder cannot be those of a run under `config`."""
    before = parse_saved(type(config), folder / CONFIG_FILE)
    if before.model is not None:  # earlier versions saved null for a number
        before = replace(before, model=with_architecture(before.model))
    different = changes(make_paths_absolute(before), make_paths_absolute(config))
    for name in changed_imports(folder, imports_used(config)) if done else ():
        different[f"{OPTION} {name}"] = (f"as in {folder / COPIES}", "other code")
    allowed = {*IN_RECORD, *GROWING_SETTINGS, "run.compile"}  # which changes only the rounding
    others = {key: values for key, values in different.items() if key not in allowed}
    if others:
        listed = ", ".join(f"{key} ({show(was)} in the run, {show(now)} now)" for key, (was, now) in others.items())
        raise UserError(
            f"{folder} is a run with another config: {listed}; only {', '.join(GROWING_SETTINGS)} may differ: "
            "choose another run.dir, or the same values to continue"
        )
    steps = config.run.steps
    allowed = f"at least {done}, the steps of {folder} that are done; or choose another run.dir"
    require(steps >= done, "run.steps", steps, allowed)
    same = same_until(config, before, done)
    if same < done:
        kept = [step for step in kept_steps(folder) if step <= same]
        way = "choose another run.dir"
        if kept:
            way = f"branch from an earlier step (--run.branch_from {folder}@{kept[-1]} --run.dir NEW)"
        elif not config.is_fine_tuning:
            first = "" if (folder / ENCODER).is_dir() else "finish it with its own values, then "
            way = f"{first}begin a new run from its encoder (--model.init_from {folder} --run.dir NEW)"
        raise UserError(
            f"{folder} is a run that cannot continue with this length or schedule: the learning rate, or the decay of "
            f"the teacher's average, of step {same} would have been another; {way}"
        )


def same_until(config: TrainingConfig, before: TrainingConfig, done: int) -> int:
    """The first step (from 0) that two configs take in different ways, or `done`, if none before it.

    Nothing else in a step depends on the length of its run.
    """
    return next((step for step in range(done) if schedule_at(config, step) != schedule_at(before, step)), done)


def schedule_at(config: TrainingConfig, step: int) -> tuple[float, float | None]:
    """The values of a step that depend on the length of the run: its learning rate, its teacher's decay."""
    steps = config.run.steps
    decay = moving_average_decay(config.objective.half_life, step, steps) if config.moves_teacher else None
    return learning_rate(config.optim, step, steps), decay


# --- writing ---


def write_config(config: TrainingConfig, folder: Path) -> None:
    """Save the resolved config, before anything else is written; UserError if the folder is not the run's.

    Paths are saved absolute: the run's images and weights are read again later, from other folders.
    """
    refuse_other_run(config, folder)  # once more: building the task may have taken long
    folder.mkdir(parents=True, exist_ok=True)
    if not newest_step(folder):
        delete(folder / COPIES)  # nothing is lost if the code has changed
    for name, content in imports_used(config).items():
        copy = folder / COPIES / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with complete(copy) as partial:
            partial.write_bytes(content)
    write_complete(folder / CONFIG_FILE, to_yaml(make_paths_absolute(config)))


def write_beginning(config: TrainingConfig, folder: Path, records: list[dict[str, Any]]) -> None:
    """Save the config of a run, and its images and first weights.

    Args:
        records: of each node, which may have copies of its own: with other images, its split and order would be others.
    Raises:
        UserError: the folder is not the run's, or the run, or another node, began with others; nothing is saved.
    """
    before = read_record(folder)
    for record in records:
        changed = differences(records[0] | before, record)
        if changed:
            raise UserError(
                f"run.dir {folder} is of a run that was started with other images or weights: {'; '.join(changed)}; or "
                "another node has others; choose another run.dir, or restore the original ones"
            )
    write_config(config, folder)
    kept = before | records[0]  # parts that the run leaves out now are compared again later
    write_complete(folder / RECORD_FILE, json.dumps(kept, indent=1))


def make_paths_absolute(config: TrainingConfig) -> TrainingConfig:
    """The config with absolute paths of local files and folders; names of the hub and of timm stay."""
    settings = flatten(config)
    local = [key for key in PATH_SETTINGS if is_local(settings.get(key))]
    return rebuild(config, {key: absolute(settings[key]) for key in local})


def absolute(path: str | None) -> str:
    """A path from the root on, also of what is gone."""
    return str(Path(str(path)).expanduser().absolute())


# --- branches: runs that continue from a kept checkpoint of another run, the trunk ---


def origin_of(config: TrainingConfig) -> tuple[str | None, Path]:
    """The checkpoint that a run branches from, and the folder with the settings of its steps so far.

    Returns:
        FOLDER@STEP, as it is given or, otherwise, as the run's folder says; None: it is no branch.
        The run's own folder or, where it is to begin as a branch, the trunk's.
    """
    folder = Path(config.run.dir)
    origin = config.run.branch_from or saved_settings(folder)["run"].get("branch_from")
    if origin is None:
        return None, folder
    trunk, step = branch_point(origin)
    return f"{trunk}@{step}", folder if newest_step(folder) else trunk


def begin_branch(config: TrainingConfig, folder: Path) -> None:
    """Copy a branch's first checkpoint, and the files that belong to it, from the trunk; afterwards it is resumed.

    A branch with a checkpoint is left as it is. The checkpoint comes last, so an interrupted copy is made again; it is
    verified when it is resumed. The copies may be written.

    Raises:
        UserError: there is no such checkpoint; or the trunk has other settings, or had another rate.
        OSError: it cannot be copied.
    """
    origin = config.run.branch_from
    trunk, step = branch_point(origin)
    if newest_step(folder):
        saved = saved_settings(folder)["run"].get("branch_from")
        require(saved == origin, "run.branch_from", origin, f"{saved or 'left out'}, as when the run in {folder} began")
        return
    refuse_other_trunk(config)
    with hold(folder, "run.dir"):
        write_config(config, folder)
        for name in COPIED_FILES:
            if (trunk / name).is_file():
                with complete(folder / name) as partial:
                    shutil.copyfile(trunk / name, partial)
        drop_after(folder, step)
        with complete(checkpoint_path(folder, step)) as partial:
            partial.mkdir(parents=True)
            for file in checkpoint_path(trunk, step).iterdir():
                shutil.copyfile(file, partial / file.name)


def refuse_other_trunk(config: TrainingConfig) -> None:
    """Raise UserError where a run cannot begin as the branch that its config asks for."""
    trunk, step = branch_point(config.run.branch_from)
    kept = kept_steps(trunk)
    listed = ", ".join(map(str, kept)) or "there are none"
    allowed = f"FOLDER@STEP with a kept step of a run: {listed} (run.keep_at keeps some)"
    require(step in kept, "run.branch_from", config.run.branch_from, allowed)
    refuse_other_settings(config, trunk, step)


def steps_to_keep(optim: OptimConfig, run: RunConfig) -> set[int]:
    """Steps of a run whose checkpoints are written and always stay: of `run.keep_at`, and where a cooldown begins."""
    kept = {*(run.keep_at or ()), optim.stable_steps(run.steps)}
    return kept - {None, run.steps}  # the last is the newest
