"""Kinds of runs, and reports of training with labels: where they are, and which run they are about.

RUN/supervised.json       of the run itself
FINETUNING/finetune.json  of its run lr_X, which was tested: the rate X is the best one
"""

import json
from pathlib import Path
from typing import Any

from evaluation.config import ContrastiveConfig, OneRunConfig, SupervisedConfig
from evaluation.frozen.run_images import find_run
from mpp.config import Config, Settings, TrainingConfig, flatten
from mpp.errors import UserError

SUPERVISED_REPORT = "supervised.json"
FINETUNING_REPORT = "finetune.json"
REPORTS_OF_TRAINING = (SUPERVISED_REPORT, FINETUNING_REPORT)
CONFIG_BY_SETTING: dict[str, type[TrainingConfig]] = {
    "objective": Config,
    "contrast": ContrastiveConfig,
    "lrs": OneRunConfig,
    "head": SupervisedConfig,
}
"""A setting that only one kind of run has -> the class of the run's settings."""
CLASSIFIERS = (SupervisedConfig, OneRunConfig)
"""Classes of the settings of runs that learn labels."""


def config_class_of(settings: dict[str, Any]) -> type[TrainingConfig] | None:
    """Class of the settings of a run, by a setting that only such runs have; None where it is not known."""
    return next((kind for name, kind in CONFIG_BY_SETTING.items() if name in settings), None)


def find_tested_run(folder: Path, setting: str) -> Path | None:
    """The run of the best rate in the folder of a fine-tuning; None: it is none.

    Args:
        setting: that names the folder, for messages.
    Raises:
        UserError: it has compared rates and trained no run on all images.
    """
    if find_run(str(folder)) is not None or not (folder / FINETUNING_REPORT).is_file():
        return None
    try:
        report = json.loads((folder / FINETUNING_REPORT).read_text(encoding="utf-8"))
        rates = [result["lr"] for result in report["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{setting} is {folder}, whose {FINETUNING_REPORT} cannot be read: {error}") from error
    if not rates:
        raise UserError(f"{setting} is {folder}, which only compared rates (--test false); fine-tune with one")
    return folder / f"lr_{rates[0]:g}"


def tested_encoder(config: Settings) -> str:
    """The encoder that settings name: of the folder of a fine-tuning its tested run, otherwise the setting itself."""
    encoder = flatten(config)["encoder"]
    return str(find_tested_run(Path(encoder), "encoder") or encoder)


def reports_of_training(run: Path) -> list[Path]:
    """The reports of training that are about a run: one, or none."""
    supervised = run / SUPERVISED_REPORT
    if supervised.is_file():
        return [supervised]
    parent = run.absolute().parent
    try:
        is_tested = find_tested_run(parent, "encoder") == run.absolute()
    except UserError:  # a report of no test
        return []
    return [parent / FINETUNING_REPORT] if is_tested else []
