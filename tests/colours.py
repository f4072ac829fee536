"""Images whose colour says what they show, and what a dataset makes of them."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from conftest import encoded
from torch import Tensor

from mpp.config import DataConfig, ImagesConfig
from mpp.data.dataset import ImageDataset
from mpp.data.sources import load_image_datasets, load_splits

COLOURS = np.array([(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30), (30, 200, 200), (200, 30, 200)])
CATS_AND_DOGS = ["cat", "dog"]
COPIES = re.compile(r".*/snapshots/[0-9a-f]{40}/")
"""Where the cache has what was on the hub."""


@cache
def colour(kind: int, form: str = "PNG") -> bytes:
    """An image file of one colour."""
    return encoded(np.tile(COLOURS[kind].astype(np.uint8), (8, 8, 1)), form)


def write(root: Path, files: dict[str, int | str | bytes]) -> Path:
    """Files by their names: images of a colour by its number, and texts."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        content = colour(content) if isinstance(content, int) else content
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def save_classes(root: Path, names: Iterable[str], count: int = 2) -> None:
    """Folders of so many images, of a colour each."""
    write(root, {f"{name}/{number}.png": kind for kind, name in enumerate(names) for number in range(count)})


def kind_of(image: Tensor) -> int:
    """What the pixels (3, H, W) of an image show."""
    return int(abs(COLOURS - image[:, 4, 4].numpy()).sum(1).argmin())


class Seen(NamedTuple):
    """An image as a dataset has it."""

    kind: int
    """What its pixels show: a number of COLOURS."""
    label: str | None
    """The name of its class."""


def load(path: Path | str, **settings) -> tuple[ImageDataset, ImageDataset]:
    """The images of a place to train on, and the held-out ones."""
    return load_image_datasets(DataConfig(path=str(path), **settings))


def splits_of(path: Path | str, streaming: bool = False, **settings) -> dict:
    """The rows of each split of a place."""
    return load_splits(DataConfig(path=str(path), **settings), streaming)


def seen(path: Path | str, **settings) -> dict[str, dict[str, Seen]]:
    """Split -> name of an image from `path` on -> what it shows, and its class. What is not held out is in "train"."""
    known: dict[str, dict[str, Seen]] = {}
    for part in load(path, **settings):
        images = known.setdefault("train" if part.split == "held out" else part.split, {})
        for index in range(len(part)):
            name = COPIES.sub("", part.image_name(index)).removeprefix(f"{path}/")
            kind = kind_of(part.decode(index, ImagesConfig()))
            number = -1 if part.labels is None else part.labels[index]
            assert name not in images, name
            images[name] = Seen(kind, None if number < 0 else part.class_names[number])
    return known


def in_train(path: Path | str, **settings) -> dict[str, Seen]:
    """The same, of images that are in no other split."""
    (images,) = seen(path, **settings).values()
    return images
