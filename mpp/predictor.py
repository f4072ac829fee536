"""The paper's network: normalise, embed, corrupt, encode, predict.

What the loss does not look at is not computed in the last block: its MLP, the final norm and the head see the K
corrupted patches alone, and so do the queries where `attention_at` knows the attention.

Where windows overlap, of patches or of a hybrid's convolutions, to hide an embedding would leave its pixels in those
beside it. There the corruption is of pixels: see mpp/windows.py.
"""

from collections.abc import Iterable, Sequence

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpp.attention import attention_at, is_known, take
from mpp.corruption import Corruption, corrupt
from mpp.encoder import Normalize
from mpp.variants import PositionedBlock
from mpp.windows import Windows


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
        self.windows = None if type(encoder.patch_embed) is PatchEmbed else Windows(encoder)
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
        encoder, positions = self.encoder, corruption.positions
        tokens = encoder.norm_pre(encoder._pos_embed(self.embed(self.normalize(images), corruption)))
        tokens = through(encoder.blocks[:-1], tokens, again=self.training and encoder.grad_checkpointing)
        index = encoder.num_prefix_tokens + (positions if self.windows is None else self.windows.tokens[positions])
        corrupted = block_at(encoder.blocks[-1], tokens, index)
        return self.head(encoder.fc_norm(encoder.norm(corrupted)))

    def embed(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Normalised images (B, 3, H, W) to corrupted patch embeddings, (B, N, D)."""
        if self.windows is not None:
            patches = self.encoder.patch_embed(self.windows.corrupt(images, corruption))
            return torch.where(self.windows.hidden(corruption), self.mask_token.to(patches.dtype), patches)
        patches = self.encoder.patch_embed(images)
        return corrupt(patches.flatten(1, -2), self.mask_token, corruption).view(patches.shape)


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
