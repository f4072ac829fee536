"""Accuracy of a pre-training run on masked patches of held-out images, next to trivial baselines, for comparisons.

The numbers are those of the run's last evaluation, which kept counts of each image for the intervals; nothing is
computed again. A run's own page and metrics have the same.
"""

from typing import Any

from evaluation.config import MaskedConfig
from evaluation.frozen.results import report_path, write_report
from evaluation.frozen.run_images import find_run, split_run
from evaluation.metrics.scoring import Outcomes, add_figures
from mpp.config import nested
from mpp.errors import Unavailable
from mpp.features.metrics import COUNTED, load_masked_counts
from mpp.training.log import last_scalars

CASES = {"model": "accuracy", "two nearest": "two_nearest", "nearest": "nearest", "most frequent": "most_frequent"}
"""The cases of the results, and the run's held-out metrics that they show."""


def run(config: MaskedConfig) -> dict[str, Any]:
    """Read the metrics of the run, write the report, and return it.

    Raises:
        UserError: the run has not come so far.
        Unavailable: no run there, or one that predicts no colours.
    """
    folder, weights = split_run(config.encoder)
    if weights or find_run(config.encoder) is None:
        raise Unavailable(f"encoder is {config.encoder}; it must be the folder of a pre-training run")
    last = last_scalars(folder)
    if "heldout/nearest" not in last:
        lacks = "it has no heldout/nearest, which runs that predict colours have"
        raise Unavailable(f"encoder is {config.encoder}; it must be a pre-training run: {lacks}")
    kept = load_masked_counts(folder, int(last["step"]))  # earlier versions kept none: there are no intervals
    patches = dict(zip(COUNTED, kept[0].T, strict=True)) if kept else {}
    results = []
    for case, metric in CASES.items():
        result = {"case": case, "accuracy": last.get(f"heldout/{metric}")}
        counted = patches.get(case.replace(" ", "_"))
        if counted is not None:
            result["outcomes"] = Outcomes("patches", patches["masked"], counted, images=kept[1])
        if result["accuracy"] is not None:
            results.append(result)
    report = {"results": add_figures(results), "protocol": nested(config) | {"step": last["step"]}}
    return write_report(report_path(config.out, config.encoder, "masked.json"), report)
