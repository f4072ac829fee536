"""Weighted kNN accuracy of frozen features (Wu et al., 2018; as DINO reports it).

Cosine similarity; of equal neighbours the first ones of the dataset vote.

python evaluation/knn.py --encoder runs/birds
"""

from collections.abc import Sequence
from typing import Any

import torch

from evaluation.config import KnnConfig
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.probing import run_probe
from evaluation.frozen.run_images import LoadedSplits, parse_and_load
from evaluation.supervision.learners import learner_of
from mpp.data.labels import LABEL_KINDS
from mpp.runtime.hardware import device
from mpp.runtime.messages import counted, note
from mpp.runtime.start import run_main


def run(config: KnnConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Probe the features, write the report, and return it."""
    return run_probe(config, "knn", lambda features: evaluate(features, config), "neighbours", loaded, LABEL_KINDS)


def evaluate(features: LabelledFeatures, config: KnnConfig) -> list[dict]:
    """Outcomes for every number of neighbours."""
    note_missing_neighbours(config.neighbours, len(features.train))
    learner = learner_of(features.kind, features.train_labels, 0)
    test = torch.tensor(features.test, dtype=torch.float32).to(device())
    predictions = learner.nearest(features.train, test, config.neighbours, config.temperature)
    results = []
    for neighbours, predicted in predictions.items():
        results.append({"neighbours": neighbours, "outcomes": features.outcomes(predicted.cpu().numpy())})
    return results


def note_missing_neighbours(neighbours: Sequence[int], image_count: int) -> None:
    """Note the numbers of neighbours that are more than the training images."""
    more = [str(number) for number in neighbours if number > image_count]
    if more:
        note(f"neighbours {' and '.join(more)}: all vote, since there are {counted(image_count, 'training image')}")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Probe with the settings of the command line, or of `arguments`."""
    return run(*parse_and_load(KnnConfig, arguments))


if __name__ == "__main__":
    run_main(main)
