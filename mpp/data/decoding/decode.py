"""Image files and arrays to pixels: uint8 where they have 8 bits, else float32 from 0 to 255, (C, H, W) throughout.

Pictures are files that PIL shows in 8 bits, converted to RGB or grey; colour profiles (ICC) are ignored. All else has
bands: TIFF by tifffile, DICOM by pydicom, `.npy` and `.npz` by numpy, PNG, HEIC, AVIF, JPEG XL and JPEG 2000 of more
than 8 bits, and everything where `data.bands` or another `data.channels` asks for bands. Their values become [0, 255]
by `data.range`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import UnidentifiedImageError
from torch import Tensor

from mpp.config import WINDOW, ImagesConfig
from mpp.data.decoding.channels import bands_first, invert, scale_to_255, select_channels
from mpp.data.decoding.checks import check_size, refuse_lossy_mask
from mpp.data.decoding.dicom import read_dicom
from mpp.data.decoding.heif import heif_orientation, read_avif, read_heic
from mpp.data.decoding.jpeg2000 import read_jpeg2000
from mpp.data.decoding.jpegxl import read_header, read_jpegxl
from mpp.data.decoding.kinds import (
    NPY_START,
    PNG_START,
    ZIP_START,
    is_tiff,
    kind_of_file,
    optional_format,
    unidentified,
)
from mpp.data.decoding.numpy_files import read_numpy_file
from mpp.data.decoding.opening import ignoring_warnings_as_errors, open_with_pil
from mpp.data.decoding.optional import AVIF, DICOM, HEIC, JPEG_2000, JPEG_XL, require_package
from mpp.data.decoding.orientation import UPRIGHT, pil_orientation, png_orientation
from mpp.data.decoding.pictures import DEEP_PNG_HEADER, PPM_HEADER, read_deep_png, read_ppm, read_with_pil
from mpp.data.decoding.tiff import count_pages, read_tiff, tiff_orientation
from mpp.data.decoding.wanted import Limits, StoredPixels, Wanted, wanted_by
from mpp.errors import UnreadableImage

OPTIONAL_READERS = {
    DICOM: read_dicom,
    HEIC: read_heic,
    AVIF: read_avif,
    JPEG_XL: read_jpegxl,
    JPEG_2000: read_jpeg2000,
}
ORIENTATION_READERS = {
    HEIC: heif_orientation,
    AVIF: heif_orientation,
    JPEG_XL: lambda image: read_header(image).orientation,
}


@ignoring_warnings_as_errors()
def decode(image: bytes | NDArray, config: ImagesConfig, marks_nodata: bool = False) -> Tensor:
    """An image file, or an array, as pixels.

    The first frame of a picture, upright: greyscale, palette, CMYK and YCbCr are converted, transparency is laid on
    white unless nothing is opaque, the EXIF orientation is applied. See `ImagesConfig` for all else.

    Args:
        image: a file: one of PIL_FORMATS or OPTIONAL_READERS, `.npy` or `.npz`; or an array (H, W), (H, W, bands) or
            (bands, H, W).
        marks_nodata: whether one more channel follows, with 0 where pixels had no value in any channel, and else 255.
    Returns:
        (C, H, W), uint8 or float32 in [0, 255]; (C + 1, H, W) with `marks_nodata`.
    Raises:
        UnreadableImage: with the reason.
    """
    values = read_channels(image, config)
    pixels = scale_to_255(values.pixels, limits_of(values, config))
    if not marks_nodata:
        return pixels
    mark = torch.full_like(pixels[:1], 255)
    if values.missing is not None:
        mark[:, torch.from_numpy(values.missing)] = 0
    return torch.cat([pixels, mark])


@ignoring_warnings_as_errors()
def read_values(image: bytes | NDArray, config: ImagesConfig) -> NDArray:
    """The channels (C, H, W) of an image as `decode` has them, but with the values and the type of the file."""
    return read_channels(image, config).pixels


def read_channels(image: bytes | NDArray, config: ImagesConfig) -> StoredPixels:
    """The channels (C, H, W) of an image with the values of the file, black below white."""
    with unreadable_named(image):
        stored = read_stored(image, wanted_by(config), config)
        if config.range == WINDOW and stored.window is None:
            raise UnreadableImage("no window in the file, which data.range window asks for")
        pixels, missing = select_channels(stored.pixels, config, stored.nodata)
        if stored.inverted:
            pixels = invert(pixels, limits_of(stored, config) or [stored.inverted])
        return stored._replace(pixels=pixels, inverted=None, missing=missing)


def limits_of(stored: StoredPixels, config: ImagesConfig) -> Sequence[Limits]:
    """The values that become 0 and 255, for all channels or each; none: those of the type."""
    if config.range == WINDOW:
        return [stored.window]
    return config.limits() or ([stored.limits] if stored.limits else [])


@ignoring_warnings_as_errors()
def read_mask(image: bytes | NDArray, config: ImagesConfig) -> NDArray:
    """The whole numbers of a mask (H, W), or the indices of its palette; turned only by its own file's orientation.

    Raises:
        UnreadableImage: it has colours, fractions or several bands, was compressed with losses, or cannot be decoded.
    """
    with unreadable_named(image):
        stored = read_stored(image, Wanted.MASK, config).pixels
        numbers = stored[0] if len(stored) == 1 else stored
        if numbers.ndim != 2 or numbers.dtype.kind not in "uib":
            is_float = numbers.dtype.kind == "f"
            content = "floating-point numbers" if is_float else f"{numbers.dtype} values {numbers.shape}"
            raise UnreadableImage(f"it has {content}; a mask has one whole number a pixel")
        return numbers


def read_stored(image: bytes | NDArray, wanted: Wanted, config: ImagesConfig) -> StoredPixels:
    """The values (n, H, W) of an image by the reader of its format."""
    if isinstance(image, np.ndarray):
        check_size(image.shape, config)
        return StoredPixels(array_bands(image, wanted, config))
    if form := optional_format(image):  # first, because DICOM may begin as another file
        if wanted is Wanted.MASK and form.is_lossy:
            refuse_lossy_mask(form.name)
        require_package(form)
        return OPTIONAL_READERS[form](image, wanted, config)
    if image.startswith((NPY_START, ZIP_START)):
        return StoredPixels(array_bands(read_numpy_file(image, config), wanted, config))
    if is_tiff(image):
        return read_tiff(image, wanted, config)
    if wanted is not Wanted.MASK:  # which has one number a pixel, and PIL's modes tell it from colours
        if header := PPM_HEADER.match(image):
            return StoredPixels(read_ppm(image, header, config))
        if header := DEEP_PNG_HEADER.match(image):
            return StoredPixels(read_deep_png(image, header, config))
    return StoredPixels(read_with_pil(image, wanted, config))


@ignoring_warnings_as_errors()
def stored_orientation(image: bytes | NDArray) -> int:
    """The orientation in which an image is stored, and from which `read_values` and `read_mask` turn it upright."""
    if isinstance(image, np.ndarray):
        return UPRIGHT
    try:
        if image.startswith(PNG_START):
            return png_orientation(image)
        if form := optional_format(image):
            return ORIENTATION_READERS[form](image) if form in ORIENTATION_READERS else UPRIGHT
        if is_tiff(image):
            return tiff_orientation(image)
        with open_with_pil(image) as opened:
            return pil_orientation(opened)
    except Exception:  # decoding the image gives the reason
        return UPRIGHT


@ignoring_warnings_as_errors()
def count_frames(image: bytes | NDArray, config: ImagesConfig) -> int:
    """The frames of a picture, of which only the first counts: pages of a TIFF, or those of an animation; 1: no others.

    The second one of a JPEG is a preview or for a second eye, and is not counted.
    """
    if wanted_by(config) is not Wanted.PICTURE or isinstance(image, np.ndarray):
        return 1
    if is_tiff(image):
        return count_pages(image)
    if not image.startswith((PNG_START, b"GIF8", b"RIFF")):
        return 1
    with open_with_pil(image) as opened:
        return getattr(opened, "n_frames", 1)


def array_bands(array: NDArray, wanted: Wanted, config: ImagesConfig) -> NDArray:
    """An array as (bands, H, W); a mask, whose shape is still to be checked, as its only band."""
    return array[None] if wanted is Wanted.MASK else bands_first(array, config)


@contextlib.contextmanager
def unreadable_named(image: bytes | NDArray) -> Iterator[None]:
    """Raise each error of decoding an image as UnreadableImage, with the reason."""
    try:
        yield
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(unidentified(image)) from None
    except Exception as error:  # decoders raise any exception on broken files, and none may end a run
        kind = "an array" if isinstance(image, np.ndarray) else kind_of_file(image) or "a file of an unknown sort"
        raise UnreadableImage(f"{kind} that cannot be decoded: it may be damaged, or end early") from error
