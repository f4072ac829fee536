"""Arrays in `.npy` and `.npz` files; no code in them is run."""

import io
import math
import zipfile

import numpy as np
from numpy.typing import NDArray

from mpp.config import ImagesConfig
from mpp.data.decoding.checks import check_numbers, check_size
from mpp.data.decoding.kinds import NPY_START
from mpp.errors import UnreadableImage

HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Readers of an array's header by the version of its format."""


def read_numpy_file(data: bytes, config: ImagesConfig) -> NDArray:
    """The array of a `.npy` file, or the only array of a `.npz` file."""
    file = io.BytesIO(data)
    if data.startswith(NPY_START):
        return read_array(file, len(data), config)
    with zipfile.ZipFile(file) as archive:
        arrays = archive.infolist()
        if len(arrays) != 1:
            raise UnreadableImage(f"{len(arrays)} arrays in one .npz; an image is one")
        with archive.open(arrays[0]) as member:
            return read_array(io.BufferedReader(member), arrays[0].file_size, config)


def read_array(file: io.BytesIO | io.BufferedReader, size: int, config: ImagesConfig) -> NDArray:
    """An array from a file of `size` bytes. Its header is checked first."""
    version = np.lib.format.read_magic(file)
    shape, _, dtype = HEADER_READERS[version](file)
    check_size(shape, config)
    check_numbers(dtype)
    if math.prod(shape) * dtype.itemsize > size - file.tell():
        raise UnreadableImage("fewer values than its header announces")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)
