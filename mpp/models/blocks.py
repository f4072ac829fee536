"""Blocks of a Vision Transformer: run with checkpointed activations, the last one at a few tokens; initial weights."""

from collections.abc import Sequence

from timm.layers import DropPath
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpp.models.attention import attention_at, gather_tokens, is_known
from mpp.models.plain import BlockArguments
from mpp.models.vit import PositionedBlock


def initialize(module: nn.Module) -> None:
    """As timm's encoders: weights truncated normal of deviation 0.02, biases 0. (MAE: uniform by Xavier.)"""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def run_blocks(
    blocks: Sequence[nn.Module],
    tokens: Tensor,
    checkpointed: bool,
    block_arguments: Sequence[BlockArguments] | None = None,
) -> Tensor:
    """Tokens (B, T, D) after these blocks.

    Args:
        checkpointed: compute the activations of the blocks again in the backward pass, instead of keeping them.
        block_arguments: further arguments of each block; None: there are none.
    """
    if block_arguments is None:
        block_arguments = [{}] * len(blocks)
    for block, arguments in zip(blocks, block_arguments, strict=True):
        if checkpointed:
            repeats = draws_random_numbers(block)
            tokens = checkpoint(block, tokens, use_reentrant=False, preserve_rng_state=repeats, **arguments)
        else:
            tokens = block(tokens, **arguments)
    return tokens


def draws_random_numbers(block: nn.Module) -> bool:
    """Whether a block has dropout or drop path, whose random numbers a second computation has to repeat."""
    rates = [getattr(module, "p", 0.0) for module in block.modules() if isinstance(module, nn.Dropout)]
    rates += [module.drop_prob or 0.0 for module in block.modules() if isinstance(module, DropPath)]
    return any(rate > 0 for rate in rates)


def block_at(block: nn.Module, tokens: Tensor, index: Tensor, block_arguments: BlockArguments | None = None) -> Tensor:
    """A block's output at `index`, without computing the rest where the block is timm's plain one or ours.

    Args:
        tokens: (B, N, D), all of them: every token is a key and a value.
        index: (B, K), the tokens whose output is needed.
        block_arguments: further arguments of the block; timm's plain one and ours have none.
    Returns:
        (B, K, D).
    """
    if type(block) not in (Block, PositionedBlock):
        return gather_tokens(block(tokens, **(block_arguments or {})), index)
    if isinstance(block, PositionedBlock):
        tokens = block.add_positions(tokens)
    normed = block.norm1(tokens)
    if is_known(block.attn):
        attended = attention_at(block.attn, normed, index)
    else:
        attended = gather_tokens(block.attn(normed), index)
    output = gather_tokens(tokens, index) + block.drop_path1(block.ls1(attended))
    return output + block.drop_path2(block.ls2(block.mlp(block.norm2(output))))
