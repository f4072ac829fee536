"""What all probes share: settings, the choice of a depth, the report."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from evaluation.config import OF_AN_ENCODER, FeaturesConfig, FrozenProbeConfig, SegmentationConfig
from evaluation.frozen.extraction import Extracted, Features, extract_labelled, load_features
from evaluation.frozen.results import report_path, report_suffix, summarize, write_probe_report
from mpp.config import RunConfig
from mpp.data.overview import note_tested
from mpp.features.probe import MOST_RANKED
from mpp.features.ranks import effective_ranks
from mpp.runtime.hardware import device
from mpp.runtime.start import start
from mpp.runtime.weights import fingerprint

LATEST: dict[str, Extracted] = {}


def probe(
    config: FrozenProbeConfig, command: str, evaluate: Callable[[Features], list[dict]], key: str
) -> dict[str, Any]:
    """Run a probe and report it: the body of every probe's command.

    Args:
        command: its name, which the report gets.
        evaluate: features to results, each a dict with `accuracy`, `key` and what else there is to say.
        key: what the summary groups results by, such as `shots`.
    Returns:
        What was written: results, summary, protocol.
    """
    accelerator = start(RunConfig(precision=config.precision, trackers=(), threads=config.threads))
    name = command if config.features else command + report_suffix(config)
    path = report_path(config.out, config.encoder, f"{name}.json", config.features)
    if config.features:
        saved = load_features(Path(config.features))
        note_tested(saved.train_labels, saved.test_labels)
        extracted = Extracted({0: saved}, {})
    else:
        extracted = extract_once(config, accelerator)
    by_depth, report = extracted.by_depth, {}
    if accelerator.is_main_process:
        report = judge(config, by_depth, evaluate, key) | extracted.about()
        report["protocol"]["rank_by_depth"] = ranks_of(by_depth)
        write_probe_report(path, report, key)
    return report  # the others are done: they do not wait for a probe that may take hours


def ranks_of(by_depth: dict[int, Features]) -> dict[int, float]:
    """The effective rank of test features by depth, of at most as many images as `features/rank` while training."""
    count = len(next(iter(by_depth.values())).test)
    ranked = min(count, MOST_RANKED)
    spaced = np.linspace(0, count - 1, ranked).astype(int)  # files may be in the order of their classes
    return dict(zip(by_depth, effective_ranks([of.test[spaced] for of in by_depth.values()], device()), strict=True))


def extract_once(config: FrozenProbeConfig, accelerator: Accelerator) -> Extracted:
    """Features; the latest are kept, for the probes of a comparison that look at the same ones in turn."""
    of_features = {field.name: getattr(config, field.name) for field in dataclasses.fields(FeaturesConfig)}
    key = repr(of_features | {"out": None, "weights": fingerprint(Path(config.checkpoint or config.encoder))})
    if key not in LATEST:
        LATEST.clear()
        LATEST[key] = extract_labelled(config, accelerator)
    return LATEST[key]


def forget_features() -> None:
    """Free what `extract_once` keeps."""
    LATEST.clear()


def judge(
    config: FrozenProbeConfig | SegmentationConfig,
    by_depth: dict[int, Any],
    evaluate: Callable[[Any], list[dict]],
    key: str,
) -> dict[str, Any]:
    """Results of all depths, and the summary of the one that counts: the last, or the best on the dev split.

    Args:
        by_depth: features, of images or of patches, that have a dev split.
    """
    protocol: dict[str, Any] = dataclasses.asdict(config)
    saved = getattr(config, "features", None)
    if saved:
        protocol = {key: value for key, value in protocol.items() if key not in OF_AN_ENCODER}
    chosen = max(by_depth)
    if config.depth == "dev" and not saved:
        on_dev = {depth: summarize(evaluate(features.dev()), key) for depth, features in by_depth.items()}
        means = {depth: float(np.mean([row["mean"] for row in rows.values()])) for depth, rows in on_dev.items()}
        chosen = max(means, key=means.get)
        protocol |= {"dev_accuracy_by_depth": means}
        by_depth = {chosen: by_depth[chosen]}
    results = {depth: evaluate(features) for depth, features in by_depth.items()}
    report = {
        "results": [result | ({"depth": depth} if depth else {}) for depth, rows in results.items() for result in rows],
        "summary": summarize(results[chosen], key),
        "protocol": protocol | ({"chosen_depth": chosen} if chosen else {}),
    }
    if len(results) > 1:
        report["summary_by_depth"] = {depth: summarize(rows, key) for depth, rows in results.items()}
    return report
