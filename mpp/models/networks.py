"""The networks for pre-training: an encoder and the parts that predict. The paper's is here.

A network is a module with an `encoder`, which is exported, a `normalize` for its input, and two texts for the model
card: its `method`, and the parts `on_top` of the encoder. It turns images (B, C, H, W) and their corruption into
predictions (B, K, outputs). To add one, write such a module and name it in NETWORKS. `StudentWithTeacher` joins a
network and a teacher, and returns targets with the predictions.
"""

from collections.abc import Sequence
from operator import attrgetter

import torch
from einops import rearrange
from timm.layers import PatchEmbed
from torch import Tensor, nn

from mpp.config import Config, NetworkConfig
from mpp.config.imports import Registry
from mpp.corruption import Corruption, Kind, corrupt
from mpp.errors import UserError
from mpp.models.adaptation import choose_trained
from mpp.models.autoencoder import MaskedAutoencoder
from mpp.models.blocks import initialize, run_blocks_at, runs_at_few
from mpp.models.encoder import Normalize, build_encoder
from mpp.models.plain import apply_last_norm, cell_grid, prepare_tokens
from mpp.models.teachers import StudentWithTeacher, build_teacher
from mpp.objectives import Objective, build_objective, patchify

PARTS = ("encoder", "normalize.mean", "normalize.std", "method", "on_top")
"""Attributes of a network. The export, at the end of the training, is the first that reads some of them."""


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
        corrupted = run_blocks_at(encoder.blocks, tokens, index, self.last_at_few, checkpointed, block_arguments)
        return self.head(apply_last_norm(encoder, corrupted))

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
        (rows, columns), self.side = cell_grid(encoder)
        stride = encoder.patch_embed.feat_ratio()  # pixels from one token to the next
        token_rows, token_columns = encoder.patch_embed.grid_size
        first_tokens = torch.arange(rows)[:, None] * token_columns + torch.arange(columns)
        tokens_per_side = self.side // stride
        tokens = tokens_per_side * first_tokens.flatten()  # (N,): the token whose window each cell is
        self.register_buffer("tokens", tokens, persistent=False)

        ends = torch.tensor([0, self.side - 1])  # of a window
        cell_rows = (torch.arange(token_rows)[:, None] * stride + ends) // self.side  # (token rows, 2)
        cell_columns = (torch.arange(token_columns)[:, None] * stride + ends) // self.side
        corners = cell_rows[:, None, :, None] * columns + cell_columns[:, None, :]  # (token rows, token columns, 2, 2)
        cells = corners.flatten(2).flatten(0, 1)  # (T, 4): the cells at the corners of each token's window
        self.register_buffer("cells", cells, persistent=False)

    def corrupt(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Normalised images (B, C, H, W) with corrupted cells."""
        cells = patchify(images, self.side)  # (B, N, C, P, P)
        blank = images.new_zeros(cells[0, 0].numel())
        corrupted = corrupt(cells.flatten(2), blank, corruption).view(cells.shape)
        columns = images.shape[-1] // self.side
        return rearrange(corrupted, "b (h w) c p q -> b c (h p) (w q)", w=columns)

    def masked_tokens(self, corruption: Corruption) -> Tensor:
        """Whether the whole window of a token is masked, (B, T, 1)."""
        batch = len(corruption.positions)
        is_mask = corruption.kinds == int(Kind.MASK)
        masked = torch.zeros(batch, len(self.tokens), dtype=torch.bool, device=self.tokens.device)  # (B, N)
        masked.scatter_(1, corruption.positions, is_mask)
        if corruption.hidden is not None:
            masked.scatter_(1, corruption.hidden, True)
        return masked[:, self.cells].all(-1, keepdim=True)


NETWORKS = Registry("network.name", {"predictor": MaskedPatchPredictor, "autoencoder": MaskedAutoencoder})
"""Networks by name: encoder, outputs, mean, std and `config`, the settings of the network -> module."""


def build_model(config: Config) -> tuple[nn.Module, Objective]:
    """The network for pre-training by the config, and its objective.

    Raises:
        UserError: parts that do not fit each other.
    """
    channels = config.data.channels
    encoder = build_encoder(config.model, channels)
    mean, std = config.model.normalization(channels)
    _, patch_size = cell_grid(encoder)
    teacher = None
    teacher_width = None
    if config.objective.name == "features":
        teacher = build_teacher(config.objective, encoder, Normalize(mean, std))
        teacher_width = teacher.width
    objective = build_objective(config.objective, patch_size, channels, teacher_width)
    network = build_network(config.network, encoder, objective.outputs, mean, std)
    choose_trained(encoder, config.model)
    if teacher is None:
        return network, objective
    return StudentWithTeacher(network, teacher, config.objective), objective


def build_network(
    config: NetworkConfig, encoder: nn.Module, outputs: int, mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    """The network that the config names.

    Raises:
        UserError: no such network, or one that does not fit the encoder.
    """
    network = NETWORKS[config.name](encoder, outputs, mean, std, config=config)
    for part in PARTS:
        try:
            attrgetter(part)(network)
        except AttributeError as error:
            needed = ", ".join(PARTS)
            raise UserError(
                f"network.name is {config.name}, which has no {part}; it must be a module with {needed}"
            ) from error
    return network
