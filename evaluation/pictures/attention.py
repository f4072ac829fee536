"""Where an encoder looks: attention of each block as it is computed, its distance, and its rollout."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from evaluation.frozen.encoder import FrozenEncoder, Unavailable, patch_grid
from mpp.models.attention import is_known
from mpp.models.timm_models import has_class, set_attention


@torch.no_grad()
def see_attention(encoder: FrozenEncoder, images: Tensor, see: Callable[[int, Tensor], None]) -> None:
    """Run the encoder and show the attention weights of each block as they are computed.

    Args:
        images: (B, C, H, W).
        see: called with the block's number (from 0) and weights (B, heads, T, T), rows of queries that sum to 1.
    """
    blocks = getattr(encoder.model, "blocks", ())
    patch_grid(encoder.model)
    if not len(blocks) or not all(is_known(getattr(block, "attn", None)) for block in blocks):
        raise Unavailable(f"the blocks of this {type(encoder.model).__name__} have no plain attention")
    fused = [block.attn.fused_attn for block in blocks]
    set_attention(encoder.model, fused=False)  # the fused kernel has no weights to show

    def show(depth: int, weights: Tensor) -> None:
        with torch.autocast(weights.device.type, enabled=False):  # sums are in float32, whatever the model computes in
            see(depth, weights.float())

    hooks = [
        block.attn.attn_drop.register_forward_pre_hook(lambda _, args, depth=depth: show(depth, args[0]))
        for depth, block in enumerate(blocks)
    ]
    try:
        encoder.model.forward_features(encoder.normalize(images))
    finally:
        for block, was in zip(blocks, fused, strict=True):
            block.attn.fused_attn = was
        for hook in hooks:
            hook.remove()


def distances(grid: tuple[int, int], patch_size: float) -> Tensor:
    """Distances in pixels from the centre of each patch to that of each, (N, N)."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], dim=1).double() * patch_size
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist").float()


def mean_distance(weights: Tensor, apart: Tensor) -> Tensor:
    """Attention-weighted distance between query and key, averaged over the queries.

    Args:
        weights: (B, heads, N, N) among patches; rows are scaled to sum to 1, so that what goes to [class] is left out.
        apart: (N, N), in pixels.
    Returns:
        (B, heads), in pixels.
    """
    weighted, whole = torch.einsum("bhqk,qk->bhq", weights, apart), weights.sum(-1)
    looks = whole > 0  # a query that attends to [class] alone looks nowhere
    return (weighted / whole.where(looks, 1)).sum(-1) / looks.sum(-1).clamp(min=1)


def spacing(encoder: FrozenEncoder) -> float:
    """Pixels of the input from one patch to the next: fewer than a patch has, where patches overlap."""
    ratio = getattr(encoder.model.patch_embed, "feat_ratio", None)
    return float(ratio()) if ratio else encoder.img_size[0] / patch_grid(encoder.model)[0]


def attention_distance(encoder: FrozenEncoder, batches: Iterable[Tensor]) -> Tensor:
    """Mean attention distance of each head (paper, Figure 7), over images in batches (B, C, H, W).

    Returns:
        (depth, heads), in pixels of the input.
    """
    grid, prefix = patch_grid(encoder.model), getattr(encoder.model, "num_prefix_tokens", 0)
    apart = distances(grid, spacing(encoder))
    totals: dict[int, Tensor] = {}
    count = 0

    def see(depth: int, weights: Tensor) -> None:
        mean = mean_distance(weights[:, :, prefix:, prefix:], apart.to(weights.device)).double().sum(0).cpu()
        totals[depth] = totals.get(depth, 0) + mean

    for images in batches:
        see_attention(encoder, images, see)
        count += len(images)
    return torch.stack([totals[depth] for depth in sorted(totals)]) / count


def roll_out(below: Tensor | None, weights: Tensor, residual: bool) -> Tensor:
    """Attention rollout, one layer further: heads averaged, layers multiplied (paper, Figure 6 and appendix D.8).

    Args:
        below: the rollout up to the layer below, (B, T, T); None: this is the first layer.
        weights: of this layer, (B, heads, T, T).
        residual: average the layer with the identity, as Abnar and Zuidema (2020) do for the residual connection.
    Returns:
        (B, T, T): how much of each output token comes from each input token. Rows sum to 1.
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
        raise Unavailable("this encoder has no [class] token to roll out from; use patches")
    rollout: Tensor | None = None

    def see(depth: int, weights: Tensor) -> None:
        nonlocal rollout
        rollout = roll_out(rollout, weights, residual)

    see_attention(encoder, images, see)
    prefix, grid = encoder.model.num_prefix_tokens, patch_grid(encoder.model)
    rows = rollout[:, 0] if start == "class" else rollout[:, prefix:].mean(1)
    patches = rows[:, prefix:]
    return (patches / patches.mean(1, keepdim=True)).unflatten(1, grid).cpu()
