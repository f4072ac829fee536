"""Sources of streams: shards to train on, and samples of images for the probe and for evaluation."""

from collections import defaultdict
from dataclasses import dataclass, replace

import datasets
import numpy as np

from mpp.config import SourceConfig, require
from mpp.data.columns import find_image_column, without_decoding
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset, rows_in_memory
from mpp.data.kept_samples import FileStamps, keep_rows, list_stream_files
from mpp.data.labels import find_label_column
from mpp.data.overview import announce_stream
from mpp.data.shards import SHARDS_PER_TURN, Shards
from mpp.data.sources import find_held_out_split, hint_at_labels, label_images, label_setting, load_splits
from mpp.errors import UserError
from mpp.runtime.messages import warn
from mpp.runtime.randomness import Stream, permutation

MAX_FOLDER_SHARDS = 256  # into which a folder of image files is cut
MIN_FOLDER_SHARD_ROWS = 8
MIN_TELLING_ROWS = 32  # of one class, from which a shard counts as sorted
POSITION = "_mpp_position"  # column of a sample that is kept on disk: each row's position in the sample


@dataclass
class OpenedStreams:
    """The splits of a dataset as streams, and the files that they are read from."""

    splits: dict[str, datasets.IterableDataset]
    files: FileStamps | None = None
    """Files of the shards; None: they could not be listed, or the shards are cut from `rows`."""
    rows: dict[str, datasets.Dataset] | None = None
    """The splits of a dataset without shards, such as a folder of image files, which were cut into some."""


def load_streamed(config: SourceConfig, probed: int, evaluated: int) -> tuple[Shards, ImageDataset, ImageDataset]:
    """The images to train on as a stream; `probed` of them, if they have labels; and `evaluated` held-out ones.

    Without a held-out split, the share `data.eval_fraction` of the shards, at least one, is held out.

    Raises:
        UserError: no images, a split that is not there, no image column, a setting that a stream cannot follow.
    """
    if config.train_images is not None:
        raise UserError("data.train_images chooses among indexed images; a stream cannot: leave it out")
    shards, held_out = split_shards(config, open_streams(config))
    hint_at_labels(config, shards.stream, shards.image_column)
    train_label = find_label(config, shards, is_held_out=False)
    held_out_label = find_label(config, held_out, is_held_out=True)
    if train_label is None:
        probed = 0
    rows = {
        shards.split: sample_rows(config, shards, train_label, probed, config.eval_seed),
        held_out.split: sample_rows(config, held_out, held_out_label, evaluated, config.cut_seed),
    }
    train_images, held_out_images = label_images(config, rows, shards.image_column)
    for part, images in ((shards, train_images), (held_out, held_out_images)):
        if part.stream is shards.stream and is_sorted_by_class(rows[part.split], images):
            warn_of_sorted_shards(describe_source(config))
    announce_stream(describe_source(config), shards.count, held_out.count, (train_images, held_out_images))
    unlabelled = replace(shards, stream=shards.stream.select_columns([shards.image_column]))
    return unlabelled, train_images, held_out_images


def is_sorted_by_class(sample: datasets.Dataset, images: ImageDataset) -> bool:
    """Whether the first rows of each shard in a sample are of one class, of several that there are.

    Args:
        sample: has the positions of the `images` in it.
    """
    if len(images) == 0 or images.labels is None or images.labels.ndim > 1 or images.classes < 2:
        return False
    classes_of_shard = defaultdict(list)
    for position, label in zip(sample[POSITION][:], images.labels.tolist(), strict=True):
        classes_of_shard[position % SHARDS_PER_TURN].append(label)
    return all(len(labels) >= MIN_TELLING_ROWS and len({*labels}) == 1 for labels in classes_of_shard.values())


def warn_of_sorted_shards(source: str) -> None:
    """Warn of shards that have one class after the other: a step would see few classes."""
    what = "the shards are sorted by class, and a stream shuffles only data.shuffle_block images of one"
    warn(f"{source}: {what}: make mixed ones by mpp prepare")


def find_label(config: SourceConfig, shards: Shards, is_held_out: bool) -> str | None:
    """The column of labels in shards; None: there is none."""
    column, setting = label_setting(config, is_held_out)
    return find_label_column(column, shards.stream.features, describe_source(config), setting)


def open_streams(config: SourceConfig) -> OpenedStreams:
    """All splits as streams. A dataset without shards is indexed, and cut into some."""
    splits = load_splits(config, streaming=True)
    if all(isinstance(rows, datasets.IterableDataset) for rows in splits.values()):
        return OpenedStreams(splits, files=list_stream_files(config))
    streams = {}
    for name, rows in splits.items():
        # Files come sorted by class, and a shard should have images of all classes.
        shuffled = rows.select(permutation(Stream.CUT, config.cut_seed, 2, len(rows)))
        shards = min(MAX_FOLDER_SHARDS, -(-len(rows) // MIN_FOLDER_SHARD_ROWS))
        streams[name] = shuffled.to_iterable_dataset(num_shards=shards)
    return OpenedStreams(streams, rows=splits)


def split_shards(config: SourceConfig, streams: OpenedStreams) -> tuple[Shards, Shards]:
    """The shards to train on and the held-out shards: of another split, or cut from the training split."""
    held_out = find_held_out_split(config, list(streams.splits))
    stream = streams.splits[config.split]
    if stream.features is None:
        raise UserError(f"{describe_source(config)} does not declare the types of its columns; it cannot be streamed")
    column = find_image_column(config, stream.features)
    stream = without_decoding_all(stream, column)
    rows = without_decoding(streams.rows[config.split], column) if streams.rows else None
    if held_out is None:
        held_out = "held out"
        held_out_stream = stream
        train_numbers, held_out_numbers = cut_shards(config, stream.num_shards)
    else:
        held_out_stream = without_decoding_all(streams.splits[held_out], column)
        train_numbers = list(range(stream.num_shards))
        held_out_numbers = list(range(held_out_stream.num_shards))
    train = Shards(stream, column, config.split, train_numbers, streams.files, rows)
    return train, Shards(held_out_stream, column, held_out, held_out_numbers, streams.files)


def cut_shards(config: SourceConfig, count: int) -> tuple[list[int], list[int]]:
    """Numbers of the shards to train on, and of the held-out shards."""
    if count <= 1:  # the fraction is not at fault
        raise UserError(
            f"{describe_source(config)} has one shard and no held-out split; name a split with data.eval_split"
        )
    held_out_count = max(1, round(config.eval_fraction * count))
    allowed = f"smaller: of {count} shards it leaves none to train on"
    require(held_out_count < count, "data.eval_fraction", config.eval_fraction, allowed)
    order = permutation(Stream.CUT, config.cut_seed, 0, count).tolist()
    return sorted(order[held_out_count:]), sorted(order[:held_out_count])


def without_decoding_all(stream: datasets.IterableDataset, column: str) -> datasets.IterableDataset:
    """The stream with encoded images, in the column of images and in any other that has some."""
    others = [name for name, feature in stream.features.items() if isinstance(feature, datasets.Image)]
    for name in {column, *others}:
        stream = without_decoding(stream, name)
    return stream


def sample_rows(
    config: SourceConfig, shards: Shards, label_column: str | None, limit: int, seed: int
) -> datasets.Dataset:
    """A sample of the rows, images and labels, mapped from disk; see mpp/data/kept_samples.py.

    The sample of a stream whose files are not known is not kept on disk, but in memory.
    """
    columns = [shards.image_column]
    if label_column:
        columns.append(label_column)
    sampled = replace(shards, stream=shards.stream.select_columns(columns))
    features = datasets.Features(sampled.stream.features | {POSITION: datasets.Value("int64")})
    rows = (row | {POSITION: position} for position, row in sampled.sample(limit, seed, config.read_retries))
    if shards.files:
        # These names and their order tell a sample on disk from others.
        identity = {
            "files": shards.files,
            "name": config.name,
            "of": config.split,
            "split": shards.split,
            "shards": shards.numbers,
            "columns": [*features],
            "rows": limit,
            "seed": seed,
            "turns": SHARDS_PER_TURN,
        }
        sample = keep_rows(rows, features, identity)
    else:
        sample = rows_in_memory([*rows], features)
    order = np.argsort(sample[POSITION][:])
    return sample.select(order[:limit])
