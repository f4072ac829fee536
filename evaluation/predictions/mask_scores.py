"""Predicted masks compared with the masks that images have: pixels by class, from the files of both.

n images, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evaluation.config import MaskedDataConfig
from evaluation.metrics.scoring import Outcomes
from evaluation.patches.masks import (
    IGNORED_CLASS,
    MaskedImages,
    attach_masks,
    decode_mask,
    describe_no_masks,
    warn_of_turned_images,
)
from evaluation.predictions.pixels import PixelRows
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.pictures import without_size_limit
from mpp.errors import UnreadableImage, UserError
from mpp.runtime.messages import counted, progress_bar, warn

PixelCounts = dict[tuple[int, int], int]
"""Numbers of a true class and of the predicted one, as in the files of masks -> pixels of an image."""


def images_with_masks(
    images: Sequence[ImageDataset], splits: Mapping[str, datasets.Dataset], data: MaskedDataConfig
) -> list[MaskedImages]:
    """The images of the splits that have a column of masks, undecoded. A warning says why masks cannot be compared.

    Args:
        splits: name -> rows of whole splits, with the masks.
    Raises:
        UserError: a column is named that no split has.
    """
    have_masks = [each for each in images if data.mask_column in splits[each.origin.split].features]
    if not have_masks and data.mask_column not in (None, MaskedDataConfig.mask_column):
        raise UserError(describe_no_masks(data, [*next(iter(splits.values())).features]))
    try:
        return [attach_masks(each, splits, data) for each in have_masks]
    except UserError as error:
        warn(f"no scores are computed: {error}")
        return []


def outcomes_of_masks(masked: Sequence[MaskedImages], rows: PixelRows, data: MaskedDataConfig) -> dict[str, Outcomes]:
    """The outcomes of the images of each split that have a mask, and are predicted; where there are some.

    Args:
        rows: say where the predicted masks are.
    """
    outcomes = {}
    warn_of_turned_images(masked, data)
    total = sum(len(each.masks) for each in masked)
    with progress_bar(desc="scores", unit="image", total=total) as bar:
        for of_split in masked:
            counts, problems = count_split(of_split, rows, data, bar.update)
            if problems:
                shown = f"{counted(len(problems), 'mask')} of {of_split.images.split} left out"
                warn(f"{shown}, the first of {problems[0]}")
            if counts:
                outcomes[of_split.images.split] = to_outcomes(counts, rows)
    return outcomes


def count_split(
    masked: MaskedImages, rows: PixelRows, data: MaskedDataConfig, on_image: Callable[[int], Any]
) -> tuple[list[PixelCounts], list[str]]:
    """Pixels of each image of a split that has a mask; and the masks that cannot be compared, with the reason."""
    counts: list[PixelCounts] = []
    problems: list[str] = []
    for index in range(len(masked.masks)):
        file = rows.mask_file(masked.images, index)
        cell = masked.masks[index]["mask"]
        on_image(1)
        has_mask = any(cell.values()) if isinstance(cell, dict) else cell is not None
        if not has_mask or not file.exists():
            continue  # the image cannot be decoded, or has no mask
        try:
            counts.append(count_pairs(decode_mask(cell, data).numpy(), file))
        except UnreadableImage as reason:
            problems.append(f"{masked.images.image_name(index)}: {reason}")
    return [each for each in counts if each], problems


def count_pairs(true: NDArray[np.int16], file: Path) -> PixelCounts:
    """The pixels of a mask (H, W) and of the predicted one in a file, by the numbers of both classes.

    Raises:
        UnreadableImage: the two differ in size.
    """
    with without_size_limit():
        predicted = np.array(Image.open(file)).astype(np.int64)
    if predicted.shape != true.shape:
        sizes = [f"{width} x {height}" for height, width in (true.shape, predicted.shape)]
        raise UnreadableImage(f"its mask has {sizes[0]} pixels, and the image {sizes[1]}")
    counted = true != IGNORED_CLASS
    pairs, counts = np.unique(np.stack([true[counted], predicted[counted]]), axis=1, return_counts=True)
    return dict(zip(zip(*pairs.tolist(), strict=True), counts.tolist(), strict=True))


def to_outcomes(counts: Sequence[PixelCounts], rows: PixelRows) -> Outcomes:
    """Outcomes of the classes that occur, or that the classifier knows: those first, in its order."""
    known = dict(zip(rows.classifier.class_numbers, rows.classifier.class_names, strict=True))
    occurring = {number for of_image in counts for pair in of_image for number in pair}
    unknown = sorted(occurring - known.keys())
    if unknown:
        warn(f"the classifier does not know the classes {', '.join(map(str, unknown))} of the masks: they are missed")
    places = {number: place for place, number in enumerate([*known, *unknown])}
    confusion = np.zeros((len(counts), len(places), len(places)), np.int32)
    for of_image, pairs in zip(confusion, counts, strict=True):
        for (true, predicted), pixels in pairs.items():
            of_image[places[true], places[predicted]] = pixels
    names = [*known.values(), *(f"class {number}" for number in unknown)]
    return Outcomes("pixels", confusion.sum(2), confusion, names)
