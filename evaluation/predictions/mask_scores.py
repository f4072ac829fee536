"""Predicted masks beside the masks that images have: pixels by class, from the files of both.

n images, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evaluation.config import MaskedDataConfig
from evaluation.metrics.outcomes import Outcomes
from evaluation.patches.masks import IGNORED_CLASS, MaskedImages, attach_masks, decode_mask
from evaluation.predictions.pixels import PixelRows
from mpp.data.dataset import ImageDataset
from mpp.errors import UnreadableImage
from mpp.runtime.messages import counted, warn
from mpp.runtime.progress import progress_bar

PixelsByClass = dict[int, int]
"""Number of a class, as in the files of masks -> pixels."""


class PixelCounts(NamedTuple):
    """The pixels of an image that count."""

    true: PixelsByClass
    predicted: PixelsByClass
    right: PixelsByClass


def has_masks(rows: datasets.Dataset, data: MaskedDataConfig) -> bool:
    """Whether a split has the column of masks."""
    return data.mask_column in rows.features


def outcomes_of_masks(
    images: Sequence[ImageDataset],
    splits: Mapping[str, datasets.Dataset],
    rows: PixelRows,
    data: MaskedDataConfig,
) -> dict[str, Outcomes]:
    """The outcomes of the images of each split that have a mask, and are predicted; where there are some.

    Args:
        splits: name -> rows, with the masks.
        rows: say where the predicted masks are.
    """
    outcomes = {}
    masked = [attach_masks(each, splits, data) for each in images if has_masks(splits[each.split], data)]
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
            counts.append(count_pixels(decode_mask(cell, data).numpy(), file))
        except UnreadableImage as reason:
            problems.append(f"{masked.images.image_name(index)}: {reason}")
    return [each for each in counts if each.true], problems


def count_pixels(true: NDArray[np.int16], file: Path) -> PixelCounts:
    """The pixels of a mask (H, W), of the predicted one in a file, and of both, by the number of the class.

    Raises:
        UnreadableImage: the two differ in size.
    """
    predicted = np.array(Image.open(file)).astype(np.int64)
    if predicted.shape != true.shape:
        sizes = [f"{width} x {height}" for height, width in (true.shape, predicted.shape)]
        raise UnreadableImage(f"its mask has {sizes[0]} pixels, and the image {sizes[1]}")
    counted = true != IGNORED_CLASS
    truth, found = true[counted].astype(np.int64), predicted[counted]
    return PixelCounts(*map(count_classes, (truth, found, truth[truth == found])))


def count_classes(pixels: NDArray[np.int64]) -> PixelsByClass:
    """The number of pixels of each class that occurs."""
    numbers, counts = np.unique(pixels, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def to_outcomes(counts: Sequence[PixelCounts], rows: PixelRows) -> Outcomes:
    """Outcomes of the classes that occur, or that the classifier knows: those first, in its order."""
    known = dict(zip(rows.classifier.class_numbers, rows.classifier.class_names, strict=True))
    occurring = {number for image in counts for each in image for number in each}
    unknown = sorted(occurring - known.keys())
    if unknown:
        warn(f"the classifier does not know the classes {', '.join(map(str, unknown))} of the masks: they are missed")
    numbers = [*known, *unknown]
    table = np.zeros((len(counts), len(numbers), len(PixelCounts._fields)), np.int64)
    for row, image in zip(table, counts, strict=True):
        for part, by_class in enumerate(image):
            row[:, part] = [by_class.get(number, 0) for number in numbers]
    names = [*known.values(), *(f"class {number}" for number in unknown)]
    return Outcomes("pixels", table[..., 0], table[..., 1:], names)
