"""Mean and standard deviation of the channels, measured on a sample of the training images."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch import Tensor

from mpp.config import DataConfig, ModelConfig
from mpp.data.columns import decode_cell
from mpp.data.shards import load_streamed
from mpp.data.sources import load_image_datasets
from mpp.errors import UnreadableImage, UserError

SAMPLED_IMAGES = 1024
MIN_DEVIATION = 1e-6  # below it a channel counts as the same everywhere


def with_moments(model: ModelConfig, mean: object, std: object) -> ModelConfig:
    """The settings with lists of numbers instead of `auto` and null, which stay where there is no list."""
    unknown = [name for name in ("mean", "std") if getattr(model, name) in ("auto", None)]
    measured = {"mean": mean, "std": std}
    return replace(model, **{name: measured[name] for name in unknown if isinstance(measured[name], list)})


def channel_moments(config: DataConfig) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel, of pixels scaled to [0, 1]; each image weighs the same.

    The sample depends on `data.eval_seed`, so replicates of other seeds have the same numbers.

    Raises:
        UserError: no images, none that can be decoded, or a channel that is the same everywhere.
    """
    sum_of_means = np.zeros(config.channels)
    sum_of_mean_squares = np.zeros(config.channels)
    count = 0
    for pixels in sample_images(config):
        values = pixels.double().flatten(1) / 255
        sum_of_means += values.mean(1).numpy()
        sum_of_mean_squares += values.square().mean(1).numpy()
        count += 1
    if count == 0:
        raise UserError("model.mean is auto, but no training image can be decoded")
    mean = sum_of_means / count
    variance = sum_of_mean_squares / count - mean**2
    deviation = np.sqrt(np.maximum(variance, 0))
    flat = (np.flatnonzero(deviation < MIN_DEVIATION) + 1).tolist()
    if flat:
        auto = "model.mean or model.std is auto"
        raise UserError(f"{auto}, but these channels are the same everywhere: {flat}; choose data.bands")
    return [round(float(value), 6) for value in mean], [round(float(value), 6) for value in deviation]


def sample_images(config: DataConfig) -> Iterator[Tensor]:
    """Training images (C, H, W), decoded; undecodable images are left out."""
    if config.streaming:
        source, _, _ = load_streamed(config, probed=0, evaluated=1)
        rows = (row for _, row in source.sample(SAMPLED_IMAGES, config.eval_seed, config.read_retries))
    else:
        train, _ = load_image_datasets(config)
        source = train.choose(config.train_images, config.eval_seed).choose(SAMPLED_IMAGES, config.eval_seed)
        rows = source.rows
    for row in rows:
        try:
            yield decode_cell(row[source.image_column], config, source.array_dtype)
        except UnreadableImage:
            continue
