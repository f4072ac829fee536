"""The images whose labels an encoder has learned, which test it no more: a set of images answers each question."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

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
from mpp.config.parsing import spread
from mpp.data.columns import is_encoded, read_cell
from mpp.data.data_path import describe_source, is_local
from mpp.data.dataset import ImageDataset
from mpp.data.identity import identify_images
from mpp.data.sources import image_arguments, load_image_datasets
from mpp.errors import ReadFailed, UnreadableImage, UserError
from mpp.models.descriptions import is_named
from mpp.runtime.messages import note, warn
from mpp.training.run_folder import encoders_named, read_record, saved_settings

PLACE = ("path", "name", "labels", "labels_encoding", "file_column", "missing")  # by which a dataset has other rows
MAX_TEST_IMAGES_SEARCHED = 1000  # test images that are searched for among the training images of another place
MAX_TRAINING_IMAGES_SEARCHED = 100_000  # reading so many files takes some ten seconds
IMAGES_PER_READ = 256  # images whose bytes are held in memory
ALLOWED_DUPLICATES = 0.01  # share of the test images that may also be in another place, as duplicates


@dataclass(frozen=True)
class LabelledImages:
    """The images that an encoder, or a head, was trained on with their labels."""

    source: SourceConfig
    """The settings of their place, of the cut into splits, and of the choice among them."""
    record: dict[str, Any]
    """See `identify_images`; empty: it is missing."""
    kind: str = "class"
    """Kind of their labels, or auto."""

    def keys(self, by_bytes: bool) -> set[Any]:
        """Those of the images (see `keys_of`); none where they are gone, others by now, or too many to be read."""
        path, is_small = self.source.path, self.record.get("images", 0) <= MAX_TRAINING_IMAGES_SEARCHED
        if by_bytes and not (is_small and (path is None or is_local(path))):
            return set()
        with suppress(UserError):  # gone
            train = load_image_datasets(self.source, label_kind=self.kind)[0].labelled()
            files = self.record.get("files")
            if train and files in (None, identify_images(train, with_labels=False)["files"]):
                return set(keys_of(train.to_train_on(self.source), by_bytes))
        return set()


def find_labelled_images(encoder: str) -> LabelledImages | None:
    """The images whose labels an encoder was trained with; None: it had no labels, or that is unknown."""
    run = find_run(encoder)
    saved = saved_settings(run) if run else {}
    if config_class_of(saved) not in CLASSIFIERS:
        return None
    return LabelledImages(run_source(run), read_record(run)["train"], saved.get("task", "class"))


def lineage(encoder: str) -> list[str]:
    """The encoder, its parents, their parents, and so on: all that may have passed on labels."""
    known = [encoder]
    for name in known:  # which grows
        run = find_run(name)
        parents = encoders_named(dict(spread(saved_settings(run), {}))) if run else {}
        for setting, parent in parents.items():
            if parent in known:
                continue
            known.append(parent)
            if is_named(parent) and not is_model(parent):
                note(f"{setting} of {run} is {parent}, which is missing: whether it learned from labels is unknown")
    return known


def check_labels_unseen(
    encoder: str, source: SourceConfig, train: ImageDataset | None, test: ImageDataset, setting: str = "encoder"
) -> None:
    """Refuse test images whose labels an encoder, or one that it builds on, was trained with.

    Images of the same dataset are known by their index. Elsewhere some of them are searched for among the training
    images by their bytes. Not found there: images that were encoded again, and arrays. Up to `ALLOWED_DUPLICATES` of
    them may be found: many datasets have duplicates.

    Args:
        source: the settings of the images.
        train: images to learn from; a note says where their labels are known. None: they do not matter.
        setting: that names the encoder, for messages.
    Raises:
        UserError: there are such test images.
    """
    knows_train = False
    for ancestor in lineage(encoder):
        labelled = find_labelled_images(ancestor)
        if labelled is None:
            continue
        if labelled.record.get("files", "") == identify_images(test, with_labels=False)["files"]:  # perhaps a copy
            place = {name: getattr(source, name) for name in PLACE}
            labelled = replace(labelled, source=replace(labelled.source, **place))
        by_bytes = not is_same_place(source, labelled.source)
        limit, keys = MAX_TEST_IMAGES_SEARCHED if by_bytes else None, labelled.keys(by_bytes)
        tested = keys_of(test.choose(limit, 0), by_bytes) if keys else []
        known = sum(each in keys for each in tested)
        knows_train |= bool(keys and train) and not keys.isdisjoint(keys_of(train.choose(limit, 0), by_bytes))
        learned = f"{'' if ancestor == encoder else f'builds on {ancestor}, which '}was trained with"
        refused = f"{setting} is {encoder}, which {learned} the labels of {known} of these {len(tested)}"
        if not tested:
            where = f"{describe_source(labelled.source)}, which are not here, are too many, or have changed since"
            unknown = f"whether these {len(test)} test images are among them is unknown"
            warn(f"{encoder} {learned} labels of images at {where}: {unknown}")
        elif by_bytes and 0 < known <= ALLOWED_DUPLICATES * len(tested):
            note(f"{refused} test images: duplicates")
        elif known and test.split == DEV:
            raise UserError(f"{refused} training images; for test false, train it with --data.eval_split null")
        elif known:
            held_out = image_arguments(labelled.source) or " leave out all --data settings"
            raise UserError(f"{refused} test images; test on those that it held out:{held_out}")
    if knows_train:
        note(
            f"{encoder} was trained with labels of these training images: a depth, a rate or a penalty chosen on a "
            "part of them is chosen for images that it knows"
        )


def is_same_place(one: SourceConfig, other: SourceConfig) -> bool:
    """Whether two sources have the same rows: the same dataset by the same list."""

    def value(source: SourceConfig, name: str) -> Any:
        return absolute_path(getattr(source, name)) if name in ("path", "labels") else getattr(source, name)

    return all(value(one, name) == value(other, name) for name in PLACE)


def keys_of(images: ImageDataset, by_bytes: bool) -> list[Any]:
    """By which images are known: their places in the dataset, or the SHA-256 of each file that can be read."""
    if not by_bytes:
        return [(images.origin.split, index) for index in indices_in_split(images).tolist()]
    keys = []
    if is_encoded(images.rows.features[images.image_column]):
        for block in images.rows.with_format("arrow").iter(IMAGES_PER_READ):  # row by row takes ten times as long
            for cell in block.column(images.image_column).to_pylist():
                with suppress(UnreadableImage, ReadFailed):
                    keys.append(hashlib.sha256(read_cell(cell, 0)).digest())
    return keys
