"""Bands of any number and type to the channels that the settings ask for, with a value everywhere, from 0 to 255."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.errors import UnreadableImage

LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue in grey: ITU-R 601, as PIL has it


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
    """A number of bands in words: "1 band", "3 bands"."""
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


def black_is_zero(pixels: NDArray, limits: Sequence[tuple[float, float]]) -> NDArray:
    """Integers (C, H, W) from white to black, from black to white; limits: see `data.range`."""
    low, high = (np.array(ends, np.float64)[:, None, None] for ends in zip(*limits, strict=True))
    return np.clip(low + high - pixels, 0, np.iinfo(pixels.dtype).max).astype(pixels.dtype)


def on_white(pixels: NDArray, white_is_most: bool = True, premultiplied: bool = False) -> NDArray:
    """Integers (n + 1, H, W), the last of which is opacity (that may be in the others already), laid on white."""
    if pixels.dtype.kind == "f":
        raise UnreadableImage("opacity of floating-point pixels has no agreed range; data.bands chooses the others")
    if not pixels[-1].any():  # some programs write zeros where there is no opacity: all would be white
        return pixels[:-1]
    most = np.iinfo(pixels.dtype).max
    opacity = pixels[-1] / most
    laid = pixels[:-1] * (1 if premultiplied else opacity) + white_is_most * most * (1 - opacity)
    return np.rint(np.minimum(laid, most)).astype(pixels.dtype)


def check_numbers(dtype: np.dtype) -> None:
    """Refuse what is no number, such as objects, which could run code."""
    if dtype.kind not in "uifb":
        raise UnreadableImage(f"{dtype} values, which are no integers or floating-point numbers")
