"""Streams: the shards of a split (parquet, arrow, WebDataset tar), and samples of them for evaluation and the probe.

Shards are read one after the other. Evaluation and the probe need the same few thousand images whenever a run starts:
they are read once and kept on disk (mpp/data/caches.py), mapped into memory.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
from datasets.arrow_writer import ArrowWriter
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from mpp.config import ImagesConfig, SourceConfig, require
from mpp.data.caches import ROWS_FILE, cached
from mpp.data.columns import cell_file_name, find_array_dtype, find_image_column, read_cell, without_decoding
from mpp.data.data_path import BIRDS_FOLDER, as_pattern, describe_source, is_url
from mpp.data.dataset import ImageDataset
from mpp.data.decoding import decode
from mpp.data.folder import SHARD_BUILDERS, walk
from mpp.data.identity import digest_listing
from mpp.data.labels import find_label_column
from mpp.data.overview import announce_splits
from mpp.data.retry import LOADING_ERRORS, NETWORK_ERRORS, read_with_retries
from mpp.data.sources import find_held_out_split, label_images, load_splits
from mpp.errors import UserError, one_line
from mpp.runtime.files import short_digest
from mpp.runtime.messages import counted
from mpp.runtime.randomness import Stream, permutation

SHARDS_PER_TURN = 16  # shards from whose beginnings a sample is drawn in turn
ROWS_PER_READ = 64  # of a sample; these are held in memory
ROW_BITS = 32  # an image's number: its shard's above these bits, its row's in them
POSITION = "_mpp_position"  # column of a sample that is kept on disk: each row's position in the sample
SHARD_ENDINGS = tuple(SHARD_BUILDERS)
STAMP_FIELDS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "updated", "created")
"""Fields of fsspec's file systems that change when a file does; the first that a file has is its stamp."""

StreamRow = dict[str, Any]
FileStamps = list[list[str]]
"""Name, size and stamp of each file, which tell a dataset from others. The folder that they are in does not matter."""


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
    files: FileStamps
    """Files of the stream."""

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self.numbers)

    @cached_property
    def array_dtype(self) -> str | None:
        """Type of the arrays' numbers, which a stream has as lists; None: the images are files."""
        return find_array_dtype(self.stream.features[self.image_column])

    def with_columns(self, columns: Sequence[str]) -> "Shards":
        """The same shards, of which only the images and these columns are read."""
        return replace(self, stream=self.stream.select_columns([self.image_column, *columns]))

    def blocks(self, shard: int, size: int, skip: int = 0, retries: int = 0) -> Iterator[list[StreamRow]]:
        """The rows of a shard in blocks of `size`, without the first `skip` blocks.

        Raises:
            UserError: the shard is damaged.
            ReadFailed: it cannot be read.
        """
        name = f"{self.split} shard {shard}"
        done = skip
        blocks: Iterator[list[StreamRow]] | None = None

        def read_block() -> list[StreamRow] | None:
            nonlocal blocks
            blocks = blocks or self.read_blocks(shard, size, done)
            try:
                return next(blocks, None)
            except NETWORK_ERRORS:
                blocks = None  # an iterator that has raised is at its end
                raise
            except UserError:
                raise
            except LOADING_ERRORS as error:
                raise UserError(f"{name} is damaged after row {done * size}: {one_line(error)}; replace it") from error
            except Exception as error:  # clients of stores raise any
                blocks = None
                raise OSError(one_line(error)) from error

        while block := read_with_retries(read_block, name, retries):
            yield block
            done += 1

    def read_blocks(self, shard: int, size: int, skip: int) -> Iterator[list[StreamRow]]:
        """The rows of a shard in blocks, without retries, and with the library's errors."""
        # Not the stream itself: in a loader process, the library would leave all but one of them without a row.
        shard_stream = self.stream.shard(self.stream.num_shards, self.numbers[shard], contiguous=False)
        batches = shard_stream.iter(batch_size=size)
        for columns in islice(batches, skip, None):  # datasets 4.0's skip guesses types again
            yield [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]

    def sample(self, limit: int, seed: int, retries: int) -> Iterator[tuple[int, StreamRow]]:
        """At least `limit` rows, each with its position in the sample; fewer where the last shards are shorter.

        The sample takes rows from the beginnings of SHARDS_PER_TURN shards in turn, of shards in a seeded order. The
        rows are read shard by shard, so they do not come by position.
        """
        order = permutation(Stream.CUT, seed, 1, self.count).tolist()
        read = 0
        for first in range(0, self.count, SHARDS_PER_TURN):
            if read >= limit:
                return
            chosen = order[first : first + SHARDS_PER_TURN]
            rows_per_shard = -(-limit // len(chosen))
            for number, shard in enumerate(chosen):
                rows = chain.from_iterable(self.blocks(shard, ROWS_PER_READ, retries=retries))
                for turn, row in enumerate(islice(rows, rows_per_shard)):
                    yield first * limit + turn * SHARDS_PER_TURN + number, row
                    read += 1

    def image_name(self, index: int) -> str:
        """Shard and row of an image, for messages."""
        shard, row = divmod(index, 1 << ROW_BITS)
        return f"{self.split} shard {shard} row {row}"

    def identify(self, revision: str | None = None) -> dict[str, Any]:
        """The record of these images: see mpp/data/identity.py. Shards are known by names and sizes of their files."""
        numbers = short_digest(f"{number}\n".encode() for number in self.numbers)
        return {
            "split": self.split,
            "shards": self.count,
            "chosen": numbers,
            "revision": revision,
            "files": digest_listing(self.files),
        }

    def describe(self) -> str:
        return f"a stream of {self.count} shards"


@dataclass(frozen=True)
class ShardBlock:
    """Consecutive rows of a shard in memory: an image dataset for as long as their images are read."""

    shards: Shards
    first: int  # number of its first image
    rows: list[StreamRow]
    labels = None

    def decode(self, index: int, config: ImagesConfig) -> Tensor:
        """The image as (C, H, W); raises UnreadableImage, or ReadFailed after `read_retries`."""
        image = read_cell(self.cell(index), config.read_retries, self.shards.array_dtype)
        return decode.decode(image, config)

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


def load_streamed(config: SourceConfig, probed: int, evaluated: int) -> tuple[Shards, ImageDataset, ImageDataset]:
    """The images to train on as a stream; `probed` of them, if they have labels; and `evaluated` held-out ones.

    Raises:
        UserError: no images, a split that is not there, no image column, a setting that a stream cannot follow.
    """
    allowed = "left out: it chooses among indexed images, and a stream has no index"
    require(config.train_images is None, "data.train_images", config.train_images, allowed)
    source = describe_source(config)
    train, held_out = open_shards(config)
    samples = {
        train.split: sample_rows(config, train, probed, config.eval_seed),
        held_out.split: sample_rows(config, held_out, evaluated, config.cut_seed, is_held_out=True),
    }
    train_images, held_out_images = label_images(config, samples, train.image_column)
    stream = f"{source}: a stream of {counted(train.count, 'shard')}, {held_out.count} held out; kept for evaluation"
    announce_splits(stream, (train_images, held_out_images), {}, config)
    return train.with_columns([]), train_images, held_out_images


def open_shards(config: SourceConfig) -> tuple[Shards, Shards]:
    """The shards to train on and the held-out ones: of another split, or the share `data.eval_fraction` of all.

    Raises:
        UserError: a split that is not there, no image column, or no stream.
    """
    source = describe_source(config)
    streams = load_splits(config, streaming=True)
    held_out = find_held_out_split(config, list(streams))
    stream = streams[config.split]
    if stream.features is None:
        raise UserError(f"{source} is no stream of parquet, arrow or WebDataset tar; mpp prepare makes shards first")
    column = find_image_column(config, stream.features)
    stream = without_decoding(stream, column)
    numbers = list(range(stream.num_shards))
    train = Shards(stream, column, config.split, numbers, list_stream_files(config))
    if held_out is not None:
        stream = without_decoding(streams[held_out], column)
        return train, replace(train, stream=stream, split=held_out, numbers=list(range(stream.num_shards)))
    count = max(1, round(config.eval_fraction * len(numbers)))
    more = "name data.eval_split, or make smaller shards (mpp prepare --rows N)"
    allowed = f"a share of {counted(len(numbers), 'shard')} of {source} that leaves one; or {more}"
    require(count < len(numbers), "data.eval_fraction", config.eval_fraction, allowed)
    order = permutation(Stream.CUT, config.cut_seed, 0, len(numbers)).tolist()
    held_out_shards = replace(train, split="held out", numbers=sorted(order[:count]))
    return replace(train, numbers=sorted(order[count:])), held_out_shards


def sample_rows(
    config: SourceConfig, shards: Shards, limit: int, seed: int, is_held_out: bool = False
) -> datasets.Dataset:
    """A sample of the rows, images and labels, mapped from disk.

    Of images to train on, the sample is for probes of their labels: without any, it is empty.
    """
    label, _ = find_label_column(config, shards.stream.features, is_held_out)
    if label is None and not is_held_out:
        limit = 0
    shards = shards.with_columns([label] if label else [])
    features = datasets.Features(shards.stream.features | {POSITION: datasets.Value("int64")})
    rows = (row | {POSITION: position} for position, row in shards.sample(limit, seed, config.read_retries))

    def write(folder: Path) -> None:
        with ArrowWriter(path=str(folder / ROWS_FILE), features=features, writer_batch_size=ROWS_PER_READ) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()

    labels = [config.label_column, config.eval_label_column]
    identity = [shards.files, config.name, config.split, shards.split, shards.numbers, [*features], labels, limit, seed]
    key = short_digest([json.dumps(identity).encode()], digits=32)
    sample = datasets.Dataset.from_file(str(cached(f"stream-{key}", write) / ROWS_FILE))
    order = np.argsort(sample[POSITION][:])
    return sample.select(order[:limit])


def list_stream_files(config: ImagesConfig) -> FileStamps:
    """The files of a stream, whose contents are not read.

    Raises:
        ReadFailed: they cannot be listed.
    """
    listed = partial(list_files, as_url(config))
    return read_with_retries(listed, describe_source(config), config.read_retries, Exception)  # clients raise any


def list_files(url: str) -> FileStamps:
    """The shards at a path or URL, or all files where none is a shard. Links are followed."""
    system, root = fsspec.url_to_fs(url)
    folder = root.split("*")[0].rpartition("/")[0]
    if isinstance(system, LocalFileSystem) and os.path.isdir(root):
        tree = walk(root)
        folder = root
        names = *tree.tables, *tree.tars, *tree.lists
        infos = {os.path.join(root, name): {} for name in names} or system.find(root, detail=True)
    elif "*" in root:
        infos = system.glob(as_pattern(root), detail=True)
    elif root.endswith(SHARD_ENDINGS) and system.isfile(root):  # over HTTP a folder is a file, too
        infos = {root: system.info(root)}
    else:
        infos = system.find(root, detail=True)
        folder = root
    shards = [name for name in infos if name.endswith(SHARD_ENDINGS)]
    names = sorted(shards or infos)  # a folder of shards may have other files that change
    return [[name.removeprefix(folder), *stamp_of(name, infos[name], system)] for name in names]


def stamp_of(name: str, info: dict[str, Any], system: fsspec.AbstractFileSystem) -> tuple[str, str]:
    """The size of a file, and what changes when it does; where a server does not say that, it is the URL.

    Args:
        info: of the file in a listing, which may say less than that of the file alone.
    """
    if isinstance(system, LocalFileSystem):
        state = os.stat(name)  # of the file, not of a link to it
        return str(state.st_size), str(state.st_mtime)
    known = info if info.keys() & {*STAMP_FIELDS} else system.info(name)
    stamps = [str(known[field]) for field in STAMP_FIELDS if field in known]
    return str(info.get("size")), stamps[0] if stamps else name


def as_url(config: ImagesConfig) -> str:
    """The path, URL or name of the hub of the images as fsspec takes it."""
    if config.path is None:
        return str(BIRDS_FOLDER)
    local = Path(config.path).expanduser()
    if local.exists():
        return str(local)
    if is_url(config.path):
        return config.path
    return f"hf://datasets/{config.path}" + (f"@{config.revision}" if config.revision else "")
