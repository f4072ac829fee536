"""What the images of a dataset are, in a line; and labels that cannot be right."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpp.config import ImagesConfig
from mpp.runtime.messages import note, shortened, tell, warn

if TYPE_CHECKING:
    from mpp.data.dataset import ImageDataset

SHOWN = 5  # names of classes
FEWEST = 5  # classes, from which on more than half as many as images cannot be right
FEW = 100  # test images, below which the interval that this means is said
Z = 1.96  # a normal variable is within so many deviations of its mean with a probability of 95 %


def describe(config: ImagesConfig) -> str:
    """The dataset, for messages."""
    return f"data.path {config.path}" if config.path else "the package's birds"


def announce(source: str, splits: Sequence["ImageDataset"], others: Mapping[str, int]) -> None:
    """Say how many images there are, in which splits, how many have a label, and of how many classes.

    Args:
        source: what the dataset is called.
        others: splits that are not used -> how many images.
    """
    parts = [f"{len(split)} {split.split} ({labelled_in_words(split.labels)})" for split in splits]
    used = ", ".join(parts)
    unused = "".join(f", {count} {name} (not used)" for name, count in others.items())
    names = splits[0].names[: splits[0].classes] if splits[0].names else []
    count = f"{len(names)} class{'es' * (len(names) != 1)}"
    classes = f"; {count}: {shortened(names, SHOWN)}" if names else ""
    tell(f"{source}: {used}{unused}{classes}")


def announce_stream(source: str, shards: int, held_out: int, samples: Sequence["ImageDataset"]) -> None:
    """The same of a stream: how many shards it has, and what was looked at of these.

    Args:
        shards, held_out: to train on, and held out.
        samples: images of both that are kept for evaluation.
    """
    kept = ", ".join(f"{len(sample)} {sample.split} ({labelled_in_words(sample.labels)})" for sample in samples)
    tell(f"{source}: a stream of {shards} shards, {held_out} held out; kept for evaluation: {kept}")


def labelled_in_words(labels: NDArray[np.int64] | None) -> str:
    """How many images have a label."""
    count = 0 if labels is None else int(has_label(labels).sum())
    return "no labels" if count == 0 else "labelled" if count == len(labels) else f"{count} labelled"


def has_label(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(n,): which images have one; labels (n,), or (n, L) of which any is right."""
    return labels >= 0 if labels.ndim == 1 else (labels >= 0).any(1)


def warn_of_labels(train: "ImageDataset", held_out: "ImageDataset") -> None:
    """Warn of labels that cannot be right, as where folders of sites or ids are taken for classes."""
    if train.labels is None or train.labels.ndim > 1 or not (train.labels >= 0).any():
        return
    numbers, counts = np.unique(train.labels[train.labels >= 0], return_counts=True)
    if len(numbers) > max(counts.sum() / 2, FEWEST):
        many = f"{len(numbers)} classes among {counts.sum()} labelled training images"
        warn(f"{many}: are these names of images, and not of classes?")
    elif (counts == 1).any():
        single = [train.names[number] for number in numbers[counts == 1]]
        warn(f"{len(single)} class{'es' * (len(single) > 1)} with one training image: {shortened(single)}")
    if held_out.labels is not None and (held_out.labels >= 0).any():
        known = (held_out.labels >= 0) & np.isin(held_out.labels, numbers)
        if not known.any():
            names = [train.names[number] for number in np.unique(held_out.labels[held_out.labels >= 0])]
            here = shortened([train.names[number] for number in numbers])
            what = f"no class of the held-out images ({shortened(names)}) occurs in training ({here})"
            warn(f"{what}: are these folders of sites or dates, and not of classes?")


def note_tested(
    train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], names: Sequence[str] | None = None
) -> None:
    """Say how many test images cannot be right, since training lacks their classes, and how little few images say.

    Args:
        train_labels: (N,).
        test_labels: (M,); or (M, L) of which any is right, padded with -1.
        names: of the classes, by number.
    """
    labels = test_labels if test_labels.ndim > 1 else test_labels[:, None]
    known = np.isin(labels, train_labels)
    lost = labels[~known.any(1)]
    classes = np.unique(lost[lost >= 0]).tolist()
    if classes:
        named = [names[number] if names and number < len(names) else str(number) for number in classes]
        shown = shortened(named)
        which = "class" if len(classes) == 1 else "classes"
        of_classes = f"of {len(classes)} {which} without a training image ({shown})"
        note(f"{len(lost)} of {len(labels)} test images are {of_classes}: they count as wrong")
    if len(labels) < FEW:
        points = 100 * half_width(len(labels))
        note(f"{len(labels)} held-out images: an accuracy of 50 % is known to within {points:.0f} points")


def half_width(count: int) -> float:
    """Half of Wilson's 95 % interval of a share of a half, of so many images."""
    return Z / (2 * math.sqrt(count + Z**2))
