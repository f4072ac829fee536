"""Image files to the RGB a person sees, and crops of it: uint8 tensors (3, H, W) throughout."""

import io
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from mpp.config import DataConfig, sides
from mpp.errors import one_line
from mpp.runtime.randomness import Stream, random_words, uniform

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # torchvision 0.29 announces their removal: PIL then decodes JPEG too, more slowly
    decode_jpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of all that PIL knows: EPS runs a program
LONGEST = 16  # times the view's proportions: what of an image is resized for its centre crop
Size = int | tuple[int, int]  # a side, or height and width
PIXELS = re.compile(rb"P6\n(\d+) (\d+)\n255\n")  # the header of a PPM file as PIL and mpp.prepare write it
Image.MAX_IMAGE_PIXELS = None  # data.max_pixels is the limit, from the header too
CROP_ATTEMPTS = 10  # as torchvision's RandomResizedCrop


class UnreadableImage(Exception):
    """The bytes are no image that can be shown."""


def decode(data: bytes, max_pixels: int) -> Tensor:
    """The first frame of an image file, upright and as RGB.

    Greyscale, palette, CMYK and YCbCr are converted; 16 bits are scaled to 8; transparency is laid on white; the EXIF
    orientation is applied.

    Args:
        data: a file of one of FORMATS.
        max_pixels: files whose header announces more are refused before they are decoded.
    Returns:
        (3, H, W) uint8.
    Raises:
        UnreadableImage: with the reason.
    """
    try:
        if header := PIXELS.match(data):
            return decode_ppm(data, header, max_pixels)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_size(*image.size, max_pixels)
            if decode_jpeg and image.format == "JPEG" and image.mode in ("L", "RGB"):
                encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                return decode_jpeg(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
            return torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1)
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("no image file of a known sort") from None
    except Exception as error:  # decoders raise whatever they like on broken files: no sort of it may end a run
        raise UnreadableImage(f"{type(error).__name__}: {one_line(error)}") from error


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image by its header."""
    if width * height > max_pixels:
        raise UnreadableImage(f"{width} x {height} pixels are more than data.max_pixels ({max_pixels})")


def decode_ppm(data: bytes, header: re.Match[bytes], max_pixels: int) -> Tensor:
    """Pixels that are in a file as they are, (3, H, W) uint8: nothing to decode. PIL takes fifty times as long."""
    width, height = map(int, header.groups())
    check_size(width, height, max_pixels)
    pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header.end(), count=3 * width * height)
    return pixels.view(height, width, 3).permute(2, 0, 1)


def to_ppm(pixels: Tensor) -> bytes:
    """(3, H, W) uint8 as a PPM file."""
    height, width = pixels.shape[1:]
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.permute(1, 2, 0).numpy().tobytes()


def to_rgb(image: Image.Image) -> Image.Image:
    """A PIL image of any mode as RGB: see `decode`."""
    image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = from_integers(np.asarray(image))
    elif image.mode == "F":
        raise UnreadableImage("floating-point pixels have no agreed range")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def from_integers(pixels: np.ndarray) -> Image.Image:
    """16-bit greyscale (H, W), which some decoders widen to 32, scaled to 8 bits."""
    if pixels.min() < 0 or pixels.max() > 65535:
        raise UnreadableImage("integer pixels outside 16 bits have no agreed range")
    return Image.fromarray(((pixels.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))


def random_crop(image: Tensor, size: Size, config: DataConfig, seed: int, epoch: int, index: int) -> Tensor:
    """The training crop: an inception crop resized to `size`, perhaps flipped; a function of (seed, epoch, index).

    As torchvision's RandomResizedCrop: area and (log) ratio are uniform in `crop_area` and `crop_ratio`, times the
    width / height of `size`; ten attempts, then the largest centre crop that the ratios allow.

    Args:
        image: (3, H, W) uint8.
        size: of the result, h x w.
    Returns:
        (3, h, w) uint8.
    """
    height, width = image.shape[-2:]
    size = sides(size)
    flip, *numbers = uniform(Stream.CROP, seed, epoch, index, 4 * CROP_ATTEMPTS + 1).tolist()
    top, left, crop_height, crop_width = crop_box(height, width, config, numbers, size[1] / size[0])
    crop = image[:, top : top + crop_height, left : left + crop_width]
    # as torchvision's resize, without its dispatch
    crop = F.interpolate(crop[None], size, mode="bilinear", antialias=True)[0]
    return crop.flip(-1) if config.flip and flip < 0.5 else crop


def augment(image: Tensor, magnitude: int, seed: int, epoch: int, index: int) -> Tensor:
    """RandAugment: torchvision's two random operations; a function of (magnitude, seed, epoch, index).

    Args:
        image: (3, H, W) uint8.
        magnitude: 1 to 30; 0 leaves the image as it is.
    Returns:
        (3, H, W) uint8.
    """
    return image if magnitude == 0 else transformed(rand_augment(magnitude), image, seed, epoch, index)


def transformed(transform: Callable[[Tensor], Tensor], image: Tensor, seed: int, epoch: int, index: int) -> Tensor:
    """What a random transform of torchvision's makes of an image, as a function of (seed, epoch, index)."""
    number = int(random_words(Stream.AUGMENT, seed, epoch, index, 1)[0] >> np.uint64(1))
    with torch.random.fork_rng(devices=[]):  # dropout, which may draw in this process, goes on as if nothing was drawn
        torch.default_generator.manual_seed(number)
        return transform(image)


@lru_cache
def rand_augment(magnitude: int) -> v2.RandAugment:
    """torchvision's transform."""
    return v2.RandAugment(magnitude=magnitude)


def crop_box(
    height: int, width: int, config: DataConfig, numbers: Sequence[float], proportion: float = 1.0
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the inception crop.

    Args:
        numbers: in [0, 1): area, ratio, top, left of each attempt.
        proportion: width / height where `crop_ratio` is 1.
    """
    low, high = config.crop_area
    slim, wide = map(math.log, config.crop_ratio)
    for attempt in range(0, len(numbers), 4):
        area, ratio, down, right = numbers[attempt : attempt + 4]
        area = height * width * (low + (high - low) * area)
        ratio = proportion * math.exp(slim + (wide - slim) * ratio)
        crop_height, crop_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 1 <= crop_height <= height and 1 <= crop_width <= width:
            return (
                int(down * (height - crop_height + 1)),
                int(right * (width - crop_width + 1)),
                crop_height,
                crop_width,
            )
    crop_width = max(1, min(width, round(height * proportion * config.crop_ratio[1])))
    crop_height = max(1, min(height, round(width / (proportion * config.crop_ratio[0]))))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def centre_crop(image: Tensor, size: Size, share: float) -> Tensor:
    """The held-out view: resized to cover size / share, then the centre; (3, H, W) to (3, h, w)."""
    height, width = image.shape[-2:]
    size = sides(size)
    most = max(1, LONGEST * height * size[1] // size[0]), max(1, LONGEST * width * size[0] // size[1])  # width, height
    if (
        width > most[0] or height > most[1]
    ):  # a line of pixels would become gigabytes, of which the crop shows the middle
        image = functional.center_crop(image, [min(height, most[1]), min(width, most[0])])
        height, width = image.shape[-2:]
    if height * size[1] <= width * size[0]:  # it is wider than the view
        rows = max(size[0], round(size[0] / share))
        covering = [rows, int(rows * width / height)]
    else:
        columns = max(size[1], round(size[1] / share))
        covering = [int(columns * height / width), columns]
    return functional.center_crop(functional.resize(image, covering, antialias=True), list(size))
