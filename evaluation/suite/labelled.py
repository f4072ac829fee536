"""The labelled images that evaluation learns from and tests on."""

import math
import os
from collections.abc import Sequence
from functools import cache

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

from evaluation.suite.run_images import check_unseen
from mpp.config import SourceConfig
from mpp.data.dataset import ImageDataset
from mpp.data.overview import describe
from mpp.data.sources import load_image_datasets
from mpp.errors import UserError

FEW = 100  # test images, below which the interval that this means is said
Z = 1.96  # a normal variable is within so many deviations of its mean with a probability of 95 %
SHOWN = 3  # classes in a message


@cache
def note(text: str) -> None:
    """Say it once, not again at every depth or in every run; where several processes evaluate, the first one does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}")


def note_tested(
    train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], names: Sequence[str] | None = None
) -> None:
    """Say how many test images cannot be right, since training lacks their classes, and how little few images say.

    Args:
        train_labels: (N,).
        test_labels: (M,); or (M, L) of which any is right, padded with -1.
        names: of the classes, by number.
    """
    labels = test_labels.reshape(len(test_labels), -1)
    known = np.isin(labels, train_labels)
    lost = labels[~known.any(1)]
    classes = np.unique(lost[lost >= 0]).tolist()
    if classes:
        named = [str(names[number]) if names and number < len(names) else str(number) for number in classes[:SHOWN]]
        shown = ", ".join([*named, *(["..."] if len(classes) > SHOWN else [])])
        which = "class" if len(classes) == 1 else "classes"
        of_classes = f"of {len(classes)} {which} without a training image ({shown})"
        note(f"{len(lost)} of {len(labels)} test images are {of_classes}: they count as wrong")
    if len(labels) < FEW:
        points = 100 * half_width(len(labels))
        note(f"{len(labels)} held-out images: an accuracy of 50 % is known to within {points:.0f} points")


def half_width(count: int) -> float:
    """Half of Wilson's 95 % interval of a share of a half, of so many images."""
    return Z / (2 * math.sqrt(count + Z**2))


def load_labelled(
    data: SourceConfig, accelerator: Accelerator, encoder: str = "", spare: int = 0
) -> list[ImageDataset]:
    """The labelled images of the training and the held-out split; says which these are.

    Args:
        encoder: the one that is evaluated on them; empty: none that has learned anything.
        spare: of the training images that `data.train_images` leaves out, as many at most are a third split.
    Raises:
        UserError: there are none, or the encoder was trained with the labels of those that are held out.
    """
    if getattr(data, "streaming", False):
        raise UserError("data.streaming is for pre-training; learning from labels needs indexed images")
    with accelerator.main_process_first():
        splits = [part.labelled() for part in load_image_datasets(data)]
    if None in splits:
        ways = (
            "name their column by data.label_column, have a folder for each of several classes (all at one depth), or"
        )
        raise UserError(f"the images have no labels; {ways} a metadata.csv with the columns file_name and label")
    if splits[0].labels.ndim > 1:
        raise UserError("training images have several labels each; only held-out ones may")
    whole, held_out = splits
    train = whole.choose(data.train_images, data.eval_seed)
    check_unseen(encoder, data, train, held_out)
    accelerator.print(f"{describe(data)}: {len(train)} labelled images to learn from, {len(held_out)} to judge by")
    note_tested(train.labels, held_out.labels, getattr(train, "names", None))
    return [train, held_out, *([whole.choose(spare, data.eval_seed, after=len(train))] if spare else [])]
