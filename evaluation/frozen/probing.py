"""The common course of all probes: features, evaluation at each depth, the choice of a depth, the report."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.config import FeaturesConfig, ProbeConfig
from evaluation.frozen.features import (
    ExtractedFeatures,
    LabelledFeatures,
    extract_labelled_features,
    load_features,
    note_classes,
    require_kind,
)
from evaluation.frozen.results import report_path_of_command, write_probe_report
from evaluation.frozen.run_images import LoadedSplits
from evaluation.metrics.scoring import add_figures, add_scores, best_choice, evenly_spaced, summarize_accuracies
from mpp.config import Settings, changed_settings, nested, require
from mpp.features.metrics import effective_rank
from mpp.features.probe import MAX_IMAGES_FOR_RANK
from mpp.runtime.hardware import device
from mpp.runtime.messages import progress_bar
from mpp.runtime.start import start
from mpp.runtime.weights import fingerprint

OF_AN_ENCODER = nested(FeaturesConfig()).keys() - {"out", "threads"}
"""Settings, and the group `data`, that have no effect on saved features."""
SHOW_BAR_AFTER = 5  # seconds; most probes have evaluated all depths by then

SHARED: ContextVar[dict[str, ExtractedFeatures] | None] = ContextVar("SHARED", default=None)
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
    require_kind(probe.task, kinds)
    accelerator = start(config.frozen.run_settings(probe.precision))
    path = report_path_of_command(config, command)
    if probe.features:
        extracted = read_features(config)
    else:
        groups = config.frozen, config.data, replace(probe, out=None)
        key = repr((groups, fingerprint(Path(config.frozen.checkpoint or config.frozen.encoder))))
        shared = SHARED.get()
        latest = {} if shared is None else shared
        if key not in latest:
            latest.clear()
            latest[key] = extract_labelled_features(*groups, accelerator, loaded, not probe.test, kinds)
        extracted = latest[key]
    if not accelerator.is_main_process:  # it does not wait for a probe that may take hours
        return {}
    first = next(iter(extracted.by_depth.values()))
    require_kind(first.kind, kinds)  # of saved features, or those of another probe
    report = evaluate_by_depth(config, extracted.by_depth, evaluate, group_by)
    if any(extracted.left_out.values()):
        report["left_out"] = extracted.left_out
    report["protocol"] |= {"rank_by_depth": rank_by_depth(extracted.by_depth), "input": extracted.input}
    report["class_names"] = list(first.class_names)
    return write_probe_report(path, report, group_by)


def rank_by_depth(by_depth: dict[int, LabelledFeatures]) -> dict[int, float]:
    """The effective rank of the tested features at each depth, of some 2,048 images if there are more."""
    ranks = {}
    for depth, features in by_depth.items():
        ranked = evenly_spaced(len(features.test), MAX_IMAGES_FOR_RANK)  # files may be in the order of their classes
        ranks[depth] = effective_rank(features.test[ranked], device())
    return ranks


def read_features(config: ProbeConfig) -> ExtractedFeatures:
    """Saved features, which need no settings of an encoder."""
    for key, value in changed_settings(config).items():
        is_used = key.partition(".")[0] not in OF_AN_ENCODER
        require(is_used, key, value, "left out: saved features need no encoder")
    saved = load_features(Path(config.probe.features))
    saved = saved if config.probe.test else saved.dev_split()
    note_classes(saved.kind, saved.train_labels, saved.test_labels, saved.class_names)
    return ExtractedFeatures({0: saved}, {})


@contextmanager
def features_shared() -> Iterator[None]:
    """While open, probes of the same encoder and images use the same features in turn, as those of a comparison.

    At any other time each extracts its own: in a notebook, images and labels may be others than at its last call.
    """
    token = SHARED.set({})
    try:
        yield
    finally:
        SHARED.reset(token)


def forget_features() -> None:
    """Free the features that are shared."""
    (SHARED.get() or {}).clear()


def evaluate_by_depth(
    config: Settings, by_depth: dict[int, Any], evaluate: Callable[[Any], list[dict]], group_by: str
) -> dict[str, Any]:
    """Evaluate features at all depths; with `depth` dev, at the depth that is best on the dev split.

    Args:
        by_depth: features of images or of patches; they have a `dev_split`. Depth 0: features from a file.
        evaluate, group_by: see `run_probe`.
    Returns:
        The results of all depths, the summary of the chosen depth (otherwise the deepest), and the protocol: the
        settings and the choice.
    """
    is_one = len(by_depth) == 1
    with_bar = partial(progress_bar, desc="depths", unit="depth", delay=SHOW_BAR_AFTER, disable=is_one)
    protocol = nested(config)
    if protocol.get("features"):
        protocol = {name: value for name, value in protocol.items() if name not in OF_AN_ENCODER}
    chosen = max(by_depth)
    if protocol.get("depth") == "dev":
        on_dev = {}
        for depth, features in with_bar(by_depth.items()):
            summary = summarize_accuracies(add_scores(evaluate(features.dev_split())), group_by)
            on_dev[depth] = float(np.mean([case["mean"] for case in summary.values()]))
        chosen = best_choice(on_dev)
        protocol["dev_accuracy_by_depth"] = on_dev
        by_depth = {chosen: by_depth[chosen]}
    if chosen:
        protocol["chosen_depth"] = chosen
    results, summaries = [], {}
    for depth, features in with_bar(by_depth.items()):
        of_depth = add_figures(evaluate(features))
        summaries[depth] = summarize_accuracies(of_depth, group_by)
        results += [result | ({"depth": depth} if depth else {}) for result in of_depth]
    report = {"results": results, "summary": summaries[chosen], "protocol": protocol}
    return report | ({"summary_by_depth": summaries} if len(summaries) > 1 else {})
