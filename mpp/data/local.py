"""Images on this machine: folders, shards, and datasets that `save_to_disk` of `datasets` wrote."""

import glob
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from mpp.config import ImagesConfig, require
from mpp.data.columns import TEXT_TYPES, can_hold_images, is_cell
from mpp.data.data_path import describe_source, is_url
from mpp.data.decoding.formats import LFS_POINTER, STAND_INS, what_is
from mpp.data.folder import (
    ARCHIVE_ENDINGS,
    SHARD_BUILDERS,
    TABLE_BUILDERS,
    Tree,
    ending_of,
    first_bytes,
    incomplete_sets,
    is_text,
    shards_by_split,
    walk,
)
from mpp.data.labels import column_of
from mpp.data.listing import Listing, path_column, share
from mpp.data.lists import list_images
from mpp.data.retry import LOADING_ERRORS
from mpp.data.tars import list_tars, stream_tars
from mpp.errors import UserError, one_line
from mpp.runtime.messages import shortened, warn

QUIET = datasets.DownloadConfig(disable_tqdm=True)  # local files are not downloaded
MAX_STAND_IN_BYTES = 1 << 12
COMPARED_FILES = 16  # of a split that is streamed, or a few more: it may have very many
CACHED_TABLE = re.compile(r"(.*/)?cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")  # what `map` of `datasets` leaves
CARD_WITH_CONFIGS = re.compile(r"\A---\s.*?^configs:.*?^---", re.DOTALL | re.MULTILINE)
PREPARE_FIRST = "leave out data.streaming, or make shards by mpp prepare"


def load_local(path: str, config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a file or folder of this machine: indexed rows, or streams of shards."""
    path = os.path.abspath(os.path.expanduser(path))
    problem = f"{config.group_name}.path is {config.path}"
    if not is_text(path):
        raise UserError(f"{problem}, whose name is not UTF-8; rename it, such as by convmv")
    if os.path.isfile(path):
        ending = ending_of(path)
        if ending in ARCHIVE_ENDINGS:
            raise UserError(f"{problem}, an archive: unpack it, and give the folder")
        if ending not in SHARD_BUILDERS:
            rule = f"a single file must be {' or '.join(SHARD_BUILDERS)}; data.labels names a list of images"
            raise UserError(f"{problem}; {rule}")
        refuse_name(config)
        refuse_list(config)
        return load_shards({"train": [path]}, config, streaming)
    if os.path.isfile(f"{path}/dataset_dict.json") or os.path.isfile(f"{path}/state.json"):
        refuse_name(config)
        refuse_list(config)
        saved = datasets.load_from_disk(path).with_format(None)  # it may hide columns, or make tensors
        return saved if isinstance(saved, datasets.DatasetDict) else {config.split: saved}
    if has_card_with_configs(path):
        refuse_list(config, "README.md describes the images")
        return load_by_card(path, config, streaming)
    refuse_name(config)
    splits, shards = share(partial(list_folder, path, config, streaming), config)
    return load_shards(shards, config, streaming) if shards else splits


def refuse_name(config: ImagesConfig) -> None:
    """Refuse `data.name` where no dataset card declares configs."""
    require(config.name is None, "data.name", config.name, f"left out: {config.path} has no README.md with configs")


def refuse_list(config: ImagesConfig, reason: str = "it is for folders of image files") -> None:
    """Refuse `data.labels` where the images are not the files of a folder, or a card declares them."""
    require(config.labels is None, "data.labels", config.labels, f"left out: {reason}")


def has_card_with_configs(folder: str) -> bool:
    """Whether a folder's README.md is a dataset card that declares configs, as those of the hub do."""
    try:
        with open(os.path.join(folder, "README.md"), encoding="utf-8", errors="replace") as card:
            return CARD_WITH_CONFIGS.match(card.read()) is not None
    except FileNotFoundError:
        return False


def load_by_card(path: str, config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a folder whose README.md declares their files: by `datasets`, but for tar shards."""
    builder = datasets.load_dataset_builder(path, config.name, download_config=QUIET)
    files = declared_files(builder)
    refuse_stand_ins(chain.from_iterable(files.values()))
    warn_of_incomplete_sets(files, config)
    if isinstance(builder, WebDataset):
        return load_shards(files, config, streaming)
    refuse_streamed_files(builder, streaming)
    splits = datasets.load_dataset(path, config.name, streaming=streaming, download_config=QUIET)
    if streaming or not isinstance(builder, Parquet | Arrow):
        return splits
    return {name: with_whole_paths(rows, files[name], config.image_column) for name, rows in splits.items()}


def declared_files(builder: datasets.DatasetBuilder) -> dict[str, list[str]]:
    """The files of each split, as a builder of `datasets` has found them."""
    return {str(split): list(files) for split, files in builder.config.data_files.items()}


def refuse_stand_ins(files: Iterable[str]) -> None:
    """Refuse shards of this machine that are something else, such as pointers of `git clone` without Git LFS."""
    for file in files:
        if ending_of(file) in SHARD_BUILDERS and not is_url(file) and os.path.getsize(file) <= MAX_STAND_IN_BYTES:
            kind = what_is(first_bytes(file))
            if kind in STAND_INS:
                advice = "`git lfs pull` fetches it" if kind == LFS_POINTER else "fetch it again"
                raise UserError(f"{file} is {kind} instead of a shard; {advice}")


def warn_of_incomplete_sets(shards: dict[str, list[str]], config: ImagesConfig) -> None:
    """Warn of sets of shards, such as those of 00000-of-00012, of which some are not there."""
    for line in incomplete_sets(chain.from_iterable(shards.values())):
        warn(f"{describe_source(config)}: {line}")


def refuse_streamed_files(builder: datasets.DatasetBuilder, streaming: bool) -> None:
    """Refuse a stream of loose image files."""
    if streaming and isinstance(builder, ImageFolder):
        raise UserError(f"data.path holds image files, no shards: {PREPARE_FIRST}")


def list_folder(path: str, config: ImagesConfig, streaming: bool) -> Listing:
    """The images of a folder one by one, or the shards that hold them.

    Raises:
        UserError: there are no images, or shards of several kinds, or images and tars.
    """
    tree = walk(path)
    problem = f"{config.group_name}.path is {config.path}"
    choose_tables(tree, config)
    shards = tree.tables + tree.tars
    if tree.tars and tree.images:
        files = f"images, such as {tree.images[0]}, and shards, such as {tree.tars[0]}"
        raise UserError(f"{problem}, which has {files}; move some away")
    kinds = {ending_of(shard) for shard in shards}
    if len(kinds) > 1:
        raise UserError(f"{problem}, which holds shards of several kinds: {', '.join(sorted(kinds))}")
    if shards:
        listing = list_shards(tree, config, streaming)
    elif not tree.images:
        raise UserError("; ".join([f"{problem}, which holds no images", *tree.lines()]))
    elif streaming:
        raise UserError(f"{problem}, which holds image files, no shards: {PREPARE_FIRST}")
    else:
        listing = list_images(tree, config)
        if not listing.splits:
            raise UserError("; ".join([f"{problem}, which holds no images", *tree.lines()]))
    listing.lines += tree.lines()
    return listing


def choose_tables(tree: Tree, config: ImagesConfig) -> None:
    """Leave out tables that hold no images, or else the loose images next to tables, which these may name."""
    named = os.path.realpath(os.path.expanduser(config.labels)) if config.labels else ""
    paths = {name: os.path.join(tree.root, name) for name in tree.tables}
    tree.tables = [name for name, path in paths.items() if os.path.realpath(path) != named]
    tree.leave_out("cached results of datasets", *filter(CACHED_TABLE.fullmatch, tree.tables))
    tree.tables = [name for name in tree.tables if not CACHED_TABLE.fullmatch(name)]
    if not tree.images:
        return
    others = [name for name in tree.tables if not holds_images(paths[name])]
    tree.leave_out("tables without images; data.labels names a list", *others)
    tree.tables = [name for name in tree.tables if name not in others]
    if tree.tables:
        tree.leave_out("images next to shards, unless these name them", *tree.images)
        tree.images = []


def list_shards(tree: Tree, config: ImagesConfig, streaming: bool) -> Listing:
    """The shards of a folder; of tars that are not streamed, the images in them."""
    refuse_list(config)
    shards = tree.tables + tree.tars
    start = os.path.join(tree.root, "")
    refuse_stand_ins(start + shard for shard in shards)
    tree.leave_out("lists of images next to shards", *tree.lists)
    splits = shards_by_split(shards, start)
    listing = Listing(tables=splits) if streaming or tree.tables else list_tars(splits, config)
    listing.lines += incomplete_sets(shards)
    return listing


def load_shards(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of shards on this machine: tables by `datasets`, tars by mpp.

    Args:
        shards: split -> files, all with the same ending.
    """
    files = [*chain.from_iterable(shards.values())]
    refuse_stand_ins(files)
    ending = ending_of(files[0])
    if ending not in TABLE_BUILDERS:
        return load_tars(shards, config, streaming)
    if any("::" in file for file in files):
        raise UserError(f"{files[0]} has :: in its path, which `datasets` takes for a chain of URLs; rename it")
    splits = {}
    for split, of_split in shards.items():  # each by itself: they may have other columns, and other orders of classes
        refuse_other_columns(of_split, streaming)
        escaped = {split: [glob.escape(file) for file in of_split]}
        loaded = datasets.load_dataset(
            TABLE_BUILDERS[ending], data_files=escaped, streaming=streaming, download_config=QUIET
        )
        splits[split] = loaded[split]
        if not streaming:
            splits[split] = with_whole_paths(loaded[split], of_split, config.image_column)
    return splits


def load_tars(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of tar shards: as streams, or with their images listed, for which they are on this machine."""
    if streaming:
        return {split: stream_tars(files, config) for split, files in shards.items()}
    splits, _ = share(partial(list_tars, shards, config), config)
    return splits


# --- tables ---


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


def holds_images(table: str) -> bool:
    """Whether a parquet or arrow file has a column of images; not where it cannot be read."""
    with suppress(*LOADING_ERRORS):
        return any(can_hold_images(feature) for feature in read_features(table).values())
    return False


def refuse_other_columns(files: Sequence[str], streaming: bool) -> None:
    """Refuse tables of one split that `datasets` would load wrongly, by the first one's classes, or not at all.

    Of a stream some are compared, and damaged ones are left for its reader to name.

    Raises:
        UserError: a file has no rows, more columns than the first, or declares other classes, or in another order.
    """
    first: datasets.Features | None = None
    for file in files[:: max(1, len(files) // COMPARED_FILES)] if streaming else files:
        try:
            features = read_features(file)
        except (OSError, pa.ArrowException) as error:
            if streaming:
                continue
            raise ValueError(f"{file}: {one_line(error)}") from error
        first = first or features
        if ending_of(file) == ".parquet" and pq.read_metadata(file).num_rows == 0:
            raise UserError(f"{file} has no rows; move it away")
        more = sorted(features.keys() - first.keys())
        if more:
            rule = "tables of a split must have the same columns"
            raise UserError(f"{file} has columns that {files[0]} lacks ({shortened(more)}): {rule}")
        for column, feature in features.items():
            if getattr(feature, "names", None) != getattr(first[column], "names", None):
                raise UserError(f"{file} declares other classes in {column} than {files[0]}, or another order of these")


def with_whole_paths(rows: datasets.Dataset, tables: Sequence[str], text_column: str | None) -> datasets.Dataset:
    """Rows of tables on this machine; relative paths of images start from the tables' folder, and become absolute.

    Args:
        text_column: has paths also where its type is text.
    Raises:
        UserError: the tables with relative paths are in several folders.
    """
    order = rows.column_names
    folders = sorted({os.path.dirname(table) for table in tables})
    for name, feature in rows.features.items():
        cells = column_of(rows, name)
        if is_cell(feature) and pc.struct_field(cells, "bytes").null_count == len(cells):
            cells = pc.struct_field(cells, "path")
        elif name != text_column or getattr(feature, "dtype", None) not in TEXT_TYPES:
            continue
        paths = cells.to_pylist()
        relative = {path for path in paths if path and not is_url(path) and not os.path.isabs(path)}
        if not relative:
            continue
        if len(folders) > 1:
            problem = f"relative paths of images in {name}, such as {min(relative)}"
            raise UserError(f"{shortened(folders)} have tables with {problem}; put the tables into one folder")
        whole = [os.path.join(folders[0], path) if path in relative else path for path in paths]
        found = f"{name} found"  # added first: a table without columns has no rows
        rows = rows.add_column(found, path_column(whole), feature=datasets.Image(decode=False))
        rows = rows.remove_columns([name]).rename_column(found, name)
    return rows.select_columns(order)
