"""Results with outcomes become results with figures: the one place where evaluations meet kinds of labels.

A result is a dict of a report. An evaluation puts `outcomes` (an `Outcomes`) into it; `add_figures` adds `accuracy`
(the score), `interval` and `figures`; `keep_outcomes` writes the outcomes next to the report.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.metrics.kinds import LabelKind
from evaluation.metrics.number import Number
from evaluation.metrics.one_class import OneClass
from evaluation.metrics.outcomes import Outcomes, save_outcomes
from evaluation.metrics.patches import MaskedPatches
from evaluation.metrics.pixels import PixelClasses
from evaluation.metrics.several import SeveralClasses
from mpp.errors import UserError
from mpp.runtime.messages import note

Result = dict[str, Any]
ALL_KINDS = (OneClass(), SeveralClasses(), Number(), PixelClasses(), MaskedPatches())
KINDS: dict[str, LabelKind] = {kind.name: kind for kind in ALL_KINDS}
"""All kinds of labels by name. One class and its place in this line add a kind."""
ONE_CLASS = KINDS["class"]


def kind_of(outcomes: Outcomes) -> LabelKind:
    """The kind of label that outcomes are of."""
    return KINDS[outcomes.kind]


def labelled_outcomes(outcomes: Outcomes) -> Outcomes:
    """The outcomes of the images that have a label.

    Raises:
        UserError: none has.
    """
    known = kind_of(outcomes).has_target(outcomes.targets)
    if not known.any():
        raise UserError(f"none of the {len(outcomes)} test images has a label")
    return outcomes if known.all() else outcomes.select(known)


def score_of(outcomes: Outcomes) -> float:
    """The figure that choices are made by, such as accuracy: more is better."""
    kind = kind_of(outcomes)
    return kind.measure(labelled_outcomes(outcomes))[kind.score]


def error_of(outcomes: Outcomes) -> float:
    """The figure that choices are made by where the score is not defined: less is better. NaN: the kind has none."""
    return kind_of(outcomes).error(labelled_outcomes(outcomes))


def best_choice(scores: dict[Any, float], errors: dict[Any, float] | None = None) -> Any:
    """The choice with the largest score, the first of equal ones; one whose score is not known (NaN) comes last.

    Args:
        errors: see `error_of`; they decide, which is noted, where no score is known: such as R2 of a single dev image.
    """
    best = max(scores, key=lambda choice: rank_of(scores[choice]))
    if not errors or rank_of(scores[best]) > -math.inf:
        return best
    known = {choice: value for choice, value in errors.items() if math.isfinite(value)}
    if known:
        best = min(known, key=known.__getitem__)
    reason = "by the mean absolute error" if known else "the first candidate"
    note(f"{best} is chosen ({reason}): the score on the dev images is not defined; use more training images")
    return best


def rank_of(score: float | None) -> float:
    """A score as choices compare it: one that is not known (NaN; null of a file) is below all others."""
    return -math.inf if score is None or math.isnan(score) else score


def kind_of_results(results: Sequence[Result]) -> LabelKind:
    """The kind of label that results are of, before a report is written; one class where they kept no outcomes."""
    outcomes = [result["outcomes"] for result in results if isinstance(result.get("outcomes"), Outcomes)]
    return kind_of(outcomes[0]) if outcomes else ONE_CLASS


def kind_of_report(report: Mapping[str, Any]) -> LabelKind:
    """The kind of label of a report that was written."""
    return KINDS[report.get("labels", {}).get("kind", ONE_CLASS.name)]


def kind_of_score(heading: str | None) -> LabelKind:
    """The kind of label whose score tables call so; None, or a name from elsewhere: one class."""
    named = [kind for kind in KINDS.values() if kind.score_heading == heading]
    return named[0] if named else ONE_CLASS


def add_scores(results: Sequence[Result]) -> list[Result]:
    """The results with their score, without intervals: choices on a dev split need no more."""
    return [
        result | {"accuracy": score_of(result["outcomes"])} if "outcomes" in result else result for result in results
    ]


def add_figures(results: Sequence[Result]) -> list[Result]:
    """The results with their score, its interval and the other figures; those without outcomes as they are."""
    return [result | result_entries(result["outcomes"]) if "outcomes" in result else result for result in results]


def result_entries(outcomes: Outcomes) -> Result:
    """Entries of a result: `accuracy` (the score), `interval`, and `figures`: name -> [value, low, high]."""
    kind = kind_of(outcomes)
    figures = kind.figures(labelled_outcomes(outcomes))
    entries: Result = {"accuracy": figures[kind.score].value, "interval": list(figures[kind.score].interval)}
    others = {name: [figure.value, *figure.interval] for name, figure in figures.items() if name != kind.score}
    return entries | {"figures": others} if others else entries


def without_nan(value: Any) -> Any:
    """A value for JSON: null instead of NaN, a figure that the images do not have; plain numbers of numpy's."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    if isinstance(value, np.generic):  # such as the mean of an array, which json refuses
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value


def keep_outcomes(report: Path, results: Sequence[Result]) -> list[Result]:
    """Write the outcomes next to a report: a result then has their number in the file instead of them."""
    kept = [result["outcomes"] for result in results if "outcomes" in result]
    if not kept:
        return list(results)
    save_outcomes(report, kept)
    numbered = []
    for result in results:
        number = len([each for each in numbered if "outcomes" in each])
        numbered.append(result | {"outcomes": number} if "outcomes" in result else result)
    return numbered


def without_outcomes(results: Sequence[Result]) -> list[Result]:
    """The results with only their figures, for a report whose outcomes are not kept."""
    return [{key: value for key, value in result.items() if key != "outcomes"} for result in results]


def describe_labels(outcomes: Outcomes) -> dict[str, Any]:
    """The entry `labels` of a report: kind, number of test images, unlabelled ones, names of classes, baselines."""
    known = labelled_outcomes(outcomes)
    kind = kind_of(outcomes)
    return {
        "kind": kind.name,
        "images": len(known),
        "unlabelled": len(outcomes) - len(known),
        "class_names": list(outcomes.class_names),
        "baselines": kind.baselines(known),
    }


def mean_interval(results: Sequence[Result]) -> list[float] | None:
    """The interval of a mean over seeds, tested on the same images: the means of the ends; None: one has none."""
    if not all("interval" in result for result in results):
        return None
    return np.mean(np.array([result["interval"] for result in results], float), 0).tolist()
