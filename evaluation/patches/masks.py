"""Images with segmentation masks: found, decoded to the class of each pixel, and cropped together.

H x W pixels.
"""

import contextlib
import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from evaluation.config import MaskedDataConfig
from evaluation.frozen.run_images import LoadedSplits, indices_in_split
from mpp.config import require
from mpp.data.columns import read_cell, without_decoding
from mpp.data.crops import centre_crop
from mpp.data.data_path import BIRDS_FOLDER, describe_source
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.channels import TURNED
from mpp.data.decoding.decode import read_mask, stored_orientation
from mpp.data.sources import find_held_out_split, load_image_datasets, load_splits
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import note_reading
from mpp.errors import UnreadableImage, UserError
from mpp.runtime.messages import counted, warn

IGNORED_CLASS = -1  # of pixels that do not count, whatever their number in the file
LARGEST_CLASS = np.iinfo(np.int16).max
NO_INDEX = -1  # of an image that cannot be decoded
MAX_EXAMPLES = 3  # images named in a warning
OUTLINES_FILE = BIRDS_FOLDER / "outlines.json"
BIRD_CLASSES = ("background", "bird")


class MaskedImages(NamedTuple):
    """Images, and a mask for each of them."""

    images: ImageDataset
    masks: datasets.Dataset
    """Undecoded, in the column `mask`."""

    def select(self, indices: NDArray[np.int64]) -> "MaskedImages":
        """The images at `indices`, in that order."""
        return MaskedImages(self.images.select(indices), self.masks.select(indices))


def load_masked_images(data: MaskedDataConfig, loaded: LoadedSplits | None = None) -> list[MaskedImages]:
    """Load images with masks: those to learn from, and those that are held out.

    Raises:
        UserError: no such split or column, or no outlined photograph.
    """
    splits = loaded or load_splits(data)
    if data.path is None:
        splits = {name: with_outlines(rows) for name, rows in splits.items()}
    find_held_out_split(data, list(splits))  # refuses a split that is not there
    columns = splits[data.split].features
    if data.mask_column not in columns:
        raise UserError(describe_no_masks(data, list(columns)))
    train, test = load_image_datasets(with_image_column(data, columns), splits)
    if data.path is None:
        train, test = (select_outlined(images, splits) for images in (train, test))
    train = train.choose(data.train_images, data.eval_seed)
    return [attach_masks(images, splits, data) for images in (train, test)]


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


def attach_masks(images: ImageDataset, splits: LoadedSplits, data: MaskedDataConfig) -> MaskedImages:
    """Images with the masks of their rows in `splits`. Raises UserError if the split has none."""
    rows = splits[images.origin.split]
    if data.mask_column not in rows.features:
        raise UserError(f"data.mask_column is {data.mask_column}; {images.origin.split} has no such column")
    masks = without_decoding(rows.select_columns([data.mask_column]), data.mask_column)
    if data.mask_column != "mask":
        masks = masks.rename_column(data.mask_column, "mask")
    return MaskedImages(images, masks.select(indices_in_split(images)))


# --- the package's birds, some of which have outlines ---


def with_outlines(rows: datasets.Dataset) -> datasets.Dataset:
    """The package's photographs with a column of masks: 1 is bird, 0 is background, null is not outlined."""
    by_split = json.loads(OUTLINES_FILE.read_text(encoding="utf-8"))
    outlines = by_split["train"] | by_split["test"]
    cells = [{"bytes": draw_mask(outlines[bird]), "path": None} if bird in outlines else None for bird in rows["id"]]
    return rows.add_column("mask", cells, feature=datasets.Image(decode=False))


def draw_mask(outline: dict[str, Any]) -> bytes:
    """A mask of polygons, as PNG: `size` [width, height], `birds` lists of x, y, x, y, ..."""
    mask = Image.new("L", tuple(outline["size"]))
    drawing = ImageDraw.Draw(mask)
    for polygon in outline["birds"]:
        drawing.polygon(polygon, fill=1)
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    return buffer.getvalue()


def select_outlined(images: ImageDataset, splits: LoadedSplits) -> ImageDataset:
    """The photographs that have an outline. Raises UserError if there are none."""
    is_outlined = np.array([cell is not None for cell in splits[images.origin.split]["mask"]])
    outlined = np.flatnonzero(is_outlined[indices_in_split(images)])
    allowed = "another split: none of its photographs has an outline"
    require(len(outlined) > 0, "data", f"the birds' {images.split}, {len(images)} images", allowed)
    return images.select(outlined)


# --- decoding ---


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


@dataclass(frozen=True)
class MaskedViews(ViewDataset):
    """Images in their fixed view; the label of a sample is its mask, cropped alike: (H, W) int16."""

    masks: datasets.Dataset | None = None
    """A mask for each image, undecoded, in the column `mask`."""

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        epoch, index = key
        note_reading(index)
        pixels, mask = torch.zeros(self.data.channels, 1, 1), torch.zeros(1, 1, dtype=torch.int16)
        failures = []
        try:
            pixels, mask = self.decode(index)
        except UnreadableImage as error:
            failures = [f"{self.dataset.image_name(index)}: {error}"]
        note_reading(None)
        mask = centre_crop(mask[None], self.img_size, self.data.eval_crop, nearest=True)[0]
        number = torch.tensor(NO_INDEX if failures else index)
        return Batch(self.view(pixels, epoch, index), None, mask, number, failures)

    def decode(self, index: int) -> tuple[Tensor, Tensor]:
        """An image (C, H, W) and its mask (H, W); raises UnreadableImage if one is unreadable or their sizes differ."""
        pixels = self.dataset.decode(index, self.data)
        mask = decode_mask(self.masks[index]["mask"], self.data)
        if mask.shape != pixels.shape[1:]:
            sizes = [f"{width} x {height}" for height, width in (mask.shape, pixels.shape[1:])]
            raise UnreadableImage(f"its mask has {sizes[0]} pixels, and the image {sizes[1]}")
        return pixels, mask


def warn_of_turned_images(splits: Sequence[MaskedImages], data: MaskedDataConfig) -> None:
    """Warn if images are turned by their orientation tag, and their masks have none."""
    names = []
    for images, masks in splits:
        for index in range(len(images)):
            with contextlib.suppress(UnreadableImage):  # it is named when it is decoded
                if stored_orientation(images.encoded(index, data)) not in TURNED:
                    continue
                mask = read_cell(masks[index]["mask"], data.read_retries, source=data.path)
                if stored_orientation(mask) not in TURNED:
                    names.append(images.image_name(index))
    if names:
        warn(
            f"{counted(len(names), 'image')} turned by an orientation tag in the file, with a mask without such a "
            f"tag, such as {', '.join(names[:MAX_EXAMPLES])}: the masks are used as stored. If they "
            "were drawn on the images as stored, remove the tag from the images"
        )
