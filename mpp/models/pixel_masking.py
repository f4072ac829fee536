"""Where tokens see pixels that others see too: overlapping patches, and a hybrid's convolutions.

To hide an embedding there would leave its pixels in the embeddings beside it. The corruption is of pixels instead.

B images, N cells, T tokens, K corrupted cells.
"""

import torch
from einops import rearrange
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mpp.corruption import Corruption, Kind, corrupt
from mpp.models.timm_models import cell_grid
from mpp.objectives import patchify


class PixelMasking(nn.Module):
    """Corruption of whole cells of pixels, before they are embedded.

    Cells are squares that do not overlap, as large as a patch (of a hybrid: as the pixels from one token to the next).
    A [mask]-ed cell is blank, and a random one has another cell's pixels. A token whose window lies wholly in [mask]-ed
    cells becomes [mask]; the blank part of other windows tells nothing. Each cell is predicted from the token whose
    window it is. So K of N cells are corrupted and predicted, as they are without overlap.

    Args:
        encoder: whose windows overlap.
    """

    def __init__(self, encoder: VisionTransformer):
        super().__init__()
        (rows, columns), self.side = cell_grid(encoder)
        step = getattr(encoder.patch_embed, "stride", self.side)  # pixels from one token to the next
        height, width = encoder.patch_embed.grid_size  # in tokens
        own = torch.arange(rows)[:, None] * width + torch.arange(columns)
        self.register_buffer("tokens", self.side // step * own.flatten(), persistent=False)  # (N,): each cell's own
        ends = [[torch.arange(count) * step + end for end in (0, self.side - 1)] for count in (height, width)]
        corners = [(y // self.side)[:, None] * columns + x // self.side for y in ends[0] for x in ends[1]]
        cells = torch.stack(corners, dim=-1).flatten(0, 1)  # (T, 4): those at the corners of each token's window
        self.register_buffer("cells", cells, persistent=False)

    def corrupt(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Normalised images (B, C, H, W) with corrupted cells."""
        cells = patchify(images, self.side)  # (B, N, C, P, P)
        blank = images.new_zeros(cells[0, 0].numel())
        corrupted = corrupt(cells.flatten(2), blank, corruption).view(cells.shape)
        columns = images.shape[-1] // self.side
        return rearrange(corrupted, "b (h w) c p q -> b c (h p) (w q)", w=columns)

    def hidden(self, corruption: Corruption) -> Tensor:
        """Whether nothing is left of what a token sees, (B, T, 1)."""
        masked = torch.zeros(len(corruption.positions), len(self.tokens), dtype=torch.bool, device=self.tokens.device)
        masked.scatter_(1, corruption.positions, corruption.kinds == int(Kind.MASK))
        masked.scatter_(1, corruption.dropped, True)
        return masked[:, self.cells].all(-1, keepdim=True)
