"""An encoder's own images: a run folder says which images it was trained on, and evaluation takes them.

Numbers on other images than the run's, or on test images whose labels the encoder has seen, are the mistakes that this
is against.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from timm import is_model

from evaluation.config import EncoderConfig, WhichEncoderConfig
from mpp.config import HOW_READ, SourceConfig, refuse_idle, sides
from mpp.data.hub import of_the_hub
from mpp.data.record import record, short_digest
from mpp.data.shards import load_streamed
from mpp.data.sources import ImageDataset, as_arguments, load_image_datasets
from mpp.errors import UserError
from mpp.models.encoder import how_read, is_named
from mpp.runtime.parsing import as_words, files_first, read
from mpp.runtime.weights import BEST, run_of
from mpp.training.run_folder import commit_begun_with, saved_settings

ConfigT = TypeVar("ConfigT")
HOW_SHOWN = ("flip", "eval_crop")  # in fine-tuning, which has these settings
OF_THE_IMAGES = [field.name for field in dataclasses.fields(SourceConfig) if not field.metadata.get("operational")]
WITH_LABELS = {"head", "lrs"}  # settings of supervised training and of fine-tuning


def parse_with_images(config_class: type[ConfigT], arguments: Sequence[str] | None, prog: str) -> ConfigT:
    """Read the config of a command whose `encoder` may be a run's; its images are the run's, unless they are named.

    Others are read as the run's were: with its channels and range. So are those of an encoder without its run.
    Fine-tuning crops held-out images as the run did, and does not flip where the run did not.

    Args:
        config_class: has `encoder` and `data`.
        arguments: the command line's words; None: `sys.argv[1:]`.
    """
    words = files_first(sys.argv[1:] if arguments is None else arguments)
    config: Any = read(config_class, words, prog)
    named = config.data.path is not None or any(word.split("=")[0] == "--data.path" for word in words)
    run = run_folder(config.encoder)
    of_encoder = images_of_run(run) if run else [*how_read(config.encoder).items()] if named else []
    images = [(name, value) for name, value in of_encoder if not named or name in HOW_READ]
    if not images or getattr(config, "features", None):
        refuse_idle(config)
        return config
    if run and hasattr(config.data, "flip"):
        saved, usual = saved_settings(run)["data"], type(config.data)
        free = [name for name in HOW_SHOWN if getattr(config.data, name) == getattr(usual, name)]
        images += [(name, saved[name]) for name in free if name in saved]
    inherited = [f"--data.{name}={as_words(value)}" for name, value in images]
    config = read(config_class, [*inherited, *words], prog)
    refuse_idle(config, usual=read(config_class, inherited, prog))
    taken = as_arguments(config.data)
    if run and taken and not named and os.environ.get("RANK", "0") == "0":
        print(f"the images of {run}:{taken}")
    return config


def run_folder(encoder: str) -> Path | None:
    """The run folder that an encoder is of, named by it, by its encoder/ or by weights; None: it is of none."""
    folder = Path(encoder)
    folder = folder.parent if folder.suffix == ".safetensors" else folder
    folder = folder.parents[1] if folder.parent.name == "checkpoints" else folder
    folder = run_of(folder)
    return folder if "data" in saved_settings(folder) else None


def images_of_run(run: Path) -> list[tuple[str, Any]]:
    """The settings that say which images a run is of, by name."""
    saved = saved_settings(run)["data"]
    images = {name: saved[name] for name in OF_THE_IMAGES if name in saved}
    if of_the_hub(SourceConfig(**images)):  # a folder here may have the dataset's name by now
        return [*(images | {"revision": commit_begun_with(run) or saved.get("revision")}).items()]
    return [*(images | {"revision": None}).items()]


def streamed(config: WhichEncoderConfig) -> bool:
    """Whether the images are the run's own, and were read as a stream."""
    run = run_folder(config.encoder)
    saved = saved_settings(run)["data"] if run else {}
    return bool(saved.get("streaming")) and saved.get("path") == config.data.path


def load_shown(config: WhichEncoderConfig, known: int = 0) -> tuple[ImageDataset, ImageDataset]:
    """Training and held-out images; of a run on a stream so many `known` ones, and those that it was evaluated on."""
    if not streamed(config):
        return load_image_datasets(config.data)
    _, *few = load_streamed(config.data, known, saved_settings(run_folder(config.encoder))["data"]["eval_images"])
    return tuple(few)


def variant(config: EncoderConfig) -> str:
    """Which encoder, images and features, where not as usual, for the names of files: each has its own report."""
    run = run_folder(config.encoder)
    path, own = config.data.path, run and dict(images_of_run(run)).get("path")
    representation, depth = getattr(config, "representation", "mean"), getattr(config, "depth", "last")
    parts = ["best"] if Path(config.encoder).name == BEST else []
    parts += [f"random_{config.seed}"] if config.random else []
    parts += [Path(config.checkpoint).stem] if config.checkpoint else []
    parts += [f"{'x'.join(map(str, dict.fromkeys(sides(config.img_size))))}px"] if config.img_size else []
    if path != own and (path or own):  # named for a person, and by a digest, since names recur
        images = [str(getattr(config.data, name)) for name in OF_THE_IMAGES if hasattr(config.data, name)]
        name = re.sub(r"[^\w.-]+", "_", Path(path).name) if path else "birds"
        parts += [name, short_digest(["\n".join(images).encode()])[:6]]
    parts += [representation] if representation != "mean" else []
    parts += [f"depth_{depth}"] if depth != "last" else []
    return "".join(f"_{part}" for part in parts)


def learned_labels(encoder: str) -> SourceConfig | None:
    """Where the images come from whose labels an encoder was trained with; None: with no labels, or nothing says so."""
    run = run_folder(encoder)
    if run is None or not WITH_LABELS & saved_settings(run).keys() or "contrast" in saved_settings(run):
        return None
    return SourceConfig(**dict(images_of_run(run)))


def lineage(encoder: str) -> Iterator[str]:
    """The encoder, what its run began from or was taught by, and so on: those that may have passed on labels."""
    names, begun = [encoder], set()
    while names:
        name = names.pop(0)
        run = run_folder(name)
        yield name
        if run is None or run.resolve() in begun:
            continue
        begun.add(run.resolve())
        for setting, each in stands_on(run).items():
            names.append(each)
            if is_named(each) and not is_model(each):
                note_missing(f"{setting} of {run} is {each}")


@lru_cache
def note_missing(which: str) -> None:
    """Say, once, that what passed on labels cannot be asked."""
    print(f"note: {which}, which is not here: nobody can say whose labels it learned", file=sys.stderr)


def stands_on(run: Path) -> dict[str, str]:
    """What a run began from or was taught by: the setting that says so -> an encoder, or its file of weights."""
    saved = saved_settings(run)
    model, distill, objective = (saved.get(part) or {} for part in ("model", "distill", "objective"))
    named = {"model.init_from": model.get("init_from"), "distill.teacher": distill.get("teacher")}
    if saved.get("init") == "encoder":
        named["encoder"] = saved.get("checkpoint") or saved.get("encoder")
    if objective.get("name") == "features" and objective.get("teacher") != "ema":
        named["objective.teacher"] = objective.get("teacher_checkpoint") or objective.get("teacher")
    return {setting: each for setting, each in named.items() if each}


def seen(dataset: ImageDataset, here: SourceConfig, learned: SourceConfig) -> int:
    """How many of these images an encoder was trained on with their labels.

    Args:
        here: where the images come from.
        learned: where the encoder's came from; see `learned_labels`.
    """
    if not same_place(here, learned):
        return 0
    train = load_image_datasets(learned)[0].labelled()
    if train is None or train.origin.split != dataset.origin.split:
        return 0
    train = train.choose(learned.train_images, learned.eval_seed)
    return len(np.intersect1d(positions(train), positions(dataset)))


def same_place(one: SourceConfig, other: SourceConfig) -> bool:
    """Whether two settings name the same dataset; a revision that is not named may be any."""
    names = {(each.name, str(Path(each.path or "").expanduser().resolve())) for each in (one, other)}
    revisions = {each.revision for each in (one, other)} - {None}
    return len(names) == 1 and len(revisions) < 2


def positions(dataset: ImageDataset) -> np.ndarray:
    """Where the images are in their split."""
    return np.arange(len(dataset)) if dataset.origin.indices is None else dataset.origin.indices


def refuse_seen(setting: str, encoder: str, data: SourceConfig, test: ImageDataset) -> None:
    """Raise UserError where what `setting` names, or it began from, was trained with labels of these test images."""
    for each in lineage(encoder):
        learned = learned_labels(each)
        known = seen(test, data, learned) if learned else 0
        if known:
            began = "" if each == encoder else f"builds on {each}, which "
            raise UserError(
                f"{setting} is {encoder}, which {began}was trained with the labels of {known} of these {len(test)} "
                f"test images; test on those that it held out:"
                f"{as_arguments(learned) or ' leave out all --data settings'}"
            )


def check_unseen(encoder: str, data: SourceConfig, train: ImageDataset, test: ImageDataset) -> None:
    """Refuse test images whose labels an encoder was trained with; warn of such training images.

    Raises:
        UserError: there are such test images.
    """
    refuse_seen("encoder", encoder, data, test)
    learned = filter(None, map(learned_labels, lineage(encoder)))
    if any(seen(train, data, each) for each in learned) and os.environ.get("RANK", "0") == "0":
        print(
            f"note: {encoder} was trained with labels of these training images: what is chosen on a part of them, "
            "such as a depth, a rate or a penalty, is chosen for images that it knows"
        )


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
    return {part: record(dataset, labels=True, retries=source.read_retries) for part, dataset in splits}
