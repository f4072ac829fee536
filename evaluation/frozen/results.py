"""Results: the one module that names, writes, reads, checks and prints what evaluations found.

A report is JSON: `results`, each with `accuracy` (the score), its `interval` and other `figures`; their `summary`; and
`protocol`, the settings. Next to it are the outcomes: target and prediction of each test image.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from evaluation.config import FeaturesConfig
from evaluation.figures.charts import ScoreAxis, plot_by_depth
from evaluation.figures.markdown import markdown_table, without_empty_columns
from evaluation.figures.style import DPI, figure_style
from evaluation.frozen.by_class import describe_shown, figure_rows, shown_outcomes, write_details
from evaluation.frozen.run_images import (
    evaluated_image_settings,
    find_run,
    holds_run_images,
    is_colour_baseline,
)
from evaluation.metrics.scoring import (
    LabelKind,
    describe_labels,
    keep_outcomes,
    kind_of,
    kind_of_report,
    without_nan,
)
from mpp.config import Settings, flatten, require, settings_of
from mpp.errors import UserError
from mpp.models.descriptions import as_saved
from mpp.runtime.files import complete, short_digest
from mpp.runtime.messages import counted
from mpp.runtime.weights import BEST, encoder_folder, fingerprint, run_of

MAX_CLASSES_PRINTED = 30
"""Lines of a printed table by class."""
LONGEST_VALUE, LONGEST_NAME = 40, 160
"""Characters of a setting, and of all, in a report's name; more are a digest."""
RANDOM_NAME = re.compile(r"^([^_]+)_random_\d+")
"""Beginning of the name of a report of random weights: the command, and their seed."""


# --- names ---


def report_path(out: str | None, encoder: str, name: str, features: str | None = None) -> Path:
    """The file of a report: `out`, or next to what was evaluated: the features, the run folder, or runs/ENCODER.

    Raises:
        UserError: it cannot be written there, or the encoder is a file.
    """
    if not features and Path(encoder).is_file():
        encoder_folder(Path(encoder))  # says why a file is no encoder
    require(not (out and Path(out).is_dir()), "out", out, "a file")
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
    named = {"encoder", "features", *(each.key for each in settings_of(config) if each.about["operational"])}
    parts = ["best"] if Path(frozen.encoder).name == BEST else []
    if run:
        usual |= {f"data.{name}": value for name, value in evaluated_image_settings(run).items()}
        if config.data.path != usual["data.path"] and holds_run_images(config.data.path, run):  # perhaps moved
            named |= {"data.path", "data.labels"}
    if frozen.random:
        parts.insert(0, f"random_{frozen.seed}")
        named |= {"random", "seed"}
    known = (usual if of_all else flatten(FeaturesConfig())).keys() - named
    values = flatten(config)
    changed = {key: values[key] for key in values if key in known and as_saved(values[key]) != as_saved(usual[key])}
    words = []
    for key, value in changed.items():
        text = re.sub(r"[^\w.]+", "-", str(value)).strip("-")
        words.append(f"{key.rpartition('.')[2]}_{text if len(text) <= LONGEST_VALUE else digest(value)}")
    if sum(map(len, words)) > LONGEST_NAME:
        words = [digest(changed)]
    return "".join(f"_{part}" for part in [*parts, *words])


def digest(value: Any) -> str:
    """Six letters that tell values apart."""
    return short_digest([repr(value).encode()])[:6]


# --- files ---


def write_json(path: Path, value: Any) -> None:
    """Write JSON, complete or not at all; NaN is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial:
        partial.write_text(json.dumps(without_nan(value), indent=1), encoding="utf-8")


def write_report(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write a report as JSON, and the outcomes of its results next to it; return the content of the JSON.

    It also has `labels` (see `describe_labels`), and each result has the number of its outcomes instead of them. Its
    protocol has the digest of the encoder's `weights`, by which a page sees that they are others by now.
    """
    protocol = report.get("protocol", {})
    if protocol.get("random") is False and "encoder" in protocol:
        with suppress(UserError):  # no encoder there
            weights = fingerprint(Path(protocol.get("checkpoint") or protocol["encoder"]))
            report = report | {"protocol": protocol | ({"weights": weights} if weights else {})}
    outcomes = [result["outcomes"] for result in report["results"] if "outcomes" in result]
    if outcomes:
        report = report | {"results": keep_outcomes(path, report["results"]), "labels": describe_labels(outcomes[0])}
    write_json(path, report)
    return report


# --- random weights, the baseline of an encoder ---


def scores_of_random_weights(path: Path, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The summary of random weights in the same evaluation, from their report in the same folder; {}: not there.

    Args:
        path, report: of an encoder.
    """
    if not way_to_random_weights(path, report):
        return {}
    if "baselines" in report:
        return report["baselines"].get("random weights", {}).get("summary", {})
    files = [file for file in path.parent.glob(f"*_random_*{path.suffix}") if of_learned_weights(file) == path]
    return json.loads(min(files).read_text(encoding="utf-8"))["summary"] if files else {}


def of_learned_weights(path: Path) -> Path:
    """Path of the report of the same evaluation with learned weights; of learned weights `path` itself."""
    return path.with_name(RANDOM_NAME.sub(r"\1", path.name))


def way_to_random_weights(path: Path, report: dict[str, Any]) -> str:
    """The setting that evaluates random weights, too; "": of saved features, floors and random weights."""
    protocol = report.get("protocol", {})
    if is_colour_baseline(str(protocol.get("encoder"))):
        return ""
    if protocol.get("init") == "encoder":
        return "--init random, in another run.dir"
    return "--random true" if protocol.get("random") is False else ""


def describe_random_weights(path: Path, report: dict[str, Any]) -> str:
    """The score of random weights in words, or how to get it; "": they have no part in this evaluation."""
    scores, kind = scores_of_random_weights(path, report), kind_of_report(report)
    if not scores:
        way = way_to_random_weights(path, report)
        return f"random weights: not evaluated ({way})" if way else ""
    words = [f"{kind.text_of_scores(summary)}{kind.sign} ({case})" for case, summary in scores.items()]
    return f"random weights {', '.join(words)}"


# --- tables ---


def write_probe_report(path: Path, report: dict[str, Any], group_by: str) -> dict[str, Any]:
    """Write a probe's JSON, outcomes and, of several depths, the plot; print the tables.

    Returns:
        The report as it was written: see `write_report`.
    """
    report = write_report(path, report)
    kind = kind_of_report(report)
    by_depth = report.get("summary_by_depth") or {report["protocol"].get("chosen_depth", 0): report["summary"]}
    print(table_by_depth(by_depth, group_by, kind))
    on_dev = not report["protocol"].get("test", True)
    if on_dev:
        print("on a tenth of the training images; the held-out images were not used")
    if len(by_depth) > 1:
        with figure_style():
            figure = plot_by_depth(by_depth, group_by, score_axis(kind, "dev {}" if on_dev else "test {}"))
            figure.savefig(path.with_suffix(".png"), dpi=DPI)
        print(f"wrote {path.with_suffix('.png')}")
    print_details(path, report)
    print(f"wrote {path}")
    return report


def table_by_depth(by_depth: dict[int, dict[str, Any]], group_by: str, kind: LabelKind) -> str:
    """A table of summaries with a line for each depth and a column for each name."""
    rows = [[str(depth or "-"), *map(kind.text_of_scores, each.values())] for depth, each in by_depth.items()]
    names = next(iter(by_depth.values()))
    return markdown_table(*without_empty_columns(["depth", *(f"{group_by} {name}" for name in names)], rows))


def score_axis(kind: LabelKind, words: str = "{}") -> ScoreAxis:
    """The axis of a plot for the score of a kind of label.

    Args:
        words: around its heading, such as the split.
    """
    return ScoreAxis(words.format(kind.score_heading) + (" (%)" if kind.is_share else ""), kind.factor)


def print_details(path: Path, report: dict[str, Any]) -> None:
    """Print the baselines, and the figures and the table by class of one result; write the latter and the confusion."""
    labels = report.get("labels")
    if labels is None:
        return
    split = "test" if report.get("protocol", {}).get("test", True) else "dev"
    images = f"{counted(labels['images'], f'{split} image')}, 95% intervals over these"
    print("; ".join(filter(None, [describe_baselines(report), describe_random_weights(path, report), images])))
    outcomes = shown_outcomes(path, report)
    if outcomes is None:
        return
    seeds = {result["seed"] for result in report["results"] if "seed" in result}
    if len(seeds) > 1:
        print(f"above: means over {len(seeds)} seeds ± standard deviation; below: {describe_shown(report)}")
    print(markdown_table([describe_shown(report), "value (95% interval)"], figure_rows(report, outcomes)))
    by_class = kind_of(outcomes).class_table(outcomes)
    if by_class is not None:
        headings, rows = by_class.worst(MAX_CLASSES_PRINTED).text()
        print(markdown_table(headings, rows))
        if len(rows) < len(by_class.names):
            lowest = f"these {len(rows)} of {len(by_class.names)} classes have the lowest scores"
            print(f"{lowest}; the file by class has all")
    for file in write_details(path, outcomes, by_class):
        print(f"wrote {file}")


def describe_baselines(report: dict[str, Any]) -> str:
    """The scores of predictions that look at no image, by the entry `labels` of a report; "" where it has none."""
    baselines: dict[str, float] = report.get("labels", {}).get("baselines", {})
    return ", ".join(kind_of_report(report).describe_baseline(*each) for each in baselines.items())
