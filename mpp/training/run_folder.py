"""The run folder: whose it is, what it says of itself, whether it is finished.

config.yaml                        the resolved config
imports.json                       name and digest of the user's code (--import), where the run uses any
data.json                          which images it is of (mpp/data/identity.py)
metrics.jsonl, events.out.*        scalars; pictures
checkpoints/step_XXXXXXXX/         model.safetensors, optimizer.safetensors, cursors.json, state.json
encoder/                           timm's layout, when the run is finished
preempted                          the marker of a run that a signal stopped (mpp/runtime/signals.py)
check.html                         what was looked at before the run (evaluation/check.py)
report.html                        a page on the run (evaluation/report.py)
verdict.json                       what was said of it after the last evaluation (mpp/training/watch.py)
.lock                              held while a process writes here (mpp/runtime/lock.py)
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mpp.config import SourceConfig, require
from mpp.config.imports import IMPORTS_FILE, imports_as_json, refuse_other_code
from mpp.config.parsing import changed_keys, read_saved, to_yaml
from mpp.data.data_path import could_be_hub_name, is_local, is_url
from mpp.data.identity import differences, digest_listing, identify_images, keep_known_files, unlisted_parts
from mpp.data.kept_samples import list_stream_files
from mpp.data.sources import load_image_datasets
from mpp.errors import UserError
from mpp.runtime import lock
from mpp.runtime.files import partial_path, write_complete
from mpp.runtime.output import printable
from mpp.runtime.signals import MARKER
from mpp.training.checkpoint import newest_step
from mpp.training.user_code import imports_used

CONFIG, IMAGES = "config.yaml", "data.json"
REPORT, CHECK = "report.html", "check.html"  # what evaluation/report.py and evaluation/check.py write
PLACES = {
    "": ("encoder", "checkpoint"),
    "data": ("path", "labels"),
    "model": ("init_from",),
    "objective": ("teacher", "teacher_checkpoint"),
    "distill": ("teacher",),
}
"""Settings of all commands that may name a file or a folder here, by their group."""


def open_run(config: Any, accelerator: Accelerator) -> Path:
    """The run folder of `config.run.dir`, new or to be resumed. Every process may call it; only the marker goes.

    Raises:
        UserError: the folder holds something else, or a run of another config (the keys that differ are named).
    """
    folder = Path(config.run.dir)
    if accelerator.is_main_process and folder.is_dir() and is_ours(folder):
        (folder / MARKER).unlink(missing_ok=True)  # before anything can fail: a script may repeat what has the marker
    check_owner(config, folder)
    return folder


def check_owner(config: Any, folder: Path) -> None:
    """Raise UserError where a folder holds something else, or a run of another config."""
    shown = printable(str(folder))
    require(shown == str(folder), "run.dir", shown, "a name in UTF-8, which TensorBoard's files need")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run.dir is {folder}, which is not a folder")
    images = Path(config.data.path or "").expanduser()
    if config.data.path and images.is_dir() and folder.resolve().is_relative_to(images.resolve()):
        raise UserError(f"run.dir is {folder}, inside data.path {images}: its pictures would join the images")
    if not is_ours(folder):
        raise UserError(f"run.dir is {folder}, which holds other files and no run; choose another run.dir")
    saved = folder / CONFIG
    imports = imports_used(config)
    if saved.is_file():
        refuse_other_code(folder, imports)
    different = changed_keys(config, saved, with_absolute_paths) if saved.is_file() else []
    data = getattr(with_absolute_paths(config), "data", None)
    if "data.path" in different and has_moved_images(folder, data):
        was = saved_settings(folder)["data"]
        different.remove("data.path")
        if moved_along(was.get("labels"), was["path"], data.path) == data.labels:
            different = [key for key in different if key != "data.labels"]
    if different:
        raise UserError(
            f"run.dir is {folder}, a run made with another config: {', '.join(different)} differ; "
            "choose another run.dir, or the same values to resume"
        )


def is_ours(folder: Path) -> bool:
    """Whether a folder is a run's, or has nothing in it but what a check or a run leaves that ended before it began."""
    if (folder / CONFIG).is_file() or not folder.is_dir():
        return True
    before_config = {*lock.FILES, MARKER, CHECK, IMPORTS_FILE}
    before_config |= {partial_path(folder / name).name for name in (IMPORTS_FILE, CONFIG)}
    return {path.name for path in folder.iterdir()} <= before_config


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a run of so many steps is at its end, and its encoder written."""
    return newest_step(folder) == steps and (folder / "encoder").is_dir()


def saved_settings(folder: Path) -> dict[str, Any]:
    """What a run folder's config.yaml says, whatever command wrote it; nothing where there is none."""
    return read_saved(folder / CONFIG)


def write_config(config: Any, folder: Path) -> None:
    """Save the resolved config, before anything else is written; UserError where the folder is not the run's.

    Paths are saved absolute: the run's images and weights are read again later, from other folders.
    """
    check_owner(config, folder)  # once more: building the task may have taken long
    folder.mkdir(parents=True, exist_ok=True)
    imports = imports_used(config)
    if imports:
        write_complete(folder / IMPORTS_FILE, imports_as_json(imports))
    write_complete(folder / CONFIG, to_yaml(with_absolute_paths(config)))


def with_absolute_paths(config: Any) -> Any:
    """The config with absolute paths of files and folders that are here; names of the hub and of timm stay."""
    for group, names in PLACES.items():
        holder = getattr(config, group, None) if group else config
        given = {name: getattr(holder, name, None) for name in names}
        here = {name: str(Path(value).expanduser().absolute()) for name, value in given.items() if is_local(value)}
        if here:
            config = replace(config, **({group: replace(holder, **here)} if group else here))
    return config


def write_record(folder: Path, images: dict[str, Any]) -> None:
    """Save which images (and first weights) a run is of.

    That the images of a run that goes on cannot be compared is said on stderr.

    Raises:
        UserError: the run began with others; nothing is saved.
    """
    before = images_of(folder) or images
    changed = differences(before, images)
    if changed:
        raise UserError(
            f"run.dir is {folder}, a run that began otherwise: {'; '.join(changed)}; "
            "choose another run.dir, or put back what it began with"
        )
    for part in sorted(unlisted_parts(before) | unlisted_parts(images)) if before is not images else ():
        when = "now" if part in unlisted_parts(images) else "when the run began"
        unknown = f"the files could not be listed {when}; whether they are those that the run began with is unknown"
        print(f"warning: {folder}: {part}: {unknown}", file=sys.stderr)
    write_complete(folder / IMAGES, json.dumps(keep_known_files(before, images), indent=1))


def moved_along(file: str | None, before: str, now: str) -> str | None:
    """The path of a file after a folder has moved from `before` to `now`; other files keep theirs."""
    if file is None or not Path(file).is_relative_to(before):
        return file
    return str(Path(now) / Path(file).relative_to(before))


def has_moved_images(folder: Path, data: SourceConfig) -> bool:
    """Whether the images of a run, which are no longer where they were, are those that `data.path` names.

    Raises:
        UserError: `data.path` names a dataset of the hub where the run's was a folder, or images that cannot be loaded.
    """
    was = (saved_settings(folder).get("data") or {}).get("path")
    if was is None or could_be_hub_name(was) or is_url(was) or is_local(was):
        return False
    if not is_local(data.path):
        raise UserError(
            f"data.path is {data.path}; the images of {folder} were at {was}, which is gone: name its place"
        )
    return bool(images_of(folder)) and not changed_images(folder, data)


def changed_images(
    folder: Path, data: SourceConfig, load: Callable[[SourceConfig], Any] = load_image_datasets
) -> list[str]:
    """How images differ from those that a run began with, in words; empty: the same, as far as data.json says.

    For a stream the names and sizes of the files are compared, otherwise names, and the bytes of some files.

    Args:
        data: the settings of the run's images, perhaps with another `path`.
        load: loads the training and the held-out images.
    Raises:
        UserError: they cannot be loaded.
    """
    began = images_of(folder) or {}
    train = began.get("train", {})
    if "shards" in train and "names" not in train:
        return differences(began, {"train": {"files": digest_listing(list_stream_files(data))}})
    now = {}
    for part, dataset in zip(("train", "held_out"), load(data), strict=True):
        known = identify_images(dataset, labels=False, retries=data.read_retries)
        now[part] = {key: known[key] for key in ("split", "files")}
        if began.get(part, {}).get("chosen", "") is None:  # all images of the split
            now[part]["images"] = len(dataset.origin.rows)
    if "shards" in train:  # a folder that was cut into shards
        now = {"train": {"names": now["train"]["files"]}}
    return differences(began, now)


def commit_begun_with(folder: Path) -> str | None:
    """The commit of the hub dataset that a run is of; None: its images are from elsewhere, or it has not begun."""
    return (images_of(folder) or {}).get("train", {}).get("revision")


def images_of(folder: Path) -> dict[str, Any] | None:
    """Which images a run is of; None where nothing says so."""
    try:
        return json.loads((folder / IMAGES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
