"""Writing of results: JSON, a Markdown table, TensorBoard."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from evaluation.figures.charts import ScoreAxis, plot_by_depth
from evaluation.figures.markdown import markdown_table, without_empty_columns
from evaluation.figures.style import DPI, figure_style
from evaluation.frozen.by_class import describe_shown, figure_rows, shown_outcomes, write_details
from evaluation.frozen.random_weights import describe_random_weights
from evaluation.frozen.report_names import events_folder
from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.kinds import LabelKind
from evaluation.metrics.scoring import describe_labels, keep_outcomes, kind_of, kind_of_report, without_nan
from mpp.errors import UserError
from mpp.runtime.files import complete
from mpp.runtime.messages import counted
from mpp.runtime.weights import fingerprint

MAX_CLASSES_PRINTED = 30
"""Lines of a printed table by class."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON, complete or not at all; NaN is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial:
        partial.write_text(json.dumps(without_nan(value), indent=1), encoding="utf-8")


@figure_style()
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
    with SummaryWriter(str(events_folder(path)), purge_step=0) as writer:
        for depth, summaries in by_depth.items():
            for name, summary in summaries.items():
                writer.add_scalar(
                    f"{prefix}accuracy_by_depth/{group_by}_{name}", kind.factor * summary["mean"], int(depth)
                )
        if len(by_depth) > 1:
            plot_path = path.with_suffix(".png")
            figure = plot_by_depth(by_depth, group_by, score_axis(kind, "dev {}" if on_dev else "test {}"))
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
    print(markdown_table([heading, *headings[1:]], rows))
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
    print(markdown_table([describe_shown(report), "value (95% interval)"], figure_rows(report, outcomes)))
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


def score_axis(kind: LabelKind, words: str = "{}") -> ScoreAxis:
    """The axis of a plot for the score of a kind of label.

    Args:
        words: around its heading, such as the split.
    """
    unit = kind.score_title.removeprefix(kind.score_heading)
    return ScoreAxis(words.format(kind.score_heading) + unit, kind.factor)


def table_by_depth(
    by_depth: dict[int, dict[str, dict[str, float]]], names: list[str], group_by: str, kind: LabelKind
) -> str:
    """A table of summaries with a line for each depth and a column for each name."""
    rows = []
    for depth, summaries in by_depth.items():
        accuracies = [kind.text_of_scores(summaries[name]) for name in names]
        rows.append([str(depth) if depth else "-", *accuracies])
    return markdown_table(*without_empty_columns(["depth", *(f"{group_by} {name}" for name in names)], rows))
