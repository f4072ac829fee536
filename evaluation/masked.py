"""Accuracy of a pre-training run on masked patches of held-out images, next to trivial baselines.

    python evaluation/masked.py --encoder runs/birds

The numbers are those of the run's last evaluation; nothing is computed again.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.config import MaskedConfig
from evaluation.frozen.results import report_path, table, write_json
from mpp.config.checks import require
from mpp.config.parsing import parse
from mpp.errors import Unavailable
from mpp.runtime.command import command
from mpp.training.log import last_evaluation

METRIC_OF_LINE = {
    "model": "heldout/accuracy",
    "two nearest": "heldout/two_nearest",
    "nearest": "heldout/nearest",
    "most frequent": "heldout/most_frequent",
}
"""The lines of the table, and the run's metrics that they show."""


def run(config: MaskedConfig) -> dict[str, Any]:
    """Read the metrics of the run, write the report, and return it.

    Raises:
        UserError: no run there.
        Unavailable: a run that predicts no colours.
    """
    is_floor = config.encoder.startswith("floor:")
    require(not is_floor, "encoder", config.encoder, "the folder of a pre-training run: a floor predicts no patches")
    last = last_evaluation(Path(config.encoder))
    if "heldout/nearest" not in last:
        lacks = "it has no heldout/nearest, which runs that predict colours have"
        raise Unavailable(f"encoder is {config.encoder}; it must be a pre-training run: {lacks}")
    results = []
    for line, metric in METRIC_OF_LINE.items():
        if metric in last:
            results.append({"case": line, "accuracy": last[metric]})
    report = {"results": results, "protocol": dataclasses.asdict(config) | {"step": last["step"]}}
    rows = [[result["case"], f"{100 * result['accuracy']:.1f}"] for result in results]
    print(table(["masked patches", "accuracy (%)"], rows))
    path = report_path(config.out, config.encoder, "masked.json")
    write_json(path, report)
    print(f"wrote {path}")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Report with the settings of the command line, or of `arguments`."""
    run(parse(MaskedConfig, arguments, prog="python evaluation/masked.py"))


if __name__ == "__main__":
    command(main)
