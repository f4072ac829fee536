"""Running a Vision Transformer's blocks: again in the backward pass, and the last one at some tokens alone."""

from collections.abc import Iterable

from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpp.models.attention import attention_at, is_known, take
from mpp.models.vit import PositionedBlock


def through(blocks: Iterable[nn.Module], tokens: Tensor, again: bool) -> Tensor:
    """Tokens (B, T, D) after these blocks, whose activations are computed again in the backward pass or kept."""
    for block in blocks:
        tokens = checkpoint(block, tokens, use_reentrant=False) if again else block(tokens)
    return tokens


def block_at(block: nn.Module, tokens: Tensor, index: Tensor) -> Tensor:
    """`block(tokens)` at `index`, computing the rest only where the block is neither timm's plain one nor ours.

    Args:
        tokens: (B, N, D), all of them: every token is a key and a value.
        index: (B, K), the tokens that are looked at.
    Returns:
        (B, K, D).
    """
    if type(block) not in (Block, PositionedBlock):
        return take(block(tokens), index)
    tokens = block.place(tokens) if isinstance(block, PositionedBlock) else tokens
    normed, known = block.norm1(tokens), is_known(block.attn)
    attended = attention_at(block.attn, normed, index) if known else take(block.attn(normed), index)
    looked_at = take(tokens, index) + block.drop_path1(block.ls1(attended))
    return looked_at + block.drop_path2(block.ls2(block.mlp(block.norm2(looked_at))))
