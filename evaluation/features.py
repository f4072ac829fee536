"""Frozen features of an encoder: extract them once, save them, load them.

    python evaluation/features.py --encoder runs/birds --out features.npz
    accelerate launch --multi_gpu --num_processes 8 evaluation/features.py ...      # several processes

The file has `train_features` (N, D), `train_labels` (N,), `test_features` (M, D), `test_labels` (M,).
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray

from evaluation.encoders import FrozenEncoder, Representation, load_frozen
from evaluation.labelled import load_labelled
from evaluation.reports import report_path
from mpp.config import RunConfig, SourceConfig, plumbing, require
from mpp.data import Views, held_out_loader
from mpp.launch import command, start
from mpp.parsing import parse
from mpp.randomness import Stream, permutation
from mpp.sources import Photographs
from mpp.tracking import progress_bar

DEV_SEED = 0
ROWS = 4096  # of each process, exchanged at a time: what bounds the memory of those that only send


@dataclass(frozen=True)
class ProbeDataConfig(SourceConfig):
    """The labelled images: the training split is learned from, the held-out split is tested on."""

    eval_crop: float | None = None
    """Share of the shorter side that the centre crop keeps; 1 suits small images. null: the encoder's own."""

    def __post_init__(self):
        super().__post_init__()
        require(
            self.eval_crop is None or 0 < self.eval_crop <= 1, "data.eval_crop", self.eval_crop, "in (0, 1], or null"
        )


@dataclass(frozen=True)
class EncoderConfig:
    """A frozen encoder: which, and the images that it is shown."""

    encoder: str = "runs/birds"
    """Run folder, encoder folder, timm model name (random, or with --checkpoint), floor:pixels or floor:colors."""
    checkpoint: str | None = None
    """Local .safetensors file with the weights of a timm model name."""
    random: bool = False
    """Take the architecture with random weights: the floor that pre-training has to beat."""
    seed: int = 0
    """Seed of random weights."""
    img_size: int | None = None
    """Another input size; position embeddings are resampled. null: the encoder's own."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""
    data: ProbeDataConfig = field(default_factory=ProbeDataConfig)

    def variant(self) -> str:
        """What is not as usual, for the names of files: one report does not take another's place."""
        parts = [f"random_{self.seed}"] if self.random else []
        parts += [Path(self.checkpoint).stem] if self.checkpoint else []
        parts += [f"{self.img_size}px"] if self.img_size else []
        parts += [re.sub(r"[^\w.-]+", "_", Path(self.data.path).name)] if self.data.path else []
        return "".join(f"_{part}" for part in parts)


@dataclass(frozen=True)
class FeaturesConfig(EncoderConfig):
    """Frozen features: of which encoder, on which images."""

    representation: Representation = "mean"
    """`class` token, `mean` of the patches, or `both`. Masked patch prediction gives [class] no gradient of its own."""
    depth: int | Literal["last", "all", "dev"] = "last"
    """After how many blocks. last: the encoder's output; all: the whole curve; dev: the best on a tenth of train."""
    out: str | None = plumbing(None)
    """File that is written. null: evaluation/ in the run folder, or runs/NAME/evaluation/."""

    def variant(self) -> str:
        return super().variant() + (f"_{self.representation}" if self.representation != "mean" else "")


class Features(NamedTuple):
    """Frozen features of one depth and their labels."""

    train: NDArray[np.float32]  # (N, D)
    train_labels: NDArray[np.int64]  # (N,)
    test: NDArray[np.float32]  # (M, D)
    test_labels: NDArray[np.int64]  # (M,); or (M, L) of which any is right, padded with -1

    def check(self, source: str) -> "Features":
        """The same, labels as int64. Raises ValueError where a probe would give nonsense."""
        for part, labels in (("train", self.train_labels), ("test", self.test_labels)):
            features = getattr(self, part)
            several = part == "test" and labels.ndim == 2
            if features.ndim != 2 or not (labels.ndim == 1 or several) or len(features) != len(labels):
                raise ValueError(
                    f"{source}: {part}_features {features.shape} and {part}_labels {labels.shape} disagree"
                )
            if len(labels) == 0:
                raise ValueError(f"{source}: no labelled images in {part}")
            if not np.issubdtype(labels.dtype, np.integer) or (labels.max(1) if several else labels).min() < 0:
                raise ValueError(f"{source}: {part}_labels must be integers from 0")
            if not np.issubdtype(features.dtype, np.floating):
                raise ValueError(f"{source}: {part}_features are {features.dtype}, not floating-point numbers")
            if not np.isfinite(features).all():
                raise ValueError(f"{source}: {part}_features have values that are not finite")
        if self.train.shape[1] != self.test.shape[1]:
            widths = f"{self.train.shape[1]} and {self.test.shape[1]}"
            raise ValueError(f"{source}: train_features and test_features are {widths} wide")
        if len(np.unique(self.train_labels)) < 2:
            raise ValueError(f"{source}: all training images are of one class")
        labels = {"train_labels": self.train_labels.astype(np.int64), "test_labels": self.test_labels.astype(np.int64)}
        return self._replace(**labels)

    def dev(self) -> "Features":
        """A tenth of train, drawn once, in the place of test: what choices are made on."""
        order = permutation(Stream.CUT, DEV_SEED, 1, len(self.train))
        cut = max(1, len(order) // 10)
        held_out, kept = np.sort(order[:cut]), np.sort(order[cut:])
        return Features(self.train[kept], self.train_labels[kept], self.train[held_out], self.train_labels[held_out])


NAMES = ("train_features", "train_labels", "test_features", "test_labels")


def save_features(path: Path, features: Features) -> None:
    """Write one depth's features as .npz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # a file: numpy would add .npz to a name without
        np.savez(file, **dict(zip(NAMES, features, strict=True)))


def load_features(path: Path) -> Features:
    """Read features; nothing in the file is run.

    Raises:
        ValueError: no such file, an array missing or pickled, shapes that disagree, values that are not finite.
    """
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array, not several by name")
        with arrays:
            missing = [name for name in NAMES if name not in arrays]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            features = Features(*(arrays[name] for name in NAMES))
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise ValueError(f"features is {path}, which cannot be read: {error}") from error
    return features.check(str(path))


def extract(
    encoder: FrozenEncoder,
    photographs: Photographs,
    config: FeaturesConfig,
    depths: list[int],
    accelerator: Accelerator,
) -> list[NDArray[np.float32]]:
    """Features of all photographs after each depth, (N, D) each; of several processes the main one has them.

    Raises:
        ValueError: an image cannot be decoded: features of another in its place would be no measurement.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    views = views_for(encoder, photographs, config.data)
    size = config.data.batch_size or 64
    loader = held_out_loader(views, size, processes, rank)
    mine = [np.empty((0, 0), np.float32) for _ in depths]
    done = 0
    for batch in progress_bar(loader, desc="features", disable=not accelerator.is_main_process):
        if batch.unreadable:
            first = f"{batch.unreadable[0]} ({photographs.split})"
            raise ValueError(f"{first}; a probe needs all images: take this one out")
        with torch.inference_mode(), accelerator.autocast():
            pooled = encoder(batch.images.to(accelerator.device, non_blocking=True), config.representation, depths)
        if not done:
            count = len(range(rank, len(photographs), processes))
            mine = [np.empty((count, part.shape[1]), np.float32) for part in pooled]
        for of_depth, part in zip(mine, pooled, strict=True):
            of_depth[done : done + len(part)] = part.cpu()
        done += len(batch.images)
    return mine if processes == 1 else [interleave(part, len(photographs), accelerator) for part in mine]


def views_for(encoder: FrozenEncoder, photographs: Photographs, data: ProbeDataConfig) -> Views:
    """The photographs as this encoder takes them: its input size and, unless `data` says otherwise, its centre crop."""
    return Views(photographs, dataclasses.replace(data, eval_crop=data.eval_crop or encoder.crop_pct), encoder.img_size)


def interleave(mine: NDArray, count: int, accelerator: Accelerator) -> NDArray:
    """All rows on the main process, of which process r has the rows r, r + processes, ...; nothing on the others.

    Args:
        mine: the rows of this process.
        count: rows of all.
    """
    processes = accelerator.num_processes
    whole = np.empty((count, mine.shape[1]) if accelerator.is_main_process else (0, 0), mine.dtype)
    for first in range(0, -(-count // processes), ROWS):
        parts = gather_object([mine[first : first + ROWS]])
        if accelerator.is_main_process:
            block = whole[first * processes : (first + ROWS) * processes]
            for number, part in enumerate(parts):
                if len(part):  # there may be fewer images than processes
                    block[number::processes] = part
    return whole


def extract_features(config: FeaturesConfig, accelerator: Accelerator) -> dict[int, Features]:
    """Depth -> features of the labelled images; nothing but on the main process.

    Raises:
        ValueError: no labels, or an encoder, images or depth that there is not.
    """
    encoder = load_frozen(config.encoder, config.checkpoint, config.random, config.img_size, config.seed)
    deepest = len(encoder.stages)
    if isinstance(config.depth, int):
        require(1 <= config.depth <= deepest, "depth", config.depth, f"from 1 to {deepest}, last, all or dev")
        depths = [config.depth]
    else:
        depths = [deepest] if config.depth == "last" else list(range(1, deepest + 1))
    photographs = load_labelled(config.data, accelerator)
    encoder.to(accelerator.device)
    train, test = (extract(encoder, part, config, depths, accelerator) for part in photographs)
    labels = [part.labels for part in photographs]
    if not accelerator.is_main_process:
        return {}
    return {
        depth: Features(train[i], labels[0], test[i], labels[1]).check(config.encoder) for i, depth in enumerate(depths)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Extract features as the command line, or `arguments`, say, and write them."""
    config = parse(FeaturesConfig, arguments, prog="python evaluation/features.py")
    require(config.depth != "dev", "depth", config.depth, "a number, last or all: features alone choose nothing")
    accelerator = start(RunConfig(precision=config.precision, trackers=()))
    by_depth = extract_features(config, accelerator)
    if accelerator.is_main_process:
        for depth, features in by_depth.items():
            path = report_path(config.out, config.encoder, f"features{config.variant()}.npz")
            path = path.with_stem(f"{path.stem}_depth_{depth:02d}") if len(by_depth) > 1 else path
            save_features(path, features)
            print(f"wrote {path}: {len(features.train)} + {len(features.test)} images, {features.train.shape[1]} wide")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    command(main)
