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

JPEG_MARKER = re.compile(rb"\xff+([^\0\xff])")
SCAN_END = re.compile(rb"\xff+[^\0\xff\xd0-\xd7]")
"""The first marker behind the coded values of a JPEG, among which markers of restarts stand."""
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
CODING_MARKERS = {*range(0xC0, 0xD0), *range(0xDA, 0xDE)} - {0xC8}
"""Of frames, tables and scans of JPEG."""
NOTE_MARKERS = {*range(0xE0, 0xF0), 0xFE}
"""Of segments of applications, and of comments."""


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
    if isinstance(image, bytes) and JPEG.begins(image):
        stripped = jpeg_segments(image)
        # EXIF may have turned it, and settings may have chosen or filled values.
        if stripped and (stripped == image or np.array_equal(read_values(stripped, config.data), values)):
            return stripped
    return encode(values, "png")


def jpeg_segments(data: bytes) -> bytes | None:
    """A JPEG up to its first end, without notes but the numbers of JFIF and Adobe; None: its parts are not known."""
    kept = [data[:2]]
    position = 2
    while found := JPEG_MARKER.match(data, position):
        marker = found[1][0]
        if marker == END_OF_IMAGE:
            return b"".join(kept) + bytes([0xFF, END_OF_IMAGE])
        start = found.end()
        position = start + int.from_bytes(data[start : start + 2], "big")
        content = data[start + 2 : position]
        if marker in NOTE_MARKERS:
            says_colours = content.startswith((b"JFIF\0", b"Adobe"))  # by numbers, before a preview
            content = content[:12] + bytes(2) if says_colours else b""
        elif marker not in CODING_MARKERS:
            return None
        if content or marker in CODING_MARKERS:
            kept += [bytes([0xFF, marker]), (len(content) + 2).to_bytes(2, "big"), content]
        if marker == START_OF_SCAN:
            scan_end = SCAN_END.search(data, position)
            if scan_end is None:
                return None
            kept.append(data[position : scan_end.start()])
            position = scan_end.start()
    return None


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
