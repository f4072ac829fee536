"""Images of tar shards: indexed by the headers of their members on this machine, or streamed from far away."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import datasets

from mpp.config import ImagesConfig
from mpp.data.listing.image_table import IMAGE, LABEL, SPLIT, Listing
from mpp.data.listing.layout import find_layout
from mpp.data.listing.left_out import LeftOutFiles
from mpp.data.listing.split_names import split_of_shard
from mpp.data.listing.tar_members import is_local_shard, member_path, naming_damaged, read_member
from mpp.data.listing.tar_samples import NameRule, find_name_rule, read_samples
from mpp.data.listing.tree import Folder
from mpp.runtime.output import printable
from mpp.runtime.progress import progress_bar


def list_shards(shards: dict[str, list[str]], config: ImagesConfig) -> Listing:
    """The images of shards on this machine.

    Args:
        shards: split -> files.
    Raises:
        UserError: a shard is damaged, or its samples follow no rule.
    """
    index = index_shards(shards, config)
    splits: list[str | None] = list(index.splits)
    names_have_splits = len(shards) > 1 or any(
        split_of_shard(shard, ()) != "train" for files in shards.values() for shard in files
    )
    layout = layout_inside(index.folders, index.splits if names_have_splits else None, config)
    if not names_have_splits:
        splits = [split or "train" for split, _ in layout]
    if config.label_column not in (None, LABEL):
        del index.labels[LABEL]
    elif config.label_column is None and not any(index.labels[LABEL]):
        index.labels[LABEL] = [name for _, name in layout]

    image_column = config.image_column or IMAGE
    columns: dict[str, list[Any]] = {image_column: index.paths, SPLIT: splits}
    label_columns = set()
    for name, values in index.labels.items():
        if any(value is not None for value in values):
            columns[name] = values
            label_columns.add(name)
    listing = Listing(columns, label_columns, path_columns={image_column})
    listing.add_left_out(index.left_out)
    return listing


@dataclass
class ShardIndex:
    """The images of shards, one entry each."""

    paths: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    """Those of their shards."""
    folders: list[str] = field(default_factory=list)
    """Inside their shards."""
    labels: dict[str, list[Any]] = field(default_factory=dict)
    """By column."""
    left_out: LeftOutFiles = field(default_factory=LeftOutFiles)


def index_shards(shards: dict[str, list[str]], config: ImagesConfig) -> ShardIndex:
    """The images of shards by the headers of their members; labels are read."""
    index = ShardIndex()
    endings = {LABEL: config.label_column}  # column of the table -> ending of the member, or key of its JSON
    for name in named_label_columns(config):
        endings[name] = name
    index.labels = {name: [] for name in endings}
    files = [(split, shard) for split, of_split in shards.items() for shard in of_split]
    rule = find_name_rule(files[0][1], config)
    for split, shard in progress_bar(files, desc="indexing shards", unit=" shards", delay=1, leave=False):
        with naming_damaged(shard):
            for sample, picture in read_samples(shard, config, rule):
                if picture is None:
                    name = f"{os.path.basename(shard)}: {sample.name}"
                    index.left_out.add("samples without a picture", name)
                    continue
                index.paths.append(member_path(shard, picture))
                index.splits.append(split)
                index.folders.append(picture.name.rpartition("/")[0])
                for name, ending in endings.items():
                    index.labels[name].append(sample.label(ending))
    return index


def layout_inside(
    folders: list[str], splits: list[str] | None, config: ImagesConfig
) -> list[tuple[str | None, str | None]]:
    """The split and the class of each image by the folder that it has in its shard, as if shards were folders.

    Args:
        splits: of each image, where the names of shards have them.
    """
    keys = list(zip(splits or [""] * len(folders), folders, strict=True))
    folder_by_key: dict[tuple[str, str], Folder] = {}
    for split, name in keys:
        parts = tuple(part for part in (split, *name.split("/")) if part)
        folder = folder_by_key.setdefault((split, name), Folder(parts, name, []))
        folder.files.append("")
    layout = find_layout([*folder_by_key.values()], config.label_folder)
    split_and_class = zip(layout.splits, layout.classes, strict=True)
    by_key = dict(zip(folder_by_key, split_and_class, strict=True))
    return [by_key[key] for key in keys]


def named_label_columns(config: ImagesConfig) -> set[str]:
    """The columns of labels that settings name."""
    return {config.label_column, getattr(config, "eval_label_column", None)} - {None}


def stream_shards(shards: list[str], config: ImagesConfig) -> datasets.IterableDataset:
    """The samples of shards as a stream of {image, label}: a shard each, images with their bytes."""
    label_columns = tuple(sorted(named_label_columns(config) or {LABEL}))
    features = {config.image_column or IMAGE: datasets.Image(decode=False)}
    for name in label_columns:
        features[name] = datasets.Value("string")
    arguments = {
        "shards": shards,
        "config": config,
        "rule": find_name_rule(shards[0], config),
        "label_columns": label_columns,
    }
    return datasets.IterableDataset.from_generator(
        stream_rows, features=datasets.Features(features), gen_kwargs=arguments
    )


def stream_rows(
    shards: list[str], config: ImagesConfig, rule: NameRule, label_columns: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """The rows of some shards. A sample without a picture is a row without an image, which is unreadable."""
    named = named_label_columns(config)
    for shard in shards:
        for sample, picture in read_samples(shard, config, rule):
            row: dict[str, Any] = {config.image_column or IMAGE: None}
            if picture is not None:
                content = read_member(member_path(shard, picture)) if is_local_shard(shard) else picture.content
                row[config.image_column or IMAGE] = {"bytes": content, "path": printable(picture.name)}
            for name in label_columns:
                row[name] = sample.label(name if name in named else None)
            yield row
