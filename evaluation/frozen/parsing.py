"""Command lines of evaluations: the images are those of the encoder's run, unless others are named."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evaluation.frozen.run_images import (
    LoadedSplits,
    evaluated_image_settings,
    find_run,
    is_moved_copy,
    load_unchanged_splits,
    path_after_move,
)
from mpp.config import HOW_READ, DataConfig, flatten, rebuild
from mpp.config.parsing import ConfigT, check_given, read
from mpp.data.sources import image_arguments
from mpp.models.descriptions import how_read
from mpp.runtime.messages import tell
from mpp.training.run_folder import saved_settings

EncoderOf = Callable[[Any], str]
"""The encoder that a command's settings name."""
HowReadOf = Callable[[Any], dict[str, Any]]
"""The settings by which the images of a command's settings are read, whatever the encoder's were; empty: as those."""
VIEW_SETTINGS = ("flip", "eval_crop")  # which fine-tuning inherits


def named_encoder(config: Any) -> str:
    """The setting `encoder`."""
    return flatten(config)["encoder"]


def parse_with_images(config_class: type[ConfigT], arguments: Sequence[str] | None = None) -> ConfigT:
    """Read the config of a command, and compare the images of its encoder's run: see `parse_and_load`."""
    return parse_and_load(config_class, arguments)[0]


def parse_and_load(
    config_class: type[ConfigT],
    arguments: Sequence[str] | None,
    encoder_of: EncoderOf = named_encoder,
    how_read_of: HowReadOf = lambda config: {},
) -> tuple[ConfigT, LoadedSplits | None]:
    """Read the config of a command, and compare the images of its encoder's run with those that the run began with.

    Images that the command line names are not compared.

    Args:
        config_class, arguments, encoder_of, how_read_of: see `read_with_images`.
    Returns:
        The config, and the splits of its images if comparing has loaded them.
    Raises:
        UserError: the run's images are gone, or have changed.
    """
    config, takes_run_images = read_with_images(config_class, arguments, encoder_of, how_read_of)
    if not takes_run_images:
        return config, None
    return config, load_unchanged_splits(find_run(encoder_of(config)), config.data)


def read_with_images(
    config_class: type[ConfigT],
    arguments: Sequence[str] | None,
    encoder_of: EncoderOf = named_encoder,
    how_read_of: HowReadOf = lambda config: {},
) -> tuple[ConfigT, bool]:
    """Read the config of a command whose `encoder` may be a run's; its images are the run's, unless they are named.

    Other images are read as the run's were: with its channels and range. So are those of an encoder without its run.
    A run's `data.train_images` is the share that it was trained on: of the labelled ones all are used.
    Fine-tuning crops held-out images as the run did, and does not flip where the run did not. Where the run's images
    are gone, a `data.path` that names a copy of them names the run's images: see `is_moved_copy`.

    Args:
        config_class: has `data`, and an encoder.
        arguments: words of the command line; None: `sys.argv[1:]`.
        encoder_of: the encoder of the settings.
        how_read_of: of the settings, see `HowReadOf`.
    Returns:
        The config, and whether its images are the run's because no others are named.
    """
    words = sys.argv[1:] if arguments is None else arguments
    usual: Any = config_class()
    config = read(usual, words)
    path_is_named = config.data.path is not None or any(word.split("=")[0] == "--data.path" for word in words)
    inherited = {}
    if not flatten(config).get("features"):
        inherited = inherited_settings(config, encoder_of(config), path_is_named) | how_read_of(config)
    usual = rebuild(usual, {f"data.{name}": value for name, value in inherited.items()})
    config = read(usual, words)
    check_given(config, usual)
    run_arguments = image_arguments(config.data)
    if "path" in inherited and run_arguments:
        tell(f"the images of {find_run(encoder_of(config))}:{run_arguments}")
    return config, "path" in inherited and not path_is_named


def inherited_settings(config: Any, encoder: str, path_is_named: bool) -> dict[str, Any]:
    """The settings below `data` that a command inherits from its encoder.

    Args:
        path_is_named: whether the command line or a file names `data.path`, perhaps as null.
    """
    run = find_run(encoder)
    if run is None:
        return only_how_read(how_read(encoder)) if path_is_named else {}

    path = config.data.path
    settings = evaluated_image_settings(run)
    if path_is_named and is_moved_copy(run, path):
        settings["labels"] = path_after_move(settings.get("labels"), settings["path"], path)
    elif path_is_named:
        settings = only_how_read(settings)
    return settings | inherited_view(config.data, run)


def only_how_read(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that say how images are read, which suit the encoder whichever images these are."""
    return {name: value for name, value in settings.items() if name in HOW_READ}


def inherited_view(data: Any, run: Path) -> dict[str, Any]:
    """The settings of a run's crops that fine-tuning inherits, where `data` has their defaults."""
    if not isinstance(data, DataConfig):
        return {}
    saved = saved_settings(run)["data"]
    inherited = {}
    for name in VIEW_SETTINGS:
        if name in saved and getattr(data, name) == getattr(type(data), name):
            inherited[name] = saved[name]
    return inherited
