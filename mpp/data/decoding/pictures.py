"""Image files that PIL reads, and faster or deeper readers for some: JPEG by torchvision, PPM, PNG of 16 bits."""

import contextlib
import io
import re
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mpp.config import ImagesConfig
from mpp.data.decoding.channels import (
    UPRIGHT,
    Stored,
    bands_to_front,
    check_size,
    is_picture,
    lay_on_white,
    turn_upright,
)
from mpp.data.decoding.formats import AVIF, HEIC, PNG, format_of
from mpp.errors import UnreadableImage

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # torchvision 0.29 announces their removal: PIL then decodes JPEG too, more slowly
    decode_jpeg = None

PPM_HEADER = re.compile(rb"P6\n(\d+) (\d+)\n255\n")  # as PIL writes it
PGM_HEADER = re.compile(rb"P[25](?:(?:\s|#[^\n]*\n)+(\d+)){3}")  # whose last number is the largest that a sample can be
PNG_BITS = 24  # byte of a PNG with the bits of a value
PNG_NOTES = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
MASK_MODES = ("1", "L", "P", "I", "I;16")  # of PIL, with one whole number a pixel
ORIENTATION_TAG = 274  # of TIFF and of EXIF


@contextlib.contextmanager
def without_size_limit() -> Iterator[None]:
    """Lift PIL's own limit on pixels: data.max_pixels is checked before decoding."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


@contextlib.contextmanager
def open_with_pil(data: bytes) -> Iterator[Image.Image]:
    """An image file whose header PIL has read, as the format that its first bytes say: EPS would run a program."""
    form = format_of(data)
    name = form.name.upper()
    if form is HEIC:
        import pi_heif

        pi_heif.register_heif_opener()
        pi_heif.options.DECODE_THREADS = 1  # loader processes share the cores
        name = "HEIF"
    elif form is AVIF:
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    with without_size_limit(), Image.open(io.BytesIO(data), formats=[name]) as image:  # TIFFs are checked again later
        if form is AVIF:
            image.info.pop("xmp", None)  # only the file's own properties say how it is turned
        if form is PNG and not any(note in data for note in PNG_NOTES):
            image.info["exif"] = b""  # PIL would decode the whole PNG to find none
        if form is PNG and image.mode == "L" and "transparency" in image.info:
            image.info["transparency"] *= 255 // (2 ** data[PNG_BITS] - 1)  # PIL spreads 2 and 4 bits over 8, not this
        yield image


def read_with_pil(data: bytes, config: ImagesConfig) -> Stored:
    """The first frame of an image file: see `from_pil`."""
    with open_with_pil(data) as image:
        check_size(image.size, config)
        if image.format == "JPEG" and image.mode in ("L", "RGB") and is_picture(config) and decode_jpeg:
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            mode = ImageReadMode.RGB if config.channels == 3 else ImageReadMode.GRAY
            pixels = decode_jpeg(encoded, mode=mode).numpy()  # it finds an orientation in the first segment only
            return Stored(turn_upright(pixels, orientation_of(image)))
        if image.format == "PNG" and data[PNG_BITS] == 16:
            from imagecodecs import png_decode  # takes a fifth of a second

            values = turn_upright(bands_to_front(png_decode(data)), orientation_of(image))  # PIL would read 8 bits
            has_opacity = is_picture(config) and len(values) in (2, 4)
            return Stored(lay_on_white(values, 65535) if has_opacity else values)
        if image.format == "PPM" and image.mode == "I":
            numbers, most = stored_numbers(image, data)
            return Stored(numbers.astype(np.uint16), (0, most))
        return Stored(from_pil(image, config))


def read_pil_mask(data: bytes, config: ImagesConfig) -> Stored:
    """The whole numbers of a mask, or the indices of its palette, as they are stored."""
    with open_with_pil(data) as image:
        check_size(image.size, config)
        if image.mode not in MASK_MODES:
            raise UnreadableImage(f"it has colours or fractions ({image.mode}); a mask has one whole number a pixel")
        return Stored(turn_upright(stored_numbers(image, data)[0], orientation_of(image)))


def stored_numbers(image: Image.Image, data: bytes) -> tuple[NDArray, int]:
    """The whole numbers (1, H, W) of a grey image or a palette as they are stored, and the largest of their bits.

    PIL spreads the numbers of PNG and PGM over 8 or 16 bits.
    """
    numbers, spread = np.asarray(image)[None], 65535 if image.mode[0] == "I" else 255
    most = spread
    if image.format == "PPM" and image.mode != "1":
        most = int(PGM_HEADER.match(data)[1])
    elif image.format == "PNG" and image.mode == "L":
        most = 2 ** data[PNG_BITS] - 1
    return numbers if most == spread else np.rint(numbers * (most / spread)).astype(numbers.dtype), most


def from_pil(image: Image.Image, config: ImagesConfig) -> NDArray:
    """The first frame of a PIL image, upright, (n, H, W): 8 bits of RGB or grey, or its bands, as the settings ask."""
    image.load()  # PIL turns a TIFF then, and forgets its orientation
    return turn_upright(stored_pixels(image, config), orientation_of(image))


def stored_pixels(image: Image.Image, config: ImagesConfig) -> NDArray:
    """The bands of a PIL image as in `from_pil`, in the orientation in which it is stored."""
    if image.mode.startswith("I"):
        return np.asarray(image)[None].astype(np.uint16)
    is_transparent = image.has_transparency_data
    if is_picture(config) and image.mode != "F":
        if is_transparent:
            image = image.convert("RGBA")
            if image.getextrema()[-1] != (0, 0):  # if nothing is opaque, colours stay: see `lay_on_white`
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if config.channels == 3 else "L")
    elif image.mode in ("P", "PA"):
        image = image.convert("RGBA" if is_transparent else "RGB")
    return bands_to_front(np.array(image))


def orientation_of(image: Image.Image) -> int:
    """The orientation that PIL finds in EXIF, anywhere in the file, or else in XMP, as PIL.ImageOps.exif_transpose."""
    try:
        return image.getexif().get(ORIENTATION_TAG, UPRIGHT)
    except Exception:  # a broken tag does not make the image unreadable
        return UPRIGHT


def read_ppm(data: bytes, config: ImagesConfig) -> Stored:
    """The pixels of a PPM file, (3, H, W). PIL takes fifty times as long."""
    header = PPM_HEADER.match(data)
    if header is None:
        return read_with_pil(data, config)
    width, height = map(int, header.groups())
    check_size((width, height), config)
    pixels = np.frombuffer(bytearray(data), np.uint8, offset=header.end(), count=3 * width * height)
    return Stored(pixels.reshape(height, width, 3).transpose(2, 0, 1))
