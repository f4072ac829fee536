"""Predictions of images as rows of a table, and their figures; of pixels also masks, as files.

Masks are at an image's own size. An image is resized as in the evaluation that trained the head, but all of it is
shown: in windows of the encoder's size, whose logits are averaged where they overlap. The mean is upsampled to the
image's own size; a pixel's class is that of the largest logit there. Files are indexed PNG with PASCAL VOC's colours.

n images, C classes, H x W pixels of an image, h x w of the resized one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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

from evaluation.config import MaskedDataConfig, PredictConfig, ProbeDataConfig
from evaluation.frozen.run_images import LoadedSplits, indices_in_split
from evaluation.metrics.scoring import Outcomes
from evaluation.patches.features import count_confusion, places_of_classes
from evaluation.patches.masks import attach_masks, decode_mask, without_masks
from evaluation.supervision.classifiers import Classifier, FrozenClassifier
from evaluation.tables import ImageBatch, path_in_folder, read_images, unlabelled_images
from mpp.data.crops import covering_size
from mpp.data.dataset import ImageDataset, has_label
from mpp.data.decoding.decode import read_mask
from mpp.data.identity import identify_images
from mpp.data.labels import SEPARATOR
from mpp.data.sources import label_images
from mpp.errors import UnreadableImage, UserError
from mpp.features.reconstructions import as_rgb, stretch
from mpp.runtime.messages import counted, printable, shortened, warn

THRESHOLD = 0.5  # of the probability of a class that is named, where an image has several
PALETTE_COLORS = 256
OTHER_CLASSES = "other classes"  # of masks, which the classifier does not know
OVERLAY_OPACITY = 0.5
OVERLAY_QUALITY = 90


@dataclass(frozen=True)
class Predictions:
    """Predictions of images: `images` of each split, `rows` and `outcomes` of one. See the classes below."""

    config: PredictConfig
    classifier: Classifier
    data: ProbeDataConfig
    splits: LoadedSplits
    """The rows of the images, perhaps with labels or masks."""
    accelerator: Accelerator


class ImagePredictions(Predictions):
    """Predictions of one class, several classes, or a number."""

    @cached_property
    def images(self) -> list[ImageDataset]:
        """The images of each split, with labels where the classifier knows some of them."""
        images, kind = unlabelled_images(self.data, self.splits), self.classifier.label_kind
        try:
            labelled = label_images(self.data, self.splits, images[0].image_column, kind)
        except UserError as error:
            if self.data.label_column is not None:
                raise
            warn(f"no figures: {error}")
            return images
        names = labelled[0].class_names
        unknown = [name for name in names if name not in self.classifier.class_names]
        is_known = kind == "number" or len(unknown) < len(names)
        if unknown:
            none = "there are no figures; data.label_column chooses another column"
            effect = "such a label counts as none, or as wrong" if is_known else none
            warn(f"the classifier does not know the labels {shortened(unknown)}: {effect}")
        return labelled if is_known else images

    def rows(self, images: ImageDataset) -> Iterator[pa.Table]:
        """The rows of images of a split."""
        network = FrozenClassifier(self.classifier).to(self.accelerator.device)
        for batch in read_images(images, self.data, self.classifier.img_size):
            with self.accelerator.autocast():
                logits = network(batch.pixels.to(self.accelerator.device)).cpu()
            yield batch.table(self.columns(logits), self.data)

    def columns(self, logits: Tensor) -> dict[str, NDArray]:
        """The columns of the table for images with these logits (n, C)."""
        kind, names = self.classifier.label_kind, np.array(self.classifier.class_names, str)
        if kind == "number":
            return {"number": logits[:, 0].numpy()}
        columns: dict[str, NDArray] = {}
        if kind == "several":
            probabilities = logits.double().sigmoid().numpy()  # float32 would make large ones equal
            columns["classes"] = np.array([SEPARATOR.join(names[row]) for row in probabilities > THRESHOLD])
        else:
            probabilities = logits.double().softmax(1).float().numpy()
            order = logits.argsort(dim=1, descending=True, stable=True)[:, : self.config.top].numpy()
            for place, numbers in enumerate(order.T, 1):
                suffix = "" if place == 1 else f"_{place}"
                columns[f"class{suffix}"] = names[numbers]
                columns[f"probability{suffix}"] = probabilities[np.arange(len(numbers)), numbers]
        by_class = zip(names, probabilities.T, strict=True) if self.config.probabilities else ()
        return columns | {f"p_{name}": values for name, values in by_class}

    def outcomes(self, images: ImageDataset, rows: pd.DataFrame) -> Outcomes | None:
        """Targets and predictions of the images of a split that have both; None: there are none.

        Args:
            rows: of these images.
        """
        if images.labels is None:
            return None
        known = has_label(images.labels) & rows["error"].isna().to_numpy()
        labels, rows = images.labels[known], rows[known]
        kind, names = self.classifier.label_kind, self.classifier.class_names
        if len(rows) == 0:
            return None
        if kind == "number":
            predicted = rows["number"].to_numpy(float)
        elif kind == "several":
            marks = pd.DataFrame(labels, columns=images.class_names).reindex(columns=names, fill_value=0)
            labels, predicted = marks.to_numpy(np.int8), rows[[f"p_{name}" for name in names]].to_numpy(float)
        else:
            occurring = {images.class_names[number] for number in np.unique(labels[labels >= 0])}
            names = [*names, *sorted(occurring - {*names})]  # those that the classifier does not know come last
            index = pd.Index(names)
            numbers = np.append(index.get_indexer(images.class_names), -1)  # -1, where an image has fewer, stays
            labels, predicted = numbers[labels], index.get_indexer(rows["class"])
        return Outcomes(kind, labels, predicted, names, [*rows["file"]])


# --- pixels ---


class MaskPredictions(Predictions):
    """Predictions of the class of each pixel; `data` is a MaskedDataConfig."""

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
            if column in self.splits[images.split].column_names or column != MaskedDataConfig.mask_column:
                images = attach_masks(images, self.splits, self.data)
            found.append(images)
        return found

    @property
    def true_masks(self) -> list[str]:
        """Digests of the masks of the splits that have some."""
        column = self.data.mask_column
        masked = [each for each in self.images if column in each.rows.column_names]
        masks = [replace(each, image_column=column, origin=None) for each in masked]
        return [identify_images(each, False, self.data.read_retries)["files"] for each in masks]

    def rows(self, images: ImageDataset) -> Iterator[pa.Table]:
        """Write the masks of images of a split, and return their rows."""
        self.classifier.network.to(self.accelerator.device)
        for batch in read_images(images, self.data, size=None):
            yield batch.table({name: [value] for name, value in self.write(batch).items()}, self.data)

    def write(self, batch: ImageBatch) -> dict[str, object]:
        """Write the mask of a batch's only image, and its overlay; return its row, which is null of a broken image."""
        (pixels,), (error,) = batch.pixels, batch.errors
        size = height, width = pixels.shape[1:]
        classes, certainty = predict_mask(self.logits(pixels), size)
        numbers = np.array(self.class_numbers)[classes]
        names = self.classifier.class_names
        counts = np.bincount(classes.ravel(), minlength=len(names))
        row = {"height": height, "width": width, "class": names[counts.argmax()], "probability": np.float32(certainty)}
        drawn = {"mask": draw_mask(numbers, max(self.class_numbers))}
        if self.config.overlays:
            drawn["overlay"] = draw_overlay(as_rgb(stretch(pixels)), numbers)
        for kind, picture in drawn.items():
            file = self.file_of(batch.images, 0, kind)
            row[kind] = printable(str(file.relative_to(Path(self.config.out).parent)))
            if error is None:
                file.parent.mkdir(parents=True, exist_ok=True)
                picture.save(file, quality=OVERLAY_QUALITY)  # of JPEG
        shares = (counts / classes.size).astype(np.float32)
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
        resized = functional.resize(pixels, covering)
        starts = [window_starts(*each) for each in zip(covering, size, strict=True)]
        places = [np.s_[:, top : top + size[0], left : left + size[1]] for top, left in product(*starts)]
        windows = torch.stack([resized[place] for place in places])
        with self.accelerator.autocast():
            logits = self.classifier.network(windows.to(self.accelerator.device)).cpu()
        total, count = torch.zeros(self.classifier.classes, *covering), torch.zeros(1, *covering)
        for place, of_window in zip(places, logits, strict=True):
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


def class_colors(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
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
    mask.putpalette(class_colors(np.arange(PALETTE_COLORS)).tobytes())  # the image becomes indexed
    return mask


def draw_overlay(pixels: Tensor, numbers: NDArray[np.int64]) -> Image.Image:
    """An image (3, H, W) with its mask (H, W) over it; class 0, which is black, is not drawn."""
    image = functional.to_pil_image(pixels)
    drawn = Image.blend(image, Image.fromarray(class_colors(numbers)), OVERLAY_OPACITY)
    drawn.paste(image, mask=Image.fromarray(numbers == 0))
    return drawn
