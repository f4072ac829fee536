"""Full-data linear probe of frozen features: multinomial logistic regression.

    python evaluation/linear.py --encoder runs/birds
    python evaluation/linear.py --encoder runs/birds --solver sgd

Features are standardised by the training set. The penalty (L-BFGS) or learning rate (SGD) is chosen on a tenth of the
training set; the classifier is then fitted to all of it, and tested once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from evaluation.config import LinearConfig
from evaluation.frozen.extraction import Features
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.probing import probe
from evaluation.supervision.heads import zero_head
from mpp.features.metrics import is_right
from mpp.runtime.arrays import BLOCK, in_blocks
from mpp.runtime.hardware import device
from mpp.runtime.progress import progress_bar
from mpp.runtime.start import command

LOGITS = 2**24  # computed at a time: what bounds the memory
QUICK = 2**27  # numbers in the features: up to here fitting takes seconds, and shows no progress bar


def fit_lbfgs(
    features: Tensor, labels: Tensor, classes: int, l2: float, iterations: int, passed: Callable[[], Any] = lambda: None
) -> nn.Linear:
    """The minimum of mean cross-entropy + l2 / 2 * |W|^2; the bias is free.

    Args:
        features: (N, D).
        labels: (N,).
        passed: called after each pass over the features.
    """
    classifier = zero_head(features.shape[1], classes).to(features.device)
    optimizer = torch.optim.LBFGS(
        classifier.parameters(),
        max_iter=iterations,
        history_size=20,
        tolerance_grad=1e-6,
        line_search_fn="strong_wolfe",
    )
    rows = max(1, LOGITS // classes)
    blocks = list(zip(features.split(rows), labels.split(rows), strict=True))

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = l2 / 2 * classifier.weight.square().sum()
        total.backward()
        for block, truth in blocks:
            loss = F.cross_entropy(classifier(block), truth) * (len(truth) / len(labels))
            loss.backward()
            total = total.detach() + loss.detach()
        passed()
        return total

    optimizer.step(closure)
    return classifier


def fit_sgd(
    features: Tensor,
    labels: Tensor,
    classes: int,
    lr: float,
    epochs: int,
    batch_size: int,
    seed: int,
    passed: Callable[[], Any] = lambda: None,
) -> nn.Linear:
    """A classifier by SGD: features (N, D), labels (N,). `passed` is called after each epoch."""
    classifier = zero_head(features.shape[1], classes).to(features.device)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * math.ceil(len(labels) / batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=generator).to(labels.device).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(classifier(features[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
        passed()
    return classifier


def floats(features: NDArray, device: str, rows: int = BLOCK) -> Iterator[Tensor]:
    """Features on the device, so many rows at a time."""
    for block in in_blocks(features, rows):
        yield torch.tensor(block, dtype=torch.float32, device=device)


def fitted_accuracies(
    features: Features, config: LinearConfig, classes: int, cases: Sequence[tuple[float, int]]
) -> list[float]:
    """Test accuracies of the classifiers with each of these penalties or learning rates, and seeds.

    All are fitted to one copy of the training features; those of test are standardised as they are looked at.
    """
    own = device()
    train = torch.empty(features.train.shape, device=own)
    for part, block in zip(train.split(BLOCK), floats(features.train, own), strict=True):
        part.copy_(block)
    mean, std = train.mean(0), train.std(0, correction=0) + 1e-6
    train.sub_(mean).div_(std)
    labels, truth = (torch.from_numpy(part).to(own) for part in (features.train_labels, features.test_labels))
    accuracies = []
    for choice, seed in cases:
        with progress_bar(desc=f"{config.solver} {choice:g}", unit="pass", disable=train.numel() <= QUICK) as bar:
            if config.solver == "lbfgs":
                classifier = fit_lbfgs(train, labels, classes, choice, config.iterations, bar.update)
            else:
                settings = config.epochs, config.sgd_batch_size, seed
                classifier = fit_sgd(train, labels, classes, choice, *settings, bar.update)
        with torch.no_grad():
            test = ((block - mean) / std for block in floats(features.test, own, max(1, LOGITS // classes)))
            predicted = torch.cat([classifier(block).argmax(1) for block in test])
        accuracies.append(float(is_right(predicted, truth).double().mean()))
    return accuracies


def evaluate(features: Features, config: LinearConfig) -> list[dict]:
    """Test accuracy with the penalty or learning rate that is best on the dev split."""
    features, classes = features.numbered()
    name, choices = ("l2", config.l2) if config.solver == "lbfgs" else ("lr", config.lr)
    seeds = (0,) if config.solver == "lbfgs" else config.seeds
    tried = fitted_accuracies(features.dev(), config, classes, [(choice, seeds[0]) for choice in choices])
    on_dev = dict(zip(choices, tried, strict=True))
    best = max(on_dev, key=on_dev.get)
    tested = fitted_accuracies(features, config, classes, [(best, seed) for seed in seeds])
    return [
        {"solver": config.solver, "seed": seed, name: best, "dev_accuracy": on_dev[best], "accuracy": accuracy}
        for seed, accuracy in zip(seeds, tested, strict=True)
    ]


def run(config: LinearConfig) -> dict[str, Any]:
    """Probe and report; the report."""
    return probe(config, "linear", lambda features: evaluate(features, config), "solver")


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe as the command line, or `arguments`, say."""
    run(parse_with_images(LinearConfig, arguments, prog="python evaluation/linear.py"))


if __name__ == "__main__":
    command(main)
