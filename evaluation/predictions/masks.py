"""Rows and figures of images whose pixels have a class each, and the masks: at an image's own size, as files.

An image is resized as in the evaluation that trained the head, but all of it is shown: in windows of the encoder's
size, whose logits are averaged where they overlap. The mean is upsampled to the image's own size; a pixel's class is
that of the largest logit there. Masks are indexed PNG with PASCAL VOC's colours.

C classes, H x W pixels of an image, h x w of the resized one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from evaluation.config import MaskedDataConfig, PredictConfig
from evaluation.frozen.run_images import LoadedSplits, indices_in_split
from evaluation.metrics.scoring import Outcomes
from evaluation.patches.masks import (
    IGNORED_CLASS,
    attach_masks,
    decode_mask,
    warn_of_turned_images,
    with_image_column,
)
from evaluation.supervision.classifiers import Classifier
from evaluation.tables import (
    ImageBatch,
    ViewsOrErrors,
    identify_splits,
    path_in_folder,
    read_batches,
    unlabelled_images,
)
from mpp.data.crops import covering_size
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.pictures import without_size_limit
from mpp.errors import UnreadableImage
from mpp.features.reconstructions import as_rgb, stretch
from mpp.runtime.messages import counted, printable, warn

WINDOWS_PER_FORWARD = 16
MAX_ASPECT = 16  # a longer image would have to be enlarged beyond all memory
PALETTE_COLORS = 256
OTHER_CLASSES = "other classes"  # of masks, which the classifier does not know
OVERLAY_OPACITY = 0.5
OVERLAY_QUALITY = 90


@dataclass(frozen=True)
class MaskPredictions:
    """Predictions of the class of each pixel."""

    config: PredictConfig
    classifier: Classifier
    data: MaskedDataConfig
    splits: LoadedSplits
    """The rows of the images, perhaps with masks."""
    accelerator: Accelerator

    @property
    def class_numbers(self) -> list[int]:
        """Of the classes in the files of masks, in their order."""
        return self.classifier.network.class_numbers

    @cached_property
    def images(self) -> list[ImageDataset]:
        """The images of each split."""
        first = next(iter(self.splits.values()))
        return unlabelled_images(with_image_column(self.data, first.features), self.splits)

    @cached_property
    def masked(self) -> dict[str, Dataset]:
        """Split -> the masks of its images, where it has some; UserError where a column that is named is not there."""
        column = self.data.mask_column
        is_named = column != MaskedDataConfig.mask_column
        have_masks = [each for each in self.images if is_named or column in self.splits[each.split].features]
        masked = [attach_masks(each, self.splits, self.data) for each in have_masks]
        warn_of_turned_images(masked, self.data)
        return {each.images.split: each.masks["mask"] for each in masked}

    def identity(self) -> dict[str, Any]:
        """The settings and images that the table depends on."""
        settings = {"class_numbers": self.class_numbers, "overlays": self.config.overlays, "masked": [*self.masked]}
        return settings | identify_splits(self.data, self.images)

    def folder(self, kind: str) -> Path:
        """The folder of the masks, or of the overlays, next to the table."""
        out = Path(self.config.out)
        return out.with_name(f"{out.stem}_{kind}")

    def rows(self, images: ImageDataset) -> Iterator[pa.Table]:
        """Write the masks of images of a split, and return their rows."""
        self.classifier.network.to(self.accelerator.device)
        views = ViewsOrErrors(images, self.data, check_aspect, torch.zeros(0))
        for batch in read_batches(views, batch_size=1):  # they are of several sizes
            row = {} if batch.errors[0] else self.write(batch)
            columns = {name: pa.array([row.get(name)], kind) for name, kind in self.types().items()}
            yield batch.table(columns, self.data, {})

    def types(self) -> dict[str, pa.DataType]:
        """The columns, and their types."""
        types = {"height": pa.int32(), "width": pa.int32(), "class": pa.string(), "probability": pa.float32()}
        types |= {"mask": pa.string()} | ({"overlay": pa.string()} if self.config.overlays else {})
        return types | dict.fromkeys(self.share_columns, pa.float32())

    @property
    def share_columns(self) -> list[str]:
        """Columns with the share of each class in the pixels."""
        return [f"share_{name}" for name in self.classifier.class_names]

    def write(self, batch: ImageBatch) -> dict[str, object]:
        """Write the mask of the image of a batch, and its overlay; return the entries of its row."""
        (pixels,) = batch.pixels
        size = tuple(pixels.shape[1:])
        classes, probability = predict_mask(self.logits(pixels), size)
        numbers = np.array(self.class_numbers)[classes]
        file = self.image_file(batch.images, 0, "masks", ".png")
        write_mask(file, numbers, max(self.class_numbers))
        names = self.classifier.class_names
        shares = np.bincount(classes.ravel(), minlength=len(names)) / classes.size
        row = {"height": size[0], "width": size[1], "class": names[shares.argmax()], "probability": probability}
        row["mask"] = printable(str(file.relative_to(self.folder("masks").parent)))
        if self.config.overlays:
            file = self.image_file(batch.images, 0, "overlays", ".jpg")
            write_overlay(file, as_rgb(stretch(pixels)).permute(1, 2, 0).numpy(), numbers)
            row["overlay"] = printable(str(file.relative_to(self.folder("overlays").parent)))
        return row | dict(zip(self.share_columns, shares, strict=True))

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Logits of an image (C, H, W) resized to cover the windows, (C, h, w): the mean over those with a pixel."""
        size = self.classifier.img_size
        covering = covering_size(*pixels.shape[1:], size, self.data.eval_crop)
        covering = [max(own, least) for own, least in zip(covering, size, strict=True)]
        resized = functional.resize(pixels, covering, functional.InterpolationMode.BILINEAR, antialias=True)
        height, width = resized.shape[1:]
        corners = [(top, left) for top in window_starts(height, size[0]) for left in window_starts(width, size[1])]
        total = torch.zeros(self.classifier.classes, height, width)
        count = torch.zeros(height, width)
        for first in range(0, len(corners), WINDOWS_PER_FORWARD):
            chosen = corners[first : first + WINDOWS_PER_FORWARD]
            windows = torch.stack([functional.crop_image(resized, *corner, *size) for corner in chosen])
            with self.accelerator.autocast():
                logits = self.classifier.network(windows.to(self.accelerator.device)).cpu()
            for (top, left), of_window in zip(chosen, logits, strict=True):
                total[:, top : top + size[0], left : left + size[1]] += of_window
                count[top : top + size[0], left : left + size[1]] += 1
        return total / count

    def image_file(self, images: ImageDataset, index: int, kind: str, suffix: str) -> Path:
        """The file of an image's mask or overlay: its own path in `data.path`, or its split and its index there.

        The whole file name is kept: `1.jpg` and `1.png` are two images.
        """
        place = path_in_folder(images.image_name(index), self.data)
        place = place or Path(images.origin.split) / f"{indices_in_split(images)[index]:09d}"
        return self.folder(kind) / place.with_name(f"{place.name}{suffix}")

    def outcomes(self, images: ImageDataset, rows: pd.DataFrame) -> Outcomes | None:
        """Pixels of each class in the masks of a split, and of those predicted for them; None: there are none.

        Classes that the classifier does not know count as one, the last.
        """
        counts, problems = [], []
        for index, cell in enumerate(self.masked.get(images.split, [])):
            file = self.image_file(images, index, "masks", ".png")
            has_mask = any(cell.values()) if isinstance(cell, dict) else cell is not None
            if has_mask and file.exists():  # else the image has no mask, or no prediction
                try:
                    counts.append(self.count_pixels(decode_mask(cell, self.data).numpy(), file))
                except UnreadableImage as reason:
                    problems.append(f"{images.image_name(index)}: {reason}")
        if problems:
            warn(f"{counted(len(problems), 'mask')} of {images.split} left out, the first of {problems[0]}")
        confusion = np.array([each for each in counts if each.any()])
        if not len(confusion):
            return None
        return Outcomes("pixels", confusion.sum(2), confusion, [*self.classifier.class_names, OTHER_CLASSES])

    def count_pixels(self, true: NDArray[np.int16], file: Path) -> NDArray[np.int64]:
        """Pixels of each class in a mask (H, W), rows, and in the predicted one, in a file: (C + 1, C + 1).

        Raises:
            UnreadableImage: the two differ in size.
        """
        with without_size_limit():
            predicted = np.array(Image.open(file)).astype(np.int64)
        if predicted.shape != true.shape:
            sizes = [f"{width} x {height}" for height, width in (true.shape, predicted.shape)]
            raise UnreadableImage(f"its mask has {sizes[0]} pixels, and the image {sizes[1]}")
        numbers = pd.Index(self.class_numbers)
        size = len(numbers) + 1
        rows, columns = (numbers.get_indexer(each[true != IGNORED_CLASS]) % size for each in (true, predicted))
        return np.bincount(rows * size + columns, minlength=size**2).reshape(size, size)  # others, -1, come last


def check_aspect(pixels: Tensor) -> Tensor:
    """The image (C, H, W); raises UnreadableImage if it is too long."""
    height, width = pixels.shape[1:]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise UnreadableImage(f"{width} x {height} pixels are too long for a mask: cut it in parts")
    return pixels


def window_starts(length: int, window: int) -> list[int]:
    """Starts of evenly spaced windows that cover a length."""
    count = math.ceil(length / window)
    return np.linspace(0, length - window, count).round().astype(int).tolist()


def predict_mask(logits: Tensor, size: tuple[int, int]) -> tuple[NDArray[np.int64], float]:
    """The class of each pixel by logits (C, h, w) of a resized image, upsampled to `size` (H, W) one after the other.

    Returns:
        Classes (H, W), and the mean probability of the predicted class.
    """
    best = torch.full(size, -torch.inf)
    logsumexp = best.clone()
    classes = torch.zeros(size, dtype=torch.int64)
    for number, of_class in enumerate(logits):
        upsampled = F.interpolate(of_class[None, None], size, mode="bilinear")[0, 0]
        classes[upsampled > best] = number
        best = best.maximum(upsampled)
        logsumexp = logsumexp.logaddexp(upsampled)
    return classes.numpy(), float((best - logsumexp).exp().double().mean())


def colors_of(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    """PASCAL VOC's colours of class numbers, (..., 3): the bits of a number, spread over red, green and blue."""
    rest = numbers[..., None] % PALETTE_COLORS >> np.arange(3)
    return sum((rest >> 3 * bit & 1) << 7 - bit for bit in range(8)).astype(np.uint8)


def write_mask(file: Path, numbers: NDArray[np.int64], largest: int) -> None:
    """Write a mask (H, W) of class numbers as PNG: with a palette, or above 255 as grey of 16 bits.

    Args:
        largest: number of any class, by which all masks of a table are of one kind.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    mask = Image.fromarray(numbers.astype(np.uint8 if largest < PALETTE_COLORS else np.uint16))
    if largest < PALETTE_COLORS:
        mask.putpalette(colors_of(np.arange(PALETTE_COLORS)).tobytes())  # the image becomes indexed
    mask.save(file, "PNG")


def write_overlay(file: Path, pixels: NDArray[np.uint8], numbers: NDArray[np.int64]) -> None:
    """Write an image (H, W, 3) with its mask (H, W) over it as JPEG; class 0, which is black, is not drawn."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mixed = (1 - OVERLAY_OPACITY) * pixels + OVERLAY_OPACITY * colors_of(numbers)
    drawn = np.where((numbers == 0)[..., None], pixels, mixed.round().astype(np.uint8))
    Image.fromarray(drawn).save(file, "JPEG", quality=OVERLAY_QUALITY)
