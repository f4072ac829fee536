"""Accuracy of a pre-training run on masked patches of held-out images, next to trivial baselines.

    python evaluation/masked.py --encoder runs/birds

The numbers are those of the run's last evaluation, which kept counts of each image for the intervals; nothing is
computed again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.config import MaskedConfig
from evaluation.figures.markdown import markdown_table
from evaluation.frozen.results import report_path, write_report
from evaluation.frozen.run_images import is_colour_baseline
from evaluation.metrics.scoring import KINDS, Outcomes, add_figures
from mpp.config import nested, require
from mpp.config.parsing import parse
from mpp.errors import Unavailable
from mpp.features.metrics import COUNTED, load_masked_counts
from mpp.runtime.messages import counted, note
from mpp.runtime.start import run_main
from mpp.training.log import last_scalars

METRIC_OF_LINE = {
    "model": "heldout/accuracy",
    "two nearest": "heldout/two_nearest",
    "nearest": "heldout/nearest",
    "most frequent": "heldout/most_frequent",
}
"""The lines of the table, and the run's metrics that they show."""
WITHOUT_COUNTS = "no intervals: the run's last evaluation, by an earlier version, kept no counts per image"


def run(config: MaskedConfig) -> dict[str, Any]:
    """Read the metrics of the run, write the report, and return it.

    Raises:
        UserError: no run there.
        Unavailable: a run that predicts no colours.
    """
    allowed = "the folder of a pre-training run: a colour baseline predicts no patches"
    require(not is_colour_baseline(config.encoder), "encoder", config.encoder, allowed)
    last = last_scalars(Path(config.encoder))
    if "heldout/nearest" not in last:
        lacks = "it has no heldout/nearest, which runs that predict colours have"
        raise Unavailable(f"encoder is {config.encoder}; it must be a pre-training run: {lacks}")
    outcomes = outcomes_by_line(Path(config.encoder), int(last["step"]))
    results = []
    for line, metric in METRIC_OF_LINE.items():
        if metric in last:
            result = {"case": line, "accuracy": last[metric]}
            results.append(result | {"outcomes": outcomes[line]} if line in outcomes else result)
    results = add_figures(results)
    report = {"results": results, "protocol": nested(config) | {"step": last["step"]}}
    path = report_path(config.out, config.encoder, "masked.json")
    report = write_report(path, report)
    kind = KINDS["patches"]
    rows = [
        [result["case"], kind.text(kind.score, result["accuracy"], *result.get("interval", ()))] for result in results
    ]
    print(markdown_table(["masked patches", "accuracy (%)"], rows))
    if outcomes:
        print(f"{counted(len(outcomes['model']), 'held-out image')}, 95% intervals over these")
    else:
        note(WITHOUT_COUNTS)
    print(f"wrote {path}")
    return report


def outcomes_by_line(run: Path, step: int) -> dict[str, Outcomes]:
    """Line of the table -> outcomes of the held-out images; empty where the run kept none.

    `most frequent` has none: its colour is chosen on these very patches.
    """
    kept = load_masked_counts(run, step)
    if kept is None:
        return {}
    counts, images = kept
    masked, *others = counts.T
    outcomes = {}
    for name, right in zip(COUNTED[1:], others, strict=True):
        outcomes[name.replace("_", " ")] = Outcomes("patches", masked, right, images=images)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> None:
    """Report with the settings of the command line, or of `arguments`."""
    run(parse(MaskedConfig, arguments))


if __name__ == "__main__":
    run_main(main)
