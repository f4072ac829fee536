"""Columns of images: which column of a dataset holds them, and how the image of a cell is read."""

import os
from functools import partial
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from mpp.config import ImagesConfig
from mpp.data.data_path import describe_source, is_url
from mpp.data.decoding.arrays import check_numbers
from mpp.data.retry import read_with_retries
from mpp.data.tars import member_name, read_member, shard_of
from mpp.errors import ReadFailed, UnreadableImage, UserError, one_line

BINARY_TYPES = ("binary", "large_binary")
"""Types of a column that may hold image files."""
ENCODED_TYPES = (*BINARY_TYPES, "string", "large_string")
"""Types of a column that may hold image files, or their names."""


def read_cell(cell: Any, retries: int, array_dtype: str | None = None) -> bytes | NDArray:
    """The image file of a cell {"bytes", "path"}, or its array.

    Args:
        array_dtype: type that an array's numbers get; None: they keep theirs.
    Raises:
        UnreadableImage: there is no image in the cell.
        ReadFailed: the image file cannot be read now.
    """
    if cell is None or isinstance(cell, dict):
        if not cell or (cell["bytes"] is None and not cell["path"]):
            raise UnreadableImage("no bytes: neither an image nor a file name")
        if cell["bytes"] is not None:
            return cell["bytes"]
        return read_with_retries(partial(read_file, cell["path"]), member_name(cell["path"]), retries)
    try:
        array = np.asarray(cell)
    except ValueError:
        raise UnreadableImage("lists of several lengths, which are not an image") from None
    check_numbers(array.dtype)  # a null among the numbers makes them objects
    return array if array_dtype is None else array.astype(array_dtype, copy=False)


def read_file(path: str) -> bytes:
    """A file of this machine or of a shard there, or at a URL that fsspec knows. See `read_cell`.

    A file that is missing where there are others is an unreadable image; where its folder is empty or gone, its disk is
    away, which may be over soon.
    """
    if not (os.path.isabs(path) or is_url(path)):
        way = "give a table of relative paths as data.labels, and their folder as data.path"
        raise UnreadableImage(f"{path} is a relative path; {way}")
    shard = shard_of(path)
    try:
        if shard != path:
            return read_member(path)
        if is_url(path):
            return read_url(path)
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_url(shard) or has_entries(os.path.dirname(os.path.realpath(shard))):
            raise UnreadableImage(f"missing: {one_line(error)}") from error
        raise


def read_url(url: str) -> bytes:
    """A file at a URL. Clients of stores raise errors of any type, which become OSError: they may be over soon."""
    try:
        with fsspec.open(url) as file:
            return file.read()
    except OSError:
        raise
    except (ImportError, ValueError) as error:  # fsspec does not know the protocol, or lacks a package for it
        raise ReadFailed(f"{url} cannot be read: {one_line(error)}") from error
    except Exception as error:
        raise OSError(one_line(error)) from error


def has_entries(folder: str) -> bool:
    """Whether a folder is there and has something in it: the place of a disk that is away may be empty."""
    try:
        with os.scandir(folder) as entries:
            return any(entries)
    except OSError:
        return False


def cell_file_name(cell: Any) -> str | None:
    """Name of a cell's file: its path, or its shard's path and its name there. None: the cell has no file."""
    path = cell.get("path") if isinstance(cell, dict) else None
    return member_name(path) if path else None


def file_names(rows: datasets.Dataset, column: str, positions: NDArray[np.int64]) -> list[str | None]:
    """Names of the files of some rows' images: see `cell_file_name`. No file is read."""
    if not is_cell(rows.features[column]):
        return [None] * len(positions)
    if rows._indices is not None:  # the library's own selection of rows
        positions = rows._indices.column(0).to_numpy()[positions]
    paths = pc.struct_field(rows.data.column(column), "path").take(positions).to_pylist()
    return [member_name(path) if path else None for path in paths]


def common_folder(first: str, last: str) -> int:
    """Length of the path of the folder that all file names share, of which these are the first and the last."""
    return os.path.commonprefix([first, last]).rfind("/") + 1  # noqa: RUF071  characters, up to a folder's end


def find_image_column(config: ImagesConfig, features: datasets.Features) -> str:
    """The column that holds the images: `data.image_column`, or else the only one of image files, or of arrays.

    Raises:
        UserError: it is not there or holds no images, or there are none, or several.
    """
    named = config.image_column
    files = [name for name, feature in features.items() if is_cell(feature)]
    found = files or [name for name, feature in features.items() if find_array_dtype(feature)]
    if named is not None:
        feature = features.get(named)
        found = [named] if is_encoded(feature) or find_array_dtype(feature) else []
    if len(found) != 1:
        problem = f"{config.group_name}.image_column is {named or 'null'}; it must name a column of images"
        raise UserError(f"{problem}: {describe_source(config)} has {', '.join(found or features)}")
    return found[0]


def is_encoded(feature: Any) -> bool:
    """Whether a column holds image files, or their names."""
    return is_cell(feature) or getattr(feature, "dtype", None) in ENCODED_TYPES


def is_cell(feature: Any) -> bool:
    """Whether a column holds cells {"bytes", "path"}: of the library's type, or of tools that do not know it."""
    is_untyped_cell = isinstance(feature, dict) and {*feature} == {"bytes", "path"}
    return is_untyped_cell or isinstance(feature, datasets.Image)


def is_array(feature: Any) -> bool:
    """Whether a column's type is one of the library's arrays with the axes of an image."""
    return isinstance(feature, datasets.Array2D | datasets.Array3D)


def can_hold_images(feature: Any) -> bool:
    """Whether a column may hold image files or arrays."""
    is_binary = getattr(feature, "dtype", None) in BINARY_TYPES
    return is_binary or is_cell(feature) or find_array_dtype(feature) is not None


def find_array_dtype(feature: Any) -> str | None:
    """Type of the numbers in a column of arrays: Array2D, Array3D, or lists of lists. None: it holds no arrays."""
    depth = 0
    while hasattr(feature, "feature"):
        feature = feature.feature
        depth += 1
    is_number = isinstance(feature, datasets.Value) and feature.dtype.startswith(("int", "uint", "float"))
    return feature.dtype if is_array(feature) or (is_number and depth > 1) else None


def without_decoding(rows: Any, column: str) -> Any:
    """The rows, indexed or a stream, with `column` as image files that the library does not decode, or as arrays."""
    feature = rows.features[column]
    if is_encoded(feature):
        return rows.cast_column(column, datasets.Image(decode=False))
    if not is_array(feature) or isinstance(rows, datasets.IterableDataset):
        return rows
    if rows.data.column(column).null_count:
        return rows  # as lists, which are slower to read
    return rows.with_format("numpy", [column], output_all_columns=True, dtype=feature.dtype)
