"""Shards of a split: files, or cuts of a table, that are read as a stream one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

import datasets
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.data.columns import cell_file_name, decode_cell, find_array_dtype
from mpp.data.identity import digest_listing, split_fingerprint
from mpp.data.kept_samples import FileStamps
from mpp.data.retry import LOADING_ERRORS, NETWORK_ERRORS, read_with_retries
from mpp.errors import UserError, one_line
from mpp.runtime.files import short_digest
from mpp.runtime.randomness import Stream, permutation

SHARDS_PER_TURN = 16  # shards from whose beginnings a sample is drawn in turn
ROWS_PER_READ = 64  # of a sample
ROW_BITS = 32  # an image's number: its shard's above these bits, its row's in them

StreamRow = dict[str, Any]


@dataclass(eq=False)
class Shards:
    """The images of one split as a stream."""

    stream: datasets.IterableDataset
    """Has the image column, whose images are not decoded, and perhaps other columns."""
    image_column: str
    """Its cells are {"bytes", "path"}, or arrays."""
    split: str
    """Its name, for messages."""
    numbers: list[int]
    """Numbers of these shards in `stream`."""
    files: FileStamps | None
    """Files of the stream; None: they could not be listed, or the shards are cut from `rows`."""
    rows: datasets.Dataset | None = None
    """Images that were stored without shards, and have been cut into some."""

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self.numbers)

    @cached_property
    def array_dtype(self) -> str | None:
        """Type of the arrays' numbers, which a stream has as lists; None: the images are files."""
        return find_array_dtype(self.stream.features[self.image_column])

    def blocks(self, shard: int, size: int, skip: int = 0, retries: int = 0) -> Iterator[list[StreamRow]]:
        """The rows of a shard in blocks of `size`, without the first `skip` blocks.

        Raises:
            UserError: the shard is damaged.
            ReadFailed: it cannot be read.
        """
        done = skip
        blocks: Iterator[list[StreamRow]] | None = None
        name = f"{self.split} shard {shard}"

        def read_block() -> list[StreamRow] | None:
            nonlocal blocks
            if blocks is None:
                blocks = self.read_blocks(shard, size, done)
            try:
                return next(blocks, None)
            except NETWORK_ERRORS:
                blocks = None  # an iterator that has raised is at its end
                raise
            except UserError:
                raise
            except LOADING_ERRORS as error:
                raise UserError(f"{name} is damaged after row {done * size}: {one_line(error)}; replace it") from error

        while block := read_with_retries(read_block, name, retries):
            yield block
            done += 1

    def read_blocks(self, shard: int, size: int, skip: int) -> Iterator[list[StreamRow]]:
        """The rows of a shard in blocks, without retries, and with the library's errors."""
        # Not the stream itself: in a loader process, the library would leave all but one of them without a row.
        shard_stream = self.stream.shard(self.stream.num_shards, self.numbers[shard], contiguous=False)
        batches = shard_stream.iter(batch_size=size)
        for columns in islice(batches, skip, None):  # datasets 4.0's skip guesses types again
            rows = zip(*columns.values(), strict=True)
            yield [dict(zip(columns, cells, strict=True)) for cells in rows]

    def sample(self, limit: int, seed: int, retries: int) -> Iterator[tuple[int, StreamRow]]:
        """At least `limit` rows, each with its position in the sample; fewer where the last shards are shorter.

        The sample takes rows from the beginnings of SHARDS_PER_TURN shards in turn, of shards in a seeded order. The
        rows are read shard by shard, so they do not come by position.
        """
        order = permutation(Stream.CUT, seed, 1, self.count)
        read = 0
        for first in range(0, self.count, SHARDS_PER_TURN):
            if read >= limit:
                return
            chosen = order[first : first + SHARDS_PER_TURN]
            rows_per_shard = -(-limit // len(chosen))
            for number, shard in enumerate(chosen):
                rows = chain.from_iterable(self.blocks(int(shard), ROWS_PER_READ, retries=retries))
                for turn, row in enumerate(islice(rows, rows_per_shard)):
                    position = first * limit + turn * SHARDS_PER_TURN + number
                    yield position, row
                    read += 1

    def image_name(self, index: int) -> str:
        """Shard and row of an image, for messages."""
        row_mask = (1 << ROW_BITS) - 1
        return f"{self.split} shard {index >> ROW_BITS} row {index & row_mask}"

    def identify(self, retries: int, revision: str | None = None) -> dict[str, Any]:
        """The record of these images: see mpp/data/identity.py. Shards are known by names and sizes of their files."""
        numbers = short_digest(f"{number}\n".encode() for number in self.numbers)
        record = {"split": self.split, "shards": self.count, "chosen": numbers, "revision": revision}
        if self.rows is None:
            record["files"] = digest_listing(self.files)
        else:
            record["names"] = short_digest(split_fingerprint(self.rows, self.image_column, retries))
        return record

    def describe(self) -> str:
        return f"a stream of {self.count} shards"


@dataclass(frozen=True)
class ShardBlock:
    """Consecutive rows of a shard in memory: an image dataset for as long as their images are read."""

    shards: Shards
    first: int  # number of its first image
    rows: list[StreamRow]
    labels = None

    def decode(self, index: int, config: ImagesConfig, marks_nodata: bool = False) -> Tensor:
        """The image as (C, H, W); raises UnreadableImage, or ReadFailed after `read_retries`."""
        return decode_cell(self.cell(index), config, self.shards.array_dtype, marks_nodata)

    def cell(self, index: int) -> Any:
        """The image as it is stored."""
        return self.rows[index - self.first][self.shards.image_column]

    def image_name(self, index: int) -> str:
        """Shard, row and file of an image, for messages."""
        place = self.shards.image_name(index)
        file = cell_file_name(self.cell(index))
        return f"{place} ({file})" if file else place

    def replacement(self, random_word: int) -> int:
        """Index of an image that takes the place of one that cannot be decoded."""
        return self.first + random_word % len(self.rows)
