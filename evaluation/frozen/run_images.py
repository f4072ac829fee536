"""An encoder's own images: a run folder says which images it was trained on, and evaluation takes them.

This prevents results on other images than the run's.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from evaluation.config import EncoderConfig, WhichEncoderConfig
from mpp.config import HOW_READ, SourceConfig, refuse_idle, sides
from mpp.config.parsing import as_words, files_first, read
from mpp.data.data_path import could_be_hub_name, is_hub_dataset, is_local, is_url
from mpp.data.dataset import ImageDataset
from mpp.data.identity import identify_images, short_digest
from mpp.data.sources import image_arguments, load_image_datasets
from mpp.data.stream_sources import load_streamed
from mpp.errors import UserError
from mpp.models.descriptions import how_read
from mpp.runtime.messages import is_first_process, note, tell
from mpp.runtime.weights import BEST, run_of
from mpp.training.run_folder import changed_images, commit_begun_with, images_of, moved_along, saved_settings

ConfigT = TypeVar("ConfigT")
HOW_SHOWN = ("flip", "eval_crop")  # in fine-tuning, which has these settings
OF_THE_IMAGES = [field.name for field in dataclasses.fields(SourceConfig) if not field.metadata.get("operational")]


def parse_with_images(
    config_class: type[ConfigT], arguments: Sequence[str] | None, prog: str, refuse_changed: bool = True
) -> ConfigT:
    """Read the config of a command whose `encoder` may be a run's; its images are the run's, unless they are named.

    Others are read as the run's were: with its channels and range. So are those of an encoder without its run.
    Fine-tuning crops held-out images as the run did, and does not flip where the run did not. Where the run's images
    are gone, a `data.path` that names a copy of them names the run's images: see `moved_to`.

    Args:
        config_class: has `encoder` and `data`.
        arguments: the command line's words; None: `sys.argv[1:]`.
        refuse_changed: whether the images are compared now with those that the run began with; the command does so
            later otherwise (`refuse_other_images`).
    Raises:
        UserError: the run's images are gone, or have changed.
    """
    words = files_first(sys.argv[1:] if arguments is None else arguments)
    config: Any = read(config_class, words, prog)
    named = config.data.path is not None or any(word.split("=")[0] == "--data.path" for word in words)
    run, of_features, moved = run_folder(config.encoder), getattr(config, "features", None), False
    if run and not of_features:
        if not named and refuse_changed:
            refuse_other_images(run)
        moved = named and moved_to(run, config.data.path)
        named = named and not moved
    of_encoder = images_of_run(run) if run else how_read(config.encoder) if named else {}
    images = {name: value for name, value in of_encoder.items() if not named or name in HOW_READ}
    if moved:
        images["labels"] = moved_along(images.get("labels"), images["path"], config.data.path)
    if not images or of_features:
        refuse_idle(config)
        return config
    if run and hasattr(config.data, "flip"):
        saved, usual = saved_settings(run)["data"], type(config.data)
        free = [name for name in HOW_SHOWN if getattr(config.data, name) == getattr(usual, name)]
        images |= {name: saved[name] for name in free if name in saved}
    inherited = [f"--data.{name}={as_words(value)}" for name, value in images.items()]
    config = read(config_class, [*inherited, *words], prog)
    refuse_idle(config, usual=read(config_class, inherited, prog))
    taken = image_arguments(config.data)
    if run and taken and not named:
        tell(f"the images of {run}:{taken}")
    return config


def run_folder(encoder: str) -> Path | None:
    """The run folder of an encoder that is given by it, by its encoder/ or by weights; None: the encoder has no run."""
    folder = Path(encoder)
    folder = folder.parent if folder.suffix == ".safetensors" else folder
    folder = folder.parents[1] if folder.parent.name == "checkpoints" else folder
    folder = run_of(folder)
    return folder if "data" in saved_settings(folder) else None


def images_of_run(run: Path) -> dict[str, Any]:
    """The settings of a run's images, by name."""
    saved = saved_settings(run)["data"]
    images = {name: saved[name] for name in OF_THE_IMAGES if name in saved}
    if is_hub_dataset(SourceConfig(**images)):  # a folder here may have the dataset's name by now
        return images | {"revision": commit_begun_with(run) or saved.get("revision")}
    return images | {"revision": None}


def refuse_other_images(run: Path) -> None:
    """Raise UserError where a run's images are gone, or are no longer those that it began with.

    For a dataset of the hub, its commit is enough. Where several processes evaluate, the first one compares.
    """
    began, path = images_of(run), images_of_run(run).get("path")
    if began is None or not is_first_process():
        return
    of_a_commit = commit_begun_with(run) is not None and could_be_hub_name(path)
    where = path if path is None or not could_be_hub_name(path) else Path.cwd() / path
    if of_a_commit and is_local(path):
        ways = f"use --data.path ./{path} for the folder, or call from another folder"
        raise UserError(f"{run} was trained on the hub's dataset {path}, but {where} is here, too: {ways}")
    if of_a_commit:
        return
    if not (path is None or is_url(path) or is_local(path)):
        raise UserError(f"the images of {run} were at {where}, which is gone; name where they are now by --data.path")
    changed = changed_images(run, settings_of_run(run))
    if changed:
        where = where or "the package's birds"
        other = "put back what it began with, or name other images by --data.path"
        raise UserError(f"{where} no longer holds the images that {run} began with: {'; '.join(changed)}; {other}")


def check_own_images(config: WhichEncoderConfig) -> None:
    """`refuse_other_images`, where a command reads the images of its encoder's run from the run's path."""
    run = run_folder(config.encoder)
    if run and place(config.data.path) == place(images_of_run(run).get("path")):
        refuse_other_images(run)


@lru_cache
def moved_to(run: Path, path: str | None) -> bool:
    """Whether `path` has the images of a run that are no longer where they were; a note says how others differ."""
    own = images_of_run(run).get("path")
    if own is None or not Path(own).is_absolute() or is_local(own) or not is_local(path) or images_of(run) is None:
        return False
    settings = settings_of_run(run)
    try:
        changed = changed_images(run, replace(settings, path=path, labels=moved_along(settings.labels, own, path)))
    except UserError as error:  # no such split or column
        changed = [str(error)]
    if changed:
        gone = f"the images of {run} were at {own}, which is gone"
        note(f"{gone}; those at {path} are others: {'; '.join(changed)}")
    return not changed


def settings_of_run(run: Path) -> SourceConfig:
    """Where a run's images come from."""
    return SourceConfig(**images_of_run(run))


def is_own(run: Path | None, path: str | None) -> bool:
    """Whether `path` is where a run's images are, or were before they were moved there."""
    if run is None:
        return False
    own = images_of_run(run).get("path")
    return place(path) == place(own) or moved_to(run, path)


def streamed(config: WhichEncoderConfig) -> bool:
    """Whether the images are the run's own, and were read as a stream."""
    run = run_folder(config.encoder)
    saved = saved_settings(run)["data"] if run else {}
    return bool(saved.get("streaming")) and is_own(run, config.data.path)


def load_shown(config: WhichEncoderConfig, known: int = 0) -> tuple[ImageDataset, ImageDataset]:
    """Training and held-out images; of a run on a stream so many `known` ones, and those that it was evaluated on."""
    if not streamed(config):
        return load_image_datasets(config.data)
    _, *few = load_streamed(config.data, known, saved_settings(run_folder(config.encoder))["data"]["eval_images"])
    return tuple(few)


def variant(config: EncoderConfig) -> str:
    """Which encoder, images and features, where not as usual, for the names of files: each has its own report."""
    run = run_folder(config.encoder)
    path = config.data.path
    representation, depth = getattr(config, "representation", "mean"), getattr(config, "depth", "last")
    parts = ["best"] if Path(config.encoder).name == BEST else []
    parts += [f"random_{config.seed}"] if config.random else []
    parts += [Path(config.checkpoint).stem] if config.checkpoint else []
    parts += [f"{'x'.join(map(str, dict.fromkeys(sides(config.img_size))))}px"] if config.img_size else []
    if not (is_own(run, path) if run else path is None):  # named for a person, and by a digest, since names recur
        images = [str(getattr(config.data, name)) for name in OF_THE_IMAGES if hasattr(config.data, name)]
        name = re.sub(r"[^\w.-]+", "_", Path(path).name) if path else "birds"
        parts += [name, short_digest(["\n".join(images).encode()])[:6]]
    parts += [representation] if representation != "mean" else []
    parts += [f"depth_{depth}"] if depth != "last" else []
    return "".join(f"_{part}" for part in parts)


def place(path: str | None) -> str | None:
    """A local path without links and relative parts; None: the package's birds."""
    return path if path is None or is_url(path) else str(Path(path).expanduser().resolve())


def positions(dataset: ImageDataset) -> np.ndarray:
    """The indices of the images in their split, (n,)."""
    return np.arange(len(dataset)) if dataset.origin.indices is None else dataset.origin.indices


def images_at(data: SourceConfig) -> dict[str, Any] | None:
    """The record of the images that these settings mean, now. None: a stream, which is not looked through."""
    if getattr(data, "streaming", False):
        return None
    return record_of(
        SourceConfig(**{field.name: getattr(data, field.name) for field in dataclasses.fields(SourceConfig)})
    )


@lru_cache
def record_of(source: SourceConfig) -> dict[str, Any]:
    """The record of both splits, looked at once."""
    splits = zip(("train", "held_out"), load_image_datasets(source), strict=True)
    return {part: identify_images(dataset, labels=True, retries=source.read_retries) for part, dataset in splits}
