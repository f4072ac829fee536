"""Images on this machine: folders, archives, shards, and what the library has saved."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from mpp.config import ImagesConfig, require
from mpp.data.columns import BINARY_TYPES, CELL_FIELDS, find_array_dtype, is_cell
from mpp.data.data_path import describe_source
from mpp.data.listing import tars
from mpp.data.listing.archives import ARCHIVES, is_archive, unpacked
from mpp.data.listing.folders import Tree, Walk
from mpp.data.listing.formats import SHARDS, TABLES, ending
from mpp.data.listing.images import list_images
from mpp.data.listing.links import plain_path
from mpp.data.listing.table import Listing, shared, split_order
from mpp.data.retry import LOADING_ERRORS
from mpp.errors import UserError, one_line

QUIET = datasets.DownloadConfig(disable_tqdm=True)  # what is here is not downloaded
SAYS_SPLITS = re.compile(r"\A---\s.*?^configs:.*?^---", re.DOTALL | re.MULTILINE)


def load_local(path: Path, config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a file or folder of this machine."""
    if is_archive(path.name) and path.is_file():
        path = unpacked(path)
    if path.is_file():
        if ending(path.name) not in SHARDS:
            raise UserError(f"data.path is {config.path}; a single file must be {' or '.join([*SHARDS, *ARCHIVES])}")
        refuse_idle_names(config)
        return load_shards({"train": [str(path.absolute())]}, config, streaming)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        refuse_idle_names(config)
        saved = datasets.load_from_disk(plain_path(path))
        return saved if isinstance(saved, datasets.DatasetDict) else {getattr(config, "split", "train"): saved}
    if says_splits(path):
        require(config.labels is None, "data.labels", config.labels, "left out: README.md says what the images are")
        return load_by_card(path, config, streaming)
    require(config.name is None, "data.name", config.name, f"left out: {path} has no README.md with configs")
    found = shared(describe_source(config), lambda: listing_of(path, config, streaming), listing_key(config, streaming))
    return found.splits or load_shards(found.shards, config, streaming)


def refuse_idle_names(config: ImagesConfig) -> None:
    """Refuse settings of what has configs or lists of images, where there are none."""
    require(config.name is None, "data.name", config.name, f"left out: {config.path} has no configs")
    require(config.labels is None, "data.labels", config.labels, "left out: shards have labels of their own")


def load_by_card(path: Path, config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a folder whose README.md says which files these are: by the library, but for tar shards."""
    builder = datasets.load_dataset_builder(plain_path(path), config.name, download_config=QUIET)
    if isinstance(builder, WebDataset):
        return load_shards(
            {str(split): [*files] for split, files in builder.config.data_files.items()}, config, streaming
        )
    return datasets.load_dataset(plain_path(path), config.name, streaming=streaming, download_config=QUIET)


def listing_key(config: ImagesConfig, streaming: bool) -> str:
    """What a listing is made from."""
    return repr((streaming, dataclasses.asdict(config)))


def listing_of(path: Path, config: ImagesConfig, streaming: bool) -> Listing:
    """What is in a folder: images one by one, or the shards that hold them.

    Raises:
        UserError: nothing, or shards of several kinds.
    """
    root = os.path.abspath(path)
    tree = Walk(root).tree
    leave_out_what_is_beside(tree)
    if tree.shards:
        return listing_of_shards(tree, config, streaming)
    if len(tree) == 0:
        left_out = [*tree.left_out.lines(images=True), *tree.left_out.lines(images=False)]
        raise UserError(f"data.path is {config.path}, which holds no images{'; '.join(['', *left_out])}")
    listing = list_images(tree, config, getattr(config, "mask_column", None))
    if len(listing) == 0:
        raise UserError(f"data.path is {config.path}, which holds no images{'; '.join(['', *listing.warnings])}")
    return listing


def leave_out_what_is_beside(tree: Tree) -> None:
    """Of a folder with loose images and shards, keep what is meant: tables that have images, and tars where there are
    not more loose images than tars; else the images."""
    if not (tree.shards and tree.folders):
        return
    tars_count = sum(ending(path) not in TABLES for _, path in tree.shards)
    kept = [
        (parts, path)
        for parts, path in tree.shards
        if (holds_images(path) if ending(path) in TABLES else len(tree) <= tars_count)
    ]
    for parts, path in tree.shards:
        if (parts, path) not in kept:
            what = "tables without images" if ending(path) in TABLES else "tars next to images"
            tree.left_out.add(what, "/".join((*parts, os.path.basename(path))))
    tree.shards = kept
    if kept:
        for folder in tree.folders:
            first = "/".join((*folder.parts, folder.files[0]))
            tree.left_out.add("images next to shards", first, len(folder.files))
        tree.folders = []


def holds_images(table: str) -> bool:
    """Whether a parquet or arrow file has a column of images; not where it cannot be read."""
    try:
        if ending(table) == ".parquet":
            schema = pq.read_schema(table)
        else:
            with pa.memory_map(table) as file:
                schema = pa.ipc.open_stream(file).schema
        features = datasets.Features.from_arrow_schema(schema)
    except LOADING_ERRORS:
        return False
    return any(
        isinstance(each, datasets.Image)
        or is_cell(each)
        or getattr(each, "dtype", "") in BINARY_TYPES
        or find_array_dtype(each)
        for each in features.values()
    )


def listing_of_shards(tree: Tree, config: ImagesConfig, streaming: bool) -> Listing:
    """The shards of a folder, or the images in them where they are tars that are to be indexed."""
    if len(tree.kinds) > 1:
        raise UserError(
            f"data.path is {config.path}, which holds shards of several kinds: {', '.join(sorted(tree.kinds))}"
        )
    require(config.labels is None, "data.labels", config.labels, "left out: shards have labels of their own")
    for parts, path in tree.lists:
        tree.left_out.add("lists of images next to shards", "/".join((*parts, os.path.basename(path))))
    shards: dict[str, list[str]] = {}
    for parts, file in tree.shards:
        shards.setdefault(tars.split_of(file, parts), []).append(file)
    if not (tree.kinds & TABLES or streaming):
        return tars.list_shards(shards, config).with_left_out(tree.left_out)
    in_order = {split: shards[split] for split in sorted(shards, key=split_order)}
    return Listing(shards=in_order).with_left_out(tree.left_out)


def says_splits(folder: Path) -> bool:
    """Whether a folder's README.md is a dataset card that says what its splits are, as those of the hub do."""
    card = folder / "README.md"
    return card.is_file() and SAYS_SPLITS.match(card.read_text(encoding="utf-8", errors="replace")) is not None


def load_shards(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of shards on this machine: tables by the library, tars by us."""
    (kind,) = {ending(file) for files in shards.values() for file in files}
    if kind not in TABLES:
        if streaming:
            return {split: tars.stream_of(files, config) for split, files in shards.items()}
        return shared(
            describe_source(config), lambda: tars.list_shards(shards, config), listing_key(config, streaming)
        ).splits
    splits = {}
    for split, files in shards.items():  # each by itself: they may have other columns, and other orders of classes
        if not streaming:
            refuse_other_classes(files)
        plain = {split: [plain_path(Path(file)) for file in files]}
        options = dict(data_files=plain, streaming=streaming, download_config=QUIET)
        splits[split] = datasets.load_dataset(SHARDS[kind], **options)[split]
    return splits if streaming else with_found_paths(splits, shards)


def refuse_other_classes(files: list[str]) -> None:
    """Refuse parquet files of one split that declare other classes, or another order of these: the library would take
    those of the first for all.

    Raises:
        UserError: there are such.
    """
    first: dict[str, list[str]] = {}
    for file in files:
        if ending(file) != ".parquet":
            return
        try:
            features = datasets.Features.from_arrow_schema(pq.read_schema(file))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{file}: {one_line(error)}") from error
        for column, feature in features.items():
            names = getattr(feature, "names", None)
            if names is not None and first.setdefault(column, names) != names:
                raise UserError(f"{file} declares other classes in {column} than {files[0]}, or another order of these")


def with_found_paths(splits: dict[str, datasets.Dataset], shards: dict[str, list[str]]) -> dict[str, datasets.Dataset]:
    """The same, with the paths of image files that are relative to the table that names them."""
    folders = sorted({os.path.dirname(file) for files in shards.values() for file in files})
    return {split: with_paths_from(rows, folders) for split, rows in splits.items()}


def with_paths_from(rows: datasets.Dataset, folders: list[str]) -> datasets.Dataset:
    """Rows with the paths of image files from one of these folders on."""
    for column, feature in rows.features.items():
        paths = paths_in(rows, column, feature)
        if paths is None:
            continue
        found = [path and find_below(path, folders) for path in paths.to_pylist()]
        cells = pa.StructArray.from_arrays(
            [pa.nulls(len(found), pa.binary()), pa.array(found, pa.string())], CELL_FIELDS
        )
        order = rows.column_names
        rows = rows.remove_columns([column]).add_column(column, cells, feature=datasets.Image(decode=False))
        rows = rows.select_columns(order)
    return rows


def paths_in(rows: datasets.Dataset, column: str, feature: Any) -> pa.ChunkedArray | None:
    """The names of files in a column of images that has no bytes, where some are relative; None: it is another one."""
    if not (isinstance(feature, datasets.Image) or is_cell(feature)) or len(rows) == 0:
        return None
    cells = rows.with_format("arrow").select_columns([column])[:].column(0)
    if pc.struct_field(cells, CELL_FIELDS[0]).null_count < len(cells):
        return None
    paths = pc.struct_field(cells, CELL_FIELDS[1])
    known = [path for path in paths.to_pylist() if path]
    return paths if any("://" not in path and not os.path.isabs(path) for path in known) else None


def find_below(path: str, folders: list[str]) -> str:
    """A file by its name from one of some folders on; the first where it is in none."""
    if "://" in path or os.path.isabs(path):
        return path
    places = [os.path.join(folder, path) for folder in folders]
    return next((place for place in places if os.path.exists(place)), places[0])
