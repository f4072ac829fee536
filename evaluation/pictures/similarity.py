"""What features find alike: patches of one image, images, and patches of other images.

B images, h x w patches, D width, P patches that are asked for, n images that are looked through.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpp.features.neighbours import largest_of_rows

SPREAD = ((0.25, 0.25), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (0.75, 0.75))  # of the height and width


def spread_patches(grid: tuple[int, int]) -> list[int]:
    """Some patches over the whole image, counted row by row from 0."""
    rows, columns = grid
    return list(dict.fromkeys(int(down * rows) * columns + int(right * columns) for down, right in SPREAD))


def patch_similarity(features: Tensor, patches: Sequence[int]) -> Tensor:
    """Cosine similarity of some patches of an image with all of it: (B, h, w, D) to (B, P, h, w)."""
    units = F.normalize(features, dim=-1)
    asked = units.flatten(1, 2)[:, list(patches)]  # (B, P, D)
    return torch.einsum("bpd,bhwd->bphw", asked, units)


class Alike(NamedTuple):
    """The nearest images, and the nearest patches in other images, of B queries; the nearest first."""

    images: Tensor  # (B, k): which of the images that were looked through
    image_similarity: Tensor  # (B, k)
    hosts: Tensor  # (B, k): images with the nearest patches, each image once
    patches: Tensor  # (B, k): which patch of these
    patch_similarity: Tensor  # (B, k)


@torch.no_grad()
def look_through(
    features: Callable[[Tensor], Tensor],
    queries: Tensor,
    patch: int,
    gallery: Iterable[Tensor],
    own: Sequence[int],
    count: int,
) -> Alike:
    """The images, and the patches, that are most like queries: by cosine, of the mean of the patches and of a patch.

    Args:
        features: of the patches of images (b, C, H, W): (b, h, w, D).
        queries: (B, C, H, W).
        patch: of each query, counted row by row from 0.
        gallery: batches of n images (b, C, H, W), which are seen once.
        own: where each query is in the gallery: it does not count.
        count: k, fewer where there are fewer other images.
    """

    def units(images: Tensor) -> tuple[Tensor, Tensor]:
        found = features(images).flatten(1, 2)
        return F.normalize(found.mean(1), dim=-1), F.normalize(found, dim=-1)

    wholes, patches = units(queries)
    near, best, places = [], [], []
    for images in gallery:
        others, of_others = units(images)
        near.append(wholes @ others.T)
        similarity, place = torch.einsum("bd,npd->bnp", patches[:, patch], of_others).max(-1)
        best.append(similarity)
        places.append(place)
    near, best, places = (torch.cat(parts, 1) for parts in (near, best, places))  # (B, n)
    itself = torch.arange(len(queries)), torch.as_tensor(own)
    near[itself] = best[itself] = -torch.inf
    count = min(count, near.shape[1] - 1)
    image_similarity, found = largest_of_rows(near, count)
    similarity, hosts = largest_of_rows(best, count)
    return Alike(found, image_similarity, hosts, places.gather(1, hosts), similarity)
