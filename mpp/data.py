"""Images in, batches out: `datasets` -> decoded crops and their corruption, as uint8 and integers.

Training is one endless sequence of positions. Position p is image p % n of epoch p // n in that epoch's order, so the
step alone says which images come next; there is no partial batch and no padding. What a sample looks like is a pure
function of (seed, epoch, index): see mpp/randomness.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mpp import corruption, images
from mpp.config import CorruptionConfig, DataConfig, SourceConfig
from mpp.corruption import Corruption
from mpp.randomness import FIXED, Stream, permutation, words

BIRDS = Path(__file__).parent / "birds"
REPLACEMENTS = 64  # so many unreadable images in a row do not happen where fewer than half are


class Photographs:
    """Images of one split, still encoded, and their labels.

    Args:
        rows: with the two columns.
        image_column: holds {"bytes", "path"}, undecoded.
        labels: (n,) int64 class of each image, -1 where there is none; (n, L) where several are right, padded with
            -1; None where nothing is labelled.
        split: its name, for messages.
    """

    def __init__(self, rows: datasets.Dataset, image_column: str, labels: NDArray[np.int64] | None, split: str):
        self.rows, self.image_column, self.labels, self.split = rows, image_column, labels, split

    def __len__(self) -> int:
        return len(self.rows)

    def decode(self, index: int, max_pixels: int) -> Tensor:
        """The image as (3, H, W) uint8; raises UnreadableImage."""
        cell = self.rows[index][self.image_column]
        try:
            data = cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()
        except (OSError, TypeError) as error:
            raise images.UnreadableImage(f"no bytes: {error}") from error
        return images.decode(data, max_pixels)

    def name(self, index: int) -> str:
        """What a person finds the image by."""
        cell = self.rows[index][self.image_column] or {}
        return cell.get("path") or f"{self.split}[{index}]"

    def select(self, indices: NDArray[np.int64]) -> "Photographs":
        """The images at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        return Photographs(self.rows.select(indices), self.image_column, labels, self.split)

    def first(self, limit: int) -> "Photographs":
        """The first `limit` images, or all where there are fewer."""
        return self.select(np.arange(min(limit, len(self))))

    def labelled(self, limit: int | None = None) -> "Photographs | None":
        """The first `limit` images that have a label (None: all of them); None where there are none."""
        if self.labels is None or not (self.labels >= 0).any():
            return None
        return self.select(np.flatnonzero(self.labels.reshape(len(self), -1).max(1) >= 0)[:limit])

    def cut(self, fraction: float, seed: int, name: str) -> tuple["Photographs", "Photographs"]:
        """A seeded cut in two: what stays, and `fraction` of the images (at least one), in the order they had."""
        order, count = permutation(Stream.CUT, seed, 0, len(self)), max(1, round(fraction * len(self)))
        if count >= len(self):
            raise ValueError(f"{self.split} has {len(self)} images: too few to hold {count} out")
        kept, held_out = self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))
        held_out.split = name
        return kept, held_out


def load_photographs(config: SourceConfig) -> tuple[Photographs, Photographs]:
    """The images to train on and the held-out ones.

    Raises:
        ValueError: nothing there, no such split, no image column, too few images.
    """
    splits = load_splits(config)
    if config.split not in splits:
        raise ValueError(f"data.split is {config.split}; {describe(config)} has {', '.join(splits)}")
    train, held_out = splits[config.split], held_out_name(config, list(splits))
    column = find_image_column(config, train.features)
    parts = {config.split: train} | ({} if held_out is None else {held_out: splits[held_out]})
    label_columns = [config.label_column, config.eval_label_column or config.label_column]
    labels = read_labels(config, [(rows, column) for rows, column in zip(parts.values(), label_columns, strict=False)])
    undecoded = datasets.Image(decode=False)
    photographs = [
        Photographs(rows.select_columns([column]).cast_column(column, undecoded), column, of_split, name)
        for (name, rows), of_split in zip(parts.items(), labels, strict=True)
    ]
    if held_out is None:
        photographs = photographs[0].cut(config.eval_fraction, config.eval_seed, "held out")
    train, test = photographs
    if config.train_images is not None:
        order = permutation(Stream.CUT, config.eval_seed, 1, len(train))
        train = train.select(np.sort(order[: config.train_images]))
    return train, test


def describe(config: SourceConfig) -> str:
    """The data set, for messages."""
    return f"data.path {config.path}" if config.path else "the package's birds"


def load_splits(config: SourceConfig) -> datasets.DatasetDict:
    """All splits of the data set that `data.path` names."""
    if config.path is None:
        files = {split: str(BIRDS / f"{split}-00000-of-00001.parquet") for split in ("train", "test")}
        return datasets.load_dataset("parquet", data_files=files)
    path = Path(config.path).expanduser()
    looks_local = config.path.startswith((".", "/", "~")) or config.path.count("/") > 1
    if looks_local and not path.exists():
        raise ValueError(f"data.path is {config.path}, which does not exist")
    try:
        if path.is_file():
            kind = path.suffix.removeprefix(".")
            if kind not in ("parquet", "arrow"):
                raise ValueError("a single file must be .parquet or .arrow")
            return datasets.load_dataset(kind, data_files=str(path))
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return saved if isinstance(saved, datasets.DatasetDict) else datasets.DatasetDict({config.split: saved})
        return datasets.load_dataset(str(path) if path.is_dir() else config.path, config.name)
    except Exception as error:  # the library raises many sorts for what a user sees as one: it cannot be loaded
        reason = " ".join(str(error).split())
        raise ValueError(f"data.path is {config.path}, which cannot be loaded: {reason}") from error


def held_out_name(config: SourceConfig, names: list[str]) -> str | None:
    """The split that is held out; None: a cut of the training split."""
    if config.eval_split == "auto":
        return next((name for name in ("validation", "test") if name in names and name != config.split), None)
    if config.eval_split is not None and config.eval_split not in names:
        raise ValueError(f"data.eval_split is {config.eval_split}; {describe(config)} has {', '.join(names)}")
    return config.eval_split


def find_image_column(config: SourceConfig, features: datasets.Features) -> str:
    """The column that holds the images: the named one, or the only one that can."""
    columns = ", ".join(features)
    found = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if config.image_column is None:
        if len(found) != 1:
            raise ValueError(
                f"{describe(config)} has {len(found)} image columns; name one by data.image_column: {columns}"
            )
        return found[0]
    if config.image_column not in features:
        raise ValueError(f"data.image_column is {config.image_column}; {describe(config)} has {columns}")
    feature = features[config.image_column]
    if not isinstance(feature, datasets.Image) and getattr(feature, "dtype", None) not in ("binary", "string"):
        raise ValueError(f"data.image_column is {config.image_column}, which holds no images but {feature}")
    return config.image_column


def read_labels(
    config: SourceConfig, parts: list[tuple[datasets.Dataset, str | None]]
) -> list[NDArray[np.int64] | None]:
    """Class numbers of each part, -1 where an image has none; classes named by text are numbered in order.

    Args:
        parts: rows and their label column; None: `label` where it exists.
    Returns:
        (n,) for each part; (n, L) where the column holds lists, padded with -1; None where there is no such column.
    """
    values: list[list | None] = []
    for rows, column in parts:
        if column is not None and column not in rows.features:
            known = ", ".join(rows.features)
            raise ValueError(f"data.label_column is {column}; {describe(config)} has {known}")
        values.append(rows[column or "label"][:] if (column or "label") in rows.features else None)
    lists = [None if part is None else [as_list(value) for value in part] for part in values]
    present = {value for part in lists if part is not None for labels in part for value in labels}
    if all(isinstance(value, str) for value in present):
        number = {name: i for i, name in enumerate(sorted(present))}
    elif all(isinstance(value, int) for value in present):
        number = {value: max(value, -1) for value in present}
    else:
        raise ValueError(f"{describe(config)}: the label column holds no classes")
    return [
        None if part is None else label_array([[number[v] for v in labels] for labels in part], isinstance(first, list))
        for part, first in zip(
            lists, [next((v for v in part or () if v is not None), None) for part in values], strict=True
        )
    ]


def as_list(value: Any) -> list:
    """A label, a list of labels, or none, as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def label_array(labels: list[list[int]], several: bool) -> NDArray[np.int64]:
    """Lists of labels as (n, L), or as (n,) where there is one each; padded with -1."""
    result = np.full((len(labels), max(1, *map(len, labels)) if labels else 1), -1, dtype=np.int64)
    for row, of_image in zip(result, labels, strict=True):
        row[: len(of_image)] = of_image
    return result if several else result[:, 0]


class Batch(NamedTuple):
    """What a loader hands over: one forward pass of one process."""

    images: Tensor  # (B, 3, S, S) uint8: the clean crop, the network's input and the source of the targets
    corruption: Corruption | None  # (B, K); None where the images are only looked at
    labels: Tensor  # (B,) int64, -1: none; (B, L) where several are right
    indices: Tensor  # (B,) int64: which images of the split
    unreadable: list[str]  # images that could not be decoded and were replaced: name and reason


@dataclass(frozen=True)
class Views(Dataset):
    """Samples by (epoch, index): crop, corruption, label. Epoch FIXED is the held-out view: a centre crop.

    `data` is a DataConfig, or a SourceConfig with an `eval_crop` where only the held-out view is asked for.
    """

    photographs: Photographs
    data: DataConfig | SourceConfig
    img_size: int
    seed: int = 0
    corruption: CorruptionConfig | None = None
    patches: int = 0

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        """A sample: a Batch whose tensors lack the leading B."""
        epoch, index = key
        shown, pixels, unreadable = self.readable(epoch, index)
        if epoch == FIXED:
            crop = images.centre_crop(pixels, self.img_size, self.data.eval_crop)
        else:
            crop = images.random_crop(pixels, self.img_size, self.data, self.seed, epoch, index)
        seed = self.data.eval_seed if epoch == FIXED else self.seed  # runs of other seeds are judged on the same
        drawn = self.corruption and corruption.draw(self.corruption, self.patches, seed, epoch, index)
        labels = self.photographs.labels
        label = torch.tensor(-1 if labels is None else labels[shown])
        return Batch(crop, drawn, label, torch.tensor(shown), unreadable)

    def readable(self, epoch: int, index: int) -> tuple[int, Tensor, list[str]]:
        """The image at `index` or, where it cannot be decoded, another in its place: (its index, pixels, failures)."""
        failures: list[str] = []
        candidate = index
        while len(failures) <= REPLACEMENTS:
            try:
                return candidate, self.photographs.decode(candidate, self.data.max_pixels), failures
            except images.UnreadableImage as error:
                failures.append(f"{self.photographs.name(candidate)}: {error}")
                others = words(Stream.REPLACEMENT, self.seed, epoch, index, len(failures))
                candidate = int(others[-1] % np.uint64(len(self.photographs)))
        return index, torch.zeros(3, self.img_size, self.img_size, dtype=torch.uint8), failures


def collate(samples: list[Batch]) -> Batch:
    """Samples to a batch."""
    crops, drawn, labels, indices, unreadable = zip(*samples, strict=True)
    return Batch(
        torch.stack(crops),
        None if drawn[0] is None else Corruption(*map(torch.stack, zip(*drawn, strict=True))),
        torch.stack(labels),
        torch.stack(indices),
        [failure for failures in unreadable for failure in failures],
    )


@dataclass(frozen=True)
class Share:
    """How an update's images are shared out: global batch = processes x accumulation x batch."""

    batch: int  # images per process and forward pass
    accumulation: int  # forward passes per update
    processes: int
    rank: int

    @classmethod
    def of(cls, global_batch: int, batch: int | None, processes: int, rank: int) -> "Share":
        """Raises ValueError where the global batch is not divisible."""
        whole = processes * (batch or 1)
        if global_batch % whole:
            shares = f"{processes} processes" + (f" x data.batch_size ({batch})" if batch else "")
            raise ValueError(f"optim.global_batch_size is {global_batch}; it must be a multiple of {shares}")
        batch = batch or global_batch // processes
        return cls(batch, global_batch // (processes * batch), processes, rank)


class Positions(Sampler[list[tuple[int, int]]]):
    """This process's batches of (epoch, index) from update `start` to `stop`: the sampler's state is the step."""

    def __init__(self, size: int, seed: int, share: Share, start: int, stop: int):
        self.size, self.seed, self.share, self.start, self.stop = size, seed, share, start, stop

    def __len__(self) -> int:
        return (self.stop - self.start) * self.share.accumulation

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        share = self.share
        order = lru_cache(maxsize=2)(lambda epoch: permutation(Stream.ORDER, self.seed, epoch, self.size))
        for forward in range(self.start * share.accumulation, self.stop * share.accumulation):
            first = (forward * share.processes + share.rank) * share.batch
            keys = [divmod(position, self.size) for position in range(first, first + share.batch)]
            yield [(epoch, int(order(epoch)[place])) for epoch, place in keys]


def training_loader(views: Views, share: Share, start: int, stop: int) -> DataLoader:
    """Batches of this process, from update `start` to `stop`."""
    return loader(views, Positions(len(views.photographs), views.seed, share, start, stop))


def held_out_loader(views: Views, batch: int, processes: int = 1, rank: int = 0) -> DataLoader:
    """This process's share of the held-out images, in their fixed view; the last batch may be smaller."""
    keys = [(FIXED, index) for index in range(rank, len(views.photographs), processes)]
    return loader(views, [keys[i : i + batch] for i in range(0, len(keys), batch)])


def loader(views: Views, batches: Sampler | list) -> DataLoader:
    """torch's loader over batches of keys. It gets a generator of its own: it would draw from the global one."""
    return DataLoader(
        views,
        batch_sampler=batches,
        num_workers=views.data.workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),
    )
