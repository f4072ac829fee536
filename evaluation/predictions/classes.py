"""Rows and figures of images that have one class, several classes, or a number.

n images, C classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from accelerate import Accelerator
from sklearn.preprocessing import MultiLabelBinarizer
from torch import Tensor

from evaluation.config import PredictConfig, ProbeDataConfig
from evaluation.frozen.run_images import LoadedSplits
from evaluation.metrics.scoring import Outcomes
from evaluation.supervision.classifiers import Classifier, FrozenClassifier
from evaluation.tables import ImageBatch, identify_splits, read_crops, unlabelled_images
from mpp.data.dataset import ImageDataset, has_label
from mpp.data.labels import SEPARATOR
from mpp.data.sources import label_images
from mpp.errors import UserError
from mpp.runtime.messages import shortened, warn

THRESHOLD = 0.5  # of the probability of a class that is named, where an image has several


@dataclass(frozen=True)
class ImagePredictions:
    """Predictions of images by a classifier of one class, several classes, or a number."""

    config: PredictConfig
    classifier: Classifier
    data: ProbeDataConfig
    splits: LoadedSplits
    """The rows of the images."""
    accelerator: Accelerator

    @cached_property
    def images(self) -> list[ImageDataset]:
        """The images of each split, with labels where they have some of the classifier's kind."""
        images = unlabelled_images(self.data, self.splits)
        try:
            return label_images(self.data, self.splits, images[0].image_column, self.classifier.label_kind)
        except UserError as error:
            if self.data.label_column is not None:
                raise
            warn(f"no figures: {error}")
            return images

    @cached_property
    def labelled(self) -> bool:
        """Whether the labels are in the table: the classifier knows some of them."""
        return has_known_labels(self.images, self.classifier.class_names)

    def identity(self) -> dict[str, Any]:
        """The settings and images that the table depends on."""
        settings = {"top": self.config.top, "probabilities": self.config.probabilities}
        return settings | identify_splits(self.data, self.images, self.labelled)

    @property
    def probability_columns(self) -> list[str]:
        """Columns with the probability of each class; none, of a number or where they are not wanted."""
        return [f"p_{name}" for name in self.classifier.class_names if self.config.probabilities]

    def rows(self, images: ImageDataset) -> Iterator[pa.Table]:
        """The rows of images of a split."""
        network = FrozenClassifier(self.classifier).to(self.accelerator.device)
        for batch in read_crops(images, self.data, self.classifier.img_size):
            with self.accelerator.autocast():
                logits = network(batch.pixels.to(self.accelerator.device)).cpu()
            yield self.table(batch, logits)

    def table(self, batch: ImageBatch, logits: Tensor) -> pa.Table:
        """The rows of a batch with these logits (n, C)."""
        predicted, probabilities = self.read_logits(logits)
        columns = {name: batch.column(values) for name, values in predicted.items()}
        if self.labelled:
            labels = labels_of(batch.images)
            if self.classifier.label_kind == "number":
                columns["label"] = batch.column(labels, pa.float64())
            else:
                texts = [None if each is None else SEPARATOR.join(each) for each in labels]
                columns["label"] = batch.column(texts, pa.string())
        if self.labelled and self.classifier.label_kind == "class":
            right = [each and name in each for name, each in zip(predicted["class"], labels, strict=True)]
            columns["right"] = batch.column(right, pa.bool_())
        by_class = zip(self.probability_columns, probabilities.T, strict=False)  # without columns none are wanted
        return batch.table(columns, self.data, {name: batch.column(values) for name, values in by_class})

    def read_logits(self, logits: Tensor) -> tuple[dict[str, Sequence], np.ndarray]:
        """Columns with the predictions by name, and the probabilities (n, C)."""
        names = np.array(self.classifier.class_names, str)
        if self.classifier.label_kind == "number":
            return {"number": logits.squeeze(1).numpy()}, logits.numpy()
        if self.classifier.label_kind == "several":
            probabilities = logits.double().sigmoid().float().numpy()
            return {"classes": [SEPARATOR.join(names[row]) for row in probabilities > THRESHOLD]}, probabilities
        probabilities = logits.double().softmax(1).float().numpy()
        order = logits.argsort(dim=1, descending=True, stable=True)[:, : self.config.top].numpy()
        columns = {}
        for place, numbers in enumerate(order.T, 1):
            suffix = "" if place == 1 else f"_{place}"
            columns[f"class{suffix}"] = names[numbers]
            columns[f"probability{suffix}"] = np.take_along_axis(probabilities, numbers[:, None], 1)[:, 0]
        return columns, probabilities

    def outcomes(self, images: ImageDataset, rows: pd.DataFrame) -> Outcomes | None:
        """Targets and predictions of the images of a split that have both; None: there are none.

        Args:
            rows: of these images.
        """
        if not self.labelled:
            return None
        rows = rows.dropna(subset="label")
        kind, names = self.classifier.label_kind, self.classifier.class_names
        if len(rows) == 0:
            return None
        if kind == "number":
            return Outcomes(kind, rows["label"].to_numpy(), rows["number"].to_numpy(float))
        if kind == "several":
            known = [[name for name in text.split(SEPARATOR) if name in names] for text in rows["label"]]
            marks = MultiLabelBinarizer(classes=names).fit_transform(known)
            return Outcomes(kind, marks.astype(np.int8), rows[self.probability_columns].to_numpy(float), names)
        first = [text if text in names else text.split(SEPARATOR)[0] for text in rows["label"]]  # any is right
        true = rows["class"].where(rows["right"].astype(bool), first)
        numbers = pd.Index([*names, *sorted({*true} - {*names})])  # those that the classifier does not know come last
        return Outcomes(kind, numbers.get_indexer(true), numbers.get_indexer(rows["class"]), [*numbers])


def labels_of(images: ImageDataset) -> list[list[str] | float | None]:
    """The names of the classes of each image, or its number; None: it has no label."""
    if images.labels is None:
        return [None] * len(images)
    found = []
    for label, known in zip(images.labels, has_label(images.labels), strict=True):
        if not known or images.label_kind == "number":
            found.append(float(label) if known else None)
            continue
        numbers = np.flatnonzero(label == 1) if images.label_kind == "several" else np.atleast_1d(label)
        found.append([images.class_names[number] for number in numbers if number >= 0])
    return found


def has_known_labels(splits: Sequence[ImageDataset], class_names: Sequence[str]) -> bool:
    """Whether images have labels of classes that a classifier knows; a warning names those that it does not."""
    labels = [label for images in splits for label in labels_of(images) if label is not None]
    if splits[0].label_kind == "number" or not labels:
        return bool(labels)
    names = dict.fromkeys(chain(*labels))
    unknown = [name for name in names if name not in set(class_names)]
    if unknown and len(unknown) == len(names):
        problem = f"the labels ({shortened(unknown)}) are not classes of the classifier ({shortened([*class_names])})"
        warn(f"{problem}: no figures; another column can be chosen with --data.label_column")
    elif unknown:
        warn(f"the classifier does not know {shortened(unknown)}: such a label counts as none, or as wrong")
    return len(unknown) < len(names)
