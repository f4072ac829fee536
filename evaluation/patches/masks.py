"""Images with segmentation masks: found, decoded to the class of each pixel, and cropped together.

H x W pixels.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from evaluation.config import MaskedDataConfig
from evaluation.frozen.run_images import LoadedSplits, indices_in_split
from mpp.config import require
from mpp.data.columns import read_cell, without_decoding
from mpp.data.crops import centre_crop
from mpp.data.data_path import BIRDS_FOLDER
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.decode import read_mask
from mpp.data.sources import find_held_out_split, load_image_datasets, load_splits
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import note_reading
from mpp.errors import UnreadableImage

IGNORED_CLASS = -1  # of pixels that do not count, whatever their number in the file
LARGEST_CLASS = np.iinfo(np.int16).max
NO_INDEX = -1  # of an image that cannot be decoded
OUTLINES_FILE = BIRDS_FOLDER / "outlines.json"
BIRD_CLASSES = ("background", "bird")


def load_masked_images(data: MaskedDataConfig, loaded: LoadedSplits | None = None) -> list[ImageDataset]:
    """Load images with masks, as of `attach_masks`: those to learn from, and those that are held out.

    Raises:
        UserError: no such split or column, or no outlined photograph.
    """
    splits = loaded or load_splits(data)
    if data.path is None:
        splits = {name: with_outlines(rows) for name, rows in splits.items()}
    find_held_out_split(data, list(splits))  # refuses a split that is not there
    require_masks(data.split, splits, data)
    images = load_image_datasets(data, without_masks(splits, data))
    train, test = (attach_masks(each, splits, data) for each in images)
    if data.path is None:
        train, test = select_outlined(train), select_outlined(test)
    return [train.to_train_on(data), test]


def require_masks(split: str, splits: LoadedSplits, data: MaskedDataConfig) -> None:
    """Raise UserError if a split has no column of masks."""
    column, columns = data.mask_column, splits[split].column_names
    way = f"in a folder, a metadata.csv must name the files of the masks in a column {column}_file_name"
    require(
        column in columns, "data.mask_column", column, f"a column of {split}, which has {', '.join(columns)}; {way}"
    )


def attach_masks(images: ImageDataset, splits: LoadedSplits, data: MaskedDataConfig) -> ImageDataset:
    """Images whose rows have their masks, too, undecoded in the column `data.mask_column`. UserError: it is missing."""
    require_masks(images.origin.split, splits, data)
    rows = splits[images.origin.split].select_columns([images.image_column, data.mask_column])
    for column in rows.column_names:
        rows = without_decoding(rows, column)
    return replace(images, rows=rows.select(indices_in_split(images)))


def without_masks(splits: LoadedSplits, data: MaskedDataConfig) -> LoadedSplits:
    """The rows without the column of masks, which is one of images, too."""
    return {
        name: rows.select_columns([column for column in rows.column_names if column != data.mask_column])
        for name, rows in splits.items()
    }


# --- the package's birds, some of which have outlines ---


def with_outlines(rows: datasets.Dataset) -> datasets.Dataset:
    """The package's photographs with a column of masks: 1 is bird, 0 is background, null is not outlined."""
    by_split = json.loads(OUTLINES_FILE.read_text(encoding="utf-8"))
    outlines, masks = by_split["train"] | by_split["test"], datasets.Image(decode=False)
    cells = [masks.encode_example(draw_polygons(outlines[bird])) if bird in outlines else None for bird in rows["id"]]
    return rows.add_column("mask", cells, feature=masks)


def draw_polygons(outline: dict[str, Any]) -> Image.Image:
    """A mask of polygons: `size` [width, height], `birds` lists of x, y, x, y, ..."""
    mask = Image.new("L", tuple(outline["size"]))
    drawing = ImageDraw.Draw(mask)
    for polygon in outline["birds"]:
        drawing.polygon(polygon, fill=1)
    return mask


def select_outlined(images: ImageDataset) -> ImageDataset:
    """The photographs that have an outline. Raises UserError if there are none."""
    outlined = np.flatnonzero([cell is not None for cell in images.rows["mask"]])
    allowed = "another split: none of its photographs has an outline"
    require(len(outlined) > 0, "data", f"the birds' {images.split}, {len(images)} images", allowed)
    return images.select(outlined)


# --- decoding ---


def decode_mask(cell: Any, config: MaskedDataConfig, size: Sequence[int] | None = None) -> Tensor:
    """The classes of an image's pixels, (H, W) int16; IGNORED_CLASS where the file has `data.ignore_index`.

    Args:
        size: (H, W) of the image; None: any.
    Raises:
        UnreadableImage: a mask of colours, of another size, or none that can be decoded: see `read_mask`.
    """
    try:
        numbers = read_mask(read_cell(cell, config.read_retries), config)
    except UnreadableImage as error:
        raise UnreadableImage(f"its mask: {error}") from error
    if size is not None and numbers.shape != tuple(size):
        sizes = [f"{width} x {height}" for height, width in (numbers.shape, size)]
        raise UnreadableImage(f"its mask has {sizes[0]} pixels, and the image {sizes[1]}")
    is_ignored = numbers == config.ignore_index  # no number equals None
    wrong = numbers[~is_ignored & ((numbers < 0) | (numbers > LARGEST_CLASS))]
    if wrong.size:
        raise UnreadableImage(f"its mask has the number {wrong[0]}; classes are 0 to {LARGEST_CLASS}")
    return torch.from_numpy(np.where(is_ignored, np.int16(IGNORED_CLASS), numbers.astype(np.int16)))


class MaskedViews(ViewDataset):
    """Images in their fixed view; the label of a sample is its mask, cropped alike: (H, W) int16."""

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        epoch, index = key
        note_reading(index)
        try:
            pixels = self.dataset.decode(index, self.data)
            mask = decode_mask(self.dataset.rows[index][self.data.mask_column], self.data, pixels.shape[1:])
            number, failures = index, []
        except UnreadableImage as error:
            pixels, mask = torch.zeros(self.data.channels, 1, 1), torch.zeros(1, 1, dtype=torch.int16)
            number, failures = NO_INDEX, [f"{self.dataset.image_name(index)}: {error}"]
        note_reading(None)
        mask = centre_crop(mask[None], self.img_size, self.data.eval_crop, nearest=True)[0]
        return Batch(self.view(pixels, epoch, index), None, mask, torch.tensor(number), failures)
