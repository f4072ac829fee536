"""Where images come from: a split to train on and one that is held out, of whatever `data.path` names."""

import dataclasses
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from mpp.config import ImagesConfig, SourceConfig, require
from mpp.config.parsing import as_words
from mpp.data.dataset import ImageDataset, dataset_of, find_image_column
from mpp.data.hub import of_the_hub, say_that_it_is_of_the_hub
from mpp.data.labels import number_labels, read_labels
from mpp.data.local import QUIET, load_local
from mpp.data.overview import announce, describe, warn_of_labels
from mpp.data.remote import from_a_server, load_from_hub, load_url
from mpp.data.retry import LOADING_ERRORS
from mpp.errors import UserError, one_line
from mpp.runtime.caches import unwritable_cache
from mpp.runtime.messages import note

BIRDS = Path(__file__).parent.parent / "birds"


def load_image_datasets(
    config: SourceConfig, splits: dict[str, datasets.Dataset] | None = None
) -> tuple[ImageDataset, ImageDataset]:
    """The images to train on (all of them: see `data.train_images` and `ImageDataset.choose`) and the held-out ones.

    Args:
        splits: of the dataset, where they are loaded already.
    Raises:
        UserError: nothing there, no such split, no image column, too few images.
    """
    splits = load_splits(config) if splits is None else splits
    held_out = held_out_name(config, list(splits))
    train = splits[config.split]
    column = find_image_column(config, train.features)
    parts = {config.split: (train, config.label_column, "data.label_column")}
    key, named = "data.eval_label_column", config.eval_label_column
    if held_out is not None:
        parts[held_out] = (splits[held_out], named, key) if named else (splits[held_out], *parts[config.split][1:])
    elif named:
        raise UserError(f"{key} is {named}; it must be left out: what is held out is cut from {config.split}")
    for name, (rows, *_) in parts.items():
        if len(rows) == 0:
            raise UserError(f"{describe(config)}: its split {name} has no images")
    hint_at_labels(config, train, column)
    labels = number_labels([read_labels(rows, name, describe(config), key) for rows, name, key in parts.values()])
    loaded = [
        dataset_of(rows, column, of_split, name, labels.names, labels.classes)
        for (name, (rows, *_)), of_split in zip(parts.items(), labels.parts, strict=True)
    ]
    announce(describe(config), loaded, {name: len(rows) for name, rows in splits.items() if name not in parts})
    if held_out is None:
        loaded = loaded[0].cut(config.eval_fraction, config.cut_seed, "held out")
    warn_of_labels(*loaded)
    return loaded[0], loaded[1]


def hint_at_labels(config: SourceConfig, rows: datasets.Dataset, image_column: str) -> None:
    """Name the columns that may hold labels, where none is called `label` and no setting names one."""
    others = [name for name in rows.column_names if name != image_column]
    if config.label_column is None and "label" not in others and others:
        note(f"{describe(config)} has no column `label`; data.label_column may name one of {', '.join(others)}")


def as_arguments(config: SourceConfig) -> str:
    """The settings that say which images these are, where they are not as usual, as a command line has them."""
    names = [field.name for field in dataclasses.fields(SourceConfig) if not field.metadata.get("operational")]
    usual = SourceConfig()
    changed = [(name, getattr(config, name)) for name in names if getattr(config, name) != getattr(usual, name)]
    return "".join(f" --data.{name} {shlex.quote(as_words(value))}" for name, value in changed)


def load_splits(config: ImagesConfig, streaming: bool = False) -> dict[str, Any]:
    """All splits of the dataset that `data.path` names, indexed, or as streams where they are in shards.

    Raises:
        UserError: it cannot be loaded.
    """
    if config.path is None:
        files = {split: str(BIRDS / f"{split}-00000-of-00001.parquet") for split in ("train", "test")}
        return datasets.load_dataset("parquet", data_files=files, streaming=streaming, download_config=QUIET)
    path, on_hub = Path(config.path).expanduser(), of_the_hub(config)
    if not (on_hub or path.exists() or "://" in config.path):
        raise UserError(f"data.path is {config.path}, which does not exist")
    say_that_it_is_of_the_hub(config)
    allowed = f"left out: {config.path} is no dataset of the hub"
    require(on_hub or config.revision is None, "data.revision", config.revision, allowed)
    try:
        if "://" in config.path:
            return from_a_server(partial(load_url, config, streaming), config)
        if on_hub:
            return from_a_server(partial(load_from_hub, config, streaming), config)
        return load_local(path, config, streaming)
    except UserError:
        raise
    except LOADING_ERRORS as error:
        here = f" (and {Path.cwd()} has no such folder or file)" if on_hub else ""
        message = f"data.path is {config.path}, which cannot be loaded: {cause(error)}{here}"
        raise UserError(unwritable_cache(error) or message) from error


def cause(error: BaseException) -> str:
    """What went wrong, in one line: what the library says of it, and the error that it hides."""
    inner = error.__cause__ or error.__context__
    if isinstance(error, DatasetsError) and inner is not None:
        return f"{one_line(error)}: {cause(inner)}"
    return one_line(error)


def held_out_name(config: SourceConfig, names: list[str]) -> str | None:
    """The split that is held out; None: a cut of the training split. UserError where one of the two is not there."""
    there = f"{describe(config)} has {', '.join(names)}"
    if config.split not in names:
        raise UserError(f"data.split is {config.split}; {there}")
    if config.eval_split == "auto":
        found = next((name for name in ("validation", "test") if name in names and name != config.split), None)
        usual = found is None or config.eval_fraction == SourceConfig.eval_fraction
        allowed = f"left out, because {found} is held out, or data.eval_split null"
        require(usual, "data.eval_fraction", config.eval_fraction, allowed)
        return found
    if config.eval_split == config.split:
        raise UserError(f"data.eval_split is {config.eval_split}, which is trained on; null cuts a part of it off")
    if config.eval_split is not None and config.eval_split not in names:
        raise UserError(f"data.eval_split is {config.eval_split}; {there}")
    return config.eval_split
