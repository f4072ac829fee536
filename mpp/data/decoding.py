"""Image files and arrays to pixels: uint8 where they have 8 bits, else float32 from 0 to 255, (C, H, W) throughout.

Pictures are files that PIL shows in 8 bits, converted to RGB or grey; colour profiles (ICC) are ignored. All else has
bands: TIFF by tifffile, `.npy` and `.npz` by numpy, 16-bit PNG, and everything where `data.bands` or another
`data.channels` asks for bands. Their values become [0, 255] by `data.range`.
"""

import codecs
import contextlib
import io
import logging
import math
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.errors import one_line
from mpp.runtime.arrays import HEADERS

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # torchvision 0.29 announces their removal: PIL then decodes JPEG too, more slowly
    decode_jpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of all that PIL knows: EPS runs a program
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # how such a file begins; + is BigTIFF
NPY, ZIP, PNG, JPEG = b"\x93NUMPY", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
DEEP_PNG = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR(....)(....)\x10[\x02\x04\x06]", re.DOTALL)  # 16 bits, several bands
PIXELS = re.compile(rb"P6\n(\d+) (\d+)\n255\n")  # the header of a PPM file as PIL and mpp.prepare write it
PICTURES = {  # how the files begin that PIL or tifffile reads
    "a JPEG file": rb"\xff\xd8\xff",
    "a PNG file": rb"\x89PNG\r\n\x1a\n",
    "a WebP file": rb"RIFF....WEBP",
    "a GIF file": rb"GIF8[79]a",
    "a BMP file": rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0",  # the size of its second header: text may begin so
    "a TIFF file": rb"II[*+]\0|MM\0[*+]",
    "a PPM file": rb"P[1-6f]\s+[#\d-]",
}
CONVERTIBLE = {
    "a JPEG 2000 file": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "a JPEG XL file": rb"\0\0\0\x0cJXL |\xff\x0a",
    "an AVIF file": rb"....ftypavi[fs]",
    "a HEIC file": rb"....ftyp(hei|hev|mif1|msf1)",
    "a Canon raw file": rb"....ftypcrx ",
    "an MP4 or QuickTime video": rb"....(ftyp|moov)",
    "a Matroska or WebM video": rb"\x1a\x45\xdf\xa3",
    "an AVI video": rb"RIFF....AVI ",
    "an MPEG video": rb"\0\0\x01[\xb3\xba]",
    "a DICOM file": rb".{128}DICM",
    "a PDF file": rb"%PDF-",
    "a Photoshop file": rb"8BPS",
    "an OpenEXR file": rb"\x76\x2f\x31\x01",
    "an HDF5 file": rb"\x89HDF\r\n\x1a\n",
    "a FITS file": rb"SIMPLE  =",
    "a gzip file": rb"\x1f\x8b",
    "an SVG file": rb"\s*<(svg|[?!].*<svg)[\s>]",
}
STAND_INS = {  # of images that were not fetched or not written
    "an empty file": rb"\Z",
    "a file of zeros": rb"\0{16,}\Z",
    "an HTML file": rb"\s*<(!doctype html|html|head|body|!--.*<html)\b",
    "an XML file": rb"\s*<\?xml(?!.*<svg[\s>])",
    "a Git LFS pointer": rb"version https://git-lfs\.github\.com/",
}
HEAD = 1024  # bytes of a file that say its kind
PICTURE = re.compile(b"|".join(PICTURES.values()), re.DOTALL)
KINDS = {kind: re.compile(start, re.DOTALL | re.IGNORECASE) for kind, start in (STAND_INS | CONVERTIBLE).items()}
KINDS |= {kind: re.compile(start, re.DOTALL) for kind, start in PICTURES.items()}
Image.MAX_IMAGE_PIXELS = None  # data.max_pixels is the limit, from the header too
BANDS_AS_ONE = 4  # for data.max_pixels
PREMULTIPLIED, OPACITY = 1, 2  # extra samples of a TIFF
WHITE_IS_ZERO, ORIENTATION = 0, 274  # of TIFF: a photometric interpretation, and a tag, which EXIF has too
TURNED = range(2, 9)  # orientations of what is not stored upright
PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")  # what a PNG may have it in
TIFF_JPEG = (6, 7, 33007, 34892)  # compressions of TIFF
LOSSY = "it is compressed as JPEG, which changes numbers; a mask must be lossless, such as PNG or TIFF"
NUMBERS = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")  # modes of PIL with one whole number a pixel
LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue in grey: ITU-R 601, as PIL has it


class UnreadableImage(Exception):
    """The bytes are no image that can be shown."""


def is_picture(head: bytes) -> bool:
    """Whether a file is a picture that `decode` reads, by its first bytes, of which 18 are enough.

    `.npy` and `.npz` are none: such files hold arrays of any kind.
    """
    return PICTURE.match(head) is not None


def kind_of(head: bytes) -> str | None:
    """What sort of file begins so, such as "a JPEG 2000 file"; None where it is not known.

    Args:
        head: the first HEAD bytes, or all where there are fewer.
    """
    return next((kind for kind, start in KINDS.items() if start.match(head[:HEAD].removeprefix(codecs.BOM_UTF8))), None)


def unidentified(data: bytes) -> str:
    """Why a file is no picture, where no decoder knows it."""
    kind = kind_of(data)
    if kind is None:
        return "no image file of a known sort"
    if kind in STAND_INS:
        return f"{kind} instead of an image"
    if kind in CONVERTIBLE:
        return f"{kind}, which mpp does not read; convert it to PNG or TIFF"
    return f"{kind} whose header cannot be read"


@contextlib.contextmanager
def ignoring_warnings_as_errors() -> Iterator[None]:
    """Where warnings are errors (`python -W error`), ignore them: an image that a decoder warns of is not broken."""
    if not any(entry[0] == "error" for entry in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@ignoring_warnings_as_errors()
def decode(image: bytes | NDArray, config: ImagesConfig) -> Tensor:
    """An image file, or an array, as pixels.

    Of a picture that is its first frame, upright: greyscale, palette, CMYK and YCbCr are converted, transparency is
    laid on white unless nothing is opaque, the EXIF orientation is applied. See `ImagesConfig` for all else.

    Args:
        image: a file of one of FORMATS, `.npy` or `.npz`; or an array (H, W), (H, W, bands) or (bands, H, W).
    Returns:
        (C, H, W), uint8 or float32 in [0, 255].
    Raises:
        UnreadableImage: with the reason.
    """
    return scaled(read(image, config), config.limits())


@ignoring_warnings_as_errors()
def read(image: bytes | NDArray, config: ImagesConfig) -> NDArray:
    """The same with the values and the type that the file has."""
    inverted = 0  # bits of values, of which 0 is white
    with unreadable_named(image):
        if isinstance(image, np.ndarray):
            check_size(image.shape if image.ndim > 1 else (1, *image.shape, 1), config)
            found = bands_first(image, config)
        elif header := PIXELS.match(image):
            found = decode_ppm(image, header, config)
        elif image.startswith((NPY, ZIP)):
            found = bands_first(read_npy(image, config), config)
        elif image.startswith(TIFF):
            found, inverted = read_tiff(image, config)
        elif header := DEEP_PNG.match(image):
            found = read_deep_png(image, header, config)
        else:
            found = read_picture(image, config)
        found = as_asked(found, config)
        return black_is_zero(found, config.limits() or [(0, 2**inverted - 1)]) if inverted else found


@ignoring_warnings_as_errors()
def read_mask(image: bytes | NDArray, config: ImagesConfig) -> NDArray:
    """The whole numbers of a mask (H, W), of a palette those of its colours; turned only where its own file says so.

    Raises:
        UnreadableImage: it has colours, fractions or several bands, was compressed with losses, or cannot be decoded.
    """
    with unreadable_named(image):
        if isinstance(image, np.ndarray):
            found = image
        elif image.startswith((NPY, ZIP)):
            found = read_npy(image, config)
        elif image.startswith(TIFF):
            found = read_tiff_numbers(image, config)
        else:
            found = read_numbers(image, config)
        if found.ndim != 2 or found.dtype.kind not in "uib":
            what = "floating-point numbers" if found.dtype.kind == "f" else f"{found.dtype} values {found.shape}"
            raise UnreadableImage(f"it has {what}; a mask has one whole number a pixel")
        return found


@contextlib.contextmanager
def unreadable_named(image: bytes | NDArray) -> Iterator[None]:
    """Whatever goes wrong with an image is an UnreadableImage that says what."""
    try:
        yield
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(unidentified(image)) from None
    except Exception as error:  # decoders raise whatever they like on broken files: no sort of it may end a run
        raise UnreadableImage(f"{type(error).__name__}: {one_line(error)}") from error


def check_size(shape: Sequence[int], config: ImagesConfig) -> None:
    """Refuse an image by its header: its height, width and bands, in any order."""
    if 0 in shape:
        raise UnreadableImage("no pixels")
    *bands, width, height = sorted(shape)
    if width * height * -(-math.prod(bands) // BANDS_AS_ONE) > config.max_pixels:
        size = " x ".join(map(str, shape))
        raise UnreadableImage(f"{size} pixels are more than data.max_pixels ({config.max_pixels})")


def decode_ppm(data: bytes, header: re.Match[bytes], config: ImagesConfig) -> NDArray[np.uint8]:
    """Pixels that are in a file as they are, (3, H, W): nothing to decode. PIL takes fifty times as long."""
    width, height = map(int, header.groups())
    check_size((width, height), config)
    pixels = np.frombuffer(bytearray(data), np.uint8, offset=header.end(), count=3 * width * height)
    return pixels.reshape(height, width, 3).transpose(2, 0, 1)


def to_ppm(pixels: Tensor) -> bytes:
    """(3, H, W) uint8 as a PPM file."""
    height, width = pixels.shape[1:]
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.permute(1, 2, 0).numpy().tobytes()


def read_npy(data: bytes, config: ImagesConfig) -> NDArray:
    """The array of a `.npy` file, or the only one of a `.npz`; nothing in it is run."""
    file = io.BytesIO(data)
    if data.startswith(NPY):
        return read_array(file, len(data), config)
    with zipfile.ZipFile(file) as archive:
        arrays = archive.infolist()
        if len(arrays) != 1:
            raise UnreadableImage(f"{len(arrays)} arrays in one .npz; an image is one")
        with archive.open(arrays[0]) as member:
            return read_array(io.BufferedReader(member), arrays[0].file_size, config)


def read_array(file: io.BytesIO | io.BufferedReader, size: int, config: ImagesConfig) -> NDArray:
    """An array from a file of so many bytes, by its header before its values."""
    version = np.lib.format.read_magic(file)
    shape, _, dtype = HEADERS[version](file)
    check_size(shape if len(shape) > 1 else (1, *shape, 1), config)
    check_numbers(dtype)
    if math.prod(shape) * dtype.itemsize > size - file.tell():
        raise UnreadableImage("fewer values than its header announces")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def check_numbers(dtype: np.dtype) -> None:
    """Refuse what is no number, such as objects, which could run code."""
    if dtype.kind not in "uifb":
        raise UnreadableImage(f"{dtype} values, which are no integers or floating-point numbers")


def read_tiff(data: bytes, config: ImagesConfig) -> tuple[NDArray, int]:
    """A TIFF of 8 bits as a picture, where one is asked for; else its bands (n, H, W). And its bits where 0 is white.

    They are the samples of its first page, or its channels or pages where each has one sample. Of a picture, pages are
    frames, of which the first counts, and a sample may be opacity.
    """
    import tifffile  # reads TIFF alone, and takes a tenth of a second

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what is broken is named by us
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        series = file.series[0]
        page = series.pages[0]
        as_pil = as_picture(config) or page.bitspersample == 1  # of faxes, which older releases of tifffile do not read
        as_pil = as_pil and page.sampleformat != tifffile.SAMPLEFORMAT.INT  # which PIL takes for unsigned
        turned = page.photometric == WHITE_IS_ZERO and (config.range or config.nodata is not None)  # not PIL's business
        if as_pil and page.bitspersample <= 8 and "C" not in series.axes and not (turned and page.bitspersample == 8):
            with contextlib.suppress(UnidentifiedImageError):  # some compressions
                picture = read_picture(data, config)
                if picture.any() or PREMULTIPLIED not in (page.extrasamples or ()):
                    return picture, 0  # else PIL may have dropped colours, because nothing is opaque
        check_size(page.chunks, config)  # strips or tiles, which are decoded one by one
        if page.samplesperpixel > 1 or len(series.pages) == 1 or (as_picture(config) and "C" not in series.axes):
            check_size(page.shape, config)
            pixels, axes = page.asarray(), page.axes
        else:
            if None in series.pages:
                raise UnreadableImage("some of its channels are in other files")
            check_size(series.shape, config)
            pixels, axes = series.asarray(), series.axes
        extra = set(page.extrasamples or ())
        inverted = as_picture(config) and page.photometric == WHITE_IS_ZERO and pixels.dtype.kind == "u"
        orientation, bits = page.tags.valueof(ORIENTATION, 1), page.bitspersample if inverted else 0
    bands = next((axis for axis in "SC" if axis in axes), next((axis for axis in axes if axis not in "YX"), ""))
    first = tuple(slice(None) if axis in f"YX{bands}" else 0 for axis in axes)
    left = [axis for axis in axes if axis in f"YX{bands}"]
    pixels = pixels[first].transpose([left.index(axis) for axis in f"{bands}YX"])
    pixels = upright(pixels if bands else pixels[None], orientation)
    if as_picture(config) and extra & {PREMULTIPLIED, OPACITY}:
        pixels = on_white(pixels, not inverted, PREMULTIPLIED in extra)
    return pixels, bits


def read_tiff_numbers(data: bytes, config: ImagesConfig) -> NDArray:
    """The numbers of a TIFF, (H, W), upright; (n, H, W) where it has several bands."""
    import tifffile

    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages[0]
        if page.compression in TIFF_JPEG:
            raise UnreadableImage(LOSSY)
        as_pil_shows = page.bitspersample == 1 or page.photometric == WHITE_IS_ZERO
    if as_pil_shows:
        return read_numbers(data, config)
    bands, _ = read_tiff(data, ImagesConfig(channels=1, bands=(1,), max_pixels=config.max_pixels))
    return bands[0] if len(bands) == 1 else bands


def white_is_zero(image: bytes) -> bool:
    """Whether an image file is a TIFF of which 0 is white."""
    if not image.startswith(TIFF):
        return False
    import tifffile

    with tifffile.TiffFile(io.BytesIO(image)) as file:
        return file.pages[0].photometric == WHITE_IS_ZERO


def black_is_zero(pixels: NDArray, limits: Sequence[tuple[float, float]]) -> NDArray:
    """Integers (C, H, W) from white to black, from black to white; limits: see `data.range`."""
    low, high = (np.array(ends, np.float64)[:, None, None] for ends in zip(*limits, strict=True))
    return np.clip(low + high - pixels, 0, np.iinfo(pixels.dtype).max).astype(pixels.dtype)


def upright(pixels: NDArray, orientation: int) -> NDArray:
    """Pixels (n, H, W) as EXIF's orientation says, 1 to 8; as they are where it is something else."""
    if orientation not in TURNED:
        return pixels
    pixels = pixels.swapaxes(1, 2) if orientation >= 5 else pixels
    pixels = pixels[:, :, ::-1] if orientation in (2, 3, 6, 7) else pixels
    return pixels[:, ::-1] if orientation in (3, 4, 7, 8) else pixels


def orientation_of(image: Image.Image) -> int:
    """EXIF's orientation, wherever it stands, or else that of XMP, as PIL.ImageOps.exif_transpose finds it; 1: none."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # a broken note on a picture does not make the picture unreadable
        return 1


@ignoring_warnings_as_errors()
def stored_orientation(image: bytes | NDArray) -> int:
    """The orientation by which `read` and `read_mask` turn an image: see TURNED."""
    if isinstance(image, np.ndarray) or (image.startswith(PNG) and not any(name in image for name in PNG_ORIENTATION)):
        return 1  # to find what is not there, PIL would decode a PNG
    try:
        if image.startswith(TIFF):
            import tifffile

            with tifffile.TiffFile(io.BytesIO(image)) as file:
                return file.pages[0].tags.valueof(ORIENTATION, 1)
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return orientation_of(opened)
    except Exception:  # `read` names it
        return 1


def on_white(pixels: NDArray, white_is_most: bool = True, premultiplied: bool = False) -> NDArray:
    """Integers (n + 1, H, W), the last of which is opacity (that may be in the others already), laid on white."""
    if pixels.dtype.kind == "f":
        raise UnreadableImage("opacity of floating-point pixels has no agreed range; data.bands chooses the others")
    if not pixels[-1].any():  # as some programs write what has no opacity: all would be white
        return pixels[:-1]
    most = np.iinfo(pixels.dtype).max
    opacity = pixels[-1] / most
    laid = pixels[:-1] * (1 if premultiplied else opacity) + white_is_most * most * (1 - opacity)
    return np.rint(np.minimum(laid, most)).astype(pixels.dtype)


def read_deep_png(data: bytes, header: re.Match[bytes], config: ImagesConfig) -> NDArray:
    """A PNG of 16 bits and several bands, (bands, H, W), of which PIL would read 8 bits."""
    check_size([int.from_bytes(side, "big") for side in header.groups()], config)
    from imagecodecs import png_decode  # takes a fifth of a second

    pixels = upright(png_decode(data).transpose(2, 0, 1), stored_orientation(data))
    return on_white(pixels) if as_picture(config) and len(pixels) in (2, 4) else pixels


def as_picture(config: ImagesConfig) -> bool:
    """Whether what a person sees is asked for, not bands."""
    return config.bands is None and config.channels in (1, 3)


def read_picture(data: bytes, config: ImagesConfig) -> NDArray:
    """A file that PIL reads, (n, H, W): see `from_pil`."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_size(image.size, config)
        if decode_jpeg and image.format == "JPEG" and image.mode in ("L", "RGB") and as_picture(config):
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            mode = ImageReadMode.RGB if config.channels == 3 else ImageReadMode.GRAY
            pixels = decode_jpeg(encoded, mode=mode).numpy()  # which looks for an orientation in the first segment only
            return upright(pixels, orientation_of(image))
        return from_pil(image, config)


def from_pil(image: Image.Image, config: ImagesConfig) -> NDArray:
    """A PIL image of any mode: RGB or grey of 8 bits where a picture is asked for, else its bands, (n, H, W)."""
    image.seek(0)
    image.load()  # PIL turns a TIFF then, and forgets its orientation
    return upright(samples_of(image, config), orientation_of(image))


def samples_of(image: Image.Image, config: ImagesConfig) -> NDArray:
    """The same as it is stored."""
    transparent = "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La")
    if image.mode.startswith("I"):
        return from_integers(np.asarray(image))[None]
    if as_picture(config) and image.mode != "F":
        if transparent:
            image = image.convert("RGBA")
            if image.getextrema()[-1] != (0, 0):  # else as in `on_white`
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if config.channels == 3 else "L")
    elif image.mode in ("1", "P", "PA"):
        image = image.convert("L" if image.mode == "1" else "RGBA" if transparent else "RGB")
    pixels = np.array(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def read_numbers(data: bytes, config: ImagesConfig) -> NDArray:
    """The numbers (H, W) of a file that PIL reads, upright: see `read_mask`."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_size(image.size, config)
        if image.format in ("JPEG", "MPO"):
            raise UnreadableImage(LOSSY)
        if image.mode not in NUMBERS:
            what = "floating-point numbers" if image.mode == "F" else f"colours ({image.mode})"
            raise UnreadableImage(f"it has {what}; a mask has one whole number a pixel")
        image.load()
        return upright(np.asarray(image)[None], orientation_of(image))[0]


def from_integers(pixels: NDArray) -> NDArray[np.uint16]:
    """16-bit greyscale (H, W), which some versions of PIL widen to 32."""
    if pixels.min() < 0 or pixels.max() > 65535:
        raise UnreadableImage("integer pixels outside 16 bits have no agreed range")
    return pixels.astype(np.uint16)


def bands_first(pixels: NDArray, config: ImagesConfig) -> NDArray:
    """(H, W), (H, W, bands) or (bands, H, W) to (bands, H, W).

    Bands are the first or the last side: the one that has as many as are asked for, or that is left by a square, or the
    shorter one; the last where both do.
    """
    if pixels.ndim == 2:
        return pixels[None]
    if pixels.ndim != 3:
        raise UnreadableImage(f"an array of shape {pixels.shape}, which is no image (H, W, bands) or (bands, H, W)")
    first, middle, last = pixels.shape
    asked = None if config.bands else config.channels
    guess = first == middle or (middle != last and last <= first)
    at_end = last == asked or (first != asked and guess)
    return pixels.transpose(2, 0, 1) if at_end else pixels


def as_asked(pixels: NDArray, config: ImagesConfig) -> NDArray:
    """The bands (n, H, W) that the settings ask for, (C, H, W), with a value everywhere."""
    check_numbers(pixels.dtype)
    if pixels.dtype == bool:
        pixels = pixels.astype(np.uint8) * 255
    if config.bands:
        if max(config.bands) > len(pixels):
            raise UnreadableImage(f"{in_words(len(pixels))}; data.bands asks for {max(config.bands)}")
        pixels = pixels[[band - 1 for band in config.bands]]
    return as_channels(with_values(pixels, config.nodata), config.channels)


def in_words(count: int) -> str:
    """So many bands."""
    return f"{count} band{'s' * (count != 1)}"


def as_channels(pixels: NDArray, channels: int) -> NDArray:
    """(n, H, W) to (C, H, W): all, or grey and RGB of each other."""
    count = len(pixels)
    if count == channels:
        return pixels
    if (count, channels) == (1, 3):
        return pixels.repeat(3, 0)
    if (count, channels) == (3, 1):
        grey = np.tensordot(LUMA, pixels, 1)[None]
        return (grey if pixels.dtype.kind == "f" else grey.round()).astype(pixels.dtype)
    raise UnreadableImage(f"{in_words(count)}; data.channels is {channels}, and data.bands can choose so many")


def with_values(pixels: NDArray, nodata: float | str | None) -> NDArray:
    """The same with the mean of its channel in the place of what has no value."""
    if nodata is None and pixels.dtype.kind != "f":
        return pixels
    missing = ~np.isfinite(pixels)
    if nodata is None:
        if missing.any():
            band = 1 + int(np.flatnonzero(missing.any((1, 2)))[0])
            raise UnreadableImage(f"values that are not finite in channel {band}; data.nodata nan gives them the mean")
        return pixels
    if nodata != "nan":
        missing |= pixels == nodata
    if not missing.any():
        return pixels
    pixels = pixels.copy()
    for number, (channel, without) in enumerate(zip(pixels, missing, strict=True), start=1):
        if without.all():
            raise UnreadableImage(f"no value in channel {number}")
        mean = channel[~without].mean(dtype=np.float64)
        channel[without] = mean if channel.dtype.kind == "f" else np.rint(mean)
    return pixels


def scaled(pixels: NDArray, limits: Sequence[tuple[float, float]]) -> Tensor:
    """Values (C, H, W) of any type to [0, 255]: see `data.range`."""
    if pixels.dtype == np.uint8 and all(tuple(pair) == (0, 255) for pair in limits):
        return torch.from_numpy(pixels if min(pixels.strides) >= 0 else pixels.copy())
    if not limits:
        if pixels.dtype.kind == "f" or pixels.dtype.itemsize > 2:
            raise UnreadableImage(f"{pixels.dtype} values have no agreed range; data.range says which")
        limits = [(np.iinfo(pixels.dtype).min, np.iinfo(pixels.dtype).max)]
    exact = np.float32 if pixels.dtype.itemsize <= 2 else np.float64  # 255 x 65535 is below 2**24
    low, high = (np.array(ends, exact)[:, None, None] for ends in zip(*limits, strict=True))
    values = (pixels.astype(exact) - low) * 255 / (high - low)
    return torch.from_numpy(np.clip(values, 0, 255).astype(np.float32, copy=False))
