"""An evaluation of yours: `mpp centroid --import tests/nearest_centroid.py --encoder runs/birds`."""

from dataclasses import dataclass

from sklearn.neighbors import NearestCentroid

from evaluation.config import ProbeConfig
from evaluation.registry import register_probe


@dataclass(frozen=True)
class CentroidConfig(ProbeConfig):
    """Nearest-centroid accuracy of frozen features."""

    order: int = 2
    """Order of the norm that measures distances: 1 or 2."""


def evaluate(features, config):
    nearest = NearestCentroid(metric="manhattan" if config.order == 1 else "euclidean")
    predicted = nearest.fit(features.train, features.train_labels).predict(features.test)
    return [{"order": config.order, "outcomes": features.outcomes(predicted)}]


run, main = register_probe("centroid", __name__, CentroidConfig, evaluate, "nearest-centroid accuracy", "order")
