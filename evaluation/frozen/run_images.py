"""The images of a run: found by its folder, compared with its record, and loaded.

An encoder is evaluated on the images that its run held out; this prevents results on images that have changed since.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from mpp.config import HOW_READ, SourceConfig, as_words, flatten, rebuild, settings_of
from mpp.data.data_path import could_be_hub_name, is_hub_dataset, is_local, is_url
from mpp.data.dataset import ImageDataset
from mpp.data.identity import differences, digest_listing, identify_images
from mpp.data.labels import AUTO
from mpp.data.shards import list_stream_files, load_streamed
from mpp.data.sources import load_image_datasets, load_splits
from mpp.errors import UserError
from mpp.models.descriptions import as_saved, how_read
from mpp.runtime.messages import is_first_process, note
from mpp.runtime.weights import run_of
from mpp.training.run_folder import read_record, recorded_commit, saved_settings

LoadedSplits = dict[str, Dataset]
"""Rows of a dataset's splits, by name: a large folder takes long to list. Functions that get None load them."""

IMAGE_SETTINGS = [each.key for each in settings_of(SourceConfig()) if not each.about["operational"]]
"""Names of the settings that say which images these are."""
EVALUATED_SETTINGS = [name for name in IMAGE_SETTINGS if name != "train_images"]
"""Those that an evaluation takes over from the run. A share of the images to pre-train on is none of the labels."""


def find_run(encoder: str) -> Path | None:
    """The run folder of an encoder that is named by the folder itself, its encoder/ or a weights file in it.

    Returns:
        None where an encoder has no run.
    """
    folder = Path(encoder)
    if folder.suffix == ".safetensors":
        folder = folder.parent
    if folder.parent.name == "checkpoints":
        folder = folder.parents[1]
    folder = run_of(folder)
    return folder if "data" in saved_settings(folder) else None


def run_image_settings(run: Path) -> dict[str, Any]:
    """The settings of a run's images, by name; of a hub dataset with the commit that the run began with.

    `train_images` is among them: `evaluated_image_settings` leaves it out.
    """
    saved = saved_settings(run)["data"]
    settings = {name: saved[name] for name in IMAGE_SETTINGS if name in saved}
    settings["revision"] = None  # a folder here may have the dataset's name by now
    if is_hub_dataset(SourceConfig(**settings)):
        settings["revision"] = recorded_commit(run) or saved.get("revision")
    return settings


def evaluated_image_settings(run: Path) -> dict[str, Any]:
    """The settings by which an encoder is evaluated on its run's images: on all of them, whatever share it saw."""
    return {name: value for name, value in run_image_settings(run).items() if name in EVALUATED_SETTINGS}


def run_source(run: Path) -> SourceConfig:
    """The source of a run's images."""
    return SourceConfig(**run_image_settings(run))


def load_unchanged_splits(run: Path, data: SourceConfig) -> LoadedSplits | None:
    """Load a run's images to compare them with those that it began with.

    For a hub dataset its commit is enough. Where several processes evaluate, the first one compares.

    Args:
        data: the settings of a command's images.
    Returns:
        The splits that `data` means; None: it means others, or comparing did not take loading.
    Raises:
        UserError: the run's images are gone, or have changed.
    """
    record = read_record(run)
    if not record or not is_first_process():
        return None
    path = run_image_settings(run).get("path")
    could_be_on_hub = could_be_hub_name(path)
    location = Path.cwd() / path if could_be_on_hub else path
    if could_be_on_hub and recorded_commit(run) is not None:
        if is_local(path):
            ways = f"use --data.path ./{path} for the folder, or call from another folder"
            raise UserError(f"{run} was trained on the hub's dataset {path}, but {location} is here, too: {ways}")
        return None
    if not (path is None or is_url(path) or is_local(path)):
        ways = "give their new place with --data.path"
        raise UserError(f"the images of {run} were at {location}, which is gone; {ways}")
    source = run_source(run)
    is_same = all(getattr(data, name) == getattr(source, name) for name in EVALUATED_SETTINGS)
    splits = None if is_known_by_files(record) else load_splits(data if is_same else source)
    changed = image_differences(run, source, splits and without_masks(splits, data))
    if changed and is_same and data.mask_column:  # masks outside their list's folder are images to pre-training
        is_same = False
        changed = image_differences(run, source)
    if changed:
        location = location or "the package's birds"
        ways = "restore the original images, or choose others with --data.path"
        raise UserError(f"{location} no longer holds the images of {run}: {'; '.join(changed)}; {ways}")
    return splits if is_same else None


def without_masks(splits: LoadedSplits, data: SourceConfig) -> LoadedSplits:
    """The splits of a folder as pre-training has them: their only column of images is not that of masks."""
    if data.image_column is not None or data.mask_column is None:
        return splits
    unmasked = {}
    for name, rows in splits.items():
        unmasked[name] = rows.remove_columns(data.mask_column) if data.mask_column in rows.features else rows
    return unmasked


def load_unchanged_splits_of(encoder: str, data: SourceConfig) -> LoadedSplits | None:
    """Apply `load_unchanged_splits` if a command reads the images of its encoder's run from the run's path."""
    run = find_run(encoder)
    if run and absolute_path(data.path) == absolute_path(run_image_settings(run).get("path")):
        return load_unchanged_splits(run, data)
    return None


def note_other_images(encoder: str, data: SourceConfig, learned: Mapping[str, Any] | None = None) -> None:
    """Note images that are read in another way than an encoder's, or that are the package's birds in their place.

    Command lines take both over from the encoder (see `parsing.py`); settings that are made in Python do not.

    Args:
        learned: how the images of a kept head were read; empty or None: as those of its encoder.
    """
    if not learned:
        learned = {}
        with suppress(UserError):  # a hub that does not answer now: the encoder is loaded already
            learned = how_read(encoder)
    ways = {name: getattr(SourceConfig, name) for name in HOW_READ} | dict(learned)
    ours = {name: as_saved(getattr(data, name)) for name in HOW_READ}
    others = [name for name in HOW_READ if ours[name] != as_saved(ways[name])]
    if learned and others:
        described = ", ".join(f"data.{name} {as_words(ways[name])} (here {as_words(ours[name])})" for name in others)
        note(f"{encoder} learned from images that were read with {described}")
    run = find_run(encoder)
    if run is not None and data.path is None and run_image_settings(run).get("path") is not None:
        note(f"data.path is null: these are the package's birds, and not the images of {run}")


@lru_cache
def is_moved_copy(run: Path, path: str | None) -> bool:
    """Whether `path` holds the images of a run that are no longer where they were; a note says how others differ."""
    before = run_image_settings(run).get("path")
    gone = before is not None and Path(before).is_absolute() and not is_local(before)
    if not gone or not is_local(path) or not read_record(run):
        return False
    source = run_source(run)
    moved = replace(source, path=path, labels=path_after_move(source.labels, before, path))
    try:
        changed = image_differences(run, moved)
    except UserError as error:  # no such split or column
        changed = [str(error)]
    if changed:
        gone = f"the images of {run} were at {before}, which is gone"
        note(f"{gone}; the images at {path} differ: {'; '.join(changed)}")
    return not changed


def holds_run_images(path: str | None, run: Path | None) -> bool:
    """Whether `path` is where a run's images are, or where they were moved to."""
    if run is None:
        return False
    return absolute_path(path) == absolute_path(run_image_settings(run).get("path")) or is_moved_copy(run, path)


def absolute_path(path: str | None) -> str | None:
    """A local path without links and relative parts; a URL, and None for the package's birds, as they are."""
    if path is None or is_url(path):
        return path
    return str(Path(path).expanduser().resolve())


def is_stream_of_run(encoder: str, data: SourceConfig) -> bool:
    """Whether the images are those of the encoder's run, which read them as a stream."""
    run = find_run(encoder)
    if run is None or not saved_settings(run)["data"].get("streaming"):
        return False
    return holds_run_images(data.path, run)


def load_images_of(
    encoder: str, data: SourceConfig, loaded: LoadedSplits | None = None, stream_images: int = 0
) -> tuple[ImageDataset, ImageDataset]:
    """Load the training and the held-out images of a command.

    Args:
        stream_images: number of training images to load where the encoder's run read them as a stream; the held-out
            images are those that it was evaluated on.
    """
    if not is_stream_of_run(encoder, data):
        return load_image_datasets(data, loaded, AUTO)
    eval_images = saved_settings(find_run(encoder))["data"]["eval_images"]
    _, train, held_out = load_streamed(data, stream_images, eval_images)
    return train, held_out


def indices_in_split(dataset: ImageDataset) -> NDArray[np.int64]:
    """The indices of the images in their split, (n,)."""
    if dataset.origin.indices is None:
        return np.arange(len(dataset))
    return dataset.origin.indices


def record_images(data: SourceConfig, label_kind: str = "class") -> dict[str, Any] | None:
    """The record of the images that these settings mean now. None: a stream, which is not read through."""
    if data.streaming:
        return None
    return record_source(rebuild(SourceConfig(), flatten(data)), label_kind)


@lru_cache
def record_source(source: SourceConfig, label_kind: str) -> dict[str, Any]:
    """The record of both splits, made once for each source."""
    train, held_out = load_image_datasets(source, label_kind=label_kind)
    return {
        "train": identify_images(train, with_labels=True, retries=source.read_retries),
        "held_out": identify_images(held_out, with_labels=True, retries=source.read_retries),
    }


def image_differences(folder: Path, data: SourceConfig, splits: LoadedSplits | None = None) -> list[str]:
    """Differences of images from those that a run began with, in words; empty: the same, as far as data.json says.

    For a stream the names and sizes of the files are compared, otherwise names, and the bytes of some files.

    Args:
        data: the settings of the run's images, perhaps with another `path`.
        splits: those of the dataset, if they are loaded already.
    Raises:
        UserError: they cannot be loaded.
    """
    before = read_record(folder)
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


def is_known_by_files(record: dict[str, Any]) -> bool:
    """Whether a run read shards as a stream, whose record has the names and sizes of the files."""
    train = record.get("train", {})
    return "shards" in train and "names" not in train


def path_after_move(file: str | None, before: str, now: str) -> str | None:
    """The path of a file after a folder has moved from `before` to `now`; other files keep theirs."""
    if file is None or not Path(file).is_relative_to(before):
        return file
    return str(Path(now) / Path(file).relative_to(before))
