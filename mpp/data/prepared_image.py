"""An image file that is no larger than training needs, for the shards of `mpp prepare`."""

import contextlib
import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional

from mpp.config import PrepareConfig
from mpp.data.decoding.decode import read_values
from mpp.data.decoding.kinds import optional_format
from mpp.data.decoding.metadata import without_metadata
from mpp.data.decoding.optional import DICOM
from mpp.data.decoding.pictures import to_ppm
from mpp.data.decoding.tiff import has_fewer_bits, white_is_zero
from mpp.errors import UnreadableImage, UserError


def prepare_image(image: bytes | NDArray, config: PrepareConfig, name: str | None = None) -> bytes:
    """An image file that is shrunk to `config.short_side`, where it is larger. It has no metadata, such as EXIF.

    Raises:
        UnreadableImage: it cannot be decoded.
        UserError: the format cannot hold it.
    """
    values = np.ascontiguousarray(read_values(image, config.data))  # an upright view may run backwards
    is_small = min(values.shape[1:]) <= config.short_side
    if is_small and config.format == "jpeg" and may_stay(image, values, config):
        return pixels_alone(image, values, config)
    if config.format != "npy" and values.dtype != np.uint8:
        image_name = name or "an image"
        allowed = f"npy for {image_name}, which has {values.dtype} values"
        raise UserError(f"format is {config.format}, which holds 8 bits; it must be {allowed}")
    if not is_small:
        values = shrink(values, config.short_side)
    if config.format == "ppm":
        return to_ppm(torch.from_numpy(values))
    if config.format == "npy":
        return to_npy(values)
    return to_jpeg(values, config.quality)


def may_stay(image: bytes | NDArray, values: NDArray, config: PrepareConfig) -> bool:
    """Whether an image that is not shrunk shows the same as one that is, and so may stay the file that it is."""
    reads_all = config.data.bands is None and config.data.nodata is None
    if not reads_all or not isinstance(image, bytes) or white_is_zero(image):
        return False
    form = optional_format(image)
    if values.dtype == np.uint8:
        return form is not DICOM
    return not form and not has_fewer_bits(image)  # their values use some bits of a type, which arrays do not say


def pixels_alone(image: bytes, values: NDArray, config: PrepareConfig) -> bytes:
    """An image file with nothing but its pixels, which are `values`; if it can, the same bytes."""
    stripped = without_metadata(image, config.data)
    if stripped == image:
        return image
    with contextlib.suppress(UnreadableImage):
        if stripped and np.array_equal(read_values(stripped, config.data), values, equal_nan=values.dtype.kind == "f"):
            return stripped  # else the metadata changed the pixels, such as an orientation
    return to_lossless(values)


def to_lossless(values: NDArray) -> bytes:
    """A file of values (C, H, W) that loses nothing of them: PNG of 8 bits, and numpy's of all others."""
    if values.dtype != np.uint8:
        return to_npy(values)
    buffer = io.BytesIO()
    to_pil(values).save(buffer, "PNG")
    return buffer.getvalue()


def to_pil(values: NDArray) -> Image.Image:
    """Values (C, H, W) of 8 bits as PIL's image."""
    return Image.fromarray(values[0] if len(values) == 1 else values.transpose(1, 2, 0))


def shrink(values: NDArray, side: int) -> NDArray:
    """Values (C, H, W) of any type, resized until their shorter side is `side`; of the same type."""
    exact = values if values.dtype == np.uint8 else values.astype(np.float64)
    resized = functional.resize(torch.from_numpy(exact), [side], antialias=True).numpy()
    if values.dtype.kind != "f":
        resized = np.rint(resized)
    return resized.astype(values.dtype)


def to_npy(values: NDArray) -> bytes:
    """A file of numpy's with the array (H, W, C)."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(values.transpose(1, 2, 0)))
    return buffer.getvalue()


def to_jpeg(values: NDArray, quality: int) -> bytes:
    """A JPEG file of values (C, H, W) of 8 bits; raises UnreadableImage where it is longer than JPEG allows."""
    buffer = io.BytesIO()
    try:
        to_pil(values).save(buffer, "JPEG", quality=quality)
    except OSError as error:  # over 65,500 pixels long
        height, width = values.shape[1:]
        raise UnreadableImage(f"JPEG does not hold {width} x {height} pixels; --format ppm or npy does") from error
    return buffer.getvalue()
