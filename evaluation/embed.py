"""The features of all images of a dataset, as a table for a database or a notebook.

    python evaluation/embed.py --encoder runs/birds --data.path FOLDER --out features.parquet

A row for each image: `file`, `split`, `features` (as many float32 as the encoder is wide) and `error`. An image that
cannot be decoded has no features, and its error says why. After an interruption the same command continues. With
`--representation logits` the features are the logits of a trained classifier.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from evaluation.config import EmbedConfig, ProbeDataConfig
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, open_frozen_encoder
from evaluation.frozen.extraction import DEFAULT_BATCH_SIZE
from evaluation.frozen.parsing import parse_and_load
from evaluation.frozen.run_images import LoadedSplits
from evaluation.supervision.classifiers import FrozenClassifier, load_classifier
from mpp.config import HOW_READ, ImageSize, RunConfig, require
from mpp.data.columns import find_image_column
from mpp.data.crops import centre_crop
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset, images_only
from mpp.data.identity import identify_images
from mpp.data.sources import load_splits
from mpp.data.workers import WatchedLoader, deaths_explained, loader_processes, note_reading
from mpp.errors import UnreadableImage
from mpp.runtime.command import command
from mpp.runtime.files import complete
from mpp.runtime.lock import hold
from mpp.runtime.messages import tell
from mpp.runtime.output import printable
from mpp.runtime.progress import progress_bar
from mpp.runtime.start import start_alone
from mpp.runtime.weights import fingerprint

IDENTITY_KEY = b"mpp"  # of the table's metadata
ROWS_PER_PART = 4096  # which bounds the memory, and what is lost after an interruption


def embed(config: EmbedConfig, loaded: LoadedSplits | None = None) -> Path:
    """Write the table, or its missing parts, and return its file.

    Raises:
        UserError: no such encoder, images or depth, or the file is another table.
    """
    run_settings = RunConfig(precision=config.precision, trackers=(), threads=config.threads)
    accelerator = start_alone(run_settings, "a table is written")
    encoder = open_frozen_encoder(config).to(accelerator.device)
    eval_crop = config.data.eval_crop or encoder.crop_pct
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval_crop=eval_crop))
    embedder = build_embedder(encoder, config, accelerator)
    splits = load_all_images(config.data, loaded)
    identity = identify_table(config, splits) | {"precision": accelerator.mixed_precision}
    identity = json.dumps(identity, sort_keys=True)
    out = Path(config.out)
    parts = out.parent / f".{out.name}.parts"
    is_table_complete(out, identity)  # a refused table leaves no folder
    with hold(parts, "out"), deaths_explained():
        if not is_table_complete(out, identity):
            join_parts(write_parts(parts, embedder, splits, identity), out)
    shutil.rmtree(parts, ignore_errors=True)
    errors = pq.read_table(out, columns=["error"])["error"]
    unreadable = len(errors) - errors.null_count
    print(f"wrote {out}: {len(errors)} images, {unreadable} of them could not be decoded")
    return out


def load_all_images(data: ProbeDataConfig, loaded: LoadedSplits | None) -> list[ImageDataset]:
    """Load the images of every split, without labels."""
    splits = loaded or load_splits(data)
    counts = ", ".join(f"{len(rows)} {name}" for name, rows in splits.items())
    images = []
    for name, rows in splits.items():
        column = find_image_column(data, rows.features)
        if len(rows):
            images.append(ImageDataset(images_only(rows, column), column, None, name))
    tell(f"{describe_source(data)}: {counts}")
    return images


class EmbeddedBatch(NamedTuple):
    """Features of some images of a split."""

    indices: list[int]
    features: NDArray[np.float32]  # (B, D)
    errors: list[str]
    """Why an image cannot be decoded; empty: it can."""


@dataclass(frozen=True)
class Embedder:
    """Computes features, or logits, of the images of a split."""

    compute: Callable[[Tensor], Tensor]
    """Images (B, C, H, W), from 0 to 255, to (B, D)."""
    img_size: ImageSize
    data: ProbeDataConfig
    accelerator: Accelerator

    def embed(self, images: ImageDataset, indices: range) -> Iterator[EmbeddedBatch]:
        """Features of the images at these indices, batch by batch."""
        crops = CropsOrErrors(images, self.data, self.img_size)
        batch_size = self.data.batch_size or DEFAULT_BATCH_SIZE
        batches = [list(indices[first : first + batch_size]) for first in range(0, len(indices), batch_size)]
        loader = WatchedLoader(
            crops,
            images.image_name,
            batch_sampler=batches,
            num_workers=loader_processes(self.data),
            collate_fn=collate_with_errors,
        )
        for batch, (pixels, errors) in zip(batches, loader, strict=True):
            with torch.no_grad(), self.accelerator.autocast():
                features = self.compute(pixels.to(self.accelerator.device))
            yield EmbeddedBatch(batch, features.float().cpu().numpy(), errors)


def build_embedder(encoder: FrozenEncoder | ColorBaseline, config: EmbedConfig, accelerator: Accelerator) -> Embedder:
    """Build the computation of the features of `config.representation` and `config.depth`, or the logits of the run.

    Raises:
        UserError: no such depth, or no run of a classifier.
    """
    if config.representation == "logits":
        classifier = FrozenClassifier(load_classifier(config.encoder, config.data.channels, "encoder"))
        return Embedder(classifier.to(accelerator.device), classifier.img_size, config.data, accelerator)
    deepest = len(encoder.stages)
    depth = deepest if config.depth == "last" else config.depth
    require(1 <= depth <= deepest, "depth", depth, f"from 1 to {deepest}")

    def compute(images: Tensor) -> Tensor:
        (features,) = encoder(images, config.representation, [depth])
        return features

    return Embedder(compute, encoder.img_size, config.data, accelerator)


@dataclass(frozen=True)
class CropsOrErrors(Dataset):
    """Images as an encoder takes them, by index, and the reason why one cannot be decoded (empty: it can)."""

    dataset: ImageDataset
    data: ProbeDataConfig
    img_size: ImageSize

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        note_reading(index)
        error = ""
        try:
            crop = centre_crop(self.dataset.decode(index, self.data), self.img_size, self.data.eval_crop)
        except UnreadableImage as reason:
            error = str(reason)
            crop = torch.zeros(self.data.channels, *self.img_size, dtype=torch.uint8)
        note_reading(None)
        return crop, error


def collate_with_errors(samples: list[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    """Samples to a batch; a broken image may be of another type."""
    crops, errors = zip(*samples, strict=True)
    all_bytes = all(crop.dtype == torch.uint8 for crop in crops)
    dtype = torch.uint8 if all_bytes else torch.float32
    return torch.stack([crop.to(dtype) for crop in crops]), list(errors)


def identify_table(config: EmbedConfig, splits: Sequence[ImageDataset]) -> dict[str, Any]:
    """The settings, the weights and the images that the numbers of a table depend on."""
    names = ["random", "img_size", "representation", "depth"]
    weights = fingerprint(Path(config.checkpoint or config.encoder))
    if config.random or not weights:
        names += ["encoder", "seed"]
    elif config.checkpoint:
        names.append("encoder")  # the name of a timm model, which says how the weights are used
    identity = {name: getattr(config, name) for name in names}
    for name in (*HOW_READ, "max_pixels", "eval_crop"):
        identity[name] = getattr(config.data, name)
    identity["weights"] = weights
    retries = config.data.read_retries
    identity["images"] = [identify_images(images, labels=False, retries=retries) for images in splits]
    return identity


def is_table_complete(out: Path, identity: str) -> bool:
    """Whether the whole table is there. Raises UserError if another file is."""
    complete_table = has_identity(out, identity)
    allowed = "a new file: what is there is of other images, weights or settings"
    require(complete_table or not out.exists(), "out", out, allowed)
    return complete_table


def has_identity(file: Path, identity: str) -> bool:
    """Whether a file is a table, or a part of one, with this identity."""
    try:
        metadata = pq.read_schema(file).metadata or {}
    except (OSError, pa.ArrowException):  # nothing, a folder, another kind of file
        return False
    return metadata.get(IDENTITY_KEY) == identity.encode()


def write_parts(folder: Path, embedder: Embedder, splits: Sequence[ImageDataset], identity: str) -> list[Path]:
    """Write the parts that are missing or belong to another table, and return the files of all parts."""
    files = []
    with progress_bar(desc="features", unit="image", total=sum(map(len, splits))) as bar:
        for number, images in enumerate(splits):
            for first in range(0, len(images), ROWS_PER_PART):
                indices = range(first, min(first + ROWS_PER_PART, len(images)))
                file = folder / f"{number:03d}-{first:012d}.parquet"
                files.append(file)
                if has_identity(file, identity):
                    bar.update(len(indices))
                    continue
                batches = []
                for batch in embedder.embed(images, indices):
                    batches.append(batch)
                    bar.update(len(batch.indices))
                with complete(file) as partial:
                    pq.write_table(build_table(batches, images, identity), partial)
    return files


def build_table(batches: Sequence[EmbeddedBatch], images: ImageDataset, identity: str) -> pa.Table:
    """The rows of some images of a split."""
    features = np.concatenate([batch.features for batch in batches])
    errors = [error or None for batch in batches for error in batch.errors]
    names = [printable(images.image_name(index)) for batch in batches for index in batch.indices]
    is_broken = pa.array([error is not None for error in errors])
    rows = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), features.shape[1], mask=is_broken)
    list_type = pa.list_(pa.float32())  # of any length: pyarrow 25 cannot read fixed ones where some are missing
    table = pa.table(
        {
            "file": names,
            "split": [images.split] * len(names),
            "features": rows.cast(list_type),
            "error": pa.array(errors, pa.string()),
        }
    )
    return table.replace_schema_metadata({IDENTITY_KEY: identity.encode()})


def join_parts(files: Sequence[Path], out: Path) -> None:
    """Join the parts to one file, with one part in memory at a time."""
    with complete(out) as partial, pq.ParquetWriter(partial, pq.read_schema(files[0])) as writer:
        for file in files:
            writer.write_table(pq.read_table(file))


def main(arguments: Sequence[str] | None = None) -> None:
    """Embed with the settings of the command line, or of `arguments`."""
    embed(*parse_and_load(EmbedConfig, arguments, prog="python evaluation/embed.py"))


if __name__ == "__main__":
    command(main)
