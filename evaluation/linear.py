"""Linear probe of frozen features, with all labels: multinomial logistic regression, or a published protocol.

    python evaluation/linear.py --encoder runs/birds
    python evaluation/linear.py --encoder runs/birds --solver sgd
    python evaluation/linear.py --encoder runs/birds --protocol mae

Features are standardised by the training set. The penalty (L-BFGS) or learning rate (SGD) is chosen on a tenth of the
training set; the classifier is then fitted to all of it, and tested once. Several classes are a logistic regression
each, and numbers a ridge regression. Published protocols, which train on random crops, are in protocols.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.config import LinearConfig
from evaluation.frozen.features import LabelledFeatures, describe_learned
from evaluation.frozen.kept_heads import (
    HEAD_TASKS,
    HeadDescription,
    StandardizedLinear,
    describe_encoder,
    save_head,
)
from evaluation.frozen.results import report_path_of_command, run_probe
from evaluation.frozen.run_images import LoadedSplits, is_colour_baseline, parse_and_load
from evaluation.metrics.scoring import Outcomes, best_choice, score_of
from evaluation.protocols import CropProbe, run_protocol
from evaluation.supervision.learners import Learner, learner_of, zero_head
from mpp.config import require
from mpp.data.dataset import names_by_number
from mpp.data.labels import LABEL_KINDS
from mpp.runtime.hardware import device
from mpp.runtime.messages import progress_bar
from mpp.runtime.start import run_main

LOGITS_PER_BLOCK = 2**24  # computed at a time, which bounds the memory
DEVIATION_OFFSET = 1e-6  # added to the deviation of a feature: a constant one is not divided by 0
SHOW_BAR_AFTER = 5  # seconds
TestedHead = tuple[StandardizedLinear, str, list[int]]
"""A head that was tested, its kind of label, and the numbers in the dataset of the classes of its outputs."""


def run(config: LinearConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Probe the features, write the report, and return it."""
    allowed = "left out: a colour baseline has no weights, so its head is not kept"
    require(not (config.save and is_colour_baseline(config.frozen.encoder)), "save", True, allowed)
    kept = None  # of the features that were evaluated last

    def evaluate_and_keep_head(features: LabelledFeatures) -> list[dict]:
        nonlocal kept
        results, kept = evaluate_head(features, config)
        return results

    def train_and_keep_head(probe: CropProbe) -> list[dict]:
        nonlocal kept
        results, (norm, classify) = probe.evaluate()
        if config.save:
            head = StandardizedLinear(classify, norm.running_mean, (norm.running_var + norm.eps).sqrt())
            kept = head, "class", list(range(probe.classes))
        return results

    if config.protocol == "logistic":
        report = run_probe(config, "linear", evaluate_and_keep_head, "solver", loaded, LABEL_KINDS)
    else:
        report = run_protocol(config, train_and_keep_head, loaded)
    if config.save and report:
        keep_head(config, report, kept, loaded)
    return report


def keep_head(config: LinearConfig, report: dict[str, Any], kept: TestedHead, loaded: LoadedSplits | None) -> None:
    """Write a head to its folder next to the report."""
    head, kind, numbers = kept
    path = report_path_of_command(config, "linear")
    protocol = report["protocol"]
    description = HeadDescription(
        task=HEAD_TASKS[kind],
        class_names=names_by_number(report["class_names"], numbers),
        class_numbers=numbers,
        representation=config.probe.representation,
        depth=protocol["chosen_depth"],
        input=protocol["input"],
        **describe_encoder(config.frozen),
        learned=None if config.probe.features else describe_learned(config.data, loaded, config.probe.task),
    )
    seeds = list(dict.fromkeys(result["seed"] for result in report["results"]))
    save_head(path.with_name(f"{path.stem}_head"), head, description, seeds)


def evaluate(features: LabelledFeatures, config: LinearConfig) -> list[dict]:
    """Test outcomes with the penalty or learning rate that is best on the dev split."""
    return evaluate_head(features, config)[0]


def evaluate_head(features: LabelledFeatures, config: LinearConfig) -> tuple[list[dict], TestedHead]:
    """The results of `evaluate`, and the tested head of the first seed."""
    numbers: list[int] = []
    if features.kind == "class":
        features, classes = features.with_numbered_classes()
        numbers = classes.tolist()
    elif features.kind == "several":
        numbers = list(range(features.train_labels.shape[1]))
    is_lbfgs = config.solver == "lbfgs"
    name, choices, seeds = ("l2", config.l2, (0,)) if is_lbfgs else ("lr", config.lr, config.seeds)

    dev_cases = [(choice, seeds[0]) for choice in choices]
    on_dev, _ = fit_and_test(features.dev_split(), config, len(numbers), dev_cases)
    scores = {choice: score_of(outcomes) for choice, outcomes in zip(choices, on_dev, strict=True)}
    best = best_choice(scores)

    tested, heads = fit_and_test(features, config, len(numbers), [(best, seed) for seed in seeds])
    results = []
    for seed, outcomes in zip(seeds, tested, strict=True):
        chosen = {"solver": config.solver, "seed": seed, name: best, "dev_accuracy": scores[best]}
        results.append(chosen | {"outcomes": outcomes})
    return results, (heads[0], features.kind, numbers)


def fit_and_test(
    features: LabelledFeatures, config: LinearConfig, classes: int, cases: Sequence[tuple[float, int]]
) -> tuple[list[Outcomes], list[StandardizedLinear]]:
    """Test outcomes of classifiers, one for each case, and the classifiers.

    All are fitted to one copy of the training features; test features are standardised block by block.

    Args:
        classes: number of classes, of one class an image numbered from 0.
        cases: penalty or learning rate, and seed.
    """
    train = torch.tensor(features.train, dtype=torch.float32, device=device())
    mean = train.mean(0)
    std = train.std(0, correction=0) + DEVIATION_OFFSET
    train.sub_(mean).div_(std)
    labels = torch.from_numpy(features.train_labels).to(device())
    learner = learner_of(features.kind, features.train_labels, classes, config.loss)
    test_blocks = torch.from_numpy(features.test).split(max(1, LOGITS_PER_BLOCK // learner.outputs))
    tested, heads = [], []
    for choice, seed in progress_bar(cases, desc=config.solver, unit="fit", delay=SHOW_BAR_AFTER):
        if config.solver == "lbfgs":
            layer = fit_lbfgs(train, labels, learner, choice, config.iterations)
        else:
            layer = fit_sgd(train, labels, learner, choice, config.epochs, config.sgd_batch_size, seed)
        head = StandardizedLinear(learner.merge(layer), mean, std)
        with torch.no_grad():
            predicted = [learner.predict(head(block.to(device(), torch.float32))) for block in test_blocks]
        tested.append(features.outcomes(torch.cat(predicted).cpu().numpy()))
        heads.append(head)
    return tested, heads


def fit_lbfgs(
    features: Tensor,
    labels: Tensor,
    learner: Learner,
    l2: float,
    iterations: int,
) -> nn.Linear:
    """The minimum of the learner's mean loss + l2 / 2 * |W|^2; the bias is free.

    Args:
        features: (N, D).
        labels: (N, ...).
    """
    layer = zero_head(features.shape[1], learner.outputs).to(features.device)
    head = learner.complete(layer).to(features.device)
    optimizer = torch.optim.LBFGS(
        layer.parameters(),
        max_iter=iterations,
        history_size=20,
        tolerance_grad=1e-6,
        line_search_fn="strong_wolfe",
    )
    rows = max(1, LOGITS_PER_BLOCK // learner.outputs)
    blocks = list(zip(features.split(rows), labels.split(rows), strict=True))

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = l2 / 2 * layer.weight.square().sum()
        total.backward()
        for block, block_labels in blocks:
            share = len(block_labels) / len(labels)
            loss = learner.loss(head(block), block_labels) * share
            loss.backward()
            total = total.detach() + loss.detach()
        return total

    optimizer.step(closure)
    return layer


def fit_sgd(
    features: Tensor,
    labels: Tensor,
    learner: Learner,
    lr: float,
    epochs: int,
    batch_size: int,
    seed: int,
) -> nn.Linear:
    """A layer by SGD with momentum 0.9 and cosine decay, without a penalty.

    Args:
        features: (N, D).
        labels: (N, ...).
    """
    layer = zero_head(features.shape[1], learner.outputs).to(features.device)
    head = learner.complete(layer).to(features.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * math.ceil(len(labels) / batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator).to(labels.device)
        for batch in order.split(batch_size):
            optimizer.zero_grad()
            loss = learner.loss(head(features[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
    return layer


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Probe with the settings of the command line, or of `arguments`."""
    return run(*parse_and_load(LinearConfig, arguments))


if __name__ == "__main__":
    run_main(main)
