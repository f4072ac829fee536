"""Image files and arrays to pixels: uint8 where they have 8 bits, else float32 from 0 to 255, (C, H, W) throughout.

Pictures are files that PIL shows in 8 bits, converted to RGB or grey; colour profiles (ICC) are ignored. All else has
bands: TIFF by tifffile, `.npy` and `.npz` by numpy, 16-bit PNG, and everything where `data.bands` or another
`data.channels` asks for bands. Their values become [0, 255] by `data.range`.
"""

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
from mpp.data.decoding.channels import as_asked, bands_first, black_is_zero, check_numbers, on_white, scaled
from mpp.data.decoding.kinds import NPY, PNG, TIFF, ZIP, unidentified
from mpp.errors import UnreadableImage, one_line
from mpp.runtime.arrays import HEADERS

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # torchvision 0.29 announces their removal: PIL then decodes JPEG too, more slowly
    decode_jpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of all that PIL knows: EPS runs a program
DEEP_PNG = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR(....)(....)\x10[\x02\x04\x06]", re.DOTALL)  # 16 bits, several bands
PIXELS = re.compile(rb"P6\n(\d+) (\d+)\n255\n")  # the header of a PPM file as PIL and mpp.prepare write it
Image.MAX_IMAGE_PIXELS = None  # data.max_pixels is the limit, from the header too
BANDS_AS_ONE = 4  # for data.max_pixels
PREMULTIPLIED, OPACITY = 1, 2  # extra samples of a TIFF
WHITE_IS_ZERO, ORIENTATION = 0, 274  # of TIFF: a photometric interpretation, and a tag, which EXIF has too
TURNED = range(2, 9)  # orientations of images that are not stored upright
PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")  # chunks of a PNG that may hold one
TIFF_JPEG = (6, 7, 33007, 34892)  # compressions of TIFF
LOSSY = "it is compressed as JPEG, which changes numbers; a mask must be lossless, such as PNG or TIFF"
NUMBERS = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")  # modes of PIL with one whole number a pixel


@contextlib.contextmanager
def ignoring_warnings_as_errors() -> Iterator[None]:
    """Where warnings are errors (`python -W error`), ignore them: a decoder's warning does not make an image broken."""
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
    """The whole numbers of a mask (H, W), or the indices of its palette; turned only by its own file's orientation.

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
    """Raise whatever goes wrong with an image as UnreadableImage, with the reason."""
    try:
        yield
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(unidentified(image)) from None
    except Exception as error:  # decoders raise any exception on broken files, and none may end a run
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
        return 1  # PIL would decode the whole PNG to find none
    try:
        if image.startswith(TIFF):
            import tifffile

            with tifffile.TiffFile(io.BytesIO(image)) as file:
                return file.pages[0].tags.valueof(ORIENTATION, 1)
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return orientation_of(opened)
    except Exception:  # `read` names it
        return 1


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
    """The samples of a PIL image as `from_pil` returns them, but in the orientation in which they are stored."""
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
