"""Colour classes: mean colours of pixels as exact class numbers, and back. Objectives predict them (paper, B.1.2).

C channels, L = 2**bits levels of a channel, S softmaxes that tell a colour.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mpp.config import ObjectiveConfig

MOST_CLASSES = 4096  # of a softmax over colours


class Palette(NamedTuple):
    """The classes that colours of C channels fall into: of all channels together or, factorized, of each channel.

    S is 1 or, factorized, C. The class of three channels together is (red * L + green) * L + blue.
    """

    channels: int
    bits: int
    factorized: bool

    @property
    def softmaxes(self) -> int:
        """S."""
        return self.channels if self.factorized else 1

    @property
    def classes(self) -> int:
        """Number of classes of each softmax."""
        return 2 ** (self.bits * self.channels // self.softmaxes)

    def classify(self, sums: Tensor, whole: int) -> Tensor:
        """Sums of channels (..., C), from 0 to `whole`, to classes (..., S) int64."""
        levels = mean_levels(sums, whole, self.bits)
        if self.factorized:
            return levels
        return (levels * self.place_values(levels.device)).sum(-1, keepdim=True)

    def colors(self, classes: Tensor) -> Tensor:
        """The middle of each class's bin; (..., S) int64 to (..., C) uint8."""
        levels = 2**self.bits
        if not self.factorized:
            classes = classes // self.place_values(classes.device) % levels
        return ((2 * classes + 1) * 255 // (2 * levels)).to(torch.uint8)

    def place_values(self, device: torch.device) -> Tensor:
        """(C,): the class number of a level of each channel, where all channels together have one class."""
        return 2 ** (self.bits * torch.arange(self.channels - 1, -1, -1, device=device))

    def count(self, classes: Tensor) -> Tensor:
        """Number of occurrences of each class: (n, cells * S) int64 to (S, classes) float64."""
        first_numbers = self.classes * torch.arange(self.softmaxes, device=classes.device)
        numbers = classes.reshape(-1, self.softmaxes) + first_numbers  # apart for each softmax
        counts = torch.bincount(numbers.flatten(), minlength=self.softmaxes * self.classes)
        return counts.view(self.softmaxes, -1).double()


def palette_for(config: ObjectiveConfig, channels: int) -> Palette:
    """Colours by which the accuracy of other predictions is counted: of all channels together, if not too many."""
    return Palette(channels, config.bits, factorized=2 ** (config.bits * channels) > MOST_CLASSES)


def sum_pixels(pixels: Tensor) -> Tensor:
    """Sums over the last two dimensions, exact: int32 of uint8, else float64."""
    return pixels.sum((-2, -1), dtype=torch.int32 if pixels.dtype == torch.uint8 else torch.float64)


def mean_levels(sums: Tensor, whole: int, bits: int) -> Tensor:
    """The level of a mean, by exact arithmetic.

    A mean v = sum / whole in [k / L, (k + 1) / L) is level k of L = 2**bits; v = 1 is level L - 1.

    Args:
        sums: from 0 to `whole`, of any shape.
    Returns:
        int64, of the same shape.
    """
    levels = 2**bits
    scaled = sums * levels / whole if sums.is_floating_point() else sums.long() * levels // whole
    return scaled.long().clamp(max=levels - 1)
