"""Outcomes become results: targets and predictions of test images, kinds of labels, figures, tables and summaries.

A result is a dict of a report. An evaluation puts `outcomes` (an `Outcomes`) into it; `add_figures` adds `accuracy`
(the score), `interval` and `figures`; `save_outcomes` writes the outcomes next to the report. M test images, C classes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, confusion_matrix
from torch import Tensor

from evaluation.metrics.intervals import (
    Figures,
    class_figures,
    interval,
    ious,
    number_figures,
    patch_figures,
    pixel_figures,
    score_images,
    several_figures,
    wilson,
)
from mpp.data.dataset import has_label, names_by_number
from mpp.errors import NPZ_ERRORS, UserError
from mpp.runtime.files import complete
from mpp.runtime.messages import printable

Result = dict[str, Any]
MEANS_OVER_CLASSES = ("class_mean", "macro_f1")
USUAL_NEIGHBOURS = 20
"""Of kNN in all comparisons, as in DINO."""
IMAGES_A_CLASS = 5
"""With fewer test images a class, the intervals of means over classes hold less often than they say: there are none."""


# --- outcomes ---


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Targets and predictions of test images, in the same order."""

    kind: str
    """Name of the kind of label: see `KINDS`."""
    targets: NDArray
    """(M, ...): their meaning depends on the kind."""
    predictions: NDArray
    """(M, ...): their meaning depends on the kind."""
    class_names: Sequence[str] = ()
    """Names of the classes by number, as far as they are known."""
    images: Sequence[str] = ()
    """(M,) names of the images' files, or their places in the split; empty: unknown."""

    def __len__(self) -> int:
        return len(self.predictions)

    def select(self, indices: NDArray) -> "Outcomes":
        """The outcomes of some images (indices or a mask), which may occur several times."""
        images = np.asarray(self.images)[indices].tolist() if len(self.images) else ()
        return replace(self, targets=self.targets[indices], predictions=self.predictions[indices], images=images)

    def names(self, classes: int) -> list[str]:
        """A name for each class: its own, or its number."""
        return names_by_number([*map(printable, self.class_names)], range(classes))


def outcomes_path(report: Path) -> Path:
    """The file of a report's outcomes."""
    return report.with_name(f"{report.stem}.outcomes.npz")


def save_outcomes(report: Path, outcomes: Sequence[Outcomes]) -> Path:
    """Write the outcomes of a report's results next to it; all have the same images and targets.

    The results know theirs by number (`outcomes` in a result).
    """
    first = outcomes[0]
    arrays = {f"predictions_{number}": each.predictions for number, each in enumerate(outcomes)}
    arrays |= {"class_names": np.array(first.class_names, str), "images": np.array(first.images, str)}
    path = outcomes_path(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial, partial.open("wb") as file:
        np.savez_compressed(file, kind=np.array(first.kind), targets=first.targets, **arrays)
    return path


def load_outcomes(report: Path, number: int = 0) -> Outcomes | None:
    """The outcomes of a report's result; None: they were not kept.

    Raises:
        UserError: the file cannot be read.
    """
    path = outcomes_path(report)
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            texts = arrays["class_names"].tolist(), arrays["images"].tolist()
            return Outcomes(str(arrays["kind"]), arrays["targets"], arrays[f"predictions_{number}"], *texts)
    except NPZ_ERRORS as error:
        raise UserError(f"{path} cannot be read: {error}; evaluate again") from error


# --- kinds of labels ---


@dataclass(frozen=True)
class LabelKind:
    """A kind of label: what its targets and predictions are worth. A line of `KINDS` adds one."""

    name: str
    """As in reports."""
    headings: Mapping[str, str]
    """Figure -> its heading in tables. The first is the score: reports call it `accuracy`, choices are made by it."""
    figures: Callable[[Tensor, Tensor, Tensor], Figures]
    """Weights (M,), targets and predictions (M, ...) of images to all figures, by name."""
    has_target: Callable[[NDArray], NDArray] = has_label
    """Whether each image has a label: (M,). The others are left out and counted."""
    is_share: bool = True
    """Whether figures are shares, which tables show in percent."""
    known_by: Callable[[NDArray], float] = len
    """Targets to the number of images that the variance of figures is known by."""
    baselines: Callable[[NDArray], dict[str, float]] = lambda targets: {}
    """Targets to the score of predictions that look at no image, by name: such as the largest class."""
    class_table: Callable[[Outcomes], pd.DataFrame | None] = lambda outcomes: None
    """By names of classes: numbers of images or pixels, and shares in percent, of which the first is the score."""
    confusion: Callable[[Outcomes], NDArray | None] = lambda outcomes: None
    """Images (or pixels) of each class, rows, that each class, columns, is predicted for: (C, C)."""

    @property
    def score(self) -> str:
        """The figure that choices are made by."""
        return next(iter(self.headings))

    @property
    def score_heading(self) -> str:
        """The heading of the score in tables."""
        return self.headings[self.score]

    @property
    def score_title(self) -> str:
        """The score with its unit, for headings of columns and axes: "accuracy (%)"."""
        return f"{self.score_heading} (%)" if self.is_share else self.score_heading

    def scores(self, outcomes: Outcomes) -> dict[str, tuple[float, NDArray]]:
        """All figures, and by each the scores (M,) of the images. NaN: these images do not have it."""
        return score_images(self.figures, true_targets(outcomes), outcomes.predictions)

    def estimates(self, outcomes: Outcomes) -> dict[str, list[float]]:
        """All figures: value, and lower and upper end of the 95 % interval over test images."""
        found = {}
        for name, (value, scores) in self.scores(outcomes).items():
            ends = interval(scores, self.is_share, self.known_by(outcomes.targets))
            if name in MEANS_OVER_CLASSES and len(outcomes) < IMAGES_A_CLASS * len(np.unique(outcomes.targets)):
                ends = math.nan, math.nan
            smallest, largest = -math.inf if name == "r2" else 0, math.inf if name == "mae" else 1
            found[name] = [value, *np.clip(ends, smallest, largest).tolist()]
        return found

    def describe_baseline(self, name: str, value: float | None) -> str:
        """A baseline and its score in words: `largest class 25.0%`."""
        return f"{name} {self.text(self.score, value)}{'%' * self.is_share}"

    def rows(self, result: Mapping[str, Any]) -> list[list[str]]:
        """A row for each figure of a result: its heading, and its value with the interval."""
        figures = {self.score: [result["accuracy"], *result["interval"]]} | result.get("figures", {})
        unit = " (%)" * self.is_share
        return [[self.headings[name] + unit, self.text(name, *numbers)] for name, numbers in figures.items()]

    def text(self, name: str, value: float | None, *ends: float | None, std: float | None = None) -> str:
        """A figure with its spread and its interval, where it has these; "-": the images do not have it."""
        if pd.isna(value):  # null of a file, too
            return "-"
        spread = "" if std is None else f" ± {self.text_of_number(name, std)}"
        known = [self.text_of_number(name, end) for end in ends if pd.notna(end)]
        around = f" ({' to '.join(known)})" if len(known) == 2 else ""
        return f"{self.text_of_number(name, value)}{spread}{around}"

    def text_of_number(self, name: str, value: float) -> str:
        """A value, or an end of the interval, of a figure: a share in percent."""
        if name == "r2":
            return f"{value:.3f}"
        if self.is_share:
            return f"{100 * value:.1f}"
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")

    def text_of_scores(self, summary: Mapping[str, Any]) -> str:
        """A mean score, with its spread where there are several measurements, and its interval where it has one.

        Args:
            summary: see `summarize_accuracies`.
        """
        std = summary["std"] if summary.get("count", 2) > 1 else None
        return self.text(self.score, summary["mean"], *summary.get("interval", ()), std=std)


def true_targets(outcomes: Outcomes) -> NDArray:
    """The targets; of several right classes the predicted one, or else the first: (M,)."""
    targets, predictions = outcomes.targets, outcomes.predictions
    if targets.ndim <= predictions.ndim:
        return targets
    return np.where((predictions[:, None] == targets).any(1), predictions, targets[:, 0])


def largest_class(targets: NDArray) -> dict[str, float]:
    """The accuracy of always predicting the most frequent class."""
    return {"largest class": float(np.bincount(targets[targets >= 0]).max() / len(targets))}


def confuse_classes(outcomes: Outcomes) -> NDArray[np.int64]:
    """The confusion matrix of one class an image; as many classes as have names, and as occur."""
    classes = max(len(outcomes.class_names), 1 + int(max(outcomes.targets.max(), outcomes.predictions.max())))
    return confusion_matrix(true_targets(outcomes), outcomes.predictions, labels=np.arange(classes))


def tabulate_classes(outcomes: Outcomes) -> pd.DataFrame:
    """Recall with Wilson's interval, precision and F1 of each class."""
    confusion = confuse_classes(outcomes)
    right = confusion.diagonal()
    table = pd.DataFrame({"images": confusion.sum(1), "predicted": confusion.sum(0)}, outcomes.names(len(confusion)))
    table["right (%)"] = 100 * (right / table["images"])
    table["right (%), from"], table["right (%), to"] = (100 * end for end in wilson(right, table["images"]))
    table["precision (%)"] = 100 * (right / table["predicted"])
    table["F1 (%)"] = 100 * (2 * right / (table["images"] + table["predicted"]))
    return table


def mean_positives(targets: NDArray) -> float:
    """The harmonic mean of the numbers of images of the classes: the smallest ones vary most."""
    positives = (targets == 1).sum(0)
    return float(1 / (1 / positives[positives > 0]).mean()) if positives.any() else 1.0


def mean_frequency(targets: NDArray) -> dict[str, float]:
    """The mAP of a random order of the images: the mean share of the classes' images."""
    frequency = targets.mean(0)
    return {"any order of the images": float(frequency[frequency > 0].mean())} if targets.any() else {}


def tabulate_several(outcomes: Outcomes) -> pd.DataFrame:
    """The average precision of each class that an image has."""
    targets = outcomes.targets
    table = pd.DataFrame({"images": targets.sum(0, dtype=np.int64)}, outcomes.names(targets.shape[1]))
    columns = zip(targets.T, outcomes.predictions.T, strict=True)
    precisions = [100 * average_precision_score(*each) if each[0].any() else math.nan for each in columns]
    table["average precision (%)"] = precisions
    return table


def tabulate_pixels(outcomes: Outcomes) -> pd.DataFrame:
    """IoU of each class, with an interval where several images have it: as wide as these are few."""
    targets, predictions = outcomes.targets, outcomes.predictions
    counts = {"pixels": targets.sum(0), "predicted": predictions.sum((0, 1))}
    table = pd.DataFrame(counts, outcomes.names(targets.shape[1]))
    shares = np.full((len(table), 3), math.nan)
    for number, (iou, scores) in score_images(ious, targets, predictions).items():
        images = np.count_nonzero(targets[:, number])
        shares[number] = iou, *(interval(scores, True, images) if images > 1 else (math.nan, math.nan))
    table[["IoU (%)", "IoU (%), from", "IoU (%), to"]] = 100 * shares
    return table


def constant_pixels(targets: NDArray) -> dict[str, float]:
    """The mean IoU of predicting the most frequent class for all pixels."""
    pixels = targets.sum(0)
    return {"most frequent class": float(pixels.max() / pixels.sum() / (pixels > 0).sum())}


ONE_CLASS = LabelKind(
    "class",
    {"accuracy": "accuracy", "class_mean": "mean over classes", "macro_f1": "macro F1"},
    class_figures,
    baselines=largest_class,
    class_table=tabulate_classes,
    confusion=confuse_classes,
)
"""Targets (M,), or (M, L) of which any is right, padded with -1; predictions (M,)."""
SEVERAL = LabelKind(
    "several",
    {"macro_map": "mAP, macro", "micro_map": "mAP, micro"},
    several_figures,
    known_by=mean_positives,
    baselines=mean_frequency,
    class_table=tabulate_several,
)
"""Targets (M, C): 1, 0 and, of a missing label, -1. Predictions (M, C): larger is surer."""
NUMBER = LabelKind(
    "number",
    {"r2": "explained variance (R2)", "mae": "mean absolute error"},
    number_figures,
    is_share=False,
    baselines=lambda targets: {"always predicting the mean": 0.0},
)
"""Targets (M,), NaN where the label is missing; predictions (M,) in the same unit."""
PIXELS = LabelKind(
    "pixels",
    {"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy"},
    pixel_figures,
    lambda targets: targets.any(1),
    baselines=constant_pixels,
    class_table=tabulate_pixels,
    confusion=lambda outcomes: outcomes.predictions.sum(0),
)
"""Targets (M, C): pixels of each class. Predictions (M, C, C): of these, pixels that each class is predicted for."""
PATCHES = LabelKind("patches", {"accuracy": "accuracy"}, patch_figures, lambda targets: targets > 0)
"""Targets (M,): masked patches. Predictions (M,): the right ones of these."""
KINDS = {kind.name: kind for kind in (ONE_CLASS, SEVERAL, NUMBER, PIXELS, PATCHES)}
"""All kinds of labels by name."""


# --- results ---


def kind_of(outcomes: Outcomes) -> LabelKind:
    """The kind of label that outcomes are of."""
    return KINDS[outcomes.kind]


def kind_of_report(report: Mapping[str, Any]) -> LabelKind:
    """The kind of label of a report that was written."""
    return KINDS[report.get("labels", {}).get("kind", ONE_CLASS.name)]


def labelled_outcomes(outcomes: Outcomes) -> Outcomes:
    """The outcomes of the images that have a label. Raises UserError: none has."""
    known = kind_of(outcomes).has_target(outcomes.targets)
    if not known.any():
        raise UserError(f"none of the {len(outcomes)} test images has a label")
    return outcomes if known.all() else outcomes.select(known)


def score_of(outcomes: Outcomes) -> float:
    """The figure that choices are made by, such as accuracy: more is better."""
    return result_entries(outcomes)["accuracy"]


def image_scores(outcomes: Outcomes) -> NDArray[np.float64]:
    """The score of every image that has a label, (M,), whose mean is the score: of one class, whether it is right."""
    kind = kind_of(outcomes)
    return kind.scores(labelled_outcomes(outcomes))[kind.score][1]


def best_choice(scores: dict[Any, float]) -> Any:
    """The choice with the largest score, the first of equal ones; one whose score is not known (NaN) comes last."""
    return max(scores, key=lambda choice: rank_of(scores[choice]))


def rank_of(score: float | None) -> float:
    """A score as choices compare it: one that is not known (NaN; null of a file) is below all others."""
    return -math.inf if pd.isna(score) else score


def add_figures(results: Sequence[Result]) -> list[Result]:
    """The results with their score, its interval and the other figures; those without outcomes as they are."""
    return [result | result_entries(result["outcomes"]) if "outcomes" in result else result for result in results]


def result_entries(outcomes: Outcomes) -> Result:
    """Entries of a result: `accuracy` (the score), `interval`, and `figures`: name -> [value, low, high]."""
    kind = kind_of(outcomes)
    figures = kind.estimates(labelled_outcomes(outcomes))
    score, *ends = figures.pop(kind.score)
    return {"accuracy": score, "interval": ends} | ({"figures": figures} if figures else {})


def describe_labels(outcomes: Outcomes) -> dict[str, Any]:
    """The entry `labels` of a report: kind, number of test images, unlabelled ones, names of classes, baselines."""
    known = labelled_outcomes(outcomes)
    return {
        "kind": outcomes.kind,
        "images": len(known),
        "unlabelled": len(outcomes) - len(known),
        "class_names": list(outcomes.class_names),
        "baselines": kind_of(outcomes).baselines(known.targets),
    }


def without_nan(value: Any) -> Any:
    """A value as JSON has it: null instead of NaN, a figure that the images do not have; and plain numbers."""
    return json.loads(json.dumps(value, default=lambda each: each.tolist()), parse_constant=lambda name: None)


# --- the result that is shown in detail ---


def shown_result(report: dict[str, Any]) -> dict[str, Any] | None:
    """The result whose figures are shown in detail, the first one at the report's depth; None: none kept outcomes.

    Test images have no part in the choice: it is that of 20 neighbours, that of the most shots, or the first, which of
    masked patches is the model's.
    """
    chosen = report.get("protocol", {}).get("chosen_depth")
    kept = [each for each in report["results"] if "outcomes" in each and each.get("depth", chosen) == chosen]
    return max(kept, key=lambda each: (each.get("neighbours") == USUAL_NEIGHBOURS, each.get("shots", 0)), default=None)


# --- summaries ---


def summarize_accuracies(results: Sequence[Result], group_by: str) -> dict[str, dict[str, Any]]:
    """Summaries of the accuracies that share a value of `group_by`, or of `case`: see `summarize_values`.

    With `interval`, over test images and draws, where the results have one.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        name = str(result["case"] if "case" in result else result[group_by])
        groups.setdefault(name, []).append(result)
    summaries = {}
    for name, of_case in groups.items():
        ends = interval_over_draws(of_case)
        summary = summarize_values([result["accuracy"] for result in of_case])
        summaries[name] = summary | ({"interval": ends} if ends else {})
    return summaries


def interval_over_draws(results: Sequence[Result]) -> list[float] | None:
    """The 95 % interval of a mean over draws, or seeds, tested on the same images; None: one result has none.

    The mean of their intervals, widened by the error of the mean over draws: the two add up in squares.
    """
    if not all("interval" in result for result in results):
        return None
    figures = np.array([[result["accuracy"], *result["interval"]] for result in results], float)
    value, low, high = figures.mean(0).tolist()
    of_mean = interval(figures[:, 0], False, len(figures))[1] - value
    ends = value - math.hypot(value - low, of_mean), value + math.hypot(high - value, of_mean)
    return [max(ends[0], min(low, 0.0)), min(ends[1], 1.0)]


def summarize_values(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (by n - 1; 0 of one value) and number of some values; null of a file is NaN."""
    numbers = np.array(values, float)
    spread = float(numbers.std(ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(numbers.mean()), "std": spread, "count": len(values)}


def evenly_spaced(length: int, count: int) -> NDArray[np.int64]:
    """So many indices of a sequence, evenly spaced from the first to the last; all where there are no more."""
    return np.linspace(0, length - 1, min(count, length)).astype(int)
