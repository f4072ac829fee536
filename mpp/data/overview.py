"""Lines about a dataset: its images, labels and classes, and warnings of labels that cannot be right."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from mpp.config import ImagesConfig, as_words
from mpp.data.dataset import ImageDataset, has_label, names_by_number
from mpp.data.decoding.decode import other_depth
from mpp.errors import ReadFailed, UnreadableImage
from mpp.runtime.messages import counted, is_first_process, note, shortened, tell, warn

SHOWN_CLASSES = 5
IMAGES_OF_DEPTH = 8  # that are decoded to compare their depth
MIN_SUSPICIOUS_CLASSES = 5  # with more classes than this, more than half as many as images cannot be right
FEW_TEST_IMAGES = 100  # with fewer, the interval of an accuracy is printed
Z_95 = 1.96  # standard deviations around the mean that hold 95 % of a normal distribution


def announce_splits(
    source: str, splits: Sequence[ImageDataset], unused: Mapping[str, int], config: ImagesConfig
) -> None:
    """Print how many images each split has, how many of them have a label, and the classes; warn of another depth.

    Args:
        source: the dataset's name: see `describe_source`.
        splits: in use; the first is trained on, and has the classes.
        unused: other splits -> number of images.
    """
    parts = [describe_split(split) for split in splits]
    parts += [f"{count} {name} (not used)" for name, count in unused.items()]
    line = f"{source}: {', '.join(parts)}"
    train = splits[0]
    classes = train.class_names[: train.classes]
    if classes:
        line += f"; {counted(len(classes), 'class', 'classes')}: {shortened(classes, SHOWN_CLASSES)}"
    tell(line)
    for split in splits:
        warn_of_depth(split, config)


def describe_split(split: ImageDataset) -> str:
    """A split in words: "160 train (156 labelled)"."""
    labelled = 0 if split.labels is None else int(has_label(split.labels).sum())
    label_count = {len(split): "labelled", 0: "no labels"}.get(labelled, f"{labelled} labelled")
    return f"{len(split)} {split.split} ({label_count})"


def warn_of_labels(train: ImageDataset) -> None:
    """Warn of labels that cannot be right, as where the names of images are taken for classes."""
    if train.labels is None or train.label_kind != "class" or train.labels.ndim > 1:
        return
    labels = train.labels[train.labels >= 0]
    classes = len(np.unique(labels))
    if classes > max(len(labels) / 2, MIN_SUSPICIOUS_CLASSES):
        what = f"{classes} classes among {len(labels)} labelled training images"
        warn(f"{what}: are these names of images, and not of classes?")


def warn_of_depth(images: ImageDataset, config: ImagesConfig) -> None:
    """Warn of images of another depth than the one that the settings are for, perhaps those of an encoder's run."""
    chosen = images.choose(IMAGES_OF_DEPTH, 0)
    depths = []
    for index in range(len(chosen)) if is_first_process() else ():
        with suppress(UnreadableImage, ReadFailed):
            depths.append(other_depth(chosen.encoded(index, config), config))
    if depths and all(depths):
        most, white = map(max, zip(*depths, strict=True))
        reach = f"values of {images.split} images reach {most:g}, and {white:g} becomes white"
        warn(f"{reach} (data.range {as_words(config.range)}): are they of another depth? --data.range '[0, LARGEST]'")


def note_tested(
    train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], names: Sequence[str] | None = None
) -> None:
    """Note how many test images are of classes without training images, and how wide the interval of few images is.

    Args:
        test_labels: (M,); or (M, L) of which any is right, padded with -1.
        names: of the classes, by number.
    """
    labels = test_labels if test_labels.ndim > 1 else test_labels[:, None]
    trained = np.isin(labels, train_labels).any(1)
    unanswerable = labels[~trained]
    classes = np.unique(unanswerable[unanswerable >= 0]).tolist()
    if classes:
        shown = shortened(names_by_number(names or (), classes))
        reason = f"of {counted(len(classes), 'class', 'classes')} without a training image ({shown})"
        note(f"{len(unanswerable)} of {len(labels)} test images are {reason}: they count as wrong")
    if len(labels) < FEW_TEST_IMAGES:
        points = 100 * half_width(len(labels))
        note(f"{counted(len(labels), 'held-out image')}: an accuracy of 50% is known to within {points:.0f} points")


def half_width(count: int) -> float:
    """Half of Wilson's 95 % interval of an accuracy of 50 % on `count` images."""
    return Z_95 / (2 * math.sqrt(count + Z_95**2))
