"""The common course of all probes: features, evaluation at each depth, the choice of a depth, the report."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from accelerate import Accelerator

from evaluation.config import EncoderConfig, FeaturesConfig, FrozenProbeConfig, ProbeDataConfig
from evaluation.frozen.extraction import ExtractedFeatures, extract_labelled_features
from evaluation.frozen.labelled import refuse_other_kinds
from evaluation.frozen.labelled_features import LabelledFeatures, load_features
from evaluation.frozen.report_names import report_path_of_command
from evaluation.frozen.results import write_probe_report
from evaluation.frozen.run_images import LoadedSplits
from evaluation.metrics.scoring import KINDS, add_figures, add_scores, best_choice, error_of
from evaluation.metrics.summaries import evenly_spaced, summarize_accuracies
from mpp.config import Settings, changed_settings, nested, require
from mpp.data.labels import AUTO
from mpp.features.metrics import effective_rank
from mpp.features.probe import MAX_IMAGES_FOR_RANK
from mpp.runtime.hardware import device
from mpp.runtime.messages import progress_bar
from mpp.runtime.start import start
from mpp.runtime.weights import fingerprint

OF_AN_ENCODER = nested(FeaturesConfig()).keys() - {"out", "threads"}
"""Settings, and the group `data`, that have no effect on saved features."""
SHOW_BAR_AFTER = 5  # seconds; most probes have evaluated all depths by then

LATEST_FEATURES: ContextVar[dict[str, ExtractedFeatures] | None] = ContextVar("LATEST_FEATURES", default=None)
"""The features that were extracted last, for the other probes of a comparison: at most one entry; None: of none."""


class ProbeSettings(Protocol):
    """The groups of settings that the config of a probe has, besides settings of its own."""

    frozen: EncoderConfig
    data: ProbeDataConfig
    probe: FrozenProbeConfig


def run_probe(
    config: ProbeSettings,
    command: str,
    evaluate: Callable[[LabelledFeatures], list[dict]],
    group_by: str,
    loaded: LoadedSplits | None = None,
    kinds: Sequence[str] = ("class",),
) -> dict[str, Any]:
    """Run a probe and write its report.

    Args:
        command: name of the command, which the report gets.
        evaluate: features to results, each a dict with `outcomes` (`features.outcomes(predicted)`), `group_by` and
            other entries for the report. Of the outcomes it gets `accuracy`, its interval and the other figures; one
            without outcomes has an `accuracy` of its own.
        group_by: entry that the summary groups results by, such as `shots`.
    Returns:
        The report: results, summary, protocol.
    """
    probe = config.probe
    check_kind = partial(refuse_other_kinds, command, kinds)
    if probe.task != AUTO:
        check_kind(probe.task)
    if probe.features:
        for key, value in changed_settings(config).items():
            is_used = key.partition(".")[0] not in OF_AN_ENCODER
            require(is_used, key, value, "left out: saved features need no encoder")
    accelerator = start(config.frozen.run_settings(probe.precision))
    path = report_path_of_command(config, command)
    if probe.features:
        saved = load_features(Path(probe.features))
        saved = saved if probe.test else saved.dev_split()
        KINDS[saved.kind].note_tested(saved.train_labels, saved.test_labels, saved.class_names)
        extracted = ExtractedFeatures({0: saved}, {})
    else:
        extracted = extract_once(config, accelerator, loaded, check_kind)
    if not accelerator.is_main_process:  # it does not wait for a probe that may take hours
        return {}
    check_kind(next(iter(extracted.by_depth.values())).kind)  # of saved features, or those of another probe
    report = evaluate_by_depth(config, extracted.by_depth, evaluate, group_by)
    if any(extracted.left_out.values()):
        report["left_out"] = extracted.left_out
    report["protocol"]["rank_by_depth"] = rank_by_depth(extracted.by_depth)
    report["protocol"]["input"] = extracted.input
    report["class_names"] = list(next(iter(extracted.by_depth.values())).class_names)
    return write_probe_report(path, report, group_by)


def rank_by_depth(by_depth: dict[int, LabelledFeatures]) -> dict[int, float]:
    """The effective rank of the tested features at each depth, of some 2,048 images if there are more."""
    count = len(next(iter(by_depth.values())).test)
    ranked = evenly_spaced(count, MAX_IMAGES_FOR_RANK)  # files may be in the order of their classes
    return {depth: effective_rank(features.test[ranked], device()) for depth, features in by_depth.items()}


def extract_once(
    config: ProbeSettings,
    accelerator: Accelerator,
    loaded: LoadedSplits | None,
    check_kind: Callable[[str], object],
) -> ExtractedFeatures:
    """Extract features, or take the latest while they are shared: see `features_shared`.

    Args:
        check_kind: see `extract_labelled_features`.
    """
    latest = LATEST_FEATURES.get()
    groups = config.frozen, config.data, replace(config.probe, out=None)
    extract = partial(
        extract_labelled_features, *groups, accelerator, loaded, on_dev=not config.probe.test, check_kind=check_kind
    )
    if latest is None:
        return extract()
    key = repr((groups, fingerprint(Path(config.frozen.checkpoint or config.frozen.encoder))))
    if key not in latest:
        latest.clear()
        latest[key] = extract()
    return latest[key]


@contextmanager
def features_shared() -> Iterator[None]:
    """While open, probes of the same encoder and images use the same features in turn, as those of a comparison.

    At any other time each extracts its own: in a notebook, images and labels may be others than at its last call.
    """
    token = LATEST_FEATURES.set({})
    try:
        yield
    finally:
        LATEST_FEATURES.reset(token)


def forget_features() -> None:
    """Free the features that are shared."""
    latest = LATEST_FEATURES.get()
    if latest is not None:
        latest.clear()


def evaluate_by_depth(
    config: Settings,
    by_depth: dict[int, Any],
    evaluate: Callable[[Any], list[dict]],
    group_by: str,
) -> dict[str, Any]:
    """Evaluate features at all depths; with `depth` dev, at the depth that is best on the dev split.

    Args:
        by_depth: features of images or of patches; they have a `dev_split`. Depth 0: features from a file.
        evaluate, group_by: see `run_probe`.
    Returns:
        The results of all depths, the summary of the chosen depth (otherwise the deepest), and the protocol.
    """
    evaluated = choose_depths(config, by_depth, evaluate, group_by)
    results_by_depth = {depth: add_figures(evaluate(features)) for depth, features in each_depth(evaluated.by_depth)}
    return assemble_report(results_by_depth, evaluated.chosen, evaluated.protocol, group_by)


def each_depth(by_depth: dict[int, Any]) -> Iterable[tuple[int, Any]]:
    """The depths with their features; a bar shows how many are done if they take long, such as the fits of linear."""
    depths = by_depth.items()
    return progress_bar(depths, desc="depths", unit="depth", delay=SHOW_BAR_AFTER, disable=len(depths) == 1)


class EvaluatedDepths(NamedTuple):
    """The depths that are evaluated on test images."""

    by_depth: dict[int, Any]
    """Their features."""
    chosen: int
    """The depth that a summary is of."""
    protocol: dict[str, Any]
    """The entry `protocol` of the report: the settings and the choice."""


def choose_depths(
    config: Settings,
    by_depth: dict[int, Any],
    evaluate: Callable[[Any], list[dict]],
    group_by: str,
) -> EvaluatedDepths:
    """All depths or, with `depth` dev, the best one on the dev split; for arguments see `evaluate_by_depth`."""
    protocol = nested(config)
    features = protocol.get("features")
    if features:
        protocol = {name: value for name, value in protocol.items() if name not in OF_AN_ENCODER}
    chosen = max(by_depth)
    if protocol.get("depth") == "dev":
        dev_accuracies = {}
        errors = {}
        for depth, features in each_depth(by_depth):
            of_depth = evaluate(features.dev_split())
            summary = summarize_accuracies(add_scores(of_depth), group_by)
            errors_of_depth = [
                error_of(result["outcomes"]) if "outcomes" in result else math.nan for result in of_depth
            ]
            errors[depth] = float(np.mean(errors_of_depth))
            dev_accuracies[depth] = float(np.mean([case["mean"] for case in summary.values()]))
        chosen = best_choice(dev_accuracies, errors)
        protocol["dev_accuracy_by_depth"] = dev_accuracies
        by_depth = {chosen: by_depth[chosen]}
    if chosen:
        protocol["chosen_depth"] = chosen
    return EvaluatedDepths(by_depth, chosen, protocol)


def assemble_report(
    by_depth: dict[int, list[dict]], chosen: int, protocol: dict[str, Any], group_by: str
) -> dict[str, Any]:
    """The report of the results at each depth, with the summary of the chosen one; see `evaluate_by_depth`."""
    results = []
    summaries = {}
    for depth, of_depth in by_depth.items():
        summaries[depth] = summarize_accuracies(of_depth, group_by)
        depth_entry = {"depth": depth} if depth else {}
        results += [result | depth_entry for result in of_depth]
    report = {"results": results, "summary": summaries[chosen], "protocol": protocol}
    if len(summaries) > 1:
        report["summary_by_depth"] = summaries
    return report
