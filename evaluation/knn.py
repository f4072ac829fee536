"""Weighted kNN accuracy of frozen features (Wu et al., 2018; as DINO reports it).

python evaluation/knn.py --encoder runs/birds
"""

from collections.abc import Sequence
from typing import Any

import torch

from evaluation.config import KnnConfig
from evaluation.frozen.extraction import Features
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.probing import probe
from mpp.features.metrics import is_right
from mpp.features.neighbours import knn_predict
from mpp.runtime.hardware import device
from mpp.runtime.start import command


def evaluate(features: Features, config: KnnConfig) -> list[dict]:
    """Accuracy for every number of neighbours."""
    own = device()
    labels, test = torch.from_numpy(features.train_labels), torch.tensor(features.test, dtype=torch.float32)
    predicted = knn_predict(features.train, labels, test.to(own), config.neighbours, config.temperature)
    truth = torch.from_numpy(features.test_labels).to(own)
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
