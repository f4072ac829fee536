"""Images that are read as a stream, shard by shard, because there are too many to index or they are far away.

An epoch visits every shard once, in an order drawn by (seed, epoch), shared out among the processes and, in each, among
its workers (loader processes, or itself). Within a shard, blocks of consecutive rows are permuted by (seed, epoch,
shard, block). So a cursor is four numbers, which checkpoints carry, and nothing is replayed on resume but the rows of a
shard that were read before. The library's own shuffle has a buffer, which its state_dict leaves out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from mpp.config import ImagesConfig, SourceConfig, require
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset, dataset_of, decode_cell, file_of, find_image_column, numbers_of, undecoded
from mpp.data.identity import image_files, listed, short_digest
from mpp.data.kept_samples import Files, keep, list_files
from mpp.data.labels import find_label_column, number_labels, read_labels
from mpp.data.overview import announce_stream
from mpp.data.retry import LOADING_ERRORS, NETWORK_ERRORS, retried
from mpp.data.sources import find_held_out_split, load_splits
from mpp.data.views import REPLACEMENTS, Batch, BatchLayout, ViewDataset, collate
from mpp.data.workers import WatchedLoader
from mpp.errors import Undecodable, UserError, one_line
from mpp.runtime.randomness import Stream, permutation

FOLDER_SHARDS, FEWEST_ROWS = 256, 8  # a folder of image files is read as so many shards, of at least so many rows
SAMPLED_SHARDS, SAMPLED_ROWS = 16, 64  # from so many shards in turn a sample is drawn; so many rows are read at once
ROW_BITS = 32  # an image's number: its shard's, and its row below
BARREN = 100  # epochs without a row, after which a worker that is dealt empty shards gives up
POSITION = "_mpp_position"  # column of a sample that is kept: where each row stands in it


@dataclass(eq=False)
class Shards:
    """The images of one split as a stream."""

    stream: datasets.IterableDataset
    """Undecoded, with the image column and what else there is."""
    image_column: str
    """Holds {"bytes", "path"}, or arrays."""
    split: str
    """Its name, for messages."""
    numbers: list[int]
    """Which of the stream's shards these are."""
    files: Files | None
    """What they are read from: name, size and stamp of each; None: nobody knows."""
    rows: datasets.Dataset | None = None
    """What was cut into shards, where nothing came in any."""

    @property
    def count(self) -> int:
        """How many shards these are."""
        return len(self.numbers)

    @cached_property
    def numbers_type(self) -> str | None:
        """Of arrays, which a stream has as lists; None: image files."""
        return numbers_of(self.stream.features[self.image_column])

    def blocks(self, shard: int, size: int, skip: int = 0, retries: int = 0) -> Iterator[list[dict[str, Any]]]:
        """The rows of a shard in lists of `size`, from list `skip` on.

        Args:
            retries: how often a read that fails is tried again.
        Raises:
            UserError: the shard is damaged, or holds image files.
            ReadFailed: it cannot be read.
        """
        rows: Iterator[list[dict[str, Any]]] | None = None
        name = f"{self.split} shard {shard}"

        def read() -> list[dict[str, Any]] | None:
            nonlocal rows
            rows = rows or self.read(shard, size, skip)
            try:
                return next(rows, None)
            except NETWORK_ERRORS:
                rows = None  # it is at its end now
                raise
            except UserError:
                raise
            except LOADING_ERRORS as error:
                raise UserError(f"{name} is damaged after row {skip * size}: {one_line(error)}; replace it") from error

        while found := retried(read, name, retries):
            yield found
            skip += 1

    def read(self, shard: int, size: int, skip: int) -> Iterator[list[dict[str, Any]]]:
        """The same, as the library reads them."""
        alone = self.stream.shard(self.stream.num_shards, self.numbers[shard], contiguous=False)
        # not by iterating: in a loader process the library would leave all but one of them without a row
        for columns in islice(alone.iter(batch_size=size), skip, None):  # datasets 4.0's skip guesses types anew
            if isinstance(columns[self.image_column][0], Image.Image):  # the library has decoded a file
                without = "leave out data.streaming, or make shards by mpp prepare"
                raise UserError(f"data.path holds image files, no shards: {without}")
            yield [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def sample(self, limit: int, seed: int, retries: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """At least `limit` rows, each with its position in their order; fewer where the last shards are shorter.

        They are the beginnings of shards in a seeded order, so many shards at a time in turn. They are read shard by
        shard: the positions say the turns.
        """
        order, read = permutation(Stream.CUT, seed, 1, self.count), 0
        for first in range(0, self.count, SAMPLED_SHARDS):
            if read >= limit:
                return
            chosen = order[first : first + SAMPLED_SHARDS]
            for number, shard in enumerate(chosen):
                rows = (row for block in self.blocks(int(shard), SAMPLED_ROWS, 0, retries) for row in block)
                for turn, row in enumerate(islice(rows, -(-limit // len(chosen)))):
                    yield first * limit + turn * SAMPLED_SHARDS + number, row
                    read += 1

    def name(self, index: int) -> str:
        """What a person finds the image by."""
        return f"{self.split} shard {index >> ROW_BITS} row {index & (1 << ROW_BITS) - 1}"

    def record(self, retries: int, revision: str | None = None) -> dict[str, Any]:
        """Which images these are: see mpp/data/identity.py. Of shards, that is their names and sizes, where known."""
        numbers = short_digest([f"{number}\n".encode() for number in self.numbers])
        known = {"split": self.split, "shards": self.count, "chosen": numbers, "revision": revision}
        if self.rows is not None:
            return known | {"names": short_digest(image_files(self.rows, self.image_column, retries))}
        return known | {"files": listed(self.files)}

    def describe(self) -> str:
        return f"a stream of {self.count} shards"


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a shard in memory: for a while, the images that views are of."""

    shards: Shards
    first: int  # the number of its first image
    rows: list[dict[str, Any]]
    labels = None

    def decode(self, index: int, config: ImagesConfig) -> Tensor:
        """The image as (C, H, W); raises UnreadableImage, or ReadFailed after `read_retries`."""
        row = self.rows[index - self.first]
        return decode_cell(row[self.shards.image_column], config, self.shards.numbers_type)

    def name(self, index: int) -> str:
        cell = self.rows[index - self.first][self.shards.image_column]
        path = file_of(cell)
        return f"{self.shards.name(index)}{f' ({path})' if path else ''}"

    def other(self, word: int) -> int:
        """An image of the block, by a random number."""
        return self.first + word % len(self.rows)


class Cursor(NamedTuple):
    """How far a worker has come: what it reads next."""

    epoch: int = 0
    turn: int = 0  # which of the worker's shards in this epoch
    block: int = 0
    row: int = 0  # in the permuted block


class StreamedBatches(IterableDataset):
    """Batches of one process, from update `start` to `stop`. Worker b % workers reads forward pass b.

    Args:
        views: of `shards`, whose images each block's views replace.
        cursors: worker -> its Cursor; a worker that is not there begins at the beginning.
    Raises:
        UserError: fewer shards than workers on all processes.
    """

    def __init__(self, views: ViewDataset, layout: BatchLayout, start: int, stop: int, cursors: dict[int, Cursor]):
        self.views, self.shards, self.layout, self.cursors = views, views.dataset, layout, cursors
        self.workers, self.size = max(1, views.data.workers), views.data.shuffle_block
        self.first, self.last = start * layout.accumulation_steps, stop * layout.accumulation_steps
        everywhere = layout.world_size * self.workers
        if self.shards.count < everywhere:
            raise UserError(
                f"{self.shards.split} has {self.shards.count} shards; a stream needs one for each loader process: "
                f"{layout.world_size} processes x {self.workers} data.workers = {everywhere}"
            )

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()  # torch asks its worker 0 first, whichever forward pass is the first
        worker = (self.first + (info.id if info else 0)) % self.workers
        samples = self.samples(worker, self.cursors.get(worker, Cursor()))
        for forward in range(self.first, self.last):
            if forward % self.workers == worker:
                images = len(self.layout.share(forward % self.layout.accumulation_steps))
                taken = list(islice(samples, images))
                batch, cursor = collate([sample for sample, _ in taken]), taken[-1][1]
                yield batch._replace(cursor=torch.tensor([worker, self.workers, *cursor]))

    def samples(self, worker: int, cursor: Cursor) -> Iterator[tuple[Batch, Cursor]]:
        """Samples without end from `cursor` on, each with the cursor after it."""
        skipped: list[str] = []  # images in a row that nothing can take the place of
        for views, key, after in self.rows(worker, cursor):
            try:
                sample = views[key]
            except Undecodable as error:  # others of its block would take its place, and are broken too
                skipped.append(error.first)
                if len(skipped) > REPLACEMENTS:
                    raise
                continue
            yield sample._replace(unreadable=[*skipped, *sample.unreadable]), after
            skipped = []

    def rows(self, worker: int, cursor: Cursor) -> Iterator[tuple[ViewDataset, tuple[int, int], Cursor]]:
        """Rows without end from `cursor` on: the views of its block, which of them, the cursor after it."""
        barren = 0  # epochs, in each of which this worker has other shards
        for epoch in count(cursor.epoch):
            order = permutation(Stream.ORDER, self.views.seed, epoch, self.shards.count)
            own_shards = order[self.layout.rank * self.workers + worker :: self.layout.world_size * self.workers]
            empty = cursor.epoch < epoch or cursor == Cursor()
            for turn in range(cursor.turn, len(own_shards)):
                shard, retries = int(own_shards[turn]), self.views.data.read_retries
                blocks = self.shards.blocks(shard, self.size, cursor.block, retries)
                for block, rows in enumerate(blocks, start=cursor.block):
                    first = (shard << ROW_BITS) + block * self.size  # the number of its first image
                    views = replace(self.views, dataset=Block(self.shards, first, rows))
                    shuffled = permutation(Stream.BLOCK, self.views.seed, epoch, len(rows), index=first)
                    for row in range(cursor.row, len(rows)):
                        yield views, (epoch, first + int(shuffled[row])), Cursor(epoch, turn, block, row + 1)
                    cursor, empty = cursor._replace(row=0), False
                cursor = cursor._replace(block=0, row=0)
            barren = barren + 1 if empty else 0
            if barren == BARREN:
                raise UserError(f"{self.shards.split}: shards {sorted(map(int, own_shards))} have no rows")
            cursor = Cursor()


def streaming_loader(
    views: ViewDataset, layout: BatchLayout, start: int, stop: int, cursors: dict[int, list[int]]
) -> WatchedLoader:
    """Batches of this process, from update `start` to `stop`.

    Args:
        cursors: what the checkpoint says of each worker: how many workers there were, and a Cursor.
    Raises:
        UserError: too few shards, or the checkpoint is of another number of workers.
    """
    workers = max(1, views.data.workers)
    for before, *_ in cursors.values():
        if before != workers:
            raise UserError(f"data.workers is {workers}; a stream is resumed with as many as before ({before})")
    resumed = {worker: Cursor(*cursor) for worker, (_, *cursor) in cursors.items()}
    batches = StreamedBatches(views, layout, start, stop, resumed)
    return WatchedLoader(batches, views.dataset.name, batch_size=None, num_workers=views.data.workers)


def load_streamed(config: SourceConfig, probed: int, evaluated: int) -> tuple[Shards, ImageDataset, ImageDataset]:
    """The images to train on as a stream; of them `probed`, if they have labels, and `evaluated` held-out ones.

    Without a held-out split, the share `data.eval_fraction` of the shards, at least one, is held out.

    Raises:
        UserError: nothing there, no such split, no image column, a setting that a stream cannot follow.
    """
    if config.train_images is not None:
        raise UserError("data.train_images chooses among indexed images; a stream cannot: leave it out")
    splits, files, indexed = open_streams(config)
    held_out = find_held_out_split(config, list(splits))
    train = splits[config.split]
    if train.features is None:
        raise UserError(f"{describe_source(config)} says nothing of the types of its columns; it cannot be streamed")
    column = find_image_column(config, train.features)
    train = all_undecoded(train, column)
    rows = undecoded(indexed[config.split], column) if indexed else None
    if held_out is not None:
        shards = Shards(train, column, config.split, [*range(train.num_shards)], files, rows)
        others = all_undecoded(splits[held_out], column)
        others = Shards(others, column, held_out, [*range(others.num_shards)], files)
    else:
        cut = max(1, round(config.eval_fraction * train.num_shards))
        leaves_some = cut < max(2, train.num_shards)  # of one shard, the fraction is not at fault
        allowed = f"smaller: of {train.num_shards} shards it leaves none to train on"
        require(leaves_some, "data.eval_fraction", config.eval_fraction, allowed)
        if train.num_shards <= 1:
            raise UserError(
                f"{describe_source(config)} has one shard and no held-out split; name one by data.eval_split"
            )
        order = permutation(Stream.CUT, config.cut_seed, 0, train.num_shards).tolist()
        shards = Shards(train, column, config.split, sorted(order[cut:]), files, rows)
        others = Shards(train, column, "held out", sorted(order[:cut]), files)
    if find_label_column(config.label_column, train.features, describe_source(config)) is None:
        probed = 0
    column_of = (config.label_column, config.eval_label_column or config.label_column)
    keys = ("data.label_column", "data.eval_label_column" if config.eval_label_column else "data.label_column")
    parts = [
        sampled(config, shards, column_of[0], keys[0], probed, config.eval_seed),
        sampled(config, others, column_of[1], keys[1], evaluated, config.cut_seed),
    ]
    labels = number_labels(
        [
            read_labels(rows, name, describe_source(config), key)
            for rows, name, key in zip(parts, column_of, keys, strict=True)
        ]
    )
    known = [
        dataset_of(rows, column, of_part, name, labels.names, labels.classes)
        for rows, of_part, name in zip(parts, labels.parts, (config.split, others.split), strict=True)
    ]
    announce_stream(describe_source(config), shards.count, others.count, known)
    return replace(shards, stream=train.select_columns([column])), known[0], known[1]


def sampled(
    config: SourceConfig, shards: Shards, label: str | None, key: str, limit: int, seed: int
) -> datasets.Dataset:
    """A sample of the rows, images and labels, mapped from disk; see mpp/data/kept_samples.py.

    Nothing is kept on disk where nobody knows what the stream is read from.

    Args:
        label, key: column of the labels, if the user named it, and by which setting.
    """
    label = find_label_column(label, shards.stream.features, describe_source(config), key)
    columns = [shards.image_column, *([label] if label else [])]
    needed = replace(shards, stream=shards.stream.select_columns(columns))
    features = datasets.Features(needed.stream.features | {POSITION: datasets.Value("int64")})
    identity = {"files": shards.files, "name": config.name, "of": config.split, "split": shards.split}
    identity |= {"shards": shards.numbers, "columns": [*features], "rows": limit, "seed": seed, "turns": SAMPLED_SHARDS}
    rows = (row | {POSITION: position} for position, row in needed.sample(limit, seed, config.read_retries))
    if shards.files:
        kept = keep(rows, features, identity)
    else:
        read = list(rows)  # perhaps none, of which the library's from_list makes no columns
        kept = datasets.Dataset.from_dict({name: [row[name] for row in read] for name in features}, features=features)
    return kept.select(np.argsort(kept[POSITION][:])[:limit])


def all_undecoded(stream: datasets.IterableDataset, column: str) -> datasets.IterableDataset:
    """The stream with encoded images, in the column that is wanted and in any other."""
    for name in {column, *(name for name, feature in stream.features.items() if isinstance(feature, datasets.Image))}:
        stream = undecoded(stream, name)
    return stream


def open_streams(
    config: SourceConfig,
) -> tuple[dict[str, datasets.IterableDataset], Files | None, dict[str, datasets.Dataset]]:
    """All splits as streams, and what they are read from: the files (see `files_of`), or the rows.

    What has no shards of its own, as a folder of image files, is indexed and cut into some: those are the rows.
    """
    splits = load_splits(config, streaming=True)
    if all(isinstance(rows, datasets.IterableDataset) for rows in splits.values()):
        return splits, list_files(config), {}
    streams = {}
    for name, rows in splits.items():  # shuffled: files come sorted by class, and a shard should have all of them
        shuffled = rows.select(permutation(Stream.CUT, config.cut_seed, 2, len(rows)))
        shards = min(FOLDER_SHARDS, -(-len(rows) // FEWEST_ROWS))
        streams[name] = shuffled.to_iterable_dataset(num_shards=shards)
    return streams, None, splits
