"""The paper's network: normalise, embed, corrupt, encode, predict.

What the loss does not look at is not computed in the last block: its MLP, the final norm and the head see the K
corrupted patches alone, and so do the queries where the attention is timm's plain one.
"""

import copy
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mpp.corruption import Corruption, corrupt
from mpp.encoder import Normalize, set_attention


class MaskedPatchPredictor(nn.Module):
    """A ViT with a learnable [mask] and a linear head on the corrupted patches.

    Args:
        encoder: timm's; trained in place and exported alone.
        outputs: numbers that the head predicts for a patch.
        mean, std: of the input's channels, for pixels scaled to [0, 1].
    """

    method = "masked patch prediction (Dosovitskiy et al., ICLR 2021, appendix B.1.2)"
    on_top = "a linear head"

    def __init__(self, encoder: VisionTransformer, outputs: int, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.encoder = encoder
        self.mask_token = nn.Parameter(torch.empty(encoder.embed_dim))
        self.head = nn.Linear(encoder.embed_dim, outputs)
        nn.init.trunc_normal_(self.mask_token, std=0.02)  # the paper is silent: as the other embeddings
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Predict what each corrupted patch looked like.

        Args:
            images: (B, 3, H, W) uint8.
            corruption: of these images.
        Returns:
            (B, K, outputs), in the order of `corruption.positions`.
        """
        encoder = self.encoder
        patches = encoder.patch_embed(self.normalize(images))
        patches = corrupt(patches.flatten(1, -2), self.mask_token, corruption).view(patches.shape)
        tokens = encoder.norm_pre(encoder._pos_embed(patches))  # (B, prefix + N, D)
        tokens = through(encoder.blocks[:-1], tokens, again=self.training and encoder.grad_checkpointing)
        index = encoder.num_prefix_tokens + corruption.positions
        corrupted = block_at(encoder.blocks[-1], tokens, index)
        return self.head(encoder.fc_norm(encoder.norm(corrupted)))


def through(blocks: Iterable[nn.Module], tokens: Tensor, again: bool) -> Tensor:
    """Tokens (B, T, D) after these blocks, whose activations are computed again in the backward pass or kept."""
    for block in blocks:
        tokens = checkpoint(block, tokens, use_reentrant=False) if again else block(tokens)
    return tokens


def take(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens (B, N, D) at index (B, K): (B, K, D)."""
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))


def block_at(block: nn.Module, tokens: Tensor, index: Tensor) -> Tensor:
    """`block(tokens)` at `index`, computing the rest only where the block is not timm's plain one.

    Args:
        tokens: (B, N, D), all of them: every token is a key and a value.
        index: (B, K), the tokens that are looked at.
    Returns:
        (B, K, D).
    """
    if type(block) is not Block:
        return take(block(tokens), index)
    normed = block.norm1(tokens)
    plain = is_plain(block.attn)
    attended = attention_at(block.attn, normed, index) if plain else take(block.attn(normed), index)
    looked_at = take(tokens, index) + block.drop_path1(block.ls1(attended))
    return looked_at + block.drop_path2(block.ls2(block.mlp(block.norm2(looked_at))))


def is_plain(attention: nn.Module) -> bool:
    """Whether `attention_at` knows all that this attention does: timm's, without norms, without a gate."""
    return (
        type(attention) is Attention
        and type(attention.qkv) is nn.Linear
        and getattr(attention, "gate", None) is None
        and all(type(getattr(attention, n)) is nn.Identity for n in ("q_norm", "k_norm", "norm"))
    )


def attention_at(attention: Attention, tokens: Tensor, index: Tensor) -> Tensor:
    """Plain attention with the tokens at `index` (B, K) as its only queries; (B, N, D) to (B, K, D)."""
    heads, width = attention.num_heads, attention.qkv.weight.shape[0] // 3
    weight, bias = attention.qkv.weight, attention.qkv.bias
    query_bias, key_value_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    queries = F.linear(take(tokens, index), weight[:width], query_bias)  # (B, K, width)
    keys_values = F.linear(tokens, weight[width:], key_value_bias)  # (B, N, 2 * width)
    queries = queries.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, heads, K, width / heads)
    keys, values = keys_values.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    if attention.fused_attn:
        dropout = attention.attn_drop.p if attention.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout)
    else:
        weights = (queries * attention.scale @ keys.transpose(-2, -1)).softmax(-1)
        mixed = attention.attn_drop(weights) @ values
    return attention.proj_drop(attention.proj(mixed.transpose(1, 2).flatten(2)))


def executed_flops(model: nn.Module, *inputs: Tensor | Corruption) -> int:
    """Floating-point operations of one forward and backward pass over these inputs, counted without computing them.

    What the last block skips does not count. Matrix products count two operations a multiply-add, the rest nothing.
    """
    model = copy.deepcopy(model).to("meta")
    set_attention(model, fused=False)  # the same products; not every torch counts those of fused kernels
    with FlopCounterMode(display=False) as counter:
        model(*(part.to("meta") for part in inputs)).sum().backward()
    return counter.get_total_flops()
