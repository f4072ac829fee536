"""Segmentation masks: found next to their images, and decoded to the class of each pixel."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor

from evaluation.config import MaskedDataConfig
from mpp.config import require
from mpp.data.columns import read_cell, without_decoding
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.decode import read_mask
from mpp.data.decoding.formats import JPEG
from mpp.data.sources import find_held_out_split, load_image_datasets
from mpp.errors import UnreadableImage, UserError

IGNORED_CLASS = -1  # of pixels that do not count, whatever their number in the file
LARGEST_CLASS = np.iinfo(np.int16).max


class MaskedImages(NamedTuple):
    """Images, and a mask for each of them."""

    images: ImageDataset
    masks: datasets.Dataset
    """Undecoded, in the column `mask`."""


class MaskedSplits(NamedTuple):
    """Images with masks: those to learn from, and those that are held out."""

    train: MaskedImages
    test: MaskedImages


def load_masks_of_path(data: MaskedDataConfig, splits: dict[str, datasets.Dataset]) -> MaskedSplits:
    """Load images with masks from `data.path`.

    Raises:
        UserError: no such split or column.
    """
    find_held_out_split(data, list(splits))  # refuses a split that is not there
    columns = splits[data.split].features
    data = with_image_column(data, columns)
    if data.mask_column not in columns:
        raise UserError(describe_no_masks(data, list(columns)))
    train, held_out = load_image_datasets(data, splits)
    train = train.choose(data.train_images, data.eval_seed)
    return MaskedSplits(attach_masks(train, splits, data), attach_masks(held_out, splits, data))


def with_image_column(data: MaskedDataConfig, columns: datasets.Features) -> MaskedDataConfig:
    """The settings with the column of images, where it is the only one besides that of masks."""
    other_images = [
        name for name, feature in columns.items() if isinstance(feature, datasets.Image) and name != data.mask_column
    ]
    if data.image_column is None and len(other_images) == 1:
        return dataclasses.replace(data, image_column=other_images[0])
    return data


def describe_no_masks(data: MaskedDataConfig, columns: list[str]) -> str:
    """The message for images without the column of masks: where masks are looked for."""
    return (
        f"{describe_source(data)} has no column {data.mask_column} (data.mask_column), but {', '.join(columns)}; in a "
        f"folder, a metadata.csv must name the files of the masks in a column {data.mask_column}_file_name"
    )


def attach_masks(images: ImageDataset, splits: dict[str, Any], data: MaskedDataConfig) -> MaskedImages:
    """Images with the masks of their rows in `splits`."""
    rows = splits[images.origin.split]
    if data.mask_column not in rows.features:
        raise UserError(f"data.mask_column is {data.mask_column}; {images.origin.split} has no such column")
    masks = without_decoding(rows.select_columns([data.mask_column]), data.mask_column)
    if data.mask_column != "mask":
        masks = masks.rename_column(data.mask_column, "mask")
    refuse_jpeg_masks(masks, data)
    if images.origin.indices is not None:
        masks = masks.select(images.origin.indices)
    return MaskedImages(images, masks)


def refuse_jpeg_masks(masks: datasets.Dataset, data: MaskedDataConfig) -> None:
    """Raise UserError if the first mask is a JPEG file; others are named as they are read."""
    if not len(masks) or not isinstance(masks[0]["mask"], dict):
        return
    with contextlib.suppress(UnreadableImage):
        file = read_cell(masks[0]["mask"], data.read_retries, source=data.path)
        allowed = "a column of lossless masks, such as PNG or TIFF: JPEG changes the numbers"
        require(not JPEG.begins(file), "data.mask_column", f"{data.mask_column}, of JPEG files", allowed)


def decode_mask(cell: Any, config: MaskedDataConfig) -> Tensor:
    """The classes of an image's pixels, (H, W) int16; IGNORED_CLASS where the file has `data.ignore_index`.

    Raises:
        UnreadableImage: a mask of colours, or none that can be decoded: see `read_mask`.
    """
    try:
        numbers = read_mask(read_cell(cell, config.read_retries, source=config.path), config)
    except UnreadableImage as error:
        raise UnreadableImage(f"its mask: {error}") from error
    is_ignored = numbers == config.ignore_index  # no number equals None
    classes = numbers[~is_ignored]
    if classes.size and (classes.min() < 0 or classes.max() > LARGEST_CLASS):
        extremes = f"numbers from {classes.min()} to {classes.max()}"
        raise UnreadableImage(f"its mask has {extremes}; classes are 0 to {LARGEST_CLASS}")
    return torch.from_numpy(np.where(is_ignored, np.int16(IGNORED_CLASS), numbers.astype(np.int16)))
