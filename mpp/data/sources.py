"""Where images come from: what `datasets` can load, as encoded images with their labels."""

import dataclasses
import os
import re
import shlex
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import fsspec
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.data_files import get_data_patterns
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from huggingface_hub.errors import HfHubHTTPError
from numpy.typing import NDArray
from pyarrow import ArrowException
from torch import Tensor

from mpp.config import ImagesConfig, SourceConfig, require
from mpp.data import decoding, tars
from mpp.data.archives import ARCHIVES, is_archive, unpacked
from mpp.data.folders import Tree, Walk
from mpp.data.formats import ARRAYS, SHARDS, TABLES, ending
from mpp.data.hub import check_commit, of_the_hub
from mpp.data.labels import number_labels, read_labels
from mpp.data.links import plain_path
from mpp.data.listing import ANY_BYTES, Found, Listing, as_path, list_images, shared, split_order
from mpp.data.overview import announce, warn_of_labels
from mpp.data.reading import NETWORK_ERRORS, SERVER_ERRORS, retried
from mpp.errors import UserError, one_line
from mpp.runtime.caches import unwritable_cache
from mpp.runtime.parsing import as_words
from mpp.runtime.randomness import Stream, permutation

LOADING_ERRORS = (  # what the library and those below it raise for what a user sees as one: it cannot be loaded
    *(OSError, EOFError, ValueError, RuntimeError, ImportError, tarfile.TarError, zipfile.BadZipFile),
    *(ArrowException, DatasetsError, HfHubHTTPError, *NETWORK_ERRORS),
)
BINARY = ("binary", "large_binary")  # image files
ENCODED = (*BINARY, "string", "large_string")  # or their names
BIRDS = Path(__file__).parent.parent / "birds"
QUIET = datasets.DownloadConfig(disable_tqdm=True)  # what is here is not downloaded
NAMES = ["bytes", "path"]  # of an image file's cell
SAYS_SPLITS = re.compile(r"\A---\s.*?^(configs|dataset_info):.*?^---", re.DOTALL | re.MULTILINE)
CARD = "card"  # kind of a folder whose README.md says what its splits are


class Origin(NamedTuple):
    """A whole split, and which images of it are meant."""

    rows: datasets.Dataset
    split: str
    indices: NDArray[np.int64] | None  # None: all, in their order

    def select(self, indices: NDArray[np.int64]) -> "Origin":
        """The images at `indices` of those that are meant."""
        return self._replace(indices=indices if self.indices is None else self.indices[indices])


class Decoded(NamedTuple):
    """Decoded images in one piece of memory, which loader processes inherit and share."""

    pixels: Tensor  # (H, W, C) of one image after the other, which is cropped in half the time of (C, H, W)
    ends: NDArray[np.int64]  # (n,): where each image ends
    shapes: NDArray[np.int64]  # (n, 3): C, H, W; H is 0 where an image cannot be decoded

    def get(self, index: int) -> Tensor | None:
        """The image as (C, H, W); None where it cannot be decoded."""
        channels, height, width = self.shapes[index].tolist()
        if height == 0:
            return None
        pixels = self.pixels[self.ends[index] - channels * height * width : self.ends[index]]
        return pixels.view(height, width, channels).permute(2, 0, 1)


@dataclass(eq=False)
class ImageDataset:
    """Images of one split, still encoded, and their labels."""

    rows: datasets.Dataset
    image_column: str
    """Holds {"bytes", "path"}, undecoded; or arrays."""
    labels: NDArray[np.int64] | None
    """(n,) class of each image, -1 where there is none; (n, L) where several are right, padded with -1; None where
    nothing is labelled."""
    split: str
    """Its name, for messages."""
    names: list[str] | None = None
    """Of the classes, by number: those that occur in training, or are declared, then those that only others have."""
    classes: int = 0
    """How many classes training has, or declares."""
    origin: Origin | None = None
    """The split that they were chosen from; None: this one."""
    decoded: Decoded | None = None
    """The same images in memory, where they are."""

    def __post_init__(self):
        self.origin = self.origin or Origin(self.rows, self.split, None)

    def __len__(self) -> int:
        return len(self.rows)

    def decode(self, index: int, config: ImagesConfig) -> Tensor:
        """The image as (C, H, W); raises UnreadableImage, or ReadFailed after `read_retries`."""
        kept = self.decoded and self.decoded.get(index)
        return decode_cell(self.rows[index][self.image_column], config, self.numbers_type) if kept is None else kept

    @cached_property
    def numbers_type(self) -> str | None:
        """Of arrays; None: image files."""
        return numbers_of(self.rows.features[self.image_column])

    def other(self, word: int) -> int:
        """An image by a random number."""
        return word % len(self)

    def describe(self) -> str:
        return f"{len(self)} images"

    def name(self, index: int) -> str:
        """What a person finds the image by."""
        cell = self.rows[index][self.image_column]
        return file_of(cell) or f"{self.split}[{index}]"

    def select(self, indices: NDArray[np.int64]) -> "ImageDataset":
        """The images at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        rows, origin = self.rows.select(indices), self.origin.select(indices)
        return replace(self, rows=rows, labels=labels, origin=origin, decoded=None)

    def choose(self, limit: int | None, seed: int, after: int = 0) -> "ImageDataset":
        """A seeded choice of `limit` images, in the order they had (files come sorted by class); all, where fewer.

        Args:
            after: so many others are chosen already, by the same seed.
        """
        if limit is None or (limit >= len(self) and not after):
            return self
        return self.select(np.sort(permutation(Stream.CUT, seed, 1, len(self))[after : after + limit]))

    def labelled(self) -> "ImageDataset | None":
        """The images that have a label; None where there are none."""
        if self.labels is None or not (self.labels >= 0).any():
            return None
        known = (self.labels >= 0).reshape(len(self), -1).any(1)
        return self if known.all() else self.select(np.flatnonzero(known))

    def cut(self, fraction: float, seed: int, name: str) -> tuple["ImageDataset", "ImageDataset"]:
        """A seeded cut in two: what stays, and `fraction` of the images (at least one), in the order they had."""
        order, count = permutation(Stream.CUT, seed, 0, len(self)), max(1, round(fraction * len(self)))
        if count >= len(self):
            raise UserError(f"{self.split} has {len(self)} images: too few to hold {count} out")
        return self.select(np.sort(order[count:])), replace(self.select(np.sort(order[:count])), split=name)


def dataset_of(
    rows: datasets.Dataset,
    column: str,
    labels: NDArray[np.int64] | None,
    split: str,
    names: list[str] | None = None,
    classes: int = 0,
) -> ImageDataset:
    """The images of a column, as they are stored."""
    return ImageDataset(undecoded(rows.select_columns([column]), column), column, labels, split, names, classes)


def decode_cell(cell: Any, config: ImagesConfig, numbers: str | None = None) -> Tensor:
    """The image of a cell as (C, H, W); raises UnreadableImage, or ReadFailed. See `contents`."""
    return decoding.decode(contents(cell, config.read_retries, numbers), config)


def contents(cell: Any, retries: int, numbers: str | None = None) -> bytes | NDArray:
    """The image file of a cell {"bytes", "path"}, or its array.

    Args:
        numbers: type of the array's numbers; None: it is a file.
    """
    if numbers is None or cell is None:
        return encoded_bytes(cell, retries)
    try:
        found = np.asarray(cell)
    except ValueError:
        raise decoding.UnreadableImage("lists of several lengths, which are no image") from None
    decoding.check_numbers(found.dtype)  # of a null among the numbers
    return found.astype(numbers, copy=False)


def encoded_bytes(cell: dict[str, Any] | None, retries: int = 0) -> bytes:
    """The image file of a cell {"bytes", "path"}.

    Raises:
        UnreadableImage: there is nothing to read.
        ReadFailed: there is, and it cannot be read now.
    """
    if not cell or (cell["bytes"] is None and not cell["path"]):
        raise decoding.UnreadableImage("no bytes: neither an image nor the name of a file")
    if cell["bytes"] is not None:
        return cell["bytes"]
    if tars.MEMBER.fullmatch(cell["path"]):
        return retried(partial(tars.read_member, cell["path"]), tars.name_of_member(cell["path"]), retries)
    if "://" in cell["path"] and not cell["path"].startswith(ANY_BYTES):  # whatever a file system over a network raises
        return retried(partial(fetch, cell["path"]), cell["path"], retries, Exception)
    return retried(Path(as_path(cell["path"])).read_bytes, cell["path"], retries)


def file_of(cell: Any) -> str | None:
    """The name of the file that a cell has: its path, or that of its shard and its name there; None: it has none."""
    path = cell.get("path") if isinstance(cell, dict) else None
    return tars.name_of_member(as_path(path)) if path else None


def fetch(url: str) -> bytes:
    """A file from wherever fsspec reads."""
    with fsspec.open(url) as file:
        return file.read()


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


def describe(config: ImagesConfig) -> str:
    """The dataset, for messages."""
    return f"data.path {config.path}" if config.path else "the package's birds"


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


def load_local(path: Path, config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a file or folder of this machine."""
    if is_archive(path.name) and path.is_file():
        path = unpacked(path)
    if path.is_file():
        if ending(path.name) not in SHARDS:
            raise UserError(f"data.path is {config.path}; a single file must be {' or '.join([*SHARDS, *ARCHIVES])}")
        found = Found({}, {"train": [str(path.absolute())]})
        if ending(path.name) in TABLES or streaming:
            return load_shards(found.shards, config, streaming)
        return shared(
            describe(config), lambda: tars.list_shards(found.shards, config), listing_key(config, streaming)
        ).splits
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = datasets.load_from_disk(plain_path(path))
        return saved if isinstance(saved, datasets.DatasetDict) else {getattr(config, "split", "train"): saved}
    found = shared(describe(config), lambda: listing_of(path, config, streaming), listing_key(config, streaming))
    if CARD in found.shards:
        return datasets.load_dataset(plain_path(path), config.name, streaming=streaming, download_config=QUIET)
    return found.splits or load_shards(found.shards, config, streaming)


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
    if not tree.folders:
        left_out = [*tree.left_out.lines(images=True), *tree.left_out.lines(images=False)]
        raise UserError(f"data.path is {config.path}, which holds no images{'; '.join(['', *left_out])}")
    if says_splits(Path(root)):
        return Listing(shards={CARD: []})
    return list_images(tree, config, getattr(config, "mask_column", None))


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
        isinstance(each, datasets.Image) or is_cell(each) or getattr(each, "dtype", "") in BINARY or numbers_of(each)
        for each in features.values()
    )


def listing_of_shards(tree: Tree, config: ImagesConfig, streaming: bool) -> Listing:
    """The shards of a folder, or the images in them where they are tars that are to be indexed."""
    if len(tree.kinds) > 1:
        raise UserError(
            f"data.path is {config.path}, which holds shards of several kinds: {', '.join(sorted(tree.kinds))}"
        )
    require(config.labels is None, "data.labels", config.labels, "left out: shards have labels of their own")
    shards: dict[str, list[str]] = {}
    for parts, file in tree.shards:
        shards.setdefault(tars.split_of(file, parts), []).append(file)
    if tree.kinds & TABLES or streaming:
        in_order = {split: shards[split] for split in sorted(shards, key=split_order)}
        return Listing(shards=in_order).take(tree.left_out)
    return tars.list_shards(shards, config).take(tree.left_out)


def says_splits(folder: Path) -> bool:
    """Whether a folder's README.md is a dataset card that says what its splits are, as those of the hub do."""
    card = folder / "README.md"
    return card.is_file() and SAYS_SPLITS.match(card.read_text(errors="replace")) is not None


def load_shards(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of shards on this machine: tables by the library, tars as streams."""
    (kind,) = {ending(file) for files in shards.values() for file in files}
    if kind not in TABLES:
        return {split: tars.stream_of(files, config) for split, files in shards.items()}
    plain = {split: [plain_path(Path(file)) for file in files] for split, files in shards.items()}
    splits = datasets.load_dataset(SHARDS[kind], data_files=plain, streaming=streaming, download_config=QUIET)
    if streaming:
        return splits
    folders = {split: sorted({os.path.dirname(file) for file in files}) for split, files in shards.items()}
    return {split: with_found_paths(rows, folders[split]) for split, rows in splits.items()}


def with_found_paths(rows: datasets.Dataset, folders: list[str]) -> datasets.Dataset:
    """The same, with the paths of image files that are relative to the table that names them."""
    for column, feature in rows.features.items():
        paths = paths_in(rows, column, feature)
        if paths is None:
            continue
        found = [path and find_below(path, folders) for path in paths.to_pylist()]
        cells = pa.StructArray.from_arrays([pa.nulls(len(found), pa.binary()), pa.array(found, pa.string())], NAMES)
        order = rows.column_names
        rows = rows.remove_columns([column]).add_column(column, cells, feature=datasets.Image(decode=False))
        rows = rows.select_columns(order)
    return rows


def paths_in(rows: datasets.Dataset, column: str, feature: Any) -> pa.ChunkedArray | None:
    """The names of files in a column of images that has no bytes, where some are relative; None: it is another one."""
    if not (isinstance(feature, datasets.Image) or is_cell(feature)) or len(rows) == 0:
        return None
    cells = rows.with_format("arrow").select_columns([column])[:].column(0)
    if pc.struct_field(cells, NAMES[0]).null_count < len(cells):
        return None
    paths = pc.struct_field(cells, NAMES[1])
    known = [path for path in paths.to_pylist() if path]
    return paths if any("://" not in path and not os.path.isabs(path) for path in known) else None


def find_below(path: str, folders: list[str]) -> str:
    """A file by its name from one of some folders on; the first where it is in none."""
    if "://" in path or os.path.isabs(path):
        return path
    places = [os.path.join(folder, path) for folder in folders]
    return next((place for place in places if os.path.exists(place)), places[0])


def load_from_hub(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a dataset of the hub: by the library, but for loose pictures and tar shards."""
    known = dict(name=config.name, revision=config.revision)
    builder = datasets.load_dataset_builder(config.path, **known)
    if isinstance(builder, WebDataset):
        return load_far_shards(
            {str(split): [*files] for split, files in builder.config.data_files.items()}, config, streaming
        )
    if isinstance(builder, ImageFolder):
        if streaming:
            without = "leave out data.streaming, or make shards by mpp prepare"
            raise UserError(f"data.path holds image files, no shards: {without}")
        folder = Path(huggingface_hub.snapshot_download(config.path, repo_type="dataset", revision=config.revision))
        if not says_splits(folder):
            return shared(
                describe(config), lambda: listing_of(folder, config, False), listing_key(config, False)
            ).splits
    return datasets.load_dataset(config.path, streaming=streaming, **known)


def load_far_shards(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of tar shards at URLs: as streams, or downloaded and indexed."""
    if streaming:
        return {split: tars.stream_of(files, config) for split, files in shards.items()}
    here = datasets.DownloadManager().download(shards)
    return shared(describe(config), lambda: tars.list_shards(here, config), listing_key(config, streaming)).splits


def from_a_server(load: Callable[[], dict[str, Any]], config: ImagesConfig) -> dict[str, Any]:
    """What `load` loads, tried again while its server is away; later reads are tried again by us alone.

    The library would try a stream's reads again for an hour, in which no signal is heard.
    """
    for name in ("OPEN", "READ", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT"):
        setattr(datasets.config, f"STREAMING_{name}_RETRY_INTERVAL", 0)
    datasets.config.STREAMING_OPEN_MAX_RETRIES = datasets.config.STREAMING_READ_MAX_RETRIES = 1
    offline = of_the_hub(config) and huggingface_hub.constants.HF_HUB_OFFLINE  # by choice, for good
    splits = load() if offline else retried(load, "the server of the images", config.read_retries, SERVER_ERRORS)
    check_commit(splits, config)
    return splits


def load_url(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of the shards at a URL."""
    kind, files = files_at(config.path)
    if kind == SHARDS[".tar"]:
        found = {split: [*files_like(patterns)] for split, patterns in files.items()}
        return load_far_shards(found, config, streaming)
    return datasets.load_dataset(kind, data_files=files, streaming=streaming)


def files_like(patterns: str | list[str]) -> Iterator[str]:
    """The URLs of the files that patterns mean, each once, in order."""
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        system, path = fsspec.url_to_fs(pattern)
        found |= dict.fromkeys(map(system.unstrip_protocol, sorted(system.glob(path)) if "*" in path else [path]))
    yield from found


def files_at(url: str) -> tuple[str, dict[str, Any]]:
    """The kind of the shards at a URL that fsspec knows, and the files of each split.

    Args:
        url: of a file, of files by a pattern with *, or of a folder, whose files' names or folders say their split.
    """
    if Path(url).suffix in SHARDS:
        return SHARDS[Path(url).suffix], {"train": url}
    system, root = fsspec.url_to_fs(url)
    ends = {Path(file).suffix for file in system.find(root)} & SHARDS.keys()
    if len(ends) != 1:
        raise UserError(f"it must hold files of one sort of {', '.join(SHARDS)}; it has {sorted(ends) or 'none'}")
    end, folder = ends.pop(), url.rstrip("/")
    return SHARDS[end], {
        str(split): [f"{folder}/{pattern_of(pattern, end)}" for pattern in patterns]
        for split, patterns in get_data_patterns(url).items()
    }


def pattern_of(pattern: str, end: str) -> str:
    """The library's pattern, for files with this ending alone: there may be others beside them."""
    if pattern.endswith("**"):
        return f"{pattern}/*{end}"
    return pattern.removesuffix(".*").removesuffix(end) + end


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


def find_image_column(config: ImagesConfig, features: datasets.Features) -> str:
    """The column that holds the images: the named one, or the only one that can."""
    columns = ", ".join(features)
    found = [name for name, feature in features.items() if isinstance(feature, datasets.Image) or is_cell(feature)]
    found = found or [name for name, feature in features.items() if is_array(feature) or f".{name}" in ARRAYS]
    found = found or [name for name, feature in features.items() if numbers_of(feature)]
    if config.image_column is None:
        if len(found) != 1:
            raise UserError(
                f"{describe(config)} has {len(found)} image columns; name one by data.image_column: {columns}"
            )
        return found[0]
    if config.image_column not in features:
        raise UserError(f"data.image_column is {config.image_column}; {describe(config)} has {columns}")
    feature = features[config.image_column]
    if not is_encoded(feature) and numbers_of(feature) is None:
        raise UserError(f"data.image_column is {config.image_column}, which holds no images but {feature}")
    return config.image_column


def is_encoded(feature: Any) -> bool:
    """Whether a column holds image files, or their names."""
    return isinstance(feature, datasets.Image) or is_cell(feature) or getattr(feature, "dtype", None) in ENCODED


def is_cell(feature: Any) -> bool:
    """Whether a column holds {"bytes", "path"}, as tools write images that do not know the library's type."""
    return isinstance(feature, dict) and {*feature} == {*NAMES}


def is_array(feature: Any) -> bool:
    """Whether a column can hold nothing but arrays that are images."""
    return isinstance(feature, datasets.Array2D | datasets.Array3D)


def numbers_of(feature: Any) -> str | None:
    """The type of the numbers of a column of arrays: Array2D, Array3D, lists of lists. None: it has none."""
    depth = 0
    while not is_array(feature) and not isinstance(feature, datasets.Value):
        feature, depth = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None), depth + 1
        if feature is None:
            return None
    plain = feature.dtype.startswith(("int", "uint", "float"))
    return feature.dtype if is_array(feature) or (depth > 1 and plain) else None


def undecoded(rows: Any, column: str) -> Any:
    """Rows, indexed or a stream, whose images are image files still; or arrays, or lists that are slower to read."""
    feature = rows.features[column]
    if is_encoded(feature):
        try:
            return rows.cast_column(column, datasets.Image(decode=False))
        except (ArrowException, TypeError) as error:  # older releases know fewer types
            what = f"data.image_column is {column}, of {feature}, which datasets {datasets.__version__} cannot read"
            raise UserError(f"{what}; update it (pip install -U datasets): {one_line(error)}") from error
    if not is_array(feature) or isinstance(rows, datasets.IterableDataset) or rows.data.column(column).null_count:
        return rows  # lists
    return rows.with_format("numpy", [column], output_all_columns=True, dtype=feature.dtype)
