"""Results: the one module that names, writes, reads, checks and prints what evaluations found.

A report is JSON: `results`, each with `accuracy` (the score), its `interval` and other `figures`; their `summary`; and
`protocol`, the settings. Next to it are the outcomes: target and prediction of each test image. `rows_of` has it as
rows.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pandas as pd
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter

from evaluation.figures.charts import ScoreAxis, plot_by_depth
from evaluation.figures.markdown import markdown_table, without_empty_columns
from evaluation.figures.style import DPI, figure_style
from evaluation.frozen.by_class import describe_shown, figure_rows, shown_outcomes, write_details
from evaluation.frozen.run_images import (
    FINETUNING_REPORT,
    IMAGE_SETTINGS,
    evaluated_image_settings,
    find_run,
    holds_run_images,
    is_colour_baseline,
)
from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.scoring import (
    LabelKind,
    describe_labels,
    image_scores,
    keep_outcomes,
    kind_of,
    kind_of_report,
    load_outcomes,
    without_nan,
)
from mpp.config import Settings, SourceConfig, changed_settings, flatten, settings_of, sides
from mpp.errors import UserError
from mpp.models.descriptions import as_saved
from mpp.runtime.files import complete, short_digest
from mpp.runtime.messages import counted
from mpp.runtime.weights import BEST, encoder_folder, fingerprint, run_of

COLUMNS = ["encoder", "seed", "evaluation", "case", "draw", "depth", "split", "metric", "value", "low", "high"]
"""Of rows. seed: of the encoder; draw: seed of the evaluation; split: test or dev; low, high: over test images."""
CASES = ("case", "shots", "neighbours", "solver")
"""Entries of a result that name its case, the first that it has."""
MAX_CLASSES_PRINTED = 30
"""Lines of a printed table by class."""
NAMED_SETTINGS = ("encoder", "checkpoint", "random", "img_size", "representation", "depth", "features")
"""Settings that `report_suffix` names, or the place of a report."""
MAX_SETTINGS_LENGTH = 80
"""Characters of settings in a report's name; more are a digest."""
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


def report_path_of_command(config: Settings, command: str, ending: str = ".json") -> Path:
    """The file of a command's report, whose name says which settings are unusual: see `report_path`."""
    values = flatten(config)
    features = values.get("features")
    of_encoder = "" if features else report_suffix(config)
    name = f"{command}{of_encoder}{settings_suffix(config)}{ending}"
    return report_path(values["out"], values["encoder"], name, features)


def report_suffix(config: Settings) -> str:
    """The end of a name: encoder, images and features where they are not the usual ones.

    Other encoders, images and features have files of their own. For a report, see `settings_suffix` too.
    """
    parts = []
    frozen = config.frozen
    if frozen.random:
        parts.append(f"random_{frozen.seed}")
    if Path(frozen.encoder).name == BEST:
        parts.append("best")
    if frozen.checkpoint:
        place = str(Path(frozen.checkpoint).resolve())
        parts += [Path(frozen.checkpoint).stem, short_digest([place.encode()])[:6]]  # many are called model
    if frozen.img_size:
        parts.append(f"{'x'.join(map(str, dict.fromkeys(sides(frozen.img_size))))}px")

    path, run = config.data.path, find_run(frozen.encoder)
    has_usual_images = holds_run_images(path, run) if run else path is None
    if has_usual_images:
        parts += parts_of_name(unusual_choices(config.data, run))
    else:
        name = re.sub(r"[^\w.-]+", "_", Path(path).name) if path else "birds"
        settings = [str(getattr(config.data, key)) for key in IMAGE_SETTINGS]
        parts += [name, short_digest(["\n".join(settings).encode()])[:6]]  # names recur

    values = {"representation": "mean", "depth": "last"} | flatten(config)
    if values["representation"] != "mean":
        parts.append(values["representation"])
    if values["depth"] != "last":
        parts.append(f"depth_{values['depth']}")
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
        if not moves_along and as_saved(value) != as_saved(usual.get(key, getattr(type(data), key))):
            unusual[key] = value
    return unusual


def settings_suffix(config: Any) -> str:
    """The end of a report's name that names all other settings that are not the defaults, such as shots.

    The file of saved features begins the name.
    """
    named = {*NAMED_SETTINGS, *(f"data.{name}" for name in IMAGE_SETTINGS)}
    if config.frozen.random:
        named.add("seed")
    named |= {each.key for each in settings_of(config) if each.about["operational"]}
    changed = changed_settings(config)
    others = {key.rpartition(".")[2]: value for key, value in changed.items() if key not in named}
    return "".join(f"_{part}" for part in parts_of_name(others))


def parts_of_name(settings: dict[str, Any]) -> list[str]:
    """Settings as parts of a file's name, `shots_1-5`; a digest where they are many."""
    parts = []
    for key, value in settings.items():
        text = re.sub(r"[^\w.]+", "-", str(value)).strip("-")
        parts.append(f"{key}_{text}")
    if sum(map(len, parts)) > MAX_SETTINGS_LENGTH:
        return [short_digest([repr(settings).encode()])[:6]]
    return parts


def events_folder(path: Path) -> Path:
    """The folder of a report's TensorBoard events."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}_events")


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


def read_report(path: Path) -> dict[str, Any]:
    """A report that was written. Raises UserError: it cannot be read, or is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if not all("accuracy" in result for result in report["results"]):
            raise ValueError("a result has no accuracy")
        return report
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a report: {error}") from error


def rows_of(report: dict[str, Any], evaluation: str) -> pd.DataFrame:
    """A report's results as rows with `COLUMNS`, one for each figure; its summary and tables are views of them."""
    protocol = report.get("protocol", {})
    common = {
        "encoder": protocol.get("encoder"),
        "seed": protocol.get("seed"),
        "evaluation": evaluation,
        "split": "test" if protocol.get("test", True) else "dev",
    }
    score = kind_of_report(report).score
    rows = []
    for result in report["results"]:
        case = next((str(result[key]) for key in CASES if key in result), None)
        names = common | {"case": case, "draw": result.get("seed"), "depth": result.get("depth")}
        figures = {score: [result["accuracy"], *result.get("interval", (None, None))]} | result.get("figures", {})
        for metric, (value, low, high) in figures.items():
            rows.append(names | {"metric": metric, "value": value, "low": low, "high": high})
    return pd.DataFrame(rows, columns=COLUMNS)


def scores_of_result(path: Path, result: dict[str, Any]) -> NDArray | None:
    """The score (M,) of every test image, whose mean is the result's; None: the report at `path` kept none."""
    outcomes = load_outcomes(path, result["outcomes"]) if "outcomes" in result else None
    return None if outcomes is None else image_scores(outcomes)


# --- random weights, the baseline of an encoder ---


def scores_of_random_weights(path: Path, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The summary of random weights in the same evaluation, from their report in the same folder; {}: not there.

    Args:
        path, report: of an encoder.
    """
    random = report.get("baselines", {}).get("random weights")
    for file in sorted(path.parent.glob(f"{path.stem.partition('_')[0]}_random_*{path.suffix}")):
        if random is None and of_learned_weights(file).name == path.name:
            random = read_report(file)
    return random["summary"] if random and can_be_random(report) else {}


def of_learned_weights(path: Path) -> Path:
    """Path of the report of the same evaluation with learned weights; of learned weights `path` itself."""
    return path.with_name(RANDOM_NAME.sub(r"\1", path.name))


def can_be_random(report: dict[str, Any]) -> bool:
    """Whether an evaluation is of learned weights that have a random counterpart: no floor, and no saved features."""
    protocol = report.get("protocol", {})
    is_learned = protocol.get("random") is False or protocol.get("init") == "encoder"
    return is_learned and not is_colour_baseline(str(protocol.get("encoder")))


def way_to_random_weights(path: Path, report: dict[str, Any]) -> str:
    """The setting that evaluates random weights, too; "": there are none."""
    if not can_be_random(report):
        return ""
    is_trained = path.name == FINETUNING_REPORT or report["protocol"].get("init") == "encoder"
    return "--init random, in another run.dir" if is_trained else "--random true"


def describe_random_weights(path: Path, report: dict[str, Any]) -> str:
    """The score of random weights in words, or how to get it; "": they have no part in this evaluation."""
    scores = scores_of_random_weights(path, report)
    kind = kind_of_report(report)
    if not scores:
        way = way_to_random_weights(path, report)
        return f"random weights: not evaluated ({way})" if way else ""
    words = []
    for case, summary in scores.items():
        only_mean = summary if len(scores) == 1 else {"mean": summary["mean"], "count": 1}
        words.append(kind.text_of_scores(only_mean) + kind.sign + (f" ({case})" if len(scores) > 1 else ""))
    return f"random weights {', '.join(words)}"


# --- tables ---


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
                tag = f"{prefix}accuracy_by_depth/{group_by}_{name}"
                writer.add_scalar(tag, kind.factor * summary["mean"], int(depth))
        if len(by_depth) > 1:
            with figure_style():
                figure = plot_by_depth(by_depth, group_by, score_axis(kind, "dev {}" if on_dev else "test {}"))
                figure.savefig(path.with_suffix(".png"), dpi=DPI)
                writer.add_figure(f"{prefix}accuracy_by_depth", figure)
            print(f"wrote {path.with_suffix('.png')}")
    print_details(path, report)
    print(f"wrote {path}")
    return report


def table_by_depth(
    by_depth: dict[int, dict[str, dict[str, float]]], names: list[str], group_by: str, kind: LabelKind
) -> str:
    """A table of summaries with a line for each depth and a column for each name."""
    rows = []
    for depth, summaries in by_depth.items():
        accuracies = [kind.text_of_scores(summaries[name]) for name in names]
        rows.append([str(depth) if depth else "-", *accuracies])
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
        print_by_class(by_class, rest="; the file by class has all")
    for file in write_details(path, outcomes, by_class):
        print(f"wrote {file}")


def describe_baselines(report: dict[str, Any]) -> str:
    """The scores of predictions that look at no image, by the entry `labels` of a report; "" where it has none."""
    baselines: dict[str, float] = report.get("labels", {}).get("baselines", {})
    return ", ".join(kind_of_report(report).describe_baseline(*each) for each in baselines.items())


def print_by_class(by_class: ClassTable, heading: str = "class", rest: str = "") -> None:
    """Print a table by class; of many classes those that are recognised worst, and `rest` about the others.

    Args:
        heading: of the names.
    """
    headings, rows = by_class.worst(MAX_CLASSES_PRINTED).text()
    print(markdown_table([heading, *headings[1:]], rows))
    if len(rows) < len(by_class.names):
        print(f"these {len(rows)} of {len(by_class.names)} classes have the lowest scores{rest}")
