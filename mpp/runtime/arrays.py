"""Arrays that may be larger than memory: written by blocks, which says when a disk is full, and mapped.

numpy maps .npy, and not what is in an .npz, in which features come from anybody in one file with checksums.
"""

import math
import mmap
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_STORED

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpp.errors import UserError

IN_MEMORY = 2 * 10**9  # bytes: what takes more lies in a file
BLOCK = 2**14  # rows handled at a time
FEW_ROWS = 2**10  # rows from anywhere: the kernel maps what is around each, too
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Rows:
    """An array that is collected block by block: in memory, or in a file that is then mapped.

    The file lies in the folder of temporary files (TMPDIR). It has no name, and goes with the last array that maps it.

    Args:
        shape: of the whole array.
        in_file: whether it, or what is collected with it, is too large for memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, in_file: bool):
        self.shape, self.dtype, self.done = shape, np.dtype(dtype), 0
        new_file = tempfile.TemporaryFile  # no `with`: it is open for as long as the array is there
        self.file = new_file() if in_file else None
        self.held = np.empty(0 if in_file else shape, dtype)

    def append(self, block: NDArray) -> None:
        """Add rows. Raises UserError where the disk is full."""
        if self.file is None:
            self.held[self.done : self.done + len(block)] = block
        else:
            try:
                self.file.write(np.ascontiguousarray(block, self.dtype).data)
                self.file.flush()
            except OSError as error:
                message = f"TMPDIR is {tempfile.gettempdir()}, where what is too large for memory cannot be kept"
                raise UserError(f"{message}: {error}; choose another") from error
        self.done += len(block)

    def array(self) -> NDArray:
        """All rows."""
        return self.held if self.file is None else np.memmap(self.file, self.dtype, "r+", shape=self.shape)


def in_blocks(array: NDArray, rows: int = BLOCK) -> Iterator[NDArray]:
    """Consecutive rows, so many at a time; of a mapped array no more than these take memory."""
    for first in range(0, len(array), rows):
        yield array[first : first + rows]
        let_go(array)


def select(array: NDArray, indices: NDArray[np.int64]) -> NDArray:
    """`array[indices]`, in a file where it is large; of a mapped array no more takes memory."""
    shape = (len(indices), *array.shape[1:])
    chosen = Rows(shape, array.dtype, array[:1].nbytes * len(indices) > IN_MEMORY)
    for some in in_blocks(indices, FEW_ROWS):
        chosen.append(array[some])
        let_go(array)
    return chosen.array()


def let_go(array: NDArray) -> None:
    """Give back the memory of what was read of a mapped array; the rest of the system may still have it cached.

    The kernel would do so when memory is short, but who counts a process's memory, as batch systems do, counts it in.
    """
    mapping = getattr(array, "base", None)
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)


def map_array(path: Path, arrays: np.lib.npyio.NpzFile, name: str) -> NDArray:
    """An array of an .npz, mapped where it can be: only what is used takes memory. Its checksum is checked.

    What is compressed is read, and what is no array, or cut short, is left to numpy, which says so.

    Args:
        path: of the file.
        arrays: what numpy.load made of it.
    """
    entry = arrays.zip.NameToInfo.get(f"{name}.npy")
    if entry is None or entry.compress_type != ZIP_STORED:
        return arrays[name]
    with arrays.zip.open(entry) as member:
        read_header = HEADERS.get(np.lib.format.read_magic(member))
        shape, fortran, dtype = read_header(member) if read_header else ((), False, np.dtype(object))
        start, size = member.tell(), dtype.itemsize * math.prod(shape)
        if dtype.hasobject or size == 0 or start + size != entry.file_size:
            return arrays[name]
        while member.read(2**20):
            pass  # the checksum is compared at the end
    with path.open("rb") as file:  # a header of the entry's own, of two fields of any length, comes first
        file.seek(entry.header_offset + 26)
        start += entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")
