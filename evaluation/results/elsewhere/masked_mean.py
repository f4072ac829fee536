"""The cost of a probe that learns from one feature of an image and is tested on another.

    python evaluation/results/elsewhere/masked_mean.py runs/simmim features --seed 0

Writes features of a pre-training run, for `mpp linear --features FILE` and `mpp knn --features FILE`: of 20,000
training images, drawn by the seed, and of the held-out ones. A file is named by what is learned from and tested on: the
mean of the patch tokens of the masked image, as pre-training sees it, or of the whole one, or its [class] token.
"""

import argparse
from itertools import product
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from evaluation.frozen.features import LabelledFeatures, save_features
from mpp.config import Config
from mpp.config.parsing import parse_saved
from mpp.corruption import Corruption
from mpp.data.dataset import ImageDataset
from mpp.data.views import collate
from mpp.pretrain import Pretraining, reopen
from mpp.runtime.randomness import FIXED_VIEW
from mpp.training.run_folder import CONFIG_FILE

LEARNED_FROM = ("masked_mean", "mean")
TESTED_ON = ("class", "mean")
TRAIN_IMAGES, HELD_OUT_IMAGES, BATCH = 20_000, 10_000, 250


def encode_masked(task: Pretraining, images: Tensor, corruption: Corruption) -> Tensor:
    """Mean (B, D) of the patch tokens of images as pre-training shows them to the encoder: to MAE's, a part."""
    network = getattr(task.model, "student", task.model)
    network.last_at_few = False  # else the paper's network computes the masked patches alone in its last block
    encoder, outputs = network.encoder, []
    hook = encoder.blocks[-1].register_forward_hook(lambda block, inputs, output: outputs.append(output))
    network(images, corruption)
    hook.remove()
    (tokens,) = outputs
    return encoder.fc_norm(encoder.norm(tokens))[:, encoder.num_prefix_tokens :].mean(1)


@torch.no_grad()
def features_of(task: Pretraining, dataset: ImageDataset) -> dict[str, Tensor]:
    """The features (N, D) of a dataset, by name."""
    views = task.views(dataset)
    exported = task.exported(task.model)
    encoder, normalize = exported.encoder, exported.normalize
    found = {"masked_mean": [], "mean": [], "class": []}
    for indices in torch.arange(len(dataset)).split(BATCH):
        batch = collate([views[FIXED_VIEW, int(index)] for index in indices])
        tokens = encoder.forward_features(normalize(batch.images))
        found["class"].append(tokens[:, 0])
        found["mean"].append(tokens[:, encoder.num_prefix_tokens :].mean(1))
        found["masked_mean"].append(encode_masked(task, batch.images, batch.corruption))
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a pre-training run whose images have labels")
    parser.add_argument("out", type=Path, help="folder of the files")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    source = parse_saved(Config, given.run / CONFIG_FILE).data
    task = reopen(given.run, source, HELD_OUT_IMAGES, Accelerator(cpu=True))
    train_images, test_images = task.train.labelled().choose(TRAIN_IMAGES, given.seed), task.held_out.labelled()
    train, test = features_of(task, train_images), features_of(task, test_images)
    given.out.mkdir(parents=True, exist_ok=True)
    for learned, tested in product(LEARNED_FROM, TESTED_ON):
        features = LabelledFeatures(train[learned], train_images.labels, test[tested], test_images.labels)
        save_features(given.out / f"{learned}_to_{tested}.npz", features)


if __name__ == "__main__":
    main()
