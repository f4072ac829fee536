"""Statistics of masks: classes, their shares of patches and of pixels, and masks that may be mistaken.

n images, h x w patches, H x W pixels, C classes.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from evaluation.config import MaskedDataConfig
from evaluation.patches.features import PatchFeatures
from evaluation.patches.masks import IGNORED_CLASS, LARGEST_CLASS, MaskedImages, MaskedSplits
from mpp.config import require
from mpp.data.columns import read_cell
from mpp.data.data_path import describe_source
from mpp.data.decoding.channels import TURNED
from mpp.data.decoding.decode import stored_orientation
from mpp.errors import UnreadableImage
from mpp.runtime.messages import counted, warn

IGNORED_SHARE_TO_WARN = 0.2  # of a split's pixels, above which the setting that ignores them is named
RARE_CLASS_SHARE = 1e-4  # of the pixels that count, below which a class is named: it may be noise
MAX_EXAMPLES = 3  # images or classes named in a warning
MASK_PARTS = 16  # that masks are counted in, which bounds the memory
SHARES_PER_BLOCK = 2**24  # computed at a time, which bounds the memory


def find_classes(masks: NDArray[np.int16]) -> NDArray[np.int16]:
    """The classes that occur in masks, ascending."""
    return np.flatnonzero(count_pixels(masks)[1:]).astype(np.int16)


def with_numbered_classes(features: PatchFeatures) -> tuple[PatchFeatures, NDArray[np.int16]]:
    """The same features with classes numbered from 0 without gaps, and the numbers (C,) in the files of the masks.

    Raises:
        UserError: the masks are of one class.
    """
    numbers = np.union1d(find_classes(features.train_masks), find_classes(features.test_masks))
    allowed = "a column of several classes, not counting data.ignore_index"
    require(len(numbers) > 1, "data.mask_column", f"of the classes {numbers.tolist()}", allowed)
    largest = int(numbers.max())
    if len(numbers) == largest + 1:
        return features, numbers
    ranks = np.full(largest + 2, IGNORED_CLASS, np.int16)  # the last one is that of IGNORED_CLASS, -1
    ranks[numbers] = np.arange(len(numbers))
    numbered = features._replace(train_masks=ranks[features.train_masks], test_masks=ranks[features.test_masks])
    return numbered, numbers


def class_shares_of_patches(masks: NDArray[np.int16], grid: tuple[int, int], classes: int) -> Iterator[Tensor]:
    """The share of each patch that is of each class, (b, h, w, C) by blocks of images; ignored pixels are of none."""
    images_per_block = max(1, SHARES_PER_BLOCK // (classes * masks[0].size))
    for block in torch.from_numpy(masks).split(images_per_block):
        numbers = block.long()
        counted = numbers != IGNORED_CLASS
        one_hot = F.one_hot(numbers.where(counted, 0), classes) * counted[..., None]
        yield F.adaptive_avg_pool2d(one_hot.movedim(-1, 1).float(), grid).movedim(1, -1)


def describe_masked_images(splits: MaskedSplits, data: MaskedDataConfig) -> str:
    """The number of images to learn from and to evaluate on, for a message."""
    train, test = splits
    counts = f"{counted(len(train.images), 'image')} with masks to learn from, {len(test.images)} to evaluate on"
    return f"{describe_source(data)}: {counts}"


def warn_of_turned_images(splits: Sequence[MaskedImages], data: MaskedDataConfig) -> None:
    """Warn if images are turned by their orientation tag, and their masks have none."""
    names = [name for masked in splits for name in images_turned_alone(masked, data)]
    if names:
        warn(
            f"{counted(len(names), 'image')} turned by an orientation tag in the file, with a mask without such a "
            f"tag, such as {', '.join(names[:MAX_EXAMPLES])}: the masks are used as stored. If they "
            "were drawn on the images as stored, remove the tag from the images"
        )


def images_turned_alone(masked: MaskedImages, data: MaskedDataConfig) -> Iterator[str]:
    """Names of the images that are turned by their orientation tag, and whose masks are not."""
    images = masked.images
    for index in range(len(images)):
        with contextlib.suppress(UnreadableImage):  # it is named when it is decoded
            image = images.encoded(index, data)
            if stored_orientation(image) not in TURNED:
                continue
            mask = read_cell(masked.masks[index]["mask"], data.read_retries, source=data.path)
            if stored_orientation(mask) not in TURNED:
                yield images.image_name(index)


def report_pixels(features: PatchFeatures, data: MaskedDataConfig) -> None:
    """Print the share of the masks' pixels that is ignored, and warn of masks that may be mistaken."""
    train = count_pixels(features.train_masks)
    test = count_pixels(features.test_masks)
    train_share, test_share = (float(counts[0] / counts.sum()) for counts in (train, test))
    ignored = "null" if data.ignore_index is None else data.ignore_index
    shares = f"{train_share:.1%} of the pixels to learn from and {test_share:.1%} of those to evaluate on"
    print(f"{shares} are ignored (data.ignore_index is {ignored})")
    largest_share = max(train_share, test_share)
    if largest_share > IGNORED_SHARE_TO_WARN:
        warn(
            f"{largest_share:.0%} of the masks' pixels are {ignored}, which data.ignore_index leaves out; "
            f"if {ignored} is a class, set --data.ignore_index null"
        )
    warn_of_rare_classes((train + test)[1:])


def count_pixels(masks: NDArray[np.int16]) -> NDArray[np.int64]:
    """The number of pixels that are ignored, and that are of each class up to the largest possible: (1 + C,)."""
    counts = np.zeros(LARGEST_CLASS + 2, np.int64)
    for part in np.array_split(masks, MASK_PARTS):
        counts += np.bincount(part.ravel().astype(np.int32) - IGNORED_CLASS, minlength=len(counts))
    return counts


def warn_of_rare_classes(counts: NDArray[np.int64]) -> None:
    """Warn of classes that have next to no pixels.

    Lossy compression and blurred edges make such classes, and each weighs in the mean IoU as much as another.

    Args:
        counts: (C,) pixels of each class.
    """
    total = counts.sum()
    rare = np.flatnonzero((counts > 0) & (counts < RARE_CLASS_SHARE * total))
    if len(rare) == 0:
        return
    rarest = rare[np.argsort(counts[rare], kind="stable")][:MAX_EXAMPLES]
    examples = ", ".join(f"class {number} ({counts[number]} of {total})" for number in rarest)
    warn(
        f"{len(rare)} of the masks' classes have less than {RARE_CLASS_SHARE:.2%} of the pixels, such as "
        f"{examples}; each counts as much in the mean IoU as a frequent one. Masks that were once JPEG, or resized "
        "with blurred edges, have such classes"
    )
