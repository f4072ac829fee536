"""The run folder: its files, whether a run may write there, and whether the run is finished.

config.yaml                        the resolved config
imports/                           copies of the user's code (--import), where the run uses any; never executed
data.json                          the images that it began with (mpp/training/record.py)
metrics.jsonl, events.out.*        scalars; pictures
start.safetensors                  weights and neighbours at the start of a run from weights (mpp/features/drift.py)
heldout_patches.npz                masked patches of each held-out image (mpp/features/metrics.py)
checkpoints/step_XXXXXXXX/         model.safetensors, optimizer.safetensors, cursors.json, state.json
encoder/, encoder_best/            timm's layout: when the run is finished; with the best features (run.keep_best)
evaluation/                        results and pictures of the evaluation commands
unreadable.txt                     images that could not be decoded
wandb_id                           the run's id, where wandb is asked for
preempted                          the marker of a run that a signal stopped (mpp/runtime/signals.py)
check_crops.png                    training crops, drawn by `mpp check` before the run (evaluation/check.py)
report.html                        the page on the run (evaluation/report.py)
verdict.json                       verdict and warnings of the last evaluation (mpp/training/watch.py)
.lock                              held while a process writes here (mpp/runtime/files.py)
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mpp.config import TrainingConfig, flatten, require, settings_of, show
from mpp.config.imports import COPIES, OPTION, changed_imports, require_imports
from mpp.config.parsing import parse_saved, read_yaml, to_yaml
from mpp.data.data_path import is_local
from mpp.errors import UserError
from mpp.models.descriptions import exported_step
from mpp.runtime.files import LOCK, complete, delete, partial_path, write_complete
from mpp.runtime.messages import printable
from mpp.runtime.signals import MARKER
from mpp.runtime.weights import ENCODER
from mpp.training.checkpoint import newest_step
from mpp.training.growth import GROWING_SETTINGS, branch_point, refuse_other_rates
from mpp.training.record import has_moved_images, path_after_move
from mpp.training.user_code import imports_used

CONFIG_FILE = "config.yaml"
REPORT_PAGE = "report.html"
CHECK_CROPS = "check_crops.png"
PATH_SETTINGS = {
    "": ("encoder", "checkpoint"),
    "data": ("path", "labels"),
    "model": ("init_from",),
    "objective": ("teacher", "teacher_checkpoint"),
    "probe": ("path",),
    "distill": ("teacher",),
}
"""Settings of all commands that may name a local file or folder, by their group."""


def open_run(config: TrainingConfig, accelerator: Accelerator) -> Path:
    """The run folder of `config.run.dir`, new or to be resumed. Every process may call it; only the marker goes.

    Raises:
        UserError: the folder holds something else, or a run of another config (the settings that differ are named).
    """
    folder = Path(config.run.dir)
    if accelerator.is_main_process and folder.is_dir() and is_run_folder(folder):
        (folder / MARKER).unlink(missing_ok=True)  # before anything can fail: a script may repeat a marked run
    refuse_other_run(config, folder)
    return folder


def refuse_other_run(config: TrainingConfig, folder: Path) -> None:
    """Raise UserError if a folder holds something else, or a run of another config."""
    shown = printable(str(folder))
    require(shown == str(folder), "run.dir", shown, "a name in UTF-8, which TensorBoard's files need")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run.dir is {folder}, which is not a folder")
    refuse_among_images("run.dir", folder, "data", config.data.path)
    refuse_among_images("run.dir", folder, "probe", config.probe and config.probe.path)
    if not is_run_folder(folder):
        raise UserError(f"run.dir is {folder}, which holds other files but no run; choose another run.dir")
    if not (folder / CONFIG_FILE).is_file():
        return
    require_imports(folder)
    different = settings_changed_since(config, folder)
    if different and GROWING_SETTINGS.issuperset(different):
        refuse_other_rates(config, parse_saved(type(config), folder / CONFIG_FILE), folder, newest_step(folder))
    elif different:
        raise UserError(
            f"run.dir is {folder}, a run with another config: {describe_changes(different, 'the run')}; "
            "choose another run.dir, or the same values to resume"
        )


def refuse_among_images(key: str, place: Path, group: str, path: str | None) -> None:
    """Raise UserError if a place to write to is inside a folder of images, the `path` of this group of settings.

    Args:
        key: the setting that names the place.
    """
    images = Path(path or "").expanduser()
    if path and images.is_dir() and place.resolve().is_relative_to(images.resolve()):
        raise UserError(f"{key} is {place}, inside {group}.path {images}: its pictures would join the images")


LABEL_FOLDER = "data.label_folder"
"""A run that has saved inner, as all older ones, may have another: the record of its images has their labels."""
Changes = dict[str, tuple[Any, Any]]
"""Key of a setting -> its value before, its value now."""


def changes(before: Any, now: Any) -> Changes:
    """Settings that are not operational in which two configs of one kind differ."""
    saved = flatten(before)
    relevant = [each for each in settings_of(now) if not each.about["operational"]]
    found = {each.key: (saved[each.key], each.value) for each in relevant if each.value != saved[each.key]}
    return {key: values for key, values in found.items() if not (key == LABEL_FOLDER and values[0] == "inner")}


def describe_changes(changes: Changes, saved_in: str) -> str:
    """Changed settings with both values: "optim.lr (0.01 in the run, 0.02 now)".

    Args:
        saved_in: name of the thing made with the earlier values, such as "the run".
    """
    return ", ".join(f"{key} ({show(before)} in {saved_in}, {show(now)} now)" for key, (before, now) in changes.items())


def settings_changed_since(config: TrainingConfig, folder: Path) -> Changes:
    """Settings in which a config differs from a run's, and with which the run may not continue; so with imported files.

    Images that have moved as a whole count as the same. Compiling changes only the rounding. A number that stands for
    null on both sides is left out where another setting made it differ.
    """
    before = parse_saved(type(config), folder / CONFIG_FILE)
    different = changes(make_paths_absolute(before), make_paths_absolute(config))
    different.pop("run.compile", None)
    derived = derived_settings(config) & derived_settings(before)
    different = without_settings(different, derived) or different
    for name in changed_imports(folder, imports_used(config)):
        different[f"{OPTION} {name}"] = (f"as in {folder / COPIES}", "other code")
    if "data.path" not in different:
        return different
    before = group_of(saved_settings(folder), "data")
    data = make_paths_absolute(config).data
    if not has_moved_images(folder, before.get("path"), data):
        return different
    same = {"data.path"}
    if path_after_move(before.get("labels"), before["path"], data.path) == data.labels:
        same.add("data.labels")
    return without_settings(different, same)


def derived_settings(config: TrainingConfig) -> set[str]:
    """Keys of settings whose value is the one that null stands for in this config."""
    optim = config.optim
    usual = replace(optim, warmup_steps=None, momentum=None).resolved(config.run.steps)
    return {f"optim.{name}" for name in ("warmup_steps", "momentum") if getattr(optim, name) == getattr(usual, name)}


def without_settings(different: Changes, keys: set[str]) -> Changes:
    """The differences in all other settings."""
    return {key: values for key, values in different.items() if key not in keys}


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is new, or a run's, or has only the files of a check, or of a run that ended before it began."""
    if (folder / CONFIG_FILE).is_file() or not folder.is_dir():
        return True
    before_config = {LOCK, ".lock.holder", MARKER, CHECK_CROPS, COPIES, partial_path(folder / CONFIG_FILE).name}
    return {path.name for path in folder.iterdir()} <= before_config


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a run of so many steps is at its end, with its encoder: one that grew may have an earlier one."""
    encoder = folder / ENCODER
    return newest_step(folder) == steps and encoder.is_dir() and exported_step(encoder) in (steps, None)


def saved_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run folder's config.yaml, whatever command wrote it; {} if there is none."""
    with suppress(OSError, UserError):  # missing or damaged
        return read_yaml(folder / CONFIG_FILE)
    return {}


def group_of(saved: dict[str, Any], name: str) -> dict[str, Any]:
    """A group of saved settings or of a record; empty where it was not saved."""
    return saved.get(name) or {}


def write_config(config: TrainingConfig, folder: Path) -> None:
    """Save the resolved config, before anything else is written; UserError if the folder is not the run's.

    Paths are saved absolute: the run's images and weights are read again later, from other folders.
    """
    refuse_other_run(config, folder)  # once more: building the task may have taken long
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG_FILE).is_file():
        delete(folder / COPIES)  # of a start that was killed before it wrote the config
    for name, content in imports_used(config).items():
        copy = folder / COPIES / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with complete(copy) as partial:
            partial.write_bytes(content)
    write_complete(folder / CONFIG_FILE, to_yaml(make_paths_absolute(config)))


def make_paths_absolute(config: TrainingConfig) -> TrainingConfig:
    """The config with absolute paths of local files and folders; names of the hub and of timm stay."""
    for group, names in PATH_SETTINGS.items():
        holder = getattr(config, group, None) if group else config
        absolute = {}
        for name in names:
            value = getattr(holder, name, None)
            if is_local(value):
                absolute[name] = str(Path(value).expanduser().absolute())
        if not absolute:
            continue
        changes = {group: replace(holder, **absolute)} if group else absolute
        config = replace(config, **changes)
    if config.run.branch_from is not None:
        trunk, step = branch_point(config.run.branch_from)
        config = replace(config, run=replace(config.run, branch_from=f"{trunk}@{step}"))
    return config
