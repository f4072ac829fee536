"""The masked autoencoder (He et al., CVPR 2022): embed, drop corrupted patches, encode, decode, predict.

The encoder's compute falls with the patches that it sees. The decoder's last block computes only what the loss needs,
as in the paper's network.
"""

from collections.abc import Sequence

import torch
from timm.layers import LayerNorm, PatchEmbed
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from mpp.config import NetworkConfig, require
from mpp.corruption import Corruption
from mpp.models.blocks import has_bf16_residual, initialize, run_blocks, run_blocks_at, runs_at_few, use_bf16_norms
from mpp.models.encoder import Normalize
from mpp.models.plain import (
    apply_last_norm,
    has_fused_attention,
    prepare_tokens,
    set_attention,
    sincos_2d,
    takes_some_tokens,
)

MAE_DECODER_WIDTH = 512
MAE_DECODER_DEPTH = 8
HEAD_WIDTH = 32  # of a head of the decoder; MAE's has 16


class MaskedAutoencoder(nn.Module):
    """A ViT that sees only the visible patches, a small decoder, and a linear head on the corrupted patches.

    Every corrupted patch counts as a [mask], whatever its kind.

    Args:
        encoder: a plain timm transformer; trained in place, and the only part that is exported.
    Raises:
        UserError: an encoder that needs all tokens, or whose windows overlap; a decoder that cannot be built.
    """

    method = "a masked autoencoder (He et al., CVPR 2022), whose encoder saw only the visible patches"

    def __init__(
        self,
        encoder: nn.Module,
        outputs: int,
        mean: Sequence[float],
        std: Sequence[float],
        config: NetworkConfig,
    ):
        super().__init__()
        independent = type(encoder.patch_embed) is PatchEmbed and takes_some_tokens(encoder)
        allowed = "predictor with a hybrid, overlapping patches, axial mixing or tables of biases (BEiT): the encoder "
        allowed += "here sees some patches alone"
        require(independent, "network.name", "autoencoder", allowed)
        self.normalize = Normalize(mean, std)
        self.encoder = encoder
        width, depth, heads = decoder_numbers(config, encoder)
        self.on_top = f"a decoder of width {width}, {depth} blocks and {heads} heads"
        self.decoder = Decoder(encoder, width, depth, heads)
        self.head = nn.Linear(width, outputs)
        initialize(self.head)

    def forward(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Images (B, C, H, W) from 0 to 255 to predictions (B, K, outputs), in the order of `corruption.positions`."""
        encoder = self.encoder
        checkpointed = self.training and encoder.grad_checkpointing
        patches = encoder.patch_embed(self.normalize(images))
        corrupted = encoder.num_prefix_tokens + corruption.positions
        token_count = encoder.num_prefix_tokens + encoder.patch_embed.num_patches
        visible = complement(encoder.num_prefix_tokens + corruption.unseen, token_count)

        seen, block_arguments = prepare_tokens(encoder, patches, visible)  # (B, V, D)
        seen = apply_last_norm(encoder, run_blocks(encoder.blocks, seen, checkpointed, block_arguments))
        return self.head(self.decoder(seen, visible, corrupted, checkpointed))


def complement(index: Tensor, count: int) -> Tensor:
    """Numbers below `count` that are not in index (B, K): (B, count - K), ascending."""
    present = torch.zeros(len(index), count, dtype=torch.int32, device=index.device)
    present.scatter_(1, index, 1)
    absent_first = present.argsort(dim=1, stable=True)
    return absent_first[:, : count - index.shape[1]]


class Decoder(nn.Module):
    """Visible tokens back in their places, [mask] elsewhere, fixed positions, and blocks.

    Args:
        encoder: gives the tokens that are decoded.
    """

    def __init__(self, encoder: nn.Module, width: int, depth: int, heads: int):
        super().__init__()
        self.embed = nn.Linear(encoder.embed_dim, width)
        self.mask_token = nn.Parameter(torch.empty(width))
        prefix_positions = torch.zeros(encoder.num_prefix_tokens, width)
        positions = torch.cat([prefix_positions, sincos_2d(encoder.patch_embed.grid_size, width)])
        self.register_buffer("positions", positions, persistent=False)  # (prefix + N, width)
        self.blocks = nn.ModuleList(Block(width, heads, qkv_bias=True, norm_layer=LayerNorm) for _ in range(depth))
        self.norm = LayerNorm(width)
        self.apply(initialize)
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        set_attention(self, has_fused_attention(encoder))
        self.bf16_residual = has_bf16_residual(encoder)
        if self.bf16_residual:
            use_bf16_norms(self)
        self.last_at_few = runs_at_few(self.blocks[-1], len(positions))

    def forward(self, tokens: Tensor, visible: Tensor, corrupted: Tensor, checkpointed: bool) -> Tensor:
        """Decode the corrupted patches.

        Args:
            tokens: (B, V, D), the encoder's output.
            visible: (B, V), their places among all tokens.
            corrupted: (B, K), the places whose output is needed.
        Returns:
            (B, K, width).
        """
        tokens = self.embed(tokens)
        masked = self.mask_token.to(tokens.dtype).expand(len(tokens), len(self.positions), -1)
        tokens = masked.scatter(1, visible[..., None].expand_as(tokens), tokens)  # (B, prefix + N, width)
        positions = self.positions.to(tokens.dtype) if self.bf16_residual else self.positions
        tokens = tokens + positions
        tokens = run_blocks_at(self.blocks, tokens, corrupted, self.last_at_few, checkpointed, [{}] * len(self.blocks))
        return self.norm(tokens)


def decoder_numbers(config: NetworkConfig, encoder: nn.Module) -> tuple[int, int, int]:
    """Width, depth and heads of the decoder: those of the config, or two thirds of the encoder's, at most MAE's."""
    two_thirds_of_heads = max(1, round(2 * encoder.embed_dim / (3 * HEAD_WIDTH)))
    two_thirds_of_blocks = max(1, round(2 * len(encoder.blocks) / 3))
    width = config.decoder_width or min(MAE_DECODER_WIDTH, HEAD_WIDTH * two_thirds_of_heads)
    depth = config.decoder_depth or min(MAE_DECODER_DEPTH, two_thirds_of_blocks)
    heads = config.decoder_heads or max(1, width // HEAD_WIDTH)
    require(width % heads == 0, "network.decoder_width", width, f"a multiple of network.decoder_heads ({heads})")
    return width, depth, heads
