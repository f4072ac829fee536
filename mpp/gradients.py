"""Histograms of oriented gradients of images (Dalal and Triggs, 2005)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ORIENTATION_BINS = 9  # of a histogram


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
