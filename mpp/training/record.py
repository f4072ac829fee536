"""data.json of a run folder: the images, and the first weights, that a run began with (mpp/data/identity.py)."""

import json
from pathlib import Path
from typing import Any

import datasets

from mpp.config import SourceConfig
from mpp.data.data_path import could_be_hub_name, is_local, is_url
from mpp.data.identity import differences, digest_listing, identify_images
from mpp.data.labels import AUTO
from mpp.data.shards import list_stream_files
from mpp.data.sources import load_image_datasets
from mpp.errors import UserError
from mpp.runtime.files import write_complete

RECORD_FILE = "data.json"


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a run's images; None if it has none."""
    try:
        return json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Save the images and first weights of a run.

    Raises:
        UserError: the run began with others; nothing is saved.
    """
    before = read_record(folder) or record
    changed = differences(before, record)
    if changed:
        raise UserError(
            f"run.dir {folder} holds a run that was started with other images or weights: {'; '.join(changed)}; "
            "choose another run.dir, or restore the original ones"
        )
    kept = before | record  # parts that the run leaves out now are compared again later
    write_complete(folder / RECORD_FILE, json.dumps(kept, indent=1))


def recorded_commit(folder: Path, part: str = "train") -> str | None:
    """The commit of the hub dataset that a run began with; None: its images are from elsewhere, or it has not begun.

    Args:
        part: of the record.
    """
    record = read_record(folder) or {}
    return record.get(part, {}).get("revision")


def is_known_by_files(record: dict[str, Any]) -> bool:
    """Whether a run read shards as a stream, whose record has the names and sizes of the files."""
    train = record.get("train", {})
    return "shards" in train and "names" not in train


def image_differences(folder: Path, data: SourceConfig, splits: dict[str, datasets.Dataset] | None = None) -> list[str]:
    """Differences of images from those that a run began with, in words; empty: the same, as far as data.json says.

    For a stream the names and sizes of the files are compared, otherwise names, and the bytes of some files.

    Args:
        data: the settings of the run's images, perhaps with another `path`.
        splits: those of the dataset, if they are loaded already.
    Raises:
        UserError: they cannot be loaded.
    """
    before = read_record(folder) or {}
    if is_known_by_files(before):
        return differences(before, {"train": {"files": digest_listing(list_stream_files(data))}})
    now = {}
    images = load_image_datasets(data, splits, AUTO, announce=False)  # the command says which images it takes
    for part, dataset in zip(("train", "held_out"), images, strict=True):
        known = identify_images(dataset, with_labels=False, retries=data.read_retries)
        now[part] = {key: known[key] for key in ("split", "files")}
        has_all_images = before.get(part, {}).get("chosen", "") is None
        if has_all_images:
            now[part]["images"] = len(dataset.origin.rows)
    if "shards" in before.get("train", {}):  # a folder that was cut into shards
        now = {"train": {"names": now["train"]["files"]}}
    return differences(before, now)


def path_after_move(file: str | None, before: str, now: str) -> str | None:
    """The path of a file after a folder has moved from `before` to `now`; other files keep theirs."""
    if file is None or not Path(file).is_relative_to(before):
        return file
    return str(Path(now) / Path(file).relative_to(before))


def has_moved_images(folder: Path, before: str | None, data: SourceConfig) -> bool:
    """Whether the images of a run, which are no longer where they were, are those that `data.path` names.

    Args:
        before: `data.path` of the run.
        data: the settings of the images, with their new `path`.
    Raises:
        UserError: `data.path` names a dataset of the hub where the run's was a folder, or images that cannot be loaded.
    """
    if before is None or could_be_hub_name(before) or is_url(before) or is_local(before):
        return False
    if not is_local(data.path):
        raise UserError(
            f"data.path is {data.path}; the images of {folder} were at {before}, which is gone: give their new place"
        )
    return bool(read_record(folder)) and not image_differences(folder, data)
