"""Objectives: targets of corrupted patches and the loss of predictions (paper, appendix B.1.2).

An objective defines the targets of clean images, the number of predicted values for a patch, the loss of a prediction,
and its accuracy. (Targets that are features come from a teacher, mpp/models/teachers.py.) All arithmetic is on integers
or in float32 or more, outside autocast. To add an objective, write a subclass of Objective and name it in OBJECTIVES.

Images (B, C, H, W) have values from 0 to 255, uint8 or float32. B images, K patches, P side of a patch, C channels.
S softmaxes give a colour: one, or one for each channel. A channel has L = 2**bits levels.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from mpp.config import ObjectiveConfig, require
from mpp.config.imports import Registry

GREY = 128  # in pictures, for [mask] and other patches without a colour
MOST_CLASSES = 4096  # of a softmax over colours
ORIENTATION_BINS = 9  # of a histogram of gradients


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) to patches in the encoder's order, (B, N, C, P, P)."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) c p q", p=patch_size, q=patch_size)


def select_patches(patches: Tensor, positions: Tensor) -> Tensor:
    """Patches of each image at its positions: (B, N, ...) at (B, K) to (B, K, ...)."""
    images = torch.arange(len(patches), device=patches.device)[:, None]
    return patches[images, positions]


def patches_at(images: Tensor, positions: Tensor, patch_size: int) -> Tensor:
    """Patches of images (B, C, H, W) at positions (B, K): (B, K, C, P, P)."""
    return select_patches(patchify(images, patch_size), positions)


def scale_pixels(pixels: Tensor) -> Tensor:
    """Pixels from 0 to 255 to [-1, 1], float32."""
    return pixels.float() / 127.5 - 1


def unscale_pixels(scaled: Tensor) -> Tensor:
    """From [-1, 1] to uint8; values outside are clipped."""
    return ((scaled + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


# --- colour classes ---


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


# --- objectives ---


class Objective(nn.Module):
    """Targets of corrupted patches and their loss. A new objective sets `outputs`, and defines `targets` and `loss`.

    The other members serve accuracy and pictures, and have defaults. An objective moves tensors of its own to the
    device of the images, has no weights to be trained, and keeps nothing from one batch to the next: a resumed run
    would lack it.
    """

    outputs: int
    """Number of predicted values for a patch."""
    palette: Palette | None = None
    """Colour classes for accuracy. None: no accuracy is measured."""
    shown = "grey (no picture)"
    """Content of a picture of a prediction, in a few words."""

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int = 3):
        super().__init__()
        self.patch_size = patch_size
        self.channels = channels

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        """Clean images (B, C, H, W) to the targets of their patches at positions (B, K): (B, K, ...)."""
        raise NotImplementedError("targets")

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Predictions (B, K, outputs) float32 and targets to the mean loss over all patches, a scalar."""
        raise NotImplementedError("loss")

    def decide(self, predictions: Tensor) -> Tensor:
        """The most likely targets, (B, K, ...)."""
        return predictions

    def colour_classes(self, targets: Tensor) -> Tensor:
        """Colour classes of targets, (B, K, cells * S) int64, where there is a palette.

        Accuracy is the share of correct classes.
        """
        raise NotImplementedError("colour_classes")

    def paint(self, targets: Tensor, clean: Tensor) -> Tensor:
        """Targets as pixels, (B, K, C, P, P) from 0 to 255.

        Args:
            clean: the true patches (B, K, C, P, P), for information that targets lack; then `shown` mentions it.
        """
        return torch.full_like(clean, GREY)

    def entropy(self, predictions: Tensor) -> Tensor | None:
        """Entropy of the predictions in bits, (B, K, cells); None where no distribution is predicted."""
        return None


class MeanColor(Objective):
    """Classify the mean colour of the patch, one of 2**(C * bits) classes, or of each cell of a grid over it.

    Accuracy: the share of correct cells.
    """

    shown = "mean colours"

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int):
        super().__init__(config, patch_size, channels)
        self.grid = config.grid if config.name == "grid_color" else 1  # cells along a side of the patch
        require(patch_size % self.grid == 0, "objective.grid", self.grid, f"a divisor of the patch size ({patch_size})")
        self.palette = Palette(channels, config.bits, config.factorized)
        self.classes = self.palette.classes
        allowed = f"so few that {channels} channels have at most {MOST_CLASSES:,} colours; or objective.factorized true"
        require(self.classes <= MOST_CLASSES, "objective.bits", config.bits, allowed)
        self.outputs = self.classes * self.palette.softmaxes * self.grid**2

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        patches = patches_at(images, positions, self.patch_size)
        cells = rearrange(patches, "b k c (g h) (f w) -> b k (g f) c h w", g=self.grid, f=self.grid)
        return self.palette.classes_of(cells).flatten(2)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(predictions.reshape(-1, self.classes), targets.flatten())

    def decide(self, predictions: Tensor) -> Tensor:
        return predictions.unflatten(-1, (-1, self.classes)).argmax(-1)

    def colour_classes(self, targets: Tensor) -> Tensor:
        return targets

    def paint(self, targets: Tensor, clean: Tensor) -> Tensor:
        colors = self.palette.colors(targets.unflatten(-1, (-1, self.palette.softmaxes)))
        cell_side = self.patch_size // self.grid
        return repeat(colors, "b k (g f) c -> b k c (g h) (f w)", g=self.grid, h=cell_side, w=cell_side)

    def entropy(self, predictions: Tensor) -> Tensor:
        logits = predictions.unflatten(-1, (-1, self.palette.softmaxes, self.classes))  # (B, K, cells, S, classes)
        return torch.distributions.Categorical(logits=logits).entropy().sum(-1) / math.log(2)


class Regression(Objective):
    """Regress targets (B, K, ...) by their mean distance from the predictions over all values: `objective.loss`.

    It is the squared distance (L2) by default, and of a teacher's features the smooth L1. For these the network gives
    the targets (mpp/models/teachers.py), and there is no accuracy and no picture: they have no classes and no colours.
    """

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int):
        super().__init__(config, patch_size, channels)
        distances = {
            "l1": F.l1_loss,
            "l2": F.mse_loss,
            "smooth_l1": partial(F.smooth_l1_loss, beta=config.beta),
            "cosine": lambda predictions, targets: (1 - F.cosine_similarity(predictions, targets, dim=-1)).mean(),
        }
        self.distance = distances[config.loss or ("smooth_l1" if config.name == "features" else "l2")]

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self.distance(predictions, targets.flatten(2))


class Pixels(Regression):
    """Regress the patch's pixels, scaled to [-1, 1], by their mean squared (L2) or mean absolute (L1, SimMIM) error.

    Accuracy: the share of patches whose mean predicted pixel falls in the colour class of the true mean; of many
    channels, the share of the channels.

    With `objective.normalize` patch, of the pixels less their mean and divided by their deviation, over all channels
    together (MAE). The deviation is the unbiased one, of scaled pixels, with 1e-6 added to its square, as in MAE's
    code. There is no accuracy then: the brightness of a patch and its contrast are not predicted, and the true values
    would give the answer away.
    """

    shown = "pixels"

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int):
        super().__init__(config, patch_size, channels)
        self.outputs = channels * patch_size**2
        self.is_normalized = config.normalize == "patch"
        if not self.is_normalized:
            self.palette = palette_for(config, channels)
            return
        self.shown = "pixels, denormalised by each patch's true mean and deviation"

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        patches = patches_at(images, positions, self.patch_size)  # (B, K, C, P, P)
        if not self.is_normalized:
            return patches
        pixels, mean, deviation = moments(patches)
        return (pixels - mean) / deviation

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return super().loss(predictions, targets if self.is_normalized else scale_pixels(targets))

    def decide(self, predictions: Tensor) -> Tensor:
        scaled = predictions.unflatten(-1, (self.channels, self.patch_size, self.patch_size))
        return scaled if self.is_normalized else unscale_pixels(scaled)

    def colour_classes(self, targets: Tensor) -> Tensor:
        return self.palette.classes_of(targets)

    def paint(self, targets: Tensor, clean: Tensor) -> Tensor:
        if not self.is_normalized:
            return targets
        _, mean, deviation = moments(clean)
        return unscale_pixels(targets * deviation + mean)


def moments(patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels (..., C, P, P) in [-1, 1]; their mean and deviation, (..., 1, 1, 1)."""
    pixels = scale_pixels(patches)
    variance, mean = torch.var_mean(pixels, (-3, -2, -1), keepdim=True)
    return pixels, mean, (variance + 1e-6).sqrt()


def oriented_gradients(images: Tensor, cell: int) -> Tensor:
    """Histograms of oriented gradients (Dalal and Triggs, 2005) of each channel, each histogram of unit length.

    A gradient is the difference of the two neighbours, and 0 across the image's border. Each pixel votes with its
    gradient's length for one of nine orientations, which divide the 180 degrees from the rightward gradient on. The
    result equals scikit-image's `hog` of a channel, with blocks of one cell. MaskFeat's code uses Sobel filters instead
    of differences, and its orientations are shifted by half an orientation.

    Args:
        images: (B, C, H, W), H and W multiples of `cell`.
    Returns:
        (B, C, 9, H / cell, W / cell) float32; a cell without a gradient is all 0.
    """
    pixels = images.float()
    down = torch.zeros_like(pixels)
    right = torch.zeros_like(pixels)
    down[..., 1:-1, :] = pixels[..., 2:, :] - pixels[..., :-2, :]
    right[..., 1:-1] = pixels[..., 2:] - pixels[..., :-2]
    length = torch.hypot(down, right)
    orientation = torch.atan2(down, right) * (ORIENTATION_BINS / math.pi)
    bins = orientation.floor() % ORIENTATION_BINS  # opposite gradients are one orientation
    votes = [F.avg_pool2d(length.where(bins == number, 0.0), cell) for number in range(ORIENTATION_BINS)]
    return F.normalize(torch.stack(votes, dim=2), dim=2)


class Hog(Regression):
    """Regress the histograms of oriented gradients of the patch's cells, in each colour channel (MaskFeat).

    No accuracy and no picture: a histogram of edges has no colour. The targets of 16 images at 224 pixels take 50 to 60
    ms on two cores (AVX-512), a sixth of a step of ViT-Ti/16; those of `mean_color` 1 ms.
    """

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int):
        super().__init__(config, patch_size, channels)
        self.cell = min(config.cell, patch_size)
        require(patch_size % self.cell == 0, "objective.cell", self.cell, f"a divisor of the patch size ({patch_size})")
        self.side = patch_size // self.cell  # side of the patch, in cells
        self.outputs = self.side**2 * channels * ORIENTATION_BINS

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        cells = oriented_gradients(images, self.cell)
        patches = rearrange(cells, "b c o (h g) (w f) -> b (h w) (g f c o)", g=self.side, f=self.side)
        return select_patches(patches, positions)


OBJECTIVES = Registry(
    "objective.name",
    {
        "mean_color": MeanColor,
        "grid_color": MeanColor,
        "pixels": Pixels,
        "hog": Hog,
        "features": Regression,
    },
)
"""Objectives by name: settings, side of a patch and channels -> Objective."""


def build_objective(
    config: ObjectiveConfig, patch_size: int, channels: int = 3, teacher_width: int | None = None
) -> Objective:
    """The objective of the settings.

    Args:
        teacher_width: width of the teacher's features, for the objective `features`.
    Raises:
        UserError: no such objective, or one that does not fit the patch size or the channels.
    """
    objective = OBJECTIVES[config.name](config, patch_size, channels)
    if config.name == "features":
        objective.outputs = teacher_width
    trained = any(weight.requires_grad for weight in objective.parameters())
    allowed = "one without weights to be trained: only a network's are; frozen ones (requires_grad_(False)) may stay"
    require(not trained, "objective.name", config.name, allowed)
    return objective.eval()
