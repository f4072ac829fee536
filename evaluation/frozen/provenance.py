"""The images whose labels an encoder has learned: evaluation on such test images is refused."""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from timm import is_model

from evaluation.frozen.labelled_features import DEV
from evaluation.frozen.run_images import absolute_path, find_run, indices_in_split, run_source
from evaluation.frozen.training_reports import CLASSIFIERS, config_class_of
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

MAX_TEST_IMAGES_SEARCHED = 1000  # test images that are searched for among the training images of another location
MAX_TRAINING_IMAGES_SEARCHED = 200_000  # reading the sizes of so many files takes some seconds
IMAGES_PER_READ = 256  # images whose bytes are held in memory
ALLOWED_DUPLICATES = 0.01  # share of the test images that may also be in another location, as duplicates
LOCATION = ("path", "name", "revision")
LISTING = ("labels", "labels_encoding", "file_column", "missing")  # by which the same folder has other rows


@dataclass
class LabelledImages:
    """The images that an encoder, or a head, was trained on with their labels."""

    source: SourceConfig
    """The settings of their location, of the cut into splits, and of the choice among them."""
    record: dict[str, Any]
    """See `identify_images`; empty: it is missing."""
    kind: str = "class"
    """Kind of their labels, or auto."""

    @cached_property
    def train(self) -> ImageDataset | None:
        """The training images that have labels; None where none can be loaded."""
        try:
            train = load_image_datasets(self.source, label_kind=self.kind)[0].labelled()
        except UserError:  # gone, or changed
            return None
        return train and train.choose(self.source.train_images, self.source.eval_seed)


class Overlap(NamedTuple):
    """The images of a dataset that an encoder was trained on with their labels."""

    shared_images: int
    """Number of these images."""
    searched_images: int
    """Number of images that were searched for."""
    source: SourceConfig
    """The settings by which the encoder's images are found now."""
    by_index: bool
    """Whether images are known by their index in a split; otherwise by their bytes, so they may be duplicates."""
    is_unknown: bool = False
    """Whether there may be more: the encoder's images have changed since."""


def find_labelled_images(encoder: str) -> LabelledImages | None:
    """The images whose labels an encoder was trained with; None: it had no labels, or that is unknown."""
    run = find_run(encoder)
    if run is None:
        return None
    saved = saved_settings(run)
    if config_class_of(saved) not in CLASSIFIERS:
        return None
    record = read_record(run)["train"]
    return LabelledImages(run_source(run), record, saved.get("task", "class"))


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


def find_overlap(dataset: ImageDataset, source: SourceConfig, labelled: LabelledImages) -> Overlap:
    """Count the images of a dataset that an encoder was trained on with their labels.

    In the same location, by the same list, and in a copy that has the same record (names, and the bytes of some files),
    an image is known by its index in its split. Elsewhere it is known by its bytes: up to `MAX_TEST_IMAGES_SEARCHED`
    images of `dataset` are searched for among the training images, of which only files of the same sizes are read. Not
    found there: images that were encoded again, arrays, and those of a training split of more than
    `MAX_TRAINING_IMAGES_SEARCHED` images, or of one that is not on this machine.
    """
    nothing = Overlap(0, len(dataset), labelled.source, by_index=True)
    is_elsewhere = not (is_same_location(source, labelled.source) and is_same_list(source, labelled.source))
    if is_elsewhere and is_copy(dataset, labelled.record):
        place = {name: getattr(source, name) for name in (*LOCATION, *LISTING)}
        labelled = replace(labelled, source=replace(labelled.source, **place))
        is_elsewhere = False
    if is_elsewhere and not is_searchable(labelled.source.path, labelled.record):
        return nothing

    train = labelled.train
    if train is None:
        return nothing
    is_changed = has_changed(train, labelled.record)
    if is_elsewhere:
        known, searched = count_equal_bytes(dataset, train)
        return Overlap(known, searched, labelled.source, by_index=False, is_unknown=is_changed)
    if is_changed:  # the indices and the cut are others by now
        return nothing._replace(is_unknown=True)
    if train.origin.split != dataset.origin.split:
        return nothing
    known = np.intersect1d(indices_in_split(train), indices_in_split(dataset))
    return Overlap(len(known), len(dataset), labelled.source, by_index=True)


def is_same_location(one: SourceConfig, other: SourceConfig) -> bool:
    """Whether two sources name the same dataset; a revision that is not named may be any."""
    if one.name != other.name or absolute_path(one.path) != absolute_path(other.path):
        return False
    return None in (one.revision, other.revision) or one.revision == other.revision


def is_same_list(one: SourceConfig, other: SourceConfig) -> bool:
    """Whether two sources of the same location have the same rows: they name the same list of images, or none."""
    same_file = absolute_path(one.labels) == absolute_path(other.labels)
    return same_file and all(getattr(one, name) == getattr(other, name) for name in LISTING if name != "labels")


def is_copy(dataset: ImageDataset, recorded: dict[str, Any]) -> bool:
    """Whether the split of a dataset has the recorded files."""
    files = recorded.get("files")
    return files is not None and files == identify_images(dataset, with_labels=False)["files"]


def has_changed(train: ImageDataset, recorded: dict[str, Any]) -> bool:
    """Whether training images are others than the recorded ones; False where these are not known by their files."""
    if recorded.get("files") is None or "shards" in recorded:
        return False
    try:
        return not is_copy(train, recorded)
    except ReadFailed:  # one that was sampled
        return True


def is_searchable(path: str | None, recorded: dict[str, Any]) -> bool:
    """Whether training images are on this machine, and few enough to be searched."""
    is_here = path is None or is_local(path)
    return is_here and recorded.get("images", 0) <= MAX_TRAINING_IMAGES_SEARCHED


def count_equal_bytes(dataset: ImageDataset, train: ImageDataset) -> tuple[int, int]:
    """The number of images that have the bytes of one of `train`, and the number of images searched for."""
    for images in (dataset, train):
        if not is_encoded(images.rows.features[images.image_column]):
            return 0, len(dataset)
    searched = dataset.choose(MAX_TEST_IMAGES_SEARCHED, 0)
    train_sizes = file_sizes(train)
    sizes = file_sizes(searched)
    is_candidate = np.isin(train_sizes, sizes) | (train_sizes < 0) | (sizes < 0).any()
    candidates = train.select(np.flatnonzero(is_candidate))
    known_digests = set(file_digests(candidates))
    known = sum(digest in known_digests for digest in file_digests(searched))
    return known, len(searched)


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


def check_labels_unseen(encoder: str, source: SourceConfig, train: ImageDataset, test: ImageDataset) -> None:
    """Refuse test images whose labels an encoder was trained with; note such training images.

    Raises:
        UserError: there are such test images.
    """
    all_labelled = refuse_learned_images("encoder", encoder, source, test)
    if any(find_overlap(train, source, labelled).shared_images for labelled in all_labelled):
        note(
            f"{encoder} was trained with labels of these training images: a depth, a rate or a penalty chosen on a "
            "part of them is chosen for images that it knows"
        )


def refuse_learned_images(setting: str, encoder: str, source: SourceConfig, test: ImageDataset) -> list[LabelledImages]:
    """Raise UserError if an encoder, or one that it builds on, was trained with labels of these test images.

    Returns:
        The labelled images that the encoder, and those that it builds on, were trained on.
    """
    all_labelled = []
    for ancestor in lineage(encoder):
        labelled = find_labelled_images(ancestor)
        if labelled is not None:
            all_labelled.append(labelled)
            refuse_overlap(find_overlap(test, source, labelled), setting, encoder, ancestor, test)
    return all_labelled


def refuse_overlap(overlap: Overlap, setting: str, encoder: str, ancestor: str, test: ImageDataset) -> None:
    """Raise UserError if test images are known.

    Up to `ALLOWED_DUPLICATES` of the test images may have the bytes of training images: many datasets have duplicates.

    Args:
        overlap: the test images that `ancestor` was trained on.
        ancestor: the encoder, or one that it builds on.
        test: the test images, or the dev split of the training images.
    """
    builds_on = "" if ancestor == encoder else f"builds on {ancestor}, which "
    if overlap.shared_images == 0:
        if overlap.is_unknown:
            place = describe_source(overlap.source)
            learned = f"{encoder} {builds_on}was trained with labels of images at {place}, which have changed since"
            warn(f"{learned}: whether these {len(test)} test images are among them is unknown")
        return
    searched = "" if overlap.searched_images == len(test) else f"{overlap.searched_images} of "
    count = f"{overlap.shared_images} of {searched}these {len(test)}"
    if not overlap.by_index and overlap.shared_images <= ALLOWED_DUPLICATES * overlap.searched_images:
        note(f"{encoder} {builds_on}was trained with the labels of {count} test images: duplicates")
        return
    refused = f"{setting} is {encoder}, which {builds_on}was trained with the labels of {count}"
    if test.split == DEV:
        raise UserError(f"{refused} training images; for test false, train it with --data.eval_split null")
    arguments = image_arguments(overlap.source) or " leave out all --data settings"
    raise UserError(f"{refused} test images; test on those that it held out:{arguments}")
