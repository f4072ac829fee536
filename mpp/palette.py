"""Colour classes: mean colours of pixels as exact class numbers, and back. Objectives predict them (paper, B.1.2).

C channels, L = 2**bits levels of a channel, S softmaxes that tell a colour.
"""

import math
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

    def classes_of(self, pixels: Tensor) -> Tensor:
        """Classes of the mean colours of pixels: (..., C, H, W) from 0 to 255 to (..., S) int64.

        A mean in [k / L, (k + 1) / L) of 255 is level k, and 255 is level L - 1: exact for pixels of 8 bits, since
        quotients of whole numbers in float64 do not round up to the next one.
        """
        levels = 2**self.bits
        whole = 255 * math.prod(pixels.shape[-2:])
        level = pixels.sum((-2, -1), dtype=torch.float64) * levels / whole
        level = level.long().clamp(max=levels - 1)
        return (level.unflatten(-1, (self.softmaxes, -1)) * self.place_values(level.device)).sum(-1)

    def colors(self, classes: Tensor) -> Tensor:
        """The middle of each class's bin; (..., S) int64 to (..., C) uint8."""
        levels = 2**self.bits
        level = (classes[..., None] // self.place_values(classes.device) % levels).flatten(-2)
        return ((2 * level + 1) * 255 // (2 * levels)).to(torch.uint8)

    def place_values(self, device: torch.device) -> Tensor:
        """(C / S,): the class number of a level of each channel of a softmax."""
        return 2 ** (self.bits * torch.arange(self.channels // self.softmaxes - 1, -1, -1, device=device))

    def count(self, classes: Tensor) -> Tensor:
        """Number of occurrences of each class: (n, cells * S) int64 to (S, classes) float64."""
        by_softmax = classes.reshape(-1, self.softmaxes).T
        return torch.stack([numbers.bincount(minlength=self.classes) for numbers in by_softmax]).double()


def palette_for(config: ObjectiveConfig, channels: int) -> Palette:
    """Colours by which the accuracy of other predictions is counted: of all channels together, if not too many."""
    return Palette(channels, config.bits, factorized=2 ** (config.bits * channels) > MOST_CLASSES)
