"""The numbers behind pictures of an encoder: its attention, positions and filters, and the similarity of features.

B images, T tokens (N patches and a prefix such as [class]), h x w patches, D width, P query patches.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from torch import Tensor, nn

from evaluation.frozen.encoder import FrozenEncoder, patch_grid
from mpp.errors import Unavailable
from mpp.models.plain import has_class, set_attention, shows_weights

COMPONENTS_SHOWN = 3  # as red, green and blue
ROUNDING = 1e-10  # share of the variance below which a component is rounding
PERCENTILES = (2, 98)  # of the coordinates, the darkest and the brightest colour


# --- attention ---


def read_attention(encoder: FrozenEncoder, images: Tensor, read: Callable[[Tensor], Any]) -> list[Any]:
    """The results of `read` for the attention weights of each block, one block at a time.

    Args:
        images: (B, C, H, W).
        read: takes weights (B, heads, T, T), whose rows (queries) sum to 1.
    """
    patch_grid(encoder.model)  # Unavailable without patches
    blocks = getattr(encoder.model, "blocks", ())
    if len(blocks) == 0 or not all(shows_weights(getattr(block, "attn", None)) for block in blocks):
        raise Unavailable(f"the blocks of this {type(encoder.model).__name__} have no plain attention")
    results = []

    def read_in_float32(dropout: nn.Module, inputs: tuple[Tensor]) -> None:
        (weights,) = inputs
        with torch.autocast(weights.device.type, enabled=False):
            results.append(read(weights.float()))

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(setattr, block.attn, "fused_attn", block.attn.fused_attn)
            undo.enter_context(block.attn.attn_drop.register_forward_pre_hook(read_in_float32))
        set_attention(encoder.model, fused=False)  # the fused kernel returns no weights
        encoder.model.forward_features(encoder.normalize(images))
    return results


def patch_distances(encoder: FrozenEncoder) -> Tensor:
    """Distances in pixels of the input between the centres of all pairs of patches, (N, N)."""
    rows, columns = patch_grid(encoder.model)
    spacing = encoder.model.patch_embed.feat_ratio()  # less than the side of a patch where patches overlap
    centres = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double() * spacing
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").float()


def mean_distance(weights: Tensor, distances: Tensor) -> Tensor:
    """Attention-weighted distance between query and key, averaged over the queries.

    Args:
        weights: (B, heads, N, N) among patches; rows are scaled to sum to 1, which leaves out the attention to [class].
        distances: (N, N), in pixels.
    Returns:
        (B, heads), in pixels.
    """
    weighted_distances = torch.einsum("bhqk,qk->bhq", weights, distances)
    weight_on_patches = weights.sum(-1)
    attends = weight_on_patches > 0  # false for a query that attends to [class] only
    by_query = weighted_distances / weight_on_patches.where(attends, 1)
    return by_query.sum(-1) / attends.sum(-1).clamp(min=1)


def attention_distance(encoder: FrozenEncoder, batches: Iterable[Tensor]) -> Tensor:
    """Mean attention distance of each head (paper, Figure 7), over images in batches (B, C, H, W).

    Returns:
        (depth, heads), in pixels of the input.
    """
    prefix = getattr(encoder.model, "num_prefix_tokens", 0)
    distances = patch_distances(encoder)

    def distance_among_patches(weights: Tensor) -> Tensor:
        return mean_distance(weights[:, :, prefix:, prefix:], distances.to(weights.device)).double().cpu()

    by_batch = [torch.stack(read_attention(encoder, images, distance_among_patches)) for images in batches]
    return torch.cat(by_batch, dim=1).mean(1)


def extend_rollout(below: Tensor | None, weights: Tensor, residual: bool) -> Tensor:
    """Attention rollout up to one more layer: heads averaged, layers multiplied (paper, Figure 6 and appendix D.8).

    Args:
        below: the rollout up to the layer below, (B, T, T); None: this is the first layer.
        weights: of this layer, (B, heads, T, T).
        residual: average the layer with the identity, as Abnar and Zuidema (2020) do for the residual connection.
    Returns:
        (B, T, T): the share of each input token (column) in each output token (row). Rows sum to 1.
    """
    layer = weights.mean(1)
    if residual:
        layer = (layer + torch.eye(layer.shape[-1], device=layer.device)) / 2
    return layer if below is None else layer @ below


def attention_rollout(
    encoder: FrozenEncoder, images: Tensor, residual: bool, start: Literal["class", "patches"]
) -> Tensor:
    """Rollout from the [class] token, or from the mean over the patches, to the patches.

    Args:
        images: (B, C, H, W).
    Returns:
        (B, h, w), as multiples of uniform attention: 1 on average.
    """
    if start == "class" and not has_class(encoder.model):
        raise Unavailable("this encoder has no [class] token to start the rollout from; use patches")
    rollout: Tensor | None = None

    def add_layer(weights: Tensor) -> None:
        nonlocal rollout
        rollout = extend_rollout(rollout, weights, residual)

    read_attention(encoder, images, add_layer)
    prefix = encoder.model.num_prefix_tokens
    from_start = rollout[:, 0] if start == "class" else rollout[:, prefix:].mean(1)  # (B, T)
    on_patches = from_start[:, prefix:]
    relative = on_patches / on_patches.mean(1, keepdim=True)
    return relative.unflatten(1, patch_grid(encoder.model)).cpu()


# --- filters and positions ---


def filter_components(model: nn.Module, count: int = 28) -> tuple[NDArray, NDArray]:
    """Principal components of the first filters: a ViT's patch embedding, a ResNet's stem (paper, Figure 7).

    Args:
        count: at most; there are no more components than filters, or than numbers in a filter.
    Returns:
        Components (count, C, P, P) of unit length, whose largest number in size is positive, and their shares of the
        variance (count,).
    """
    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if convolution is None:
        raise Unavailable(f"{type(model).__name__} has no convolution on pixels")
    filters = convolution.weight.detach().cpu().double()  # (D, C, P, P)
    vectors = filters.flatten(1).numpy()
    pca = PCA(min(count, *vectors.shape), svd_solver="full").fit(vectors)
    return pca.components_.reshape(-1, *filters.shape[1:]), pca.explained_variance_ratio_


def position_similarity(model: nn.Module) -> Tensor:
    """Cosine similarity of the position embeddings of all pairs of patches, (h, w, h, w): query, key."""
    rows, columns = patch_grid(model)
    embedding = getattr(model, "pos_embed", None)
    if isinstance(getattr(model, "pos_embeds", None), nn.Module):  # one for each block, of which this is the first
        embedding = model.pos_embeds()[None]
    patches = rows * columns
    if not isinstance(embedding, Tensor) or embedding.ndim != 3 or embedding.shape[1] < patches:
        raise Unavailable(f"this {type(model).__name__} adds no position embedding to each patch")
    units = F.normalize(embedding.detach()[0, -patches:].double().cpu(), dim=-1)  # a prefix such as [class] comes first
    return (units @ units.T).float().view(rows, columns, rows, columns)


# --- features of patches ---


def components_by_depth(features: Sequence[Tensor]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The first three principal components of patch features, (B, h, w, D) for each depth, over all images together.

    A component has the sign by which it is more like that of the next depth, so that colours do not jump.

    Returns:
        Coordinates (depths, B, h, w, 3), 0 on average, and shares of the variance (depths, 3); 0: there is none.
    """
    coordinates, shares = map(np.stack, zip(*map(patch_components, features), strict=True))
    for depth in reversed(range(len(features) - 1)):
        agreement = (coordinates[depth] * coordinates[depth + 1]).sum((0, 1, 2))
        coordinates[depth] *= np.where(agreement < 0, -1, 1)
    return coordinates.astype(np.float32), shares.astype(np.float32)


def patch_components(features: Tensor) -> tuple[NDArray, NDArray]:
    """Coordinates (B, h, w, 3) of patch features (B, h, w, D), and shares of the variance (3,)."""
    vectors = features.flatten(0, 2).double().numpy()
    if min(vectors.shape) < COMPONENTS_SHOWN:
        raise Unavailable(f"there are fewer than {COMPONENTS_SHOWN} patches or features")
    pca = PCA(COMPONENTS_SHOWN, svd_solver="full")
    with np.errstate(invalid="ignore"):  # all patches may be alike
        coordinates = pca.fit_transform(vectors)
    shares = np.nan_to_num(pca.explained_variance_ratio_)
    coordinates[:, shares <= ROUNDING] = 0
    return coordinates.reshape(*features.shape[:3], COMPONENTS_SHOWN), shares


def colors_of(coordinates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Coordinates (depths, B, h, w, 3) as red, green and blue in [0, 1], by their percentiles at each depth."""
    low, high = np.percentile(coordinates, PERCENTILES, axis=(1, 2, 3), keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):  # of a component without variance
        scaled = (coordinates - low) / (high - low)
    return np.nan_to_num(scaled, nan=0.5).clip(0, 1).astype(np.float32)


def spread_patches(grid: tuple[int, int]) -> list[int]:
    """The patch in the middle of an image, and those halfway to its corners, counted row by row from 0."""
    rows, columns = grid
    quarters = ((1, 1), (1, 3), (2, 2), (3, 1), (3, 3))
    return list(dict.fromkeys(rows * down // 4 * columns + columns * right // 4 for down, right in quarters))


def patch_similarity(features: Tensor, patches: Sequence[int]) -> Tensor:
    """Cosine similarity of some patches of an image with all its patches: (B, h, w, D) to (B, P, h, w)."""
    units = F.normalize(features, dim=-1)
    queries = units.flatten(1, 2)[:, list(patches)]  # (B, P, D)
    return torch.einsum("bpd,bhwd->bphw", queries, units)
