"""Nearest-centroid accuracy of frozen features: an example of an evaluation of yours.

mpp centroid --import tests/nearest_centroid.py --encoder runs/birds
"""

from dataclasses import dataclass

import numpy as np

from evaluation.config import EncoderConfig, FrozenProbeConfig, ProbeDataConfig
from evaluation.frozen.probing import run_probe
from evaluation.frozen.run_images import parse_with_images
from evaluation.registry import Evaluation, register
from mpp.config import Settings


@dataclass(frozen=True)
class CentroidConfig(Settings):
    """Nearest-centroid accuracy of frozen features."""

    frozen: EncoderConfig = EncoderConfig()
    data: ProbeDataConfig = ProbeDataConfig()
    probe: FrozenProbeConfig = FrozenProbeConfig()
    order: int = 2
    """Order of the norm that measures distances: 1 or 2."""


def evaluate(features, config):
    classes = np.unique(features.train_labels)
    centroids = np.stack([features.train[features.train_labels == label].mean(0) for label in classes])
    distances = np.stack([np.linalg.norm(features.test - each, config.order, axis=1) for each in centroids])
    return [{"order": config.order, "outcomes": features.outcomes(classes[distances.argmin(0)])}]


def run(config):
    return run_probe(config, "centroid", lambda features: evaluate(features, config), group_by="order")


def main(arguments=None):
    run(parse_with_images(CentroidConfig, arguments))


register(Evaluation("centroid", __name__, f"{__name__}.CentroidConfig", "frozen features", "nearest-centroid accuracy"))
