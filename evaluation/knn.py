"""Weighted kNN of frozen features (Wu et al., 2018; as DINO reports it): votes for a class, means of anything else.

Cosine similarity; of equal neighbours the first ones of the dataset vote.

python evaluation/knn.py --encoder runs/birds
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from evaluation.config import KnnConfig
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.probing import run_probe
from evaluation.frozen.run_images import LoadedSplits, parse_and_load
from mpp.data.labels import LABEL_KINDS
from mpp.features.neighbours import knn_means, knn_predict
from mpp.runtime.hardware import device
from mpp.runtime.messages import counted, note
from mpp.runtime.start import run_main


def run(config: KnnConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Probe the features, write the report, and return it."""
    return run_probe(config, "knn", lambda features: evaluate(features, config), "neighbours", loaded, LABEL_KINDS)


def evaluate(features: LabelledFeatures, config: KnnConfig) -> list[dict]:
    """Outcomes for every number of neighbours."""
    more = [str(number) for number in config.neighbours if number > len(features.train)]
    if more:
        images = counted(len(features.train), "training image")
        note(f"neighbours {' and '.join(more)}: all vote, since there are {images}")
    predictions = predict(features, config.neighbours, config.temperature)
    return [{"neighbours": k, "outcomes": features.outcomes(predicted)} for k, predicted in predictions.items()]


def predict(features: LabelledFeatures, neighbours: Sequence[int], temperature: float) -> dict[int, NDArray]:
    """Number of neighbours -> predictions of the test images."""
    labels = features.train_labels
    test = torch.tensor(features.test, dtype=torch.float32).to(device())
    if features.kind == "class":
        votes = knn_predict(features.train, torch.from_numpy(labels), test, neighbours, temperature)
        return {k: predicted.cpu().numpy() for k, predicted in votes.items()}
    mean, std = (labels.mean(), labels.std()) if features.kind == "number" else (0.0, 1.0)  # float32 has 7 digits
    values = torch.from_numpy((labels - mean) / (std or 1.0)).float()
    means = knn_means(features.train, values.reshape(len(labels), -1), test, neighbours, temperature)
    shape = (len(test), *labels.shape[1:])
    return {k: near.cpu().double().numpy().reshape(shape) * std + mean for k, near in means.items()}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Probe with the settings of the command line, or of `arguments`."""
    return run(*parse_and_load(KnnConfig, arguments))


if __name__ == "__main__":
    run_main(main)
