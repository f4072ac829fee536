"""Probes and results: the common course of all probes, and the names, files and tables of what evaluations found.

A report is JSON: `results`, each with `accuracy` (the score), its `interval` and other `figures`; their `summary`; and
`protocol`, the settings. Next to it are the outcomes: target and prediction of each test image.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from evaluation.config import FeaturesConfig, ProbeConfig
from evaluation.figures.charts import markdown_table, plot_by_depth, save_figure, write_details
from evaluation.frozen.features import (
    ExtractedFeatures,
    LabelledFeatures,
    extract_labelled_features,
    load_features,
    note_classes,
    require_kind,
)
from evaluation.frozen.run_images import (
    EVALUATED_SETTINGS,
    LoadedSplits,
    command_of,
    find_run,
    is_colour_baseline,
    run_source,
)
from evaluation.metrics.scoring import (
    ONE_CLASS,
    add_figures,
    best_choice,
    describe_labels,
    evenly_spaced,
    kind_of_report,
    labelled_outcomes,
    load_outcomes,
    save_outcomes,
    shown_result,
    summarize_accuracies,
    without_nan,
)
from mpp.config import Settings, changed_settings, flatten, nested, require, settings_of
from mpp.errors import UserError
from mpp.features.metrics import effective_rank
from mpp.features.probe import MAX_IMAGES_FOR_RANK
from mpp.models.descriptions import as_saved
from mpp.runtime.files import complete, short_digest
from mpp.runtime.hardware import device
from mpp.runtime.messages import counted
from mpp.runtime.start import start
from mpp.runtime.weights import BEST, encoder_folder, fingerprint, run_of

LONGEST_VALUE, LONGEST_NAME = 40, 160
"""Characters of a setting, and of all, in a report's name; more are a digest."""
OF_AN_ENCODER = nested(FeaturesConfig()).keys() - {"out", "threads"}
"""Settings, and the group `data`, that have no effect on saved features."""

Evaluate = Callable[[Any, Any], list[dict]]
"""A probe: features of images or of patches, and settings, to results."""
SHARED: ContextVar[dict[str, ExtractedFeatures]] = ContextVar("SHARED")
"""In a comparison: the features that were extracted last, for the other probes of it; at most one entry."""


# --- probes ---


def run_probe(
    config: ProbeConfig,
    command: str,
    evaluate: Evaluate,
    group_by: str,
    loaded: LoadedSplits | None = None,
    kinds: Sequence[str] = ("class",),
    save: Callable[[Any, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run a probe and write its report.

    Args:
        command: name of the command, which the report gets.
        evaluate: features and `config` to results, each a dict with `outcomes` (`features.outcomes(predicted)`),
            `group_by` and other entries for the report. Of the outcomes it gets `accuracy`, its interval and the other
            figures; one without outcomes has an `accuracy` of its own.
        group_by: entry that the summary groups results by, such as `shots`.
        kinds: of labels that it can learn.
        save: is called with the encoder's head (see `evaluate_by_depth`) and the report, as they are written.
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
        latest = SHARED.get({})
        if key not in latest:
            latest.clear()
            latest[key] = extract_labelled_features(
                *groups, accelerator, loaded, on_dev=not probe.test, kinds=kinds, baselines=probe.baselines
            )
        extracted = latest[key]
    if not accelerator.is_main_process:  # it does not wait for a probe that may take hours
        return {}
    first = next(iter(extracted.by_depth.values()))
    require_kind(first.kind, kinds)  # of saved features, or those of another probe
    report, head = evaluate_by_depth(config, extracted.by_depth, evaluate, group_by)
    baselines = {}
    for name, by_depth in extracted.baselines.items():
        baselines[name] = as_baseline(evaluate_by_depth(config, by_depth, evaluate, group_by)[0])
    if baselines:
        report["baselines"] = baselines
    if any(extracted.left_out.values()):
        report["left_out"] = extracted.left_out
    ranks = {depth: rank_of_test_features(each) for depth, each in extracted.by_depth.items()}
    report["protocol"] |= {"rank_by_depth": ranks, "input": extracted.input}
    report["class_names"] = list(first.class_names)
    report = write_probe_report(path, report, group_by)
    if save:
        save(head, report)
    return report


def commands_of_probe(
    command: str,
    config_class: type[ProbeConfig],
    evaluate: Evaluate,
    group_by: str,
    kinds: Sequence[str] = ("class",),
) -> tuple[Callable, Callable]:
    """The `run(config, loaded)` and `main(arguments)` of a probe's module, which return the report.

    Args:
        evaluate, group_by, kinds: see `run_probe`.
    """

    def run(config: ProbeConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
        return run_probe(config, command, evaluate, group_by, loaded, kinds)

    return run, command_of(run, config_class)


def rank_of_test_features(features: LabelledFeatures) -> float:
    """Their effective rank, of some 2,048 images if there are more."""
    ranked = evenly_spaced(len(features.test), MAX_IMAGES_FOR_RANK)  # files may be in the order of their classes
    return effective_rank(features.test[ranked], device())


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
    SHARED.get({}).clear()


def as_baseline(report: dict[str, Any]) -> dict[str, Any]:
    """The report of a baseline, for an encoder's own: its outcomes are not kept."""
    results = [{key: value for key, value in result.items() if key != "outcomes"} for result in report["results"]]
    return report | {"results": results}


def evaluate_by_depth(
    config: Settings, by_depth: dict[int, Any], evaluate: Evaluate, group_by: str
) -> tuple[dict[str, Any], Any]:
    """Evaluate features at all depths; with `depth` dev, at the depth that is best on the dev split.

    Args:
        by_depth: features of images or of patches; they have a `dev_split`. Depth 0: features from a file.
        evaluate, group_by: see `run_probe`.
    Returns:
        report: the results of all depths, the summary of the chosen depth (otherwise the deepest), and the protocol:
            the settings and the choice.
        head: the entry `head` of the first result at that depth, which the report is without; None: it has none.
    """
    protocol = nested(config)
    if protocol.get("features"):
        protocol = {name: value for name, value in protocol.items() if name not in OF_AN_ENCODER}
    chosen = max(by_depth)
    if protocol.get("depth") == "dev":
        on_dev = {}
        for depth, features in by_depth.items():
            summary = summarize_accuracies(add_figures(evaluate(features.dev_split(), config)), group_by)
            on_dev[depth] = float(np.mean([case["mean"] for case in summary.values()]))
        chosen = best_choice(on_dev)
        protocol["dev_accuracy_by_depth"] = on_dev
        by_depth = {chosen: by_depth[chosen]}
    if chosen:
        protocol["chosen_depth"] = chosen
    results, summaries, head = [], {}, None
    for depth, features in by_depth.items():
        of_depth = add_figures(evaluate(features, config))
        heads = [result.pop("head", None) for result in of_depth]
        head = heads[0] if depth == chosen else head
        summaries[depth] = summarize_accuracies(of_depth, group_by)
        results += [result | ({"depth": depth} if depth else {}) for result in of_depth]
    report = {"results": results, "summary": summaries[chosen], "protocol": protocol}
    return report | ({"summary_by_depth": summaries} if len(summaries) > 1 else {}), head


# --- names ---


def report_path(out: str | None, encoder: str, name: str, features: str | None = None) -> Path:
    """The file of a report: `out`, or next to what was evaluated: the features, the run folder, or runs/ENCODER.

    Raises:
        UserError: it cannot be written there, or the encoder is a file.
    """
    place = Path(encoder)
    if not features and place.is_file():
        encoder_folder(place)  # says why a file is no encoder
    require(not (out and Path(out).is_dir()), "out", out, "a file")
    if out:
        path = Path(out)
    elif features:
        path = Path(features).with_name(f"{Path(features).stem}_{name}")
    else:
        folder = place if place.exists() else Path("runs") / re.sub("[/:]", "_", encoder)
        path = run_of(folder) / "evaluation" / name
    try:
        with TemporaryFile(dir=next(parent for parent in path.absolute().parents if parent.exists())):
            return path
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another place with --out") from error


def report_path_of_command(config: Settings, command: str, ending: str = ".json") -> Path:
    """The file of a command's report, whose name says which settings are unusual: see `report_path`."""
    values = flatten(config)
    name = f"{command}{report_suffix(config, of_all=True)}{ending}"
    return report_path(values["out"], values["encoder"], name, values.get("features"))


def report_suffix(config: Any, of_all: bool = False) -> str:
    """The end of a name, `_shots_1-5`: the settings that are not the usual ones; a digest where they are many.

    Those of images are usual where they are those of the encoder's run. A report of random weights begins with these.

    Args:
        of_all: name all settings, not only those of encoder, images and features.
    """
    frozen, run = config.frozen, find_run(config.frozen.encoder)
    usual = flatten(type(config)())
    if run:
        source = run_source(run)
        usual |= {f"data.{name}": getattr(source, name) for name in EVALUATED_SETTINGS}
    operational = [each.key for each in settings_of(config) if each.about["operational"]]
    known = (usual if of_all else flatten(FeaturesConfig())).keys() - {"encoder", "features", "random", *operational}
    parts = ["best"] if Path(frozen.encoder).name == BEST else []
    if frozen.random:
        parts.insert(0, f"random_{frozen.seed}")
        known -= {"seed"}
    values = flatten(config)
    changed = {key: values[key] for key in values if key in known and as_saved(values[key]) != as_saved(usual[key])}
    words = []
    for key, value in changed.items():
        text = re.sub(r"[^\w.-]+", "-", str(value).strip("()[]'\",/ "))
        words.append(f"{key.rpartition('.')[2]}_{text if len(text) <= LONGEST_VALUE else digest(value)}")
    if sum(map(len, words)) > LONGEST_NAME:
        words = [digest(changed)]
    return "".join(f"_{part}" for part in [*parts, *words])


def digest(value: Any) -> str:
    """Six letters that tell values apart."""
    return short_digest([repr(value).encode()], 6)


# --- files ---


def write_json(path: Path, value: Any) -> None:
    """Write JSON, complete or not at all; NaN is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial:
        partial.write_text(json.dumps(without_nan(value), indent=1), encoding="utf-8")


def write_report(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write a report as JSON, and the outcomes of its results next to it; return the content of the JSON.

    It also has `labels` (see `describe_labels`), and a result the number of its outcomes in their file instead of them.
    Its protocol has the digest of the encoder's `weights`, by which a page sees that they are others by now.
    """
    protocol = report.get("protocol", {})
    if protocol.get("random") is False and "encoder" in protocol:
        with suppress(UserError):  # no encoder there
            weights = fingerprint(Path(protocol.get("checkpoint") or protocol["encoder"]))
            report = report | {"protocol": protocol | ({"weights": weights} if weights else {})}
    results, outcomes = [], []
    for result in report["results"]:
        if "outcomes" in result:
            outcomes.append(result["outcomes"])
            result = result | {"outcomes": len(outcomes) - 1}
        results.append(result)
    if outcomes:
        save_outcomes(path, outcomes)
        report = report | {"results": results, "labels": describe_labels(outcomes[0])}
    write_json(path, report)
    return report


# --- random weights, the baseline of an encoder ---


def way_to_random_weights(report: dict[str, Any]) -> str:
    """The setting that evaluates random weights; "": they were, or it is of saved features, floors or themselves."""
    protocol = report.get("protocol", {})
    if "random weights" in report.get("baselines", {}) or is_colour_baseline(str(protocol.get("encoder"))):
        return ""
    if protocol.get("init") == "encoder":
        return "--init random, in another run.dir"
    return "--random true" if protocol.get("random") is False else ""


# --- tables ---


def write_probe_report(path: Path, report: dict[str, Any], group_by: str) -> dict[str, Any]:
    """Write a probe's JSON, outcomes and, of several depths, the plot; print the tables.

    Returns:
        The report as it was written: see `write_report`.
    """
    report = write_report(path, report)
    kind = kind_of_report(report)
    protocol = report["protocol"]
    evaluated = protocol.get("features") or f"{protocol['encoder']}{', random weights' * protocol['random']}"
    rows = []
    for name, each in ((evaluated, report), *report.get("baselines", {}).items()):
        by_depth = each.get("summary_by_depth") or {each["protocol"].get("chosen_depth", 0): each["summary"]}
        for depth, scores in by_depth.items():
            rows.append([name, str(depth or "-"), *map(kind.text_of_scores, scores.values())])
    for name, score in scores_without_image(report).items():
        rows.append([name, "-", *[kind.text(kind.score, score)] * len(report["summary"])])
    print(markdown_table([kind.score_title, "depth", *(f"{group_by} {case}" for case in report["summary"])], rows))
    on_dev = not protocol.get("test", True)
    if on_dev:
        print("on a tenth of the training images; the held-out images were not used")
    if by_depth := report.get("summary_by_depth"):
        figure = plot_by_depth(by_depth, group_by, f"{'dev' if on_dev else 'test'} {kind.score_title}")
        save_figure(figure, path.with_suffix(".png"))
        print(f"wrote {path.with_suffix('.png')}")
    print_images(report)
    write_classes(path, report)
    print(f"wrote {path}")
    return report


def scores_without_image(report: dict[str, Any]) -> dict[str, float]:
    """The scores of predictions that look at no image, by name; of one class also those at random."""
    labels = report.get("labels", {})
    classes = len(labels.get("class_names", ())) if kind_of_report(report) is ONE_CLASS else 0
    chance = {f"chance (1 of {classes} classes)": 1 / classes} if classes else {}
    return labels.get("baselines", {}) | chance


def print_details(path: Path, report: dict[str, Any]) -> None:
    """Print the baselines and the figures of one result; write the figures by class and the confusion."""
    if "labels" not in report:
        return
    print_images(report, describe_baselines(report))
    result = shown_result(report)
    if result:
        headings = [path.stem, "value (95% interval)"]
        print(markdown_table(headings, kind_of_report(report).rows(result)))
    write_classes(path, report)


def print_images(report: dict[str, Any], baselines: str = "") -> None:
    """Print the baselines that no table has, and what the intervals are of."""
    if "labels" in report:
        on_dev = not report.get("protocol", {}).get("test", True)
        images = f"{counted(report['labels']['images'], 'dev image' if on_dev else 'image')}, 95% intervals over these"
        way = way_to_random_weights(report)
        print("; ".join(filter(None, [baselines, way and f"random weights: not evaluated ({way})", images])))


def write_classes(path: Path, report: dict[str, Any]) -> None:
    """Write the figures by class and the confusion matrix of one result, next to its report; print their names."""
    result = shown_result(report)
    outcomes = load_outcomes(path, result["outcomes"]) if result else None
    if outcomes is not None:
        write_details(path, labelled_outcomes(outcomes))


def describe_baselines(report: dict[str, Any]) -> str:
    """The scores of predictions that look at no image, by the entry `labels` of a report; "" where it has none."""
    baselines: dict[str, float] = report.get("labels", {}).get("baselines", {})
    return ", ".join(kind_of_report(report).describe_baseline(*each) for each in baselines.items())
