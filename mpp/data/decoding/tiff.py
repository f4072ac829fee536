"""TIFF files of any bands and depth, by tifffile, and by PIL where a picture of 8 bits is wanted."""

import contextlib
from typing import TYPE_CHECKING

from numpy.typing import NDArray
from PIL import UnidentifiedImageError

from mpp.config import ImagesConfig
from mpp.data.decoding.channels import lay_on_white
from mpp.data.decoding.checks import check_size, refuse_lossy_mask
from mpp.data.decoding.kinds import is_tiff
from mpp.data.decoding.opening import open_with_tifffile
from mpp.data.decoding.orientation import ORIENTATION_TAG, UPRIGHT, turn_upright
from mpp.data.decoding.pictures import read_with_pil
from mpp.data.decoding.wanted import StoredPixels, Wanted
from mpp.errors import UnreadableImage

if TYPE_CHECKING:
    from tifffile import TiffPage, TiffPageSeries

PREMULTIPLIED, OPACITY = 1, 2  # kinds of extra samples
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE = range(4)  # photometric interpretations
NODATA_TAG = 42113  # GDAL_NODATA
SIGNED_INTEGERS = 2  # a sample format
JPEG_COMPRESSIONS = (6, 7, 33007, 34892)


def read_tiff(data: bytes, wanted: Wanted, config: ImagesConfig) -> StoredPixels:
    """The samples of the first page; or the channels or pages, where each has one sample.

    Of a picture, the pages are frames, of which the first counts, and a sample may be opacity, which is laid on white.
    """
    with open_with_tifffile(data) as file:
        series = file.series[0]
        page = series.pages[0]
        extra_samples = set(page.extrasamples or ())
        is_inverted = page.photometric == WHITE_IS_ZERO
        nodata = nodata_of(page)
        if wanted is Wanted.MASK:
            if page.compression in JPEG_COMPRESSIONS:
                refuse_lossy_mask("compressed as JPEG")
            if page.bitspersample == 1 or is_inverted:
                return StoredPixels(read_with_pil(data, wanted, config))
        elif is_for_pil(series, page, wanted, config, nodata):
            with contextlib.suppress(UnidentifiedImageError):  # some compressions
                pixels = read_with_pil(data, wanted, config)
                if pixels.any() or PREMULTIPLIED not in extra_samples:
                    return StoredPixels(pixels, nodata=nodata)  # else PIL may have dropped colours: nothing is opaque
        pixels = read_bands(series, page, wanted, config)
        orientation = page.tags.valueof(ORIENTATION_TAG, UPRIGHT)

    pixels = turn_upright(pixels, orientation)
    most = 2**page.bitspersample - 1
    limits = (0, most) if uses_part_of_type(page) else None
    if wanted is not Wanted.PICTURE:
        return StoredPixels(pixels, limits=limits, nodata=nodata)
    is_inverted = is_inverted and pixels.dtype.kind == "u"
    if extra_samples & {PREMULTIPLIED, OPACITY}:
        is_premultiplied = PREMULTIPLIED in extra_samples
        pixels = lay_on_white(pixels, not is_inverted, is_premultiplied, most=most if limits else None)
    return StoredPixels(pixels, (0, most) if is_inverted else None, limits, nodata=nodata)


def uses_part_of_type(page: "TiffPage") -> bool:
    """Whether a page's whole numbers have fewer bits than their type: 10 of 16, say. Indices of a palette do not count.

    Numbers of 12 bits that are stored as 16 say nothing of it.
    """
    is_whole = page.dtype is not None and page.dtype.kind == "u" and page.photometric != PALETTE
    return is_whole and page.bitspersample < 8 * page.dtype.itemsize <= 16


def nodata_of(page: "TiffPage") -> float | None:
    """The value of pixels without a value by GDAL's tag; None: there is none, or not of grey or colour values."""
    text = page.tags.valueof(NODATA_TAG)
    is_plain = page.photometric in (BLACK_IS_ZERO, RGB) and not set(page.extrasamples or ()) & {PREMULTIPLIED, OPACITY}
    if text is None or not is_plain:
        return None
    try:
        return float(str(text).strip(" \0"))
    except ValueError:
        return None


def nodata_tag(image: bytes) -> float | None:
    """The value of pixels without a value by a TIFF's own tag; None: there is none, or the file is no TIFF."""
    if not is_tiff(image):
        return None
    with open_with_tifffile(image) as file:
        return nodata_of(file.pages[0])


def is_for_pil(
    series: "TiffPageSeries", page: "TiffPage", wanted: Wanted, config: ImagesConfig, nodata: float | None
) -> bool:
    """Whether PIL reads the file: pictures of up to 8 bits, and faxes, which older releases of tifffile cannot read."""
    if wanted is not Wanted.PICTURE and page.bitspersample != 1:
        return False
    if page.bitspersample > 8 or "C" in series.axes:
        return False
    if page.sampleformat == SIGNED_INTEGERS:  # PIL takes them for unsigned
        return False
    has_nodata = nodata is not None or config.nodata is not None
    if has_nodata and page.photometric == RGB and config.channels == 1:  # grey may be nodata where no colour is
        return False
    means_stored_values = config.range or config.nodata is not None  # which PIL inverts where white is zero
    return not (page.bitspersample == 8 and page.photometric == WHITE_IS_ZERO and means_stored_values)


def read_bands(series: "TiffPageSeries", page: "TiffPage", wanted: Wanted, config: ImagesConfig) -> NDArray:
    """The bands (n, H, W) of a page, or of a series of pages with one band each, as they are stored."""
    check_size(page.chunks, config)  # strips or tiles, which are decoded one by one
    is_frame = wanted is Wanted.PICTURE and "C" not in series.axes
    if page.samplesperpixel > 1 or len(series.pages) == 1 or is_frame:
        check_size(page.shape, config)
        return to_bands_first(page.asarray(), page.axes)
    if None in series.pages:
        raise UnreadableImage("some of its channels are in other files")
    check_size(series.shape, config)
    return to_bands_first(series.asarray(), series.axes)


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


def tiff_orientation(image: bytes) -> int:
    """The orientation in which a TIFF is stored."""
    with open_with_tifffile(image) as file:
        return file.pages[0].tags.valueof(ORIENTATION_TAG, UPRIGHT)


def count_pages(image: bytes) -> int:
    """The pages of a TIFF that are of one size; 1 where they are channels of one image."""
    with open_with_tifffile(image) as file:
        series = file.series[0]
        return 1 if "C" in series.axes else len(series.pages)


def white_is_zero(image: bytes) -> bool:
    """Whether an image file is a TIFF whose values run from white to black."""
    if not is_tiff(image):
        return False
    with open_with_tifffile(image) as file:
        return file.pages[0].photometric == WHITE_IS_ZERO


def has_fewer_bits(image: bytes) -> bool:
    """Whether an image file is a TIFF whose numbers have fewer bits than their type."""
    if not is_tiff(image):
        return False
    with open_with_tifffile(image) as file:
        return uses_part_of_type(file.pages[0])
