"""Extraction of frozen features from a split, without the images that cannot be decoded."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor

from evaluation.config import EncoderConfig, ExtractionConfig, ProbeDataConfig
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, open_frozen_encoder, resolve_depths
from evaluation.frozen.labelled import load_labelled
from evaluation.frozen.labelled_features import DEV, LabelledFeatures
from evaluation.frozen.run_images import LoadedSplits
from mpp.data.dataset import ImageDataset
from mpp.data.loader import fixed_view_batches
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import deaths_explained
from mpp.errors import UserError
from mpp.features.frozen import extract
from mpp.runtime.messages import progress_bar, warn

DEFAULT_BATCH_SIZE = 64  # where data.batch_size is not set
MAX_IMAGES_NAMED = 20  # in a message on images that cannot be decoded


class RecordedBatches:
    """Batches of a split, and a record of the images that could not be decoded, which others replace.

    Args:
        split: name of the split, for messages.
        strict: raise UserError if there are such images, after all batches are read so that it names all of them.
    """

    def __init__(self, batches: Iterable[Batch], split: str, strict: bool = False):
        self.batches = batches
        self.split = split
        self.strict = strict
        self.indices: list[int] = []
        """Indices of the images that the batches hold; of a replaced image, that of another one."""
        self.unreadable: list[str] = []
        """Names of the images that could not be decoded, and the reasons."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.indices += batch.indices.tolist()
            self.unreadable += batch.unreadable
            if not (self.strict and self.unreadable):
                yield batch
        if self.strict and self.unreadable:
            needed = "with --strict true a probe needs all images: replace these with intact copies, or remove them"
            raise UserError(f"{name_unreadable(self.unreadable)} ({self.split}); {needed}")


class SplitFeatures(NamedTuple):
    """Features and labels of a split, with a row for each image that can be decoded."""

    by_depth: list[NDArray]  # empty except on the main process
    labels: NDArray  # empty except on the main process
    kept: NDArray[np.int64]  # indices of these images in the split
    unreadable: list[str]  # names of the others, and the reasons


def extract_split(
    views: ViewDataset,
    encode: Callable[[Tensor], list[Tensor]],
    accelerator: Accelerator,
    strict: bool = False,
    progress: str | None = None,
) -> SplitFeatures:
    """Extract features of the images that can be decoded, by all processes: see `extract`.

    Args:
        views: the images of a split as an encoder takes them.
        encode: images (B, C, H, W) on the device to features (B, D), for each depth.
        progress: name of the progress bar; None: no bar.
    Raises:
        UserError: no image can be decoded, or one cannot and `strict` is set.
    """
    count = len(views.dataset)
    rank, processes = accelerator.process_index, accelerator.num_processes
    loader = fixed_view_batches(views, views.data.batch_size or DEFAULT_BATCH_SIZE, processes, rank)
    shows_progress = progress is not None and accelerator.is_main_process
    batches = RecordedBatches(
        progress_bar(loader, desc=progress, disable=not shows_progress), views.dataset.split, strict
    )
    features, labels = extract(batches, encode, count, accelerator)
    by_depth, labels = [each.numpy() for each in features], labels.numpy()

    requested = np.arange(rank, count, processes)
    replaced = requested[requested != np.array(batches.indices, np.int64)]
    replaced = gather_object(replaced.tolist())
    unreadable = sorted(set(gather_object(batches.unreadable)))
    kept = np.setdiff1d(np.arange(count), np.array(replaced, np.int64))
    if len(kept) == 0:
        raise UserError(f"none of the {count} images of {batches.split} can be decoded, such as {unreadable[0]}")
    if replaced and accelerator.is_main_process:
        by_depth = [features[kept] for features in by_depth]
        labels = labels[kept]
    return SplitFeatures(by_depth, labels, kept, unreadable)


def name_unreadable(unreadable: Sequence[str]) -> str:
    """The images that cannot be decoded, for a message."""
    named = "; ".join(unreadable[:MAX_IMAGES_NAMED])
    others = len(unreadable) - MAX_IMAGES_NAMED
    return f"{named}; and {others} more" if others > 0 else named


def warn_left_out(unreadable: Sequence[str]) -> None:
    """Name the images that a probe leaves out, once for all probes of the same images."""
    if not unreadable:
        return
    images = "image that cannot be decoded is" if len(unreadable) == 1 else "images that cannot be decoded are"
    way = "--strict true refuses such images"
    warn(f"{len(unreadable)} {images} left out ({way}): {name_unreadable(unreadable)}")


def views_for(encoder: FrozenEncoder, dataset: ImageDataset, data: ProbeDataConfig) -> ViewDataset:
    """The images as an encoder takes them: its input size and, unless `data` sets another, its centre crop."""
    data = dataclasses.replace(data, eval_crop=data.eval_crop or encoder.crop_pct)
    return ViewDataset(dataset, data, encoder.img_size)


class ExtractedFeatures(NamedTuple):
    """Features of the labelled images."""

    by_depth: dict[int, LabelledFeatures]  # empty except on the main process
    left_out: dict[str, int]  # numbers of images that cannot be decoded: train, and test or dev
    input: dict[str, Any] | None = None  # of the encoder: see HeadDescription; None: it is a file, or a baseline


def extract_labelled_features(
    frozen: EncoderConfig,
    data: ProbeDataConfig,
    extraction: ExtractionConfig,
    accelerator: Accelerator,
    loaded: LoadedSplits | None = None,
    on_dev: bool = False,
    check_kind: Callable[[str], object] = lambda kind: None,
) -> ExtractedFeatures:
    """Extract features of the labelled images at the depths that `extraction.depth` means.

    Args:
        on_dev: take a tenth of the training images as the test images.
        check_kind: called with the kind of the labels, before the features are extracted.
    Raises:
        UserError: the images have no labels, or there is no such encoder, image or depth.
    """
    encoder = open_frozen_encoder(frozen, data)
    depths = resolve_depths(extraction.depth, len(encoder.stages))
    learned, tested, _ = load_labelled(
        data, accelerator, frozen.weights, loaded=loaded, on_dev=on_dev, task=extraction.task, check_kind=check_kind
    )
    encoder.to(accelerator.device)
    encode = partial(encoder, representation=extraction.representation, depths=depths)
    with deaths_explained():
        train, test = (
            extract_split(views_for(encoder, split, data), encode, accelerator, extraction.strict, "features")
            for split in (learned, tested)
        )
    left_out = {"train": len(train.unreadable), DEV if on_dev else "test": len(test.unreadable)}
    if not accelerator.is_main_process:
        return ExtractedFeatures({}, left_out)
    warn_left_out((*train.unreadable, *test.unreadable))
    all_images = tested.image_names()
    test_images = [all_images[index] for index in test.kept]
    by_depth = {}
    for depth, of_train, of_test in zip(depths, train.by_depth, test.by_depth, strict=True):
        features = LabelledFeatures(
            of_train, train.labels, of_test, test.labels, learned.class_names, test_images, learned.label_kind
        )
        by_depth[depth] = features.checked(frozen.encoder)
    return ExtractedFeatures(by_depth, left_out, describe_input(encoder, data, accelerator))


def describe_input(
    encoder: FrozenEncoder | ColorBaseline, data: ProbeDataConfig, accelerator: Accelerator
) -> dict[str, Any] | None:
    """Form of an encoder's input, and the precision that it computes in; None: of a colour baseline."""
    if not isinstance(encoder, FrozenEncoder):
        return None
    return encoder.describe_input(data) | {"precision": describe_precision(accelerator)}


def describe_precision(accelerator: Accelerator) -> str:
    """The precision that encoders compute in: bf16 or fp32."""
    return "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
