"""Batches of images that are read as a stream, for there are too many to index, or they are far away.

An epoch visits every shard once, in an order drawn by (seed, epoch), shared out among the processes and, in each, among
its workers (loader processes, or itself). Within a shard, blocks of consecutive rows are permuted by (seed, epoch,
shard, block). So a cursor is four numbers, which checkpoints carry, and nothing is replayed on resume but the rows of a
shard that were read before. The library's own shuffle has a buffer, which its state_dict leaves out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from mpp.config import require
from mpp.data.loader import BatchLayout
from mpp.data.shards import ROW_BITS, ShardBlock, Shards
from mpp.data.views import MAX_REPLACEMENTS, Batch, ViewDataset, collate
from mpp.data.workers import WatchedLoader, loader_processes
from mpp.errors import Undecodable, UserError
from mpp.runtime.randomness import Stream, permutation

MAX_EMPTY_EPOCHS = 100  # in a row without a row in any of a worker's shards, which differ by epoch: then it gives up


class Cursor(NamedTuple):
    """The next row that a worker reads."""

    epoch: int = 0
    turn: int = 0  # position among the worker's shards in this epoch
    block: int = 0
    row: int = 0  # in the permuted block


Row = tuple[ViewDataset, tuple[int, int], Cursor]
"""A row that a worker has read: the views of its block, its epoch and number, the cursor after it."""


@dataclass(eq=False)
class StreamedBatches(IterableDataset):
    """Batches of one process, from step `start` to `stop`. Worker b % workers reads forward pass b.

    Raises:
        UserError: fewer shards than workers on all processes.
    """

    views: ViewDataset
    """Of Shards; each block of rows becomes their dataset in turn."""
    layout: BatchLayout
    start: int
    stop: int
    cursors: dict[int, list[int]]
    """Worker -> number of workers and its Cursor; a worker without one begins at the beginning."""
    workers: int
    """Number of loader processes, or 1 where the training process loads."""

    def __post_init__(self):
        self.shards: Shards = self.views.dataset
        processes = self.layout.world_size
        if self.shards.count < processes * self.workers:
            raise UserError(
                f"{self.shards.split} has {self.shards.count} shards; a stream needs one for each loader process: "
                f"{processes} processes x {self.workers} data.workers = {processes * self.workers}"
            )

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker_id = info.id if info else 0
        steps = self.layout.accumulation_steps
        first = self.start * steps + worker_id  # forward pass
        worker = first % self.workers  # torch takes the first batch from its worker 0
        _, *cursor = self.cursors.get(worker, [self.workers])
        samples = self.samples(worker, Cursor(*cursor))
        for forward in range(first, self.stop * steps, self.workers):
            images = len(self.layout.share(forward % steps))
            taken = list(islice(samples, images))
            batch = collate([sample for sample, _ in taken])
            _, cursor = taken[-1]
            yield batch._replace(cursor=torch.tensor([worker, self.workers, *cursor]))

    def samples(self, worker: int, cursor: Cursor) -> Iterator[tuple[Batch, Cursor]]:
        """Endless samples from `cursor` on, each with the cursor after it."""
        skipped: list[str] = []  # failures of images in a row that no other image has replaced
        for views, key, after in self.rows(worker, cursor):
            try:
                sample = views[key]
            except Undecodable as error:  # other images of its block would replace it, and are broken too
                skipped.append(error.first)
                if len(skipped) > MAX_REPLACEMENTS:
                    raise
                continue
            yield sample._replace(unreadable=[*skipped, *sample.unreadable]), after
            skipped = []

    def rows(self, worker: int, cursor: Cursor) -> Iterator[Row]:
        """Endless rows from `cursor` on.

        Raises:
            UserError: the worker's shards have no rows.
        """
        last_epoch = cursor.epoch  # that had a row
        for epoch in count(cursor.epoch):
            order = permutation(Stream.ORDER, self.views.seed, epoch, self.shards.count)
            first = self.layout.rank * self.workers + worker
            shards = order[first :: self.layout.world_size * self.workers].tolist()
            for turn in range(cursor.turn, len(shards)):
                for row in self.rows_of_shard(shards[turn], cursor):
                    last_epoch = epoch
                    yield row
                cursor = Cursor(epoch, turn + 1)
            if epoch - last_epoch == MAX_EMPTY_EPOCHS:
                raise UserError(f"{self.shards.split}: shards {sorted(shards)} have no rows")
            cursor = Cursor(epoch + 1)

    def rows_of_shard(self, shard: int, cursor: Cursor) -> Iterator[Row]:
        """The rows of the shard that a cursor is in, from it on: block by block, each in a random order."""
        size = self.views.data.shuffle_block
        blocks = self.shards.blocks(shard, size, cursor.block, self.views.data.read_retries)
        for block, rows in enumerate(blocks, start=cursor.block):
            first = (shard << ROW_BITS) + block * size  # number of its first image
            views = replace(self.views, dataset=ShardBlock(self.shards, first, rows))
            order = permutation(Stream.BLOCK, self.views.seed, cursor.epoch, len(rows), index=first).tolist()
            for row in range(cursor.row, len(rows)):
                yield views, (cursor.epoch, first + order[row]), cursor._replace(block=block, row=row + 1)
            cursor = cursor._replace(row=0)


def streaming_loader(
    views: ViewDataset, layout: BatchLayout, start: int, stop: int, cursors: dict[int, list[int]]
) -> WatchedLoader:
    """Batches of this process, from step `start` to `stop`.

    Args:
        cursors: worker -> number of workers and Cursor, as a checkpoint has them.
    Raises:
        UserError: too few shards, or the checkpoint is of another number of workers.
    """
    workers = stream_workers(views, layout, cursors)
    batches = StreamedBatches(views, layout, start, stop, cursors, max(1, workers))
    return WatchedLoader(batches, views.dataset.image_name, batch_size=None, num_workers=workers)


def stream_workers(views: ViewDataset, layout: BatchLayout, cursors: dict[int, list[int]]) -> int:
    """Number of loader processes: `data.workers`, else as many as before, or as the device and the shards allow."""
    workers = views.data.workers
    workers_before = {before for before, *_ in cursors.values()}
    if workers is None:
        shards_of_process = max(1, views.dataset.count // layout.world_size)
        return max(workers_before, default=min(loader_processes(views.data), shards_of_process))
    allowed = f"{max(workers_before, default=0)}: a stream is resumed with as many as before"
    require(workers_before <= {max(1, workers)}, "data.workers", workers, allowed)
    return workers
