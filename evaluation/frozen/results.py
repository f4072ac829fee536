"""Writing of results: JSON, a Markdown table, TensorBoard."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from evaluation.config import EncoderConfig
from evaluation.figures.charts import Scale, plot_by_depth
from evaluation.figures.style import DPI
from evaluation.frozen.by_class import describe_shown, figure_rows, shown_outcomes, write_details
from evaluation.frozen.random_weights import describe_random_weights
from evaluation.frozen.run_images import IMAGE_SETTINGS, evaluated_image_settings, find_run, holds_run_images
from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.kinds import LabelKind
from evaluation.metrics.scoring import (
    describe_labels,
    keep_outcomes,
    kind_of,
    kind_of_report,
    mean_interval,
    without_nan,
)
from mpp.config import SourceConfig, sides
from mpp.config.fields import default_of
from mpp.config.keys import iterate_settings, plain
from mpp.data.identity import short_digest
from mpp.errors import UserError
from mpp.runtime.files import complete
from mpp.runtime.messages import counted
from mpp.runtime.weights import BEST, encoder_folder, fingerprint, run_of
from mpp.training.log import event_writer

NAMED_SETTINGS = ("encoder", "checkpoint", "random", "img_size", "representation", "depth", "features")
"""Settings that `report_suffix` names, or the place of a report."""
MAX_CLASSES_PRINTED = 30
"""Lines of a printed table by class."""
MAX_SETTINGS_LENGTH = 80
"""Characters of settings in a report's name; more are a digest."""


def report_path(out: str | None, encoder: str, name: str, features: str | None = None) -> Path:
    """The file of a report: `out`, or next to what was evaluated: the features, the run folder, or runs/ENCODER.

    Raises:
        UserError: it cannot be written there, or the encoder is a file.
    """
    if not features and Path(encoder).is_file():
        encoder_folder(Path(encoder))  # says why a file is no encoder
    if out and Path(out).is_dir():
        raise UserError(f"out is {out}, a folder; it must be a file")
    if out:
        path = Path(out)
    elif features:
        path = Path(features).with_name(f"{Path(features).stem}_{name}")
    else:
        folder = Path(encoder)
        if not folder.exists():
            folder = Path("runs") / re.sub("[/:]", "_", encoder)
        path = run_of(folder) / "evaluation" / name
    try:
        with TemporaryFile(dir=next(parent for parent in path.absolute().parents if parent.exists())):
            return path
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another place with --out") from error


def report_of(config: EncoderConfig, command: str, ending: str = ".json") -> Path:
    """The file of a command's report, whose name says which settings are unusual: see `report_path`."""
    of_encoder = "" if config.features else report_suffix(config)
    name = f"{command}{of_encoder}{settings_suffix(config)}{ending}"
    return report_path(config.out, config.encoder, name, config.features)


def report_suffix(config: EncoderConfig) -> str:
    """The end of a name: encoder, images and features where they are not the usual ones.

    Other encoders, images and features have files of their own. For a report, see `settings_suffix` too.
    """
    parts = []
    if config.random:
        parts.append(f"random_{config.seed}")
    if Path(config.encoder).name == BEST:
        parts.append("best")
    if config.checkpoint:
        place = str(Path(config.checkpoint).resolve())
        parts += [Path(config.checkpoint).stem, short_digest([place.encode()])[:6]]  # many are called model
    if config.img_size:
        different_sides = dict.fromkeys(sides(config.img_size))
        parts.append(f"{'x'.join(map(str, different_sides))}px")

    path = config.data.path
    run = find_run(config.encoder)
    has_usual_images = holds_run_images(path, run) if run else path is None
    if not has_usual_images:
        name = re.sub(r"[^\w.-]+", "_", Path(path).name) if path else "birds"
        settings = [str(getattr(config.data, key)) for key in IMAGE_SETTINGS]
        digest = short_digest(["\n".join(settings).encode()])[:6]  # names recur
        parts += [name, digest]
    else:
        parts += parts_of_name(unusual_choices(config.data, run))

    if config.representation != "mean":
        parts.append(config.representation)
    if config.depth != "last":
        parts.append(f"depth_{config.depth}")
    return "".join(f"_{part}" for part in parts)


def unusual_choices(data: SourceConfig, run: Path | None) -> dict[str, Any]:
    """Settings that choose among the usual images, or read them, otherwise than usual: those of the run, or defaults.

    Args:
        run: the encoder's run; None: it has none.
    """
    usual = evaluated_image_settings(run) if run else {}
    unusual = {}
    for key in IMAGE_SETTINGS:
        value = getattr(data, key)
        moves_along = key == "path" or (key == "labels" and data.path != usual.get("path"))
        if not moves_along and plain(value) != plain(usual.get(key, getattr(type(data), key))):
            unusual[key] = value
    return unusual


def settings_suffix(config: Any) -> str:
    """The end of a report's name that names all other settings that are not the defaults, such as shots.

    The file of saved features begins the name.
    """
    named = {*NAMED_SETTINGS, *(f"data.{name}" for name in IMAGE_SETTINGS)}
    if config.random:
        named.add("seed")
    others = {}
    for key, field, value in iterate_settings(config):
        is_default = value == default_of(field)
        if not (is_default or field.metadata.get("operational") or key in named):
            others[key.rpartition(".")[2]] = value
    return "".join(f"_{part}" for part in parts_of_name(others))


def parts_of_name(settings: dict[str, Any]) -> list[str]:
    """Settings as parts of a file's name, `shots_1-5`; a digest where they are many."""
    parts = []
    for key, value in settings.items():
        text = re.sub(r"[^\w.]+", "-", str(plain(value))).strip("-")
        parts.append(f"{key}_{text}")
    if sum(map(len, parts)) > MAX_SETTINGS_LENGTH:
        return [short_digest([repr(settings).encode()])[:6]]
    return parts


def summarize_accuracies(results: list[dict], group_by: str) -> dict[str, dict[str, float]]:
    """Summaries of the accuracies that share a value of `group_by`, or of `case`: see `summarize_values`.

    With `interval`, over test images, where the results have one.
    """
    groups: dict[str, list[dict]] = {}
    for result in results:
        name = str(result.get("case", result[group_by]))
        groups.setdefault(name, []).append(result)
    summaries: dict[str, dict[str, Any]] = {}
    for name, of_case in groups.items():
        summaries[name] = summarize_values([result["accuracy"] for result in of_case])
        interval = mean_interval(of_case)
        if interval is not None:
            summaries[name]["interval"] = interval
    return summaries


def summarize_values(values: Sequence[float]) -> dict[str, float]:
    """Mean, (population) standard deviation and number of some values; null of a file is NaN."""
    numbers = np.array(values, float)
    return {"mean": float(numbers.mean()), "std": float(numbers.std()), "count": len(values)}


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column aligned to the left and the others to the right."""
    headings, *rows = [[" ".join(cell.splitlines()).replace("|", r"\|") for cell in row] for row in (headings, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    rule = ["-" * widths[0]]
    rule += ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = []
    for line in (headings, rule, *rows):
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, complete or not at all; NaN is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial:
        partial.write_text(json.dumps(without_nan(value), indent=1), encoding="utf-8")


def events_folder(path: Path) -> Path:
    """The folder of a report's TensorBoard events."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}_events")


def write_probe_report(path: Path, report: dict[str, Any], group_by: str) -> dict[str, Any]:
    """Write a probe's JSON, outcomes, TensorBoard scalars and, of several depths, the plot; print the tables.

    Returns:
        The report as it was written: see `write_report`.
    """
    report = write_report(path, report)
    by_depth = report.get("summary_by_depth")
    if not by_depth:
        by_depth = {report["protocol"].get("chosen_depth", 0): report["summary"]}
    kind = kind_of_report(report)
    print(table_by_depth(by_depth, list(report["summary"]), group_by, kind))
    on_dev = not report["protocol"].get("test", True)
    if on_dev:
        print("on a tenth of the training images; the held-out images were not used")
    prefix = "dev_" if on_dev else ""
    with event_writer(events_folder(path), purge_step=0) as writer:
        for depth, summaries in by_depth.items():
            for name, summary in summaries.items():
                writer.add_scalar(
                    f"{prefix}accuracy_by_depth/{group_by}_{name}", kind.factor * summary["mean"], int(depth)
                )
        if len(by_depth) > 1:
            plot_path = path.with_suffix(".png")
            figure = plot_by_depth(by_depth, group_by, scale_of(kind, "dev" if on_dev else "test"))
            figure.savefig(plot_path, dpi=DPI)
            writer.add_figure(f"{prefix}accuracy_by_depth", figure)
            print(f"wrote {plot_path}")
    print_details(path, report)
    print(f"wrote {path}")
    return report


def write_report(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write a report as JSON, and the outcomes of its results next to it; return the content of the JSON.

    It also has `labels` (see `describe_labels`), and each result has the number of its outcomes instead of them. Its
    protocol has the digest of the encoder's `weights`, by which a page sees that they are others by now.
    """
    weights = weights_of(report.get("protocol", {}))
    if weights:
        report = report | {"protocol": report["protocol"] | {"weights": weights}}
    outcomes = [result["outcomes"] for result in report["results"] if "outcomes" in result]
    if outcomes:
        report = report | {"results": keep_outcomes(path, report["results"]), "labels": describe_labels(outcomes[0])}
    write_json(path, report)
    return report


def weights_of(protocol: dict[str, Any]) -> str:
    """The digest of the learned weights that a report is of; "" where it is of none in a file."""
    if protocol.get("random") is not False or "encoder" not in protocol:
        return ""
    with suppress(UserError):  # no encoder there
        return fingerprint(Path(protocol.get("checkpoint") or protocol["encoder"]))
    return ""


def print_by_class(by_class: ClassTable, heading: str = "class", rest: str = "") -> None:
    """Print a table by class; of many classes those that are recognised worst, and `rest` about the others.

    Args:
        heading: of the names.
    """
    headings, rows = by_class.worst(MAX_CLASSES_PRINTED).text()
    print(table([heading, *headings[1:]], rows))
    if len(rows) < len(by_class.names):
        print(f"these {len(rows)} of {len(by_class.names)} classes have the lowest scores{rest}")


def print_details(path: Path, report: dict[str, Any]) -> None:
    """Print the baselines, and the figures and the table by class of one result; write the latter and the confusion."""
    labels = report.get("labels")
    if labels is None:
        return
    random = describe_random_weights(path, report)
    split = "test" if report.get("protocol", {}).get("test", True) else "dev"
    images = counted(labels["images"], f"{split} image")
    facts = [describe_baselines(report), random, f"{images}, 95% intervals over these"]
    print("; ".join(filter(None, facts)))
    outcomes = shown_outcomes(path, report)
    if outcomes is None:
        return
    seeds = {result["seed"] for result in report["results"] if "seed" in result}
    if len(seeds) > 1:
        print(f"above: means over {len(seeds)} seeds ± standard deviation; below: {describe_shown(report)}")
    print(table([describe_shown(report), "value (95% interval)"], figure_rows(report, outcomes)))
    by_class = kind_of(outcomes).class_table(outcomes)
    if by_class is not None:
        print_by_class(by_class, rest="; the file by class has all")
    for file in write_details(path, outcomes, by_class):
        print(f"wrote {file}")


def describe_baselines(report: dict[str, Any]) -> str:
    """The scores of predictions that look at no image, by the entry `labels` of a report; "" where it has none."""
    kind = kind_of_report(report)
    baselines = report.get("labels", {}).get("baselines", {})
    return ", ".join(kind.describe_baseline(name, value) for name, value in baselines.items())


def without_empty_columns(headings: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns that have no value ("-" in all rows); with all columns where none has one."""
    places = range(len(headings))
    kept = [place for place in places if any(row[place] != "-" for row in rows)] or places
    return [headings[place] for place in kept], [[row[place] for place in kept] for row in rows]


def scale_of(kind: LabelKind, split: str) -> Scale:
    """The axis of a plot for the score of a kind of label on a split."""
    return Scale(f"{split} {kind.score_title}", kind.factor)


def table_by_depth(
    by_depth: dict[int, dict[str, dict[str, float]]], names: list[str], group_by: str, kind: LabelKind
) -> str:
    """A table of summaries with a line for each depth and a column for each name."""
    rows = []
    for depth, summaries in by_depth.items():
        accuracies = [kind.text_of_scores(summaries[name]) for name in names]
        rows.append([str(depth) if depth else "-", *accuracies])
    return table(*without_empty_columns(["depth", *(f"{group_by} {name}" for name in names)], rows))
