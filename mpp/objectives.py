"""What is predicted for a corrupted patch: targets and loss (paper, appendix B.1.2).

An objective turns clean images into targets, says how many numbers the head predicts for a patch, how far a prediction
is from its target, and what counts as right. (Of features the targets come from a teacher, mpp/models/teachers.py.) All
arithmetic is on integers or in float32: it runs outside autocast. To add one, write a class with these members and name
it in OBJECTIVES.

Images (B, C, H, W) have values from 0 to 255, uint8 or float32. B images, K patches, P side of a patch, C channels.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from mpp.config import ObjectiveConfig
from mpp.errors import UserError

DISTANCES: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {"l1": F.l1_loss, "l2": F.mse_loss, None: F.mse_loss}
"""Means over all numbers of all patches."""
ORIENTATIONS = 9  # of a histogram of oriented gradients
GREY = 128  # what is no colour
LEGIBLE = 16  # pixels of a cell's side in a picture of one
MOST_CLASSES = 4096  # of a softmax over colours


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) to patches in the encoder's order, (B, N, C, P, P)."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) c p q", p=patch_size, q=patch_size)


def at(patches: Tensor, positions: Tensor) -> Tensor:
    """What each image has at its positions: (B, N, ...) at (B, K) to (B, K, ...)."""
    return patches[torch.arange(len(patches), device=patches.device)[:, None], positions]


def patches_at(images: Tensor, positions: Tensor, patch_size: int) -> Tensor:
    """Patches of images (B, C, H, W) at positions (B, K): (B, K, C, P, P)."""
    return at(patchify(images, patch_size), positions)


def sum_of(pixels: Tensor) -> Tensor:
    """Sums over the last two dimensions, exact: int32 of uint8, else float64."""
    return pixels.sum((-2, -1), dtype=torch.int32 if pixels.dtype == torch.uint8 else torch.float64)


def levels_of(sums: Tensor, whole: int, bits: int) -> Tensor:
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


class Palette(NamedTuple):
    """The classes that colours of C channels fall into: of all channels together or, factorized, of each channel.

    S is the number of softmaxes that tell a colour: 1 or, factorized, C. Three channels together are
    (red * L + green) * L + blue.
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
        """Of each softmax."""
        return 2 ** (self.bits * self.channels // self.softmaxes)

    def classify(self, sums: Tensor, whole: int) -> Tensor:
        """Sums of channels (..., C), from 0 to `whole`, to classes (..., S) int64."""
        levels = levels_of(sums, whole, self.bits)
        if self.factorized:
            return levels
        return reduce(lambda high, low: high * 2**self.bits + low, levels.unbind(-1))[..., None]

    def colors(self, classes: Tensor) -> Tensor:
        """The middle of each class's bin; (..., S) int64 to (..., C) uint8."""
        levels = 2**self.bits
        if not self.factorized:
            powers = levels ** torch.arange(self.channels - 1, -1, -1, device=classes.device)
            classes = classes // powers % levels
        return ((2 * classes + 1) * 255 // (2 * levels)).to(torch.uint8)

    def count(self, classes: Tensor) -> Tensor:
        """How often each class is there: (n, cells * S) int64 to (S, classes) float64."""
        apart = classes.reshape(-1, self.softmaxes) + self.classes * torch.arange(self.softmaxes, device=classes.device)
        counted = torch.bincount(apart.flatten(), minlength=self.softmaxes * self.classes)
        return counted.view(self.softmaxes, -1).double()


def palette_for(config: ObjectiveConfig, channels: int) -> Palette:
    """The colours that are counted as right where others are predicted: together, unless they are too many."""
    return Palette(channels, config.bits, factorized=2 ** (config.bits * channels) > MOST_CLASSES)


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) over the last dimension, in bits: (..., C) to (...)."""
    return torch.distributions.Categorical(logits=logits).entropy() / math.log(2)


class Objective:
    """What is predicted of each corrupted patch. A new one sets `outputs`, and says `targets` and `loss`.

    All else serves accuracy and pictures, and has a default.
    """

    outputs: int
    """Numbers that the head predicts for a patch."""
    palette: Palette | None = None
    """The colour classes that accuracy is counted in. None: no accuracy is measured."""
    shown = "grey, for want of a picture"
    """What pictures show of a prediction, in a few words."""

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int = 3):
        self.patch_size, self.channels = patch_size, channels

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        """Clean images (B, C, H, W) to the targets of their patches at positions (B, K): (B, K, ...)."""
        raise NotImplementedError

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Predictions (B, K, outputs) float32 and targets to the mean loss over all patches, a scalar."""
        raise NotImplementedError

    def decide(self, predictions: Tensor) -> Tensor:
        """The most likely targets, (B, K, ...)."""
        return predictions

    def pictures(self, predictions: Tensor, targets: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
        """What is predicted and what was to be, painted: see `paint`."""
        return self.paint(self.decide(predictions), clean), self.paint(targets, clean)

    def labels(self, targets: Tensor) -> Tensor:
        """The colour classes of targets, (B, K, cells * S) int64, where there is a palette: accuracy is the share of
        classes that are right."""
        raise NotImplementedError

    def paint(self, targets: Tensor, clean: Tensor) -> Tensor:
        """Targets as pixels, (B, K, C, P, P) from 0 to 255, or s times as large to be legible, for a whole s.

        Where they lack what pixels need, it is `clean`'s, the true patches (B, K, C, P, P); then `shown` says so.
        """
        return torch.full_like(clean, GREY)

    def entropy(self, predictions: Tensor) -> Tensor | None:
        """How unsure the predictions are, in bits, (B, K, cells); None where no distribution is predicted."""
        return None


class GridColor(Objective):
    """Classify the mean colour of each cell of a grid over the patch. Accuracy: the share of cells that are right."""

    shown = "colours of a grid over each patch"

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int = 3, grid: int | None = None):
        super().__init__(config, patch_size, channels)
        self.grid = grid or config.grid
        if patch_size % self.grid:
            raise UserError(f"objective.grid is {self.grid}; it must divide the patch size ({patch_size})")
        self.palette = Palette(channels, config.bits, config.factorized)
        if self.palette.classes > MOST_CLASSES:
            most = int(math.log2(MOST_CLASSES)) // channels
            serves = "objective.factorized true (a softmax for each channel) or objective.name pixels serves"
            raise UserError(
                f"objective.bits is {config.bits}, which makes 2**({config.bits} x {channels}) colours of {channels} "
                f"channels, more than {MOST_CLASSES:,}; {f'at most {most}, ' if most else ''}{serves}"
            )
        self.classes = self.palette.classes
        self.outputs = self.classes * self.palette.softmaxes * self.grid**2

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        patches = patches_at(images, positions, self.patch_size)
        cells = rearrange(patches, "b k c (g h) (f w) -> b k (g f) c h w", g=self.grid, f=self.grid)
        cell = self.patch_size // self.grid
        return self.palette.classify(sum_of(cells), 255 * cell**2).flatten(2)  # (B, K, cells * S)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(predictions.reshape(-1, self.classes), targets.flatten())

    def decide(self, predictions: Tensor) -> Tensor:
        return predictions.unflatten(-1, (-1, self.classes)).argmax(-1)

    def labels(self, targets: Tensor) -> Tensor:
        return targets

    def paint(self, targets: Tensor, clean: Tensor) -> Tensor:
        colors = self.palette.colors(targets.unflatten(-1, (-1, self.palette.softmaxes)))
        side = self.patch_size // self.grid
        return repeat(colors, "b k (g f) c -> b k c (g h) (f w)", g=self.grid, h=side, w=side)

    def entropy(self, predictions: Tensor) -> Tensor:
        entropy = entropy_of(predictions.unflatten(-1, (-1, self.classes)))
        return entropy.unflatten(-1, (-1, self.palette.softmaxes)).sum(-1)


class MeanColor(GridColor):
    """Classify the patch's mean colour: one of 2**(C * bits) classes. It is a grid of one cell.

    Accuracy: the share of patches that are right.
    """

    shown = "mean colours"

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int = 3):
        super().__init__(config, patch_size, channels, grid=1)


class Pixels(Objective):
    """Regress the patch's pixels, scaled to [-1, 1], by their mean squared (L2) or mean absolute (L1, SimMIM) error.

    Accuracy: the share of patches whose mean predicted pixel falls in the colour class of the true mean; of many
    channels, the share of the channels.
    """

    shown = "pixels"

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int = 3):
        super().__init__(config, patch_size, channels)
        self.palette, self.distance = palette_for(config, channels), DISTANCES[config.loss]
        self.outputs = channels * patch_size**2

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        return patches_at(images, positions, self.patch_size)  # (B, K, C, P, P)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self.distance(predictions, targets.flatten(2).float() / 127.5 - 1)

    def decide(self, predictions: Tensor) -> Tensor:
        return to_pixels(predictions.unflatten(-1, (self.channels, self.patch_size, self.patch_size)))

    def labels(self, targets: Tensor) -> Tensor:
        return self.palette.classify(sum_of(targets), 255 * self.patch_size**2)

    def paint(self, targets: Tensor, clean: Tensor) -> Tensor:
        return targets


def to_pixels(scaled: Tensor) -> Tensor:
    """From [-1, 1] to uint8; what lies outside is cut off."""
    return ((scaled + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


class NormalizedPixels(Pixels):
    """Regress the patch's pixels, less their mean and over their deviation, of all channels together (MAE).

    The deviation is the unbiased one, of pixels scaled to [-1, 1], with 1e-6 added to its square, as in MAE's code.
    There is no accuracy: how bright a patch is and how strong its contrast is not predicted, and to put back the true
    values would be to give the answer away.
    """

    shown = "pixels, put back by each patch's true mean and deviation"

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int = 3):
        super().__init__(config, patch_size, channels)
        self.palette = None

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        pixels, mean, deviation = self.moments(patches_at(images, positions, self.patch_size))
        return (pixels - mean) / deviation  # (B, K, C, P, P)

    def moments(self, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels in [-1, 1]; their mean and deviation, (B, K, 1, 1, 1)."""
        pixels = patches.float() / 127.5 - 1
        variance, mean = torch.var_mean(pixels, (-3, -2, -1), keepdim=True)
        return pixels, mean, (variance + 1e-6).sqrt()

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self.distance(predictions, targets.flatten(2))

    def decide(self, predictions: Tensor) -> Tensor:
        return predictions.unflatten(-1, (self.channels, self.patch_size, self.patch_size))

    def paint(self, targets: Tensor, clean: Tensor) -> Tensor:
        _, mean, deviation = self.moments(clean)
        return to_pixels(targets * deviation + mean)


class Hog(Objective):
    """Regress the histograms of oriented gradients of the patch's cells, in each colour channel (MaskFeat).

    No accuracy: a histogram of edges has no colour. Pictures show a line for each orientation, along its edge and as
    bright as its share is long; red, green and blue are the three channels.
    """

    shown = "HOG, as its edges"

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int = 3):
        super().__init__(config, patch_size, channels)
        self.cell = min(config.cell, patch_size)
        if patch_size % self.cell:
            raise UserError(f"objective.cell is {config.cell}; it must divide the patch size ({patch_size})")
        self.distance = DISTANCES[config.loss]
        self.side = patch_size // self.cell  # of the patch, in cells
        self.outputs = self.side**2 * channels * ORIENTATIONS

    def targets(self, images: Tensor, positions: Tensor) -> Tensor:
        cells = oriented_gradients(images, self.cell)
        return at(rearrange(cells, "b c o (h g) (w f) -> b (h w) (g f c o)", g=self.side, f=self.side), positions)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self.distance(predictions, targets)

    def paint(self, targets: Tensor, clean: Tensor) -> Tensor:
        shares = targets.clamp(0, 1).unflatten(-1, (self.side, self.side, self.channels, ORIENTATIONS))
        lines = edges(self.cell * -(-LEGIBLE // self.cell)).to(targets.device)  # (9, h, w)
        drawn = (share[..., None, None] * line for share, line in zip(shares.unbind(-1), lines, strict=True))
        brightest = (255 * reduce(torch.maximum, drawn)).to(torch.uint8)
        return rearrange(brightest, "b k g f c h w -> b k c (g h) (f w)")


def oriented_gradients(images: Tensor, cell: int) -> Tensor:
    """Histograms of oriented gradients (Dalal and Triggs, 2005) of each channel, each histogram of unit length.

    A gradient is the difference of the two neighbours, and 0 across the image's border. Each pixel votes with its
    gradient's length for one of nine orientations, which share 180 degrees from the rightward gradient on. It is what
    scikit-image's `hog` gives for a channel, with blocks of one cell. MaskFeat's code has Sobel's filters in place of
    the difference, and its orientations are turned by half of one.

    Args:
        images: (B, C, H, W), H and W multiples of `cell`.
    Returns:
        (B, C, 9, H / cell, W / cell) float32; a cell without a gradient is all 0.
    """
    pixels = images.float()
    down, right = torch.zeros_like(pixels), torch.zeros_like(pixels)
    down[..., 1:-1, :] = pixels[..., 2:, :] - pixels[..., :-2, :]
    right[..., 1:-1] = pixels[..., 2:] - pixels[..., :-2]
    length, orientation = torch.hypot(down, right), torch.atan2(down, right) * (ORIENTATIONS / math.pi)
    bins = orientation.floor() % ORIENTATIONS  # opposite gradients are one orientation
    votes = [F.avg_pool2d(length.where(bins == number, 0.0), cell) for number in range(ORIENTATIONS)]
    return F.normalize(torch.stack(votes, dim=2), dim=2)


def edges(side: int) -> Tensor:
    """A line through a square for the middle of each orientation, along the edge: at right angles to the gradient.

    Returns:
        (9, side, side) float32, from 0 to 1.
    """
    angles = (torch.arange(ORIENTATIONS) + 0.5) * math.pi / ORIENTATIONS
    place = torch.arange(side) - (side - 1) / 2
    apart = angles.sin()[:, None, None] * place[:, None] + angles.cos()[:, None, None] * place  # from the line
    return (0.5 + side / 12 - apart.abs()).clamp(0, 1)


class TeacherFeatures(Objective):
    """Regress what a teacher makes of the patch: see mpp/models/teachers.py, whose network gives the targets.

    No accuracy: features have no classes. Pictures show where predictions and targets lie along the first three
    principal components of these targets, as red, green and blue; or, of images that are not RGB, along the first.

    Args:
        width: of the teacher's features.
    """

    shown = "features, by the three principal components of the targets"

    def __init__(self, config: ObjectiveConfig, patch_size: int, channels: int, width: int):
        super().__init__(config, patch_size, channels)
        self.outputs = width
        if channels != 3:
            self.shown = "features, by the first principal component of the targets"
        smooth = partial(F.smooth_l1_loss, beta=config.beta)
        self.distance = (DISTANCES | {None: smooth, "smooth_l1": smooth, "cosine": one_less_cosine})[config.loss]

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self.distance(predictions, targets)

    def pictures(self, predictions: Tensor, targets: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
        rows = targets.flatten(0, 1).double()
        mean = rows.mean(0)
        directions = torch.linalg.svd(rows - mean, full_matrices=False)[2][:3]  # (3, D), or fewer of few patches
        scores = [(each.double() - mean) @ directions.T for each in (predictions, targets)]  # (B, K, 3): one basis
        reach = 2 * scores[1].flatten(0, 1).std(0).clamp(min=1e-12)  # most of the targets lie within
        scaled = [(127.5 + 127.5 * each / reach).clamp(0, 255) for each in scores]
        painted = [F.pad(each, (0, 3 - len(directions)), value=GREY) for each in scaled]
        if self.channels != 3:
            painted = [each[..., :1].expand(*each.shape[:-1], self.channels) for each in painted]
        one, other = (each[..., None, None].expand(clean.shape) for each in painted)
        return one, other


def one_less_cosine(predictions: Tensor, targets: Tensor) -> Tensor:
    """1 less the cosine of prediction and target, (..., D) each, the mean over all: 0 where they point the same way."""
    return (1 - F.cosine_similarity(predictions, targets, dim=-1)).mean()


def as_channels(colors: Tensor, channels: int) -> Tensor:
    """RGB (B, K, 3) for images of so many channels: where these are not three, their mean as grey."""
    return colors if channels == 3 else colors.mean(-1, keepdim=True).expand(*colors.shape[:-1], channels)


def pixels_as_asked(config: ObjectiveConfig, patch_size: int, channels: int = 3) -> Objective:
    """Pixels as they are, or by each patch's own mean and deviation."""
    return (NormalizedPixels if config.normalize == "patch" else Pixels)(config, patch_size, channels)


OBJECTIVES: dict[str, Callable[[ObjectiveConfig, int, int], Objective]] = {
    "mean_color": MeanColor,
    "grid_color": GridColor,
    "pixels": pixels_as_asked,
    "hog": Hog,
}


def build_objective(config: ObjectiveConfig, patch_size: int, channels: int = 3, width: int | None = None) -> Objective:
    """The objective that the config names.

    Args:
        width: of the teacher's features, where they are what is predicted.
    Raises:
        UserError: no such objective, or one that does not fit the patch size or the channels.
    """
    if width is not None:
        return TeacherFeatures(config, patch_size, channels, width)
    if config.name not in OBJECTIVES:
        known = ", ".join([*OBJECTIVES, "features"])
        raise UserError(f"objective.name is {config.name}; it must be one of {known}, or registered by --import FILE")
    return OBJECTIVES[config.name](config, patch_size, channels)
