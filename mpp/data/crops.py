"""Crops of images (C, H, W): uint8 stays uint8, and float32 from 0 to 255 stays float32."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from mpp.config import DataConfig, ImageSize, resized_side, sides
from mpp.runtime.randomness import Stream, random_words, uniform

MAX_RELATIVE_ASPECT = 16  # relative to the view; a longer image is cut before it is resized
CROP_ATTEMPTS = 10  # as torchvision's RandomResizedCrop

rand_augment = lru_cache(v2.RandAugment)


class CropBox(NamedTuple):
    """A rectangle in an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_crop(image: Tensor, size: int | ImageSize, config: DataConfig, seed: int, epoch: int, index: int) -> Tensor:
    """Training crop: an inception crop resized to `size`, perhaps flipped; a function of (seed, epoch, index).

    As torchvision's RandomResizedCrop: area and (log) ratio are uniform in `crop_area` and `crop_ratio`, times the
    width / height of `size`; ten attempts, then the largest centre crop within the ratios.

    Args:
        image: (C, H, W).
        size: h x w of the result.
    Returns:
        (C, h, w).
    """
    height, width = image.shape[-2:]
    view_height, view_width = sides(size)
    flip_number, *box_numbers = uniform(Stream.CROP, seed, epoch, index, 4 * CROP_ATTEMPTS + 1).tolist()
    top, left, height, width = crop_box(height, width, config, box_numbers, view_width / view_height)
    crop = image[:, top : top + height, left : left + width]
    # torchvision's resize without its dispatch
    crop = F.interpolate(crop[None], (view_height, view_width), mode="bilinear", antialias=True)[0]
    if config.flip and flip_number < 0.5:
        return crop.flip(-1)
    return crop


def crop_box(height: int, width: int, config: DataConfig, numbers: Sequence[float], proportion: float = 1.0) -> CropBox:
    """The inception crop of an image of this height and width.

    Args:
        numbers: in [0, 1): area, ratio, top, left of each attempt.
        proportion: width / height where `crop_ratio` is 1.
    """
    least_area, most_area = config.crop_area
    slim, wide = config.crop_ratio
    log_slim = math.log(slim)
    log_wide = math.log(wide)
    for attempt in range(0, len(numbers), 4):
        area_number, ratio_number, top_number, left_number = numbers[attempt : attempt + 4]
        area_share = least_area + (most_area - least_area) * area_number
        area = height * width * area_share
        log_ratio = log_slim + (log_wide - log_slim) * ratio_number
        ratio = proportion * math.exp(log_ratio)
        crop_height = round(math.sqrt(area / ratio))
        crop_width = round(math.sqrt(area * ratio))
        if 1 <= crop_height <= height and 1 <= crop_width <= width:
            top = int(top_number * (height - crop_height + 1))
            left = int(left_number * (width - crop_width + 1))
            return CropBox(top, left, crop_height, crop_width)

    crop_width = max(1, min(width, round(height * proportion * wide)))
    crop_height = max(1, min(height, round(width / (proportion * slim))))
    top = (height - crop_height) // 2
    left = (width - crop_width) // 2
    return CropBox(top, left, crop_height, crop_width)


def augment(image: Tensor, magnitude: int, seed: int, epoch: int, index: int) -> Tensor:
    """RandAugment: torchvision's two random operations; a function of (magnitude, seed, epoch, index).

    Args:
        image: (3, H, W); pixels with more than 8 bits are rounded.
        magnitude: 1 to 30; 0 leaves the image unchanged.
    Returns:
        (3, H, W) uint8.
    """
    if magnitude == 0:
        return image
    return apply_random(rand_augment(magnitude=magnitude), to_8_bits(image), seed, epoch, index)


def apply_random(transform: Callable[[Tensor], Tensor], image: Tensor, seed: int, epoch: int, index: int) -> Tensor:
    """Apply a random transform of torchvision; a function of (seed, epoch, index)."""
    word = random_words(Stream.AUGMENT, seed, epoch, index, 1)[0]
    # The generator's state is restored afterwards: dropout may draw from it in this process.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(word >> np.uint64(1)))
        return transform(image)


def to_8_bits(image: Tensor) -> Tensor:
    """Pixels from 0 to 255 as uint8, rounded."""
    if image.dtype == torch.uint8:
        return image
    return image.round().clamp(0, 255).to(torch.uint8)


def centre_crop(image: Tensor, size: int | ImageSize, share: float, nearest: bool = False) -> Tensor:
    """Fixed view: resized to cover size / share, then cut to the centre; (C, H, W) to (C, h, w).

    Args:
        nearest: take the nearest pixel instead of interpolating, for masks, whose pixels are class numbers.
    """
    size = sides(size)
    image = limit_aspect(image, size)
    height, width = image.shape[-2:]
    covering = covering_size(height, width, size, share)
    mode = v2.InterpolationMode.NEAREST_EXACT if nearest else v2.InterpolationMode.BILINEAR
    resized = functional.resize(image, covering, interpolation=mode, antialias=True)
    return functional.center_crop(resized, list(size))


def limit_aspect(image: Tensor, size: ImageSize) -> Tensor:
    """The middle of an image that is too long for its view: a line of pixels, resized, would take gigabytes."""
    height, width = image.shape[-2:]
    view_height, view_width = size
    max_width = max(1, MAX_RELATIVE_ASPECT * height * view_width // view_height)
    max_height = max(1, MAX_RELATIVE_ASPECT * width * view_height // view_width)
    return functional.center_crop(image, [min(height, max_height), min(width, max_width)])


def covering_size(height: int, width: int, size: ImageSize, share: float) -> list[int]:
    """Height and width of an image resized in its proportions to cover `size` / `share`.

    For an oblong view they are timm's. For a square view the shorter side is rounded to the nearest, where timm rounds
    it down: published results depend on it, and exported encoders have the `timm_crop_pct` that makes timm agree.
    """
    view_height, view_width = size
    if view_height == view_width:
        side = resized_side(view_height, share)
        if height <= width:
            return [side, int(side * width / height)]
        return [int(side * height / width), side]
    rows = math.floor(view_height / share)
    columns = math.floor(view_width / share)
    reduction = min(height / rows, width / columns)
    return [round(height / reduction), round(width / reduction)]
