"""Values of any bands and type to the channels that the settings ask for, with a value everywhere, from 0 to 255."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.errors import UnreadableImage

BANDS_PER_PIXEL = 4  # bands that count as one pixel of data.max_pixels
LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114])  # of red, green and blue in grey: ITU-R 601, as PIL has it
UPRIGHT = 1
Limits = tuple[float, float]
"""LOW and HIGH of values."""


class Stored(NamedTuple):
    """The values of an image as its file stores them, and the file's words about them."""

    values: NDArray
    """(n, H, W), upright."""
    limits: Limits | None = None
    """Values that become 0 and 255 where `data.range` has no numbers. None: those of the type."""
    nodata: float | None = None
    """Value, in all bands, of pixels without a value."""
    is_inverted: bool = False
    """Whether low values are white."""


def is_picture(config: ImagesConfig) -> bool:
    """Whether images become RGB or grey, as a viewer shows them; else they have bands, as they are stored."""
    return config.bands is None and config.channels in (1, 3)


def check_size(shape: Sequence[int], config: ImagesConfig) -> None:
    """Refuse an image that is empty or larger than `data.max_pixels`.

    Args:
        shape: height, width and bands, in any order.
    """
    if 0 in shape:
        raise UnreadableImage("no pixels")
    *bands, width, height = sorted((1, *shape))
    if width * height * math.ceil(math.prod(bands) / BANDS_PER_PIXEL) > config.max_pixels:
        size = " x ".join(map(str, shape))
        raise UnreadableImage(f"{size} pixels are more than data.max_pixels ({config.max_pixels})")


def turn_upright(values: NDArray, orientation: int) -> NDArray:
    """Values (n, H, W), stored in this orientation, upright; unchanged if it is none of 1 to 8. A view."""
    if orientation in (5, 6, 7, 8):
        values = values.swapaxes(1, 2)
    if orientation in (2, 3, 6, 7):
        values = values[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        values = values[:, ::-1]
    return values


def bands_to_front(values: NDArray) -> NDArray:
    """(H, W) or (H, W, bands) to (bands, H, W)."""
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)


def limits_of_bits(bits: int, is_signed: bool = False) -> Limits:
    """The smallest and the largest whole number of so many bits."""
    low = -(2 ** (bits - 1)) if is_signed else 0
    return low, low + 2**bits - 1


def lay_on_white(values: NDArray, most: float, premultiplied: bool = False, white: float | None = None) -> NDArray:
    """Integers (n + 1, H, W), the last of which is opacity, laid on white: (n, H, W).

    Args:
        most: the largest value, of full opacity.
        premultiplied: whether the values are multiplied by the opacity already.
        white: its value. None: the largest.
    """
    if values.dtype.kind == "f":
        raise UnreadableImage("opacity of floating-point pixels has no agreed range; data.bands chooses the others")
    *_, opacity = values
    if not opacity.any():  # some programs write zeros where there is no opacity: all would be white
        return values[:-1]
    share = opacity / most
    colours = values[:-1] if premultiplied else values[:-1] * share
    on_white = colours + (most if white is None else white) * (1 - share)
    return np.rint(np.minimum(on_white, most)).astype(values.dtype)


def to_pixels(stored: Stored, config: ImagesConfig) -> Tensor:
    """The pixels of an image: see `mpp.data.decoding.decode.decode`."""
    values = select_channels(stored, config)
    pixels = scale_to_255(values, limits_of(stored, config))
    return 255 - pixels if stored.is_inverted else pixels


def limits_of(stored: Stored, config: ImagesConfig) -> Sequence[Limits]:
    """The values that become 0 and 255, for all channels or each: of the settings, else of the file, else of its type.

    Raises:
        UnreadableImage: none of them says it.
    """
    limits = config.limits() or (stored.limits and [stored.limits])
    if limits:
        return limits
    dtype = stored.values.dtype
    if dtype.kind == "f" or dtype.itemsize > 2:
        raise UnreadableImage(f"{dtype} values have no agreed range; data.range says which")
    return [limits_of_bits(8 * dtype.itemsize, dtype.kind == "i")]


def select_channels(stored: Stored, config: ImagesConfig) -> NDArray:
    """The channels (C, H, W) that the settings ask for, with a value everywhere."""
    values = stored.values
    if values.dtype == bool:
        values = values.astype(np.uint8) * 255
    if config.bands:
        if max(config.bands) > len(values):
            raise UnreadableImage(f"{len(values)} bands; data.bands asks for {max(config.bands)}")
        values = values[[band - 1 for band in config.bands]]
    missing = find_missing(values, config.nodata, stored.nodata)
    if missing is not None:
        values = fill(values, missing)
    return convert_channels(values, config.channels)


def fill(values: NDArray, missing: NDArray[np.bool_]) -> NDArray:
    """Values (n, H, W) with the mean of their channel where they are missing, (n, H, W)."""
    if missing.all((1, 2)).any():
        raise UnreadableImage("a channel without any value")
    means = np.mean(values, (1, 2), np.float64, keepdims=True, where=~missing)
    if values.dtype.kind != "f":
        means = np.rint(means)
    return np.where(missing, means, values).astype(values.dtype)


def find_missing(values: NDArray, nodata: float | str | None, nodata_of_file: float | None) -> NDArray[np.bool_] | None:
    """Mask of missing values in values (C, H, W), (C, H, W); None: none can be missing.

    Args:
        nodata: the value of each channel's missing values; those that are not finite are missing, too. None: a pixel
            is missing if all its channels have the file's value. A single channel may have it by chance: the blue of
            a yellow flower is 0.
    """
    if nodata is not None:
        return ~np.isfinite(values) | (values == float(nodata))
    missing = None
    if nodata_of_file is not None:
        has_nodata = np.isnan(values) if np.isnan(nodata_of_file) else values == nodata_of_file
        missing = np.broadcast_to(has_nodata.all(0), values.shape)
    if values.dtype.kind == "f":
        is_known = np.isfinite(values) if missing is None else np.isfinite(values) | missing
        if not is_known.all():
            raise UnreadableImage("values that are not finite; data.nodata nan gives them the mean")
    return missing


def convert_channels(values: NDArray, channels: int) -> NDArray:
    """(n, H, W) to (C, H, W): the same number, or grey and RGB to each other."""
    if len(values) == channels:
        return values
    if (len(values), channels) == (1, 3):
        return values.repeat(3, 0)
    if (len(values), channels) == (3, 1):
        grey = np.tensordot(LUMA_WEIGHTS, values, 1)[None]
        if values.dtype.kind != "f":
            grey = grey.round()
        return grey.astype(values.dtype)
    raise UnreadableImage(f"{len(values)} bands; data.channels is {channels}, and data.bands can choose {channels}")


def scale_to_255(values: NDArray, limits: Sequence[Limits]) -> Tensor:
    """Values (C, H, W) of any type to [0, 255].

    Args:
        limits: the values that become 0 and 255, for all channels or each.
    """
    if values.dtype == np.uint8 and all(tuple(pair) == (0, 255) for pair in limits):
        runs_backwards = min(values.strides) < 0  # which torch does not take
        return torch.from_numpy(values.copy() if runs_backwards else values)
    exact_type = np.float32 if values.dtype.itemsize <= 2 else np.float64  # 255 x 65535 is below 2**24
    pairs = np.array(limits, exact_type)[..., None, None]  # (C, 2, 1, 1) or (1, 2, 1, 1)
    low, high = pairs[:, 0], pairs[:, 1]
    scaled = (values.astype(exact_type) - low) * 255 / (high - low)
    return torch.from_numpy(np.clip(scaled, 0, 255).astype(np.float32, copy=False))
