"""Images on this machine: folders, archives, shards, and datasets that `save_to_disk` of `datasets` wrote."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from mpp.config import ImagesConfig, require
from mpp.data.data_path import describe_source, is_url
from mpp.data.decoding.formats import LFS_POINTER, STAND_IN_STARTS, kind_of_file
from mpp.data.listing.archives import ARCHIVE_EXTENSIONS, is_archive, unpack_archive
from mpp.data.listing.formats import LIST_EXTENSIONS, SHARD_BUILDERS, TABLE_EXTENSIONS, extension_of
from mpp.data.listing.image_table import Listing, SharedListing, share_listing
from mpp.data.listing.images import is_named_list, list_images
from mpp.data.listing.links import plain_path
from mpp.data.listing.split_names import incomplete_sets, split_of_shard, split_order
from mpp.data.listing.tars import list_shards, stream_shards
from mpp.data.listing.tree import Tree, first_bytes, walk_folder
from mpp.data.tables import (
    has_rows,
    holds_images,
    refuse_other_columns,
    refuse_relative_paths,
    resolve_relative_paths,
)
from mpp.errors import UserError
from mpp.runtime.messages import counted, printable, shortened, warn

QUIET = datasets.DownloadConfig(disable_tqdm=True)  # local files are not downloaded
MAX_STAND_IN_BYTES = 1 << 12
CACHED_TABLE = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")  # of `datasets`, next to a dataset
CARD_WITH_CONFIGS = re.compile(r"\A---\s.*?^configs:.*?^---", re.DOTALL | re.MULTILINE)


def load_local(path: Path, config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a file or folder of this machine."""
    if is_archive(path.name) and path.is_file():
        unpacked = unpack_archive(path)
        if unpacked is None:
            problem = f"which is named as an archive and is none ({counted(path.stat().st_size, 'byte')})"
            raise UserError(f"{config.group_name}.path is {config.path}, {problem}")
        path = unpacked
    if path.is_file():
        if extension_of(path.name) not in SHARD_BUILDERS:
            allowed = " or ".join([*SHARD_BUILDERS, *ARCHIVE_EXTENSIONS])
            hint = "; data.labels names a list of images" if extension_of(path.name) in LIST_EXTENSIONS else ""
            raise UserError(f"{config.group_name}.path is {config.path}; a single file must be {allowed}{hint}")
        refuse_settings_of_folders(config)
        if extension_of(path.name) in TABLE_EXTENSIONS and not has_rows(str(path)):
            refuse_empty(config, ["it has no rows"])
        return load_shards({"train": [str(path.absolute())]}, config, streaming)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        refuse_settings_of_folders(config)
        saved = datasets.load_from_disk(plain_path(path)).with_format(None)  # it may hide columns, or make tensors
        return saved if isinstance(saved, datasets.DatasetDict) else {config.split: saved}
    if has_card_with_configs(path):
        refuse_list(config, "README.md describes the images")
        return load_by_card(path, config, streaming)
    refuse_name(config)
    listing = share_folder_listing(path, config, streaming)
    return listing.splits or load_shards(listing.shards, config, streaming)


def refuse_settings_of_folders(config: ImagesConfig) -> None:
    """Refuse settings for folders with configs or lists of images, where there are none."""
    refuse_name(config)
    refuse_list(config)


def refuse_name(config: ImagesConfig) -> None:
    """Refuse `data.name` where no dataset card declares configs."""
    require(config.name is None, "data.name", config.name, f"left out: {config.path} has no README.md with configs")


def refuse_list(
    config: ImagesConfig, reason: str = "it is for folders of image files, and shards have labels of their own"
) -> None:
    """Refuse `data.labels` where the images are not the files of a folder, or a card declares them."""
    require(config.labels is None, "data.labels", config.labels, f"left out: {reason}")


def has_card_with_configs(folder: Path) -> bool:
    """Whether a folder's README.md is a dataset card that declares configs, as those of the hub do."""
    card = folder / "README.md"
    if not card.is_file():
        return False
    return CARD_WITH_CONFIGS.match(card.read_text(encoding="utf-8", errors="replace")) is not None


def load_by_card(path: Path, config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a folder whose README.md declares their files: by `datasets`, but for tar shards."""
    builder = datasets.load_dataset_builder(plain_path(path), config.name, download_config=QUIET)
    files = declared_files(builder)
    all_files = [file for of_split in files.values() for file in of_split]
    refuse_stand_ins(all_files)
    warn_of_incomplete_sets(files, config)
    if isinstance(builder, WebDataset):
        return load_shards(files, config, streaming)
    refuse_streamed_files(builder, streaming)
    splits = datasets.load_dataset(plain_path(path), config.name, streaming=streaming, download_config=QUIET)
    if not isinstance(builder, Parquet | Arrow):
        return splits
    if streaming:
        refuse_relative_paths(all_files)
        return splits
    return {name: resolve_relative_paths(rows, files[name], config.image_column) for name, rows in splits.items()}


def refuse_stand_ins(files: Iterable[str]) -> None:
    """Refuse shards of this machine that are something else, such as pointers of `git clone` without Git LFS."""
    for file in files:
        if extension_of(file) not in SHARD_BUILDERS or is_url(file) or os.path.getsize(file) > MAX_STAND_IN_BYTES:
            continue
        kind = kind_of_file(first_bytes(file))
        if kind in STAND_IN_STARTS:
            advice = "`git lfs pull` fetches it" if kind == LFS_POINTER else "fetch it again"
            raise UserError(f"{file} is {kind} instead of a shard; {advice}")


def warn_of_incomplete_sets(shards: Mapping[str, Iterable[str]], config: ImagesConfig) -> None:
    """Warn of sets of shards, such as those of 00000-of-00012, of which some are not there.

    Args:
        shards: split -> files, by their paths or URLs.
    """
    for line in incomplete_sets(chain.from_iterable(shards.values())):
        warn(f"{describe_source(config)}: {line}")


def refuse_streamed_files(builder: datasets.DatasetBuilder, streaming: bool) -> None:
    """Refuse a stream of loose image files."""
    if streaming and isinstance(builder, ImageFolder):
        advice = "leave out data.streaming, or make shards by mpp prepare"
        raise UserError(f"data.path holds image files, no shards: {advice}")


def declared_files(builder: datasets.DatasetBuilder) -> dict[str, list[str]]:
    """The files of each split, as a builder of `datasets` has found them."""
    return {str(split): list(files) for split, files in builder.config.data_files.items()}


def share_folder_listing(path: Path, config: ImagesConfig, streaming: bool) -> SharedListing:
    """The images or shards of a folder: see `list_folder`."""
    return share_once(partial(list_folder, path, config, streaming), config, streaming)


def share_tar_listing(shards: dict[str, list[str]], config: ImagesConfig) -> dict[str, datasets.Dataset]:
    """The images of tar shards on this machine, by split."""
    return share_once(partial(list_shards, shards, config), config).splits


def share_once(make: Callable[[], Listing], config: ImagesConfig, streaming: bool = False) -> SharedListing:
    """The listing that one process of this machine makes for all; it depends only on the settings and `streaming`."""
    key = repr((streaming, dataclasses.asdict(config)))
    return share_listing(make, describe_source(config), key)


def list_folder(path: Path, config: ImagesConfig, streaming: bool) -> Listing:
    """The images of a folder one by one, or the shards that hold them.

    Raises:
        UserError: there are no images, or shards of several kinds.
    """
    tree = walk_folder(os.path.abspath(path))
    leave_out_cached_tables(tree)
    tree.shards = [(parts, path) for parts, path in tree.shards if not is_named_list(path, config)]
    if tree.shards and tree.folders:
        choose_images_or_shards(tree)
    if tree.shards:
        return list_folder_of_shards(tree, config, streaming)
    if len(tree) == 0:
        refuse_empty(config, [*tree.left_out.lines(about_images=True), *tree.left_out.lines(about_images=False)])
    listing = list_images(tree, config)
    if len(listing) == 0:
        refuse_empty(config, listing.warnings)
    return listing


def refuse_empty(config: ImagesConfig, reasons: list[str]) -> None:
    """Raise UserError for a folder without images."""
    raise UserError("; ".join([f"{config.group_name}.path is {config.path}, which holds no images", *reasons]))


def choose_images_or_shards(tree: Tree) -> None:
    """Leave out loose images, or the shards next to them.

    Tables are kept if they have images, and tars if there are at least as many as loose images. If any shard is kept,
    loose images are left out.
    """
    tar_count = sum(extension_of(path) not in TABLE_EXTENSIONS for _, path in tree.shards)
    kept = []
    for parts, path in tree.shards:
        is_table = extension_of(path) in TABLE_EXTENSIONS
        if holds_images(path) if is_table else len(tree) <= tar_count:
            kept.append((parts, path))
        else:
            reason = "tables without images; data.labels names a list" if is_table else "tars next to images"
            tree.leave_out(reason, parts, path)
    tree.shards = kept
    if kept:
        for folder in tree.folders:
            tree.left_out.add("images next to shards, unless these name them", folder.first, len(folder.files))
        tree.folders = []


def leave_out_cached_tables(tree: Tree) -> None:
    """Leave out what `map` or `filter` of `datasets` made of a dataset on disk: its images would count twice."""
    kept = []
    for parts, path in tree.shards:
        if CACHED_TABLE.fullmatch(os.path.basename(path)):
            tree.leave_out("cached results of datasets", parts, path, about_images=False)
        else:
            kept.append((parts, path))
    tree.shards = kept


def leave_out_empty_tables(tree: Tree, config: ImagesConfig) -> None:
    """Leave out parquet and arrow files without rows, which `datasets` cannot load.

    Raises:
        UserError: a split has no others.
    """
    kept = []
    filled: set[str] = set()
    empty: dict[str, list[str]] = {}
    for parts, path in tree.shards:
        if extension_of(path) not in TABLE_EXTENSIONS or has_rows(path):
            kept.append((parts, path))
            filled.add(split_of_shard(path, parts))
        else:
            tree.leave_out("shards without rows", parts, path, about_images=False)
            empty.setdefault(split_of_shard(path, parts), []).append("/".join((*parts, os.path.basename(path))))
    for split, names in empty.items():
        if split not in filled:
            problem = f"whose split {split} has no images: its shards have no rows ({shortened(names)})"
            raise UserError(f"{config.group_name}.path is {config.path}, {problem}; move them away")
    tree.shards = kept


def list_folder_of_shards(tree: Tree, config: ImagesConfig, streaming: bool) -> Listing:
    """The shards of a folder; of tars that are not streamed, the images in them."""
    extensions = tree.shard_extensions
    if len(extensions) > 1:
        kinds = ", ".join(sorted(extensions))
        raise UserError(f"{config.group_name}.path is {config.path}, which holds shards of several kinds: {kinds}")
    refuse_list(config)
    refuse_stand_ins([path for _, path in tree.shards])
    incomplete = incomplete_sets(printable(path) for _, path in tree.shards)
    leave_out_empty_tables(tree, config)
    for parts, path in tree.lists:
        tree.leave_out("lists of images next to shards", parts, path)
    shards: dict[str, list[str]] = {}
    for parts, path in tree.shards:
        shards.setdefault(split_of_shard(path, parts), []).append(path)
    if streaming or extensions <= TABLE_EXTENSIONS:
        listing = Listing(shards={split: shards[split] for split in sorted(shards, key=split_order)})
    else:
        listing = list_shards(shards, config)
    listing.warnings += incomplete
    listing.add_left_out(tree.left_out)
    return listing


def load_shards(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of shards on this machine: tables by `datasets`, tars by mpp.

    Args:
        shards: split -> files, all with the same extension.
    """
    all_files = [file for files in shards.values() for file in files]
    refuse_stand_ins(all_files)
    (extension,) = {extension_of(file) for file in all_files}
    if extension not in TABLE_EXTENSIONS:
        if streaming:
            return {split: stream_shards(files, config) for split, files in shards.items()}
        return share_tar_listing(shards, config)
    splits = {}
    for split, files in shards.items():  # each by itself: they may have other columns, and other orders of classes
        refuse_other_columns(files, streaming)
        data_files = {split: [plain_path(Path(file)) for file in files]}
        builder = SHARD_BUILDERS[extension]
        if streaming:
            refuse_relative_paths(files)
        loaded = datasets.load_dataset(builder, data_files=data_files, streaming=streaming, download_config=QUIET)
        splits[split] = loaded[split]
        if not streaming:
            splits[split] = resolve_relative_paths(loaded[split], files, config.image_column)
    return splits
