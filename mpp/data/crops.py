"""Crops of images, (C, H, W) throughout: uint8 stays uint8, and float32 in [0, 255] stays that."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from mpp.config import DataConfig, ImageSize, resized_side, sides
from mpp.runtime.randomness import Stream, random_words, uniform

LONGEST = 16  # times the view's proportions: what of an image is resized for its centre crop
CROP_ATTEMPTS = 10  # as torchvision's RandomResizedCrop

rand_augment = lru_cache(v2.RandAugment)


def random_crop(image: Tensor, size: int | ImageSize, config: DataConfig, seed: int, epoch: int, index: int) -> Tensor:
    """The training crop: an inception crop resized to `size`, perhaps flipped; a function of (seed, epoch, index).

    As torchvision's RandomResizedCrop: area and (log) ratio are uniform in `crop_area` and `crop_ratio`, times the
    width / height of `size`; ten attempts, then the largest centre crop that the ratios allow.

    Args:
        image: (C, H, W).
        size: of the result, h x w.
    Returns:
        (C, h, w).
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
        image: (3, H, W); what has more than 8 bits is rounded.
        magnitude: 1 to 30; 0 leaves the image as it is.
    Returns:
        (3, H, W) uint8.
    """
    if magnitude == 0:
        return image
    return transformed(rand_augment(magnitude=magnitude), to_8_bits(image), seed, epoch, index)


def to_8_bits(image: Tensor) -> Tensor:
    """Pixels from 0 to 255 as uint8, rounded."""
    return image if image.dtype == torch.uint8 else image.round().clamp(0, 255).to(torch.uint8)


def transformed(transform: Callable[[Tensor], Tensor], image: Tensor, seed: int, epoch: int, index: int) -> Tensor:
    """What a random transform of torchvision's makes of an image, as a function of (seed, epoch, index)."""
    number = int(random_words(Stream.AUGMENT, seed, epoch, index, 1)[0] >> np.uint64(1))
    with torch.random.fork_rng(devices=[]):  # dropout, which may draw in this process, goes on as if nothing was drawn
        torch.default_generator.manual_seed(number)
        return transform(image)


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
            top, left = int(down * (height - crop_height + 1)), int(right * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    crop_width = max(1, min(width, round(height * proportion * config.crop_ratio[1])))
    crop_height = max(1, min(height, round(width / (proportion * config.crop_ratio[0]))))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def centre_crop(image: Tensor, size: int | ImageSize, share: float, nearest: bool = False) -> Tensor:
    """The held-out view: resized to cover size / share, then the centre; (C, H, W) to (C, h, w).

    Args:
        nearest: of a mask, whose numbers are classes: each pixel is one of the image's.
    """
    height, width = image.shape[-2:]
    size = sides(size)
    most = max(1, LONGEST * height * size[1] // size[0]), max(1, LONGEST * width * size[0] // size[1])  # width, height
    if width > most[0] or height > most[1]:  # a line of pixels would become gigabytes; the crop shows its middle
        image = functional.center_crop(image, [min(height, most[1]), min(width, most[0])])
        height, width = image.shape[-2:]
    how = dict(interpolation=v2.InterpolationMode.NEAREST_EXACT) if nearest else dict(antialias=True)
    resized = functional.resize(image, covering_size(height, width, size, share), **how)
    return functional.center_crop(resized, list(size))


def covering_size(height: int, width: int, size: tuple[int, int], share: float) -> list[int]:
    """Height and width to which an image is resized in its proportions, so that it covers `size` / `share`.

    Of an oblong view they are timm's. Of a square the shorter side is rounded to the nearest, where timm rounds it
    down: published results have it so, and exported encoders the `timm_crop_pct` with which timm does the same.
    """
    if size[0] == size[1]:
        side = resized_side(size[0], share)
        return [side, int(side * width / height)] if height <= width else [int(side * height / width), side]
    rows, columns = (math.floor(side / share) for side in size)
    reduction = min(height / rows, width / columns)
    return [round(height / reduction), round(width / reduction)]
