"""Images of tar shards: indexed by the headers of their members on this machine, or streamed from far away."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import datasets

from mpp.config import ImagesConfig
from mpp.data.listing.image_table import IMAGE, LABEL, SPLIT, Listing
from mpp.data.listing.layout import Layout, find_layout
from mpp.data.listing.left_out import IN_NO_SPLIT, LeftOutFiles, without_decoder
from mpp.data.listing.lists import named_label_columns
from mpp.data.listing.split_names import split_of_shard
from mpp.data.listing.tar_members import (
    Member,
    is_local_shard,
    member_name,
    member_path,
    naming_damaged,
    read_member,
)
from mpp.data.listing.tar_samples import LABEL_ENDINGS, cuts_at_last_dot, read_samples
from mpp.errors import UserError
from mpp.runtime.messages import printable, progress_bar, shortened


def content_of(shard: str, member: Member) -> bytes:
    """The bytes of a member of a shard on this machine, or the first of them."""
    return member.content or read_member(member_path(shard, member))


@dataclass
class IndexedShards:
    """The images of shards, in their order, and members that are no images."""

    labels: dict[str, list[Any]]
    """Column -> label of each image."""
    paths: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    """Of the images, by the names of their shards."""
    folders: list[str] = field(default_factory=list)
    """Of the images, inside their shards."""
    other_endings: set[str] = field(default_factory=set)
    """Of pictures that are not the images."""
    other_members: dict[str, bytes] = field(default_factory=dict)
    """Ending -> the first member that has it, and is no picture."""
    left_out: LeftOutFiles = field(default_factory=LeftOutFiles)


def index_shards(shards: list[tuple[str, str]], endings: dict[str, str | None], config: ImagesConfig) -> IndexedShards:
    """Read the headers of shards on this machine, and the labels.

    Args:
        shards: the split and the file of each.
        endings: see `label_endings`.
    Raises:
        UserError: a shard is damaged, or its samples follow no rule.
    """
    index = IndexedShards({name: [] for name in endings})
    at_last_dot = cuts_at_last_dot(shards[0][1], config)
    for split, shard in progress_bar(shards, desc="indexing shards", unit=" shards", delay=1, leave=False):
        shard_name = os.path.basename(shard)
        with naming_damaged(shard):
            for sample, picture in read_samples(shard, config, at_last_dot):
                for name in sample.replaced:
                    index.left_out.add("pictures with the name of a later one", f"{shard_name}: {name}")
                if picture is None:
                    index.left_out.add("samples without a picture", f"{shard_name}: {sample.name}")
                    index.other_endings |= sample.pictures.keys()
                    continue
                if reason := without_decoder(picture.name, partial(content_of, shard, picture)):
                    index.left_out.add(reason, f"{shard_name}: {picture.name}")
                    continue
                index.paths.append(member_path(shard, picture))
                index.splits.append(split)
                index.folders.append(picture.name.rpartition("/")[0])
                index.other_members = sample.others | index.other_members
                for name, ending in endings.items():
                    index.labels[name].append(sample.label(ending))
    return index


def list_shards(shards: dict[str, list[str]], config: ImagesConfig) -> Listing:
    """The images of shards on this machine, by the headers of their members; labels are read.

    Args:
        shards: split -> files.
    Raises:
        UserError: a shard is damaged, or its samples follow no rule.
    """
    image_column = config.image_column or IMAGE
    files = [(split, shard) for split, of_split in shards.items() for shard in of_split]
    index = index_shards(files, label_endings(config), config)
    if not index.paths:
        refuse_without_images(config, index.other_endings, index.left_out)
    names_have_splits = len(shards) > 1 or any(split_of_shard(shard, ()) != "train" for _, shard in files)
    inside = layout_inside(index.splits if names_have_splits else [""] * len(index.paths), index.folders, config)
    labels = index.labels
    warnings: list[str] = []
    if config.label_column is None and not any(labels[LABEL]):
        labels[LABEL] = inside.classes
        warnings = inside.warnings
    columns: dict[str, list[Any]] = {image_column: index.paths, SPLIT: index.splits, **labels}
    if not names_have_splits:
        columns[SPLIT] = inside.splits
        columns = leave_out_without_split(columns, image_column, index.left_out)
    for name in labels:
        if all(label is None for label in columns[name]):
            del columns[name]
    label_columns = labels.keys() & columns.keys()
    listing = Listing(columns, label_columns=label_columns, path_columns={image_column}, warnings=warnings)
    if config.label_column is None and LABEL not in columns and index.other_members.keys().isdisjoint(LABEL_ENDINGS):
        listing.notes += hint_at_members(index.other_members)
    listing.add_left_out(index.left_out)
    return listing


def leave_out_without_split(
    columns: dict[str, list[Any]], image_column: str, left_out: LeftOutFiles
) -> dict[str, list[Any]]:
    """The columns without images that are in the folder of no split, where some folders are splits."""
    kept = []
    for row, (split, path) in enumerate(zip(columns[SPLIT], columns[image_column], strict=True)):
        if split is None:
            left_out.add(IN_NO_SPLIT, member_name(path))
        else:
            kept.append(row)
    if len(kept) == len(columns[SPLIT]):
        return columns
    return {name: [values[row] for row in kept] for name, values in columns.items()}


def refuse_without_images(config: ImagesConfig, endings: set[str], left_out: LeftOutFiles) -> None:
    """Raise UserError for shards without images.

    Args:
        endings: of the pictures in them, none of which is that of `data.image_column`.
        left_out: members that are not used.
    """
    if endings:
        problem = f"{config.group_name}.image_column is {config.image_column}"
        allowed = f"one of {printable(shortened(sorted(endings)))}"
        raise UserError(
            f"{problem}, which no picture in the shards of {config.path} has as its ending; it must be {allowed}"
        )
    reasons = map(printable, left_out.lines(about_images=True))
    raise UserError("; ".join([f"{config.group_name}.path is {config.path}, whose shards hold no images", *reasons]))


def hint_at_members(members: dict[str, bytes]) -> list[str]:
    """A line about the members that may be labels, or have labels as keys of JSON, where none is called as labels are.

    Args:
        members: ending -> the first member that has it, and is no picture.
    """
    names = sorted(members.keys() - {"json"})
    with suppress(ValueError):
        found = json.loads(members.get("json", b"null"))
        names += [f"{key} (in json)" for key in (found if isinstance(found, dict) else ())]
    usual = " or ".join(f"`{ending}`" for ending in LABEL_ENDINGS)
    return [f"no sample has a member {usual}; data.label_column may name one of {shortened(names)}"] if names else []


def label_endings(config: ImagesConfig) -> dict[str, str | None]:
    """Columns of labels -> ending of the member, or key of its JSON; None: the usual endings."""
    usual: dict[str, str | None] = {LABEL: None} if config.label_column is None else {}
    return usual | {name: name for name in sorted(named_label_columns(config))}


def layout_inside(outer_folders: list[str], folders: list[str], config: ImagesConfig) -> Layout:
    """The split and the class of each image by the folder that it has in its shard, as if shards were folders.

    Args:
        outer_folders: of each image, a folder that stands for its shard; or "".
        folders: of each image, inside its shard.
    """
    places = list(zip(outer_folders, folders, strict=True))
    image_counts = Counter(places)
    folder_parts = []
    for outer, inner in image_counts:
        parts = (outer, *inner.split("/"))
        folder_parts.append(tuple(part for part in parts if part))
    layout = find_layout(folder_parts, [*image_counts.values()], config.label_folder)
    split_and_class = zip(layout.splits, layout.classes, strict=True)
    by_place = dict(zip(image_counts, split_and_class, strict=True))
    splits, classes = zip(*(by_place[place] for place in places), strict=True)
    return Layout([*splits], [*classes], layout.warnings)


def stream_shards(shards: list[str], config: ImagesConfig) -> datasets.IterableDataset:
    """The samples of shards as a stream of {image, label}: a shard each, images with their bytes."""
    features = {config.image_column or IMAGE: datasets.Image(decode=False)}
    for name in label_endings(config):
        features[name] = datasets.Value("string")
    arguments = {"shards": shards, "config": config, "at_last_dot": cuts_at_last_dot(shards[0], config)}
    return datasets.IterableDataset.from_generator(
        stream_rows, features=datasets.Features(features), gen_kwargs=arguments
    )


def stream_rows(shards: list[str], config: ImagesConfig, at_last_dot: bool) -> Iterator[dict[str, Any]]:
    """The rows of some shards. A sample without a picture is a row without an image, which is unreadable."""
    endings = label_endings(config)
    for shard in shards:
        for sample, picture in read_samples(shard, config, at_last_dot):
            image = None
            if picture is not None:
                content = picture.content
                if is_local_shard(shard):
                    content = read_member(member_path(shard, picture))
                image = {"bytes": content, "path": printable(picture.name)}
            labels = {name: sample.label(ending) for name, ending in endings.items()}
            yield {config.image_column or IMAGE: image, **labels}
