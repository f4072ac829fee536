"""Held-out images beside each other: nearest neighbours, a map, those that are predicted best and worst.

N images, D width.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from evaluation.config import ProbeDataConfig
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder
from evaluation.frozen.extraction import views_for
from evaluation.pictures.pca import principal_components
from mpp.data.dataset import ImageDataset
from mpp.data.loader import held_out_batches
from mpp.features.neighbours import find_other_neighbours
from mpp.features.reconstructions import as_rgb, prediction_columns
from mpp.pretrain import Pretraining

GAP = 4  # pixels between two images of a sheet
BATCH = 64
LARGEST = 256  # pixels of an image of a sheet


class Shown(NamedTuple):
    """Held-out images with what an encoder makes of them."""

    features: Tensor  # (N, D) float32
    pixels: NDArray[np.uint8]  # (N, H, W, 3)
    labels: NDArray[np.int64] | None  # (N,), -1: none
    names: list[str]


@torch.no_grad()
def extract_shown_images(
    encoder: FrozenEncoder | ColorBaseline,
    dataset: ImageDataset,
    data: ProbeDataConfig,
    accelerator: Accelerator,
    depth: int,
    representation: Literal["mean", "class"] = "mean",
) -> Shown:
    """Features of all these images after `depth` blocks, and the images as the encoder takes them."""
    features, pixels, labels, indices = [], [], [], []
    for batch in held_out_batches(views_for(encoder, dataset, data), data.batch_size or BATCH):
        images = batch.images.to(accelerator.device)
        with accelerator.autocast():
            features.append(encoder(images, representation, [depth])[0].float().cpu())
        shown = images if images.shape[1] in (1, 3) else images.float().mean(1, keepdim=True)
        pixels.append(as_rgb(shown).movedim(1, -1).cpu())
        labels.append(batch.labels)
        indices += batch.indices.tolist()
    of_all = torch.cat(labels).numpy()
    known = of_all.ndim == 1 and (of_all >= 0).any()
    names = [dataset.name(index) for index in indices]
    return Shown(torch.cat(features), torch.cat(pixels).numpy(), of_all if known else None, names)


def nearest_neighbours(
    features: Tensor, queries: Sequence[int], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The `count` images most like each query, and their cosines, (queries, k) each; fewer where there are fewer.

    The query itself is left out.
    """
    similarity, index = find_other_neighbours(features, queries, count)
    return index.numpy(), similarity.numpy()


def map_of(features: Tensor) -> NDArray[np.float64]:
    """Places (N, 2) of images on a map: the first two principal components of their features (N, D) of unit length."""
    coordinates = principal_components(F.normalize(features.double(), dim=-1), 2).coordinates
    return F.pad(coordinates, (0, 2 - coordinates.shape[1])).numpy()


@torch.no_grad()
def held_out_losses(task: Pretraining, accelerator: Accelerator, count: int) -> NDArray[np.float64]:
    """The loss of each of the first `count` held-out images, (count,), under its fixed corruption."""
    found, count = [], min(count, len(task.held_out))
    for first in range(0, count, BATCH):
        predictions, targets, *_ = task.predict(task.model, range(first, min(first + BATCH, count)))
        rows = zip(predictions.split(1), targets.split(1), strict=True)
        found += [float(task.objective.loss(*row)) for row in rows]
    return np.array(found)


def predict_columns(task: Pretraining, indices: Sequence[int]) -> NDArray[np.uint8]:
    """Those held-out images as original, corrupted, predicted, true: (4, n, H, W, 3)."""
    columns = prediction_columns(task.objective, *task.predict(task.model, indices))
    return as_rgb(columns).movedim(2, -1).cpu().numpy()


def shrink(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image (H, W, 3), made smaller where a page of many would be too large."""
    image = Image.fromarray(pixels)
    image.thumbnail((LARGEST, LARGEST))
    return np.asarray(image)


def arrange_in_rows(rows: Sequence[Sequence[NDArray[np.uint8]]], side: int = 96, apart: int = 0) -> Image.Image:
    """Images (H, W, 3) in rows, each at least `side` pixels wide and at most `LARGEST` wide or high, on white.

    Args:
        apart: pixels between the first image of a row and the others, beyond the usual.
    """
    rows = [[shrink(pixels) for pixels in row] for row in rows]
    times = max(1, -(-side // rows[0][0].shape[1]))
    height, width = (times * length for length in rows[0][0].shape[:2])
    across = max(map(len, rows))
    whole = np.full(((height + GAP) * len(rows) - GAP, (width + GAP) * across - GAP + apart, 3), 255, np.uint8)
    for down, row in enumerate(rows):
        for place, pixels in enumerate(row):
            top, left = down * (height + GAP), place * (width + GAP) + (apart if place else 0)
            large = pixels.repeat(times, 0).repeat(times, 1)
            whole[top : top + height, left : left + width] = large
    return Image.fromarray(whole)
