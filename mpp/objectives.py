"""What is predicted for a corrupted patch: targets and loss (paper, appendix B.1.2).

An objective turns the clean pixels of patches into targets, says how many numbers the head predicts for a patch, how
far a prediction is from its target, and what counts as right. All arithmetic is on integers or in float32: it runs
outside autocast. To add one, write a class with these members and name it in OBJECTIVES.

B images, K patches, P side of a patch, C classes.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from mpp.config import ObjectiveConfig
from mpp.errors import UserError


def quantize(colors: Tensor, whole: int, bits: int) -> Tensor:
    """Colour class of channel sums, by integer arithmetic.

    A mean v = sum / whole in [k / L, (k + 1) / L) is level k of L = 2**bits; v = 1 is level L - 1.

    Args:
        colors: (..., 3) integers from 0 to `whole`, red green blue.
    Returns:
        (...) int64, (red * L + green) * L + blue.
    """
    levels = 2**bits
    red, green, blue = (colors.long() * levels // whole).clamp(max=levels - 1).unbind(-1)
    return (red * levels + green) * levels + blue


def colors_of(classes: Tensor, bits: int) -> Tensor:
    """The middle of each colour class's bin as RGB; (...) int64 to (..., 3) uint8."""
    levels = 2**bits
    channels = torch.stack([classes // levels**2, classes // levels % levels, classes % levels], dim=-1)
    return ((2 * channels + 1) * 255 // (2 * levels)).to(torch.uint8)


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) over the last dimension, in bits: (..., C) to (...)."""
    return torch.distributions.Categorical(logits=logits).entropy() / math.log(2)


class Objective(Protocol):
    """What the training step, the reference lines and the pictures need of an objective."""

    outputs: int
    """Numbers that the head predicts for a patch."""
    bits: int
    """Bits per channel of the colour classes that accuracy is counted in."""

    def targets(self, patches: Tensor) -> Tensor:
        """Clean pixels (B, K, 3, P, P) uint8 to targets (B, K, ...)."""

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Predictions (B, K, outputs) float32 and targets to the mean loss over all patches, a scalar."""

    def decide(self, predictions: Tensor) -> Tensor:
        """The most likely targets, (B, K, ...)."""

    def labels(self, targets: Tensor) -> Tensor:
        """The colour classes of targets, (B, K, cells) int64. Accuracy is the share of classes that are right."""

    def paint(self, targets: Tensor) -> Tensor:
        """Targets as pixels, (B, K, 3, P, P) uint8."""

    def entropy(self, predictions: Tensor) -> Tensor | None:
        """How unsure the predictions are, in bits, (B, K, cells); None where no distribution is predicted."""


class MeanColor:
    """Classify the patch's mean colour: one of 2**(3 * bits) classes. Accuracy: the share of patches that are right."""

    def __init__(self, config: ObjectiveConfig, patch_size: int):
        self.bits, self.patch_size = config.bits, patch_size
        self.outputs = 2 ** (3 * config.bits)

    def targets(self, patches: Tensor) -> Tensor:
        sums = patches.sum((-2, -1), dtype=torch.int32)  # (B, K, 3)
        return quantize(sums, 255 * self.patch_size**2, self.bits)  # (B, K)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())

    def decide(self, predictions: Tensor) -> Tensor:
        return predictions.argmax(-1)

    def labels(self, targets: Tensor) -> Tensor:
        return targets[..., None]

    def paint(self, targets: Tensor) -> Tensor:
        return repeat(colors_of(targets, self.bits), "b k c -> b k c h w", h=self.patch_size, w=self.patch_size)

    def entropy(self, predictions: Tensor) -> Tensor:
        return entropy_of(predictions)[..., None]


class GridColor:
    """Classify the mean colour of each cell of a grid over the patch. Accuracy: the share of cells that are right."""

    def __init__(self, config: ObjectiveConfig, patch_size: int):
        if patch_size % config.grid:
            raise UserError(f"objective.grid is {config.grid}; it must divide the patch size ({patch_size})")
        self.bits, self.patch_size, self.grid = config.bits, patch_size, config.grid
        self.classes = 2 ** (3 * config.bits)
        self.outputs = self.classes * config.grid**2

    def targets(self, patches: Tensor) -> Tensor:
        cells = rearrange(patches, "b k c (g h) (f w) -> b k (g f) c h w", g=self.grid, f=self.grid)
        cell = self.patch_size // self.grid
        return quantize(cells.sum((-2, -1), dtype=torch.int32), 255 * cell**2, self.bits)  # (B, K, cells)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(predictions.reshape(-1, self.classes), targets.flatten())

    def decide(self, predictions: Tensor) -> Tensor:
        return predictions.unflatten(-1, (-1, self.classes)).argmax(-1)

    def labels(self, targets: Tensor) -> Tensor:
        return targets

    def paint(self, targets: Tensor) -> Tensor:
        colors, side = colors_of(targets, self.bits), self.patch_size // self.grid
        return repeat(colors, "b k (g f) c -> b k c (g h) (f w)", g=self.grid, h=side, w=side)

    def entropy(self, predictions: Tensor) -> Tensor:
        return entropy_of(predictions.unflatten(-1, (-1, self.classes)))


class Pixels:
    """Regress the patch's pixels, scaled to [-1, 1], by mean squared error (L2).

    Accuracy: the share of patches whose mean predicted pixel falls in the colour class of the true mean.
    """

    def __init__(self, config: ObjectiveConfig, patch_size: int):
        self.bits, self.patch_size = config.bits, patch_size
        self.outputs = 3 * patch_size**2

    def targets(self, patches: Tensor) -> Tensor:
        return patches  # (B, K, 3, P, P)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(predictions, targets.flatten(2).float() / 127.5 - 1)

    def decide(self, predictions: Tensor) -> Tensor:
        pixels = ((predictions + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return rearrange(pixels, "b k (c h w) -> b k c h w", c=3, h=self.patch_size)

    def labels(self, targets: Tensor) -> Tensor:
        sums = targets.sum((-2, -1), dtype=torch.int32)
        return quantize(sums, 255 * self.patch_size**2, self.bits)[..., None]

    def paint(self, targets: Tensor) -> Tensor:
        return targets

    def entropy(self, predictions: Tensor) -> None:
        return None  # a regression says nothing of its doubts


OBJECTIVES: dict[str, type[Objective]] = {"mean_color": MeanColor, "grid_color": GridColor, "pixels": Pixels}


def build_objective(config: ObjectiveConfig, patch_size: int) -> Objective:
    """The objective that the config names.

    Raises:
        UserError: no such objective, or one that does not fit the patch size.
    """
    if config.name not in OBJECTIVES:
        raise UserError(f"objective.name is {config.name}; it must be one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[config.name](config, patch_size)
