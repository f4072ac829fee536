"""TIFF files of any bands and depth, by tifffile, and by PIL where a picture of 8 bits is wanted."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from numpy.typing import NDArray
from PIL import UnidentifiedImageError

from mpp.config import ImagesConfig
from mpp.data.decoding.channels import (
    UPRIGHT,
    Stored,
    check_size,
    is_picture,
    lay_on_white,
    limits_of_bits,
    turn_upright,
)
from mpp.data.decoding.pictures import ORIENTATION_TAG, read_with_pil
from mpp.errors import UnreadableImage, one_line

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage, TiffPageSeries

PREMULTIPLIED, OPACITY = 1, 2  # kinds of extra samples
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE = range(4)  # photometric interpretations
NODATA_TAG = 42113  # GDAL_NODATA
SIGNED_INTEGERS = 2  # a sample format
JPEG_COMPRESSIONS = (6, 7, 33007, 34892)
OPTIONAL_COMPRESSIONS = (34925, 50000, 50001)  # LZMA, ZSTD, WebP: PIL may know them while its libtiff does not


@contextlib.contextmanager
def open_tiff(data: bytes) -> Iterator["TiffFile"]:
    """A TIFF whose header tifffile has read."""
    import tifffile  # needed for TIFF only, and takes a tenth of a second

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # unreadable images have a message of ours
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            yield file
    except tifffile.TiffFileError as error:  # no ValueError in releases for Python 3.10
        raise ValueError(one_line(error)) from error


def read_tiff(data: bytes, config: ImagesConfig) -> Stored:
    """The samples of the first page; or the channels or pages, where each has one sample.

    Of a picture, the pages are frames, of which the first counts, and a sample may be opacity, which is laid on white.
    """
    with open_tiff(data) as file:
        series = file.series[0]
        page = series.pages[0]
        nodata = nodata_of(page)
        opacity = {*(page.extrasamples or ())} & {PREMULTIPLIED, OPACITY}
        if is_for_pil(series, page, nodata, config):
            may_lack = page.compression in OPTIONAL_COMPRESSIONS
            with contextlib.suppress(OSError if may_lack else UnidentifiedImageError):  # then tifffile reads it
                values = read_with_pil(data, config).values
                if values.any() or PREMULTIPLIED not in opacity:
                    return Stored(values, nodata=nodata)
                # else PIL may have dropped colours: nothing is opaque
        values = turn_upright(read_bands(series, page, config), page.tags.valueof(ORIENTATION_TAG, UPRIGHT))
    _, most = limits_of_bits(page.bitspersample, values.dtype.kind == "i")
    uses_part_of_type = page.bitspersample < 8 * values.dtype.itemsize <= 16
    has_limits = uses_part_of_type and values.dtype.kind == "u" and page.photometric != PALETTE
    is_inverted = page.photometric == WHITE_IS_ZERO and is_picture(config) and values.dtype.kind == "u"
    if opacity and is_picture(config):
        values = lay_on_white(values, most, PREMULTIPLIED in opacity, white=0 if is_inverted else most)
    return Stored(values, (0, most) if has_limits else None, nodata, is_inverted=is_inverted)


def nodata_of(page: "TiffPage") -> float | None:
    """The value of pixels without a value by GDAL's tag; None: there is none, or not of grey or colour values."""
    text = page.tags.valueof(NODATA_TAG)
    is_plain = page.photometric in (BLACK_IS_ZERO, RGB) and not {*(page.extrasamples or ())} & {PREMULTIPLIED, OPACITY}
    with contextlib.suppress(ValueError):
        return float(str(text).strip(" \0")) if is_plain else None
    return None


def is_for_pil(series: "TiffPageSeries", page: "TiffPage", nodata: float | None, config: ImagesConfig) -> bool:
    """Whether PIL reads the file: pictures of up to 8 bits, and faxes, which older releases of tifffile cannot read."""
    most_bits = 8 if is_picture(config) else 1
    if page.bitspersample > most_bits or "C" in series.axes or page.sampleformat == SIGNED_INTEGERS:
        return False
    has_nodata = nodata is not None or config.nodata is not None
    if has_nodata and page.photometric == RGB and config.channels == 1:  # grey may be nodata where no colour is
        return False
    return page.bitspersample < 8 or page.photometric != WHITE_IS_ZERO  # which PIL inverts before values are compared


def read_bands(series: "TiffPageSeries", page: "TiffPage", config: ImagesConfig) -> NDArray:
    """The bands (n, H, W) of a page, or of a series of pages with one band each, as they are stored."""
    check_size(page.chunks, config)  # strips or tiles, which are decoded one by one
    is_frame = is_picture(config) and "C" not in series.axes
    source = page if page.samplesperpixel > 1 or len(series.pages) == 1 or is_frame else series
    check_size(source.shape, config)
    if source is series and None in series.pages:
        raise UnreadableImage("some of its channels are in other files")
    return to_bands_first(source.asarray(), source.axes)


def to_bands_first(pixels: NDArray, axes: str) -> NDArray:
    """(n, H, W): bands are samples (S), channels (C), or the first other axis; of all other axes the first entry.

    Args:
        axes: of `pixels`, a letter each, as tifffile has them.
    """
    from tifffile import transpose_axes

    band_axes = [axis for axis in ("S", "C", *axes) if axis in axes and axis not in "YX"]
    kept = f"{band_axes[0] if band_axes else 'S'}YX"
    first_entries = tuple(slice(None) if axis in kept else 0 for axis in axes)
    remaining = "".join(axis for axis in axes if axis in kept)
    return transpose_axes(pixels[first_entries], remaining, kept)  # adds an axis for a single band


def read_tiff_mask(data: bytes, config: ImagesConfig) -> Stored:
    """The numbers of a mask as they are stored."""
    with open_tiff(data) as file:
        if file.pages[0].compression in JPEG_COMPRESSIONS:
            raise UnreadableImage("JPEG in a TIFF may change numbers; a mask must be lossless")
    return read_tiff(data, config)
