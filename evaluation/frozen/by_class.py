"""Figures of a report in words, a table by class as CSV, and the confusion matrix as a picture."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from evaluation.figures.charts import plot_confusion
from evaluation.figures.style import DPI, figure_style
from evaluation.metrics.class_table import ClassTable
from evaluation.metrics.scoring import Outcomes, kind_of, labelled_outcomes, load_outcomes
from mpp.runtime.files import complete

KEYS_OF_A_RESULT = ("case", "shots", "neighbours", "solver", "lr", "seed", "depth")
"""Entries of a result that name it, where it has them."""
USUAL_NEIGHBOURS = 20
"""Of kNN in all comparisons, as in DINO."""
CLASSES_SUFFIX = ".classes.csv"
CONFUSION_FILE = ".confusion.png"


def shown_result(report: dict[str, Any]) -> dict[str, Any] | None:
    """The result whose figures are shown in detail: one of the first seed, at the report's depth; None: none.

    Test images have no part in the choice: it is that of 20 neighbours, that of the most shots, or the first, which of
    masked patches is the model's.
    """
    chosen = report.get("protocol", {}).get("chosen_depth")
    kept = [result for result in report["results"] if isinstance(result.get("outcomes"), int)]
    of_depth = [result for result in kept if result.get("depth", chosen) == chosen]
    first_seed = [result for result in of_depth if result.get("seed", 0) == of_depth[0].get("seed", 0)]
    for result in first_seed:
        if result.get("neighbours") == USUAL_NEIGHBOURS:
            return result
    return max(first_seed, key=lambda result: result.get("shots", 0), default=None)


def shown_outcomes(path: Path, report: dict[str, Any]) -> Outcomes | None:
    """The outcomes of the result that is shown, of the images that have a label; None: they were not kept."""
    result = shown_result(report)
    outcomes = load_outcomes(path, result["outcomes"]) if result else None
    return None if outcomes is None else labelled_outcomes(outcomes)


def figure_rows(report: dict[str, Any], outcomes: Outcomes) -> list[list[str]]:
    """A row for each figure of the result that is shown: its name, and its value with the interval.

    Args:
        outcomes: see `shown_outcomes`.
    """
    kind = kind_of(outcomes)
    result = shown_result(report)
    figures = {kind.score: [result["accuracy"], *result["interval"]]} | result.get("figures", {})
    return [[kind.headings[name], kind.text(name, *numbers)] for name, numbers in figures.items()]


def describe_shown(report: dict[str, Any]) -> str:
    """The result that is shown, in words: `shots 25, seed 0`."""
    result = shown_result(report)
    named = {key: str(result[key]) for key in KEYS_OF_A_RESULT if key in result}
    if named.get("case") == named.get("shots"):  # without several penalties
        named.pop("case", None)
    return ", ".join(f"{key} {value}" for key, value in named.items())


@figure_style()
def write_details(path: Path, outcomes: Outcomes, by_class: ClassTable | None) -> list[Path]:
    """Write the table by class and the confusion matrix of these outcomes, next to the report at `path`."""
    written = []
    if by_class is not None:
        written.append(path.with_name(f"{path.stem}{CLASSES_SUFFIX}"))
        with complete(written[-1], shared=True) as partial:
            pd.DataFrame(by_class.columns()).to_csv(partial, index=False)
    figure = draw_confusion(outcomes)
    if figure is not None:
        written.append(path.with_name(f"{path.stem}{CONFUSION_FILE}"))
        with complete(written[-1], shared=True) as partial:
            figure.savefig(partial, format="png", dpi=DPI)
    return written


def draw_confusion(outcomes: Outcomes) -> Figure | None:
    """The confusion matrix; None: the kind of label has none."""
    confusion = kind_of(outcomes).confusion(outcomes)
    if confusion is None:
        return None
    return plot_confusion(confusion, outcomes.names(len(confusion)))
