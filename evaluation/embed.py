"""The features of all images of a dataset, as a table for a database or a notebook.

    python evaluation/embed.py --encoder runs/birds --data.path FOLDER --out features.parquet

A row for each image: `file`, `split`, `features` (as many float32 as the encoder is wide) and `error`. An image that
cannot be decoded has no features, and its error says why. After an interruption the same command continues. Logits of a
trained classifier are in the table of `mpp predict`.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from evaluation.config import EmbedConfig
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, open_frozen_encoder
from evaluation.frozen.run_images import LoadedSplits, parse_and_load
from evaluation.tables.given import given_columns
from evaluation.tables.images import (
    first_columns,
    folder_of,
    identify_splits,
    images_of_splits,
    load_all_splits,
    read_crops,
)
from evaluation.tables.parts import write_table
from mpp.config import flatten, rebuild, require
from mpp.data.dataset import ImageDataset
from mpp.runtime.messages import counted
from mpp.runtime.start import run_main, start_alone
from mpp.runtime.weights import fingerprint


def embed(config: EmbedConfig, loaded: LoadedSplits | None = None) -> Path:
    """Write the table, or its missing parts, and return its file.

    Raises:
        UserError: no such encoder, images or depth, or the file is another table.
    """
    accelerator = start_alone(config.frozen.run_settings(config.precision), "a table is written")
    encoder = open_frozen_encoder(config.frozen, config.data).to(accelerator.device)
    eval_crop = config.data.eval_crop or encoder.crop_pct
    config = rebuild(config, {"data.eval_crop": eval_crop})
    embedder = Embedder(encoder, config, accelerator)
    splits = load_all_splits(config.data, loaded)
    images = images_of_splits(config.data, splits)
    out = Path(config.out)
    given = given_columns(splits, out, {each.image_column for each in images})
    identity = identify_table(config, images) | given.identity() | {"precision": accelerator.mixed_precision}
    write_table(out, identity, images, given.joined_to(embedder.rows), "features")
    errors = pq.read_table(out, columns=["error"])["error"]
    unreadable = len(errors) - errors.null_count
    undecoded = f", {unreadable} of them could not be decoded" if unreadable else ""
    print(f"wrote {out}: {counted(len(errors), 'image')}{undecoded}")
    return out


class Embedder:
    """Computes features of the images of a split.

    Raises:
        UserError: no such depth.
    """

    def __init__(self, encoder: FrozenEncoder | ColorBaseline, config: EmbedConfig, accelerator: Accelerator):
        deepest = len(encoder.stages)
        self.depth = deepest if config.depth == "last" else config.depth
        require(1 <= self.depth <= deepest, "depth", self.depth, f"from 1 to {deepest}")
        self.encoder = encoder
        self.config = config
        self.accelerator = accelerator

    def rows(self, images: ImageDataset, indices: range, on_images: Callable[[int], Any]) -> pa.Table:
        """The rows of the images at these indices."""
        parts, errors = [], []
        for batch in read_crops(images, self.config.data, self.encoder.img_size, indices):
            with torch.no_grad(), self.accelerator.autocast():
                pixels = batch.pixels.to(self.accelerator.device)
                (features,) = self.encoder(pixels, self.config.representation, [self.depth])
            parts.append(features.float().cpu().numpy())
            errors += batch.errors
            on_images(len(batch.indices))
        return build_table(np.concatenate(parts), errors, images, indices, self.folder)

    @cached_property
    def folder(self) -> Path | None:
        """Folder of the images: see `folder_of`."""
        return folder_of(self.config.data)


def identify_table(config: EmbedConfig, splits: Sequence[ImageDataset]) -> dict[str, Any]:
    """The settings, the weights and the images that the numbers of a table depend on."""
    names = ["random", "img_size", "representation", "depth"]
    frozen = config.frozen
    weights = fingerprint(Path(frozen.checkpoint or frozen.encoder), on_hub=True)
    if frozen.random or not weights:
        names += ["encoder", "seed"]
    elif frozen.checkpoint:
        names.append("encoder")  # the name of a timm model, which says how the weights are used
    identity = {name: flatten(config)[name] for name in names}
    return identity | {"weights": weights} | identify_splits(config.data, splits)


def build_table(
    features: NDArray[np.float32],
    errors: Sequence[str | None],
    images: ImageDataset,
    indices: range,
    folder: Path | None,
) -> pa.Table:
    """The rows of some images of a split: features (n, D), and why an image cannot be decoded (None: it can).

    Args:
        folder: of the images: see `name_in_folder`.
    """
    is_unreadable = pa.array([error is not None for error in errors])
    rows = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), features.shape[1], mask=is_unreadable)
    list_type = pa.list_(pa.float32())  # of any length: pyarrow 25 cannot read fixed ones where some are missing
    columns = {"features": rows.cast(list_type), "error": pa.array(errors, pa.string())}
    return pa.table(first_columns(images, indices, folder) | columns)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Embed with the settings of the command line, or of `arguments`."""
    return embed(*parse_and_load(EmbedConfig, arguments))


if __name__ == "__main__":
    run_main(main)
