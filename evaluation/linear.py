"""Full-data linear probe of frozen features: multinomial logistic regression.

    python evaluation/linear.py --encoder runs/birds
    python evaluation/linear.py --encoder runs/birds --solver sgd

Features are standardised by the training set. The penalty (L-BFGS) or learning rate (SGD) is chosen on a tenth of the
training set; the classifier is then fitted to all of it, and tested once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evaluation.suite.extraction import Features
from evaluation.suite.inheritance import parse_with_images
from evaluation.suite.probing import ProbeConfig, probe
from mpp.config import as_lists, require
from mpp.metrics import is_right
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.launch import command


@dataclass(frozen=True)
class LinearConfig(ProbeConfig):
    """Full-data linear probe of frozen features."""

    solver: Literal["lbfgs", "sgd"] = "lbfgs"
    """lbfgs: to convergence, with an l2 penalty; sgd: momentum 0.9, cosine decay, no penalty."""
    l2: float | tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    """Penalties that L-BFGS chooses among, of the mean loss."""
    lr: float | tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """Learning rates that SGD chooses among."""
    epochs: int = 100
    """Epochs of SGD."""
    sgd_batch_size: int = 1024
    """Batch of SGD."""
    seeds: int | tuple[int, ...] = (0, 1, 2)
    """Seeds of SGD's order; L-BFGS has none."""
    iterations: int = 500
    """At most so many iterations of L-BFGS."""

    def __post_init__(self):
        super().__post_init__()
        as_lists(self, "l2", "lr", "seeds")
        for name in ("l2", "lr", "seeds"):
            require(len(getattr(self, name)) > 0, name, list(getattr(self, name)), "a list that is not empty")
        require(min(self.l2) >= 0, "l2", list(self.l2), "a list of numbers from 0")
        require(min(self.lr) > 0, "lr", list(self.lr), "a list of positive numbers")
        for name in ("epochs", "sgd_batch_size", "iterations"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


def fit_lbfgs(features: Tensor, labels: Tensor, classes: int, l2: float, iterations: int) -> nn.Linear:
    """The minimum of mean cross-entropy + l2 / 2 * |W|^2; the bias is free. features (N, D), labels (N,)."""
    classifier = zero_classifier(features, classes)
    optimizer = torch.optim.LBFGS(
        classifier.parameters(),
        max_iter=iterations,
        history_size=20,
        tolerance_grad=1e-6,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(classifier(features), labels) + l2 / 2 * classifier.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return classifier


def fit_sgd(
    features: Tensor, labels: Tensor, classes: int, lr: float, epochs: int, batch_size: int, seed: int
) -> nn.Linear:
    """A classifier by SGD: features (N, D), labels (N,)."""
    classifier = zero_classifier(features, classes)
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
    return classifier


def zero_classifier(features: Tensor, classes: int) -> nn.Linear:
    """A linear layer that knows nothing."""
    classifier = nn.Linear(features.shape[1], classes, device=features.device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return classifier


def fitted_accuracy(features: Features, config: LinearConfig, classes: int, choice: float, seed: int) -> float:
    """Test accuracy of the classifier with this penalty or learning rate."""
    device = "cuda" if uses_gpu() else "cpu"
    train, labels, test, truth = (torch.from_numpy(part).to(device) for part in features)
    mean, std = train.float().mean(0), train.float().std(0, correction=0) + 1e-6
    train, test = (train.float() - mean) / std, (test.float() - mean) / std
    if config.solver == "lbfgs":
        classifier = fit_lbfgs(train, labels, classes, choice, config.iterations)
    else:
        classifier = fit_sgd(train, labels, classes, choice, config.epochs, config.sgd_batch_size, seed)
    with torch.no_grad():
        return float(is_right(classifier(test).argmax(1), truth).double().mean())


def evaluate(features: Features, config: LinearConfig) -> list[dict]:
    """Test accuracy with the penalty or learning rate that is best on the dev split."""
    classes = int(max(features.train_labels.max(), features.test_labels.max())) + 1
    name, choices = ("l2", config.l2) if config.solver == "lbfgs" else ("lr", config.lr)
    seeds = (0,) if config.solver == "lbfgs" else config.seeds
    dev = features.dev()
    on_dev = {choice: fitted_accuracy(dev, config, classes, choice, seeds[0]) for choice in choices}
    best = max(on_dev, key=on_dev.get)
    return [
        {"solver": config.solver, "seed": seed, name: best, "dev_accuracy": on_dev[best]}
        | {"accuracy": fitted_accuracy(features, config, classes, best, seed)}
        for seed in seeds
    ]


def run(config: LinearConfig) -> dict[str, Any]:
    """Probe and report; the report."""
    return probe(config, "linear", lambda features: evaluate(features, config), "solver")


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe as the command line, or `arguments`, say."""
    run(parse_with_images(LinearConfig, arguments, prog="python evaluation/linear.py"))


if __name__ == "__main__":
    command(main)
