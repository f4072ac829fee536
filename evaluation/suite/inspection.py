"""What an encoder has learned, as numbers: its filters, positions, attention and patch features.

The first three are the paper's (section 4.5, D.7, D.8); the last are as DINOv2 shows them (Oquab et al., 2023).
Attention weights are those that timm's own forward pass computes, seen by hooks block by block; nothing keeps more than
one block's. T tokens: the prefix ([class] and registers) and N patches on a grid of h x w.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from evaluation.suite.encoders import ColorFloor, FrozenEncoder
from mpp.frozen_features import tokens_at
from mpp.models.attention import RELATIVE, Biases, RelativeKeys, is_known
from mpp.models.encoder import set_attention

COLORS = 3  # principal components that are shown: red, green, blue
NOISE = 1e-10  # a component with so small a share of the first one's variance is rounding


class Unavailable(ValueError):
    """An encoder does not have what a picture shows; the message says what it lacks."""


def model_of(encoder: FrozenEncoder | ColorFloor) -> nn.Module:
    """timm's model; a floor has none."""
    if isinstance(encoder, ColorFloor):
        raise Unavailable("a floor has no weights")
    return encoder.model


def grid_of(model: nn.Module) -> tuple[int, int]:
    """Patches by height and width."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is None or not hasattr(model, "num_prefix_tokens"):
        raise Unavailable(f"{type(model).__name__} has no sequence of patches")
    return grid


def filter_components(model: nn.Module, count: int = 28) -> tuple[Tensor, Tensor]:
    """Principal components of the first filters on RGB: a ViT's patch embedding, a ResNet's stem (paper, Figure 7).

    Args:
        count: at most so many; there are no more than filters, or than numbers in one.
    Returns:
        (count, 3, P, P), of unit length, the number largest in size positive; (count,) shares of the variance.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or first.in_channels != 3:
        raise Unavailable(f"{type(model).__name__} has no convolution on RGB")
    filters = first.weight.detach().double().cpu()  # (D, 3, P, P)
    flat = filters.flatten(1)
    _, values, components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    components = (components * largest.sign())[:count]
    return components.unflatten(1, filters.shape[1:]).float(), (values**2 / (values**2).sum())[:count].float()


def position_similarity(model: nn.Module) -> Tensor:
    """How alike the encoder takes the places of any two patches to be, (h, w, h, w): of query and key.

    Embeddings that are added: their cosine similarity. `relative`: that of the embedding of their offset with the
    embedding of no offset. `relative_bias`: the bias itself. The last two are means over blocks (and heads).
    """
    rows, columns = grid_of(model)
    patches = rows * columns
    position = getattr(model, "position", None)
    if position in RELATIVE and getattr(model, "mixing", None) == "axial":
        raise Unavailable("positions in rows and columns have no map of all patches")
    if position == "rope":
        raise Unavailable("rotary positions are fixed turns of queries and keys: nothing is learned")
    if position in RELATIVE:
        found = torch.stack([of_offsets(block.attn.added) for block in model.blocks]).mean(0)[-patches:, -patches:]
        return found.float().view(rows, columns, rows, columns)
    embedding = getattr(model, "pos_embed", None)
    if isinstance(getattr(model, "pos_embeds", None), nn.Module):
        embedding = model.pos_embeds()[None]
    if not isinstance(embedding, Tensor) or embedding.ndim != 3 or embedding.shape[1] < patches:
        raise Unavailable(f"this {type(model).__name__} has no position embedding for each patch")
    found = nn.functional.normalize(embedding.detach()[0, -patches:].double().cpu(), dim=-1)
    return (found @ found.T).float().view(rows, columns, rows, columns)


def of_offsets(added: RelativeKeys | Biases) -> Tensor:
    """What a block learned of the offset of each query and key, (T, T)."""
    if isinstance(added, Biases):
        return added.biases.get_bias()[0].detach().double().cpu().mean(0)
    offsets = nn.functional.normalize(added.pos_embed_offsets.detach().double().cpu(), dim=-1)
    return (offsets @ offsets[len(offsets) // 2])[added.offsets.cpu()]


@torch.no_grad()
def see_attention(encoder: FrozenEncoder, images: Tensor, see: Callable[[int, Tensor], None]) -> None:
    """Run the encoder and show the attention weights of each block as they are computed.

    Args:
        images: (B, 3, S, S) uint8.
        see: called with the block's number (from 0) and weights (B, heads, T, T), rows of queries that sum to 1.
    """
    blocks = getattr(encoder.model, "blocks", ())
    grid_of(encoder.model)
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
    return float(ratio()) if ratio else encoder.img_size / grid_of(encoder.model)[0]


def attention_distance(encoder: FrozenEncoder, batches: Iterable[Tensor]) -> Tensor:
    """Mean attention distance of each head (paper, Figure 7), over images in batches (B, 3, S, S) uint8.

    Returns:
        (depth, heads), in pixels of the input.
    """
    grid, prefix = grid_of(encoder.model), getattr(encoder.model, "num_prefix_tokens", 0)
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
        images: (B, 3, S, S) uint8.
    Returns:
        (B, h, w), as multiples of uniform attention: 1 on average.
    """
    if start == "class" and not getattr(encoder.model, "has_class_token", False):
        raise Unavailable("this encoder has no [class] token to roll out from; use patches")
    rollout: Tensor | None = None

    def see(depth: int, weights: Tensor) -> None:
        nonlocal rollout
        rollout = roll_out(rollout, weights, residual)

    see_attention(encoder, images, see)
    prefix, grid = encoder.model.num_prefix_tokens, grid_of(encoder.model)
    rows = rollout[:, 0] if start == "class" else rollout[:, prefix:].mean(1)
    patches = rows[:, prefix:]
    return (patches / patches.mean(1, keepdim=True)).unflatten(1, grid).cpu()


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


@torch.no_grad()
def patch_features(encoder: FrozenEncoder, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """Features of each patch of images (B, 3, S, S) uint8 after each depth, (B, h, w, D) float32."""
    grid, prefix = grid_of(encoder.model), encoder.model.num_prefix_tokens
    tokens = tokens_at(encoder.model, encoder.normalize(images), depths)
    return [of_depth[:, prefix:].unflatten(1, grid).float().cpu() for of_depth in tokens]


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
