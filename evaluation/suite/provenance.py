"""What a result depends on: settings, images, weights. While these are the same, a comparison takes it for done."""

from dataclasses import fields
from functools import lru_cache
from typing import Any

from mpp.config import SourceConfig
from mpp.data.record import record
from mpp.data.sources import load_image_datasets
from mpp.runtime.parsing import plain, settings


def result_settings(config: Any) -> dict[str, Any]:
    """The settings that a result depends on, as JSON has them."""
    return {key: plain(value) for key, field, value in settings(config) if not field.metadata.get("operational")}


def completed(noted: dict[str, Any] | None, config: Any) -> dict[str, Any] | None:
    """Settings that a result was noted with, as this release has them.

    Those that came later have their default, which is what they were; those that were renamed have their name of today.
    """
    if noted is None or config is None:
        return noted
    return result_settings(type(config)()) | noted


def images_at(data: SourceConfig) -> dict[str, Any] | None:
    """Which images these settings mean, now. None: a stream, which is not looked through."""
    if getattr(data, "streaming", False):
        return None
    return images_of_source(SourceConfig(**{field.name: getattr(data, field.name) for field in fields(SourceConfig)}))


@lru_cache
def images_of_source(source: SourceConfig) -> dict[str, Any]:
    """The record of both splits, looked at once."""
    splits = zip(("train", "held_out"), load_image_datasets(source), strict=True)
    return {part: record(dataset, labels=True, retries=source.read_retries) for part, dataset in splits}
