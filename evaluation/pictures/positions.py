"""Learned parameters of an encoder's input: filters of the patch embedding, and similarity of positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evaluation.frozen.encoder import patch_grid
from evaluation.pictures.pca import principal_components
from mpp.errors import Unavailable
from mpp.models.variants import RELATIVE, RelativeBiases, RelativeKeys


def filter_components(model: nn.Module, count: int = 28) -> tuple[Tensor, Tensor]:
    """Principal components of the first filters: a ViT's patch embedding, a ResNet's stem (paper, Figure 7).

    Args:
        count: at most; there are no more components than filters, or than numbers in a filter.
    Returns:
        Components (count, C, P, P) of unit length, whose largest number in size is positive, and their shares of the
        variance (count,).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            filters = module.weight.detach().cpu()  # (D, C, P, P)
            components = principal_components(filters.flatten(1), count)
            axes = components.axes.unflatten(1, filters.shape[1:])
            return axes.float(), components.variance_shares[: len(axes)].float()
    raise Unavailable(f"{type(model).__name__} has no convolution on pixels")


def position_similarity(model: nn.Module) -> Tensor:
    """Similarity of the positions of all pairs of patches as the encoder has learned it, (h, w, h, w): query, key.

    For added embeddings, their cosine similarity. For `relative` positions, the cosine similarity of the embedding of
    the offset with the embedding of no offset; for `relative_bias`, the bias itself: means over blocks, and over heads.
    """
    rows, columns = patch_grid(model)
    patches = rows * columns
    position = getattr(model, "position", None)
    if position in RELATIVE:
        if getattr(model, "mixing", None) == "axial":
            raise Unavailable("positions in rows and columns have no map of all patches")
        if position == "rope":
            raise Unavailable("rotary positions are fixed rotations of queries and keys: nothing is learned")
        by_block = torch.stack([offset_similarity(block.attn.added) for block in model.blocks])
        similarity = by_block.mean(0)[-patches:, -patches:]
    else:
        units = F.normalize(embedding_of_patches(model, patches), dim=-1)
        similarity = units @ units.T
    return similarity.float().view(rows, columns, rows, columns)


def embedding_of_patches(model: nn.Module, patch_count: int) -> Tensor:
    """Position embeddings that are added to the patches, (N, D) float64."""
    embedding = getattr(model, "pos_embed", None)
    if isinstance(getattr(model, "pos_embeds", None), nn.Module):
        embedding = model.pos_embeds()[None]
    if not isinstance(embedding, Tensor) or embedding.ndim != 3 or embedding.shape[1] < patch_count:
        raise Unavailable(f"this {type(model).__name__} has no position embedding for each patch")
    return embedding.detach()[0, -patch_count:].double().cpu()  # a prefix such as [class] comes first


def offset_similarity(added: RelativeKeys | RelativeBiases) -> Tensor:
    """Similarity of query and key by their offset, as a block has learned it, (T, T)."""
    if isinstance(added, RelativeBiases):
        biases = added.biases.get_bias()[0]  # (heads, T, T)
        return biases.detach().double().cpu().mean(0)
    embeddings = F.normalize(added.pos_embed_offsets.detach().double().cpu(), dim=-1)
    no_offset = embeddings[len(embeddings) // 2]
    by_offset = embeddings @ no_offset
    return by_offset[added.offsets.cpu()]
