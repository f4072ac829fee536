"""Features of patches, and masks that say what each pixel shows.

B or n images, h x w patches, D width, C classes.
"""

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from evaluation.config import MaskedDataConfig
from evaluation.frozen.encoder import FrozenEncoder, patch_grid
from evaluation.frozen.extraction import extract_split, views_for, warn_left_out
from evaluation.frozen.labelled_features import cut_dev_split
from evaluation.frozen.run_images import indices_in_split
from mpp.config import require
from mpp.data.columns import read_cell, without_decoding
from mpp.data.crops import centre_crop
from mpp.data.data_path import BIRDS_FOLDER, describe_source
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.decode import read_mask
from mpp.data.decoding.kinds import JPEG_START
from mpp.data.decoding.orientation import TURNED, stored_orientation
from mpp.data.sources import find_held_out_split, load_image_datasets, load_splits
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import note_reading
from mpp.errors import UnreadableImage, UserError
from mpp.features.frozen import tokens_at
from mpp.runtime.arrays import select

OUTLINES = BIRDS_FOLDER / "outlines.json"
IGNORED = -1  # pixels that do not count, whatever their number was
MANY_IGNORED = 0.2  # share of a split's pixels above which the setting that ignores them is named
FEW_PIXELS = 1e-4  # share of the pixels that count, below which a class is named: noise looks so
NAMED = 3  # images or classes in a warning
NUMBERS = 2**24  # of shares of classes, at a time: what bounds the memory


class PatchBaseline(NamedTuple):
    """In place of an encoder: all that is known of a patch is its mean colour and its position."""

    img_size: tuple[int, int]
    crop_pct: float
    grid: tuple[int, int]
    stages: Sequence[None] = (None,)


@torch.no_grad()
def patch_features(encoder: FrozenEncoder | PatchBaseline, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """Features of each patch of images (B, C, H, W) after each depth, (B, h, w, D) float32."""
    if isinstance(encoder, PatchBaseline):
        return [color_and_position(images, encoder.grid)]
    grid, prefix = patch_grid(encoder.model), encoder.model.num_prefix_tokens
    tokens = tokens_at(encoder.model, encoder.normalize(images), depths)
    return [of_depth[:, prefix:].unflatten(1, grid).float().cpu() for of_depth in tokens]


def color_and_position(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mean colour of each patch, its row and its column, each from -0.5 to 0.5: (B, h, w, C + 2)."""
    colors = F.adaptive_avg_pool2d(images.float() / 255 - 0.5, grid).movedim(1, -1).cpu()
    rows, columns = ((torch.arange(count) + 0.5) / count - 0.5 for count in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
    return torch.cat([colors, places.expand(len(images), -1, -1, -1)], -1)


class PatchFeatures(NamedTuple):
    """Features of patches at one depth, and the masks of their images."""

    train: NDArray[np.float32]  # (n, h, w, D)
    train_masks: NDArray[np.int16]  # (n, H, W)
    test: NDArray[np.float32]
    test_masks: NDArray[np.int16]

    def dev_split(self) -> "PatchFeatures":
        """The training features, a tenth of whose images are the test split: choices are made on it."""
        train, dev = cut_dev_split(len(self.train))
        return PatchFeatures(
            select(self.train, train),
            select(self.train_masks, train),
            select(self.train, dev),
            select(self.train_masks, dev),
        )


@dataclass(frozen=True)
class MaskedViews(ViewDataset):
    """Images in their held-out view; the label of a sample is its mask, cropped alike: (H, W) int16."""

    masks: datasets.Dataset | None = None
    """A mask for each image, undecoded; `mask` holds it."""

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        _, index = key
        note_reading(index)
        pixels, mask, failures = torch.zeros(self.data.channels, 1, 1), torch.zeros(1, 1, dtype=torch.int16), []
        try:
            pixels = self.dataset.decode(index, self.data)
            mask = decode_mask(self.masks[index]["mask"], self.data)
            if mask.shape != pixels.shape[1:]:
                sizes = (" x ".join(map(str, reversed(part))) for part in (mask.shape, pixels.shape[1:]))
                raise UnreadableImage("its mask has {} pixels, and the image {}".format(*sizes))
        except UnreadableImage as error:
            failures = [f"{self.dataset.name(index)}: {error}"]
            pixels = torch.zeros(self.data.channels, *mask.shape)
        note_reading(None)
        pixels, mask = self.view(pixels, *key), centre_crop(mask[None], self.img_size, self.data.eval_crop, True)[0]
        return Batch(pixels, None, mask, torch.tensor(-1 if failures else index), failures)


def decode_mask(cell: Any, config: MaskedDataConfig) -> Tensor:
    """The classes of an image's pixels, (H, W) int16; IGNORED where data.ignore_index was. See `read_mask`.

    Raises:
        UnreadableImage: a mask of colours, or none that can be decoded.
    """
    try:
        found = read_mask(read_cell(cell, config.read_retries), config)
    except UnreadableImage as error:
        raise UnreadableImage(f"its mask: {error}") from error
    classes = found[found != config.ignore_index]  # None equals nothing
    if classes.size and (classes.min() < 0 or classes.max() > np.iinfo(np.int16).max):
        raise UnreadableImage(f"its mask has numbers from {classes.min()} to {classes.max()}; classes are 0 to 32767")
    return torch.from_numpy(np.where(found == config.ignore_index, IGNORED, found.astype(np.int16)).astype(np.int16))


Masked = tuple[ImageDataset, datasets.Dataset]
"""Images, and a mask for each of them."""


def load_masked(data: MaskedDataConfig) -> tuple[Masked, Masked]:
    """Images with masks to learn from, and those that are held out.

    Raises:
        UserError: no such split or column.
    """
    if data.path is None:
        return birds_with_outlines(data)
    splits = load_splits(data)
    find_held_out_split(data, list(splits))  # refuses a split that is not there
    features = splits[data.split].features
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    others = [name for name in images if name != data.mask_column]
    if data.image_column is None and len(others) == 1:
        data = dataclasses.replace(data, image_column=others[0])
    require(
        data.mask_column in features, "data.mask_column", data.mask_column, f"one of {', '.join(features) or 'none'}"
    )
    train, held_out = load_image_datasets(data, splits)
    train = train.choose(data.train_images, data.eval_seed)
    return with_masks(train, splits, data), with_masks(held_out, splits, data)


def with_masks(dataset: ImageDataset, splits: dict[str, Any], data: MaskedDataConfig) -> Masked:
    """The same images, and their masks."""
    rows, chosen = splits[dataset.origin.split], dataset.origin.indices
    if data.mask_column not in rows.features:
        raise UserError(f"data.mask_column is {data.mask_column}; {dataset.origin.split} has no such column")
    rows = without_decoding(rows.select_columns([data.mask_column]), data.mask_column)
    rows = rows.rename_column(data.mask_column, "mask") if data.mask_column != "mask" else rows
    refuse_jpeg(rows, data)
    return dataset, rows if chosen is None else rows.select(chosen)


def refuse_jpeg(masks: datasets.Dataset, data: MaskedDataConfig) -> None:
    """Raise UserError where the first mask is a JPEG file; others are named as they are read."""
    if not len(masks) or not isinstance(masks[0]["mask"], dict):
        return
    with contextlib.suppress(UnreadableImage):
        file = read_cell(masks[0]["mask"], data.read_retries)
        allowed = "a column of lossless masks, such as PNG or TIFF: JPEG changes the numbers"
        require(not file.startswith(JPEG_START), "data.mask_column", f"{data.mask_column}, of JPEG files", allowed)


def birds_with_outlines(data: MaskedDataConfig) -> tuple[Masked, Masked]:
    """The package's photographs that somebody has drawn the birds' outlines on: 1 is bird, 0 is what is around it."""
    known = json.loads(OUTLINES.read_text(encoding="utf-8"))
    outlines = known["train"] | known["test"]
    splits = load_splits(data)
    train, held_out = (outlined(dataset, splits, outlines) for dataset in load_image_datasets(data, splits))
    train = train.choose(data.train_images, data.eval_seed)
    return with_outlines(train, splits, outlines), with_outlines(held_out, splits, outlines)


def names_of(dataset: ImageDataset, splits: dict[str, Any]) -> list[str]:
    """What the outlines call each of the images."""
    ids = splits[dataset.origin.split]["id"]
    return [ids[index] for index in indices_in_split(dataset).tolist()]


def outlined(dataset: ImageDataset, splits: dict[str, Any], outlines: dict[str, Any]) -> ImageDataset:
    """The images that have an outline. Raises UserError where none has."""
    chosen = [index for index, name in enumerate(names_of(dataset, splits)) if name in outlines]
    allowed = "others: none of its photographs has an outline"
    require(chosen, "data", f"the birds' {dataset.split}, {len(dataset)} images", allowed)
    return dataset.select(np.array(chosen, np.int64))


def with_outlines(dataset: ImageDataset, splits: dict[str, Any], outlines: dict[str, Any]) -> Masked:
    """The same images, and their outlines as masks."""
    cells = [{"bytes": drawn(outlines[name]), "path": None} for name in names_of(dataset, splits)]
    return dataset, datasets.Dataset.from_dict(
        {"mask": cells}, datasets.Features({"mask": datasets.Image(decode=False)})
    )


def drawn(outline: dict[str, Any]) -> bytes:
    """A mask of polygons, as PNG: `size` [width, height], `birds` lists of x, y, x, y, ..."""
    mask = Image.new("L", tuple(outline["size"]))
    for polygon in outline["birds"]:
        ImageDraw.Draw(mask).polygon(polygon, fill=1)
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    return buffer.getvalue()


def masked_views(encoder: FrozenEncoder | PatchBaseline, masked: Masked, data: MaskedDataConfig) -> MaskedViews:
    """Images and masks as this encoder takes them."""
    views = views_for(encoder, masked[0], data)
    return MaskedViews(views.dataset, views.data, views.img_size, masks=masked[1])


class ExtractedPatches(NamedTuple):
    """Features of patches, and of which images and masks: those that can be decoded."""

    by_depth: dict[int, PatchFeatures]
    splits: tuple[Masked, Masked]
    left_out: dict[str, int]  # the other images of train and test


def extract_patches(
    encoder: FrozenEncoder | PatchBaseline,
    splits: Sequence[Masked],
    depths: Sequence[int],
    data: MaskedDataConfig,
    accelerator: Accelerator,
    strict: bool = False,
) -> ExtractedPatches:
    """Features of patches after each depth; what is large lies in temporary files."""
    encode = partial(patch_features, encoder, depths=depths)
    train, test = (
        extract_split(masked_views(encoder, masked, data), encode, accelerator, strict, "features of patches")
        for masked in splits
    )
    warn_left_out((*train.unreadable, *test.unreadable))
    by_depth = {}
    for depth, of_train, of_test in zip(depths, train.by_depth, test.by_depth, strict=True):
        by_depth[depth] = PatchFeatures(of_train, train.labels, of_test, test.labels)
    kept = []
    for (images, masks), of_split in zip(splits, (train, test), strict=True):
        kept.append((images.select(of_split.kept), masks.select(of_split.kept)))
    return ExtractedPatches(by_depth, tuple(kept), {"train": len(train.unreadable), "test": len(test.unreadable)})


def classes_of(features: PatchFeatures) -> int:
    """C: one more than the largest number in the masks."""
    counted = np.union1d(*(classes_in(masks) for masks in (features.train_masks, features.test_masks)))
    allowed = "a column of several classes, data.ignore_index not counted"
    require(len(counted) > 1, "data.mask_column", f"of the classes {counted.tolist()}", allowed)
    return int(counted.max()) + 1


def classes_in(masks: NDArray[np.int16]) -> NDArray[np.int16]:
    """The numbers of masks, without the ignored one, in order."""
    present = np.unique(np.concatenate([np.unique(block) for block in np.array_split(masks, 16)]))
    return present[present != IGNORED]


def class_shares(masks: NDArray[np.int16], grid: tuple[int, int], classes: int) -> Iterator[Tensor]:
    """Which share of each patch is of each class, (b, h, w, C) by blocks of images; ignored pixels are of none."""
    for block in torch.from_numpy(masks).split(max(1, NUMBERS // (classes * masks[0].size))):
        numbers = block.long()
        counted = numbers != IGNORED
        one_hot = F.one_hot(numbers.where(counted, 0), classes) * counted[..., None]
        yield F.adaptive_avg_pool2d(one_hot.movedim(-1, 1).float(), grid).movedim(1, -1)


def describe_masks(splits: Sequence[Masked], data: MaskedDataConfig) -> str:
    """What is learned from and judged by, for a message."""
    train, test = (len(images) for images, _ in splits)
    return f"{describe_source(data)}: {train} images with masks to learn from, {test} to judge by"


def warn_of_turned(splits: Sequence[Masked], data: MaskedDataConfig) -> None:
    """Print a warning if images are turned by their orientation tag, and their masks have none."""
    names = [name for masked in splits for name in turned_alone(masked, data)]
    if names:
        print(
            f"warning: {len(names)} images are turned by the orientation tag in their files, and their masks have no "
            f"such tag, such as {', '.join(names[:NAMED])}: the masks are taken as they are stored. If they were drawn "
            "on the images as those are stored, remove the tag from the images",
            file=sys.stderr,
        )


def turned_alone(masked: Masked, data: MaskedDataConfig) -> Iterator[str]:
    """Names of the images that are turned by their orientation tag, and whose masks are not."""
    images, masks = masked
    for index in range(len(images)):
        with contextlib.suppress(UnreadableImage):  # it is named when its turn comes
            image = read_cell(images.rows[index][images.image_column], data.read_retries, images.array_dtype)
            if stored_orientation(image) not in TURNED:
                continue
            if stored_orientation(read_cell(masks[index]["mask"], data.read_retries)) not in TURNED:
                yield images.name(index)


def pixels_by_class(masks: NDArray[np.int16]) -> NDArray[np.int64]:
    """How many pixels are ignored, and how many are of each class: (1 + C,)."""
    counts = np.zeros(np.iinfo(np.int16).max + 2, np.int64)
    for block in np.array_split(masks, 16):
        counts += np.bincount(block.ravel().astype(np.int32) - IGNORED, minlength=len(counts))
    return counts


def print_pixels(features: PatchFeatures, data: MaskedDataConfig) -> None:
    """Print which share of the masks' pixels is ignored, and warnings of masks that may not say what is meant.

    Above MANY_IGNORED of a split the setting is named, and so are classes with fewer than FEW_PIXELS of the pixels that
    count: compression with losses and blurred edges make such classes, and each weighs in the mean IoU as much as
    another.
    """
    train, test = map(pixels_by_class, (features.train_masks, features.test_masks))
    of_train, of_test = (float(counts[0] / counts.sum()) for counts in (train, test))
    ignored = "null" if data.ignore_index is None else data.ignore_index
    shares = f"{of_train:.1%} of the pixels to learn from and {of_test:.1%} of those to judge by"
    print(f"{shares} are ignored (data.ignore_index is {ignored})")
    if max(of_train, of_test) > MANY_IGNORED:
        print(
            f"warning: {max(of_train, of_test):.0%} of the masks' pixels are {ignored}, which data.ignore_index leaves "
            f"out; if {ignored} is a class, set --data.ignore_index null",
            file=sys.stderr,
        )
    counts = (train + test)[1:]
    few = np.flatnonzero((counts > 0) & (counts < FEW_PIXELS * counts.sum()))
    if len(few):
        fewest = few[np.argsort(counts[few], kind="stable")][:NAMED]
        named = ", ".join(f"class {number} ({counts[number]} of {counts.sum()})" for number in fewest)
        print(
            f"warning: {len(few)} of the masks' classes have less than {FEW_PIXELS:.2%} of the pixels, such as "
            f"{named}; each weighs in the mean IoU as much as another. Masks that were once JPEG, or resized with "
            "blurred edges, have such classes",
            file=sys.stderr,
        )
