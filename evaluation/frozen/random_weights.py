"""Random weights as a baseline of an encoder: the same evaluation of the same architecture, where it was asked for."""

import json
import re
from pathlib import Path
from typing import Any

from evaluation.frozen.colour_baselines import is_colour_baseline
from evaluation.frozen.training_reports import FINETUNING_REPORT
from evaluation.metrics.scoring import kind_of_report

RANDOM_NAME = re.compile(r"^([^_]+)_random_\d+")
"""Beginning of the name of a report of random weights: the command, and their seed."""


def scores_of_random_weights(path: Path, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The summary of random weights in the same evaluation, from their report in the same folder; {}: not there.

    Args:
        path, report: of an encoder.
    """
    random = report.get("baselines", {}).get("random weights") or random_report(path)
    return random.get("summary", {}) if random and can_be_random(report) else {}


def random_report(path: Path) -> dict[str, Any] | None:
    """The report of random weights next to that of an encoder at `path`, of the first seed; None: there is none."""
    command = path.stem.partition("_")[0]
    for file in sorted(path.parent.glob(f"{command}_random_*{path.suffix}")):
        if of_learned_weights(file).name == path.name and file.name != path.name:
            return json.loads(file.read_text(encoding="utf-8"))
    return None


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
    if len(scores) > 1:
        of_cases = [f"{kind.text(kind.score, of_case['mean'])}{kind.sign} ({case})" for case, of_case in scores.items()]
        return f"random weights {', '.join(of_cases)}"
    for of_case in scores.values():
        return f"random weights {kind.text_of_scores(of_case)}{kind.sign}"
    way = way_to_random_weights(path, report)
    return f"random weights: not evaluated ({way})" if way else ""
