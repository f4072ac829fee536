"""Sections of a page on a run that need its files only: features, unreadable images, settings."""

import json
import os
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evaluation.config import ContrastiveConfig, ReportConfig, SupervisedConfig
from evaluation.frozen.by_class import describe_shown, draw_confusion, figure_rows, shown_outcomes
from evaluation.frozen.results import (
    describe_baselines,
    of_learned_weights,
    scores_of_random_weights,
    way_to_random_weights,
)
from evaluation.frozen.run_images import REPORTS_OF_TRAINING, config_class_of, reports_of_training
from evaluation.metrics.scoring import kind_of, kind_of_report, summarize_accuracies
from evaluation.pages.about import changed_settings_shown, settings_rows
from evaluation.pages.curves import features_of_run
from evaluation.pages.page import Block, Link, Missing, Table, Text, figure_as_picture
from mpp.config import Config, TrainingConfig
from mpp.config.imports import COPIES, OPTION, files_in, name_of_import
from mpp.config.parsing import as_command_line, parse_saved
from mpp.errors import UserError
from mpp.runtime.messages import counted
from mpp.runtime.weights import BEST, ENCODER, fingerprint, has_encoder
from mpp.training.history import History, evaluations
from mpp.training.run_folder import CONFIG_FILE, recorded_commit, saved_settings
from mpp.training.verdict import name_of_start

COMMANDS = {Config: "pretrain", ContrastiveConfig: "contrastive", SupervisedConfig: "supervised"}
MAX_UNREADABLE_LISTED = 20


def features_blocks(config: ReportConfig, folder: Path, history: History) -> list[Block | Missing]:
    """kNN and rank by depth, and the results of the evaluation commands."""
    page_folder = Path(config.out).parent if config.out else folder
    start = name_of_start(begins_from_weights(folder))
    blocks: list[Block | Missing] = [*features_of_run(history, start)]
    rows = []
    details: list[Block] = []
    weights = fingerprints_of_run(folder)
    for file in [*reports_of_training(folder), *sorted((folder / "evaluation").glob("*.json"))]:
        if of_learned_weights(file) != file and of_learned_weights(file).is_file():
            continue  # random weights stand next to these
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
            if is_of_other_weights(report, weights, history):
                reason = "it is of other weights than those of the run now: evaluate again"
                blocks.append(Missing(file.name, reason))
                continue
            rows += rows_of_evaluation(file, report, page_folder)
            details += details_of_evaluation(file, report)
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            blocks.append(Missing(file.name, "it is not a report of an evaluation"))
    if rows:
        headings = [
            "evaluation",
            "case",
            "score",
            "value (95% interval over test images)",
            "without an image",
            "random weights",
        ]
        blocks.append(Table(headings, rows, "Results of the evaluation commands"))
        blocks += details
    else:
        blocks.append(Missing("Few-shot, linear probe", f"not run yet: mpp fewshot --encoder {folder}"))
    return blocks


def fingerprints_of_run(folder: Path) -> set[str]:
    """The digests of the weights that a run has exported: the last, and the best."""
    return {fingerprint(folder / name) for name in (ENCODER, BEST) if has_encoder(folder / name)}


def is_of_other_weights(report: dict[str, Any], weights: set[str], history: History) -> bool:
    """Whether a report of an evaluation is of an encoder that the run no longer has: it was trained again, or longer.

    A report without a digest counts as the weights of the run.

    Args:
        weights: those of the run.
    """
    protocol = report.get("protocol") or {}
    evaluated = [line["step"] for line in evaluations(history)]
    if "step" in protocol and "random" not in protocol and evaluated:  # of masked patches
        return protocol["step"] != evaluated[-1]
    known = None if protocol.get("checkpoint") else protocol.get("weights")
    return bool(known and weights) and known not in weights


def begins_from_weights(folder: Path) -> bool:
    """Whether a run began from weights (`model.init_from`), and not with random ones."""
    return bool(saved_settings(folder)["model"].get("init_from"))


def rows_of_evaluation(file: Path, report: dict[str, Any], page_folder: Path) -> list[list[str | Link]]:
    """A row for each case of an evaluation's report, linked from a page in `page_folder`."""
    link = Link(file.stem, quote(os.path.relpath(file, page_folder)))
    summary = report.get("summary") or {}
    if not summary and file.name in REPORTS_OF_TRAINING:
        summary = summarize_accuracies(report["results"], "seed")
    kind = kind_of_report(report)
    baselines = describe_baselines(report)
    way = way_to_random_weights(file, report)
    of_random = scores_of_random_weights(file, report)
    without = f"not evaluated ({way})" if way else "-"
    rows: list[list[str | Link]] = []
    for case, statistics in summary.items():
        random = kind.text_of_scores(of_random[case]) if case in of_random else without
        rows.append([link, case, kind.score_title, kind.text_of_scores(statistics), baselines, random])
    return rows


def details_of_evaluation(file: Path, report: dict[str, Any]) -> list[Block]:
    """Figures, the table by class and the confusion matrix of an evaluation's report; none without outcomes."""
    outcomes = shown_outcomes(file, report)
    if outcomes is None:
        return []
    of = f"{file.stem}, {describe_shown(report)}"
    blocks: list[Block] = [Table(["figure", "value (95% interval)"], figure_rows(report, outcomes), of, folded=True)]
    by_class = kind_of(outcomes).class_table(outcomes)
    if by_class is not None:
        blocks.append(Table(*by_class.text(), f"{of}: by class", folded=True))
    picture = draw_confusion(outcomes)
    if picture is not None:
        blocks.append(figure_as_picture(picture, f"Confusion matrix of {of}", f"Confusion matrix of {of}"))
    return blocks


def unreadable_blocks(folder: Path) -> list[Block]:
    """Images that could not be decoded."""
    file = folder / "unreadable.txt"
    lines = read_any_text(file).splitlines() if file.is_file() else []
    if not lines:
        return [Text("All images were decoded.")]
    listed = "\n".join(lines[:MAX_UNREADABLE_LISTED])
    if len(lines) > MAX_UNREADABLE_LISTED:
        listed += f"\n... and {len(lines) - MAX_UNREADABLE_LISTED} more, in unreadable.txt"
    return [
        Text(f"{counted(len(lines), 'image')} could not be decoded; training took others instead."),
        Text(listed, code=True),
    ]


def settings_blocks(folder: Path) -> list[Block]:
    """Settings that differ from the defaults, and the command that repeats the run."""
    file = folder / CONFIG_FILE
    config_class = config_class_of(saved_settings(folder))
    if config_class is None:
        return [Text(read_any_text(file), code=True)] if file.is_file() else []
    try:
        config = parse_saved(config_class, file)
    except UserError as error:
        return [Text(f"config.yaml is from another version of mpp: {error}"), Text(read_any_text(file), code=True)]
    blocks = settings_rows(config)
    if config_class in COMMANDS:
        blocks.append(Text(command_to_repeat(config, folder), code=True))
    return [*blocks, Text("config.yaml in the run folder has all settings.")]


def command_to_repeat(config: TrainingConfig, folder: Path) -> str:
    """The command that repeats a run in a folder next to its own, with the run's precision and revision of the data.

    A branch is repeated from its first step: the bits are the same, and its trunk may be gone.
    """
    settings = changed_settings_shown(config)
    settings.pop("run.branch_from", None)
    settings["run.precision"] = config.run.precision
    commit = recorded_commit(folder)
    if commit:
        settings["data.revision"] = commit
    names = dict.fromkeys(map(name_of_import, files_in(folder / COPIES)))
    imports = [f"{OPTION}={name}" for name in names]
    command = COMMANDS[type(config)]
    return shlex.join(["mpp", command, *imports, *as_command_line(settings), f"--run.dir={folder}_again"])


def read_any_text(file: Path) -> str:
    """The text of a file; bytes that are not UTF-8 are replaced."""
    return file.read_text(encoding="utf-8", errors="replace")
