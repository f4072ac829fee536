"""Checks of an image by its header, before its values are read."""

import math
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from mpp.config import ImagesConfig
from mpp.errors import UnreadableImage

BANDS_PER_PIXEL = 4  # bands that count as one pixel of data.max_pixels


def check_size(shape: Sequence[int], config: ImagesConfig) -> None:
    """Refuse an image that is empty or larger than `data.max_pixels`.

    Args:
        shape: height, width and bands, in any order.
    """
    if len(shape) < 2:
        shape = (1, *shape, 1)
    if 0 in shape:
        raise UnreadableImage("no pixels")
    *bands, width, height = sorted(shape)
    layers = math.ceil(math.prod(bands) / BANDS_PER_PIXEL)
    if width * height * layers > config.max_pixels:
        size = " x ".join(map(str, shape))
        raise UnreadableImage(f"{size} pixels are more than data.max_pixels ({config.max_pixels})")


def check_numbers(dtype: np.dtype) -> None:
    """Refuse values that are no numbers, such as objects, which could run code."""
    if dtype.kind not in "uifb":
        raise UnreadableImage(f"{dtype} values, which are no integers or floating-point numbers")


def refuse_lossy_mask(form: str) -> NoReturn:
    """Refuse a mask that is stored in a form which may have changed its numbers."""
    raise UnreadableImage(f"it is {form}, which may change numbers; a mask must be lossless, such as PNG or TIFF")
