"""Blocks of a Vision Transformer: their attention, the last one at a few tokens, their tokens in bf16.

B images, T tokens (prefix tokens first: [class], registers), K queries, D width, d width of a head.
"""

import copy
from collections.abc import Sequence
from typing import Any

import timm
import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Attention, LayerNorm, LayerScale
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpp.models.plain import BlockArguments, gather_tokens, uses_autocast
from mpp.runtime.messages import warn


def initialize(module: nn.Module) -> None:
    """As timm's encoders: weights truncated normal of deviation 0.02, biases 0. (MAE: uniform by Xavier.)"""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def run_blocks(
    blocks: Sequence[nn.Module], tokens: Tensor, checkpointed: bool, block_arguments: Sequence[BlockArguments]
) -> Tensor:
    """Tokens (B, T, D) after these blocks.

    Args:
        checkpointed: compute the activations of the blocks again in the backward pass, instead of keeping them.
        block_arguments: further arguments of each block.
    """
    for block, arguments in zip(blocks, block_arguments, strict=True):
        if checkpointed:
            tokens = checkpoint(block, tokens, use_reentrant=False, **arguments)
        else:
            tokens = block(tokens, **arguments)
    return tokens


# --- the last block, of which a few tokens are needed ---


def run_blocks_at(
    blocks: Sequence[nn.Module],
    tokens: Tensor,
    index: Tensor,
    last_at_few: bool,
    checkpointed: bool,
    block_arguments: Sequence[BlockArguments],
) -> Tensor:
    """Tokens (B, K, D) at `index` (B, K) after these blocks; for other arguments see `run_blocks`.

    Args:
        last_at_few: `runs_at_few` of the last block.
    """
    tokens = run_blocks(blocks[:-1], tokens, checkpointed, block_arguments[:-1])
    if last_at_few:
        return block_at(blocks[-1], tokens, index)
    return gather_tokens(blocks[-1](tokens, **block_arguments[-1]), index)


def block_at(block: Block, tokens: Tensor, index: Tensor) -> Tensor:
    """The output of timm's block at `index`, without computing the rest.

    Args:
        block: one with `runs_at_few`.
        tokens: (B, T, D), all of them: every token is a key and a value.
        index: (B, K), the tokens whose output is needed.
    Returns:
        (B, K, D).
    """
    if hasattr(block, "add_positions"):
        tokens = block.add_positions(tokens)
    attended = attention_at(block.attn, block.norm1(tokens), index)
    output = gather_tokens(tokens, index) + block.drop_path1(block.ls1(attended))
    return output + block.drop_path2(block.ls2(block.mlp(block.norm2(output))))


def runs_at_few(block: nn.Module, token_count: int) -> bool:
    """Whether `block_at` gives what the block itself gives. It is tried, because timm's next release may have another.

    In float64, and with random weights, so that parts count that begin at zero. A warning says where timm's plain block
    differs; other blocks (Eva's, Beit's) are known to.

    Args:
        token_count: T.
    """
    if not isinstance(block, Block) or not isinstance(block.attn, Attention):
        return False
    if next(block.parameters()).is_meta:
        return True  # there are no numbers to compare
    if not hasattr(block, "add_positions"):
        token_count = min(token_count, 16)  # any number
    tried = copy.deepcopy(block).double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in tried.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)
    tokens = torch.randn(1, token_count, tried.attn.qkv.in_features, generator=generator, dtype=torch.double)
    index = torch.tensor([[0, token_count - 1]])
    with torch.no_grad():
        is_same = torch.allclose(block_at(tried, tokens, index), gather_tokens(tried(tokens), index), rtol=1e-8)
    if not is_same:
        warn(f"timm {timm.__version__} has another block than mpp: the last one runs on all tokens, which is slower")
    return is_same


# --- attention ---


def attention_at(attention: Attention, tokens: Tensor, index: Tensor | None) -> Tensor:
    """Attention with only the tokens at `index` (B, K) as queries; None: all. (B, T, D) to (B, K, D).

    `PositionedAttention` of mpp/models/variants.py turns queries and keys, or adds to their products.
    """
    weight = attention.qkv.weight
    bias = attention.qkv.bias
    width = weight.shape[0] // 3
    query_bias, key_value_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    query_tokens = tokens if index is None else gather_tokens(tokens, index)
    queries = F.linear(query_tokens, weight[:width], query_bias)  # (B, K, width)
    keys_values = F.linear(tokens, weight[width:], key_value_bias)  # (B, T, 2 * width)
    queries = rearrange(queries, "b k (h d) -> b h k d", h=attention.num_heads)
    keys, values = rearrange(keys_values, "b t (two h d) -> two b h t d", two=2, h=attention.num_heads)
    queries = attention.q_norm(queries)
    keys = attention.k_norm(keys)
    rotation = getattr(attention, "rotation", None)
    if rotation is not None:
        queries = rotation(queries, index)
        keys = rotation(keys, None)
    added = getattr(attention, "added", None)
    logits = None if added is None else added(queries, index).to(queries.dtype)  # (B or 1, heads, K, T), to add
    if attention.fused_attn:
        dropout = attention.attn_drop.p if attention.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=logits, dropout_p=dropout)
    else:
        products = queries * attention.scale @ keys.transpose(-2, -1)
        if logits is not None:
            products = products + logits
        mixed = attention.attn_drop(products.softmax(-1)) @ values
    mixed = mixed.transpose(1, 2).flatten(2)  # (B, K, D)
    return attention.proj_drop(attention.proj(attention.norm(mixed)))


def shows_weights(attention: nn.Module | None) -> bool:
    """Whether an attention among all tokens gives its weights to `attn_drop` when it is not fused: timm's and ours."""
    return (
        hasattr(attention, "fused_attn") and hasattr(attention, "attn_drop") and not getattr(attention, "lines", None)
    )


# --- tokens between blocks in bf16 (`model.residual`); float32 positions make them float32 ---


class ResidualNorm(LayerNorm):
    """timm's layer norm; of bf16 tokens it is bf16, where autocast on a GPU would write float32 copies of them."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return super().forward(x)
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)  # sums are float32 inside


def use_bf16_residual(encoder: nn.Module) -> None:
    """Run an encoder's blocks on bf16 tokens under autocast; its weights and their names stay as they are."""
    before_blocks = encoder.norm_pre if hasattr(encoder, "norm_pre") else encoder.pos_drop
    before_blocks.register_forward_hook(to_autocast_type)
    use_bf16_norms(encoder)
    for block in encoder.blocks:
        if getattr(block, "gamma_1", None) is not None:  # Eva and Beit scale by a parameter, which is float32
            block.register_forward_hook(to_input_type)


def use_bf16_norms(module: nn.Module) -> None:
    """Keep bf16 tokens in bf16 through the norms and scales of a module."""
    for child in module.modules():
        if type(child) is LayerNorm:
            child.__class__ = ResidualNorm
        elif isinstance(child, LayerScale):
            child.register_forward_hook(to_input_type)


def has_bf16_residual(encoder: nn.Module) -> bool:
    """Whether the encoder's blocks run on bf16 tokens: see `use_bf16_residual`."""
    return any(isinstance(module, ResidualNorm) for module in encoder.modules())


def to_autocast_type(_: nn.Module, __: Any, tokens: Tensor) -> Tensor:
    """Hook: the output in bf16 under autocast; without, float32 tokens stay so."""
    return tokens.to(torch.bfloat16) if uses_autocast(tokens.device.type) else tokens


def to_input_type(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Hook: the output in the type of the input."""
    return output.to(inputs[0].dtype)
