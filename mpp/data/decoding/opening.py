"""Opening of files by PIL and tifffile: allowed formats, no size limit of PIL's own, and no warnings."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from tifffile import TiffFile

PIL_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of all that PIL knows: EPS runs a program


@contextlib.contextmanager
def ignoring_warnings_as_errors() -> Iterator[None]:
    """Ignore warnings where they are errors (`python -W error`): a decoder's warning does not make an image broken."""
    if not any(entry[0] == "error" for entry in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def without_size_limit() -> Iterator[None]:
    """Lift PIL's own limit on pixels: data.max_pixels is checked before decoding."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


@contextlib.contextmanager
def open_with_pil(data: bytes, formats: Sequence[str] = PIL_FORMATS) -> Iterator[Image.Image]:
    """An image file whose header PIL has read."""
    with without_size_limit(), Image.open(io.BytesIO(data), formats=formats) as image:  # TIFFs are checked again later
        yield image


@contextlib.contextmanager
def open_avif(data: bytes) -> Iterator[Image.Image]:
    """An AVIF file whose header PIL has read. Only the file's own properties say how it is turned, not its XMP."""
    from PIL import AvifImagePlugin  # of Pillow from 11.3 on

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # loader processes share the cores
    with open_with_pil(data, ("AVIF",)) as image:
        image.info.pop("xmp", None)
        yield image


def open_with_tifffile(data: bytes) -> "TiffFile":
    """A TIFF whose header tifffile has read."""
    import tifffile  # needed for TIFF only, and takes a tenth of a second

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # unreadable images have a message of ours
    return tifffile.TiffFile(io.BytesIO(data))
