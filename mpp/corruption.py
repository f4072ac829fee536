"""Corruption of patch embeddings: which patches, what becomes of each. Pure functions (paper, appendix B.1.2).

B images, N patches, K corrupted patches, D width.
"""

from decimal import ROUND_HALF_UP, Decimal
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpp.config import CorruptionConfig
from mpp.errors import UserError
from mpp.runtime.randomness import Stream, uniform


class Kind(IntEnum):
    """What becomes of a corrupted patch's embedding."""

    MASK = 0  # the learnable [mask]
    RANDOM = 1  # the embedding of another patch
    KEEP = 2  # as it is


class Corruption(NamedTuple):
    """The corruption of a batch (of one image: without the leading B)."""

    positions: Tensor  # (B, K) int64, ascending: which of the N patches are corrupted
    kinds: Tensor  # (B, K) int64: a Kind each
    sources: Tensor  # (B, K) int64: the position whose embedding a patch gets (its own, where it is kept)
    shifts: Tensor  # (B, K) int64: 0: the source is in the same image; else a random number that chooses another image

    def to(self, device: torch.device) -> "Corruption":
        """The same on a device."""
        return Corruption(*(part.to(device, non_blocking=True) for part in self))


def corrupted_count(rate: float, patches: int) -> int:
    """K = floor(rate * N + 1/2), in decimal arithmetic: halves go up, whatever a float makes of them.

    Raises:
        UserError: no patch, or every patch, would be corrupted.
    """
    count = int((Decimal(str(rate)) * patches).quantize(Decimal(1), rounding=ROUND_HALF_UP))
    if not 0 < count < patches:
        raise UserError(
            f"corruption.rate is {rate}, which corrupts {count} of {patches} patches; "
            f"it must leave between 1 and {patches - 1} corrupted"
        )
    return count


def draw(config: CorruptionConfig, patches: int, seed: int, epoch: int, index: int) -> Corruption:
    """The corruption of one image: a pure function of (config, N, seed, epoch, index)."""
    count = corrupted_count(config.rate, patches)
    numbers = uniform(Stream.CORRUPTION, seed, epoch, index, patches + 3 * count)
    order, kind, other, image = np.split(numbers, np.cumsum([patches, count, count]))
    positions = np.sort(np.argsort(order, kind="stable")[:count])
    kinds = np.digitize(kind, [config.mask, config.mask + config.random])
    others = (other * (patches - 1)).astype(np.int64)
    others += others >= positions  # any position but its own
    shifts = np.zeros(count, dtype=np.int64)
    if config.source == "batch":
        others = (other * patches).astype(np.int64)  # another image's patch may stand anywhere
        shifts = (image * 2**31).astype(np.int64) + 1
    random = kinds == Kind.RANDOM
    sources, shifts = np.where(random, others, positions), np.where(random, shifts, 0)
    return Corruption(*(torch.from_numpy(a) for a in (positions, kinds.astype(np.int64), sources, shifts)))


def corrupt(embeddings: Tensor, mask_token: Tensor, corruption: Corruption) -> Tensor:
    """Replace the embeddings of the corrupted patches.

    Args:
        embeddings: (B, N, D) patch embeddings, before position embeddings are added.
        mask_token: (D,) the learnable [mask].
        corruption: of this batch.
    Returns:
        (B, N, D). Patches that are not corrupted, or kept, are unchanged.
    """
    batch, _, width = embeddings.shape
    images = torch.arange(batch, device=embeddings.device)[:, None]  # (B, 1)
    others = 1 + (corruption.shifts - 1) % max(batch - 1, 1)  # an image after this one, never itself
    images = (images + torch.where(corruption.shifts > 0, others, 0)) % batch  # (B, K)
    flat = images * embeddings.shape[1] + corruption.sources
    replaced = torch.nn.functional.embedding(flat, embeddings.flatten(0, 1))  # (B, K, D)
    masked = (corruption.kinds == int(Kind.MASK))[..., None]  # an int: the compiler takes an enum for unequal
    replaced = torch.where(masked, mask_token.to(embeddings.dtype), replaced)
    return embeddings.scatter(1, corruption.positions[..., None].expand(-1, -1, width), replaced)
