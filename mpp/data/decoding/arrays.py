"""Arrays, and those in `.npy` and `.npz` files, as bands; no code in them is run."""

import io
import zipfile

import numpy as np
from numpy.typing import NDArray

from mpp.config import ImagesConfig
from mpp.data.decoding.channels import Stored, bands_to_front, check_size
from mpp.data.decoding.formats import NPY
from mpp.errors import UnreadableImage

HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Readers of an array's header by the version of its format."""


def read_array(array: NDArray, config: ImagesConfig) -> Stored:
    """An array (H, W), (H, W, bands) or (bands, H, W) as (bands, H, W).

    Bands are the first or the last side: the one that has as many as are asked for, or that is left by a square, or the
    shorter one; the last where both do.
    """
    check_numbers(array.dtype)
    if array.ndim not in (2, 3):
        raise UnreadableImage(f"an array of shape {array.shape}, not an image (H, W, bands) or (bands, H, W)")
    check_size(array.shape, config)
    if array.ndim == 2:
        return Stored(array[None])
    first, middle, last = array.shape
    expected = None if config.bands else config.channels
    last_is_left = first == middle or (middle != last and last <= first)
    are_last = last == expected or (first != expected and last_is_left)
    return Stored(bands_to_front(array) if are_last else array)


def read_array_file(data: bytes, config: ImagesConfig) -> Stored:
    """The array of a `.npy` file, or the only array of a `.npz` file. Its header is checked first."""
    file = io.BytesIO(data)
    if not NPY.begins(data):
        archive = zipfile.ZipFile(file)
        names = archive.namelist()
        if len(names) != 1:
            raise UnreadableImage(f"{len(names)} arrays in one .npz; an image is one")
        file = archive.open(names[0])
    shape, _, dtype = HEADER_READERS[np.lib.format.read_magic(file)](file)
    check_size(shape, config)
    check_numbers(dtype)
    file.seek(0)
    return read_array(np.lib.format.read_array(file, allow_pickle=False), config)


def check_numbers(dtype: np.dtype) -> None:
    """Refuse values that are no numbers, such as objects, which could run code."""
    if dtype.kind not in "uifb":
        raise UnreadableImage(f"{dtype} values, which are no integers or floating-point numbers")
