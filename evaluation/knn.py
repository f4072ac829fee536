"""Weighted kNN accuracy of frozen features (Wu et al., 2018; as DINO reports it).

python evaluation/knn.py --encoder runs/birds
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evaluation.suite.extraction import Features
from evaluation.suite.probing import ProbeConfig, probe
from evaluation.suite.run_images import parse_with_images
from mpp.config import as_lists, require
from mpp.metrics import is_right
from mpp.probe import knn_predict
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.launch import command


@dataclass(frozen=True)
class KnnConfig(ProbeConfig):
    """Weighted kNN accuracy of frozen features."""

    neighbours: int | tuple[int, ...] = (10, 20, 100, 200)
    """How many of the nearest training images vote."""
    temperature: float = 0.07
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""

    def __post_init__(self):
        super().__post_init__()
        as_lists(self, "neighbours")
        require(
            len(self.neighbours) > 0 and min(self.neighbours) >= 1,
            "neighbours",
            list(self.neighbours),
            "numbers from 1",
        )
        require(self.temperature > 0, "temperature", self.temperature, "above 0")


def evaluate(features: Features, config: KnnConfig) -> list[dict]:
    """Accuracy for every number of neighbours."""
    device = "cuda" if uses_gpu() else "cpu"
    labels, test = torch.from_numpy(features.train_labels), torch.tensor(features.test, dtype=torch.float32)
    predicted = knn_predict(features.train, labels, test.to(device), config.neighbours, config.temperature)
    truth = torch.from_numpy(features.test_labels).to(device)
    return [
        {"neighbours": k, "accuracy": float(is_right(of_k, truth).double().mean())} for k, of_k in predicted.items()
    ]


def run(config: KnnConfig) -> dict[str, Any]:
    """Probe and report; the report."""
    return probe(config, "knn", lambda features: evaluate(features, config), "neighbours")


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe as the command line, or `arguments`, say."""
    run(parse_with_images(KnnConfig, arguments, prog="python evaluation/knn.py"))


if __name__ == "__main__":
    command(main)
