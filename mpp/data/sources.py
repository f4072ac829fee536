"""Where images come from: what `datasets` can load, as encoded images with their labels."""

import dataclasses
import shlex
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import fsspec
import huggingface_hub.constants
import numpy as np
from datasets.data_files import get_data_patterns
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from huggingface_hub.errors import HfHubHTTPError
from numpy.typing import NDArray
from pyarrow import ArrowException
from torch import Tensor

from mpp.config import ImagesConfig, SourceConfig, require
from mpp.data import decoding, folders
from mpp.data.folders import ARCHIVES, ARRAY_FILES, SHARD_FILES
from mpp.data.hub import check_commit, of_the_hub
from mpp.data.labels import number_labels, read_labels
from mpp.data.reading import NETWORK_ERRORS, SERVER_ERRORS, retried
from mpp.errors import UserError, one_line
from mpp.runtime.parsing import as_words
from mpp.runtime.randomness import Stream, permutation

LOADING_ERRORS = (  # what the library and those below it raise for what a user sees as one: it cannot be loaded
    *(OSError, EOFError, ValueError, RuntimeError, ImportError, tarfile.TarError, zipfile.BadZipFile),
    *(ArrowException, DatasetsError, HfHubHTTPError, *NETWORK_ERRORS),
)
for _end in ARRAY_FILES:  # the library would make lists of an array, and nothing of several
    WebDataset.DECODERS.pop(_end.removeprefix("."), None)
ENCODED = ("binary", "large_binary", "string", "large_string")  # image files, or their names
BIRDS = Path(__file__).parent.parent / "birds"


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
        return (isinstance(cell, dict) and cell.get("path")) or f"{self.split}[{index}]"

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


def dataset_of(rows: datasets.Dataset, column: str, labels: NDArray[np.int64] | None, split: str) -> ImageDataset:
    """The images of a column, as they are stored."""
    return ImageDataset(undecoded(rows.select_columns([column]), column), column, labels, split)


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
    if "://" in cell["path"]:  # whatever a file system over a network raises
        return retried(partial(fetch, cell["path"]), cell["path"], retries, Exception)
    return retried(Path(cell["path"]).read_bytes, cell["path"], retries)


def fetch(url: str) -> bytes:
    """A file from wherever fsspec reads."""
    with fsspec.open(url) as file:
        return file.read()


def load_image_datasets(config: SourceConfig) -> tuple[ImageDataset, ImageDataset]:
    """The images to train on (all of them: see `data.train_images` and `ImageDataset.choose`) and the held-out ones.

    Raises:
        UserError: nothing there, no such split, no image column, too few images.
    """
    splits = load_splits(config)
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
    loaded = [dataset_of(rows, column, of, name) for (name, (rows, *_)), of in zip(parts.items(), labels, strict=True)]
    if held_out is None:
        loaded = loaded[0].cut(config.eval_fraction, config.cut_seed, "held out")
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
    """All splits of the dataset that `data.path` names, indexed, or as streams where they are in shards."""
    if config.path is None:
        files = {split: str(BIRDS / f"{split}-00000-of-00001.parquet") for split in ("train", "test")}
        return datasets.load_dataset("parquet", data_files=files, streaming=streaming)
    path, on_hub = Path(config.path).expanduser(), of_the_hub(config)
    if not (on_hub or path.exists() or "://" in config.path):
        raise UserError(f"data.path is {config.path}, which does not exist")
    allowed = f"left out: {config.path} is no dataset of the hub"
    require(on_hub or config.revision is None, "data.revision", config.revision, allowed)
    try:
        if "://" in config.path:
            return from_a_server(partial(load_url, config.path, streaming), config)
        if path.name.endswith(ARCHIVES) and path.is_file():
            path = folders.unpacked(path)
        if path.is_file():
            if path.suffix not in SHARD_FILES:
                raise UserError(f"a single file must be {' or '.join([*SHARD_FILES, *ARCHIVES])}")
            return datasets.load_dataset(SHARD_FILES[path.suffix], data_files=str(path), streaming=streaming)
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return saved if isinstance(saved, datasets.DatasetDict) else {getattr(config, "split", "train"): saved}
        found = config.path if on_hub else str(path)
        load = partial(datasets.load_dataset, found, config.name, revision=config.revision, streaming=streaming)
        if on_hub:
            return from_a_server(load, config)
        splits = folders.load_folder(path, load)
        folders.warn_of_images_left_out(path, config.path, splits)
        return splits
    except LOADING_ERRORS as error:
        here = f" (and {Path.cwd()} has no such folder or file)" if on_hub else ""
        raise UserError(f"data.path is {config.path}, which cannot be loaded: {one_line(error)}{here}") from error


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


def load_url(url: str, streaming: bool) -> dict[str, Any]:
    """The splits of the shards at a URL."""
    kind, files = files_at(url)
    return datasets.load_dataset(kind, data_files=files, streaming=streaming)


def files_at(url: str) -> tuple[str, dict[str, Any]]:
    """The kind of the shards at a URL that fsspec knows, and the files of each split.

    Args:
        url: of a file, of files by a pattern with *, or of a folder, whose files' names or folders say their split.
    """
    if Path(url).suffix in SHARD_FILES:
        return SHARD_FILES[Path(url).suffix], {"train": url}
    system, root = fsspec.url_to_fs(url)
    ends = {Path(file).suffix for file in system.find(root)} & SHARD_FILES.keys()
    if len(ends) != 1:
        raise UserError(f"it must hold files of one sort of {', '.join(SHARD_FILES)}; it has {sorted(ends) or 'none'}")
    end, folder = ends.pop(), url.rstrip("/")
    return SHARD_FILES[end], {
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
    found = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    found = found or [name for name, feature in features.items() if is_array(feature) or f".{name}" in ARRAY_FILES]
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
    return isinstance(feature, datasets.Image) or getattr(feature, "dtype", None) in ENCODED


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
