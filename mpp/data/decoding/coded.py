"""JPEG XL and JPEG 2000 by imagecodecs (libjxl and OpenJPEG), in their own files or as bare codestreams."""

import struct

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mpp.config import ImagesConfig
from mpp.data.decoding.channels import (
    Limits,
    Stored,
    bands_to_front,
    check_size,
    is_picture,
    lay_on_white,
    limits_of_bits,
)
from mpp.data.decoding.pictures import stored_pixels
from mpp.errors import UnreadableImage

CODESTREAM_START = b"\xff\x4f\xff\x51"  # of JPEG 2000
JPEG_XL_START = b"\xff\x0a"
BITS_OF_SIDES = (9, 13, 18, 30)
PROPORTIONS = ((0, 1), (1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # width, height
MOST_OF_12_BITS = 4095


def read_jpegxl(data: bytes, config: ImagesConfig) -> Stored:
    """The first frame of a JPEG XL file, which libjxl turns upright; its last band may be opacity.

    imagecodecs does not say how many bits its values have.
    """
    from imagecodecs import jpegxl_decode  # takes a fifth of a second

    sides = jpegxl_sides(data)
    check_size(sides, config)
    values = jpegxl_decode(data, index=0, numthreads=1)
    if values.ndim == 3 and {*values.shape[:2]} != {*sides}:  # grey, and bands of another kind
        values = values.transpose(1, 2, 0)
    has_opacity = values.shape[2:] in ((2,), (4,))
    needs_bits = not config.range or (has_opacity and is_picture(config))
    if needs_bits and values.dtype == np.uint16 and values.max() <= MOST_OF_12_BITS:
        rule = "data.range says which, such as [0, 1023], and data.bands leaves opacity out"
        raise UnreadableImage(f"JPEG XL of perhaps 10 or 12 bits; {rule}")
    return to_stored(values, None, config, has_opacity)


def jpegxl_sides(data: bytes) -> tuple[int, int]:
    """Height and width by the header, whose bits are read from the lowest on."""
    start = data.index(JPEG_XL_START, max(0, data.find(b"jxlc"), data.find(b"jxlp")))
    bits = int.from_bytes(data[start + 2 : start + 14], "little")

    def take(count: int) -> int:
        nonlocal bits
        value = bits % 2**count
        bits >>= count
        return value

    is_small = take(1)

    def side() -> int:
        return 8 * take(5) + 8 if is_small else take(BITS_OF_SIDES[take(2)]) + 1

    height = side()
    parts, of_parts = PROPORTIONS[take(3)]
    return height, height * parts // of_parts or side()


def read_jpeg2000(data: bytes, config: ImagesConfig) -> Stored:
    """The bands of a JPEG 2000 file. None is taken for opacity, which `data.bands` can leave out."""
    from imagecodecs import jpeg2k_decode

    sides, bits = jpeg2000_header(data)
    check_size(sides, config)
    values = jpeg2k_decode(data)
    has_palette = len(bands_to_front(values)) != sides[2]
    limits = None if has_palette else limits_of_bits(bits, values.dtype.kind == "i")
    return to_stored(values, limits, config)


def jpeg2000_header(data: bytes) -> tuple[tuple[int, int, int], int]:
    """Height, width and bands of a codestream, and the bits of a value."""
    start = data.index(CODESTREAM_START, max(0, data.find(b"jp2c")))
    right, lower, left, upper, bands, bits = struct.unpack_from(">4I16xHB", data, start + 8)
    return (lower - upper, right - left, bands), (bits & 0x7F) + 1


def to_stored(values: NDArray, limits: Limits | None, config: ImagesConfig, has_opacity: bool = False) -> Stored:
    """Values (H, W) or (H, W, bands). Pictures of 8 bits are converted as PNG is, bit by bit.

    Args:
        limits: the smallest and the largest value. None: those of the type.
        has_opacity: whether the last band is opacity.
    """
    check_size(values.shape, config)
    bands = bands_to_front(values)
    if not is_picture(config):
        return Stored(bands, limits)
    is_plain = values.dtype == np.uint8 and limits in (None, (0, 255))
    if is_plain and (has_opacity or len(bands) in (1, 3)):
        return Stored(stored_pixels(Image.fromarray(values.squeeze()), config))
    if has_opacity:
        _, most = limits_of_bits(8 * values.dtype.itemsize)
        bands = lay_on_white(bands, most)
    return Stored(bands, limits)
