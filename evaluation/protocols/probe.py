"""A linear probe by a published protocol: random crops, heads, the choice on dev images, one test, the report."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from evaluation.config import LinearConfig
from evaluation.frozen.encoder import FrozenEncoder, open_frozen_encoder, resolve_depths
from evaluation.frozen.features import cut_dev_split, describe_input, load_labelled, warn_left_out
from evaluation.frozen.probing import assemble_report
from evaluation.frozen.results import report_path_of_command, write_probe_report
from evaluation.frozen.run_images import LoadedSplits
from evaluation.metrics.scoring import Outcomes, add_figures, score_of
from evaluation.protocols.dinov2 import Dinov2
from evaluation.protocols.mae import Mae
from evaluation.protocols.protocol import Candidate, LinearProtocol, Plan, describe_plan
from evaluation.protocols.training import Classes, HeadTrainer
from mpp.config import nested
from mpp.data.dataset import ImageDataset, names_by_number
from mpp.data.workers import deaths_explained
from mpp.errors import Unavailable, UserError
from mpp.runtime.start import start_alone


class ProbedProtocol(NamedTuple):
    """A protocol that was carried out."""

    report: dict[str, Any]
    """Results, summary, protocol."""
    head: nn.Module
    """The head that the summary is of, in eval mode."""
    class_numbers: NDArray[np.int64]
    """Numbers in the dataset of its outputs, (C,)."""


def run_protocol(config: LinearConfig, loaded: LoadedSplits | None = None) -> ProbedProtocol:
    """Probe an encoder by `config.protocol`, and write the report.

    Raises:
        UserError: the images have no labels, are too few, or there is no such encoder or depth.
        Unavailable: the encoder lacks the features that the protocol reads.
    """
    frozen, data, probe = config.frozen, config.data, config.probe
    accelerator = start_alone(frozen.run_settings(probe.precision), f"protocol {config.protocol} is carried out")
    path = report_path_of_command(config, "linear")
    encoder = open_frozen_encoder(frozen, data)
    protocol = open_protocol(config, encoder)
    train, test, _ = load_labelled(data, accelerator, frozen.weights, loaded=loaded, on_dev=not probe.test)
    trainer = HeadTrainer(protocol, encoder, config, accelerator, classes_of(train, test))
    plan = protocol.plan(len(train))
    print(describe_plan(protocol, plan))
    settings = nested(config) | {"plan": plan._asdict() | {"epochs": plan.epochs}}
    candidates = protocol.candidates
    with deaths_explained():
        dev_accuracies = None
        if protocol.chooses and len(candidates) > 1:
            dev_accuracies = accuracies_on_dev(trainer, train, plan)
            candidates = [candidates[int(np.argmax(dev_accuracies))]]
            chosen = ", ".join(f"{name} {value}" for name, value in candidates[0].about.items())
            print(f"chosen on dev images: {chosen}")
        heads = trainer.train(train, candidates, plan)
        outcomes, unreadable = trainer.predict(test, heads, candidates)
    warn_left_out(unreadable)
    report = report_on(protocol, config, candidates, outcomes, dev_accuracies)
    report["protocol"] |= settings | {"input": describe_input(encoder, data, accelerator)}
    report["class_names"] = train.class_names
    if unreadable:
        report["left_out"] = {"train": 0, "test" if probe.test else "dev": len(unreadable)}
    report = write_probe_report(path, report, "protocol")
    return ProbedProtocol(report, heads[-1], trainer.classes.numbers)


def open_protocol(config: LinearConfig, encoder: FrozenEncoder) -> LinearProtocol:
    """The protocol that `config` names, for an encoder."""
    if config.protocol == "dinov2":
        try:
            return Dinov2(encoder)
        except Unavailable as error:
            raise Unavailable(f"encoder is {config.frozen.encoder}; protocol dinov2 needs a ViT: {error}") from None
    depths = resolve_depths(config.probe.depth, len(encoder.stages))
    return Mae(config.probe.representation, depths, chooses=config.probe.depth == "dev")


def classes_of(train: ImageDataset, test: ImageDataset) -> Classes:
    """All classes of the labels.

    Raises:
        UserError: there is one class to learn.
    """
    learned = np.unique(train.labels)
    if len(learned) < 2:
        raise UserError("all training images are of one class")
    numbers = np.union1d(learned, test.labels[test.labels >= 0])
    return Classes(numbers, names_by_number(train.class_names, numbers.tolist()))


def accuracies_on_dev(trainer: HeadTrainer, train: ImageDataset, plan: Plan) -> list[float]:
    """Accuracies of all candidates on a tenth of the training images, trained on the rest of them."""
    learned_indices, dev_indices = cut_dev_split(len(train))
    candidates = trainer.protocol.candidates
    heads = trainer.train(train.select(learned_indices), candidates, plan)
    outcomes, _ = trainer.predict(train.select(dev_indices), heads, candidates)
    return [score_of(each) for each in outcomes]


def report_on(
    protocol: LinearProtocol,
    config: LinearConfig,
    tested: Sequence[Candidate],
    outcomes: Sequence[Outcomes],
    dev_accuracies: Sequence[float] | None,
) -> dict[str, Any]:
    """The report of the heads that were tested: results, summary, and `protocol` with the choice.

    Args:
        outcomes: of the tested heads.
        dev_accuracies: of all candidates of the protocol; None: nothing was chosen.
    """
    by_depth = {}
    for candidate, of_head in zip(tested, outcomes, strict=True):
        result = {"protocol": protocol.name, "seed": config.frozen.seed, **candidate.about, "outcomes": of_head}
        if dev_accuracies is not None:
            result["dev_accuracy"] = max(dev_accuracies)
        by_depth[candidate.about.get("depth", 0)] = add_figures([result])
    deepest = max(by_depth)
    chosen: dict[str, Any] = {"chosen_depth": deepest} if deepest else {}
    if dev_accuracies is not None and deepest:
        depths = [each.about["depth"] for each in protocol.candidates]
        chosen["dev_accuracy_by_depth"] = dict(zip(depths, dev_accuracies, strict=True))
    elif dev_accuracies is not None:
        pairs = zip(protocol.candidates, dev_accuracies, strict=True)
        chosen["dev"] = [each.about | {"accuracy": value} for each, value in pairs]
    return assemble_report(by_depth, deepest, chosen, "protocol")
