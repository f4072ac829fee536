"""From `data.path` to two datasets: images to train on, and held-out images."""

import dataclasses
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from mpp.config import ImagesConfig, SourceConfig, as_words, require
from mpp.data.columns import find_image_column
from mpp.data.data_path import BIRDS_FOLDER, describe_source, is_hub_dataset, is_url
from mpp.data.dataset import ImageDataset, images_only
from mpp.data.folder import split_of_cell
from mpp.data.labels import find_label_kind, find_labels, read_labels
from mpp.data.overview import announce_splits, warn_of_labels
from mpp.data.places import PREPARE_FIRST, has_card_with_configs, load_declared, load_local, load_shards, load_url
from mpp.data.remote import announce_hub_lookup, from_a_server
from mpp.data.retry import LOADING_ERRORS
from mpp.errors import UserError, one_line


def load_image_datasets(
    config: SourceConfig,
    splits: dict[str, datasets.Dataset] | None = None,
    label_kind: str = "class",
    announce: bool = True,
) -> tuple[ImageDataset, ImageDataset]:
    """The images to train on (all of them: see `data.train_images` and `ImageDataset.choose`) and the held-out images.

    Args:
        splits: all splits of the dataset, if they are loaded already.
        label_kind: see `find_label_kind`.
        announce: whether to print which images and labels these are, and warnings of labels that cannot be right.
    Raises:
        UserError: no images, a split that is not there, no image column, or too few images.
    """
    source = describe_source(config)
    if splits is None:
        splits = load_splits(config)
    held_out = find_held_out_split(config, list(splits))
    is_needless = held_out is None and config.eval_label_column
    allowed = f"left out: the held-out images are cut from {config.split}"
    require(not is_needless, "data.eval_label_column", config.eval_label_column, allowed)

    names = [config.split] if held_out is None else [config.split, held_out]
    used = {name: splits[name] for name in names}
    train = used[config.split]
    image_column = find_image_column(config, train.features)
    for name, rows in used.items():
        if len(rows) == 0:
            raise UserError(f"{source}: its split {name} has no images")

    images = label_images(config, used, image_column, label_kind)
    if announce:
        unused = {name: len(rows) for name, rows in splits.items() if name not in used}
        announce_splits(source, images, unused, config)
    if held_out is None:
        images = images[0].cut(config.eval_fraction, config.cut_seed, "held out")
    train_images, held_out_images = images
    if announce:
        warn_of_labels(train_images)
    return train_images, held_out_images


def label_images(
    config: ImagesConfig, splits: dict[str, datasets.Dataset], image_column: str, label_kind: str = "class"
) -> list[ImageDataset]:
    """The images of each split, with their labels as arrays, classes by the same numbers in all.

    Args:
        splits: the training split first; all others than `data.split` have the labels of held-out images.
        label_kind: see `find_label_kind`.
    """
    columns = [find_labels(config, rows, is_held_out=split != config.split) for split, rows in splits.items()]
    kind = find_label_kind(label_kind, columns[0])
    numbered = read_labels(columns, kind)
    images = []
    for (split, rows), labels in zip(splits.items(), numbered.parts, strict=True):
        rows = images_only(rows, image_column)
        images.append(
            ImageDataset(rows, image_column, labels, split, numbered.class_names, numbered.classes, label_kind=kind)
        )
    return images


def image_arguments(config: SourceConfig) -> str:
    """Command-line arguments for the settings that select images and differ from their defaults."""
    arguments = ""
    for field in dataclasses.fields(SourceConfig):
        value = getattr(config, field.name)
        if not field.metadata.get("operational") and value != field.default:
            arguments += f" --data.{field.name} {shlex.quote(as_words(value))}"
    return arguments


def load_splits(config: ImagesConfig, streaming: bool = False) -> dict[str, Any]:
    """All splits of the dataset at `data.path`: indexed rows, or streams of shards.

    Raises:
        UserError: it cannot be loaded.
    """
    if config.path is None:
        files = {split: [str(BIRDS_FOLDER / f"{split}-00000-of-00001.parquet")] for split in ("train", "test")}
        return load_shards(files, config, streaming)
    problem = f"{config.group_name}.path is {config.path}"
    on_hub = is_hub_dataset(config)
    if not (on_hub or Path(config.path).expanduser().exists() or is_url(config.path)):
        raise UserError(f"{problem}, which does not exist")
    announce_hub_lookup(config)
    is_declared = on_hub or has_card_with_configs(config.path)
    require(is_declared or config.name is None, "data.name", config.name, "left out: no README.md has configs")
    allowed = f"left out: {config.path} is not a dataset of the hub"
    require(on_hub or config.revision is None, "data.revision", config.revision, allowed)
    load = load_url if is_url(config.path) else load_declared if is_declared else load_local
    errors = (Exception,) if is_url(config.path) else LOADING_ERRORS  # clients of stores raise errors of any type
    try:
        splits = from_a_server(partial(load, config, streaming), config)  # a card here may name files there
    except UserError:
        raise
    except errors as error:
        not_local = f" (and {Path.cwd()} has no such folder or file)" if on_hub else ""
        raise UserError(f"{problem}, which cannot be loaded: {describe_cause(error)}{not_local}") from error
    if streaming and any(isinstance(rows, datasets.Dataset) for rows in splits.values()):
        raise UserError(f"{problem}, which is no shards: {PREPARE_FIRST}")
    return splits


def describe_cause(error: BaseException) -> str:
    """An error in one line, with the errors that `datasets` hides behind its own."""
    inner = error.__cause__ or error.__context__
    if isinstance(error, DatasetsError) and inner is not None:
        return f"{one_line(error)}: {describe_cause(inner)}"
    return one_line(error)


def find_held_out_split(config: SourceConfig, names: list[str]) -> str | None:
    """The name of the held-out split; None: a cut of the training split is held out.

    `auto` is `validation`, or else `test`, perhaps by another word, if it is not trained on.

    Args:
        names: of the dataset's splits.
    Raises:
        UserError: the dataset lacks the training split or the held-out split.
    """
    for setting, name, others in (("split", config.split, ()), ("eval_split", config.eval_split, (None, "auto"))):
        if name not in (*others, *names):
            raise UserError(f"data.{setting} is {name}; {describe_source(config)} has {', '.join(names)}")
    if config.eval_split == config.split:
        raise UserError(f"data.eval_split is {config.eval_split}, which is trained on; null cuts a part of it off")
    if config.eval_split != "auto":
        return config.eval_split
    others = [name for name in names[::-1] if name != config.split]
    meant = {split_of_cell(name): name for name in others} | dict(zip(others, others, strict=True))
    found = next((meant[usual] for usual in ("validation", "test") if usual in meant), None)
    is_default = config.eval_fraction == SourceConfig.eval_fraction
    allowed = f"left out, because {found} is held out, or data.eval_split null"
    require(found is None or is_default, "data.eval_fraction", config.eval_fraction, allowed)
    return found
