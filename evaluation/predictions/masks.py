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
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from evaluation.config import MaskedDataConfig, PredictConfig
from evaluation.frozen.run_images import LoadedSplits, indices_in_split
from evaluation.metrics.scoring import Outcomes
from evaluation.patches.features import count_confusion, places_of_classes
from evaluation.patches.masks import attach_masks, decode_mask, without_masks
from evaluation.supervision.classifiers import Classifier
from evaluation.tables import ViewsOrErrors, path_in_folder, read_batches, unlabelled_images
from mpp.data.crops import covering_size
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.decode import read_mask
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
        return self.classifier.network.about.class_numbers

    @cached_property
    def images(self) -> list[ImageDataset]:
        """The images of each split, with masks where it has some; UserError where a named column is not there."""
        column = self.data.mask_column
        found = []
        for images in unlabelled_images(self.data, without_masks(self.splits, self.data)):
            is_named = column != MaskedDataConfig.mask_column
            if is_named or column in self.splits[images.split].column_names:
                images = attach_masks(images, self.splits, self.data)
            found.append(images)
        return found

    @property
    def labelled(self) -> bool:
        """Whether there are masks to compare with."""
        return any(self.data.mask_column in images.rows.column_names for images in self.images)

    def rows(self, images: ImageDataset) -> Iterator[pa.Table]:
        """Write the masks of images of a split, and return their rows."""
        self.classifier.network.to(self.accelerator.device)
        types = {"height": pa.int32(), "width": pa.int32(), "class": pa.string(), "probability": pa.float32()}
        types |= {"mask": pa.string()} | ({"overlay": pa.string()} if self.config.overlays else {})
        types |= {f"share_{name}": pa.float32() for name in self.classifier.class_names}
        views = ViewsOrErrors(images, self.data, check_aspect, torch.zeros(0))
        for batch in read_batches(views, batch_size=1):  # they are of several sizes
            row = {} if batch.errors[0] else self.write(batch.pixels[0], batch.images)
            columns = {name: pa.array([row.get(name)], kind) for name, kind in types.items()}
            yield batch.table(columns, self.data, {})

    def write(self, pixels: Tensor, images: ImageDataset) -> dict[str, object]:
        """Write the mask of an image (C, H, W), the only one of `images`, and its overlay; return its row's entries."""
        height, width = pixels.shape[1:]
        classes, probability = predict_mask(self.logits(pixels), (height, width))
        numbers = np.array(self.class_numbers)[classes]
        names = self.classifier.class_names
        shares = np.bincount(classes.ravel(), minlength=len(names)) / classes.size
        drawn = {"mask": draw_mask(numbers, max(self.class_numbers))}
        if self.config.overlays:
            drawn["overlay"] = draw_overlay(as_rgb(stretch(pixels)), numbers)
        row = {"height": height, "width": width, "class": names[shares.argmax()], "probability": probability}
        for kind, picture in drawn.items():
            file = self.file_of(images, 0, kind)
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file, quality=OVERLAY_QUALITY)  # of JPEG
            row[kind] = printable(str(file.relative_to(Path(self.config.out).parent)))
        return row | {f"share_{name}": share for name, share in zip(names, shares, strict=True)}

    def folder(self, kind: str) -> Path:
        """The folder of the files of a kind, mask or overlay, next to the table."""
        out = Path(self.config.out)
        return out.with_name(f"{out.stem}_{kind}s")

    def file_of(self, images: ImageDataset, index: int, kind: str) -> Path:
        """The file of an image's mask or overlay: its own path in `data.path`, or its split and its index there.

        The whole file name is kept: `1.jpg` and `1.png` are two images.
        """
        place = path_in_folder(images.image_name(index), self.data)
        place = place or Path(images.origin.split) / f"{indices_in_split(images)[index]:09d}"
        suffix = ".png" if kind == "mask" else ".jpg"
        return self.folder(kind) / place.with_name(f"{place.name}{suffix}")

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Logits of an image (C, H, W) resized to cover the windows, (C, h, w): the mean over those with a pixel."""
        size = self.classifier.img_size
        covering = covering_size(*pixels.shape[1:], size, self.data.eval_crop)
        covering = [max(own, least) for own, least in zip(covering, size, strict=True)]
        resized = functional.resize(pixels, covering, functional.InterpolationMode.BILINEAR, antialias=True)
        starts = [window_starts(*each) for each in zip(covering, size, strict=True)]
        places = [np.s_[:, top : top + size[0], left : left + size[1]] for top, left in product(*starts)]
        windows = torch.stack([resized[place] for place in places]).split(WINDOWS_PER_FORWARD)
        with self.accelerator.autocast():
            logits = [self.classifier.network(block.to(self.accelerator.device)).cpu() for block in windows]
        total, count = torch.zeros(self.classifier.classes, *covering), torch.zeros(1, *covering)
        for place, of_window in zip(places, torch.cat(logits), strict=True):
            total[place] += of_window
            count[place] += 1
        return total / count

    def outcomes(self, images: ImageDataset, rows: pd.DataFrame) -> Outcomes | None:
        """Pixels of each class in the masks of a split, and of those predicted for them; None: there are none.

        Classes that the classifier does not know count as one, the last.
        """
        names = [*self.classifier.class_names, OTHER_CLASSES]
        places = places_of_classes(self.class_numbers)
        counts, problems = [], []
        is_masked = self.data.mask_column in images.rows.column_names
        for index, cell in enumerate(images.rows[self.data.mask_column] if is_masked else []):
            file = self.file_of(images, index, "mask")
            has_mask = any(cell.values()) if isinstance(cell, dict) else cell is not None
            if has_mask and file.exists():  # else the image has no mask, or no prediction
                try:
                    predicted = read_mask(file.read_bytes(), self.data)
                    true = decode_mask(cell, self.data, predicted.shape).numpy()
                    counts.append(count_confusion(places[true], places[predicted], len(names)))
                except UnreadableImage as reason:
                    problems.append(f"{images.image_name(index)}: {reason}")
        if problems:
            warn(f"{counted(len(problems), 'mask')} of {images.split} left out, the first of {problems[0]}")
        confusion = np.array([each for each in counts if each.any()])
        return Outcomes("pixels", confusion.sum(2), confusion, names) if len(confusion) else None


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


def draw_mask(numbers: NDArray[np.int64], largest: int) -> Image.Image:
    """A mask (H, W) of class numbers: with a palette, or above 255 as grey of 16 bits.

    Args:
        largest: number of any class, by which all masks of a table are of one kind.
    """
    if largest >= PALETTE_COLORS:
        return Image.fromarray(numbers.astype(np.uint16))
    mask = Image.fromarray(numbers.astype(np.uint8))
    mask.putpalette(colors_of(np.arange(PALETTE_COLORS)).tobytes())  # the image becomes indexed
    return mask


def draw_overlay(pixels: Tensor, numbers: NDArray[np.int64]) -> Image.Image:
    """An image (3, H, W) with its mask (H, W) over it; class 0, which is black, is not drawn."""
    image = functional.to_pil_image(pixels)
    drawn = Image.blend(image, Image.fromarray(colors_of(numbers)), OVERLAY_OPACITY)
    drawn.paste(image, mask=Image.fromarray(numbers == 0))
    return drawn
