"""Predictions of a classifier for new images: a table with the names of classes, or masks with the class of each pixel.

    python evaluation/predict.py --classifier runs/birds_finetuned --data.path FOLDER --out predictions.csv

A row for each image: `file`, `split`, the likeliest classes by name with their probabilities, the probability of each
class, and `error`. An image that cannot be decoded has no prediction, and its error says why. After an interruption
the same command continues. The classifier is a fine-tuned or supervised run, a head that `mpp linear --save true` or
`mpp segmentation --save true` kept, or a model from timm with its head.

n images, C classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from accelerate import Accelerator
from torch import Tensor

from evaluation.config import MaskedDataConfig, PredictConfig, ProbeDataConfig
from evaluation.frozen.features import describe_precision
from evaluation.frozen.results import print_details, write_report
from evaluation.frozen.run_images import LoadedSplits, is_same_place, note_other_images, parse_and_load
from evaluation.metrics.scoring import Outcomes, result_entries, without_nan
from evaluation.predictions.masks import MaskPredictions
from evaluation.predictions.opening import ClassifierSource, digest_network, find_classifier, open_classifier
from evaluation.supervision.classifiers import Classifier, FrozenClassifier
from evaluation.tables import (
    ImageBatch,
    Rows,
    identify_splits,
    load_all_splits,
    parts_folder,
    read_crops,
    unlabelled_images,
    write_table,
)
from mpp.config import RunConfig, changed_settings, flatten, rebuild, require
from mpp.data.dataset import ImageDataset, has_label
from mpp.data.labels import SEPARATOR
from mpp.data.sources import label_images
from mpp.errors import UserError
from mpp.runtime.messages import note, shortened, warn
from mpp.runtime.start import run_main, start_alone
from mpp.training.run_folder import refuse_among_images

OF_CLASSES = ("top", "probabilities")
OF_PIXELS = ("overlays", "data.mask_column", "data.ignore_index")
"""Settings that have no effect on other kinds of labels."""
MAX_CLASSES_PRINTED = 20
THRESHOLD = 0.5  # of the probability of a class that is named, where an image has several
LEARNED = "the classifier learned some of these images: figures do not apply to new images, except of its held-out ones"


def predict(config: PredictConfig, loaded: LoadedSplits | None = None) -> Path:
    """Write the table, or its missing parts, and return its file.

    Raises:
        UserError: no such classifier or images, or the file is another table.
    """
    run = RunConfig(precision=config.precision, trackers=(), threads=config.threads)
    accelerator = start_alone(run, "a table is written")
    found = find_classifier(config.classifier, config.encoder)
    classifier = open_classifier(found, config.data.channels)
    kind = classifier.label_kind
    changed = changed_settings(config)
    unused = (() if kind == "class" else OF_CLASSES) + (() if kind == "pixels" else OF_PIXELS)
    for name in changed.keys() & set(unused):
        require(False, name, changed[name], f"left out: labels of {config.classifier} are of the kind {kind}")
    note_other_images(found.encoder, config.data, found.how_read)

    usual = MaskedDataConfig() if kind == "pixels" else ProbeDataConfig()  # to which `mask` is a column as any other
    data = rebuild(usual, flatten(config.data) | {"eval_crop": config.data.eval_crop or classifier.crop_pct})
    splits = load_all_splits(data, loaded)
    of_kind = MaskPredictions if kind == "pixels" else ImagePredictions
    predictions = of_kind(config, classifier, data, splits, accelerator)
    identity = identify_splits(data, predictions.images, predictions.labelled)
    identity |= {name: getattr(config, name) for name in ("top", "probabilities", "overlays")}
    identity |= {
        "weights": digest_network(classifier.network),
        "label_kind": kind,
        "classes": classifier.class_names,
        "img_size": list(classifier.img_size),
        "precision": describe_precision(accelerator),
    }
    out = Path(config.out)
    if kind == "pixels":
        refuse_among_images("out", out, data.path)
        masks = predictions.folder("mask")
        is_known = out.exists() or parts_folder(out, identity).exists() or not masks.exists()
        require(is_known, "out", out, f"another: {masks} exists, and may be of other images")
    about = {"classifier": config.classifier}
    files = {record["files"] for record in identity["images"]}
    if any(is_same_place(each.source, data) or each.record.get("files") in files for each in found.learned):
        about["note"] = LEARNED
        note(LEARNED)
    write_table(out, identity, predictions.images, predictions.rows, lambda rows: about | describe(predictions, rows))
    return out


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
        """The images of each split, with labels where the classifier knows some of them."""
        images = unlabelled_images(self.data, self.splits)
        try:
            labelled = label_images(self.data, self.splits, images[0].image_column, self.classifier.label_kind)
        except UserError as error:
            if self.data.label_column is not None:
                raise
            warn(f"no figures: {error}")
            return images
        return labelled if has_known_labels(labelled, self.classifier.class_names) else images

    @property
    def labelled(self) -> bool:
        """Whether the images have labels, which are in the table."""
        return any(images.labels is not None for images in self.images)

    def rows(self, images: ImageDataset) -> Iterator[pa.Table]:
        """The rows of images of a split."""
        network = FrozenClassifier(self.classifier).to(self.accelerator.device)
        for batch in read_crops(images, self.data, self.classifier.img_size):
            with self.accelerator.autocast():
                logits = network(batch.pixels.to(self.accelerator.device)).cpu()
            yield self.table(batch, logits)

    def table(self, batch: ImageBatch, logits: Tensor) -> pa.Table:
        """The rows of a batch with these logits (n, C)."""
        kind, names = self.classifier.label_kind, np.array(self.classifier.class_names, str)
        columns: dict[str, pa.Array] = {}
        if kind == "number":
            probabilities = logits.numpy()  # which have no columns
            columns["number"] = batch.column(probabilities[:, 0])
        elif kind == "several":
            probabilities = logits.double().sigmoid().float().numpy()
            likely = [SEPARATOR.join(names[row]) for row in probabilities > THRESHOLD]
            columns["classes"] = batch.column(likely, pa.string())
        else:
            probabilities = logits.double().softmax(1).float().numpy()
            order = logits.argsort(dim=1, descending=True, stable=True)[:, : self.config.top].numpy()
            for place, numbers in enumerate(order.T, 1):
                suffix = "" if place == 1 else f"_{place}"
                columns[f"class{suffix}"] = batch.column(names[numbers])
                columns[f"probability{suffix}"] = batch.column(probabilities[np.arange(len(numbers)), numbers])
        labels = labels_of(batch.images)
        if self.labelled and kind == "number":
            columns["label"] = batch.column(labels, pa.float64())
        elif self.labelled:
            texts = [None if each is None else SEPARATOR.join(each) for each in labels]
            columns["label"] = batch.column(texts, pa.string())
        if self.labelled and kind == "class":
            right = [each and name in each for name, each in zip(names[order[:, 0]], labels, strict=True)]
            columns["right"] = batch.column(right, pa.bool_())
        by_class = zip(names if self.config.probabilities else [], probabilities.T, strict=False)
        return batch.table(columns, self.data, {f"p_{name}": batch.column(values) for name, values in by_class})

    def outcomes(self, images: ImageDataset, rows: pd.DataFrame) -> Outcomes | None:
        """Targets and predictions of the images of a split that have both; None: there are none.

        Args:
            rows: of these images.
        """
        if images.labels is None:
            return None
        known = has_label(images.labels) & rows["error"].isna().to_numpy()
        labels, rows = images.labels[known], rows[known]
        kind, names = self.classifier.label_kind, self.classifier.class_names
        if len(rows) == 0:
            return None
        if kind == "number":
            return Outcomes(kind, labels, rows["number"].to_numpy(float))
        if kind == "several":
            marks = pd.DataFrame(labels, columns=images.class_names).reindex(columns=names, fill_value=0)
            probabilities = rows[[f"p_{name}" for name in names]].to_numpy(float)
            return Outcomes(kind, marks.to_numpy(np.int8), probabilities, names)
        occurring = {images.class_names[number] for number in np.unique(labels[labels >= 0])}
        index = pd.Index([*names, *sorted(occurring - {*names})])  # those that the classifier does not know come last
        numbers = np.append(index.get_indexer(images.class_names), -1)  # -1, where an image has fewer, stays
        return Outcomes(kind, numbers[labels], index.get_indexer(rows["class"]), [*index])


def labels_of(images: ImageDataset) -> list[list[str] | float | None]:
    """The names of the classes of each image, or its number; None: it has no label."""
    if images.labels is None:
        return [None] * len(images)
    found: list[list[str] | float | None] = []
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
    if splits[0].label_kind == "number":
        return bool(labels)
    names = dict.fromkeys(chain(*labels))
    unknown = [name for name in names if name not in class_names]
    knows_some = len(unknown) < len(names)
    if unknown:
        none = "there are no figures; data.label_column chooses another column"
        effect = "such a label counts as none, or as wrong" if knows_some else none
        warn(f"the classifier does not know the labels {shortened(unknown)}: {effect}")
    return knows_some


def describe(predictions: ImagePredictions | MaskPredictions, rows: Rows) -> dict[str, Any]:
    """Number of images of each predicted class, shares of the pixels, and figures of each split's labels.

    A report on each split that has labels is written next to the table.
    """
    needs_all = predictions.classifier.label_kind == "several"  # of others they may be large
    frame = rows.to_table([name for name in rows.schema.names if needs_all or name[:2] != "p_"]).to_pandas()
    about: dict[str, Any] = {}
    if "class" in frame:
        counts = frame["class"].value_counts()
        about["predicted"] = counts.to_dict()
        print(counts.head(MAX_CLASSES_PRINTED).to_string())
    if isinstance(predictions, MaskPredictions):
        about["class_numbers"] = predictions.class_numbers
        shares = frame.filter(regex="^share_").astype(float).mean()
        about["shares"] = {name.removeprefix("share_"): share for name, share in shares.items()}
    for images in predictions.images:
        outcomes = predictions.outcomes(images, frame[frame.split == images.split])
        if outcomes is not None:
            entries = result_entries(outcomes)
            path = Path(predictions.config.out).with_suffix(f".{images.split}.json")
            result = {"case": images.split, "outcomes": outcomes} | entries
            print_details(path, write_report(path, {"results": [result]}))
            about.setdefault("figures", {})[images.split] = entries | {"images": len(outcomes)}
    return without_nan(about)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Predict with the settings of the command line, or of `arguments`."""
    return predict(*read_settings(arguments))


def read_settings(arguments: Sequence[str] | None) -> tuple[PredictConfig, LoadedSplits | None]:
    """The settings of the command line, and the images of the classifier's run if these are loaded already.

    Images are read as a kept head's training images were, or those of the run.
    """
    find = cache(find_classifier)  # reads weights

    def found(config: PredictConfig) -> ClassifierSource:
        return find(config.classifier, config.encoder)

    return parse_and_load(
        PredictConfig, arguments, lambda config: found(config).encoder, lambda config: found(config).how_read
    )


if __name__ == "__main__":
    run_main(main)
