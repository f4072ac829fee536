"""Images of a split, still encoded, with their labels."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import fsspec
import numpy as np
from numpy.typing import NDArray
from pyarrow import ArrowException
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.data.data_path import describe_source
from mpp.data.decoding import decode
from mpp.data.decoding.checks import check_numbers
from mpp.data.listing import tars
from mpp.data.listing.formats import ARRAYS
from mpp.data.listing.table import as_path
from mpp.data.retry import retried
from mpp.errors import UnreadableImage, UserError, one_line
from mpp.runtime.randomness import Stream, permutation

BINARY = ("binary", "large_binary")  # image files
ENCODED = (*BINARY, "string", "large_string")  # or their names
NAMES = ["bytes", "path"]  # of an image file's cell


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
    return decode.decode(contents(cell, config.read_retries, numbers), config)


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
        raise UnreadableImage("lists of several lengths, which are no image") from None
    check_numbers(found.dtype)  # of a null among the numbers
    return found.astype(numbers, copy=False)


def encoded_bytes(cell: dict[str, Any] | None, retries: int = 0) -> bytes:
    """The image file of a cell {"bytes", "path"}.

    Raises:
        UnreadableImage: there is nothing to read.
        ReadFailed: there is, and it cannot be read now.
    """
    if not cell or (cell["bytes"] is None and not cell["path"]):
        raise UnreadableImage("no bytes: neither an image nor the name of a file")
    if cell["bytes"] is not None:
        return cell["bytes"]
    path = as_path(cell["path"])
    if tars.MEMBER.fullmatch(path):
        return retried(partial(tars.read_member, path), tars.name_of_member(path), retries)
    if "://" in path:  # whatever a file system over a network raises
        return retried(partial(fetch, path), path, retries, Exception)
    return retried(Path(path).read_bytes, path, retries)


def file_of(cell: Any) -> str | None:
    """The name of the file that a cell has: its path, or that of its shard and its name there; None: it has none."""
    path = cell.get("path") if isinstance(cell, dict) else None
    return tars.name_of_member(as_path(path)) if path else None


def fetch(url: str) -> bytes:
    """A file from wherever fsspec reads."""
    with fsspec.open(url) as file:
        return file.read()


def find_image_column(config: ImagesConfig, features: datasets.Features) -> str:
    """The column that holds the images: the named one, or the only one that can."""
    columns = ", ".join(features)
    found = [name for name, feature in features.items() if isinstance(feature, datasets.Image) or is_cell(feature)]
    found = found or [name for name, feature in features.items() if is_array(feature) or f".{name}" in ARRAYS]
    found = found or [name for name, feature in features.items() if numbers_of(feature)]
    if config.image_column is None:
        if len(found) != 1:
            raise UserError(
                f"{describe_source(config)} has {len(found)} image columns; name one by data.image_column: {columns}"
            )
        return found[0]
    if config.image_column not in features:
        raise UserError(f"data.image_column is {config.image_column}; {describe_source(config)} has {columns}")
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
