"""Decoded values (H, W) or (H, W, bands) of HEIC, AVIF, JPEG XL and JPEG 2000, as pictures or bands."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mpp.config import ImagesConfig
from mpp.data.decoding.channels import bands_to_front, lay_on_white
from mpp.data.decoding.pictures import stored_pixels
from mpp.data.decoding.wanted import StoredPixels, Wanted


def to_stored(
    values: NDArray, bits: int, wanted: Wanted, config: ImagesConfig, opacity: bool = False, premultiplied: bool = False
) -> StoredPixels:
    """Upright values as pixels with their limits. Pictures of 8 bits are converted as PNG is, bit by bit.

    Args:
        values: (H, W) or (H, W, bands), integers or floating-point numbers.
        bits: that integers use: 10 of 16, say.
        opacity: whether the last band is opacity.
        premultiplied: whether the other bands are multiplied by it already.
    """
    bands = 1 if values.ndim == 2 else values.shape[2]
    is_picture = wanted is Wanted.PICTURE and values.dtype == np.uint8 and bits == 8 and not premultiplied
    if is_picture and (bands in (1, 3) or opacity):
        return StoredPixels(
            stored_pixels(Image.fromarray(values[..., 0] if values.shape[2:] == (1,) else values), config)
        )
    pixels = bands_to_front(values)
    most = 2**bits - 1
    if opacity and wanted is Wanted.PICTURE:
        pixels = lay_on_white(pixels, premultiplied=premultiplied, most=most)
    type_bits = 8 * values.dtype.itemsize
    has_limits = values.dtype.kind == "u" and bits < type_bits <= 16
    return StoredPixels(pixels, limits=(0, most) if has_limits else None)
