"""Sections of a page on a run that need its files only: features, unreadable images, settings."""

import json
import os
import shlex
from pathlib import Path
from urllib.parse import quote

from evaluation.config import ContrastiveConfig, OneRunConfig, ReportConfig, SupervisedConfig
from evaluation.frozen.results import format_percent
from evaluation.pages.about import Missing, changed, settings_rows
from evaluation.pages.curves import features_of_run
from evaluation.pages.page import Link, Table, Text
from mpp.config import Config
from mpp.config.command_line import as_command_line
from mpp.config.imports import OPTION, saved_imports
from mpp.config.saved import parse_saved
from mpp.errors import UserError
from mpp.training.history import History
from mpp.training.record import recorded_commit
from mpp.training.run_folder import CONFIG_FILE, saved_settings

CONFIGS = (("objective", Config), ("contrast", ContrastiveConfig), ("lrs", OneRunConfig), ("head", SupervisedConfig))
COMMANDS = {Config: "pretrain", ContrastiveConfig: "contrastive", SupervisedConfig: "supervised"}


def features_blocks(config: ReportConfig, folder: Path, history: History, missing: Missing) -> list:
    """kNN and rank by depth, and what the evaluation commands found."""
    blocks = features_of_run(history, missing)
    rows, beside = [], Path(config.out).parent if config.out else folder
    for file in sorted((folder / "evaluation").glob("*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            summary = found.get("summary") or {}
            rows += [
                [Link(file.stem, quote(os.path.relpath(file, beside))), name, format_percent(each)]
                for name, each in summary.items()
            ]
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            missing[file.name] = "it is no report of an evaluation"
    if rows:
        headings = ["evaluation", "case", "accuracy or mean IoU (%)"]
        blocks.append(Table(headings, rows, "What the evaluation commands found"))
    else:
        missing["Few-shot, linear probe"] = f"not asked for yet: mpp fewshot --encoder {folder}"
    return blocks


def unreadable_blocks(folder: Path) -> list:
    """Images that could not be decoded."""
    file = folder / "unreadable.txt"
    named = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    if not named:
        return [Text("All images that were read could be decoded.")]
    shown = "\n".join(named[:20]) + (f"\n... and {len(named) - 20} more, in unreadable.txt" if len(named) > 20 else "")
    return [Text(f"{len(named)} images could not be decoded; others took their place."), Text(shown, code=True)]


def settings_blocks(folder: Path) -> list:
    """Settings that differ from the defaults, and the command that repeats the run."""
    saved, file = saved_settings(folder), folder / CONFIG_FILE
    kind = next((each for name, each in CONFIGS if name in saved), None)
    try:
        config = parse_saved(kind, file) if kind else None
    except UserError as error:
        return [
            Text(f"config.yaml is not one of today's: {error}"),
            Text(file.read_text(encoding="utf-8", errors="replace"), code=True),
        ]
    if config is None:
        return [Text(file.read_text(encoding="utf-8", errors="replace"), code=True)] if file.is_file() else []
    blocks = settings_rows(config)
    if kind in COMMANDS:
        settings = changed(config) | {"run.precision": config.run.precision}
        if commit := recorded_commit(folder):
            settings["data.revision"] = commit
        imports = [f"{OPTION}={each.name}" for each in saved_imports(folder)]
        words = ["mpp", COMMANDS[kind], *imports, *as_command_line(settings)]
        blocks.append(Text(shlex.join([*words, f"--run.dir={folder}_again"]), code=True))
    return [*blocks, Text("config.yaml in the run folder has all settings.")]
