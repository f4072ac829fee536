"""Images of a split, still encoded, with their labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import datasets
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpp.config import ImagesConfig, SourceConfig
from mpp.data.columns import cell_file_name, common_folder, file_names, find_array_dtype, read_cell, without_decoding
from mpp.data.decoding import decode
from mpp.errors import UserError
from mpp.runtime.messages import counted
from mpp.runtime.randomness import Stream, permutation


def has_label(labels: NDArray) -> NDArray[np.bool_]:
    """(n,) whether each image has a label: see `ImageDataset.labels`."""
    if np.issubdtype(labels.dtype, np.floating):
        return np.isfinite(labels)
    return labels >= 0 if labels.ndim == 1 else (labels >= 0).any(1)


def names_by_number(names: Sequence[str], numbers: Iterable[int]) -> list[str]:
    """The names of classes; of one without a name its number."""
    return [names[number] if number < len(names) else str(number) for number in numbers]


def images_only(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """Only the column of images, as they are stored."""
    return without_decoding(rows.select_columns([column]), column)


class Selection(NamedTuple):
    """A whole split, and the images that were selected from it."""

    rows: datasets.Dataset
    split: str
    indices: NDArray[np.int64] | None  # None: all images, in their order

    def select(self, indices: NDArray[np.int64]) -> "Selection":
        """The images at `indices` of this selection."""
        return self._replace(indices=indices if self.indices is None else self.indices[indices])


@dataclass(eq=False)
class ImageDataset:
    """Images of one split, still encoded, and their labels."""

    rows: datasets.Dataset
    image_column: str
    """Its cells are {"bytes", "path"}, not decoded, or arrays."""
    labels: NDArray | None
    """By `label_kind`; None: nothing is labelled. class: (n,) int64, -1 where there is none, or (n, L) where any of
    several is right, padded with -1. several: (n, C) int8, whether the image is of each class, all -1 where the label
    is missing. number: (n,) float64, NaN where it is missing."""
    split: str
    """Its name, for messages."""
    class_names: list[str] = field(default_factory=list)
    """Names of the classes by number: of training (or declared) first, then of other splits; none without labels."""
    classes: int = 0
    """Number of classes that occur in training, or are declared."""
    origin: Selection | None = None
    """The split that the images were selected from; None: this one."""
    decoded: list[Tensor | None] | None = None
    """The same images as (C, H, W), if they are kept in memory; None for one that cannot be decoded."""
    label_kind: str = "class"
    """One of `mpp.data.labels.LABEL_KINDS`."""

    def __post_init__(self):
        if self.origin is None:
            self.origin = Selection(self.rows, self.split, None)

    def __len__(self) -> int:
        return len(self.rows)

    def decode(self, index: int, config: ImagesConfig) -> Tensor:
        """The image as (C, H, W); raises UnreadableImage, or ReadFailed after `read_retries`."""
        pixels = None if self.decoded is None else self.decoded[index]
        return decode.decode(self.encoded(index, config), config) if pixels is None else pixels

    def encoded(self, index: int, config: ImagesConfig) -> bytes | NDArray:
        """The image file, or its array; raises as `decode`."""
        return read_cell(self.rows[index][self.image_column], config.read_retries, self.array_dtype)

    @cached_property
    def array_dtype(self) -> str | None:
        """Type of the arrays' numbers; None: the images are files."""
        return find_array_dtype(self.rows.features[self.image_column])

    def replacement(self, random_word: int) -> int:
        """Index of an image that takes the place of one that cannot be decoded."""
        return random_word % len(self)

    def describe(self) -> str:
        return counted(len(self), "image")

    def image_name(self, index: int) -> str:
        """The image's file, or its split and its index there, for messages."""
        cell = self.rows[index][self.image_column]
        _, split, chosen = self.origin
        return cell_file_name(cell) or f"{split}[{index if chosen is None else chosen[index]}]"

    def image_names(self) -> list[str]:
        """The file of each image, from the folder that all share; without files, its split and its index there."""
        whole, split, chosen = self.origin
        positions = np.arange(len(whole)) if chosen is None else chosen
        names = file_names(whole, self.image_column, positions)
        if None in names:
            return [f"{split}[{position}]" for position in positions.tolist()]
        start = common_folder(min(names), max(names))
        return [name[start:] for name in names]

    def select(self, indices: NDArray[np.int64]) -> "ImageDataset":
        """The images at `indices`, in that order."""
        return replace(
            self,
            rows=self.rows.select(indices),
            labels=None if self.labels is None else self.labels[indices],
            origin=self.origin.select(indices),
            decoded=None,
        )

    def choose(self, limit: int | None, seed: int, after: int = 0) -> "ImageDataset":
        """A random choice of `limit` images by a seed, in their order (files come sorted by class); at most all.

        Args:
            after: number of images to pass over, which an earlier choice by the same seed has taken.
        """
        if limit is None or (limit >= len(self) and not after):
            return self
        order = permutation(Stream.CUT, seed, 1, len(self))
        return self.select(np.sort(order[after : after + limit]))

    def to_train_on(self, source: SourceConfig) -> "ImageDataset":
        """Of all training images, those that `train_images` asks for."""
        return self.choose(source.train_images, source.eval_seed)

    def to_evaluate_on(self, source: SourceConfig, limit: int | None) -> "ImageDataset":
        """Of all held-out images, `limit` that evaluations during training use, too."""
        return self.choose(limit, source.cut_seed)

    def labelled(self) -> "ImageDataset | None":
        """The images that have a label; None where there are none."""
        if self.labels is None:
            return None
        known = has_label(self.labels)
        if not known.any():
            return None
        return self if known.all() else self.select(np.flatnonzero(known))

    def cut(self, fraction: float, seed: int, name: str) -> tuple["ImageDataset", "ImageDataset"]:
        """Split the images at random by a seed: the rest, and `fraction` of them (at least one) as split `name`.

        Raises:
            UserError: nothing would be left.
        """
        order = permutation(Stream.CUT, seed, 0, len(self))
        count = max(1, round(fraction * len(self)))
        if count >= len(self):
            raise UserError(f"{self.split} has {counted(len(self), 'image')}: too few to hold {count} out")
        rest = self.select(np.sort(order[count:]))
        held_out = self.select(np.sort(order[:count]))
        return rest, replace(held_out, split=name)
