"""Masked patches of each held-out image, and those that are right: kept next to a run's metrics, for intervals.

M images.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpp.errors import UserError
from mpp.features.arrays import NPZ_ERRORS
from mpp.runtime.files import complete

COUNTS_FILE = "heldout_patches.npz"
COUNTED = ("masked", "model", "nearest", "two_nearest")
"""The columns of `counts`: masked patches, and the right ones of the model and of two baselines (see `summarize`)."""


@dataclass(frozen=True, eq=False)
class MaskedCounts:
    """Counts of a run's last evaluation."""

    step: int
    counts: NDArray[np.float64]
    """(M, 4) patches, by COUNTED; of a patch with several cells, the share that is right counts."""
    images: list[str]
    """(M,) names."""

    def save(self, folder: Path) -> None:
        """Write them into the folder of a run."""
        with complete(folder / COUNTS_FILE) as partial, partial.open("wb") as file:
            np.savez_compressed(file, step=self.step, counts=self.counts, images=np.array(self.images, str))


def load_masked_counts(folder: Path, step: int) -> MaskedCounts | None:
    """The counts of the evaluation after `step`; None: they were not kept, as by earlier versions.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / COUNTS_FILE
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            kept = MaskedCounts(int(arrays["step"]), arrays["counts"], arrays["images"].tolist())
    except NPZ_ERRORS as error:
        raise UserError(f"{path} cannot be read: {error}; delete it to evaluate without intervals") from error
    return kept if kept.step == step else None
