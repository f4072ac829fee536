"""Frozen features of patches, and the masks of their images.

B or n images, h x w patches, D width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from evaluation.frozen.encoder import FrozenEncoder, patch_grid
from evaluation.frozen.features import cut_dev_split
from mpp.config import ImageSize
from mpp.features.frozen import tokens_at


class PatchBaseline(NamedTuple):
    """Features without a model: the mean colour and the position of each patch."""

    img_size: ImageSize
    crop_pct: float
    grid: tuple[int, int]
    stages: Sequence[None] = (None,)


PatchEncoder = FrozenEncoder | PatchBaseline
"""A source of patch features."""


class PatchFeatures(NamedTuple):
    """Features of patches at one depth, and the masks of their images."""

    train: NDArray[np.float32]  # (n, h, w, D)
    train_masks: NDArray[np.int16]  # (n, H, W)
    test: NDArray[np.float32]
    test_masks: NDArray[np.int16]
    test_images: Sequence[str] = ()  # names of the test images; empty: unknown

    def dev_split(self) -> "PatchFeatures":
        """The training features, a tenth of whose images are the test split: choices are made on it."""
        train, dev = cut_dev_split(len(self.train))
        return PatchFeatures(
            self.train[train],
            self.train_masks[train],
            self.train[dev],
            self.train_masks[dev],
        )


@torch.no_grad()
def patch_features(encoder: PatchEncoder, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """Features of each patch of images (B, C, H, W) after each depth, (B, h, w, D) float32."""
    if isinstance(encoder, PatchBaseline):
        return [color_and_position(images, encoder.grid)]
    model = encoder.model
    grid = patch_grid(model)
    features = []
    for depth, tokens in zip(depths, tokens_at(model, encoder.normalize(images), depths), strict=True):
        patches = tokens[:, model.num_prefix_tokens :]
        if depth == len(encoder.stages) and hasattr(model, "fc_norm"):  # some encoders have their last norm there
            patches = model.fc_norm(patches)
        features.append(patches.unflatten(1, grid).float().cpu())
    return features


def color_and_position(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mean colour of each patch, its row and its column, each from -0.5 to 0.5: (B, h, w, C + 2)."""
    colors = F.adaptive_avg_pool2d(images.float() / 255 - 0.5, grid).movedim(1, -1).cpu()
    rows, columns = ((torch.arange(count) + 0.5) / count - 0.5 for count in grid)
    positions = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
    return torch.cat([colors, positions.expand(len(images), -1, -1, -1)], -1)
