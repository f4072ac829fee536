"""Principal components: of any vectors, and of patch features by depth."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

COMPONENTS_SHOWN = 3  # as red, green and blue
ROUNDING = 1e-10  # share of the first component's variance below which another one is rounding
PERCENTILES = (0.02, 0.98)  # of the coordinates, the darkest and the brightest colour


class PrincipalComponents(NamedTuple):
    """The first `count` components of n vectors; there are no more axes than vectors or dimensions."""

    axes: Tensor  # (at most count, D) float64, of unit length; of each the number that is largest in size is positive
    coordinates: Tensor  # (n, count) float64, 0 on average
    variance_shares: Tensor  # (count,) float64


def principal_components(vectors: Tensor, count: int) -> PrincipalComponents:
    """The first principal components of vectors (n, D); components that the vectors lack are 0."""
    centred = vectors.double() - vectors.double().mean(0)
    _, deviations, axes = torch.linalg.svd(centred, full_matrices=False)
    variances = deviations**2
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = (axes * largest.sign())[:count]
    coordinates = centred @ axes.T
    coordinates[:, variances[:count] <= ROUNDING * variances[0]] = 0
    total = variances.sum().clamp(min=torch.finfo(torch.double).tiny)
    shares = variances[:count] / total
    missing = count - len(axes)
    return PrincipalComponents(axes, F.pad(coordinates, (0, missing)), F.pad(shares, (0, missing)))


class PatchComponents(NamedTuple):
    """The first three principal components of patch features at one depth, over all images together."""

    coordinates: Tensor  # (B, h, w, 3)
    variance_shares: Tensor  # (3,)

    @property
    def colors(self) -> Tensor:
        """(B, h, w, 3) in [0, 1]: red, green, blue are the components, from the 2nd to the 98th percentile of each."""
        low, high = self.coordinates.flatten(0, 2).quantile(torch.tensor(PERCENTILES), dim=0)
        scaled = (self.coordinates - low) / (high - low)
        return torch.where(high > low, scaled, 0.5).clamp(0, 1)

    @property
    def foreground(self) -> Tensor:
        """(B, h, w) bool: where the first component is above its mean."""
        return self.coordinates[..., 0] > 0


def components_by_depth(features: Sequence[Tensor]) -> list[PatchComponents]:
    """Principal components of patch features, (B, h, w, D) for each depth.

    At the last depth the first component is turned so that it is larger in the middle of the images than at their
    border, where the background is. At each depth before, a component has the sign by which it is more like that of
    the depth after it.
    """
    by_depth: list[PatchComponents] = []
    for of_depth in reversed(features):
        components = patch_components(of_depth)
        if by_depth:
            agreement = (components.coordinates * by_depth[-1].coordinates).sum((0, 1, 2))
        else:
            agreement = torch.ones(COMPONENTS_SHOWN)
            agreement[0] = -mean_at_the_border(components.coordinates[..., 0])  # the mean over all patches is 0
        signs = torch.where(agreement < 0, -1, 1)
        by_depth.append(components._replace(coordinates=components.coordinates * signs))
    return by_depth[::-1]


def patch_components(features: Tensor) -> PatchComponents:
    """Principal components of patch features (B, h, w, D)."""
    components = principal_components(features.flatten(0, 2), COMPONENTS_SHOWN)
    coordinates = components.coordinates.float().unflatten(0, features.shape[:3])
    return PatchComponents(coordinates, components.variance_shares.float())


def mean_at_the_border(values: Tensor) -> Tensor:
    """Mean of the values (B, h, w) of the patches along the edges of the images."""
    border = torch.ones(values.shape[1:], dtype=torch.bool)
    border[1:-1, 1:-1] = False
    return values[:, border].mean()
