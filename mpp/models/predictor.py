"""The paper's network: normalise, embed, corrupt, encode, predict.

The last block computes only what the loss needs: its MLP, the final norm and the head see only the K corrupted
patches, and so do the queries where `attention_at` knows the attention.

Where the windows of patches or of a hybrid's convolutions overlap, a masked embedding would leave its pixels in the
neighbouring ones. There pixels are corrupted: see mpp/models/pixel_masking.py.
"""

from collections.abc import Sequence

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from mpp.corruption import Corruption, corrupt
from mpp.models.blocks import block_at, initialize, run_blocks
from mpp.models.encoder import Normalize
from mpp.models.pixel_masking import PixelMasking
from mpp.models.plain import apply_last_norm, prepare_tokens


class MaskedPatchPredictor(nn.Module):
    """A ViT with a learnable [mask] and a linear head on the corrupted patches.

    Args:
        encoder: a plain timm transformer; trained in place, and the only part that is exported.
    """

    method = "masked patch prediction (Dosovitskiy et al., ICLR 2021, appendix B.1.2)"
    on_top = "a linear head"

    def __init__(self, encoder: nn.Module, outputs: int, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.encoder = encoder
        self.pixel_masking = None if type(encoder.patch_embed) is PatchEmbed else PixelMasking(encoder)
        self.mask_token = nn.Parameter(torch.empty(encoder.embed_dim))
        self.head = nn.Linear(encoder.embed_dim, outputs)
        nn.init.trunc_normal_(self.mask_token, std=0.02)  # the paper does not say: as the other embeddings
        initialize(self.head)

    def forward(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Images (B, C, H, W) from 0 to 255 to predictions (B, K, outputs), in the order of `corruption.positions`."""
        encoder = self.encoder
        embeddings = self.embed(self.normalize(images), corruption)
        tokens, block_arguments = prepare_tokens(encoder, embeddings)
        checkpointed = self.training and encoder.grad_checkpointing
        tokens = run_blocks(encoder.blocks[:-1], tokens, checkpointed, block_arguments[:-1])
        places = corruption.positions
        if self.pixel_masking is not None:
            places = self.pixel_masking.tokens[places]
        corrupted = block_at(encoder.blocks[-1], tokens, encoder.num_prefix_tokens + places, block_arguments[-1])
        return self.head(apply_last_norm(encoder, corrupted))

    def embed(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Normalised images (B, C, H, W) to corrupted patch embeddings, (B, N, D)."""
        if self.pixel_masking is None:
            patches = self.encoder.patch_embed(images)
            return corrupt(patches.flatten(1, -2), self.mask_token, corruption).view(patches.shape)
        patches = self.encoder.patch_embed(self.pixel_masking.corrupt(images, corruption))
        masked = self.pixel_masking.masked_tokens(corruption)
        return torch.where(masked, self.mask_token.to(patches.dtype), patches)
