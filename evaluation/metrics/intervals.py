"""95 % intervals of figures over test images: Wilson's of a share, and bootstraps of everything else.

They say how far a figure would move with other test images of the same kind. They know nothing of another seed of the
training, and take images for independent.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit  # quantiles of Student's distribution

Z = 1.959963984540054  # of 95 %: the normal distribution's quantile at 0.975
RESAMPLES = 200  # of a figure
PAIRED_RESAMPLES = 4000  # of a difference, which costs four numbers each
RESAMPLING_SEED = 0  # of all resamples: the same outcomes always have the same interval
PRIOR = 0.5  # images added to each count of a pair: with few images that differ, a plain bootstrap is too narrow

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


def bootstrap(value: float, resampled: NDArray[np.float64], count: int) -> Interval:
    """Percentile interval of a figure, widened for small samples: see `few_sample_widening`.

    Args:
        value: the figure of all images.
        resampled: (R,) the same figure of resamples; those that are NaN do not count.
    """
    known = resampled[np.isfinite(resampled)]
    if not len(known) or not math.isfinite(value):
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975])
    widening = few_sample_widening(count)
    return containing(value, (value + widening * (float(low) - value), value + widening * (float(high) - value)))


def containing(value: float, interval: Interval) -> Interval:
    """An interval, widened to its value where that is outside; as it is where one of them is not known (NaN).

    Resamples of few images may all be on one side of the value, and intervals of small samples are centred elsewhere.
    """
    if math.isnan(value + sum(interval)):
        return interval
    low, high = interval
    return min(low, value), max(high, value)


def clipped(interval: Interval, least: float = 0.0, most: float = 1.0) -> Interval:
    """An interval within the bounds of its figure: few images widen it beyond."""
    low, high = interval
    return (low if math.isnan(low) else max(least, low)), (high if math.isnan(high) else min(most, high))


def bootstrap_of_share(value: float, resampled: NDArray[np.float64], count: float, most: float) -> Interval:
    """Wilson's interval with as many independent images as a bootstrap's variance is of.

    Its centre is the value less the bias that the bootstrap shows. It stays in [0, 1], is skewed near these ends, and
    has a width even where all resamples are equal.

    Args:
        value, resampled: as of `bootstrap`.
        count: draws that the variance is known by, as of `few_sample_widening`.
        most: most independent images that are believed.
    """
    known = resampled[np.isfinite(resampled)]
    if not len(known) or not math.isfinite(value):
        return math.nan, math.nan
    bias = float(known.mean()) - value
    centre = min(max(value - bias, 0.0), 1.0)
    variance = (few_sample_widening(count) * float(known.std())) ** 2
    independent = most
    if variance > 0:
        independent = min(most, max(1.0, centre * (1 - centre) / variance))
    return wilson(centre * independent, independent)


def few_sample_widening(count: float) -> float:
    """Factor for the half-widths of a percentile interval of `count` draws (Hesterberg, 2015, section 5.3)."""
    degrees = max(1.0, count - 1)
    return float(stdtrit(degrees, 0.975)) / Z * math.sqrt(count / degrees)


def resamples(count: int) -> NDArray[np.int64]:
    """Images drawn with replacement: (RESAMPLES, count) indices."""
    return np.random.default_rng(RESAMPLING_SEED).integers(count, size=(RESAMPLES, count))


def drawn_weights(count: int) -> NDArray[np.int64]:
    """Number of times that each of `count` images is in each resample: (RESAMPLES, count)."""
    return np.stack([np.bincount(drawn, minlength=count) for drawn in resamples(count)])


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


def paired_accuracies(one_right: NDArray[np.bool_], other_right: NDArray[np.bool_]) -> Difference:
    """Accuracy of one minus that of the other, with a paired bootstrap over the images.

    A resample of images is a draw of four counts: both right, one of them right (two counts), none. PRIOR is added to
    each, as Agresti and Min (2005) do for a difference of paired shares.

    Args:
        one_right, other_right: (M,) whether each image is right, in the same order.
    """
    count = len(one_right)
    only_one = int((one_right & ~other_right).sum())
    only_other = int((other_right & ~one_right).sum())
    counts = np.array([only_one + PRIOR, only_other + PRIOR, count - only_one - only_other + 2 * PRIOR])
    drawn = np.random.default_rng(RESAMPLING_SEED).multinomial(count, counts / counts.sum(), PAIRED_RESAMPLES)
    differences = (drawn[:, 0] - drawn[:, 1]) / count
    low, high = np.quantile(differences, [0.025, 0.975])
    return Difference((only_one - only_other) / count, (float(low), float(high)), count)


def paired(figure: Callable[[NDArray[np.int64]], float], count: int) -> Difference:
    """A difference of any figure, with a paired bootstrap over the images.

    Args:
        figure: indices of images, with repetitions, to the figure of one minus that of the other, of these images.
    """
    value = figure(np.arange(count))
    resampled = np.array([figure(drawn) for drawn in resamples(count)])
    return Difference(value, bootstrap(value, resampled, count), count)
