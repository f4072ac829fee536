"""The images that a classifier has learned with their labels, told apart among those that it predicts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluation.config import ProbeDataConfig
from evaluation.frozen.manifest import LabelledImages, find_labelled_images, is_same_place, lineage
from evaluation.frozen.run_images import LoadedSplits, find_run, holds_run_images, indices_in_split
from evaluation.predictions.opening import ClassifierSource
from evaluation.tables.images import ONLY_SPLIT
from mpp.data.dataset import ImageDataset, has_label
from mpp.data.identity import digest_indices, identify_images
from mpp.runtime.messages import note, tell

HELD_OUT = "held out"
LEARNED = "learned"
UNKNOWN_NOTE = "these include unknown training images of the classifier: the accuracy does not apply to new images"


class ToldApart(NamedTuple):
    """Images of which those that the classifier has learned are a split of their own."""

    images: list[ImageDataset]
    splits: LoadedSplits
    """The rows of the same splits."""
    note: str
    """For readers of figures; empty: none of these images are known to be learned."""


def find_learned(classifier_source: ClassifierSource) -> list[LabelledImages]:
    """The labelled images that a classifier was trained on: its own, and those of the encoders that it builds on."""
    of_head = None if classifier_source.head is None else classifier_source.head.learned
    all_learned = [of_head, *map(find_labelled_images, lineage(classifier_source.encoder))]
    return [learned for learned in all_learned if learned is not None]


def learned_label_column(classifier_source: ClassifierSource) -> str | None:
    """The column of labels that a classifier was trained with; None: unknown, or `label`, as of folders."""
    if classifier_source.head is not None:
        learned = classifier_source.head.learned
        return None if learned is None else learned.source.label_column
    labelled = find_labelled_images(classifier_source.encoder)
    return None if labelled is None else labelled.source.label_column


def with_learned_label(
    data: ProbeDataConfig, classifier_source: ClassifierSource, splits: LoadedSplits
) -> ProbeDataConfig:
    """The settings with the column of labels that the classifier learned, where none is named and all splits have it.

    A line says so.
    """
    column = learned_label_column(classifier_source)
    if data.label_column is not None or column is None:
        return data
    if not all(column in rows.features for rows in splits.values()):
        return data
    tell(f"labels are read from the column {column}, as when the classifier was trained (data.label_column)")
    return replace(data, label_column=column)


def learned_indices(images: ImageDataset, learned: LabelledImages) -> NDArray[np.int64] | None:
    """The indices of the learned images in their whole split, by the cut and the choice that its settings describe.

    Args:
        images: the whole split, with labels or without.
    Returns:
        None: the record has other images than these cuts, such as where other images have labels now.
    """
    chosen = learned.record.get("chosen")
    if chosen is None:
        return np.arange(len(images))
    source = learned.source
    for is_cut in (True, False):
        whole = images
        if is_cut and round(source.eval_fraction * len(images)) < len(images) > 1:
            whole, _ = images.cut(source.eval_fraction, source.cut_seed, HELD_OUT)
        for candidates in (whole.labelled(), whole):
            if candidates is None:
                continue
            indices = indices_in_split(candidates.choose(source.train_images, source.eval_seed))
            if digest_indices(indices) == chosen:
                return indices
    return None


def tell_apart(
    images: Sequence[ImageDataset], splits: LoadedSplits, classifier_source: ClassifierSource, data: ProbeDataConfig
) -> ToldApart:
    """Split images into those that a classifier was trained on and others, as `learned` and `held out`; a note counts.

    A named split of which all labelled images were learned, or none, keeps its name.

    Args:
        images: whole splits.
        splits: their rows.
        data: the settings of the images.
    """
    all_learned = find_learned(classifier_source)
    marks = {each.split: np.zeros(len(each), bool) for each in images}
    is_unrecorded = classifier_source.head is not None and classifier_source.head.learned is None
    is_unknown = is_unrecorded and is_of_run(classifier_source, data)
    files = {}
    if all_learned:
        files = {
            each.split: identify_images(each, with_labels=False, retries=data.read_retries)["files"] for each in images
        }
    for learned in all_learned:
        recorded = learned.record.get("files")
        same = [each for each in images if recorded is not None and files[each.split] == recorded]
        if not same and is_same_place(learned.source, data):
            is_unknown = True  # images were added, or another list names them
        for each in same:
            indices = learned_indices(each, learned)
            if indices is None:
                is_unknown = True
            else:
                marks[each.split][indices] = True
    if is_unknown:
        note(UNKNOWN_NOTE)
        return ToldApart(list(images), splits, UNKNOWN_NOTE)
    count = int(sum(mark.sum() for mark in marks.values()))
    if count == 0:
        return ToldApart(list(images), splits, "")
    total = sum(map(len, images))
    text = f"the classifier learned {count} of these {total} images: their figures do not apply to new images"
    note(text)
    return ToldApart(*separate_learned(images, splits, marks), text)


def is_of_run(classifier_source: ClassifierSource, data: ProbeDataConfig) -> bool:
    """Whether images are those of the run of a classifier's encoder."""
    return holds_run_images(data.path, find_run(classifier_source.encoder))


def separate_learned(
    images: Sequence[ImageDataset], splits: LoadedSplits, marks: dict[str, NDArray[np.bool_]]
) -> tuple[list[ImageDataset], LoadedSplits]:
    """Images and rows by split, held-out ones first.

    Args:
        marks: split -> (n,) whether each image was learned.
    """
    divided_images, divided_rows = [], {}
    for each in images:
        is_learned = marks[each.split]
        is_labelled = np.ones(len(each), bool) if each.labels is None else has_label(each.labels)
        is_whole = is_learned[is_labelled].all() or not is_learned.any()
        if is_whole and not (each.split == ONLY_SPLIT and is_learned.any()):
            divided_images.append(each)
            divided_rows[each.split] = splits[each.split]
            continue
        for kind, indices in ((HELD_OUT, np.flatnonzero(~is_learned)), (LEARNED, np.flatnonzero(is_learned))):
            if len(indices) == 0:
                continue
            name = kind if each.split == ONLY_SPLIT else f"{each.split} ({kind})"
            divided_images.append(replace(each.select(indices), split=name))
            divided_rows[name] = splits[each.split].select(indices)
    return divided_images, divided_rows
