"""The columns of a table of predictions where an image has one class.

n images, C classes, K of them named for each image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from evaluation.config import ProbeDataConfig
from evaluation.frozen.run_images import LoadedSplits
from evaluation.supervision.classifiers import Classifier, FrozenClassifier
from evaluation.tables.images import first_columns, read_crops
from mpp.data.dataset import ImageDataset
from mpp.runtime.messages import shortened, warn

PROBABILITY_PREFIX = "p_"
"""Of the columns with the probability of each class; the class's name follows."""


@dataclass(frozen=True)
class ClassRows:
    """The rows of images in a table: class by name and probability, the next likely ones, and the label."""

    classifier: Classifier
    network: FrozenClassifier
    data: ProbeDataConfig
    top: int
    probabilities: bool
    labelled: bool
    """Whether the images have labels that are classes of the classifier."""
    folder: Path | None
    """Folder of the images: see `folder_of`."""
    accelerator: Accelerator

    def rows(self, images: ImageDataset, indices: range, on_images: Callable[[int], Any]) -> pa.Table:
        """The rows of the images at these indices.

        Args:
            on_images: is told how many more are done.
        """
        logits, errors = [], []
        for batch in read_crops(images, self.data, self.classifier.img_size, indices):
            with self.accelerator.autocast():
                logits.append(self.network(batch.pixels.to(self.accelerator.device)).cpu())
            errors += batch.errors
            on_images(len(batch.indices))
        return self.build_table(torch.cat(logits), errors, images, indices)

    def build_table(
        self, logits: Tensor, errors: Sequence[str | None], images: ImageDataset, indices: range
    ) -> pa.Table:
        """The rows of images with these logits (n, C), or why an image cannot be decoded (None: it can)."""
        is_unreadable = np.array([error is not None for error in errors])
        probabilities = logits.double().softmax(1).float()
        order = logits.argsort(dim=1, descending=True, stable=True)[:, : self.top].numpy()
        names = np.array(self.classifier.class_names, object)
        columns = first_columns(images, indices, self.folder)
        for place, numbers in enumerate(order.T, 1):
            suffix = "" if place == 1 else f"_{place}"
            of_class = probabilities.numpy()[np.arange(len(numbers)), numbers]
            columns[f"class{suffix}"] = pa.array(names[numbers], pa.string(), mask=is_unreadable)
            columns[f"probability{suffix}"] = pa.array(of_class, mask=is_unreadable)
        if self.labelled:
            labels = label_names(images, indices)
            columns["label"] = pa.array([";".join(each) or None for each in labels], pa.string())
            has_none = np.array([not each for each in labels])
            right = [name in each for name, each in zip(names[order[:, 0]], labels, strict=True)]
            columns["right"] = pa.array(right, mask=is_unreadable | has_none)
        columns["error"] = pa.array(errors, pa.string())
        if self.probabilities:
            for name, of_class in zip(self.classifier.class_names, probabilities.numpy().T, strict=True):
                columns[f"{PROBABILITY_PREFIX}{name}"] = pa.array(of_class, mask=is_unreadable)
        return pa.table(columns)


def label_names(images: ImageDataset, indices: range) -> list[list[str]]:
    """The labels of the images at these indices, by name; empty: an image has none."""
    if images.labels is None:
        return [[] for _ in indices]
    labels: NDArray[np.int64] = images.labels[indices.start : indices.stop].reshape(len(indices), -1)
    return [[images.class_names[number] for number in row if number >= 0] for row in labels.tolist()]


def match_labels(splits: Sequence[ImageDataset], class_names: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """The labels of all images as numbers of a classifier's classes, and of others after them.

    Returns:
        (n, L) padded with -1, and the names of all these classes.
    """
    numbers = {name: number for number, name in enumerate(class_names)}
    widest = max(1 if images.labels is None or images.labels.ndim == 1 else images.labels.shape[1] for images in splits)
    targets = np.full((sum(map(len, splits)), widest), -1)
    first = 0
    for images in splits:
        rows = slice(first, first + len(images))
        first = rows.stop
        if images.labels is None:
            continue
        own = np.array([numbers.setdefault(name, len(numbers)) for name in images.class_names] + [-1])
        labels = images.labels.reshape(len(images), -1)
        targets[rows, : labels.shape[1]] = own[labels]  # -1 is the last
    return targets, list(numbers)


def label_columns(data: ProbeDataConfig, splits: Sequence[ImageDataset], rows: LoadedSplits) -> list[str]:
    """The columns of images that may hold other labels.

    Args:
        rows: of the splits.
    """
    taken = {images.image_column for images in splits} | {data.label_column or "label"}
    return [name for name in dict.fromkeys(chain(*(each.features for each in rows.values()))) if name not in taken]


def names_of_labels(images: ImageDataset) -> list[str]:
    """The names of the classes that images have."""
    if images.labels is None:
        return []
    if images.label_kind == "several":
        numbers = np.flatnonzero((images.labels == 1).any(0))
    else:
        numbers = np.unique(images.labels[images.labels >= 0])
    return [images.class_names[number] for number in numbers.tolist()]


def has_known_labels(splits: Sequence[ImageDataset], class_names: Sequence[str], columns: Sequence[str] = ()) -> bool:
    """Whether images have labels of a classifier's kind, of classes that it knows; a warning names those that are not.

    Args:
        columns: that may hold other labels, for the warning.
    """
    kind = splits[0].label_kind
    if kind == "number" or all(images.labels is None for images in splits):
        return any(images.labels is not None for images in splits)
    names = list(dict.fromkeys(chain(*map(names_of_labels, splits))))
    unknown = [name for name in names if name not in set(class_names)]
    if unknown and len(unknown) == len(names):
        problem = f"the labels ({shortened(names)}) are not classes of the classifier ({shortened(list(class_names))})"
        ways = f"; choose another column with --data.label_column: {shortened(list(columns), 10)}" if columns else ""
        warn(f"{problem}: no accuracy is computed{ways}")
    elif unknown and kind == "class":  # of several: see `marks_of_splits`
        warn(f"the classifier does not know {shortened(unknown)}: images with such a label count as wrong")
    return len(unknown) < len(names)
