"""Mean and deviation of the channels, measured on a sample of the training images."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from mpp.config import DataConfig
from mpp.data.columns import decode_cell
from mpp.data.sources import load_image_datasets
from mpp.data.stream_sources import load_streamed
from mpp.errors import UnreadableImage, UserError

SAMPLE = 1024  # images


def channel_moments(config: DataConfig) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel, of pixels scaled to [0, 1]; each image weighs the same.

    Which images these are says `data.eval_seed`: replicates of other seeds have the same numbers.

    Raises:
        UserError: no such images, none that can be decoded, or a channel that is the same everywhere.
    """
    first, second, count = np.zeros(config.channels), np.zeros(config.channels), 0
    for pixels in sample(config):
        values = pixels.double().flatten(1) / 255
        first += values.mean(1).numpy()
        second += values.square().mean(1).numpy()
        count += 1
    if count == 0:
        raise UserError("model.mean is auto, but no training image can be decoded")
    mean = first / count
    deviation = np.sqrt(np.maximum(second / count - mean**2, 0))
    if (deviation < 1e-6).any():
        flat = [number for number, value in enumerate(deviation, start=1) if value < 1e-6]
        auto = "model.mean or model.std is auto"
        raise UserError(f"{auto}, but these channels are the same everywhere: {flat}; choose data.bands")
    return [round(float(each), 6) for each in mean], [round(float(each), 6) for each in deviation]


def sample(config: DataConfig) -> Iterator[Tensor]:
    """Training images, decoded; those that cannot be are left out."""
    if config.streaming:
        source, _, _ = load_streamed(config, 0, 1)
        rows = (row for _, row in source.sample(SAMPLE, config.eval_seed, config.read_retries))
    else:
        source = load_image_datasets(config)[0].choose(config.train_images, config.eval_seed)
        source = source.choose(SAMPLE, config.eval_seed)
        rows = source.rows
    for row in rows:
        try:
            yield decode_cell(row[source.image_column], config, source.array_dtype)
        except UnreadableImage:
            continue
