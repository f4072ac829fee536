"""Image files that PIL reads, and faster or deeper readers for some: JPEG by torchvision, PPM, PNG of 16 bits."""

import re

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.data.decoding.channels import bands_to_front, lay_on_white
from mpp.data.decoding.checks import check_size, refuse_lossy_mask
from mpp.data.decoding.opening import open_with_pil
from mpp.data.decoding.orientation import pil_orientation, png_orientation, turn_upright
from mpp.data.decoding.wanted import Wanted, wanted_by
from mpp.errors import UnreadableImage

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # torchvision 0.29 announces their removal: PIL then decodes JPEG too, more slowly
    decode_jpeg = None

PPM_HEADER = re.compile(rb"P6\n(\d+) (\d+)\n255\n")  # as PIL and `to_ppm` write it
DEEP_PNG_HEADER = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR(....)(....)\x10[\x02\x04\x06]", re.DOTALL)
"""Of a PNG of 16 bits and several bands, of which PIL would read 8 bits."""
WHOLE_NUMBER_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")  # of PIL, with one number a pixel
TRANSPARENT_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


def read_with_pil(data: bytes, wanted: Wanted, config: ImagesConfig) -> NDArray:
    """The first frame of an image file, upright, (n, H, W): see `from_pil` for pictures and bands."""
    with open_with_pil(data) as image:
        check_size(image.size, config)
        if wanted is Wanted.MASK:
            return mask_numbers(image)
        is_plain_jpeg = image.format == "JPEG" and image.mode in ("L", "RGB")
        if decode_jpeg and is_plain_jpeg and wanted is Wanted.PICTURE:
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            mode = ImageReadMode.RGB if config.channels == 3 else ImageReadMode.GRAY
            pixels = decode_jpeg(encoded, mode=mode).numpy()  # it finds an orientation in the first segment only
            return turn_upright(pixels, pil_orientation(image))
        return from_pil(image, config)


def mask_numbers(image: Image.Image) -> NDArray:
    """The whole numbers, or the indices of the palette, (1, H, W), upright."""
    if image.format in ("JPEG", "MPO"):
        refuse_lossy_mask("compressed as JPEG")
    if image.mode not in WHOLE_NUMBER_MODES:
        content = "floating-point numbers" if image.mode == "F" else f"colours ({image.mode})"
        raise UnreadableImage(f"it has {content}; a mask has one whole number a pixel")
    image.load()
    return turn_upright(np.asarray(image)[None], pil_orientation(image))


def from_pil(image: Image.Image, config: ImagesConfig) -> NDArray:
    """The first frame of a PIL image, upright, (n, H, W): 8 bits of RGB or grey, or its bands, as the settings ask."""
    image.seek(0)
    image.load()  # PIL turns a TIFF then, and forgets its orientation
    return turn_upright(stored_pixels(image, config), pil_orientation(image))


def stored_pixels(image: Image.Image, config: ImagesConfig) -> NDArray:
    """The bands of a PIL image as in `from_pil`, in the orientation in which it is stored."""
    if image.mode.startswith("I"):
        return to_16_bits(np.asarray(image))[None]
    transparent = "transparency" in image.info or image.mode in TRANSPARENT_MODES
    if wanted_by(config) is Wanted.PICTURE and image.mode != "F":
        if transparent:
            image = image.convert("RGBA")
            if image.getextrema()[-1] != (0, 0):  # if nothing is opaque, colours stay: see `lay_on_white`
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if config.channels == 3 else "L")
    elif image.mode == "1":
        image = image.convert("L")
    elif image.mode in ("P", "PA"):
        image = image.convert("RGBA" if transparent else "RGB")
    return bands_to_front(np.array(image))


def to_16_bits(pixels: NDArray) -> NDArray[np.uint16]:
    """16-bit greyscale (H, W), which some versions of PIL widen to 32 bits."""
    if pixels.min() < 0 or pixels.max() > 65535:
        raise UnreadableImage("integer pixels outside 16 bits have no agreed range")
    return pixels.astype(np.uint16)


def read_deep_png(data: bytes, header: re.Match[bytes], config: ImagesConfig) -> NDArray:
    """A PNG of 16 bits and several bands, (bands, H, W)."""
    size = [int.from_bytes(side, "big") for side in header.groups()]
    check_size(size, config)
    from imagecodecs import png_decode  # takes a fifth of a second

    pixels = turn_upright(png_decode(data).transpose(2, 0, 1), png_orientation(data))
    has_opacity = len(pixels) in (2, 4)
    if has_opacity and wanted_by(config) is Wanted.PICTURE:
        return lay_on_white(pixels)
    return pixels


def read_ppm(data: bytes, header: re.Match[bytes], config: ImagesConfig) -> NDArray[np.uint8]:
    """The pixels of a PPM file, (3, H, W), as they are stored. PIL takes fifty times as long."""
    width, height = map(int, header.groups())
    check_size((width, height), config)
    pixels = np.frombuffer(bytearray(data), np.uint8, offset=header.end(), count=3 * width * height)
    return pixels.reshape(height, width, 3).transpose(2, 0, 1)


def to_ppm(pixels: Tensor) -> bytes:
    """(3, H, W) uint8 as a PPM file."""
    height, width = pixels.shape[1:]
    header = b"P6\n%d %d\n255\n" % (width, height)
    return header + pixels.permute(1, 2, 0).numpy().tobytes()
