"""Image files and arrays to pixels: uint8 where they have 8 bits, else float32 from 0 to 255, (C, H, W) throughout.

Pictures are files that PIL shows in 8 bits, converted to RGB or grey; colour profiles (ICC) are ignored. All else has
bands: TIFF by tifffile, DICOM by pydicom, `.npy` and `.npz` by numpy, PNG, JPEG XL and JPEG 2000 of more than 8 bits by
imagecodecs, and everything where `data.bands` or another `data.channels` asks for bands. Their values become [0, 255]
by `data.range`.
"""

import contextlib
import lzma
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import UnidentifiedImageError
from torch import Tensor

from mpp.config import WINDOW, ImagesConfig
from mpp.data.decoding.arrays import read_array, read_array_file
from mpp.data.decoding.channels import Stored, limits_of, select_channels, to_pixels
from mpp.data.decoding.coded import read_jpeg2000, read_jpegxl
from mpp.data.decoding.dicom import read_dicom
from mpp.data.decoding.formats import ARRAY, DICOM, JPEG, NPY, NPZ, PPM, RARE_JPEGS, Format, format_of, what_is
from mpp.data.decoding.pictures import read_pil_mask, read_ppm, read_with_pil
from mpp.data.decoding.tiff import read_tiff, read_tiff_mask
from mpp.errors import UnreadableImage, one_line

Reader = Callable[[Any, ImagesConfig], Stored]
READERS: dict[str, Reader] = {
    **{"DICOM": read_dicom, "TIFF": read_tiff, "PPM": read_ppm, "JPEG XL": read_jpegxl, "JPEG 2000": read_jpeg2000},
    **{".npy": read_array_file, ".npz": read_array_file, "array": read_array},
    **dict.fromkeys(("JPEG", "PNG", "WebP", "GIF", "BMP", "AVIF", "HEIC"), read_with_pil),
}
"""Name of a format -> its reader."""
MASK_READERS: dict[str, Reader] = {
    **{"TIFF": read_tiff_mask, ".npy": read_array_file, ".npz": read_array_file, "array": read_array},
    **dict.fromkeys(("PNG", "GIF", "BMP", "PPM"), read_pil_mask),
}
"""The same, of formats that keep numbers."""
DECODER_ERRORS = (
    *(OSError, SyntaxError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, MemoryError),
    *(AttributeError, AssertionError, StopIteration, EOFError),
    *(struct.error, zlib.error, lzma.LZMAError, tokenize.TokenError, zipfile.BadZipFile),
)
"""Errors that decoders raised on files that were broken on purpose."""
TOO_DARK = 8
"""Least ratio of white to the largest value of images that are of another depth."""
PLACE_IN_TORCHVISION = re.compile(r"^\w+, \S+\.cpp:\d+, ")


def decode(image: bytes | NDArray, config: ImagesConfig) -> Tensor:
    """An image file, or an array, as pixels.

    The first frame of a picture, upright: greyscale, palette, CMYK and YCbCr are converted, transparency is laid on
    white unless nothing is opaque, the EXIF orientation is applied. See `ImagesConfig` for all else.

    Args:
        image: a file of one of the formats of `mpp.data.decoding.formats`; or an array (H, W), (H, W, bands) or
            (bands, H, W).
    Returns:
        (C, H, W), uint8 or float32 in [0, 255].
    Raises:
        UnreadableImage: with the reason.
    """
    with errors_named(image) as form:
        if config.range == WINDOW and form is not DICOM:
            raise UnreadableImage("no DICOM file, which data.range window asks for")
        stored = READERS[form.name](image, config)
    return to_pixels(stored, config)


def other_depth(image: bytes | NDArray, config: ImagesConfig) -> tuple[float, float] | None:
    """The largest value of an image and the one that becomes white, where they are of two depths; None: of one.

    Fewer bits than those of the range are all but black, more are mostly white. Values of more than 8 bits may be
    fewer than those that their type holds.

    Raises:
        UnreadableImage: as `decode`.
    """
    with errors_named(image) as form:
        stored = READERS[form.name](image, config)
    values = select_channels(stored, config)
    white = max(high for _, high in limits_of(stored, config))
    most, margin = (255, 1) if values.dtype == np.uint8 else (float(values.max()), TOO_DARK)
    return (most, white) if most * margin < white or np.median(values) > 2 * white else None


def read_values(image: bytes | NDArray, config: ImagesConfig) -> NDArray:
    """The channels (C, H, W) of an image as `decode` has them, but with the values and the type of the file.

    Raises:
        UnreadableImage: also for fractions that run from white to black, of which no type says how to invert them.
    """
    with errors_named(image) as form:
        stored = READERS[form.name](image, config)
    values = select_channels(stored, config)
    if not stored.is_inverted:
        return values
    if values.dtype.kind == "f":
        raise UnreadableImage("fractions, of which 0 is white; convert them")
    return ~values


def read_mask(image: bytes | NDArray, config: ImagesConfig) -> NDArray:
    """The whole numbers of a mask (H, W), or the indices of its palette; turned only by its own file's orientation.

    Raises:
        UnreadableImage: it has colours, fractions or several bands, was compressed with losses, or cannot be decoded.
    """
    as_stored = ImagesConfig(channels=1, bands=(1,), max_pixels=config.max_pixels)
    with errors_named(image) as form:
        if form.name not in MASK_READERS:
            raise UnreadableImage(f"{form}; a mask must be PNG, TIFF or .npy, which keep its numbers")
        values = MASK_READERS[form.name](image, as_stored).values
    if len(values) > 1 or values.dtype.kind not in "uib":
        raise UnreadableImage(f"a {len(values)}-band image of {values.dtype}; a mask has one whole number a pixel")
    return values[0]


@contextlib.contextmanager
def errors_named(image: bytes | NDArray) -> Iterator[Format]:
    """The format of an image, whose decoder's errors become UnreadableImage with their cause."""
    form = ARRAY if isinstance(image, np.ndarray) else format_of(image)
    if form is None:
        kind = what_is(image)
        raise UnreadableImage(f"{kind} instead of an image" if kind else "no image file of a known sort")
    try:
        yield form
    except UnreadableImage:
        raise
    except ImportError as error:
        package = form.package or "imagecodecs"
        raise UnreadableImage(f"{form.name} files need {package}: pip install {package}") from error
    except DECODER_ERRORS as error:
        for kind, frame in RARE_JPEGS.items() if form is JPEG else ():
            if re.search(frame, image, re.DOTALL):
                raise UnreadableImage(f"{kind}; convert it to PNG or TIFF, which keep its values") from None
        if isinstance(error, UnidentifiedImageError):
            raise UnreadableImage(f"{form} whose header cannot be read") from None
        may_quote = form in (DICOM, NPY, NPZ, PPM)  # the file, such as a tag about a patient
        cause = type(error).__name__ if may_quote else PLACE_IN_TORCHVISION.sub("", one_line(error))
        raise UnreadableImage(f"{form} that cannot be decoded: {cause}") from None
