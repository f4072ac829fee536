"""Mean and deviation of the channels of the images, measured on a sample."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
from torch import Tensor

from mpp.config import DataConfig, ModelConfig
from mpp.data.shards import ShardBlock, open_shards
from mpp.data.sources import load_image_datasets
from mpp.errors import UnreadableImage, UserError

MEASURED_IMAGES = 1024  # for the moments of channels
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
    means, mean_squares = [], []
    for image in sample_images(config):
        values = image.double().flatten(1) / 255
        means.append(values.mean(1).numpy())
        mean_squares.append(values.square().mean(1).numpy())
    if not means:
        raise UserError("model.mean is auto, but no training image can be decoded")
    mean = sum(means) / len(means)
    variance = sum(mean_squares) / len(means) - mean**2
    deviation = np.sqrt(np.maximum(variance, 0))
    flat = (np.flatnonzero(deviation < MIN_DEVIATION) + 1).tolist()
    if flat:
        auto = "model.mean or model.std is auto"
        raise UserError(f"{auto}, but these channels are the same everywhere: {flat}; choose data.bands")
    return [round(value, 6) for value in mean.tolist()], [round(value, 6) for value in deviation.tolist()]


def sample_images(config: DataConfig) -> Iterator[Tensor]:
    """Training images (C, H, W), decoded; undecodable images are left out."""
    if config.streaming:
        shards, _ = open_shards(config)
        sample = shards.with_columns([]).sample(MEASURED_IMAGES, config.eval_seed, config.read_retries)
        images = ShardBlock(shards, 0, [row for _, row in sample])
    else:
        train, _ = load_image_datasets(config)
        images = train.to_train_on(config).choose(MEASURED_IMAGES, config.eval_seed)
    for index in range(len(images.rows)):
        with suppress(UnreadableImage):
            yield images.decode(index, config)
