"""The features of all images of a dataset, as a table for a database or a notebook.

    python evaluation/embed.py --encoder runs/birds --data.path FOLDER --out features.parquet

A row for each image: `file`, `split`, `features` (as many float32 as the encoder is wide) and `error`. An image that
cannot be decoded has no features, and its error says why. The same command goes on where it was broken off. With
`--representation logits` the features are what a trained classifier says of each class.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import Dataset

from evaluation.config import EmbedConfig, ProbeDataConfig
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, open_frozen_encoder
from evaluation.frozen.parsing import parse_with_images
from evaluation.supervision.classifiers import FrozenClassifier, load_classifier
from mpp.config import HOW_READ, ImageSize, RunConfig, require
from mpp.data.columns import find_image_column
from mpp.data.crops import centre_crop
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset
from mpp.data.identity import identify_images
from mpp.data.loader import build_loader
from mpp.data.sources import load_splits
from mpp.data.workers import deaths_explained, note_reading
from mpp.errors import UnreadableImage
from mpp.runtime.files import complete
from mpp.runtime.lock import hold
from mpp.runtime.messages import tell
from mpp.runtime.output import printable
from mpp.runtime.progress import progress_bar
from mpp.runtime.start import command, start_alone
from mpp.runtime.weights import fingerprint

KEY = b"mpp"  # of the table's metadata: what it is of
ROWS = 4096  # of a part: what bounds the memory, and what is lost where the command is broken off


@dataclass(frozen=True)
class OrBroken(Dataset):
    """Images as an encoder takes them, by index, and why one cannot be decoded, or nothing."""

    dataset: ImageDataset
    data: ProbeDataConfig
    img_size: ImageSize

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        note_reading(index)
        try:
            found = centre_crop(self.dataset.decode(index, self.data), self.img_size, self.data.eval_crop), ""
        except UnreadableImage as error:
            found = torch.zeros(self.data.channels, *self.img_size, dtype=torch.uint8), str(error)
        note_reading(None)
        return found


def together(samples: list[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    """Samples to a batch; a broken image may be of another type."""
    pixels, errors = zip(*samples, strict=True)
    kind = torch.uint8 if all(part.dtype == torch.uint8 for part in pixels) else torch.float32
    return torch.stack([part.to(kind) for part in pixels]), list(errors)


def all_images(data: ProbeDataConfig) -> list[ImageDataset]:
    """Every split, without labels."""
    splits = load_splits(data)
    columns = {name: find_image_column(data, rows.features) for name, rows in splits.items()}
    tell(f"{describe_source(data)}: {', '.join(f'{len(rows)} {name}' for name, rows in splits.items())}")
    return [ImageDataset.from_column(rows, columns[name], None, name) for name, rows in splits.items() if len(rows)]


@dataclass(frozen=True)
class Computed:
    """What is computed of images (B, C, H, W): numbers (B, D)."""

    of: Callable[[Tensor], Tensor]
    img_size: ImageSize


def computed(encoder: FrozenEncoder | ColorBaseline, config: EmbedConfig, accelerator: Accelerator) -> Computed:
    """The features that are asked for, or the logits of the run.

    Raises:
        UserError: no such depth, or no run of a classifier.
    """
    if config.representation == "logits":
        teacher = FrozenClassifier(load_classifier(config.encoder, config.data.channels, "encoder"))
        return Computed(teacher.to(accelerator.device), teacher.img_size)
    deepest = len(encoder.stages)
    require(config.depth == "last" or 1 <= config.depth <= deepest, "depth", config.depth, f"from 1 to {deepest}")
    depths = [deepest if config.depth == "last" else config.depth]
    return Computed(lambda images: encoder(images, config.representation, depths)[0], encoder.img_size)


def features_of(
    numbers: Computed, dataset: ImageDataset, chosen: range, config: EmbedConfig, accelerator: Accelerator
) -> Iterator[tuple[list[int], np.ndarray, list[str]]]:
    """Indices, features (B, D) and errors of some images, by batches."""
    views = OrBroken(dataset, config.data, numbers.img_size)
    size = config.data.batch_size or 64
    batches = [list(chosen[first : first + size]) for first in range(0, len(chosen), size)]
    for indices, (images, errors) in zip(batches, build_loader(views, batches, together), strict=True):
        with torch.no_grad(), accelerator.autocast():
            found = numbers.of(images.to(accelerator.device))
        yield indices, found.float().cpu().numpy(), errors


def table_of(parts: Iterator[tuple[list[int], np.ndarray, list[str]]], dataset: ImageDataset, about: str) -> pa.Table:
    """Rows of the table."""
    indices, features, errors = (list(part) for part in zip(*parts, strict=True))
    errors = [error or None for of_batch in errors for error in of_batch]
    values = np.concatenate(features)
    broken = np.array([error is not None for error in errors])
    kind = pa.list_(pa.float32())  # of any length: pyarrow 25 cannot read fixed ones where some are missing
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1], mask=pa.array(broken))
    names = [printable(dataset.name(index)) for of_batch in indices for index in of_batch]
    columns = {"file": names, "split": [dataset.split] * len(names), "features": rows.cast(kind)}
    columns["error"] = pa.array(errors, pa.string())
    return pa.table(columns).replace_schema_metadata({KEY: about.encode()})


def is_of(file: Path, about: str) -> bool:
    """Whether a table is there, and of this."""
    try:
        return (pq.read_schema(file).metadata or {}).get(KEY) == about.encode()
    except (OSError, pa.ArrowException):  # nothing, a folder, another kind of file
        return False


def is_done(out: Path, about: str) -> bool:
    """Whether the whole table is there. Raises UserError where something else is."""
    done = is_of(out, about)
    require(done or not out.exists(), "out", out, "a new file: what is there is of other images, weights or settings")
    return done


def embed(config: EmbedConfig) -> Path:
    """Write the table, or what is missing of it; its file.

    Raises:
        UserError: no such encoder, images or depth, or a file that is of something else.
    """
    run = RunConfig(precision=config.precision, trackers=(), threads=config.threads)
    accelerator = start_alone(run, "a table is written")
    encoder = open_frozen_encoder(config).to(accelerator.device)
    numbers = computed(encoder, config, accelerator)
    crop = config.data.eval_crop or encoder.crop_pct
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval_crop=crop))
    splits = all_images(config.data)
    about = json.dumps(identity(config, splits) | {"precision": accelerator.mixed_precision}, sort_keys=True)
    out = Path(config.out)
    parts = out.parent / f".{out.name}.parts"
    is_done(out, about)  # what is refused leaves no folder
    with hold(parts, "out"), deaths_explained():
        if not is_done(out, about):
            join(write_parts(parts, numbers, splits, config, accelerator, about), out)
    shutil.rmtree(parts, ignore_errors=True)
    errors = pq.read_table(out, columns=["error"])["error"]
    broken = len(errors) - errors.null_count
    print(f"wrote {out}: {len(errors)} images, {broken} of them could not be decoded")
    return out


def identity(config: EmbedConfig, splits: Sequence[ImageDataset]) -> dict[str, Any]:
    """What a table is of: settings, weights and images."""
    kept = ("random", "img_size", "representation", "depth")
    weights = fingerprint(Path(config.checkpoint or config.encoder))
    if config.random or not weights:
        kept += ("encoder", "seed")
    elif config.checkpoint:
        kept += ("encoder",)  # a name of timm's, which says how the weights are used
    read = {name: getattr(config.data, name) for name in (*HOW_READ, "max_pixels", "eval_crop")}
    images = [identify_images(each, labels=False, retries=config.data.read_retries) for each in splits]
    return {name: getattr(config, name) for name in kept} | read | {"weights": weights, "images": images}


def write_parts(
    folder: Path,
    numbers: Computed,
    splits: Sequence[ImageDataset],
    config: EmbedConfig,
    accelerator: Accelerator,
    about: str,
) -> list[Path]:
    """Write what is missing of the parts, each complete or absent; all parts. One of something else is written over."""
    files = []
    with progress_bar(desc="features", unit="image", total=sum(map(len, splits))) as bar:
        for number, dataset in enumerate(splits):
            for first in range(0, len(dataset), ROWS):
                chosen = range(first, min(first + ROWS, len(dataset)))
                file = folder / f"{number:03d}-{first:012d}.parquet"
                files.append(file)
                if not is_of(file, about):
                    found = features_of(numbers, dataset, chosen, config, accelerator)
                    with complete(file) as partial:
                        pq.write_table(table_of(counted(found, bar), dataset, about), partial)
                else:
                    bar.update(len(chosen))
    return files


def counted(batches: Iterator[tuple], bar: Any) -> Iterator[tuple]:
    """The same, which a progress bar follows."""
    for batch in batches:
        yield batch
        bar.update(len(batch[0]))


def join(files: Sequence[Path], out: Path) -> None:
    """One file of all parts, one part in memory at a time."""
    with complete(out) as partial, pq.ParquetWriter(partial, pq.read_schema(files[0])) as writer:
        for file in files:
            writer.write_table(pq.read_table(file))


def main(arguments: Sequence[str] | None = None) -> None:
    """Embed as the command line, or `arguments`, say."""
    embed(parse_with_images(EmbedConfig, arguments, prog="python evaluation/embed.py"))


if __name__ == "__main__":
    command(main)
