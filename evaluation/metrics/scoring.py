"""Outcomes become results: targets and predictions of test images, kinds of labels, figures, intervals and summaries.

A result is a dict of a report. An evaluation puts `outcomes` (an `Outcomes`) into it; `add_figures` adds `accuracy`
(the score), `interval` and `figures`; `keep_outcomes` writes the outcomes next to the report. M test images, C classes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, confusion_matrix
from torch import Tensor

from evaluation.metrics.intervals import (
    Figures,
    Interval,
    class_figures,
    has_pixels,
    interval,
    ious,
    most_frequent,
    number_figures,
    pixel_figures,
    score_images,
    several_figures,
    wilson,
)
from mpp.data.dataset import has_label
from mpp.errors import NPZ_ERRORS, UserError
from mpp.runtime.files import complete
from mpp.runtime.messages import printable

Result = dict[str, Any]
MEANS_OVER_CLASSES = ("class_mean", "macro_f1")
BOUNDS = {"r2": (-math.inf, 1.0), "mae": (0.0, math.inf)}
KEYS_OF_A_RESULT = ("case", "shots", "neighbours", "solver", "lr", "seed", "depth")
"""Entries of a result that name it, where it has them."""
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
        known = [printable(name) for name in self.class_names[:classes]]
        return known + [f"class {number}" for number in range(len(known), classes)]


def outcomes_path(report: Path) -> Path:
    """The file of a report's outcomes."""
    return report.with_name(f"{report.stem}.outcomes.npz")


def save_outcomes(report: Path, outcomes: Sequence[Outcomes]) -> Path:
    """Write the outcomes of a report's results next to it; all have the same images and targets.

    The results know theirs by number (`outcomes` in a result).
    """
    first = outcomes[0]
    texts = {"class_names": np.array(list(first.class_names), str), "images": np.array(list(first.images), str)}
    predictions = {f"predictions_{number}": each.predictions for number, each in enumerate(outcomes)}
    path = outcomes_path(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial, partial.open("wb") as file:
        np.savez_compressed(file, kind=np.array(first.kind), targets=first.targets, **texts, **predictions)
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


# --- figures by class ---


@dataclass(frozen=True)
class ClassTable:
    """Figures of C classes."""

    names: Sequence[str]
    counts: dict[str, NDArray[np.int64]]
    """Heading -> number of images or pixels of each class, (C,)."""
    shares: dict[str, NDArray[np.float64]]
    """Heading -> share of each class, (C,); NaN: the class has none. The first is the `score`."""
    intervals: NDArray[np.float64] | None = None
    """Of the score, (C, 2)."""

    @property
    def score(self) -> str:
        """Heading of the share that says how well classes are recognised."""
        return next(iter(self.shares))

    def select(self, classes: NDArray[np.int64]) -> "ClassTable":
        """The table of these classes, by their places."""
        return ClassTable(
            [self.names[place] for place in classes],
            {heading: counts[classes] for heading, counts in self.counts.items()},
            {heading: shares[classes] for heading, shares in self.shares.items()},
            None if self.intervals is None else self.intervals[classes],
        )

    def worst(self, number: int) -> "ClassTable":
        """All classes, or of more than so many those that are recognised worst; one without a share is better."""
        if len(self.names) <= number:
            return self
        return self.select(np.argsort(self.shares[self.score], kind="stable")[:number])

    def columns(self) -> dict[str, list[str]]:
        """Heading -> cells, which programs read as numbers: an interval has two columns behind its share."""
        columns = {"class": list(self.names)}
        for heading, counts in self.counts.items():
            columns[heading] = [str(count) for count in counts]
        for heading, shares in self.shares.items():
            columns[f"{heading} (%)"] = [in_percent(share) or "-" for share in shares]
            if self.intervals is not None and heading == self.score:
                columns[f"{heading} (%), from"] = [in_percent(low) for low in self.intervals[:, 0]]
                columns[f"{heading} (%), to"] = [in_percent(high) for high in self.intervals[:, 1]]
        return columns

    def text(self) -> tuple[list[str], list[list[str]]]:
        """Headings, and a row for each class, with its interval in brackets."""
        columns = self.columns()
        if self.intervals is not None:
            score = f"{self.score} (%)"
            cells = zip(columns[score], columns.pop(f"{score}, from"), columns.pop(f"{score}, to"), strict=True)
            columns[score] = [f"{share} ({low} to {high})" if low else share for share, low, high in cells]
        return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def in_percent(share: float) -> str:
    """A share in percent; "": it is not known."""
    return "" if math.isnan(share) else f"{100 * share:.1f}"


# --- kinds of labels ---


class Estimate(NamedTuple):
    """A figure of test images with its interval."""

    value: float
    interval: Interval
    """95 % over test images."""


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
    class_table: Callable[[Outcomes], ClassTable | None] = lambda outcomes: None
    """Figures by class."""
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
    def sign(self) -> str:
        """Behind a score in a sentence: "%", or nothing."""
        return "%" if self.is_share else ""

    @property
    def score_title(self) -> str:
        """The score with its unit, for headings of columns and axes: "accuracy (%)"."""
        return f"{self.score_heading} (%)" if self.is_share else self.score_heading

    @property
    def factor(self) -> int:
        """Plots and tables have scores times this."""
        return 100 if self.is_share else 1

    def measure(self, outcomes: Outcomes) -> dict[str, float]:
        """All figures, by name. NaN: these images do not have it."""
        weights = torch.ones(len(outcomes), dtype=torch.float64)
        return {name: float(value) for name, value in self.figures(weights, *tensors(outcomes)).items()}

    def scores(self, outcomes: Outcomes) -> dict[str, tuple[float, NDArray]]:
        """All figures, and by each the scores (M,) of the images."""
        pair = tensors(outcomes)
        return score_images(lambda weights: self.figures(weights, *pair), len(outcomes))

    def estimates(self, outcomes: Outcomes) -> dict[str, Estimate]:
        """All figures with their intervals."""
        found = {}
        for name, (value, scores) in self.scores(outcomes).items():
            low, high = interval(scores, self.is_share, self.known_by(outcomes.targets))
            least, most = BOUNDS.get(name, (-math.inf, math.inf))
            found[name] = Estimate(value, (max(low, least), min(high, most)))
            if name in MEANS_OVER_CLASSES and len(outcomes) < IMAGES_A_CLASS * len(np.unique(outcomes.targets)):
                found[name] = Estimate(value, (math.nan, math.nan))
        return found

    def describe_baseline(self, name: str, value: float | None) -> str:
        """A baseline and its score in words: `largest class 25.0%`."""
        return f"{name} {self.text(self.score, value)}{self.sign}"

    def text(self, name: str, value: float | None, low: float | None = None, high: float | None = None) -> str:
        """A figure with its interval, as tables have it; "-": these images do not have it."""
        if value is None or math.isnan(value):
            return "-"
        text = self.text_of_number(name, value)
        if low is None or high is None or math.isnan(low + high):
            return text
        return f"{text} ({self.text_of_number(name, low)} to {self.text_of_number(name, high)})"

    def text_of_number(self, name: str, value: float) -> str:
        """A value, or an end of the interval, of a figure: a share in percent."""
        if name == "r2":
            return f"{value:.3f}"
        return f"{100 * value:.1f}" if self.is_share else three_digits(value)

    def text_of_scores(self, summary: Mapping[str, Any]) -> str:
        """A mean score, with its spread where there are several measurements, and its interval where it has one.

        Args:
            summary: see `summarize_accuracies`.
        """
        mean = self.text(self.score, summary["mean"])
        whole = self.text(self.score, summary["mean"], *summary.get("interval", ()))
        if mean == "-" or summary.get("count", 2) == 1:
            return whole
        return f"{mean} ± {self.text_of_number(self.score, summary['std'])}{whole.removeprefix(mean)}"


def three_digits(value: float) -> str:
    """A number with three significant digits, and all digits before the point: 0.00123, 12.3, 12346."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def tensors(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
    """Targets and predictions (M, ...)."""
    return torch.as_tensor(true_targets(outcomes)), torch.as_tensor(outcomes.predictions)


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


def tabulate_classes(outcomes: Outcomes) -> ClassTable:
    """Recall with Wilson's interval, precision and F1 of each class."""
    confusion = confuse_classes(outcomes)
    true, predicted, right = confusion.sum(1), confusion.sum(0), confusion.diagonal()
    with np.errstate(invalid="ignore"):  # of a class without images
        shares = {"right": right / true, "precision": right / predicted, "F1": 2 * right / (true + predicted)}
    intervals = [wilson(*each) if each[1] else (math.nan, math.nan) for each in zip(right, true, strict=True)]
    return ClassTable(outcomes.names(len(true)), {"images": true, "predicted": predicted}, shares, np.array(intervals))


def mean_positives(targets: NDArray) -> float:
    """The harmonic mean of the numbers of images of the classes: the smallest ones vary most."""
    positives = targets.sum(0)
    return float(1 / (1 / positives[positives > 0]).mean()) if positives.any() else 1.0


def mean_frequency(targets: NDArray) -> dict[str, float]:
    """The mAP of a random order of the images: the mean share of the classes' images."""
    frequency = targets.mean(0)
    present = frequency[frequency > 0]
    return {"any order of the images": float(present.mean())} if len(present) else {}


def tabulate_several(outcomes: Outcomes) -> ClassTable:
    """The average precision of each class that an image has."""
    targets, predictions = outcomes.targets, outcomes.predictions
    precisions = np.full(targets.shape[1], np.nan)
    for number in np.flatnonzero(targets.any(0)):
        precisions[number] = average_precision_score(targets[:, number], predictions[:, number])
    counts = {"images": targets.sum(0, dtype=np.int64)}
    return ClassTable(outcomes.names(len(precisions)), counts, {"average precision": precisions})


def patches_figures(weights: Tensor, targets: Tensor, predictions: Tensor) -> Figures:
    """Accuracy of the masked patches of all images together, by their numbers (M,) and those of right ones."""
    return {"accuracy": (weights * predictions).sum() / (weights * targets).sum()}


def tabulate_pixels(outcomes: Outcomes) -> ClassTable:
    """IoU of each class, with an interval where several images have it: as wide as these are few."""
    predictions = torch.as_tensor(outcomes.predictions).double()
    estimates = score_images(lambda weights: ious(torch.tensordot(weights, predictions, 1)), len(outcomes))
    classes = outcomes.targets.shape[1]
    shares, intervals = np.full(classes, np.nan), np.full((classes, 2), np.nan)
    having = (outcomes.targets > 0).sum(0).tolist()  # images of each class
    for name, (iou, scores) in estimates.items():
        shares[int(name)] = iou
        if having[int(name)] > 1:
            intervals[int(name)] = interval(scores, is_share=True, count=having[int(name)])
    counts = {"pixels": outcomes.targets.sum(0), "predicted": confuse_pixels(outcomes).sum(0)}
    return ClassTable(outcomes.names(classes), counts, {"IoU": shares}, intervals)


def confuse_pixels(outcomes: Outcomes) -> NDArray[np.int64]:
    """Pixels of each class (rows) that each class (columns) is predicted for: (C, C)."""
    return outcomes.predictions.sum(0)


ONE_CLASS = LabelKind(
    "class",
    {"accuracy": "accuracy", "class_mean": "mean over classes", "macro_f1": "macro F1"},
    class_figures,
    lambda targets: (targets >= 0).reshape(len(targets), -1).any(1),
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
    has_pixels,
    baselines=most_frequent,
    class_table=tabulate_pixels,
    confusion=confuse_pixels,
)
PATCHES = LabelKind("patches", {"accuracy": "accuracy"}, patches_figures, lambda targets: targets > 0)
KINDS = {kind.name: kind for kind in (ONE_CLASS, SEVERAL, NUMBER, PIXELS, PATCHES)}
"""All kinds of labels by name."""


# --- results ---


def kind_of(outcomes: Outcomes) -> LabelKind:
    """The kind of label that outcomes are of."""
    return KINDS[outcomes.kind]


def kind_of_results(results: Sequence[Result]) -> LabelKind:
    """The kind of label that results are of, before a report is written; one class where they kept no outcomes."""
    kinds = [kind_of(result["outcomes"]) for result in results if isinstance(result.get("outcomes"), Outcomes)]
    return kinds[0] if kinds else ONE_CLASS


def kind_of_report(report: Mapping[str, Any]) -> LabelKind:
    """The kind of label of a report that was written."""
    return KINDS[report.get("labels", {}).get("kind", ONE_CLASS.name)]


def kind_of_score(heading: str | None) -> LabelKind:
    """The kind of label whose score tables call so; None, or a name from elsewhere: one class."""
    return next((kind for kind in KINDS.values() if kind.score_heading == heading), ONE_CLASS)


def labelled_outcomes(outcomes: Outcomes) -> Outcomes:
    """The outcomes of the images that have a label. Raises UserError: none has."""
    known = kind_of(outcomes).has_target(outcomes.targets)
    if not known.any():
        raise UserError(f"none of the {len(outcomes)} test images has a label")
    return outcomes if known.all() else outcomes.select(known)


def score_of(outcomes: Outcomes) -> float:
    """The figure that choices are made by, such as accuracy: more is better."""
    kind = kind_of(outcomes)
    return kind.measure(labelled_outcomes(outcomes))[kind.score]


def image_scores(outcomes: Outcomes) -> NDArray[np.float64]:
    """The score of every image that has a label, (M,), whose mean is the score: of one class, whether it is right."""
    kind = kind_of(outcomes)
    return kind.scores(labelled_outcomes(outcomes))[kind.score][1]


def best_choice(scores: dict[Any, float]) -> Any:
    """The choice with the largest score, the first of equal ones; one whose score is not known (NaN) comes last."""
    return max(scores, key=lambda choice: rank_of(scores[choice]))


def rank_of(score: float | None) -> float:
    """A score as choices compare it: one that is not known (NaN; null of a file) is below all others."""
    return -math.inf if score is None or math.isnan(score) else score


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
    estimates = kind.estimates(labelled_outcomes(outcomes))
    value, ends = estimates.pop(kind.score)
    entries: Result = {"accuracy": value, "interval": list(ends)}
    others = {name: [each.value, *each.interval] for name, each in estimates.items()}
    return entries | {"figures": others} if others else entries


def keep_outcomes(report: Path, results: Sequence[Result]) -> list[Result]:
    """Write the outcomes next to a report: a result then has their number in the file instead of them."""
    kept: list[Outcomes] = []
    numbered = []
    for result in results:
        if "outcomes" in result:
            kept.append(result["outcomes"])
            result = result | {"outcomes": len(kept) - 1}
        numbered.append(result)
    if kept:
        save_outcomes(report, kept)
    return numbered


def without_outcomes(results: Sequence[Result]) -> list[Result]:
    """The results with only their figures, for a report whose outcomes are not kept."""
    return [{key: value for key, value in result.items() if key != "outcomes"} for result in results]


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
    """A value as JSON has it: null instead of NaN, a figure that the images do not have; plain numbers of numpy's."""
    return json.loads(json.dumps(value, default=lambda each: each.item()), parse_constant=lambda name: None)


# --- the result that is shown in detail ---


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


# --- summaries ---


def summarize_accuracies(results: Sequence[Result], group_by: str) -> dict[str, dict[str, Any]]:
    """Summaries of the accuracies that share a value of `group_by`, or of `case`: see `summarize_values`.

    With `interval`, over test images, where the results have one.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        name = str(result.get("case", result[group_by]))
        groups.setdefault(name, []).append(result)
    summaries = {}
    for name, of_case in groups.items():
        summaries[name] = summarize_values([result["accuracy"] for result in of_case])
        ends = mean_interval(of_case)
        if ends is not None:
            summaries[name]["interval"] = ends
    return summaries


def mean_interval(results: Sequence[Result]) -> list[float] | None:
    """The interval of a mean over seeds, tested on the same images: the means of the ends; None: one has none."""
    if not all("interval" in result for result in results):
        return None
    return np.mean(np.array([result["interval"] for result in results], float), 0).tolist()


def summarize_values(values: Sequence[float]) -> dict[str, Any]:
    """Mean, (population) standard deviation and number of some values; null of a file is NaN."""
    numbers = np.array(values, float)
    return {"mean": float(numbers.mean()), "std": float(numbers.std()), "count": len(values)}


def evenly_spaced(length: int, count: int) -> NDArray[np.int64]:
    """So many indices of a sequence, evenly spaced from the first to the last; all where there are no more."""
    return np.linspace(0, length - 1, min(count, length)).astype(int)
