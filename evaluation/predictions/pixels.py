"""The columns of a table of predicted masks, and the masks: the class of each pixel of an image, at its own size.

An image is resized as in the evaluation that trained the head, but all of it is shown: in windows of the encoder's
size, whose logits are averaged where they overlap. The mean is upsampled to the image's own size; a pixel's class is
that of the largest logit there.

C classes, H x W pixels of an image, h x w of the resized one.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional

from evaluation.config import ProbeDataConfig
from evaluation.frozen.encoder import FrozenEncoder
from evaluation.frozen.run_images import indices_in_split
from evaluation.patches.features import LinearReading, patch_features, upsample
from evaluation.predictions.masks import place_of_image, write_mask, write_overlay
from evaluation.predictions.summary import SHARE_PREFIX
from evaluation.tables.images import ViewsOrErrors, name_in_folder, read_batches
from mpp.config import ImageSize
from mpp.data.crops import MAX_RELATIVE_ASPECT, covering_size
from mpp.data.dataset import ImageDataset
from mpp.errors import UnreadableImage
from mpp.features.reconstructions import as_rgb, stretch
from mpp.runtime.messages import printable

PIXEL_LOGITS_PER_BLOCK = 2**24  # upsampled at a time, which bounds the memory
WINDOWS_PER_FORWARD = 16


class ImageToSegment(NamedTuple):
    """An image for the encoder, and for its overlay."""

    resized: Tensor  # (C, h, w)
    shown: Tensor  # (3, H, W) uint8


class PredictedMask(NamedTuple):
    """The class of each pixel of an image."""

    classes: NDArray[np.int64]  # (H, W), in the order of the head's outputs
    probability: float  # of the predicted class, the mean over pixels


@dataclass(frozen=True)
class PixelClassifier:
    """A linear reading of the patches of an encoder: see `LinearReading`."""

    encoder: FrozenEncoder
    reading: LinearReading
    depth: int
    crop_pct: float
    class_names: list[str]
    class_numbers: list[int]
    """In the files of masks."""

    def windows_logits(self, windows: Tensor, accelerator: Accelerator) -> Tensor:
        """Logits of the pixels of windows (B, C, height, width), (B, classes, height, width) on the CPU."""
        with accelerator.autocast():
            (features,) = patch_features(self.encoder, windows.to(accelerator.device), [self.depth])
        logits = self.reading(features.to(accelerator.device))
        return upsample(logits, windows.shape[-2:]).cpu()

    @torch.no_grad()
    def logits(self, resized: Tensor, accelerator: Accelerator) -> Tensor:
        """Logits of the pixels of a resized image, (classes, h, w): the mean over the windows that show a pixel."""
        size = self.encoder.img_size
        height, width = resized.shape[1:]
        corners = [(top, left) for top in window_starts(height, size[0]) for left in window_starts(width, size[1])]
        total = torch.zeros(len(self.class_names), height, width)
        count = torch.zeros(height, width)
        for first in range(0, len(corners), WINDOWS_PER_FORWARD):
            chosen = corners[first : first + WINDOWS_PER_FORWARD]
            windows = torch.stack([functional.crop_image(resized, *corner, *size) for corner in chosen])
            for (top, left), logits in zip(chosen, self.windows_logits(windows, accelerator), strict=True):
                total[:, top : top + size[0], left : left + size[1]] += logits
                count[top : top + size[0], left : left + size[1]] += 1
        return total / count


def window_starts(length: int, window: int) -> list[int]:
    """Starts of evenly spaced windows that cover a length."""
    count = math.ceil(length / window)
    return np.linspace(0, length - window, count).round().astype(int).tolist()


def resize_to_cover(pixels: Tensor, size: ImageSize, share: float) -> ImageToSegment:
    """An image (C, H, W) as the encoder was shown it, but whole.

    Raises:
        UnreadableImage: it is too long.
    """
    height, width = pixels.shape[1:]
    relative_aspect = max(height * size[1] / (width * size[0]), width * size[0] / (height * size[1]))
    if relative_aspect > MAX_RELATIVE_ASPECT:
        raise UnreadableImage(f"{width} x {height} pixels are too long for a mask: cut it in parts")
    covering = [max(own, least) for own, least in zip(covering_size(height, width, size, share), size, strict=True)]
    resized = functional.resize(pixels, covering, interpolation=functional.InterpolationMode.BILINEAR, antialias=True)
    return ImageToSegment(resized, as_rgb(stretch(pixels)))


def predict_mask(logits: Tensor, size: tuple[int, int]) -> PredictedMask:
    """The class of each pixel by logits (C, h, w) of a resized image, upsampled to `size` (H, W)."""
    height, width = size
    rows_per_block = max(1, PIXEL_LOGITS_PER_BLOCK // (len(logits) * width))
    classes = []
    total = 0.0
    for first in range(0, height, rows_per_block):
        block = upsample_rows(logits, size, first, min(first + rows_per_block, height))
        classes.append(block.argmax(0))
        total += float(block.softmax(0).amax(0).double().sum())
    return PredictedMask(torch.cat(classes).numpy(), total / (height * width))


def upsample_rows(logits: Tensor, size: tuple[int, int], first: int, last: int) -> Tensor:
    """The rows from `first` to before `last` of logits (C, h, w) resized to `size`, (C, last - first, W).

    As torch's bilinear interpolation, which would hold all rows.
    """
    height, width = size
    place = ((torch.arange(first, last) + 0.5) * (logits.shape[1] / height) - 0.5).clamp(min=0)
    above = place.long().clamp(max=logits.shape[1] - 1)
    below = (above + 1).clamp(max=logits.shape[1] - 1)
    weight = (place - above).view(-1, 1)
    rows = logits[:, above] * (1 - weight) + logits[:, below] * weight
    return F.interpolate(rows[None], (last - first, width), mode="bilinear", align_corners=False)[0]


@dataclass(frozen=True)
class PixelRows:
    """The rows of images in a table of masks, and the masks themselves."""

    classifier: PixelClassifier
    data: ProbeDataConfig
    masks: Path
    """Folder of the masks, next to the table."""
    overlays: Path | None
    """Folder of the overlays, next to the table; None: there are none."""
    folder: Path | None
    """Folder of the images: see `folder_of`."""
    accelerator: Accelerator

    def rows(self, images: ImageDataset, indices: range, on_images: Callable[[int], Any]) -> pa.Table:
        """Write the masks of the images at these indices, and return their rows.

        Args:
            on_images: is told how many more are done.
        """
        rows = []
        for index, image, error in self.read(images, indices):
            row = {"file": name_in_folder(images, index, self.folder), "split": images.split}
            rows.append(row | (self.write(images, index, image) if image is not None else {"error": error}))
            on_images(1)
        return pa.Table.from_pylist(rows, self.schema())

    def read(self, images: ImageDataset, indices: range) -> Iterator[tuple[int, ImageToSegment | None, str | None]]:
        """The images at these indices, one by one: they are of several sizes."""
        view = partial(resize_to_cover, size=self.classifier.encoder.img_size, share=self.data.eval_crop)
        views = ViewsOrErrors(images, self.data, view, None)
        for batch in read_batches(views, indices, collate_one, batch_size=1):
            yield batch.indices[0], batch.pixels, batch.errors[0]

    def write(self, images: ImageDataset, index: int, image: ImageToSegment) -> dict[str, Any]:
        """Write the mask of an image, and its overlay; return the entries of its row."""
        size = tuple(image.shown.shape[1:])
        mask = predict_mask(self.classifier.logits(image.resized, self.accelerator), size)
        numbers = np.array(self.classifier.class_numbers)[mask.classes]
        path = self.mask_file(images, index)
        write_mask(path, numbers, self.classifier.class_numbers[-1])
        names = self.classifier.class_names
        shares = np.bincount(mask.classes.ravel(), minlength=len(names)) / mask.classes.size
        row = {
            "height": size[0],
            "width": size[1],
            "class": names[int(shares.argmax())],
            "probability": mask.probability,
            "mask": printable(str(path.relative_to(self.masks.parent))),
        }
        if self.overlays is not None:
            overlay = self.overlay_file(images, index)
            write_overlay(overlay, image.shown.permute(1, 2, 0).numpy(), numbers)
            row["overlay"] = printable(str(overlay.relative_to(self.overlays.parent)))
        return row | {f"{SHARE_PREFIX}{name}": share for name, share in zip(names, shares, strict=True)}

    def mask_file(self, images: ImageDataset, index: int) -> Path:
        """The file of an image's mask."""
        place = self.place(images, index)
        return self.masks / place.with_name(f"{place.name}.png")

    def overlay_file(self, images: ImageDataset, index: int) -> Path:
        """The file of an image's overlay."""
        place = self.place(images, index)
        return self.overlays / place.with_name(f"{place.name}.jpg")

    def place(self, images: ImageDataset, index: int) -> Path:
        """Path of an image's files within their folders."""
        in_split = int(indices_in_split(images)[index])
        return place_of_image(images.rows[index][images.image_column], images.origin.split, in_split, self.folder)

    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        types = {"file": pa.string(), "split": pa.string(), "height": pa.int32(), "width": pa.int32()}
        types |= {"class": pa.string(), "probability": pa.float32(), "mask": pa.string()}
        if self.overlays is not None:
            types["overlay"] = pa.string()
        types["error"] = pa.string()
        types |= {f"{SHARE_PREFIX}{name}": pa.float32() for name in self.classifier.class_names}
        return pa.schema(list(types.items()))


def collate_one(
    samples: list[tuple[ImageToSegment | None, str | None]],
) -> tuple[ImageToSegment | None, list[str | None]]:
    """The only sample of a batch."""
    ((image, error),) = samples
    return image, [error]
