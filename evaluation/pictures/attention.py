"""Attention of an encoder: the weights of each block as they are computed, mean attention distance, and rollout.

B images, T tokens (N patches and a prefix such as [class]), h x w patches.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from evaluation.frozen.encoder import FrozenEncoder, patch_grid
from mpp.errors import Unavailable
from mpp.models.plain import (
    has_class,
    set_attention,
    shows_weights,
)


def visit_attention(encoder: FrozenEncoder, images: Tensor, visit: Callable[[int, Tensor], None]) -> None:
    """Run the encoder and call `visit` with the attention weights of each block as they are computed.

    Args:
        images: (B, C, H, W).
        visit: takes the block's number (from 0) and weights (B, heads, T, T), whose rows (queries) sum to 1.
    """

    def visit_in_float32(depth: int, dropout: nn.Module, inputs: tuple[Tensor]) -> None:
        (weights,) = inputs
        with torch.autocast(weights.device.type, enabled=False):
            visit(depth, weights.float())

    with ExitStack() as undo:
        for depth, block in enumerate(blocks_with_attention(encoder)):
            attention = block.attn
            undo.callback(setattr, attention, "fused_attn", attention.fused_attn)
            hook = partial(visit_in_float32, depth)
            undo.enter_context(attention.attn_drop.register_forward_pre_hook(hook))
        set_attention(encoder.model, fused=False)  # the fused kernel returns no weights
        encoder.model.forward_features(encoder.normalize(images))


def blocks_with_attention(encoder: FrozenEncoder) -> Sequence[nn.Module]:
    """The blocks of a ViT; Unavailable where the patches form no grid, or a block has another attention than plain."""
    patch_grid(encoder.model)
    blocks = getattr(encoder.model, "blocks", ())
    if len(blocks) == 0 or not all(shows_weights(getattr(block, "attn", None)) for block in blocks):
        raise Unavailable(f"the blocks of this {type(encoder.model).__name__} have no plain attention")
    return blocks


def patch_distances(grid: tuple[int, int], spacing: float) -> Tensor:
    """Distances in pixels between the centres of all pairs of patches, (N, N).

    Args:
        spacing: pixels from one patch to the next.
    """
    rows, columns = grid
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


def patch_spacing(encoder: FrozenEncoder) -> float:
    """Pixels of the input from one patch to the next; fewer than the side of a patch where patches overlap."""
    ratio = getattr(encoder.model.patch_embed, "feat_ratio", None)
    if ratio:
        return float(ratio())
    rows, _ = patch_grid(encoder.model)
    return encoder.img_size[0] / rows


def attention_distance(encoder: FrozenEncoder, batches: Iterable[Tensor]) -> Tensor:
    """Mean attention distance of each head (paper, Figure 7), over images in batches (B, C, H, W).

    Returns:
        (depth, heads), in pixels of the input.
    """
    prefix = getattr(encoder.model, "num_prefix_tokens", 0)
    distances = patch_distances(patch_grid(encoder.model), patch_spacing(encoder))
    totals: dict[int, Tensor | float] = defaultdict(float)  # block -> (heads,)
    image_count = 0

    def add_distances(block: int, weights: Tensor) -> None:
        among_patches = weights[:, :, prefix:, prefix:]
        by_image = mean_distance(among_patches, distances.to(weights.device))
        totals[block] += by_image.double().sum(0).cpu()

    for images in batches:
        visit_attention(encoder, images, add_distances)
        image_count += len(images)
    return torch.stack(list(totals.values())) / image_count


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
    if below is None:
        return layer
    return layer @ below


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

    def add_layer(depth: int, weights: Tensor) -> None:
        nonlocal rollout
        rollout = extend_rollout(rollout, weights, residual)

    visit_attention(encoder, images, add_layer)
    prefix = encoder.model.num_prefix_tokens
    from_start = rollout[:, 0] if start == "class" else rollout[:, prefix:].mean(1)  # (B, T)
    on_patches = from_start[:, prefix:]
    relative = on_patches / on_patches.mean(1, keepdim=True)
    return relative.unflatten(1, patch_grid(encoder.model)).cpu()
