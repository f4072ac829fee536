"""Accuracy of masked patches, which are not independent: images are resampled. M test images."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evaluation.metrics.kinds import LabelKind
from evaluation.metrics.outcomes import Outcomes


class MaskedPatches(LabelKind):
    """Masked patches of an image. Targets (M,): their number; predictions (M,): the number of right ones."""

    name = "patches"
    score = "accuracy"
    headings: ClassVar[dict[str, str]] = {"accuracy": "accuracy"}
    shares = frozenset(headings)

    def has_target(self, targets: NDArray) -> NDArray[np.bool_]:
        return targets > 0

    def measure(self, outcomes: Outcomes) -> dict[str, float]:
        return {"accuracy": float(outcomes.predictions.sum() / outcomes.targets.sum())}

    def baselines(self, outcomes: Outcomes) -> dict[str, float]:
        return {}  # results of their own: see `evaluation/masked.py`
