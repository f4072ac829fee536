"""Kinds of content that is read from an image file: a picture, its bands or a mask."""

from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpp.config import ImagesConfig


class Wanted(Enum):
    """The content that is read from an image file."""

    PICTURE = "RGB or grey, as a viewer shows the file"
    BANDS = "all bands, with the values that are stored"
    MASK = "one whole number a pixel, as it is stored"


def wanted_by(config: ImagesConfig) -> Wanted:
    """PICTURE for 1 or 3 channels, unless the settings choose bands; else BANDS."""
    if config.bands is None and config.channels in (1, 3):
        return Wanted.PICTURE
    return Wanted.BANDS


Limits = tuple[float, float]
"""LOW and HIGH of values."""


class StoredPixels(NamedTuple):
    """The values of an image, with the type that the file has."""

    pixels: NDArray
    """(n, H, W), upright."""
    inverted: Limits | None = None
    """Limits of values that run from white to black, and are still to be inverted. None: low values are black."""
    limits: Limits | None = None
    """Values that become 0 and 255 where `data.range` names none. None: those of the type."""
    window: Limits | None = None
    """Values that become 0 and 255 where `data.range` is window. None: the file has none."""
    nodata: float | None = None
    """The value, in all bands, of pixels without a value, where the file says so."""
    missing: NDArray[np.bool_] | None = None
    """(H, W), pixels that had no value and were filled. None: all had one."""
