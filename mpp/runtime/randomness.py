"""Counter-based random numbers: what a sample draws is a pure function of (seed, stream, epoch, index).

No generator is carried from one sample to the next, so that nothing depends on batch size, workers, processes or on
where a run was resumed. numpy's Philox is used for its raw 64-bit words alone: the methods built upon them may change
between releases of numpy, the words may not.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

FIXED = 2**64 - 1
"""The epoch of held-out images: their corruption is the same whenever they are looked at."""


class Stream(IntEnum):
    """What the numbers are for. Streams are independent: drawing more in one does not shift another."""

    ORDER = 0
    CROP = 1
    CORRUPTION = 2
    REPLACEMENT = 3
    CUT = 4  # splits and choices of images
    MODEL = 5  # dropout and the like: seeds of torch's generator
    BLOCK = 6  # the order of rows in a block of a stream
    AUGMENT = 7  # seeds of torch's generator for augmentation beyond the crop


def philox(stream: Stream, seed: int, epoch: int, index: int) -> np.random.Philox:
    """The source of a sample's numbers, at its beginning."""
    counter = np.array([0, epoch, index, stream], dtype=np.uint64)  # the first word counts the draws
    return np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=counter)


def random_words(stream: Stream, seed: int, epoch: int, index: int, count: int) -> NDArray[np.uint64]:
    """`count` uniform 64-bit words, shape (count,)."""
    return philox(stream, seed, epoch, index).random_raw(count)


Numbers = Callable[[int], NDArray[np.float64]]
"""The next so many uniform numbers in [0, 1), shape (count,)."""


def uniforms(stream: Stream, seed: int, epoch: int, index: int) -> Numbers:
    """A sequence of uniform numbers in [0, 1) without an end, for what does not know how many it will need."""
    source = philox(stream, seed, epoch, index)
    return lambda count: (source.random_raw(count) >> np.uint64(11)) * 2.0**-53


def uniform(stream: Stream, seed: int, epoch: int, index: int, count: int) -> NDArray[np.float64]:
    """`count` uniform numbers in [0, 1), shape (count,)."""
    return uniforms(stream, seed, epoch, index)(count)


def permutation(stream: Stream, seed: int, epoch: int, size: int, index: int = 0) -> NDArray[np.int64]:
    """A permutation of `size` items, shape (size,)."""
    return np.argsort(random_words(stream, seed, epoch, index, size), kind="stable")
