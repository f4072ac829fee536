"""How well a pre-training run predicts what it does not see: held-out masked patches, beside trivial baselines.

    python evaluation/masked.py --encoder runs/birds

The numbers are those of the run's last evaluation; nothing is computed anew.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.config import MaskedConfig
from evaluation.frozen.results import report_path, table, write_json
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.runtime.start import command
from mpp.training.log import last_evaluation

LINES = {"model": "accuracy", "two nearest": "two_nearest", "nearest": "nearest", "most frequent": "most_frequent"}
"""What the table calls a line, and what the run's metrics do."""


def run(config: MaskedConfig) -> dict[str, Any]:
    """Read and report; the report."""
    last = last_evaluation(Path(config.encoder))
    if "heldout/nearest" not in last:
        lacks = "it has no heldout/nearest, which runs that predict colours have"
        raise UserError(f"encoder is {config.encoder}; it must be a pre-training run: {lacks}")
    named = {line: f"heldout/{name}" for line, name in LINES.items()}
    results = [{"case": line, "accuracy": last[name]} for line, name in named.items() if name in last]
    report = {"results": results, "protocol": dataclasses.asdict(config) | {"step": last["step"]}}
    print(table(["masked patches", "accuracy (%)"], [[r["case"], f"{100 * r['accuracy']:.1f}"] for r in results]))
    path = report_path(config.out, config.encoder, "masked.json")
    write_json(path, report)
    print(f"wrote {path}")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Report as the command line, or `arguments`, say."""
    run(parse(MaskedConfig, arguments, prog="python evaluation/masked.py"))


if __name__ == "__main__":
    command(main)
