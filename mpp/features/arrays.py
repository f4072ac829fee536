"""Arrays that may be larger than memory: large ones lie in temporary files, from which they are mapped."""

import math
import mmap
import os
import tempfile
import zlib
from collections.abc import Iterator
from zipfile import BadZipFile

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpp.errors import UserError

IN_MEMORY = 2 * 10**9
"""Bytes that an array may take in memory; a larger one lies in a file."""
ROWS_PER_BLOCK = 2**14
"""Consecutive rows that are handled at a time."""
CHOSEN_ROWS_PER_BLOCK = 2**10
"""Scattered rows that are handled at a time: the kernel maps the pages around each, too."""
NPZ_ERRORS = (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error)
"""Errors of numpy for an .npz file that was cut off, is damaged, or is another kind of file."""


def empty_array(shape: tuple[int, ...], dtype: DTypeLike, in_file: bool) -> NDArray:
    """An array to be filled: in memory, or mapped from a file.

    The file lies in the folder of temporary files (TMPDIR). It has no name, and goes with the last array that maps it.

    Args:
        in_file: whether it, or all that is collected with it, is too large for memory.
    Raises:
        UserError: the disk has no room for it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not in_file or size == 0:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        try:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            problem = f"where {size / 1e9:.3g} GB cannot be kept ({error})"
            raise UserError(f"TMPDIR is {tempfile.gettempdir()}, {problem}; choose another") from error
        return np.memmap(file, dtype, "r+", shape=shape)  # it is open for as long as the array is used


def in_blocks(array: NDArray, rows: int = ROWS_PER_BLOCK) -> Iterator[NDArray]:
    """Consecutive rows, `rows` at a time; of a mapped array no more than these take memory."""
    for first in range(0, len(array), rows):
        yield array[first : first + rows]
        let_go(array)


def select(array: NDArray, indices: NDArray[np.int64]) -> NDArray:
    """`array[indices]`, in a file where it is large; of a mapped array only a block takes memory."""
    shape = (len(indices), *array.shape[1:])
    chosen = empty_array(shape, array.dtype, in_file=array[:1].nbytes * len(indices) > IN_MEMORY)
    for first in range(0, len(indices), CHOSEN_ROWS_PER_BLOCK):
        rows = slice(first, first + CHOSEN_ROWS_PER_BLOCK)
        chosen[rows] = array[indices[rows]]
        let_go(array)
        let_go(chosen)
    return chosen


def evenly_spaced(length: int, count: int) -> NDArray[np.int64]:
    """So many indices of a sequence, evenly spaced from the first to the last; all where there are no more."""
    return np.linspace(0, length - 1, min(count, length)).astype(int)


def let_go(array: NDArray) -> None:
    """Free the memory of the parts read from a mapped array; the system may still have them cached.

    The kernel would do so when memory is short, but batch systems count it as memory of the process.
    """
    mapping = getattr(array, "base", None)
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)
