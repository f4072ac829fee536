"""Images on this machine: folders, archives, shards, and datasets that `save_to_disk` of `datasets` wrote."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path
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
from mpp.data.columns import BINARY_TYPES, TEXT_TYPES, find_array_dtype, is_cell
from mpp.data.data_path import describe_source, is_url
from mpp.data.decoding.kinds import LFS_POINTER, STAND_IN_STARTS, kind_of
from mpp.data.labels import column_of
from mpp.data.listing.archives import ARCHIVE_EXTENSIONS, is_archive, unpack_archive
from mpp.data.listing.formats import LIST_EXTENSIONS, SHARD_BUILDERS, TABLE_EXTENSIONS, extension_of
from mpp.data.listing.image_table import Listing, SharedListing, path_column, share_listing
from mpp.data.listing.images import is_named_list, list_images
from mpp.data.listing.links import plain_path
from mpp.data.listing.split_names import incomplete_sets, split_of_shard, split_order
from mpp.data.listing.tars import list_shards, stream_shards
from mpp.data.listing.tree import Tree, first_bytes, walk_folder
from mpp.data.retry import LOADING_ERRORS
from mpp.errors import UserError, one_line
from mpp.runtime.messages import counted, shortened, warn
from mpp.runtime.output import printable

QUIET = datasets.DownloadConfig(disable_tqdm=True)  # local files are not downloaded
MAX_STAND_IN_BYTES = 1 << 12
STREAMED_FILES_COMPARED = 16  # of a split, or a few more: a stream may have very many
MAX_EMPTY_TABLE_BYTES = 1 << 20  # a longer table has rows, and need not be opened to know it
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
    for line in incomplete_sets(all_files):
        warn(f"{describe_source(config)}: {line}")
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
        kind = kind_of(first_bytes(file))
        if kind in STAND_IN_STARTS:
            advice = "`git lfs pull` fetches it" if kind == LFS_POINTER else "fetch it again"
            raise UserError(f"{file} is {kind} instead of a shard; {advice}")


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
        refuse_empty(config, [*tree.left_out.lines(images=True), *tree.left_out.lines(images=False)])
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


def can_hold_images(feature: Any) -> bool:
    """Whether a column may hold image files or arrays."""
    is_binary = getattr(feature, "dtype", None) in BINARY_TYPES
    return is_binary or is_cell(feature) or find_array_dtype(feature) is not None


def holds_images(table: str) -> bool:
    """Whether a parquet or arrow file has a column of images; not where it cannot be read."""
    try:
        features = read_features(table)
    except LOADING_ERRORS:
        return False
    return any(can_hold_images(feature) for feature in features.values())


def read_features(table: str) -> datasets.Features:
    """The columns' types of a parquet or arrow file."""
    if extension_of(table) == ".parquet":
        return datasets.Features.from_arrow_schema(pq.read_schema(table))
    with pa.memory_map(table) as file:
        try:
            schema = pa.ipc.open_stream(file).schema
        except pa.ArrowInvalid:  # arrow has a second format, which `datasets` reads, too
            schema = pa.ipc.open_file(file).schema
        return datasets.Features.from_arrow_schema(schema)


def has_rows(table: str) -> bool:
    """Whether a parquet or arrow file has rows; also where it cannot be read: loading it says why."""
    with suppress(*LOADING_ERRORS):
        if os.path.getsize(table) > MAX_EMPTY_TABLE_BYTES:
            return True
        return count_rows(table) > 0
    return True


def count_rows(table: str) -> int:
    """Number of rows of a parquet or arrow file."""
    if extension_of(table) == ".parquet":
        return pq.read_metadata(table).num_rows
    with pa.memory_map(table) as file:
        return sum(batch.num_rows for batch in read_batches(file))


def read_batches(file: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """The rows of an arrow file in batches, in either of its formats."""
    try:
        yield from pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        reader = pa.ipc.open_file(file)
        yield from map(reader.get_batch, range(reader.num_record_batches))


def leave_out_cached_tables(tree: Tree) -> None:
    """Leave out what `map` or `filter` of `datasets` made of a dataset on disk: its images would count twice."""
    kept = []
    for parts, path in tree.shards:
        if CACHED_TABLE.fullmatch(os.path.basename(path)):
            tree.leave_out("cached results of datasets", parts, path, images=False)
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
            tree.leave_out("shards without rows", parts, path, images=False)
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


def refuse_other_columns(files: list[str], streaming: bool) -> None:
    """Refuse tables of one split that declare different classes: `datasets` would use the first file's for all.

    Also those with columns that the first lacks, which it cannot load.

    Of a stream some are compared, and damaged ones are left for its reader to name.

    Raises:
        UserError: a file declares other classes than the first, or another order of these; or has more columns.
    """
    first_names: dict[str, list[str]] = {}
    first_columns: set[str] | None = None
    for file in files[:: max(1, len(files) // STREAMED_FILES_COMPARED)] if streaming else files:
        try:
            features = read_features(file)
        except (OSError, pa.ArrowException) as error:
            if streaming:
                continue
            raise ValueError(f"{file}: {one_line(error)}") from error
        first_columns = first_columns or {*features}
        more = sorted(features.keys() - first_columns)
        if more:
            rule = "tables of a split must have the same columns"
            raise UserError(f"{file} has columns that {files[0]} lacks ({shortened(more)}): {rule}")
        for column, feature in features.items():
            names = getattr(feature, "names", None)
            if names is not None and first_names.setdefault(column, names) != names:
                raise UserError(f"{file} declares other classes in {column} than {files[0]}, or another order of these")


def resolve_relative_paths(rows: datasets.Dataset, tables: list[str], text_column: str | None) -> datasets.Dataset:
    """Rows whose paths of image files are absolute.

    Args:
        tables: that the rows are of, one after the other; relative paths start from the folder of their table.
        text_column: has paths also where its type is text.
    """
    columns = rows.column_names
    for column in columns:
        paths = relative_paths(rows, column, column == text_column)
        if paths is None:
            continue
        folders = folders_of_rows(tables, len(rows))
        cells = path_column([path and from_folder(path, folder) for path, folder in zip(paths, folders, strict=True)])
        found = f"{column} found"  # added first: a table without columns has no rows
        rows = rows.add_column(found, cells, feature=datasets.Image(decode=False))
        rows = rows.remove_columns([column]).rename_column(found, column)
    return rows.select_columns(columns)


def refuse_relative_paths(tables: list[str]) -> None:
    """Refuse to stream tables whose images are relative paths: a row of a stream does not say its table's folder.

    The first row of the first one tells, if it can be read.
    """
    row: dict[str, Any] = {}
    with suppress(*LOADING_ERRORS):
        row = first_row(tables[0])
    for column, cell in row.items():
        is_path = isinstance(cell, dict) and {*cell} == {"bytes", "path"} and cell["bytes"] is None
        if is_path and cell["path"] and is_relative(cell["path"]):
            advice = "leave out data.streaming, or make shards by mpp prepare"
            raise UserError(f"{tables[0]} has relative paths of images ({column}: {cell['path']}): {advice}")


def first_row(table: str) -> dict[str, Any]:
    """The first row of a parquet or arrow file; {}: it has none."""
    if extension_of(table) == ".parquet":
        with pq.ParquetFile(table) as file:
            batch = next(file.iter_batches(batch_size=1), None)
            return batch.to_pylist()[0] if batch else {}
    with pa.memory_map(table) as file:
        batch = next(iter(read_batches(file)), None)
        return batch.slice(0, 1).to_pylist()[0] if batch else {}


def relative_paths(rows: datasets.Dataset, column: str, may_be_text: bool) -> list[str | None] | None:
    """The paths in a column of images without bytes, if some are relative; None: it is another column."""
    has_cells = is_cell(rows.features[column])
    has_texts = may_be_text and getattr(rows.features[column], "dtype", None) in TEXT_TYPES
    if not (has_cells or has_texts) or len(rows) == 0:
        return None
    cells = column_of(rows, column)
    if has_cells and pc.struct_field(cells, "bytes").null_count < len(cells):
        return None
    paths = (pc.struct_field(cells, "path") if has_cells else cells).to_pylist()
    return paths if any(is_relative(path) for path in paths if path) else None


def is_relative(path: str) -> bool:
    """Whether a path in a table is neither absolute nor a URL."""
    return not is_url(path) and not os.path.isabs(path)


def folders_of_rows(tables: list[str], count: int) -> list[str]:
    """The folder of each row's table.

    Args:
        count: number of rows of all tables.
    """
    folders = [os.path.dirname(table) for table in tables]
    if len({*folders}) == 1:
        return folders[:1] * count
    return list(
        chain.from_iterable(repeat(folder, count_rows(table)) for folder, table in zip(folders, tables, strict=True))
    )


def from_folder(path: str, folder: str) -> str:
    """A path of a file that starts from a folder, unless it is absolute or a URL."""
    return os.path.join(folder, path) if is_relative(path) else path
