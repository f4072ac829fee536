"""Frozen features of an encoder: which, extracted once, saved, loaded."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor

from evaluation.config import FeaturesConfig, ProbeDataConfig
from evaluation.frozen.encoder import FrozenEncoder, open_frozen_encoder, resolve_depths
from evaluation.frozen.labelled import load_labelled
from mpp.config import require
from mpp.data.dataset import ImageDataset
from mpp.data.loader import held_out_batches
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import deaths_explained
from mpp.errors import UserError
from mpp.features.frozen import extract
from mpp.runtime.arrays import in_blocks, let_go, map_array, select
from mpp.runtime.files import complete
from mpp.runtime.messages import warn
from mpp.runtime.progress import progress_bar
from mpp.runtime.randomness import Stream, permutation

DEV_SEED = 0
NAMED = 20  # images in a message


class Features(NamedTuple):
    """Frozen features of one depth and their labels."""

    train: NDArray[np.float32]  # (N, D)
    train_labels: NDArray[np.int64]  # (N,)
    test: NDArray[np.float32]  # (M, D)
    test_labels: NDArray[np.int64]  # (M,); or (M, L) of which any is right, padded with -1

    def check(self, source: str) -> "Features":
        """The same, labels as int64. Raises UserError where a probe would give nonsense."""
        for part, labels in (("train", self.train_labels), ("test", self.test_labels)):
            features = getattr(self, part)
            several = part == "test" and labels.ndim == 2
            if features.ndim != 2 or not (labels.ndim == 1 or several) or len(features) != len(labels):
                raise UserError(f"{source}: {part}_features {features.shape} and {part}_labels {labels.shape} disagree")
            if len(labels) == 0:
                raise UserError(f"{source}: no labelled images in {part}")
            whole = np.issubdtype(labels.dtype, np.integer) and labels.max() <= np.iinfo(np.int64).max
            if not whole or (labels.max(1) if several else labels).min() < 0:
                raise UserError(f"{source}: {part}_labels must be integers from 0 and below 2**63")
            if not np.issubdtype(features.dtype, np.floating):
                raise UserError(f"{source}: {part}_features are {features.dtype}, not floating-point numbers")
            if not all(np.isfinite(block).all() for block in in_blocks(features)):
                raise UserError(f"{source}: {part}_features have values that are not finite")
        if self.train.shape[1] != self.test.shape[1]:
            widths = f"{self.train.shape[1]} and {self.test.shape[1]}"
            raise UserError(f"{source}: train_features and test_features are {widths} wide")
        if len(np.unique(self.train_labels)) < 2:
            raise UserError(f"{source}: all training images are of one class")
        labels = {"train_labels": self.train_labels.astype(np.int64), "test_labels": self.test_labels.astype(np.int64)}
        return self._replace(**labels)

    def numbered(self) -> tuple["Features", int]:
        """The same with classes numbered from 0 without gaps, in their order; and the number of classes.

        Labels in a file may be identifiers, far apart.
        """
        labels = self.train_labels, self.test_labels
        classes = np.unique(np.concatenate([each[each >= 0] for each in labels]))
        train, test = (np.where(each < 0, -1, np.searchsorted(classes, each)) for each in labels)
        return self._replace(train_labels=train, test_labels=test), len(classes)

    def dev(self) -> "Features":
        """A tenth of train, drawn once, in the place of test: what choices are made on."""
        parts = dev_cut(len(self.train))
        return Features(*(select(array, part) for part in parts for array in (self.train, self.train_labels)))


def dev_cut(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of `count` training images are learned from and which, a tenth, choices are made on; drawn once.

    Raises:
        UserError: none would be left to learn from.
    """
    allowed = "at least 2 where a depth or a rate is chosen on a part of them, and 3 where both are"
    require(count > 1, "the number of training images", count, allowed)
    order, cut = permutation(Stream.CUT, DEV_SEED, 1, count), max(1, count // 10)
    return np.sort(order[cut:]), np.sort(order[:cut])


NAMES = ("train_features", "train_labels", "test_features", "test_labels")


def save_features(path: Path, features: Features) -> None:
    """Write one depth's features as .npz, complete or not at all: who has mapped an earlier file keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial, partial.open("wb") as file:  # numpy would add .npz to a name without
        np.savez(file, **dict(zip(NAMES, features, strict=True)))
    let_go(features.train)


def load_features(path: Path) -> Features:
    """Features that are mapped, where they are not compressed, and their labels; nothing in the file is run.

    Raises:
        UserError: no such file, an array missing or pickled, shapes that disagree, values that are not finite.
    """
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise UserError("it holds one array, not several by name")
        with arrays:
            missing = [name for name in NAMES if name not in arrays]
            if missing:
                raise UserError(f"it lacks {', '.join(missing)}")
            features = Features(*(map_array(path, arrays, name) for name in NAMES))
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise UserError(f"features is {path}, which cannot be read: {error}") from error
    return features.check(str(path))


class Readable:
    """Batches, and a list of the images that cannot be decoded, instead of which the batches hold others.

    Args:
        batches: of this process: the images rank, rank + processes, ... in their order.
        split: for messages.
        strict: whether such images raise UserError, after all batches are read, so that it names all of them.
    """

    def __init__(self, batches: Iterable[Batch], split: str, strict: bool = False, rank: int = 0, processes: int = 1):
        self.batches, self.split, self.strict = batches, split, strict
        self.order = iter(range(rank, sys.maxsize, processes))
        self.missing: list[int] = []
        """Their indices in the split."""
        self.broken: list[str] = []
        """Their names, and the reasons."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            wanted = islice(self.order, len(batch.images))
            self.missing += [own for own, shown in zip(wanted, batch.indices.tolist(), strict=True) if own != shown]
            self.broken += batch.unreadable
            if not (self.strict and self.broken):
                yield batch
        if self.strict and self.broken:
            needed = "with --strict true a probe needs all images: replace these by good copies, or remove them"
            raise UserError(f"{listing(self.broken)} ({self.split}); {needed}")


def listing(broken: Sequence[str]) -> str:
    """Images that cannot be decoded, for a message."""
    return "; ".join(broken[:NAMED]) + (f"; and {len(broken) - NAMED} more" if len(broken) > NAMED else "")


class Whole(NamedTuple):
    """Features and labels of a whole split, with a row for each image that can be decoded."""

    arrays: list[NDArray]  # features of each depth, then the labels; empty except on the main process
    kept: NDArray[np.int64]  # indices of these images in the split
    broken: list[str]  # names of the others, and the reasons


def extract_readable(
    batches: Readable, encode: Callable[[Tensor], list[Tensor]], count: int, accelerator: Accelerator
) -> Whole:
    """Features of the images of a split that can be decoded, by all processes: see `extract`.

    Raises:
        UserError: no image can be decoded.
    """
    by_depth, labels = extract(batches, encode, count, accelerator)
    missing, broken = gather_object(batches.missing), sorted(set(gather_object(batches.broken)))
    kept = np.setdiff1d(np.arange(count), np.array(missing, np.int64))
    if not len(kept):
        raise UserError(f"none of the {count} images of {batches.split} can be decoded, such as {broken[0]}")
    arrays = [*by_depth, labels]
    if missing and accelerator.is_main_process:
        arrays = [select(array, kept) for array in arrays]
    return Whole(arrays, kept, broken)


def warn_left_out(broken: Sequence[str]) -> None:
    """Name the images that a probe leaves out, once for all probes of the same images."""
    if broken:
        what = "image that cannot be decoded is" if len(broken) == 1 else "images that cannot be decoded are"
        how = "--strict true refuses such images"
        warn(f"{len(broken)} {what} left out ({how}): {listing(broken)}")


def views_for(encoder: FrozenEncoder, dataset: ImageDataset, data: ProbeDataConfig) -> ViewDataset:
    """The images as this encoder takes them: its input size and, unless `data` says otherwise, its centre crop."""
    return ViewDataset(
        dataset, dataclasses.replace(data, eval_crop=data.eval_crop or encoder.crop_pct), encoder.img_size
    )


class Extracted(NamedTuple):
    """Features of the labelled images."""

    by_depth: dict[int, Features]  # empty except on the main process
    left_out: dict[str, int]  # number of training and of test images that cannot be decoded

    def about(self) -> dict[str, Any]:
        """Entries of a report; empty where no image was left out."""
        return {"left_out": self.left_out} if any(self.left_out.values()) else {}


def extract_labelled(config: FeaturesConfig, accelerator: Accelerator) -> Extracted:
    """Features of the labelled images at the depths that are asked for.

    Raises:
        UserError: no labels, or an encoder, images or depth that there is not.
    """
    encoder = open_frozen_encoder(config)
    depths = resolve_depths(config.depth, len(encoder.stages))
    splits = load_labelled(config.data, accelerator, "" if config.random else config.checkpoint or config.encoder)
    encoder.to(accelerator.device)
    found = []
    with deaths_explained():
        for split in splits:
            views = views_for(encoder, split, config.data)
            size, rank, processes = config.data.batch_size or 64, accelerator.process_index, accelerator.num_processes
            loader = held_out_batches(views, size, processes, rank)
            bar = progress_bar(loader, desc="features", disable=not accelerator.is_main_process)
            batches = Readable(bar, split.split, config.strict, rank, processes)
            encode = partial(encoder, representation=config.representation, depths=depths)
            found.append(extract_readable(batches, encode, len(split), accelerator))
    train, test = found
    left_out = {"train": len(train.broken), "test": len(test.broken)}
    if not accelerator.is_main_process:
        return Extracted({}, left_out)
    warn_left_out((*train.broken, *test.broken))
    by_depth = {
        depth: Features(train.arrays[i], train.arrays[-1], test.arrays[i], test.arrays[-1]).check(config.encoder)
        for i, depth in enumerate(depths)
    }
    return Extracted(by_depth, left_out)
