"""Counter-based random numbers: the numbers of a sample are a pure function of (seed, stream, epoch, index).

No generator is carried from one sample to the next, so that nothing depends on the batch size, workers, processes or
the step at which a run was resumed. Only the raw 64-bit words of numpy's Philox are used: methods built upon them may
change between releases of numpy, the words may not.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

FIXED_VIEW = 2**64 - 1
"""The epoch of fixed views: their crop and corruption are the same in every evaluation."""


class Stream(IntEnum):
    """Purposes of random numbers. Streams are independent: drawing more from one does not shift another."""

    ORDER = 0
    CROP = 1
    CORRUPTION = 2
    REPLACEMENT = 3
    CUT = 4  # splits and choices of images
    MODEL = 5  # dropout and the like: seeds of torch's generator
    BLOCK = 6  # the order of rows in a block of a stream
    AUGMENT = 7  # seeds of torch's generator for augmentation beyond the crop


def philox(stream: Stream, seed: int, epoch: int, index: int) -> np.random.Philox:
    """The source of a sample's numbers, at its start."""
    key = np.array([seed, 0], dtype=np.uint64)
    counter = np.array([0, epoch, index, stream], dtype=np.uint64)  # the first word counts the draws
    return np.random.Philox(key=key, counter=counter)


def random_words(stream: Stream, seed: int, epoch: int, index: int, count: int) -> NDArray[np.uint64]:
    """`count` uniform 64-bit words, shape (count,)."""
    return philox(stream, seed, epoch, index).random_raw(count)


DrawUniform = Callable[[int], NDArray[np.float64]]
"""A function that draws the next `count` uniform numbers in [0, 1), shape (count,)."""


def endless_uniforms(stream: Stream, seed: int, epoch: int, index: int) -> DrawUniform:
    """An endless sequence of uniform numbers in [0, 1), where the count is not known beforehand."""
    source = philox(stream, seed, epoch, index)
    # 53 leading bits: those of a float64. Annotations of an inner function would take 15 us of each image.
    return lambda count: (source.random_raw(count) >> np.uint64(11)) * 2.0**-53


def uniform(stream: Stream, seed: int, epoch: int, index: int, count: int) -> NDArray[np.float64]:
    """`count` uniform numbers in [0, 1), shape (count,)."""
    return endless_uniforms(stream, seed, epoch, index)(count)


def permutation(stream: Stream, seed: int, epoch: int, size: int, index: int = 0) -> NDArray[np.int64]:
    """A permutation of `size` items, shape (size,)."""
    return np.argsort(random_words(stream, seed, epoch, index, size), kind="stable")
