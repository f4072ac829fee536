"""Accuracy of a pre-training run on masked patches of held-out images, next to trivial baselines.

    python evaluation/masked.py --encoder runs/birds

The numbers are those of the run's last evaluation, which kept counts of each image for the intervals; nothing is
computed again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.config import MaskedConfig
from evaluation.figures.charts import markdown_table
from evaluation.frozen.results import report_path, write_report
from evaluation.metrics.scoring import PATCHES, Outcomes, add_figures
from mpp.config import nested
from mpp.config.parsing import parse
from mpp.errors import Unavailable
from mpp.features.metrics import COUNTED, load_masked_counts
from mpp.runtime.start import run_main
from mpp.training.log import last_scalars

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
    folder = Path(config.encoder)
    last = last_scalars(folder)
    if "heldout/nearest" not in last:
        lacks = "it has no heldout/nearest, which runs that predict colours have"
        raise Unavailable(f"encoder is {config.encoder}; it must be a pre-training run: {lacks}")
    kept = load_masked_counts(folder, int(last["step"]))  # earlier versions kept none: there are no intervals
    patches = dict(zip(COUNTED, kept[0].T, strict=True)) if kept else {}
    results = []
    for line, metric in METRIC_OF_LINE.items():
        result = {"case": line, "accuracy": last.get(metric)}
        name = line.replace(" ", "_")
        if name in patches:
            result["outcomes"] = Outcomes("patches", patches["masked"], patches[name], images=kept[1])
        if metric in last:
            results.append(result)
    results = add_figures(results)

    path = report_path(config.out, config.encoder, "masked.json")
    report = write_report(path, {"results": results, "protocol": nested(config) | {"step": last["step"]}})
    rows = [[each["case"], PATCHES.text("accuracy", each["accuracy"], *each.get("interval", ()))] for each in results]
    print(markdown_table(["masked patches", "accuracy (%), 95% interval over images"], rows))
    print(f"wrote {path}")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Report with the settings of the command line, or of `arguments`."""
    run(parse(MaskedConfig, arguments))


if __name__ == "__main__":
    run_main(main)
