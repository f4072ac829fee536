"""Bands of any number and type to the channels that the settings ask for, with a value everywhere, from 0 to 255."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.data.decoding.checks import check_numbers
from mpp.errors import UnreadableImage

LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114])  # of red, green and blue in grey: ITU-R 601, as PIL has it


def bands_first(pixels: NDArray, config: ImagesConfig) -> NDArray:
    """(H, W), (H, W, bands) or (bands, H, W) to (bands, H, W).

    Bands are the first or the last side: the one that has as many as are asked for, or that is left by a square, or the
    shorter one; the last where both do.
    """
    if pixels.ndim == 2:
        return pixels[None]
    if pixels.ndim != 3:
        raise UnreadableImage(f"an array of shape {pixels.shape}, not an image (H, W, bands) or (bands, H, W)")
    first, middle, last = pixels.shape
    expected = None if config.bands else config.channels
    last_is_left = first == middle or (middle != last and last <= first)
    are_last = last == expected or (first != expected and last_is_left)
    return pixels.transpose(2, 0, 1) if are_last else pixels


def bands_to_front(pixels: NDArray) -> NDArray:
    """(H, W) or (H, W, bands) to (bands, H, W)."""
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def select_channels(
    pixels: NDArray, config: ImagesConfig, nodata_of_file: float | None = None
) -> tuple[NDArray, NDArray[np.bool_] | None]:
    """The channels (C, H, W) that the settings ask for, of bands (n, H, W), with a value everywhere.

    Args:
        nodata_of_file: counts where `data.nodata` is null.
    Returns:
        The channels; and where all of them were missing, (H, W), or None: nothing was.
    """
    check_numbers(pixels.dtype)
    if pixels.dtype == bool:
        pixels = pixels.astype(np.uint8) * 255
    if config.bands:
        if max(config.bands) > len(pixels):
            raise UnreadableImage(f"{count_bands(pixels)}; data.bands asks for {max(config.bands)}")
        pixels = pixels[[band - 1 for band in config.bands]]
    missing = find_missing(pixels, config.nodata, nodata_of_file)
    check_finite(pixels, missing)
    if not missing.any():
        return convert_channels(pixels, config.channels), None
    return convert_channels(fill_with_means(pixels, missing), config.channels), missing.all(0)


def count_bands(pixels: NDArray) -> str:
    """The number of bands in words: "1 band", "3 bands"."""
    return "1 band" if len(pixels) == 1 else f"{len(pixels)} bands"


def convert_channels(pixels: NDArray, channels: int) -> NDArray:
    """(n, H, W) to (C, H, W): the same number, or grey and RGB to each other."""
    count = len(pixels)
    if count == channels:
        return pixels
    if (count, channels) == (1, 3):
        return pixels.repeat(3, 0)
    if (count, channels) == (3, 1):
        grey = np.tensordot(LUMA_WEIGHTS, pixels, 1)[None]
        if pixels.dtype.kind != "f":
            grey = grey.round()
        return grey.astype(pixels.dtype)
    raise UnreadableImage(f"{count_bands(pixels)}; data.channels is {channels}, and data.bands can choose {channels}")


def find_missing(pixels: NDArray, nodata: float | str | None, nodata_of_file: float | None = None) -> NDArray[np.bool_]:
    """Mask of missing values in pixels (C, H, W), (C, H, W); or (1, 1, 1) if none can be missing.

    Args:
        nodata: the value of each channel's missing values; those that are not finite are missing, too. None: a pixel
            is missing if all its channels have the file's value. A single channel may have it by chance: the blue of
            a yellow flower is 0.
    """
    if nodata is not None:
        missing = ~np.isfinite(pixels)
        return missing if nodata == "nan" else missing | (pixels == nodata)
    if nodata_of_file is not None:
        is_nodata = np.isnan(pixels) if np.isnan(nodata_of_file) else pixels == nodata_of_file
        return np.broadcast_to(is_nodata.all(0), pixels.shape)
    return np.zeros((1, 1, 1), bool)


def check_finite(pixels: NDArray, missing: NDArray[np.bool_]) -> None:
    """Refuse values (C, H, W) that are not finite and do not count as missing."""
    if pixels.dtype.kind != "f":
        return
    is_wrong = ~np.isfinite(pixels) & ~missing
    if is_wrong.any():
        channel = np.flatnonzero(is_wrong.any((1, 2)))[0] + 1
        raise UnreadableImage(f"values that are not finite in channel {channel}; data.nodata nan gives them the mean")


def fill_with_means(pixels: NDArray, missing: NDArray[np.bool_]) -> NDArray:
    """Pixels (C, H, W) with the mean of their channel where values are missing, (C, H, W)."""
    pixels = pixels.copy()
    for number, (channel, is_missing) in enumerate(zip(pixels, missing, strict=True), start=1):
        if is_missing.all():
            raise UnreadableImage(f"no value in channel {number}")
        mean = channel[~is_missing].mean(dtype=np.float64)
        channel[is_missing] = mean if channel.dtype.kind == "f" else np.rint(mean)
    return pixels


def scale_to_255(pixels: NDArray, limits: Sequence[tuple[float, float]]) -> Tensor:
    """Values (C, H, W) of any type to [0, 255].

    Args:
        limits: the values that become 0 and 255, for all channels or each: see `data.range`. Empty: the type's.
    """
    if pixels.dtype == np.uint8 and all(tuple(pair) == (0, 255) for pair in limits):
        runs_backwards = min(pixels.strides) < 0  # which torch does not take
        return torch.from_numpy(pixels.copy() if runs_backwards else pixels)
    if not limits:
        if pixels.dtype.kind == "f" or pixels.dtype.itemsize > 2:
            raise UnreadableImage(f"{pixels.dtype} values have no agreed range; data.range says which")
        limits = [(np.iinfo(pixels.dtype).min, np.iinfo(pixels.dtype).max)]
    exact_type = np.float32 if pixels.dtype.itemsize <= 2 else np.float64  # 255 x 65535 is below 2**24
    low, high = lows_and_highs(limits, exact_type)
    values = (pixels.astype(exact_type) - low) * 255 / (high - low)
    clipped = np.clip(values, 0, 255)
    return torch.from_numpy(clipped.astype(np.float32, copy=False))


def invert(pixels: NDArray, limits: Sequence[tuple[float, float]]) -> NDArray:
    """Values (C, H, W) that run from white to black, from black to white; limits as in `scale_to_255`.

    Returns:
        The same type; float32 where integers beyond it, or fractions, lie within the limits.
    """
    low, high = lows_and_highs(limits, np.float64)
    inverted = low + high - pixels
    if pixels.dtype.kind == "f":
        return inverted.astype(pixels.dtype)
    least, most = np.iinfo(pixels.dtype).min, np.iinfo(pixels.dtype).max
    inverted = np.clip(inverted, np.minimum(low, least), np.maximum(high, most))
    fits = least <= inverted.min() and inverted.max() <= most and not (inverted % 1).any()
    return inverted.astype(pixels.dtype if fits else np.float32)


def lows_and_highs(limits: Sequence[tuple[float, float]], dtype: type[np.floating]) -> tuple[NDArray, NDArray]:
    """The lower and the upper limits, (C, 1, 1) or (1, 1, 1) each."""
    pairs = np.array(limits, dtype)[..., None, None]
    return pairs[:, 0], pairs[:, 1]


def lay_on_white(
    pixels: NDArray, white_is_most: bool = True, premultiplied: bool = False, most: int | None = None
) -> NDArray:
    """Integers (n + 1, H, W), the last of which is opacity, laid on white: (n, H, W).

    Args:
        white_is_most: whether white is the largest value, else 0.
        premultiplied: whether the values are multiplied by the opacity already.
        most: the largest value. None: that of the type.
    """
    if pixels.dtype.kind == "f":
        raise UnreadableImage("opacity of floating-point pixels has no agreed range; data.bands chooses the others")
    values = pixels[:-1]
    if not pixels[-1].any():  # some programs write zeros where there is no opacity: all would be white
        return values
    most = np.iinfo(pixels.dtype).max if most is None else most
    opacity = pixels[-1] / most
    if not premultiplied:
        values = values * opacity
    if white_is_most:
        values = values + most * (1 - opacity)
    return np.rint(np.minimum(values, most)).astype(pixels.dtype)
