"""All warnings about a run, by name. Nothing here reads a file or computes.

Figures in the docstrings of warnings were measured on birds, CIFAR-10 (5,000 images), scikit-learn's digits, and tiles
of scikit-image's photographs: 18 healthy runs of 300 to 1,200 steps (mean_color, grid_color, pixels, MAE, SimMIM,
MaskFeat), and runs made sick. tests/test_verdict.py has such runs.
"""

from collections.abc import Callable
from typing import NamedTuple

from mpp.training.data_warnings import (
    constant_images_dominate,
    data_loading_bottleneck,
    held_out_duplicates,
    low_gpu_utilisation,
    one_class_dominates,
    unreadable_images,
)
from mpp.training.facts import RunFacts
from mpp.training.history import History
from mpp.training.learning_warnings import (
    below_copy_baseline,
    features_collapse,
    features_peaked,
    general_knn_falls,
    gradients_almost_always_clipped,
    long_warmup,
    not_learning,
    overfitting,
    targets_collapse,
)
from mpp.training.start_warnings import (
    colours_on_trained_weights,
    high_rate_on_trained_weights,
    muon_after_adam,
    no_warmup_on_trained_weights,
    random_weights_stay,
)


class RunWarning(NamedTuple):
    """One warning about a run."""

    name: str
    """Its row in the tables of mpp/monitoring.md."""
    message: str
    """The observation, and the setting to change."""


WARNINGS: dict[str, Callable[[History, RunFacts], str | None]] = {
    "not learning": not_learning,
    "below copy baseline": below_copy_baseline,
    "features collapse": features_collapse,
    "targets collapse": targets_collapse,
    "overfitting": overfitting,
    "long warm-up": long_warmup,
    "gradients almost always clipped": gradients_almost_always_clipped,
    "features peaked": features_peaked,
    "general kNN falls": general_knn_falls,
    "data-loading bottleneck": data_loading_bottleneck,
    "low GPU utilisation": low_gpu_utilisation,
    "unreadable images": unreadable_images,
    "train / held-out duplicates": held_out_duplicates,
    "one class dominates": one_class_dominates,
    "constant images dominate": constant_images_dominate,
    "Muon after Adam": muon_after_adam,
    "high learning rate on trained weights": high_rate_on_trained_weights,
    "no warm-up on trained weights": no_warmup_on_trained_weights,
    "colours on trained weights": colours_on_trained_weights,
    "random weights stay": random_weights_stay,
}
"""Name of a warning -> its function, whose message is None where there is nothing to warn of."""


def find_warnings(history: History, facts: RunFacts) -> list[RunWarning]:
    """All warnings about a run."""
    warnings = []
    for name, message_of in WARNINGS.items():
        message = message_of(history, facts)
        if message:
            warnings.append(RunWarning(name, message))
    return warnings
