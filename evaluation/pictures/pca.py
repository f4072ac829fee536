"""What patches have in common: principal components of their features, by depth."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COLORS = 3  # principal components that are shown: red, green, blue
NOISE = 1e-10  # a component with so small a share of the first one's variance is rounding


class Components(NamedTuple):
    """The first principal components of patch features at one depth, over all images together."""

    coordinates: Tensor  # (B, h, w, 3) of each patch; 0 on average
    shares: Tensor  # (3,) of the variance

    @property
    def colors(self) -> Tensor:
        """(B, h, w, 3) in [0, 1]: red, green, blue are the components, from the 2nd to the 98th percentile of each."""
        low, high = self.coordinates.flatten(0, 2).quantile(torch.tensor([0.02, 0.98]), dim=0)
        scaled = (self.coordinates - low) / (high - low)
        return torch.where(high > low, scaled, 0.5).clamp(0, 1)

    @property
    def foreground(self) -> Tensor:
        """(B, h, w) bool: where the first component is above its mean."""
        return self.coordinates[..., 0] > 0


def components_by_depth(features: Sequence[Tensor]) -> list[Components]:
    """Principal components of patch features, (B, h, w, D) for each depth.

    Signs are fixed, so that a picture can be drawn again. At the last depth the first component is larger in the middle
    of the images than at their border, where the background is; of the others' axes the number that is largest in size
    is positive. At each depth before, a component has the sign by which it is more like that of the depth after it.
    """
    found: list[Components] = []
    for of_depth in reversed(features):
        coordinates, shares = principal_components(of_depth)
        if found:
            like = (coordinates * found[-1].coordinates).sum((0, 1, 2))
        else:
            inside = torch.zeros(coordinates.shape[1:3], dtype=torch.bool)
            inside[1:-1, 1:-1] = True
            like = torch.ones(COLORS)
            like[0] = -coordinates[..., 0][:, ~inside].mean()  # the mean of all is 0
        found.append(Components(coordinates * torch.where(like < 0, -1, 1), shares))
    return found[::-1]


def principal_components(features: Tensor) -> tuple[Tensor, Tensor]:
    """(B, h, w, D) to coordinates (B, h, w, 3), and shares of the variance (3,); rounding has the coordinate 0."""
    flat = features.double().flatten(0, 2)
    centred = flat - flat.mean(0)
    variances, axes = torch.linalg.eigh(centred.T @ centred)
    variances, axes = variances.flip(0).clamp(min=0), axes.flip(1)[:, :COLORS]  # (D,), (D, 3)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    coordinates = (centred @ (axes * largest.sign())).view(*features.shape[:3], COLORS)
    coordinates[..., variances[:COLORS] <= NOISE * variances[0]] = 0
    shares = variances[:COLORS] / variances.sum().clamp(min=torch.finfo(torch.double).tiny)
    return coordinates.float(), shares.float()
