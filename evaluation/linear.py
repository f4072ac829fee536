"""Linear probe of frozen features, with all labels: multinomial logistic regression, or a published protocol.

    python evaluation/linear.py --encoder runs/birds
    python evaluation/linear.py --encoder runs/birds --solver sgd
    python evaluation/linear.py --encoder runs/birds --protocol mae

Features are standardised by the training set. The penalty (L-BFGS) or learning rate (SGD) is chosen on a tenth of the
training set; the classifier is then fitted to all of it, and tested once. Several classes are a logistic regression
each, and numbers a ridge regression. Published protocols, which train on random crops, are in evaluation/protocols.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evaluation.config import LinearConfig
from evaluation.frozen.features import LabelledFeatures, describe_learned
from evaluation.frozen.kept_heads import (
    HEAD_TASKS,
    HeadDescription,
    HeadTask,
    StandardizedLinear,
    describe_encoder,
    save_head,
)
from evaluation.frozen.probing import run_probe
from evaluation.frozen.results import report_path_of_command
from evaluation.frozen.run_images import LoadedSplits, is_colour_baseline, parse_and_load
from evaluation.metrics.scoring import Outcomes, best_choice, score_of
from evaluation.protocols.probe import run_protocol
from evaluation.supervision.heads import zero_head
from evaluation.supervision.learners import Learner, learner_of
from mpp.config import require
from mpp.data.dataset import names_by_number
from mpp.data.labels import LABEL_KINDS
from mpp.runtime.hardware import device
from mpp.runtime.messages import progress_bar
from mpp.runtime.start import run_main

LOGITS_PER_BLOCK = 2**24  # computed at a time, which bounds the memory
IMAGES_PER_BLOCK = 2**14  # whose features are copied at a time
DEVIATION_OFFSET = 1e-6  # added to the deviation of a feature: a constant one is not divided by 0
QUICK_FIT_NUMBERS = 2**27  # numbers in the features: fitting to fewer takes seconds, and shows no progress bar


class FittedHead(NamedTuple):
    """A head that was tested."""

    head: StandardizedLinear
    task: HeadTask
    class_numbers: list[int]
    """Numbers in the dataset of the classes of its outputs."""


def run(config: LinearConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Probe the features, write the report, and return it."""
    if config.save:
        allowed = "left out: a colour baseline has no weights, so its head is not kept"
        require(not is_colour_baseline(config.frozen.encoder), "save", True, allowed)
    if config.protocol != "logistic":
        return run_published(config, loaded)
    heads: list[FittedHead] = []  # of the features that were evaluated last

    def evaluate_and_keep_heads(features: LabelledFeatures) -> list[dict]:
        nonlocal heads
        results, heads = evaluate_heads(features, config)
        return results

    report = run_probe(config, "linear", evaluate_and_keep_heads, "solver", loaded, LABEL_KINDS)
    if config.save and report:
        keep_head(config, report, heads[0], loaded)
    return report


def run_published(config: LinearConfig, loaded: LoadedSplits | None) -> dict[str, Any]:
    """Probe by a published protocol: see `run`."""
    probed = run_protocol(config, loaded)
    if config.save:
        norm, classify = probed.head
        head = StandardizedLinear(classify, norm.running_mean, (norm.running_var + norm.eps).sqrt())
        keep_head(config, probed.report, FittedHead(head, "classes", probed.class_numbers.tolist()), loaded)
    return probed.report


def keep_head(config: LinearConfig, report: dict[str, Any], fitted: FittedHead, loaded: LoadedSplits | None) -> None:
    """Write a head to its folder next to the report."""
    path = report_path_of_command(config, "linear")
    protocol = report["protocol"]
    description = HeadDescription(
        task=fitted.task,
        class_names=names_by_number(report["class_names"], fitted.class_numbers),
        class_numbers=fitted.class_numbers,
        representation=config.probe.representation,
        depth=protocol["chosen_depth"],
        input=protocol["input"],
        **describe_encoder(config.frozen),
        learned=None if config.probe.features else describe_learned(config.data, loaded, config.probe.task),
    )
    seeds = list(dict.fromkeys(result["seed"] for result in report["results"]))
    save_head(path.with_name(f"{path.stem}_head"), fitted.head, description, seeds)


def evaluate(features: LabelledFeatures, config: LinearConfig) -> list[dict]:
    """Test outcomes with the penalty or learning rate that is best on the dev split."""
    results, _ = evaluate_heads(features, config)
    return results


def evaluate_heads(features: LabelledFeatures, config: LinearConfig) -> tuple[list[dict], list[FittedHead]]:
    """The results of `evaluate`, and the tested head of each."""
    features, numbers = with_numbered_outputs(features)
    classes = len(numbers)
    if config.solver == "lbfgs":
        name, choices, seeds = "l2", config.l2, (0,)
    else:
        name, choices, seeds = "lr", config.lr, config.seeds

    dev_cases = [(choice, seeds[0]) for choice in choices]
    on_dev, _ = fit_and_test(features.dev_split(), config, classes, dev_cases)
    by_choice = {choice: score_of(outcomes) for choice, outcomes in zip(choices, on_dev, strict=True)}
    best = best_choice(by_choice)

    tested, fitted = fit_and_test(features, config, classes, [(best, seed) for seed in seeds])
    results = []
    for seed, outcomes in zip(seeds, tested, strict=True):
        chosen = {"solver": config.solver, "seed": seed, name: best, "dev_accuracy": by_choice[best]}
        results.append(chosen | {"outcomes": outcomes})
    return results, [FittedHead(head, HEAD_TASKS[features.kind], numbers) for head in fitted]


def with_numbered_outputs(features: LabelledFeatures) -> tuple[LabelledFeatures, list[int]]:
    """The same features with classes numbered as the outputs of a head, and the numbers in the dataset of these."""
    if features.kind == "class":
        features, numbers = features.with_numbered_classes()
        return features, numbers.tolist()
    return features, list(range(features.train_labels.shape[1])) if features.kind == "several" else []


def fit_and_test(
    features: LabelledFeatures, config: LinearConfig, classes: int, cases: Sequence[tuple[float, int]]
) -> tuple[list[Outcomes], list[StandardizedLinear]]:
    """Test outcomes of classifiers, one for each case, and the classifiers.

    All are fitted to one copy of the training features; test features are standardised block by block.

    Args:
        classes: number of classes, of one class an image numbered from 0.
        cases: penalty or learning rate, and seed.
    """
    train = copy_to_device(features.train)
    mean = train.mean(0)
    std = train.std(0, correction=0) + DEVIATION_OFFSET
    train.sub_(mean).div_(std)
    train_labels = torch.from_numpy(features.train_labels).to(device())
    learner = learner_of(features.kind, features.train_labels, classes, config.loss)
    tested, heads = [], []
    for choice, seed in cases:
        head = StandardizedLinear(fit(train, train_labels, learner, config, choice, seed), mean, std)
        predicted = []
        with torch.no_grad():
            for block in blocks_on_device(features.test, max(1, LOGITS_PER_BLOCK // learner.outputs)):
                predicted.append(learner.predict(head(block)))
        tested.append(features.outcomes(torch.cat(predicted).cpu().numpy()))
        heads.append(head)
    return tested, heads


def copy_to_device(features: NDArray) -> Tensor:
    """Features (N, D) as float32 on the device."""
    copied = torch.empty(features.shape, device=device())
    for part, block in zip(copied.split(IMAGES_PER_BLOCK), blocks_on_device(features, IMAGES_PER_BLOCK), strict=True):
        part.copy_(block)
    return copied


def blocks_on_device(features: NDArray, rows: int) -> Iterator[Tensor]:
    """Features as float32 on the device, `rows` at a time."""
    for start in range(0, len(features), rows):
        yield torch.tensor(features[start : start + rows], dtype=torch.float32, device=device())


def fit(
    features: Tensor, labels: Tensor, learner: Learner, config: LinearConfig, choice: float, seed: int
) -> nn.Linear:
    """A head that the solver of `config` fits to features (N, D) with labels (N, ...).

    Args:
        choice: the penalty of L-BFGS, or the learning rate of SGD.
    """
    is_quick = features.numel() <= QUICK_FIT_NUMBERS
    with progress_bar(desc=f"{config.solver} {choice:g}", unit="pass", disable=is_quick) as bar:
        if config.solver == "lbfgs":
            layer = fit_lbfgs(features, labels, learner, choice, config.iterations, bar.update)
        else:
            layer = fit_sgd(features, labels, learner, choice, config.epochs, config.sgd_batch_size, seed, bar.update)
    return learner.merge(layer)


def fit_lbfgs(
    features: Tensor,
    labels: Tensor,
    learner: Learner,
    l2: float,
    iterations: int,
    on_pass: Callable[[], Any] = lambda: None,
) -> nn.Linear:
    """The minimum of the learner's mean loss + l2 / 2 * |W|^2; the bias is free.

    Args:
        features: (N, D).
        labels: (N, ...).
        on_pass: called after each pass over the features.
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
        on_pass()
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
    on_pass: Callable[[], Any] = lambda: None,
) -> nn.Linear:
    """A layer by SGD with momentum 0.9 and cosine decay, without a penalty.

    Args:
        features: (N, D).
        labels: (N, ...).
        on_pass: called after each epoch.
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
        on_pass()
    return layer


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Probe with the settings of the command line, or of `arguments`."""
    return run(*parse_and_load(LinearConfig, arguments))


if __name__ == "__main__":
    run_main(main)
