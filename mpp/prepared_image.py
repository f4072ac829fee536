"""An image file that is no larger than training needs, for the shards of `mpp prepare`: pixels alone, no metadata."""

import io
import re

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional

from mpp.config import PrepareConfig
from mpp.data.decoding.decode import read_values
from mpp.data.decoding.formats import JPEG
from mpp.errors import UnreadableImage, UserError

NOTES_OF_JPEG = re.compile(rb"\xff([\xe1-\xed\xef\xfe]|\xe0(?!\0\x10JFIF\0)|\xee(?!\0\x0eAdobe)|\xd9.)", re.DOTALL)
"""Segments of applications but for the numbers of JFIF and Adobe, comments, and what follows the end."""


def prepare_image(image: bytes | NDArray, config: PrepareConfig, name: str | None = None) -> bytes:
    """An image file that is shrunk to `config.short_side`, where it is larger. It has no metadata, such as EXIF.

    Raises:
        UnreadableImage: it cannot be decoded.
        UserError: the format cannot hold it.
    """
    values = np.ascontiguousarray(read_values(image, config.data))  # an upright view may run backwards
    if config.format != "npy" and values.dtype != np.uint8:
        allowed = f"npy for {name or 'an image'}, which has {values.dtype} values"
        raise UserError(f"format is {config.format}, which holds 8 bits; it must be {allowed}")
    if min(values.shape[1:]) > config.short_side:
        return encode(shrink(values, config.short_side), config.format, config.quality)
    if config.format != "jpeg":
        return encode(values, config.format)
    has_pixels_of_file = config.data.bands is None and config.data.nodata is None
    if has_pixels_of_file and isinstance(image, bytes) and JPEG.begins(image) and not NOTES_OF_JPEG.search(image):
        return image
    return encode(values, "png")


def shrink(values: NDArray, side: int) -> NDArray:
    """Values (C, H, W) of any type, resized until their shorter side is `side`; of the same type."""
    exact = values if values.dtype == np.uint8 else values.astype(np.float64)
    resized = functional.resize(torch.from_numpy(exact), [side], antialias=True).numpy()
    if values.dtype.kind != "f":
        resized = np.rint(resized)
    return resized.astype(values.dtype)


def encode(values: NDArray, form: str, quality: int = 0) -> bytes:
    """A file of values (C, H, W): an array (H, W, C) of numpy's, or of 8 bits in a format of PIL's.

    Raises:
        UnreadableImage: it is longer than the format allows.
    """
    buffer = io.BytesIO()
    pixels = np.ascontiguousarray(values.transpose(1, 2, 0))
    if form == "npy":
        np.save(buffer, pixels)
        return buffer.getvalue()
    try:
        Image.fromarray(pixels[..., 0] if len(values) == 1 else pixels).save(buffer, form, quality=quality)
    except OSError as error:  # JPEG is at most 65,500 pixels long
        height, width = values.shape[1:]
        raise UnreadableImage(f"{form} does not hold {width} x {height} pixels; --format ppm or npy does") from error
    return buffer.getvalue()
