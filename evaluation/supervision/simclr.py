"""SimCLR (Chen et al., ICML 2020): two views of each image, and the loss by which each has to find the other.

Shapes: B images, E outputs of the projection head.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from torchvision.transforms import v2

from evaluation.config import ViewsConfig
from mpp.config import sides
from mpp.data import crops
from mpp.data.views import ViewDataset
from mpp.runtime.randomness import FIXED_VIEW


@lru_cache
def distortion(config: ViewsConfig, side: int) -> v2.Transform:
    """torchvision's transforms of a crop (C, side, side)."""
    strong, weak = 0.8 * config.jitter, 0.2 * config.jitter
    window = max(3, side // 10 | 1)  # odd
    jitter = v2.ColorJitter(brightness=strong, contrast=strong, saturation=strong, hue=weak)
    blur = v2.GaussianBlur(window, sigma=(0.1, 2.0))
    return v2.Compose(
        [
            v2.RandomApply([jitter], config.jitter_probability),
            v2.RandomGrayscale(config.grey),
            v2.RandomApply([blur], config.blur),
        ]
    )


@dataclass(frozen=True)
class TwoViews(ViewDataset):
    """Samples of two views each, (2, C, H, W): a view is a function of (seed, epoch, index, view).

    The fixed views (epoch FIXED_VIEW) are two such views too, by `data.cut_seed`: the same in every evaluation.
    """

    distorted: ViewsConfig = field(default_factory=ViewsConfig)
    costly = True

    def view(self, pixels: Tensor, epoch: int, index: int) -> Tensor:
        seed = self.data.cut_seed if epoch == FIXED_VIEW else self.seed
        first = self.one_view(pixels, seed, epoch, 2 * index)
        second = self.one_view(pixels, seed, epoch, 2 * index + 1)
        return torch.stack([first, second])

    def one_view(self, pixels: Tensor, seed: int, epoch: int, number: int) -> Tensor:
        """A view (C, H, W); `number` is twice the index of its image, plus 1 for the second view."""
        crop = crops.random_crop(pixels, self.img_size, self.data, seed, epoch, number)
        if self.distorted.jitter or self.distorted.grey:
            crop = crops.to_8_bits(crop)
        transform = distortion(self.distorted, min(sides(self.img_size)))
        return crops.apply_random(transform, crop, seed, epoch, number)


def nt_xent(own: Tensor, everyone: Tensor, first: int, temperature: float) -> tuple[Tensor, Tensor]:
    """NT-Xent: each view's cross-entropy of choosing the other view of its image among all views but itself.

    Args:
        own: (B, 2, E) of unit length, two views of each image of this process.
        everyone: (B', 2, E), those of all processes.
        first: which of everyone's images own[0] is.
        temperature: divisor of the similarities.
    Returns:
        (B, 2) losses; (B, 2) bool: whether the other view is the nearest of all.
    """
    similarity = own.flatten(0, 1) @ everyone.flatten(0, 1).T / temperature  # (2 B, 2 B')
    itself = torch.arange(2 * first, 2 * first + len(similarity), device=own.device)
    other = itself ^ 1  # the two views of an image stand side by side
    similarity = similarity.scatter(1, itself[:, None], -torch.inf)
    losses = F.cross_entropy(similarity, other, reduction="none")
    right = similarity.argmax(1) == other
    return losses.unflatten(0, (-1, 2)), right.unflatten(0, (-1, 2))


class GatherWithGradients(torch.autograd.Function):
    """The rows of all processes, in the order of their ranks, with gradients that flow back to a row's process.

    The loss of R processes is L = (L_1 + ... + L_R) / R. Each L_r is the mean over the rows of process r and depends on
    the rows z_p of every p. DDP averages the gradients that the processes return, which have to be R dL/dz_p = sum over
    r of dL_r/dz_p: the gradients to the rows of p, summed over the processes.
    """

    @staticmethod
    def forward(ctx, own: Tensor, accelerator: Accelerator) -> Tensor:
        ctx.accelerator = accelerator
        return accelerator.gather(own)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        accelerator = ctx.accelerator
        summed = accelerator.reduce(gradient, "sum")
        by_process = summed.chunk(accelerator.num_processes)
        return by_process[accelerator.process_index], None
