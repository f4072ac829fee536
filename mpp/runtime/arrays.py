"""Arrays that may be larger than memory: large ones lie in temporary files, from which they are mapped."""

import mmap
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
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


@contextmanager
def temporary_files_explained() -> Iterator[None]:
    """Turn an error of a temporary file, such as a full disk, into a UserError that names their folder."""
    try:
        yield
    except OSError as error:
        message = f"TMPDIR is {tempfile.gettempdir()}, where what is too large for memory cannot be kept"
        raise UserError(f"{message}: {error}; choose another") from error


class Rows:
    """An array that is collected block by block: in memory, or in a file that is then mapped.

    The file lies in the folder of temporary files (TMPDIR). It has no name, and goes with the last array that maps it.

    Args:
        shape: of the whole array.
        in_file: whether it, or all that is collected with it, is too large for memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, in_file: bool):
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.row_count = 0
        self.file = None
        self.in_memory = np.empty(0 if in_file else shape, dtype)
        if in_file:
            open_file = tempfile.TemporaryFile  # without `with`: it is open for as long as the array is used
            self.file = open_file()

    def append(self, block: NDArray) -> None:
        """Add rows.

        Raises:
            UserError: the disk is full.
        """
        end = self.row_count + len(block)
        if self.file is None:
            self.in_memory[self.row_count : end] = block
        else:
            with temporary_files_explained():
                self.file.write(np.ascontiguousarray(block, self.dtype).data)
                self.file.flush()
        self.row_count = end

    def array(self) -> NDArray:
        """All rows."""
        if self.file is None:
            return self.in_memory
        return np.memmap(self.file, self.dtype, "r+", shape=self.shape)


def in_blocks(array: NDArray, rows: int = ROWS_PER_BLOCK) -> Iterator[NDArray]:
    """Consecutive rows, `rows` at a time; of a mapped array no more than these take memory."""
    for first in range(0, len(array), rows):
        yield array[first : first + rows]
        let_go(array)


def select(array: NDArray, indices: NDArray[np.int64]) -> NDArray:
    """`array[indices]`, in a file where it is large; of a mapped array only a block takes memory."""
    shape = (len(indices), *array.shape[1:])
    size = array[:1].nbytes * len(indices)
    chosen = Rows(shape, array.dtype, in_file=size > IN_MEMORY)
    for block in in_blocks(indices, CHOSEN_ROWS_PER_BLOCK):
        chosen.append(array[block])
        let_go(array)
    return chosen.array()


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


def load_member(arrays: NpzFile, name: str) -> NDArray:
    """An array of an .npz file: in memory, or, where it is large, mapped from a temporary copy.

    numpy maps only .npy files. Checksums are compared either way, and no pickled object is loaded.
    """
    member = arrays.zip.getinfo(f"{name}.npy")
    if member.file_size <= IN_MEMORY:
        return arrays[name]
    with temporary_files_explained(), tempfile.TemporaryDirectory() as folder:
        copy = Path(arrays.zip.extract(member, folder))
        return np.load(copy, mmap_mode="r", allow_pickle=False)  # it can be read when its name is gone
