"""The networks for pre-training: an encoder and the parts that predict. The paper's, and the masked autoencoder.

A network is a module with an `encoder`, which is exported, a `normalize` for its input, and two texts for the model
card: its `method`, and the parts `on_top` of the encoder. It turns images (B, C, H, W) and their corruption into
predictions (B, K, outputs). To add one, write such a module and name it in NETWORKS, which says how it is made; its
`forward` runs on torch's meta device, too, where operations are counted. `StudentWithTeacher` joins a network and a
teacher, and returns targets with the predictions.
"""

from collections.abc import Sequence
from operator import attrgetter

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from timm.layers import LayerNorm, PatchEmbed
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from mpp.config import Config, NetworkConfig, require
from mpp.config.imports import Registry
from mpp.corruption import Corruption, corrupt
from mpp.errors import UserError, one_line
from mpp.models.adaptation import choose_trained
from mpp.models.encoder import Normalize, build_encoder, moments_of_weights
from mpp.models.plain import (
    cell_grid,
    has_bf16_residual,
    has_fused_attention,
    prepare_tokens,
    run_blocks,
    runs_at_few,
    set_attention,
    sincos_2d,
    takes_some_tokens,
    use_bf16_norms,
)
from mpp.models.teachers import StudentWithTeacher, build_teacher
from mpp.objectives import Objective, build_objective, patchify

PARTS = ("encoder", "normalize.mean", "normalize.std", "method", "on_top")
"""Attributes of a network. The export, at the end of the training, is the first that reads some of them."""


def initialize(module: nn.Module) -> None:
    """As timm's encoders: weights truncated normal of deviation 0.02, biases 0. (MAE: uniform by Xavier.)"""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


class MaskedPatchPredictor(nn.Module):
    """The paper's network, a ViT with a learnable [mask] and a linear head: normalise, embed, corrupt, encode, predict.

    The last block computes only what the loss needs: its MLP, the final norm and the head see only the K corrupted
    patches, and so do the queries (see `block_at`).

    Args:
        encoder: a plain timm transformer; trained in place, and the only part that is exported.
        config: of decoders, which this network does not have.
    """

    method = "masked patch prediction (Dosovitskiy et al., ICLR 2021, appendix B.1.2)"
    on_top = "a linear head"

    def __init__(
        self,
        encoder: nn.Module,
        outputs: int,
        mean: Sequence[float],
        std: Sequence[float],
        config: NetworkConfig | None = None,
    ):
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.encoder = encoder
        self.pixel_masking = None if type(encoder.patch_embed) is PatchEmbed else PixelMasking(encoder)
        self.mask_token = nn.Parameter(torch.empty(encoder.embed_dim))
        self.head = nn.Linear(encoder.embed_dim, outputs)
        nn.init.trunc_normal_(self.mask_token, std=0.02)  # the paper does not say: as the other embeddings
        initialize(self.head)
        token_count = encoder.num_prefix_tokens + encoder.patch_embed.num_patches
        self.last_at_few = runs_at_few(encoder.blocks[-1], token_count)

    def forward(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Images (B, C, H, W) from 0 to 255 to predictions (B, K, outputs), in the order of `corruption.positions`."""
        encoder = self.encoder
        embeddings = self.embed(self.normalize(images), corruption)
        tokens, block_arguments = prepare_tokens(encoder, embeddings)
        checkpointed = self.training and encoder.grad_checkpointing
        places = corruption.positions
        if self.pixel_masking is not None:
            places = self.pixel_masking.tokens[places]
        index = encoder.num_prefix_tokens + places
        corrupted = run_blocks(encoder.blocks, tokens, checkpointed, block_arguments, index, self.last_at_few)
        return self.head(encoder.fc_norm(encoder.norm(corrupted)))  # some have their last norm in fc_norm

    def embed(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Normalised images (B, C, H, W) to corrupted patch embeddings, (B, N, D)."""
        if self.pixel_masking is None:
            patches = self.encoder.patch_embed(images)
            return corrupt(patches.flatten(1, -2), self.mask_token, corruption).view(patches.shape)
        patches = self.encoder.patch_embed(self.pixel_masking.corrupt(images, corruption))
        masked = self.pixel_masking.masked_tokens(corruption)
        return torch.where(masked, self.mask_token.to(patches.dtype), patches)


class PixelMasking(nn.Module):
    """Corruption of whole cells of pixels, before they are embedded, for tokens that share pixels.

    Where the windows of patches or of a hybrid's convolutions overlap, a masked embedding would leave its pixels in the
    neighbouring ones.

    Cells are squares that do not overlap, as large as a patch (of a hybrid: as the pixels from one token to the next).
    A masked cell is blank, and a random one has another cell's pixels. A token whose window lies wholly in masked cells
    becomes [mask]; the blank part of other windows tells nothing. Each cell is predicted from the token whose window it
    is: so K of N cells are corrupted and predicted, as without overlap. Pixels of a [mask] cell reach no prediction,
    except by a random cell that received them.

    Args:
        encoder: one whose windows overlap.
    """

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.grid, self.side = cell_grid(encoder)
        self.tokens_per_side = self.side // encoder.patch_embed.feat_ratio()  # of a cell, from one token to the next
        tokens = torch.arange(encoder.patch_embed.num_patches).view(encoder.patch_embed.grid_size)
        tokens = tokens[:: self.tokens_per_side, :: self.tokens_per_side]  # those whose windows are cells
        self.register_buffer("tokens", tokens.flatten(), persistent=False)  # (N,)

    def corrupt(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Normalised images (B, C, H, W) with corrupted cells."""
        cells = patchify(images, self.side)  # (B, N, C, P, P)
        blank = images.new_zeros(cells[0, 0].numel())
        corrupted = corrupt(cells.flatten(2), blank, corruption).view(cells.shape)
        return rearrange(corrupted, "b (h w) c p q -> b c (h p) (w q)", w=self.grid[1])

    def masked_tokens(self, corruption: Corruption) -> Tensor:
        """Whether the whole window of a token is masked, (B, T, 1)."""
        cells = torch.ones(len(corruption.kinds), len(self.tokens), 1, device=corruption.kinds.device)
        visible = corrupt(cells, cells.new_zeros(1), corruption)  # (B, N, 1)
        count = self.tokens_per_side
        visible = repeat(visible, "b (row column) 1 -> b (row y) (column x)", row=self.grid[0], y=count, x=count)
        visible_in_window = F.max_pool2d(visible, count, stride=1)  # (B, token rows, token columns)
        return visible_in_window.flatten(1)[..., None] == 0


# --- the masked autoencoder ---

MAE_DECODER_WIDTH = 512
MAE_DECODER_DEPTH = 8
HEAD_WIDTH = 32  # of a head of the decoder; MAE's has 16


class MaskedAutoencoder(nn.Module):
    """A ViT that sees only the visible patches, a small decoder, and a linear head on the corrupted patches (MAE).

    The encoder's compute falls with the patches that it sees (He et al., CVPR 2022). The decoder's last block computes
    only what the loss needs, as in the paper's network.

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
        allowed = "predictor with a hybrid, overlapping patches, axial mixing, tables of biases (BEiT) or rotations by "
        allowed += "head: the encoder here sees some patches alone"
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
        visible = complement(encoder.num_prefix_tokens + corruption.unseen(), token_count)

        seen, block_arguments = prepare_tokens(encoder, patches, visible)  # (B, V, D)
        seen = run_blocks(encoder.blocks, seen, checkpointed, block_arguments)
        return self.head(self.decoder(encoder.fc_norm(encoder.norm(seen)), visible, corrupted, checkpointed))


def complement(index: Tensor, count: int) -> Tensor:
    """Numbers below `count` that are not in index (B, K): (B, count - K), ascending."""
    present = torch.zeros(len(index), count, dtype=torch.int32, device=index.device).scatter(1, index, 1)
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
        positions = F.pad(sincos_2d(encoder.patch_embed.grid_size, width), (0, 0, encoder.num_prefix_tokens, 0))
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
        tokens = run_blocks(self.blocks, tokens, checkpointed, [{}] * len(self.blocks), corrupted, self.last_at_few)
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


NETWORKS = Registry("network.name", {"predictor": MaskedPatchPredictor, "autoencoder": MaskedAutoencoder})
"""Networks by name: called with encoder, outputs, mean, std and, by keyword, `config`, its settings."""


def build_model(config: Config) -> tuple[nn.Module, Objective]:
    """The network for pre-training by the config, and its objective.

    Raises:
        UserError: parts that do not fit each other.
    """
    channels = config.data.channels
    encoder = build_encoder(config.model, channels)
    is_known = type(encoder).forward_features.__module__.startswith(("timm.", "mpp."))
    allowed = "one with timm's forward_features, whose parts are called one by one (they may be overridden)"
    require(is_known, "model.name", config.model.name, allowed)
    model = config.model
    if None in (model.mean, model.std):  # in a loop of a user's own
        model = moments_of_weights(model, channels)
    mean, std = model.normalization(channels)
    _, patch_size = cell_grid(encoder)
    teacher = None
    if config.objective.name == "features":
        teacher = build_teacher(config.objective, encoder, Normalize(mean, std))
    objective = build_objective(config.objective, patch_size, channels, getattr(teacher, "width", None))
    network = build_network(config.network, encoder, objective.outputs, mean, std)
    choose_trained(encoder, config.model)
    if teacher is not None:
        network = StudentWithTeacher(network, teacher, config.objective)
    return network, objective


def build_network(
    config: NetworkConfig, encoder: nn.Module, outputs: int, mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    """The network that the config names.

    Raises:
        UserError: no such network, or one that does not fit the encoder.
    """
    network = NETWORKS[config.name](encoder, outputs, mean, std, config=config)
    try:
        attrgetter(*PARTS)(network)
    except AttributeError as error:
        allowed = f"a module with {', '.join(PARTS)}: {one_line(error)}"
        raise UserError(f"network.name is {config.name}; it must be {allowed}") from error
    return network
