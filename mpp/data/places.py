"""Images of each kind of place: folders, shards, saved datasets, cards and the hub, URLs."""

import glob
import os
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import fsspec
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq

from mpp.config import ImagesConfig, require
from mpp.data.columns import can_hold_images
from mpp.data.data_path import as_pattern, describe_source, is_hub_dataset, is_url
from mpp.data.decoding.formats import what_is
from mpp.data.folder import (
    ARCHIVE_ENDINGS,
    SHARD_BUILDERS,
    TABLE_BUILDERS,
    Tree,
    ending_of,
    first_bytes,
    incomplete_sets,
    shards_by_split,
    walk,
)
from mpp.data.listing import Listing, share
from mpp.data.lists import list_images
from mpp.data.remote import cached_commit, is_commit
from mpp.data.tars import list_tars, stream_tars
from mpp.errors import UserError, one_line
from mpp.runtime.messages import shortened, warn

QUIET = datasets.DownloadConfig(disable_tqdm=True)  # local files are not downloaded
COMPARED_FILES = 16  # of a split that is streamed, or a few more: it may have very many
CARD_WITH_CONFIGS = re.compile(r"\A---\s.*?^configs:.*?^---", re.DOTALL | re.MULTILINE)
CACHED_TABLE = re.compile(r"(.*/)?cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")  # what `map` of `datasets` leaves
PREPARE_FIRST = "leave out data.streaming, or make shards by mpp prepare"


def load_local(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a file or folder of this machine: indexed rows, or streams of shards."""
    path = os.path.abspath(os.path.expanduser(config.path))
    is_saved = any(os.path.isfile(f"{path}/{name}") for name in ("dataset_dict.json", "state.json"))
    if os.path.isdir(path) and not is_saved:
        return load_folder(path, config, streaming)
    refuse_list(config)
    if is_saved:
        saved = datasets.load_from_disk(path).with_format(None)  # it may hide columns, or make tensors
        return saved if isinstance(saved, datasets.DatasetDict) else {config.split: saved}
    ending = ending_of(path)
    if ending in SHARD_BUILDERS:
        return load_shards({"train": [path]}, config, streaming)
    rule = f"a single file must be {' or '.join(SHARD_BUILDERS)}; data.labels names a list of images"
    if ending in ARCHIVE_ENDINGS:
        rule = "an archive: unpack it, and give the folder"
    raise UserError(f"{config.group_name}.path is {config.path}; {rule}")


def refuse_list(config: ImagesConfig) -> None:
    """Refuse `data.labels` where the images are not the files of a folder, or a card declares them."""
    require(config.labels is None, "data.labels", config.labels, "left out: it is for folders of image files")


def load_folder(path: str, config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a folder of images or shards."""
    splits, shards = share(partial(list_folder, path, config), config)
    warn_of_incomplete_sets(shards, config)
    return load_shards(shards, config, streaming) if shards else splits


def list_folder(path: str, config: ImagesConfig) -> Listing:
    """The images of a folder one by one, or the shards that hold them.

    Raises:
        UserError: there are no images, or shards of several kinds, or images and shards.
    """
    tree = walk(path)
    if is_hub_dataset(config):
        tree.links.clear()  # the hub's cache has one file for all images of the same bytes
    problem = f"{config.group_name}.path is {config.path}"
    shards = tree.tars + [table for table in tree.tables if is_shard(table, tree, config)]
    if shards and tree.images:
        files = f"images, such as {tree.images[0]}, and shards or tables, such as {shards[0]}"
        raise UserError(f"{problem}, which has {files}; move some away (data.labels names a list of images)")
    if shards:
        refuse_list(config)
        refuse_other_endings(shards, config)
        tree.leave_out("lists of images next to shards", *tree.lists)
        return Listing(tables=shards_by_split(shards, os.path.join(path, "")), lines=tree.lines())
    listing = list_images(tree, config) if tree.images else Listing()
    if not listing.splits:
        raise UserError("; ".join([f"{problem}, which holds no images", *tree.lines()]))
    listing.lines += tree.lines()
    return listing


def is_shard(table: str, tree: Tree, config: ImagesConfig) -> bool:
    """Whether a table of a folder holds images, or cannot be read: it is a shard. Others are left out."""
    path = os.path.join(tree.root, table)
    try:
        features = read_features(path)
    except (OSError, pa.ArrowException):
        return True
    if CACHED_TABLE.fullmatch(table):
        tree.leave_out("cached results of datasets", table)
        return False
    if config.image_column in features or any(map(can_hold_images, features.values())):
        return True
    tree.leave_out("tables without images; data.labels names a list", table)
    return False


def refuse_other_endings(shards: Iterable[str], config: ImagesConfig) -> None:
    """Raise UserError where there are no shards, or shards of several formats."""
    endings = sorted({ending_of(shard) for shard in shards})
    if len(endings) != 1:
        found = " and ".join(endings) or "none"
        allowed = f"shards of one format of {', '.join(SHARD_BUILDERS)}"
        raise UserError(f"{config.group_name}.path is {config.path}; it must hold {allowed}: it has {found}")


def warn_of_incomplete_sets(shards: dict[str, list[str]], config: ImagesConfig) -> None:
    """Warn of sets of shards, such as those of 00000-of-00012, of which some are not there."""
    for line in incomplete_sets(chain.from_iterable(shards.values())):
        warn(f"{describe_source(config)}: {line}")


# --- datasets that describe themselves, and URLs ---


def has_card_with_configs(folder: str) -> bool:
    """Whether a folder's README.md is a dataset card that declares configs, as those of the hub do."""
    try:
        card = Path(folder, "README.md").expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return CARD_WITH_CONFIGS.match(card) is not None


def load_declared(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a dataset of the hub, or of a folder with a card: by `datasets`, but for loose images and tars."""
    on_hub = is_hub_dataset(config)
    path = config.path if on_hub else os.path.abspath(os.path.expanduser(config.path))
    options = {"name": config.name, "revision": config.revision, "download_config": None if on_hub else QUIET}
    builder = datasets.load_dataset_builder(path, **options)
    kind = builder.info.builder_name  # also of what the cache has, without the hub
    if kind == "imagefolder":
        if streaming:
            raise UserError(f"data.path holds image files, no shards: {PREPARE_FIRST}")
        if on_hub:
            folder = huggingface_hub.snapshot_download(path, repo_type="dataset", revision=config.revision)
            if not has_card_with_configs(folder):
                return load_folder(folder, config, streaming)
    refuse_list(config)
    files = builder.config.data_files or {}  # a cache that is read offline has none
    shards = {str(split): [*of_split] for split, of_split in files.items()}
    warn_of_incomplete_sets(shards, config)
    if kind == "webdataset":
        return load_tars(shards, config, streaming)
    splits = datasets.load_dataset(path, streaming=streaming, **options)
    commits = {cached_commit(rows) for rows in splits.values()}
    if is_commit(config.revision) and not commits <= {None, config.revision}:
        newest = "the hub does not answer, and the newest in its cache is not of commit"
        raise UserError(f"{newest} {config.revision}")
    return splits


def load_url(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of the shards at a URL that fsspec knows: of a file, of files by a pattern with *, or of a folder."""
    refuse_list(config)
    if ending_of(config.path) in SHARD_BUILDERS and "*" not in config.path:
        return load_shards({"train": [config.path]}, config, streaming)
    system, root = fsspec.url_to_fs(config.path)
    files = system.glob(as_pattern(root)) if "*" in root else system.find(root)
    urls = [system.unstrip_protocol(file) for file in sorted(files) if ending_of(file) in SHARD_BUILDERS]
    refuse_other_endings(urls, config)
    start = system.unstrip_protocol(root).rstrip("/") + "/"
    shards = {"train": urls} if "*" in root else shards_by_split([url.removeprefix(start) for url in urls], start)
    warn_of_incomplete_sets(shards, config)
    return load_shards(shards, config, streaming)


# --- shards ---


def load_shards(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of shards, on this machine or at URLs: tables by `datasets`, tars by mpp.

    Args:
        shards: split -> files, all with the same ending.
    """
    ending = ending_of(next(iter(shards.values()))[0])
    if ending not in TABLE_BUILDERS:
        return load_tars(shards, config, streaming)
    splits = {}
    for split, files in shards.items():  # each by itself: they may have other columns, and other orders of classes
        is_far = is_url(files[0])
        if not is_far:
            refuse_other_columns(files[:: max(1, len(files) // COMPARED_FILES)] if streaming else files)
        splits[split] = datasets.load_dataset(
            TABLE_BUILDERS[ending],
            data_files={split: [glob.escape(file) for file in files]},
            streaming=streaming,
            download_config=None if is_far else QUIET,
        )[split]
    return splits


def load_tars(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of tar shards: as streams, or with their images listed, for which they are downloaded."""
    if streaming:
        return {split: stream_tars(files, config) for split, files in shards.items()}
    if any(map(is_url, chain.from_iterable(shards.values()))):
        shards = datasets.DownloadManager().download(shards)
    splits, _ = share(partial(list_tars, shards, config), config)
    return splits


def read_features(table: str) -> datasets.Features:
    """The types of the columns of a parquet or arrow file."""
    if ending_of(table) == ".parquet":
        return datasets.Features.from_arrow_schema(pq.read_schema(table))
    with pa.memory_map(table) as file:
        try:
            schema = pa.ipc.open_stream(file).schema
        except pa.ArrowInvalid:  # arrow's other format, which `datasets` reads too
            schema = pa.ipc.open_file(file).schema
    return datasets.Features.from_arrow_schema(schema)


def refuse_other_columns(files: Sequence[str]) -> None:
    """Refuse tables of one split with columns that the first lacks, or with classes that it declares otherwise.

    `datasets` would take the first one's classes for all.
    """
    first: dict[str, Any] = {}
    for file in files:
        try:
            features = read_features(file)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{file} cannot be read: {what_is(first_bytes(file)) or one_line(error)}") from error
        declared = {column: getattr(feature, "names", None) for column, feature in features.items()}
        first = first or declared
        others = [column for column, names in declared.items() if names != first.get(column, ())]
        if others:
            rule = "tables of a split must have the same columns and classes, in the same order"
            raise UserError(f"{file} has {shortened(others)} otherwise than {files[0]}; {rule}")
