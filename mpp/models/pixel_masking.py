"""Corruption of pixels, for tokens that share pixels: overlapping patches, and a hybrid's convolutions.

A masked embedding would leave its pixels in the neighbouring embeddings.

B images, N cells, T tokens, K corrupted cells.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from mpp.corruption import Corruption, Kind, corrupt
from mpp.models.timm_models import cell_grid
from mpp.objectives import patchify


class PixelMasking(nn.Module):
    """Corruption of whole cells of pixels, before they are embedded.

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
        stride = getattr(encoder.patch_embed, "stride", self.side)  # pixels from one token to the next
        token_rows, token_columns = encoder.patch_embed.grid_size
        first_tokens = torch.arange(rows)[:, None] * token_columns + torch.arange(columns)
        tokens_per_side = self.side // stride
        tokens = tokens_per_side * first_tokens.flatten()  # (N,): the token whose window each cell is
        self.register_buffer("tokens", tokens, persistent=False)

        top = torch.arange(token_rows) * stride
        left = torch.arange(token_columns) * stride
        corners = []
        for row_end in (0, self.side - 1):
            for column_end in (0, self.side - 1):
                cell_rows = (top + row_end) // self.side
                cell_columns = (left + column_end) // self.side
                corners.append(cell_rows[:, None] * columns + cell_columns)
        cells = torch.stack(corners, dim=-1).flatten(0, 1)  # (T, 4): the cells at the corners of each token's window
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
