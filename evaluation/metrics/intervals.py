"""95 % intervals over test images, from a score of every image whose mean is the figure: see figures.py.

They say how far a figure would move with other test images of the same kind. They know nothing of another seed of the
training, and take images for independent. M images.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit  # quantiles of Student's distribution

Z = 1.959963984540054  # of 95 %: the normal distribution's quantile at 0.975
TINY = 1e-9  # of an error that is 0 but for rounding
ADDED = 2.0  # images of which one encoder is right, each in turn, or both, or none, half an image each

Interval = tuple[float, float]
"""Lower and upper end."""


def wilson(right: float, count: float) -> Interval:
    """Wilson's score interval of a share (Wilson, 1927).

    Args:
        right: number of images that are right; of a mean over seeds, their mean number.
        count: number of images, at least one; perhaps an effective number, with a fraction.
    """
    share = right / count
    denominator = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / denominator
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def interval(scores: NDArray[np.float64], is_share: bool, count: float | None = None) -> Interval:
    """Of a share Wilson's, for as many images as have the variance of its scores; of any other figure Student's.

    For accuracy these are all images. Where they are more, the variance is known by few images: see `widening`.

    Args:
        scores: (M,), whose mean is the figure; NaN: it is not known, nor is its interval.
        count: number of images that the variance is known by. None: all.
    """
    value, count = float(scores.mean()), count or len(scores)
    if not math.isfinite(value):
        return math.nan, math.nan
    error = float(scores.std()) / math.sqrt(len(scores))
    if not is_share:
        half = Z * widening(count) * error
        return value - half, value + half
    value = min(max(value, 0.0), 1.0)  # rounding
    images = value * (1 - value) / error**2 if error > TINY else count
    if images > count:
        images = max(count, images / widening(count) ** 2)
    images = max(1.0, images)
    return wilson(value * images, images)


def widening(count: float) -> float:
    """The factor of an interval by the standard deviation of so many images: Student's."""
    freedom = max(1.0, count - 1)
    return float(stdtrit(freedom, 0.975)) / Z * math.sqrt(count / freedom)


class Difference(NamedTuple):
    """A difference of two figures of the same images."""

    value: float
    interval: Interval
    images: int

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        low, high = self.interval
        return low > 0 or high < 0


def paired(one: NDArray[np.float64], other: NDArray[np.float64], is_share: bool = True) -> Difference:
    """The figure of one encoder minus that of another, of the same images.

    Of a share, images are added as Agresti and Min (2005) do, which makes the interval hold for few images, too.

    Args:
        one, other: (M,) scores of the images in the same order; of several seeds their means.
    """
    gains = one - other
    value, count = float(gains.mean()), len(gains)
    if not is_share:
        return Difference(value, interval(gains, is_share), count)
    centre = float(gains.sum()) / (count + ADDED)
    variance = (float(np.square(gains).sum()) + ADDED / 2) / (count + ADDED) - centre**2
    half = float(stdtrit(count + 1, 0.975)) * math.sqrt(variance / (count + ADDED))
    ends = max(-1.0, min(value, centre - half)), min(1.0, max(value, centre + half))
    return Difference(value, ends, count)
