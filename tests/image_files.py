"""Image files and tar shards that tests write, in formats beyond those of `encoded`, and their decoding."""

import io
import os
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile
from conftest import refused
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.data.decoding.decode import decode
from mpp.errors import UnreadableImage

JFIF_END = 20
"""Bytes of the first marker and the first segment of PIL's JPEGs."""
PNG_HEADER, PNG_END = 33, 12
"""Bytes of the header and of the last chunk of a PNG."""


def decode_with(image: bytes | np.ndarray, **settings) -> Tensor:
    """An image as pixels (C, H, W); `settings` are those of `data`."""
    return decode(image, ImagesConfig(**settings))


def unreadable(words: str | None = None):
    """An image is refused with these words."""
    return refused(words, UnreadableImage)


def tiff(pixels: np.ndarray | Iterator[bytes], **options) -> bytes:
    """A TIFF of pixels, or of encoded strips; options of `tifffile.imwrite`."""
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, **options)
    return file.getvalue()


def packed_tiff(pixels: np.ndarray, bits: int, **options) -> bytes:
    """A TIFF of numbers of so many bits, without gaps in a row; not every imagecodecs can pack them.

    Args:
        pixels: of an unsigned type that holds the numbers; their first dimension is the rows.
        options: see `tiff`.
    """
    about = {"shape": pixels.shape, "dtype": pixels.dtype, "bitspersample": bits, "rowsperstrip": len(pixels)}
    return tiff(iter([packed_rows(pixels, bits).tobytes()]), **about, **options)


def packed_rows(pixels: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of each row, bit by bit."""
    numbers = pixels.astype(">u2").reshape(len(pixels), -1, 1)
    digits = np.unpackbits(numbers.view(np.uint8), axis=2)[..., -bits:]
    return np.packbits(digits.reshape(len(pixels), -1), axis=1)


def j2k(pixels: np.ndarray) -> bytes:
    """A bare codestream of JPEG 2000 without losses."""
    return imagecodecs.jpeg2k_encode(pixels, codecformat="j2k", reversible=True)


def segment(marker: int, payload: bytes) -> bytes:
    """A segment of a JPEG file."""
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def exif(orientation: int, order: str = "<") -> bytes:
    """EXIF's TIFF structure with one tag."""
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + struct.pack(order + "IHHHIHHI", 8, 1, 0x112, 3, 1, orientation, 0, 0)


def with_chunk(png: bytes, kind: bytes, payload: bytes, place: int = PNG_HEADER) -> bytes:
    """A PNG file with one more chunk."""
    checked = kind + payload
    return (
        png[:place] + struct.pack(">I", len(payload)) + checked + struct.pack(">I", zlib.crc32(checked)) + png[place:]
    )


def npy(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, pixels)
    return file.getvalue()


def npz(*arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, *arrays)
    return file.getvalue()


def tar(members: Iterable[tuple[str, bytes]]) -> bytes:
    """A tar file of members (name, content)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as shard:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write_tar(file: Path | str, members: Iterable[tuple[str, bytes]]) -> None:
    """Write a tar file, and the folders that it is in."""
    os.makedirs(os.path.dirname(file), exist_ok=True)
    Path(file).write_bytes(tar(members))
