"""The common course of all probes: features, evaluation at each depth, the choice of a depth, the report."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.config import FeaturesConfig, ProbeConfig
from evaluation.frozen.features import (
    ExtractedFeatures,
    LabelledFeatures,
    extract_labelled_features,
    load_features,
    note_classes,
    refuse_other_kinds,
)
from evaluation.frozen.results import report_path_of_command, write_probe_report
from evaluation.frozen.run_images import LoadedSplits
from evaluation.metrics.scoring import add_figures, best_choice, evenly_spaced, summarize_accuracies
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


def run_probe(
    config: ProbeConfig,
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
        kinds: of labels that it can learn.
    Returns:
        The report: results, summary, protocol.
    """
    probe = config.probe
    check_kind = partial(refuse_other_kinds, command, kinds)
    if probe.task != AUTO:
        check_kind(probe.task)
    accelerator = start(config.frozen.run_settings(probe.precision))
    path = report_path_of_command(config, command)
    if probe.features:
        extracted = read_features(config)
    else:
        groups = config.frozen, config.data, replace(probe, out=None)
        key = repr((groups, fingerprint(Path(config.frozen.checkpoint or config.frozen.encoder))))
        on_dev = not probe.test
        extracted = share(key, lambda: extract_labelled_features(*groups, accelerator, loaded, on_dev, check_kind))
    if not accelerator.is_main_process:  # it does not wait for a probe that may take hours
        return {}
    first = next(iter(extracted.by_depth.values()))
    check_kind(first.kind)  # of saved features, or those of another probe
    report = evaluate_by_depth(config, extracted.by_depth, evaluate, group_by)
    if any(extracted.left_out.values()):
        report["left_out"] = extracted.left_out
    report["protocol"] |= {"rank_by_depth": rank_by_depth(extracted.by_depth), "input": extracted.input}
    report["class_names"] = list(first.class_names)
    return write_probe_report(path, report, group_by)


def rank_by_depth(by_depth: dict[int, LabelledFeatures]) -> dict[int, float]:
    """The effective rank of the tested features at each depth, of some 2,048 images if there are more."""
    count = len(next(iter(by_depth.values())).test)
    ranked = evenly_spaced(count, MAX_IMAGES_FOR_RANK)  # files may be in the order of their classes
    return {depth: effective_rank(features.test[ranked], device()) for depth, features in by_depth.items()}


def read_features(config: ProbeConfig) -> ExtractedFeatures:
    """Saved features, which need no settings of an encoder."""
    for key, value in changed_settings(config).items():
        is_used = key.partition(".")[0] not in OF_AN_ENCODER
        require(is_used, key, value, "left out: saved features need no encoder")
    saved = load_features(Path(config.probe.features))
    saved = saved if config.probe.test else saved.dev_split()
    note_classes(saved.kind, saved.train_labels, saved.test_labels, saved.class_names)
    return ExtractedFeatures({0: saved}, {})


# --- features that probes share ---


def share(key: str, extract: Callable[[], ExtractedFeatures]) -> ExtractedFeatures:
    """Extract features, or take the latest while they are shared: see `features_shared`."""
    latest = LATEST_FEATURES.get()
    if latest is None:
        return extract()
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
    (LATEST_FEATURES.get() or {}).clear()


# --- depths ---


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
    if protocol.get("features"):
        protocol = {name: value for name, value in protocol.items() if name not in OF_AN_ENCODER}
    chosen = max(by_depth)
    if protocol.get("depth") == "dev":
        dev_accuracies = {}
        for depth, features in each_depth(by_depth):
            summary = summarize_accuracies(add_figures(evaluate(features.dev_split())), group_by)
            dev_accuracies[depth] = float(np.mean([case["mean"] for case in summary.values()]))
        chosen = best_choice(dev_accuracies)
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
