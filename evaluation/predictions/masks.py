"""Files of predicted masks: indexed PNG with PASCAL VOC's colours, and overlays on the images."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evaluation.tables.images import path_in_folder
from mpp.data.tars import is_member_path
from mpp.runtime.files import write_complete

PALETTE_COLORS = 256
OVERLAY_OPACITY = 0.5
OVERLAY_QUALITY = 90
CLASSES_FILE = "classes.json"


@cache
def voc_palette() -> NDArray[np.uint8]:
    """PASCAL VOC's colour of each class number, (256, 3): the bits of the number, spread over red, green and blue."""
    colors = np.zeros((PALETTE_COLORS, 3), np.uint8)
    for number in range(PALETTE_COLORS):
        rest = number
        for shift in range(7, -1, -1):
            for channel in range(3):
                colors[number, channel] |= (rest >> channel & 1) << shift
            rest >>= 3
    return colors


def color_of(number: int) -> str:
    """The colour of a class number in hexadecimal: "#800000"."""
    return "#{:02x}{:02x}{:02x}".format(*voc_palette()[number % PALETTE_COLORS])


def write_mask(path: Path, numbers: NDArray[np.int64], largest: int) -> None:
    """Write a mask (H, W) of class numbers as PNG: with a palette, or above 255 as grey of 16 bits.

    Args:
        largest: number of any class, by which all masks of a table are of one kind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if largest >= PALETTE_COLORS:
        Image.fromarray(numbers.astype(np.uint16)).save(path, "PNG")
        return
    mask = Image.fromarray(numbers.astype(np.uint8))
    mask.putpalette(voc_palette().tobytes())  # the image becomes indexed
    mask.save(path, "PNG")


def write_overlay(path: Path, pixels: NDArray[np.uint8], numbers: NDArray[np.int64]) -> None:
    """Write an image (H, W, 3) with its mask (H, W) over it as JPEG; class 0, which is black, is not drawn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colors = voc_palette()[numbers % PALETTE_COLORS]
    mixed = (1 - OVERLAY_OPACITY) * pixels + OVERLAY_OPACITY * colors
    drawn = np.where((numbers == 0)[..., None], pixels, mixed.round().astype(np.uint8))
    Image.fromarray(drawn).save(path, "JPEG", quality=OVERLAY_QUALITY)


def write_classes(folder: Path, numbers: Sequence[int], names: Sequence[str]) -> None:
    """Write name and colour of each class number next to the masks."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = {}
    for number, name in zip(numbers, names, strict=True):
        classes[str(number)] = {"name": name, "color": color_of(number)}
    write_complete(folder / CLASSES_FILE, json.dumps(classes, indent=1, ensure_ascii=False))


def place_of_image(cell: Any, split: str, index: int, folder: Path | None) -> Path:
    """Path of an image's files within their folder: its own path within `folder`, or its split and index.

    The whole file name is kept: `1.jpg` and `1.png` are two images.

    Args:
        cell: of the image's column.
        folder: where the images are; None: elsewhere.
    """
    path = cell.get("path") if isinstance(cell, dict) and cell.get("bytes") is None else None
    if path and folder is not None:
        place = path_in_folder(path, folder)
        if not is_member_path(path) and "://" not in path and place is not None:
            return place
    return Path(split) / f"{index:09d}"
