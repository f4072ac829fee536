"""The package's photographs of birds whose outlines were drawn: 1 is bird, 0 is background."""

import io
import json
from typing import Any

import datasets
import numpy as np
from PIL import Image, ImageDraw

from evaluation.config import MaskedDataConfig
from evaluation.frozen.run_images import indices_in_split
from evaluation.patches.masks import MaskedImages, MaskedSplits
from mpp.config import require
from mpp.data.data_path import BIRDS_FOLDER
from mpp.data.dataset import ImageDataset
from mpp.data.sources import load_image_datasets

OUTLINES_FILE = BIRDS_FOLDER / "outlines.json"
BIRD_CLASSES = ("background", "bird")


def load_outlined_birds(data: MaskedDataConfig, splits: dict[str, datasets.Dataset]) -> MaskedSplits:
    """Load the outlined photographs.

    Raises:
        UserError: a split has no outlined photograph.
    """
    by_split = json.loads(OUTLINES_FILE.read_text(encoding="utf-8"))
    outlines = by_split["train"] | by_split["test"]
    train, held_out = load_image_datasets(data, splits)
    train = select_outlined(train, splits, outlines).choose(data.train_images, data.eval_seed)
    held_out = select_outlined(held_out, splits, outlines)
    return MaskedSplits(attach_outlines(train, splits, outlines), attach_outlines(held_out, splits, outlines))


def select_outlined(images: ImageDataset, splits: dict[str, Any], outlines: dict[str, Any]) -> ImageDataset:
    """The photographs that have an outline. Raises UserError if there are none."""
    chosen = [index for index, bird in enumerate(bird_ids(images, splits)) if bird in outlines]
    allowed = "another split: none of its photographs has an outline"
    require(chosen, "data", f"the birds' {images.split}, {len(images)} images", allowed)
    return images.select(np.array(chosen, np.int64))


def bird_ids(images: ImageDataset, splits: dict[str, Any]) -> list[str]:
    """The name of each photograph in the file of outlines."""
    ids = splits[images.origin.split]["id"]
    return [ids[index] for index in indices_in_split(images).tolist()]


def attach_outlines(images: ImageDataset, splits: dict[str, Any], outlines: dict[str, Any]) -> MaskedImages:
    """Photographs with their outlines as masks."""
    cells = []
    for bird in bird_ids(images, splits):
        cells.append({"bytes": draw_mask(outlines[bird]), "path": None})
    column = datasets.Features({"mask": datasets.Image(decode=False)})
    return MaskedImages(images, datasets.Dataset.from_dict({"mask": cells}, column))


def draw_mask(outline: dict[str, Any]) -> bytes:
    """A mask of polygons, as PNG: `size` [width, height], `birds` lists of x, y, x, y, ..."""
    mask = Image.new("L", tuple(outline["size"]))
    drawing = ImageDraw.Draw(mask)
    for polygon in outline["birds"]:
        drawing.polygon(polygon, fill=1)
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    return buffer.getvalue()
