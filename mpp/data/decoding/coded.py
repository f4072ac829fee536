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
MOST_OF_12_BITS = 4095


def read_jpegxl(data: bytes, config: ImagesConfig) -> Stored:
    """The first frame of a JPEG XL file, which libjxl turns upright; its last band may be opacity.

    imagecodecs does not say how many bits its values have.
    """
    from imagecodecs import jpegxl_decode  # takes a fifth of a second

    values = jpegxl_decode(data, index=0, numthreads=1)
    if values.dtype == np.uint16 and values.max() <= MOST_OF_12_BITS and not config.range:
        raise UnreadableImage("JPEG XL of perhaps 10 or 12 bits; data.range says which, such as [0, 1023]")
    return to_stored(values, None, config, values.shape[2:] in ((2,), (4,)))


def read_jpeg2000(data: bytes, config: ImagesConfig) -> Stored:
    """The bands of a JPEG 2000 file. None is taken for opacity, which `data.bands` can leave out."""
    from imagecodecs import jpeg2k_decode

    start = data.index(CODESTREAM_START)
    right, lower, left, upper, bands, bits = struct.unpack_from(">4I16xHB", data, start + 8)
    check_size((lower - upper, right - left, bands), config)
    values = jpeg2k_decode(data)
    has_palette = len(bands_to_front(values)) != bands
    limits = None if has_palette else limits_of_bits((bits & 0x7F) + 1, values.dtype.kind == "i")
    return to_stored(values, limits, config)


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
        bands = lay_on_white(bands, np.iinfo(values.dtype).max)
    return Stored(bands, limits)
