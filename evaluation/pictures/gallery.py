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
from PIL import Image
from torch import Tensor

from evaluation.frozen.extraction import views_for
from evaluation.pictures.pca import principal_components
from evaluation.pictures.subject import Subject
from mpp.data.dataset import ImageDataset
from mpp.data.loader import held_out_batches
from mpp.features.reconstructions import as_rgb, prediction_columns
from mpp.pretrain import Pretraining

GALLERY_IMAGES_PER_BATCH = 64
SHEET_GAP_PX = 4  # between two images of a sheet
MAX_SHEET_IMAGE_PX = 256  # the longer side of an image of a sheet


class Gallery(NamedTuple):
    """Held-out images with their features and labels."""

    features: Tensor  # (N, D) float32
    pixels: NDArray[np.uint8]  # (N, H, W, 3)
    labels: NDArray[np.int64] | None  # (N,), -1: none
    names: list[str]


@torch.no_grad()
def extract_gallery(
    subject: Subject, dataset: ImageDataset, depth: int, representation: Literal["mean", "class"]
) -> Gallery:
    """All images of a dataset as the encoder takes them, with their features after `depth` blocks."""
    batch_size = subject.config.data.batch_size or GALLERY_IMAGES_PER_BATCH
    views = views_for(subject.encoder, dataset, subject.config.data)
    feature_batches = []
    pixel_batches = []
    label_batches = []
    names = []
    for batch in held_out_batches(views, batch_size):
        images = batch.images.to(subject.accelerator.device)
        with subject.accelerator.autocast():
            (features,) = subject.encoder(images, representation, [depth])
        feature_batches.append(features.float().cpu())
        pixel_batches.append(subject.to_pixels(images))
        label_batches.append(batch.labels)
        names += [dataset.name(index) for index in batch.indices.tolist()]
    labels = torch.cat(label_batches).numpy()
    has_classes = labels.ndim == 1 and (labels >= 0).any()
    pixels = torch.cat(pixel_batches).numpy()
    return Gallery(torch.cat(feature_batches), pixels, labels if has_classes else None, names)


def project_to_plane(features: Tensor) -> NDArray[np.float64]:
    """The first two principal components (N, 2) of features (N, D) that are scaled to unit length."""
    coordinates = principal_components(F.normalize(features.double(), dim=-1), 2).coordinates
    return F.pad(coordinates, (0, 2 - coordinates.shape[1])).numpy()


@torch.no_grad()
def held_out_losses(task: Pretraining, count: int) -> NDArray[np.float64]:
    """The loss of each of the first `count` held-out images, (count,), under its fixed corruption."""
    count = min(count, len(task.held_out))
    losses = []
    for first in range(0, count, GALLERY_IMAGES_PER_BATCH):
        indices = range(first, min(first + GALLERY_IMAGES_PER_BATCH, count))
        predictions, targets, *_ = task.predict(task.model, indices)
        for prediction, target in zip(predictions.split(1), targets.split(1), strict=True):
            losses.append(float(task.objective.loss(prediction, target)))
    return np.array(losses)


def predict_columns(task: Pretraining, indices: Sequence[int]) -> NDArray[np.uint8]:
    """Some held-out images as original, corrupted, predicted, true: (4, n, H, W, 3)."""
    columns = prediction_columns(task.objective, *task.predict(task.model, indices))
    return as_rgb(columns).movedim(2, -1).cpu().numpy()


def shrink(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image (H, W, 3) with no side longer than MAX_SHEET_IMAGE_PX."""
    image = Image.fromarray(pixels)
    image.thumbnail((MAX_SHEET_IMAGE_PX, MAX_SHEET_IMAGE_PX))
    return np.asarray(image)


def enlarge_pixels(pixels: NDArray[np.uint8], times: int) -> NDArray[np.uint8]:
    """An image (H, W, 3) with each pixel repeated: (times * H, times * W, 3)."""
    return pixels.repeat(times, axis=0).repeat(times, axis=1)


def arrange_in_rows(
    rows: Sequence[Sequence[NDArray[np.uint8]]], min_width: int = 96, extra_gap: int = 0
) -> Image.Image:
    """Images of one size (H, W, 3) in rows, on white.

    Args:
        min_width: pixels; narrower images are enlarged by a whole number.
        extra_gap: pixels between the first image of a row and the others, beyond the usual.
    """
    rows = [[shrink(pixels) for pixels in row] for row in rows]
    height, width, _ = rows[0][0].shape
    times = max(1, math.ceil(min_width / width))
    row_height = times * height + SHEET_GAP_PX
    column_width = times * width + SHEET_GAP_PX
    column_count = max(map(len, rows))
    sheet_size = (
        len(rows) * row_height - SHEET_GAP_PX,
        column_count * column_width - SHEET_GAP_PX + extra_gap,
    )
    sheet = np.full((*sheet_size, 3), 255, np.uint8)
    for row_number, row in enumerate(rows):
        top = row_number * row_height
        for column_number, pixels in enumerate(row):
            left = column_number * column_width
            if column_number > 0:
                left += extra_gap
            sheet[top : top + times * height, left : left + times * width] = enlarge_pixels(pixels, times)
    return Image.fromarray(sheet)
