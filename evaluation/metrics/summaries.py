"""Summaries of results: mean and spread."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.metrics.scoring import mean_interval


def summarize_accuracies(results: list[dict], group_by: str) -> dict[str, dict[str, float]]:
    """Summaries of the accuracies that share a value of `group_by`, or of `case`: see `summarize_values`.

    With `interval`, over test images, where the results have one.
    """
    groups: dict[str, list[dict]] = {}
    for result in results:
        name = str(result.get("case", result[group_by]))
        groups.setdefault(name, []).append(result)
    summaries: dict[str, dict[str, Any]] = {}
    for name, of_case in groups.items():
        summaries[name] = summarize_values([result["accuracy"] for result in of_case])
        interval = mean_interval(of_case)
        if interval is not None:
            summaries[name]["interval"] = interval
    return summaries


def summarize_values(values: Sequence[float]) -> dict[str, float]:
    """Mean, (population) standard deviation and number of some values; null of a file is NaN."""
    numbers = np.array(values, float)
    return {"mean": float(numbers.mean()), "std": float(numbers.std()), "count": len(values)}


def evenly_spaced(length: int, count: int) -> NDArray[np.int64]:
    """So many indices of a sequence, evenly spaced from the first to the last; all where there are no more."""
    return np.linspace(0, length - 1, min(count, length)).astype(int)
