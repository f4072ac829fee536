"""Settings of a config by dotted key, such as `optim.lr`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from mpp.config.fields import default_of


def iterate_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """All settings as (dotted key, field, value); of a class the defaults."""
    for field in dataclasses.fields(config):
        value = default_of(field) if isinstance(config, type) else getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from iterate_settings(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, value


def known_keys(config_class: type) -> list[str]:
    """Dotted keys of a config's settings."""
    return [key for key, _, _ in iterate_settings(config_class)]


def flatten(config: Any) -> dict[str, Any]:
    """Dotted key -> value."""
    return {key: value for key, _, value in iterate_settings(config)}


def changed_settings(config: Any) -> dict[str, Any]:
    """Dotted key -> value of the settings that are not the defaults."""
    defaults = flatten(type(config)())
    return {key: value for key, value in flatten(config).items() if value != defaults[key]}


def as_yaml_value(value: Any) -> Any:
    """A value as YAML and JSON have it: tuples become lists."""
    if isinstance(value, dict):
        return {key: as_yaml_value(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [as_yaml_value(part) for part in value]
    return value
