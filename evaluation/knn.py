"""Weighted kNN of frozen features (Wu et al., 2018; as DINO reports it): votes for a class, means of anything else.

Cosine similarity; of equal neighbours the first ones of the dataset vote.

    python evaluation/knn.py --encoder runs/birds
"""

import torch

from evaluation.config import KnnConfig
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.results import commands_of_probe
from mpp.data.labels import LABEL_KINDS
from mpp.features.neighbours import knn_means, knn_predict
from mpp.runtime.hardware import device
from mpp.runtime.messages import counted, note
from mpp.runtime.start import run_main


def evaluate(features: LabelledFeatures, config: KnnConfig) -> list[dict]:
    """Outcomes for every number of neighbours."""
    labels, how = features.train_labels, (config.neighbours, config.temperature)
    for number in config.neighbours:
        if number > len(labels):
            note(f"neighbours {number}: all {counted(len(labels), 'training image')} vote")
    test = torch.tensor(features.test, dtype=torch.float32).to(device())
    if features.kind == "class":
        predictions = knn_predict(features.train, torch.from_numpy(labels), test, *how)
        by_number = {k: predicted.cpu().numpy() for k, predicted in predictions.items()}
    else:
        mean, std = (labels.mean(), labels.std()) if features.kind == "number" else (0.0, 1.0)  # float32 has 7 digits
        values = torch.from_numpy((labels - mean) / (std or 1.0)).float().reshape(len(labels), -1)
        shape = (len(test), *labels.shape[1:])
        means = knn_means(features.train, values, test, *how)
        by_number = {k: near.cpu().double().numpy().reshape(shape) * std + mean for k, near in means.items()}
    return [{"neighbours": k, "outcomes": features.outcomes(predicted)} for k, predicted in by_number.items()]


run, main = commands_of_probe("knn", KnnConfig, evaluate, "neighbours", LABEL_KINDS)


if __name__ == "__main__":
    run_main(main)
