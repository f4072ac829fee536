"""The images whose labels an encoder has learned, and those that it builds on: tests on such images are refused.

A set of images answers each question: of the same dataset the indices in a split, elsewhere the digests of the files.
"""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from timm import is_model

from evaluation.frozen.run_images import (
    CLASSIFIERS,
    DEV,
    absolute_path,
    config_class_of,
    find_run,
    indices_in_split,
    run_source,
)
from mpp.config import SourceConfig
from mpp.data.columns import is_encoded, read_cell
from mpp.data.data_path import describe_source, is_local
from mpp.data.dataset import ImageDataset
from mpp.data.identity import identify_images
from mpp.data.sources import image_arguments, load_image_datasets
from mpp.errors import ReadFailed, UnreadableImage, UserError
from mpp.models.descriptions import is_named
from mpp.runtime.messages import note, warn
from mpp.training.run_folder import read_record, saved_settings

MAX_TEST_IMAGES_SEARCHED = 1000  # test images that are searched for among the training images of another place
MAX_TRAINING_IMAGES_SEARCHED = 200_000  # reading the sizes of so many files takes some seconds
IMAGES_PER_READ = 256  # images whose bytes are held in memory
ALLOWED_DUPLICATES = 0.01  # share of the test images that may also be in another place, as duplicates
PLACE = ("path", "name", "labels", "labels_encoding", "file_column", "missing")  # by which a dataset has other rows


@dataclass(frozen=True)
class LabelledImages:
    """The images that an encoder, or a head, was trained on with their labels."""

    source: SourceConfig
    """The settings of their place, of the cut into splits, and of the choice among them."""
    record: dict[str, Any]
    """See `identify_images`; empty: it is missing."""
    kind: str = "class"
    """Kind of their labels, or auto."""

    @cached_property
    def train(self) -> ImageDataset | None:
        """The training images that have labels; None where they cannot be loaded, or are others by now."""
        with suppress(UserError, ReadFailed):  # gone
            train = load_image_datasets(self.source, label_kind=self.kind)[0].labelled()
            files = None if "shards" in self.record else self.record.get("files")
            if train and files in (None, identify_images(train, with_labels=False)["files"]):
                return train.choose(self.source.train_images, self.source.eval_seed)
        return None


def find_labelled_images(encoder: str) -> LabelledImages | None:
    """The images whose labels an encoder was trained with; None: it had no labels, or that is unknown."""
    run = find_run(encoder)
    if run is None:
        return None
    saved = saved_settings(run)
    if config_class_of(saved) not in CLASSIFIERS:
        return None
    return LabelledImages(run_source(run), read_record(run)["train"], saved.get("task", "class"))


def lineage(encoder: str) -> Iterator[str]:
    """The encoder, its parents, their parents, and so on: all that may have passed on labels."""
    waiting = [encoder]
    visited = set()
    while waiting:
        name = waiting.pop(0)
        yield name
        run = find_run(name)
        if run is None or run.resolve() in visited:
            continue
        visited.add(run.resolve())
        for setting, parent in parent_encoders(run).items():
            waiting.append(parent)
            if is_named(parent) and not is_model(parent):
                note(f"{setting} of {run} is {parent}, which is missing: whether it learned from labels is unknown")


def parent_encoders(run: Path) -> dict[str, str]:
    """The initial weights and the teachers of a run: setting -> an encoder, or its file of weights."""
    saved = saved_settings(run)
    objective = saved["objective"]
    parents = {
        "model.init_from": saved["model"].get("init_from"),
        "distill.teacher": saved["distill"].get("teacher"),
    }
    if saved.get("init") == "encoder":
        parents["encoder"] = saved.get("checkpoint") or saved.get("encoder")
    if objective.get("name") == "features" and objective.get("teacher") != "ema":
        parents["objective.teacher"] = objective.get("teacher_checkpoint") or objective.get("teacher")
    return {setting: parent for setting, parent in parents.items() if parent}


def check_labels_unseen(encoder: str, source: SourceConfig, train: ImageDataset, test: ImageDataset) -> None:
    """Refuse test images whose labels an encoder was trained with; note such training images.

    Raises:
        UserError: there are such test images.
    """
    if any(count_shared(train, source, each)[0] for each in refuse_learned_images("encoder", encoder, source, test)):
        note(
            f"{encoder} was trained with labels of these training images: a depth, a rate or a penalty chosen on a "
            "part of them is chosen for images that it knows"
        )


def refuse_learned_images(setting: str, encoder: str, source: SourceConfig, test: ImageDataset) -> list[LabelledImages]:
    """Raise UserError if an encoder, or one that it builds on, was trained with labels of these test images.

    Up to `ALLOWED_DUPLICATES` of the test images may have the bytes of training images: many datasets have duplicates.

    Args:
        source: the settings of the test images.
    Returns:
        The labelled images that the encoder, and those that it builds on, were trained on.
    """
    all_labelled = []
    for ancestor in lineage(encoder):
        labelled = find_labelled_images(ancestor)
        if labelled is None:
            continue
        labelled = at_place(labelled, source, test)
        all_labelled.append(labelled)
        known, searched = count_shared(test, source, labelled)
        learned = f"{'' if ancestor == encoder else f'builds on {ancestor}, which '}was trained with"
        if searched == 0:
            place = f"images at {describe_source(labelled.source)}, which are not here, or have changed since"
            unknown = f"whether these {len(test)} test images are among them is unknown"
            warn(f"{encoder} {learned} labels of {place}: {unknown}")
        if known == 0:
            continue
        count = f"{known} of these" if searched == len(test) else f"{known} of {searched} of these"
        refused = f"{setting} is {encoder}, which {learned} the labels of {count} {len(test)}"
        if not is_same_place(source, labelled.source) and known <= ALLOWED_DUPLICATES * searched:
            note(f"{refused} test images: duplicates")
        elif test.split == DEV:
            raise UserError(f"{refused} training images; for test false, train it with --data.eval_split null")
        else:
            arguments = image_arguments(labelled.source) or " leave out all --data settings"
            raise UserError(f"{refused} test images; test on those that it held out:{arguments}")
    return all_labelled


def at_place(labelled: LabelledImages, source: SourceConfig, test: ImageDataset) -> LabelledImages:
    """The learned images as part of the tested dataset, if that is a copy of theirs."""
    files = labelled.record.get("files")
    if files is None or files != identify_images(test, with_labels=False)["files"]:
        return labelled
    return replace(labelled, source=replace(labelled.source, **{name: getattr(source, name) for name in PLACE}))


def is_same_place(one: SourceConfig, other: SourceConfig) -> bool:
    """Whether two sources have the same rows: the same dataset by the same list."""
    return all(absolute_place(one, name) == absolute_place(other, name) for name in PLACE)


def absolute_place(source: SourceConfig, name: str) -> Any:
    """A setting of a place; paths are absolute."""
    value = getattr(source, name)
    return absolute_path(value) if name in ("path", "labels") else value


def count_shared(images: ImageDataset, source: SourceConfig, labelled: LabelledImages) -> tuple[int, int]:
    """The number of images that were learned, and of those of which that is known.

    Of the same dataset, they are known by their index. Elsewhere up to `MAX_TEST_IMAGES_SEARCHED` are searched for
    among the training images by their bytes. Not found there: images that were encoded again, arrays, and those of
    more than `MAX_TRAINING_IMAGES_SEARCHED` training images, or of some that are not on this machine.
    """
    path, is_here = labelled.source.path, is_same_place(source, labelled.source)
    is_near = path is None or is_local(path)
    if not is_here and (not is_near or labelled.record.get("images", 0) > MAX_TRAINING_IMAGES_SEARCHED):
        return 0, 0
    train = labelled.train
    if train is None:
        return 0, 0
    if is_here:
        is_same_split = train.origin.split == images.origin.split
        known = np.intersect1d(indices_in_split(train), indices_in_split(images)) if is_same_split else ()
        return len(known), len(images)
    if not all(is_encoded(each.rows.features[each.image_column]) for each in (images, train)):
        return 0, 0
    searched = images.choose(MAX_TEST_IMAGES_SEARCHED, 0)
    sizes, train_sizes = file_sizes(searched), file_sizes(train)
    is_candidate = np.isin(train_sizes, sizes) | (train_sizes < 0) | (sizes < 0).any()
    known_digests = set(file_digests(train.select(np.flatnonzero(is_candidate))))
    return sum(digest in known_digests for digest in file_digests(searched)), len(searched)


def file_sizes(dataset: ImageDataset) -> NDArray[np.int64]:
    """The size of each image file in bytes, (n,); -1: unknown."""
    column = dataset.origin.rows.data.column(dataset.image_column)
    sizes = pc.binary_length(pc.struct_field(column, "bytes")).cast("int64").fill_null(-1).to_numpy()
    sizes = sizes[indices_in_split(dataset)]
    for index in np.flatnonzero(sizes < 0).tolist():
        path = dataset.rows[index][dataset.image_column]["path"]
        if is_local(path):
            sizes[index] = Path(path).stat().st_size
    return sizes


def file_digests(dataset: ImageDataset) -> Iterator[bytes]:
    """SHA-256 of each image's bytes, without those that cannot be read."""
    for block in dataset.rows.with_format("arrow").iter(IMAGES_PER_READ):  # row by row takes ten times as long
        for cell in block.column(dataset.image_column).to_pylist():
            with suppress(UnreadableImage, ReadFailed):
                yield hashlib.sha256(read_cell(cell, 0)).digest()
