"""Outcomes: target and prediction of each test image. Kept next to a report, so later ones can be paired.

M test images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpp.errors import NPZ_ERRORS, UserError
from mpp.runtime.files import complete
from mpp.runtime.messages import printable


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Targets and predictions of test images, in the same order."""

    kind: str
    """Name of the kind of label: see `evaluation/metrics/kinds.py`."""
    targets: NDArray
    """(M, ...): their meaning depends on the kind."""
    predictions: NDArray
    """(M, ...): their meaning depends on the kind."""
    class_names: Sequence[str] = ()
    """Names of the classes by number, as far as they are known."""
    images: Sequence[str] = ()
    """(M,) names of the images' files, or their places in the split; empty: unknown."""

    def __len__(self) -> int:
        return len(self.predictions)

    def select(self, indices: NDArray) -> "Outcomes":
        """The outcomes of some images (indices or a mask), which may occur several times."""
        images = np.asarray(self.images)[indices].tolist() if len(self.images) else ()
        return replace(self, targets=self.targets[indices], predictions=self.predictions[indices], images=images)

    def names(self, classes: int) -> list[str]:
        """A name for each class: its own, or its number."""
        known = [printable(name) for name in self.class_names[:classes]]
        return known + [f"class {number}" for number in range(len(known), classes)]


def outcomes_path(report: Path) -> Path:
    """The file of a report's outcomes."""
    return report.with_name(f"{report.stem}.outcomes.npz")


def save_outcomes(report: Path, outcomes: Sequence[Outcomes]) -> Path:
    """Write the outcomes of a report's results next to it; all have the same images and targets.

    The results know theirs by number (`outcomes` in a result).
    """
    first = outcomes[0]
    arrays = {
        "kind": np.array(first.kind),
        "targets": first.targets,
        "class_names": np.array(list(first.class_names), str),
        "images": np.array(list(first.images), str),
    }
    for number, each in enumerate(outcomes):
        arrays[f"predictions_{number}"] = each.predictions
    path = outcomes_path(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path


def load_outcomes(report: Path, number: int = 0) -> Outcomes | None:
    """The outcomes of a report's result; None: they were not kept.

    Raises:
        UserError: the file cannot be read.
    """
    path = outcomes_path(report)
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Outcomes(
                str(arrays["kind"]),
                arrays["targets"],
                arrays[f"predictions_{number}"],
                arrays["class_names"].tolist(),
                arrays["images"].tolist(),
            )
    except NPZ_ERRORS as error:
        raise UserError(f"{path} cannot be read: {error}; evaluate again") from error
