"""The features of all images of a dataset, as a table for a database or a notebook.

    python evaluation/embed.py --encoder runs/birds --data.path FOLDER --out features.parquet

A row for each image: `file`, `split`, `features` (as many float32 as the encoder is wide) and `error`. An image that
cannot be decoded has no features, and its error says why. After an interruption the same command continues.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import torch

from evaluation.config import EmbedConfig
from evaluation.frozen.features import describe_precision, open_extraction
from evaluation.frozen.kept_heads import describe_encoder
from evaluation.frozen.run_images import LoadedSplits, command_of
from evaluation.tables import identify_splits, load_all_splits, read_images, unlabelled_images, write_table
from mpp.config import rebuild
from mpp.data.dataset import ImageDataset
from mpp.runtime.start import run_main, start_alone


def embed(config: EmbedConfig, loaded: LoadedSplits | None = None) -> Path:
    """Write the table, or its missing parts, and return its file.

    Raises:
        UserError: no such encoder, images or depth, or the file is another table.
    """
    accelerator = start_alone(config.frozen.run_settings(config.precision), "a table is written")
    encoder, (depth,), encode = open_extraction(config.frozen, config.data, config, accelerator)
    data = rebuild(config.data, {"eval_crop": config.data.eval_crop or encoder.crop_pct})
    images = unlabelled_images(data, load_all_splits(data, loaded))

    @torch.no_grad()
    def rows_of(split: ImageDataset) -> Iterator[pa.Table]:
        for batch in read_images(split, data, encoder.img_size):
            with accelerator.autocast():
                (features,) = encode(batch.pixels.to(accelerator.device))
            yield batch.table({"features": list(features.float().cpu().numpy())}, data)

    identity = describe_encoder(config.frozen) | identify_splits(data, images)
    identity |= {
        "img_size": list(encoder.img_size),
        "representation": config.representation,
        "depth": depth,
        "precision": describe_precision(accelerator),
    }
    return write_table(Path(config.out), identity, images, rows_of)


main = command_of(embed, EmbedConfig)


if __name__ == "__main__":
    run_main(main)
