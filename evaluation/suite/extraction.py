"""Frozen features of an encoder: which, extracted once, saved, loaded."""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

from evaluation.config import FeaturesConfig, ProbeDataConfig
from evaluation.suite.encoders import FrozenEncoder, depths_asked, encoder_of
from evaluation.suite.labelled import load_labelled
from mpp.config import require
from mpp.data.sources import ImageDataset
from mpp.data.views import Batch, ViewDataset, held_out_loader
from mpp.data.workers import deaths_explained
from mpp.errors import UserError
from mpp.frozen_features import extract
from mpp.runtime.arrays import in_blocks, let_go, map_array, select
from mpp.runtime.randomness import Stream, permutation
from mpp.training.tracking import progress_bar

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
            if not np.issubdtype(labels.dtype, np.integer) or (labels.max(1) if several else labels).min() < 0:
                raise UserError(f"{source}: {part}_labels must be integers from 0")
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
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with aside.open("wb") as file:  # a file: numpy would add .npz to a name without
            np.savez(file, **dict(zip(NAMES, features, strict=True)))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
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


def readable(batches: Iterable[Batch], split: str) -> Iterator[Batch]:
    """The batches; UserError where images cannot be decoded: features of others would be no measurement.

    After the first, the other images are read to the end, so that all of them are named at once.
    """
    broken: list[str] = []
    for batch in batches:
        broken += batch.unreadable
        if not broken:
            yield batch
    if broken:
        named = "; ".join(broken[:NAMED]) + (f"; and {len(broken) - NAMED} more" if len(broken) > NAMED else "")
        raise UserError(f"{named} ({split}); a probe needs all images: replace these by good copies, or remove them")


def views_for(encoder: FrozenEncoder, dataset: ImageDataset, data: ProbeDataConfig) -> ViewDataset:
    """The images as this encoder takes them: its input size and, unless `data` says otherwise, its centre crop."""
    return ViewDataset(
        dataset, dataclasses.replace(data, eval_crop=data.eval_crop or encoder.crop_pct), encoder.img_size
    )


def extract_features(config: FeaturesConfig, accelerator: Accelerator) -> dict[int, Features]:
    """Depth -> features of the labelled images; nothing but on the main process.

    Raises:
        UserError: no labels, or an encoder, images or depth that there is not.
    """
    encoder = encoder_of(config)
    depths = depths_asked(config.depth, len(encoder.stages))
    splits = load_labelled(config.data, accelerator, "" if config.random else config.checkpoint or config.encoder)
    encoder.to(accelerator.device)
    found = []
    with deaths_explained():
        for split in splits:
            views = views_for(encoder, split, config.data)
            size, rank, processes = config.data.batch_size or 64, accelerator.process_index, accelerator.num_processes
            loader = held_out_loader(views, size, processes, rank)
            bar = progress_bar(loader, desc="features", disable=not accelerator.is_main_process)
            encode = partial(encoder, representation=config.representation, depths=depths)
            found.append(extract(readable(bar, split.split), encode, len(split), accelerator))
    if not accelerator.is_main_process:
        return {}
    (train, train_labels), (test, test_labels) = found
    return {
        depth: Features(train[i], train_labels, test[i], test_labels).check(config.encoder)
        for i, depth in enumerate(depths)
    }
