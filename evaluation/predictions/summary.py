"""The summary of a table of predictions: images and mean probability by class, accuracy by split, unreadable images."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evaluation.figures.markdown import markdown_table
from evaluation.frozen.results import MAX_CLASSES_PRINTED, print_by_class
from evaluation.metrics.scoring import Outcomes, kind_of, result_entries
from evaluation.tables.images import MAX_UNREADABLE_NAMED
from evaluation.tables.parts import read_columns
from mpp.runtime.messages import counted, warn

SHARE_PREFIX = "share_"
"""Of the columns of masks with the share of the pixels of each class; the class's name follows."""
NO_CLASS = -1  # of an image that cannot be decoded
NO_LABEL = -1
COLUMNS_OF_ALL = {"file": pa.string(), "split": pa.string(), "error": pa.string()}
"""Columns that every table has: those that `TableImages` reads."""


class TableImages:
    """The images of a table, collected batch by batch: those of each split, and those that cannot be decoded."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        """Of the images of each split."""
        self.unreadable_count = 0
        self.unreadable_files: list[tuple[str, str]] = []
        """Files that cannot be decoded, and why: the first of them."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the images of some more rows."""
        self.counts.update(batch.column("split").to_pylist())
        failed = batch.filter(batch.column("error").is_valid()).select(["file", "error"]).to_pylist()
        self.unreadable_count += len(failed)
        more = MAX_UNREADABLE_NAMED - len(self.unreadable_files)
        self.unreadable_files += [(row["file"], row["error"]) for row in failed[:more]]

    def splits(self) -> dict[str, slice]:
        """The rows of each split, which come one after the other."""
        first = 0
        rows = {}
        for name, count in self.counts.items():
            rows[name] = slice(first, first + count)
            first += count
        return rows


@dataclass
class Predictions:
    """The values of a table's rows that a page and a summary need, in its order: n images."""

    class_names: list[str]
    classes: NDArray[np.int32]
    """(n,) number of the likeliest class; NO_CLASS: the image cannot be decoded."""
    probabilities: NDArray[np.float32]
    """(n,) of that class."""
    right: NDArray[np.int8]
    """(n,) whether the label is that class, 1 or 0; NO_LABEL: it has none, or the image cannot be decoded."""
    splits: dict[str, slice] = field(default_factory=dict)
    """The rows of each split."""
    unreadable_files: list[tuple[str, str]] = field(default_factory=list)
    """Files that cannot be decoded, and why: the first of them."""
    shares: dict[str, float] = field(default_factory=dict)
    """Of masks: the mean share of the pixels of each class."""
    class_numbers: list[int] = field(default_factory=list)
    """Of masks: the number of each class in their files."""
    labels: pa.ChunkedArray | None = None
    """(n,) the labels as the table has them; None: it has none."""

    def summarize(self, outcomes: Mapping[str, Outcomes]) -> dict[str, Any]:
        """Images, unreadable ones, images and mean probability by predicted class, and figures of each split."""
        summary: dict[str, Any] = {
            "images": len(self.classes),
            "unreadable": int((self.classes == NO_CLASS).sum()),
            "predicted": count_predicted(self),
        }
        if self.shares:
            summary["shares"] = self.shares
        return summary | figures_entry(outcomes)


def read_predictions(
    out: Path, class_names: Sequence[str], labelled: bool = False, class_numbers: Sequence[int] = ()
) -> Predictions:
    """Read a table of predictions.

    Args:
        labelled: whether it has labels.
        class_numbers: of a table of masks, those of the classes in the files of masks.
    """
    columns = COLUMNS_OF_ALL | {"class": pa.string(), "probability": pa.float32()}
    of_pixels = len(class_numbers) > 0
    if labelled:
        columns |= {"right": pa.bool_(), "label": pa.string()}
    if of_pixels:
        columns |= {f"{SHARE_PREFIX}{name}": pa.float32() for name in class_names}
    share_sums: Counter[str] = Counter()
    names = pa.array(class_names, pa.string())
    classes, probabilities, right, labels = [], [], [], []
    images = TableImages()
    for batch in read_columns(out, columns):
        images.add(batch)
        numbers = pc.index_in(batch.column("class"), names).fill_null(NO_CLASS)
        classes.append(numbers.to_numpy(zero_copy_only=False).astype(np.int32))
        probabilities.append(batch.column("probability").fill_null(0).to_numpy(zero_copy_only=False))
        if labelled:
            known = batch.column("right").cast(pa.int8()).fill_null(NO_LABEL)
            right.append(known.to_numpy(zero_copy_only=False))
            labels.append(batch.column("label").dictionary_encode())
        if of_pixels:
            share_sums.update(
                {name: pc.sum(batch.column(f"{SHARE_PREFIX}{name}")).as_py() or 0 for name in class_names}
            )
    numbers = np.concatenate(classes)
    segmented = max(1, int((numbers != NO_CLASS).sum()))
    return Predictions(
        class_names=list(class_names),
        classes=numbers,
        probabilities=np.concatenate(probabilities),
        right=np.concatenate(right) if labelled else np.full(len(numbers), NO_LABEL, np.int8),
        splits=images.splits(),
        unreadable_files=images.unreadable_files,
        shares={name: total / segmented for name, total in share_sums.items()},
        class_numbers=list(class_numbers),
        labels=pa.chunked_array(labels) if labelled else None,
    )


def outcomes_by_split(
    predictions: Predictions, targets: NDArray[np.int64], names: Sequence[str]
) -> dict[str, Outcomes]:
    """The outcomes of the images of each split that have a label and can be decoded, where there are some.

    Args:
        targets, names: see `match_labels`.
    """
    outcomes = {}
    for split, rows in predictions.splits.items():
        predicted, true = predictions.classes[rows].astype(np.int64), targets[rows]
        known = (predicted != NO_CLASS) & (true >= 0).any(1)
        if known.any():
            true = true[known]
            outcomes[split] = Outcomes("class", true[:, 0] if true.shape[1] == 1 else true, predicted[known], names)
    return outcomes


def figures_entry(outcomes: Mapping[str, Outcomes]) -> dict[str, Any]:
    """The entry `figures` of a summary, by split; empty where there are no outcomes."""
    figures = {split: result_entries(of_split) | {"images": len(of_split)} for split, of_split in outcomes.items()}
    return {"figures": figures} if figures else {}


def describe_figures(outcomes: Mapping[str, Outcomes], summary: Mapping[str, Any]) -> Iterator[str]:
    """The figures of each split with labels, with their 95 % intervals, in a line.

    Args:
        summary: has them: see `figures_entry`.
    """
    for split, of_split in outcomes.items():
        kind = kind_of(of_split)
        entry = summary["figures"][split]
        figures = {kind.score: [entry["accuracy"], *entry["interval"]]} | entry.get("figures", {})
        parts = [f"{kind.headings[name]} {kind.text(name, *numbers)}" for name, numbers in figures.items()]
        unit = f" ({kind.sign})" if kind.sign else ""
        yield f"{split}, {counted(len(of_split), 'labelled image')}{unit}: {', '.join(parts)}"


def count_predicted(predictions: Predictions) -> dict[str, dict[str, float]]:
    """Images and mean probability of each predicted class, the most frequent first."""
    known = predictions.classes != NO_CLASS
    classes = predictions.classes[known]
    number = len(predictions.class_names)
    counts = np.bincount(classes, minlength=number)
    sums = np.bincount(classes, predictions.probabilities[known], minlength=number)
    counted = {}
    for index in np.argsort(-counts, kind="stable").tolist():
        if counts[index]:
            mean = float(sums[index] / counts[index])
            counted[predictions.class_names[index]] = {"images": int(counts[index]), "probability": mean}
    return counted


def largest_shares(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    """The classes of pixels with their shares, the largest first."""
    return sorted(shares.items(), key=lambda each: -each[1])


def describe_unreadable(count: int) -> str:
    """The number of images without a prediction, in words."""
    verb = "has" if count == 1 else "have"
    return f"{counted(count, 'image')} cannot be decoded, and {verb} no prediction"


def print_summary(
    summary: Mapping[str, Any], outcomes: Mapping[str, Outcomes], unreadable_files: Sequence[tuple[str, str]]
) -> None:
    """Print the predicted classes where the summary has them, the figures of each split, and the unreadable images."""
    if "predicted" in summary:
        print_predicted(summary)
    for line in describe_figures(outcomes, summary):
        print(line)
    if unreadable_files:
        named = "; ".join(f"{file}: {reason}" for file, reason in unreadable_files)
        more = summary["unreadable"] - len(unreadable_files)
        rest = f"; and {more} more" if more > 0 else ""
        warn(f"{describe_unreadable(summary['unreadable'])}: {named}{rest}")


def print_predicted(summary: Mapping[str, Any]) -> None:
    """Print the images of each predicted class; of masks the shares of pixels."""
    if "shares" in summary:
        headings = ["class", "share of pixels (%)"]
        rows = [[name, f"{100 * share:.1f}"] for name, share in largest_shares(summary["shares"])]
    else:
        headings = ["class", "images", "mean probability"]
        rows = []
        for name, of_class in summary["predicted"].items():
            rows.append([name, str(of_class["images"]), f"{of_class['probability']:.2f}"])
    print(markdown_table(headings, rows[:MAX_CLASSES_PRINTED]))
    if len(rows) > MAX_CLASSES_PRINTED:
        print(f"and {len(rows) - MAX_CLASSES_PRINTED} more classes")


def print_classes(outcomes: Mapping[str, Outcomes]) -> None:
    """Print the table by class of each split with labels; of many classes those that are recognised worst."""
    for split, of_split in outcomes.items():
        print_by_class(kind_of(of_split).class_table(of_split), heading=f"{split}: class")
