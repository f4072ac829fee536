"""The paper's network: normalise, embed, corrupt, encode, predict.

What the loss does not look at is not computed in the last block: its MLP, the final norm and the head see the K
corrupted patches alone, and so do the queries where `attention_at` knows the attention.

Where windows overlap, of patches or of a hybrid's convolutions, to hide an embedding would leave its pixels in those
beside it. There the corruption is of pixels: see mpp/models/pixel_masking.py.
"""

from collections.abc import Sequence

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mpp.corruption import Corruption, corrupt
from mpp.models.blocks import block_at, through
from mpp.models.encoder import Normalize
from mpp.models.pixel_masking import PixelMasking


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
        self.pixel_masking = None if type(encoder.patch_embed) is PatchEmbed else PixelMasking(encoder)
        self.mask_token = nn.Parameter(torch.empty(encoder.embed_dim))
        self.head = nn.Linear(encoder.embed_dim, outputs)
        nn.init.trunc_normal_(self.mask_token, std=0.02)  # the paper is silent: as the other embeddings
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Predict what each corrupted patch looked like.

        Args:
            images: (B, C, H, W) from 0 to 255.
            corruption: of these images.
        Returns:
            (B, K, outputs), in the order of `corruption.positions`.
        """
        encoder, positions = self.encoder, corruption.positions
        tokens = encoder.norm_pre(encoder._pos_embed(self.embed(self.normalize(images), corruption)))
        tokens = through(encoder.blocks[:-1], tokens, again=self.training and encoder.grad_checkpointing)
        places = positions if self.pixel_masking is None else self.pixel_masking.tokens[positions]
        index = encoder.num_prefix_tokens + places
        corrupted = block_at(encoder.blocks[-1], tokens, index)
        return self.head(encoder.fc_norm(encoder.norm(corrupted)))

    def embed(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Normalised images (B, C, H, W) to corrupted patch embeddings, (B, N, D)."""
        if self.pixel_masking is not None:
            patches = self.encoder.patch_embed(self.pixel_masking.corrupt(images, corruption))
            return torch.where(self.pixel_masking.hidden(corruption), self.mask_token.to(patches.dtype), patches)
        patches = self.encoder.patch_embed(images)
        return corrupt(patches.flatten(1, -2), self.mask_token, corruption).view(patches.shape)
