"""The images of a run: found by its folder, compared with its record, loaded.

An encoder is evaluated on the images that its run held out, unless others are named; this prevents results on images
that have changed since. Reports of training with labels:

RUN/supervised.json       of the run itself
FINETUNING/finetune.json  of its run lr_X, which was tested: the rate X is the best one
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from evaluation.config import ContrastiveConfig, OneRunConfig, SupervisedConfig
from mpp.config import HOW_READ, Config, DataConfig, SourceConfig, flatten, rebuild, settings_of
from mpp.config.parsing import ConfigT, check_given, is_given, read
from mpp.data.data_path import is_hub_dataset, is_local, is_url
from mpp.data.dataset import ImageDataset
from mpp.data.identity import differences, digest_listing, identify_images
from mpp.data.labels import AUTO
from mpp.data.shards import list_stream_files, load_streamed
from mpp.data.sources import image_arguments, load_image_datasets, load_splits
from mpp.errors import UserError
from mpp.models.descriptions import how_read
from mpp.runtime.messages import is_first_process, tell
from mpp.runtime.weights import BEST, SAFETENSORS_SUFFIX, run_of
from mpp.training.checkpoint import COMPLETE_NAME
from mpp.training.run_folder import read_record, recorded_commit, saved_settings

LoadedSplits = dict[str, Dataset]
"""Rows of a dataset's splits, by name: a large folder takes long to list. Functions that get None load them."""
COLOUR_BASELINE = "floor:"
"""Beginning of the names of colour baselines, which take an encoder's place."""
DEV = "dev"
"""Name of the part of the training images that choices are made on."""
IMAGE_SETTINGS = [each.key for each in settings_of(SourceConfig()) if not each.about["operational"]]
"""Names of the settings that say which images these are."""
EVALUATED_SETTINGS = [name for name in IMAGE_SETTINGS if name != "train_images"]
"""Those that an evaluation takes over from the run. A share of the images to pre-train on is none of the labels."""
VIEW_SETTINGS = ("flip", "eval_crop")  # which fine-tuning inherits

SUPERVISED_REPORT = "supervised.json"
FINETUNING_REPORT = "finetune.json"
CONFIG_BY_SETTING: dict[str, type] = {
    "objective": Config,
    "contrast": ContrastiveConfig,
    "lrs": OneRunConfig,
    "head": SupervisedConfig,
}
"""A setting that only one kind of run has -> the class of the run's settings."""
CLASSIFIERS = (SupervisedConfig, OneRunConfig)
"""Classes of the settings of runs that learn labels."""


# --- the run of an encoder ---


def is_colour_baseline(encoder: str) -> bool:
    """Whether the setting `encoder` names a colour baseline, which has no weights."""
    return encoder.startswith(COLOUR_BASELINE)


def find_run(encoder: str) -> Path | None:
    """The run folder of an encoder that is named by the folder itself, its encoder/ or a weights file in it.

    Returns:
        None where an encoder has no run, as random weights, whose name is empty. Of a fine-tuning its tested run.
    """
    folder, _ = split_run(encoder)
    with suppress(UserError):  # it only compared rates
        folder = find_tested_run(folder, "encoder") or folder
    return folder if encoder and "data" in saved_settings(folder) else None


def split_run(encoder: str) -> tuple[Path, str]:
    """The folder of a run, and which of its weights are named: `encoder_best`, `step_...`, or "" for the last ones.

    The run may not be there yet.
    """
    folder = Path(encoder)
    if folder.suffix == SAFETENSORS_SUFFIX:
        folder = folder.parent
    if folder.parent.name == "checkpoints" and COMPLETE_NAME.fullmatch(folder.name):
        return folder.parents[1], folder.name
    return run_of(folder), BEST if folder.name == BEST else ""


def config_class_of(settings: dict[str, Any]) -> type | None:
    """Class of the settings of a run, by a setting that only such runs have; None where it is not known."""
    return next((kind for name, kind in CONFIG_BY_SETTING.items() if name in settings), None)


def find_tested_run(folder: Path, setting: str) -> Path | None:
    """The run of the best rate in the folder of a fine-tuning, or of its classifier; None: it is none.

    Args:
        setting: that names the folder, for messages.
    Raises:
        UserError: it has compared rates and trained no run on all images.
    """
    folder = run_of(folder)
    if not (folder / FINETUNING_REPORT).is_file():
        return None
    results = json.loads((folder / FINETUNING_REPORT).read_text(encoding="utf-8"))["results"]
    if not results:
        raise UserError(f"{setting} is {folder}, which only compared rates (--test false); fine-tune with one")
    return folder / run_of_rate(results[0]["lr"])


def run_of_rate(lr: float) -> str:
    """Name of a run in the folder of a fine-tuning."""
    return f"lr_{lr:g}"


def tested_encoder(config: Any) -> str:
    """The encoder that settings name: of the folder of a fine-tuning its tested run, otherwise the setting itself."""
    encoder = flatten(config)["encoder"]
    return str(find_tested_run(Path(encoder), "encoder") or encoder)


def reports_of_training(run: Path) -> list[Path]:
    """The reports of training that are about a run: one, or none."""
    if (run / SUPERVISED_REPORT).is_file():
        return [run / SUPERVISED_REPORT]
    parent = run.absolute().parent
    with suppress(UserError):  # a report of no test
        if find_tested_run(parent, "encoder") == run.absolute():
            return [parent / FINETUNING_REPORT]
    return []


# --- the command line of an evaluation ---


def parse_and_load(
    config_class: type[ConfigT],
    arguments: Sequence[str] | None,
    source_of: Callable[[Any], tuple[str, dict[str, Any]]] | None = None,
    compare: bool = True,
) -> tuple[ConfigT, LoadedSplits | None]:
    """Read the config of a command whose `encoder` may be a run's; its images are the run's, unless they are named.

    The run's images are compared with those that it began with. Others are read as they were: with their channels and
    range. So are those of an encoder without its run. A run's `data.train_images` is the share that it was trained on:
    of the labelled ones all are used. Fine-tuning crops held-out images as the run did, and does not flip where the run
    did not. Where the run's images are gone, a `data.path` that names a copy of them names the run's images: see
    `moved_source`.

    Args:
        config_class: has `data`, and an encoder.
        arguments: words of the command line; None: `sys.argv[1:]`.
        source_of: the encoder of the settings, and settings by which its images are read, whatever its run's were;
            None: `tested_encoder`.
    Returns:
        The config, with the tested run of a fine-tuning as its encoder, and the splits of its images if comparing has
        loaded them.
    Raises:
        UserError: the run's images are gone, or have changed.
    """
    words = sys.argv[1:] if arguments is None else arguments
    usual: Any = config_class()
    config = read(usual, words)
    path_is_named = is_given("data.path", words, usual)
    run, inherited = None, {}
    if not flatten(config).get("features"):
        encoder, reading = source_of(config) if source_of else (tested_encoder(config), {})
        run = find_run(encoder)
        if run:
            inherited = settings_from_run(run, config.data, path_is_named)
        elif path_is_named:
            inherited = how_read(encoder)
        inherited |= reading
    usual = rebuild(usual, {f"data.{name}": value for name, value in inherited.items()})
    config = read(usual, words)
    check_given(config, usual)
    if source_of is None:
        config = rebuild(config, {"encoder": tested_encoder(config)})
    run_arguments = image_arguments(config.data)
    if "path" in inherited and run_arguments:
        tell(f"the images of {run}:{run_arguments}")
    takes_run_images = run and compare and not path_is_named
    return config, load_unchanged_splits(run, config.data) if takes_run_images else None


def command_of(
    run: Callable[[Any, LoadedSplits | None], Any], config_class: type, parse: Callable = parse_and_load
) -> Callable[..., Any]:
    """The `main(arguments)` of a command: `run` with the settings of the command line, or of `arguments`."""

    def main(arguments: Sequence[str] | None = None) -> Any:
        return run(*parse(config_class, arguments))

    return main


def settings_from_run(run: Path, data: SourceConfig, path_is_named: bool) -> dict[str, Any]:
    """The settings below `data` that a command inherits from the run of its encoder.

    Args:
        path_is_named: whether the command line or a file names `data.path`, perhaps as null.
    """
    of_run = moved_source(run, data.path) if path_is_named else run_source(run)
    names = HOW_READ if of_run is None else EVALUATED_SETTINGS
    source = of_run or run_source(run)
    settings = {name: getattr(source, name) for name in names}
    if isinstance(data, DataConfig):
        saved = saved_settings(run)["data"]
        settings |= {name: saved[name] for name in VIEW_SETTINGS if name in saved}
    return settings


# --- the images of a run ---


def run_source(run: Path) -> SourceConfig:
    """The source of a run's images; of a hub dataset with the commit that the run began with."""
    saved = saved_settings(run)["data"]
    source = SourceConfig(**{name: saved[name] for name in IMAGE_SETTINGS if name in saved} | {"revision": None})
    if is_hub_dataset(source):  # a folder here may have the dataset's name by now
        source = replace(source, revision=recorded_commit(run) or saved.get("revision"))
    return source


def load_unchanged_splits(run: Path, data: SourceConfig) -> LoadedSplits | None:
    """Load a run's images to compare them with those that it began with, if a command takes them from the run's path.

    For a hub dataset its commit is enough. Where several processes evaluate, the first one compares.

    Args:
        data: the settings of the command's images.
    Returns:
        The splits that `data` means; None: it means others, or comparing did not take loading.
    Raises:
        UserError: the run's images are gone, or have changed.
    """
    record, source = read_record(run), run_source(run)
    path, place = source.path, absolute_path(source.path)
    if not record or not is_first_process() or absolute_path(data.path) != place:
        return None
    if recorded_commit(run) is not None and not is_local(path):
        return None
    if not (path is None or is_url(path) or is_local(path)):
        raise UserError(f"the images of {run} were at {place}, which is gone; give their new place with --data.path")
    is_same = all(getattr(data, name) == getattr(source, name) for name in EVALUATED_SETTINGS)
    is_reusable = is_same and not data.mask_column and not is_known_by_files(record)  # masks may be images to the run
    splits = load_splits(data) if is_reusable else None
    changed = image_differences(run, source, splits)
    if changed:
        ways = "restore the original images, or choose others with --data.path"
        raise UserError(f"{place or 'the birds'} no longer holds the images of {run}: {'; '.join(changed)}; {ways}")
    return splits


def image_differences(run: Path, data: SourceConfig, splits: LoadedSplits | None = None) -> list[str]:
    """Differences of images from those that a run began with, in words; empty: the same, as far as data.json says.

    For a stream the names and sizes of the files are compared, otherwise names, and the bytes of some files.

    Args:
        data: the settings of the run's images, perhaps with another `path`.
        splits: those of the dataset, if they are loaded already.
    Raises:
        UserError: they cannot be loaded.
    """
    before = read_record(run)
    if is_known_by_files(before):
        return differences(before, {"train": {"files": digest_listing(list_stream_files(data))}})
    images = load_image_datasets(data, splits, AUTO, announce=False)  # the command says which images it takes
    train, held_out = (identify_images(each, with_labels=False, retries=data.read_retries) for each in images)
    parts = {"train": train, "held_out": held_out}
    return differences(before, {part: {key: each[key] for key in ("split", "files")} for part, each in parts.items()})


def is_known_by_files(record: dict[str, Any]) -> bool:
    """Whether a run read shards as a stream, whose record has the names and sizes of the files."""
    return "shards" in record["train"]


def moved_source(run: Path, path: str | None) -> SourceConfig | None:
    """The source of a run's images that have moved to `path`, with a list in their folder.

    Returns:
        None: they have not, or there are others.
    """
    source = run_source(run)
    before = source.path
    is_gone = before is not None and Path(before).is_absolute() and not is_local(before)
    if not is_gone or not is_local(path) or not read_record(run):
        return None
    labels = source.labels and source.labels.replace(f"{before}/", f"{path}/", 1)
    moved = replace(source, path=path, labels=labels)
    with suppress(UserError):  # no such split or column
        if not image_differences(run, moved):
            return moved
    return None


def absolute_path(path: str | None) -> str | None:
    """A local path without links and relative parts; a URL, and None for the package's birds, as they are."""
    return path if path is None or is_url(path) else str(Path(path).expanduser().resolve())


def load_images_of(
    encoder: str, data: SourceConfig, loaded: LoadedSplits | None = None
) -> tuple[ImageDataset, ImageDataset]:
    """Load the training and the held-out images of a command.

    Of a stream of the encoder's run, the held-out images are those that it was evaluated on; none is to learn from.
    """
    run = find_run(encoder)
    saved = saved_settings(run)["data"] if run else {}
    if saved.get("streaming") and absolute_path(data.path) == absolute_path(saved["path"]):
        _, *images = load_streamed(data, 0, saved["eval_images"])
        return tuple(images)
    return load_image_datasets(data, loaded, AUTO)


def indices_in_split(dataset: ImageDataset) -> NDArray[np.int64]:
    """The indices of the images in their split, (n,)."""
    return np.arange(len(dataset)) if dataset.origin.indices is None else dataset.origin.indices


def record_images(data: SourceConfig, label_kind: str = "class") -> dict[str, Any] | None:
    """The record of the images that these settings mean now. None: a stream, which is not read through."""
    return None if data.streaming else record_source(rebuild(SourceConfig(), flatten(data)), label_kind)


@lru_cache
def record_source(source: SourceConfig, label_kind: str) -> dict[str, Any]:
    """The record of both splits, made once for each source."""
    images = load_image_datasets(source, label_kind=label_kind)
    records = [identify_images(split, with_labels=True, retries=source.read_retries) for split in images]
    return dict(zip(("train", "held_out"), records, strict=True))
