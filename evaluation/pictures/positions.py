"""What an encoder knows before its first block: filters of the patch embedding, and how alike two places are."""

import torch
from torch import Tensor, nn

from evaluation.frozen.encoder import Unavailable, patch_grid
from evaluation.pictures.pca import principal_components
from mpp.models.attention import RELATIVE, RelativeBiases, RelativeKeys


def filter_components(model: nn.Module, count: int = 28) -> tuple[Tensor, Tensor]:
    """Principal components of the first filters: a ViT's patch embedding, a ResNet's stem (paper, Figure 7).

    Args:
        count: at most so many; there are no more than filters, or than numbers in one.
    Returns:
        (count, C, P, P), of unit length, the number largest in size positive; (count,) shares of the variance.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        raise Unavailable(f"{type(model).__name__} has no convolution on pixels")
    filters = first.weight.detach().cpu()  # (D, C, P, P)
    components = principal_components(filters.flatten(1), count)
    return components.axes.unflatten(1, filters.shape[1:]).float(), components.variance_shares.float()


def position_similarity(model: nn.Module) -> Tensor:
    """How alike the encoder takes the places of any two patches to be, (h, w, h, w): of query and key.

    Embeddings that are added: their cosine similarity. `relative`: that of the embedding of their offset with the
    embedding of no offset. `relative_bias`: the bias itself. The last two are means over blocks (and heads).
    """
    rows, columns = patch_grid(model)
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


def of_offsets(added: RelativeKeys | RelativeBiases) -> Tensor:
    """What a block learned of the offset of each query and key, (T, T)."""
    if isinstance(added, RelativeBiases):
        return added.biases.get_bias()[0].detach().double().cpu().mean(0)
    offsets = nn.functional.normalize(added.pos_embed_offsets.detach().double().cpu(), dim=-1)
    return (offsets @ offsets[len(offsets) // 2])[added.offsets.cpu()]
