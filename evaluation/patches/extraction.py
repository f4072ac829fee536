"""Extraction of patch features from images with masks.

h x w patches, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor

from evaluation.config import MaskedDataConfig
from evaluation.frozen.features import extract_split, views_for, warn_left_out
from evaluation.frozen.run_images import LoadedSplits
from evaluation.patches.features import PatchEncoder, PatchFeatures, patch_features
from evaluation.patches.masks import MaskedImages, MaskedSplits, decode_mask, load_masks_of_path
from evaluation.patches.outlines import load_outlined_birds
from mpp.data.crops import centre_crop
from mpp.data.sources import load_splits
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import note_reading
from mpp.errors import UnreadableImage

NO_INDEX = -1  # of an image that cannot be decoded


def load_masked_images(data: MaskedDataConfig, loaded: LoadedSplits | None = None) -> MaskedSplits:
    """Load images with masks.

    Raises:
        UserError: no such split or column.
    """
    splits = loaded or load_splits(data)
    return load_outlined_birds(data, splits) if data.path is None else load_masks_of_path(data, splits)


@dataclass(frozen=True)
class MaskedViews(ViewDataset):
    """Images in their fixed view; the label of a sample is its mask, cropped alike: (H, W) int16."""

    masks: datasets.Dataset | None = None
    """A mask for each image, undecoded, in the column `mask`."""

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        epoch, index = key
        note_reading(index)
        failures = []
        try:
            pixels, mask = self.decode_with_mask(index)
        except UnreadableImage as error:
            failures = [f"{self.dataset.image_name(index)}: {error}"]
            pixels = torch.zeros(self.data.channels, 1, 1)
            mask = torch.zeros(1, 1, dtype=torch.int16)
        note_reading(None)
        crop = self.view(pixels, epoch, index)
        mask = centre_crop(mask[None], self.img_size, self.data.eval_crop, nearest=True)[0]
        return Batch(crop, None, mask, torch.tensor(NO_INDEX if failures else index), failures)

    def decode_with_mask(self, index: int) -> tuple[Tensor, Tensor]:
        """An image (C, H, W) and its mask (H, W); raises UnreadableImage if one is unreadable or their sizes differ."""
        pixels = self.dataset.decode(index, self.data)
        mask = decode_mask(self.masks[index]["mask"], self.data)
        height, width = pixels.shape[1:]
        mask_height, mask_width = mask.shape
        if (mask_height, mask_width) != (height, width):
            sizes = f"{mask_width} x {mask_height} pixels, and the image {width} x {height}"
            raise UnreadableImage(f"its mask has {sizes}")
        return pixels, mask


def masked_views(encoder: PatchEncoder, masked: MaskedImages, data: MaskedDataConfig) -> MaskedViews:
    """Images and masks as an encoder takes them."""
    views = views_for(encoder, masked.images, data)
    return MaskedViews(views.dataset, views.data, views.img_size, masks=masked.masks)


class ExtractedPatches(NamedTuple):
    """Features of patches, of the images and masks that can be decoded."""

    by_depth: dict[int, PatchFeatures]
    splits: MaskedSplits
    """The images and masks that can be decoded."""
    left_out: dict[str, int]
    """Number of the other images of train and test."""


def extract_patches(
    encoder: PatchEncoder,
    splits: MaskedSplits,
    depths: Sequence[int],
    data: MaskedDataConfig,
    accelerator: Accelerator,
    strict: bool = False,
) -> ExtractedPatches:
    """Extract features of patches after each depth; large arrays lie in temporary files."""
    encode = partial(patch_features, encoder, depths=depths)
    train, test = (
        extract_split(masked_views(encoder, masked, data), encode, accelerator, strict, "features of patches")
        for masked in splits
    )
    warn_left_out((*train.unreadable, *test.unreadable))
    all_images = splits.test.images.image_names()
    test_images = [all_images[index] for index in test.kept]
    by_depth = {}
    for depth, of_train, of_test in zip(depths, train.by_depth, test.by_depth, strict=True):
        by_depth[depth] = PatchFeatures(of_train, train.labels, of_test, test.labels, test_images)
    kept = []
    for masked, extracted in zip(splits, (train, test), strict=True):
        images = masked.images.select(extracted.kept)
        masks = masked.masks.select(extracted.kept)
        kept.append(MaskedImages(images, masks))
    left_out = {"train": len(train.unreadable), "test": len(test.unreadable)}
    return ExtractedPatches(by_depth, MaskedSplits(*kept), left_out)
