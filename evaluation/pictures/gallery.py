"""Sheets of held-out images: nearest neighbours, a map, and the best and the worst predicted images.

N images, D width.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from evaluation.pictures.pca import principal_components
from evaluation.pictures.subject import Subject, concatenate
from mpp.data.dataset import ImageDataset
from mpp.data.views import collate
from mpp.features.reconstructions import as_rgb, prediction_columns
from mpp.pretrain import Pretraining
from mpp.runtime.randomness import FIXED_VIEW

GALLERY_IMAGES_PER_BATCH = 64
SHEET_GAP_PX = 4  # between two images of a sheet
MAX_SHEET_IMAGE_SIZE = (256, 256)  # of an image of a sheet, width and height


class Gallery(NamedTuple):
    """Held-out images with their features and labels."""

    features: Tensor  # (N, D) float32
    pixels: NDArray[np.uint8]  # (N, H, W, 3)
    labels: NDArray[np.int64]  # (N,), -1: none, or several
    names: list[str]
    class_names: Sequence[str]
    """By number, as far as they are known."""


def extract_gallery(
    subject: Subject, dataset: ImageDataset, depth: int, representation: Literal["mean", "class"]
) -> Gallery:
    """The images of a dataset that can be decoded, as the encoder takes them, with features after `depth` blocks."""
    batches = []
    for batch in subject.batches(dataset, GALLERY_IMAGES_PER_BATCH):
        images = batch.images.to(subject.accelerator.device)
        with subject.accelerator.autocast():
            (features,) = subject.encoder(images, representation, [depth])
        batches.append((features.cpu(), subject.to_pixels(images), batch.labels, batch.indices))
    *columns, shown = concatenate(batches)
    is_own = shown == torch.arange(len(dataset))  # others are shown a second time, where images cannot be decoded
    features, pixels, labels = (column[is_own] for column in columns)
    names = [dataset.image_name(index) for index in shown[is_own].tolist()]
    if labels.ndim > 1 or labels.is_floating_point():
        labels = torch.full((len(labels),), -1)
    return Gallery(features, pixels.numpy(), labels.numpy(), names, dataset.class_names)


def project_to_plane(features: Tensor) -> NDArray[np.float64]:
    """The first two principal components (N, 2) of features (N, D) that are scaled to unit length."""
    units = F.normalize(features.double(), dim=-1)
    return principal_components(units, 2).coordinates.numpy()


@torch.no_grad()
def held_out_losses(task: Pretraining, count: int) -> NDArray[np.float64]:
    """The loss of each of the first `count` held-out images, (count,), under its fixed corruption.

    NaN: it cannot be decoded.
    """
    count = min(count, len(task.held_out))
    views = task.views(task.held_out)
    losses = []
    for first in range(0, count, GALLERY_IMAGES_PER_BATCH):
        indices = range(first, min(first + GALLERY_IMAGES_PER_BATCH, count))
        batch = collate([views[FIXED_VIEW, index] for index in indices])
        predicted, *_ = task.predict_batch(task.model, batch)
        pairs = zip(predicted.predictions.float().split(1), predicted.targets.split(1), strict=True)
        for index, shown, pair in zip(indices, batch.indices.tolist(), pairs, strict=True):
            losses.append(float(task.objective.loss(*pair)) if shown == index else math.nan)
    return np.array(losses)


def predict_columns(task: Pretraining, indices: Sequence[int]) -> NDArray[np.uint8]:
    """Some held-out images as original, corrupted, predicted, true: (4, n, H, W, 3)."""
    columns = prediction_columns(task.objective, *task.predict(task.model, indices))
    return as_rgb(columns).movedim(2, -1).cpu().numpy()


def to_sheet_image(pixels: NDArray[np.uint8], min_width: int) -> Image.Image:
    """An image (H, W, 3) shrunk to MAX_SHEET_IMAGE_SIZE, or enlarged by a whole number where it is narrow."""
    image = Image.fromarray(pixels)
    image.thumbnail(MAX_SHEET_IMAGE_SIZE)
    times = max(1, math.ceil(min_width / image.width))
    return ImageOps.scale(image, times, Image.Resampling.NEAREST)


def arrange_in_rows(
    rows: Sequence[Sequence[NDArray[np.uint8]]], min_width: int = 96, extra_gap: int = 0
) -> Image.Image:
    """Images of one size (H, W, 3) in rows, on white.

    Args:
        min_width: pixels; narrower images are enlarged by a whole number.
        extra_gap: pixels between the first image of a row and the others, beyond the usual.
    """
    image_rows = [[to_sheet_image(pixels, min_width) for pixels in row] for row in rows]
    first = image_rows[0][0]
    column_width = first.width + SHEET_GAP_PX
    row_height = first.height + SHEET_GAP_PX
    sheet_width = max(map(len, rows)) * column_width - SHEET_GAP_PX + extra_gap
    sheet = Image.new("RGB", (sheet_width, len(rows) * row_height - SHEET_GAP_PX), "white")
    for row_number, row in enumerate(image_rows):
        for column_number, image in enumerate(row):
            left = column_number * column_width + (extra_gap if column_number else 0)
            sheet.paste(image, (left, row_number * row_height))
    return sheet
