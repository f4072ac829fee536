"""Similarity of features: of patches of one image, of images, and of patches of different images.

B images, h x w patches, D width, P query patches, n images of a gallery.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.pictures.subject import concatenate
from mpp.features.neighbours import largest_of_rows

SPREAD_POSITIONS = ((0.25, 0.25), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (0.75, 0.75))  # in height and width


def spread_patches(grid: tuple[int, int]) -> list[int]:
    """Different patches at SPREAD_POSITIONS of an image, counted row by row from 0."""
    rows, columns = grid
    patches = [int(vertical * rows) * columns + int(horizontal * columns) for vertical, horizontal in SPREAD_POSITIONS]
    return list(dict.fromkeys(patches))


def patch_similarity(features: Tensor, patches: Sequence[int]) -> Tensor:
    """Cosine similarity of some patches of an image with all its patches: (B, h, w, D) to (B, P, h, w)."""
    units = F.normalize(features, dim=-1)
    queries = units.flatten(1, 2)[:, list(patches)]  # (B, P, D)
    return torch.einsum("bpd,bhwd->bphw", queries, units)


class NearestInGallery(NamedTuple):
    """The nearest images, and the nearest patches in other images, of B queries; the nearest first."""

    images: Tensor  # (B, k): indices in the gallery of the images that are nearest as a whole
    image_similarity: Tensor  # (B, k)
    hosts: Tensor  # (B, k): indices in the gallery of the images with the nearest patches
    patches: Tensor  # (B, k): the nearest patch of each host
    patch_similarity: Tensor  # (B, k)


def search_gallery(
    patch_features: Callable[[Tensor], Tensor],
    queries: Tensor,
    patch: int,
    gallery: Iterable[Tensor],
    queries_in_gallery: Sequence[int],
    count: int,
) -> NearestInGallery:
    """The images that are nearest to queries, by the mean of their patches, and those with the nearest patches.

    Similarity is the cosine.

    Args:
        patch_features: from images (b, C, H, W) to features (b, h, w, D).
        queries: (B, C, H, W).
        patch: the patch of each query whose nearest patches are sought, counted row by row from 0.
        gallery: batches of images (b, C, H, W), n in all, read once.
        queries_in_gallery: index of each query in the gallery: a query is not its own neighbour.
        count: k, fewer where there are fewer other images.
    """

    def unit_features(images: Tensor) -> tuple[Tensor, Tensor]:
        """Features of whole images (b, D) and of their patches (b, N, D), of unit length."""
        features = patch_features(images).flatten(1, 2)
        return F.normalize(features.mean(1), dim=-1), F.normalize(features, dim=-1)

    query_images, query_patches = unit_features(queries)
    batches = []
    for images in gallery:
        gallery_images, gallery_patches = unit_features(images)
        similarity_by_patch = torch.einsum("bd,npd->bnp", query_patches[:, patch], gallery_patches)
        batches.append((query_images @ gallery_images.T, *similarity_by_patch.max(-1)))
    # (B, n): of whole images; of the nearest patch of each image; and its number
    image_similarity, patch_similarity, nearest_patch = concatenate(batches, dim=1)
    itself = (torch.arange(len(queries)), torch.as_tensor(queries_in_gallery))
    image_similarity[itself] = -torch.inf
    patch_similarity[itself] = -torch.inf
    count = min(count, image_similarity.shape[1] - 1)
    nearest_images = largest_of_rows(image_similarity, count)
    hosts = largest_of_rows(patch_similarity, count)
    return NearestInGallery(
        images=nearest_images.index,
        image_similarity=nearest_images.similarity,
        hosts=hosts.index,
        patches=nearest_patch.gather(1, hosts.index),
        patch_similarity=hosts.similarity,
    )
