"""Tables of predictions where an image has several classes, or a number.

n images, K outputs of the classifier.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from evaluation.metrics.scoring import Outcomes
from evaluation.predictions.classes import PROBABILITY_PREFIX, ClassRows
from evaluation.predictions.summary import COLUMNS_OF_ALL, TableImages, figures_entry
from evaluation.tables.images import first_columns
from evaluation.tables.parts import read_columns
from mpp.data.dataset import ImageDataset, has_label
from mpp.data.labels import SEPARATOR
from mpp.runtime.messages import shortened, warn

NUMBER_COLUMN = "number"
"""Name of the column of predicted numbers."""
THRESHOLD = 0.5  # of the probability of a class that is named


class OutputRows(ClassRows, ABC):
    """The rows of images whose figures need all outputs of the classifier, and not only the likeliest class."""

    @abstractmethod
    def output_columns(self) -> list[str]:
        """The columns of the table with the outputs; none: the table does not have them."""

    @abstractmethod
    def targets(self, splits: Sequence[ImageDataset]) -> list[NDArray | None]:
        """The labels of each split, as the kind of label has them; None: a split has none."""

    def predictions(self, outputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Outputs (n, K) as the kind of label has predictions."""
        return outputs


class SeveralRows(OutputRows):
    """The rows of images with several classes: the classes of a probability above a half, and all probabilities."""

    def build_table(
        self, logits: Tensor, errors: Sequence[str | None], images: ImageDataset, indices: range
    ) -> pa.Table:
        is_unreadable = np.array([error is not None for error in errors])
        probabilities = logits.double().sigmoid().float().numpy()
        names = np.array(self.classifier.class_names, object)
        joined = [SEPARATOR.join(names[row]) for row in probabilities > THRESHOLD]
        columns = first_columns(images, indices, self.folder)
        columns["classes"] = pa.array(joined, pa.string(), mask=is_unreadable)
        if self.labelled:
            columns["label"] = pa.array(joined_labels(images, indices), pa.string())
        columns["error"] = pa.array(errors, pa.string())
        for name, of_class in zip(self.output_columns(), probabilities.T, strict=False):
            columns[name] = pa.array(of_class, mask=is_unreadable)
        return pa.table(columns)

    def output_columns(self) -> list[str]:
        names = self.classifier.class_names if self.probabilities else []
        return [f"{PROBABILITY_PREFIX}{name}" for name in names]

    def targets(self, splits: Sequence[ImageDataset]) -> list[NDArray | None]:
        return marks_of_splits(splits, self.classifier.class_names)


class NumberRows(OutputRows):
    """The rows of images with a number."""

    def build_table(
        self, logits: Tensor, errors: Sequence[str | None], images: ImageDataset, indices: range
    ) -> pa.Table:
        is_unreadable = np.array([error is not None for error in errors])
        columns = first_columns(images, indices, self.folder)
        columns[NUMBER_COLUMN] = pa.array(logits.squeeze(1).numpy(), mask=is_unreadable)
        if self.labelled:
            labels = np.full(len(images), np.nan) if images.labels is None else images.labels
            of_rows = labels[indices.start : indices.stop]
            columns["label"] = pa.array(of_rows, pa.float64(), mask=~has_label(of_rows))
        columns["error"] = pa.array(errors, pa.string())
        return pa.table(columns)

    def output_columns(self) -> list[str]:
        return [NUMBER_COLUMN]

    def targets(self, splits: Sequence[ImageDataset]) -> list[NDArray | None]:
        return [images.labels for images in splits]

    def predictions(self, outputs: NDArray[np.float64]) -> NDArray[np.float64]:
        return outputs[:, 0]


def joined_labels(images: ImageDataset, indices: range) -> list[str | None]:
    """The labels of the images at these indices, with `;` between the classes; None: missing."""
    if images.labels is None:
        return [None] * len(indices)
    names = np.array(images.class_names, object)
    marks = images.labels[indices.start : indices.stop]
    return [SEPARATOR.join(names[row == 1]) if row[0] >= 0 else None for row in marks]


def marks_of_splits(splits: Sequence[ImageDataset], class_names: Sequence[str]) -> list[NDArray | None]:
    """Whether each image of each split is of each class of a classifier; a warning names classes that it lacks."""
    targets: list[NDArray | None] = []
    unknown: dict[str, None] = {}
    for images in splits:
        if images.labels is None:
            targets.append(None)
            continue
        places = {name: number for number, name in enumerate(images.class_names)}
        unknown |= dict.fromkeys(name for name in images.class_names if name not in class_names)
        known = [images.labels[:, places[name]] if name in places else np.zeros(len(images)) for name in class_names]
        marks = np.stack(known, 1).astype(np.int8)
        marks[~has_label(images.labels)] = -1
        targets.append(marks)
    if unknown:
        warn(f"the classifier does not know {shortened([*unknown])}: left out of the figures")
    return targets


ROWS: dict[str, type[ClassRows]] = {"class": ClassRows, "several": SeveralRows, "number": NumberRows}
"""The rows of a table by kind of label."""


@dataclass
class OtherPredictions:
    """The values of a table's rows that a summary needs, in its order."""

    outputs: NDArray[np.float64]
    """(n, K): probabilities, or the number; NaN where an image cannot be decoded, or the table has no such columns."""
    unreadable_count: int
    splits: dict[str, slice]
    unreadable_files: list[tuple[str, str]]
    """Files that cannot be decoded, and why: the first of them."""

    def summarize(self, outcomes: Mapping[str, Outcomes]) -> dict[str, Any]:
        """Images, unreadable ones, and figures of each split's outcomes."""
        return {"images": len(self.outputs), "unreadable": self.unreadable_count} | figures_entry(outcomes)


def read_outputs(out: Path, names: Sequence[str]) -> OtherPredictions:
    """Read a table of predictions.

    Args:
        names: of the columns of outputs.
    """
    outputs = []
    images = TableImages()
    for batch in read_columns(out, COLUMNS_OF_ALL | dict.fromkeys(names, pa.float32())):
        images.add(batch)
        numbers = [batch.column(name).cast(pa.float64()).fill_null(np.nan).to_numpy(False) for name in names]
        outputs.append(np.stack(numbers, 1) if names else np.full((len(batch), 1), np.nan))
    return OtherPredictions(np.concatenate(outputs), images.unreadable_count, images.splits(), images.unreadable_files)


def outcomes_of_splits(
    predicted: OtherPredictions, splits: Sequence[ImageDataset], rows: OutputRows
) -> dict[str, Outcomes]:
    """The outcomes of the images of each split that have a label and a prediction, where there are some."""
    classifier = rows.classifier
    outcomes = {}
    for (split, of_split), true in zip(predicted.splits.items(), rows.targets(splits), strict=True):
        if true is None:
            continue
        outputs = predicted.outputs[of_split]
        known = np.isfinite(outputs).all(1) & has_label(true)
        if known.any():
            predictions = rows.predictions(outputs[known])
            outcomes[split] = Outcomes(classifier.label_kind, true[known], predictions, classifier.class_names)
    return outcomes
