"""An encoder's own images: a run folder says which images it was trained on, and evaluation takes them.

Numbers on other images than the run's, or on test images whose labels the encoder has seen, are the mistakes that this
is against.
"""

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from timm import is_model

from evaluation.config import EncoderConfig, WhichEncoderConfig
from mpp.config import HOW_READ, SourceConfig, refuse_idle, sides
from mpp.data.dataset import ImageDataset, encoded_bytes, is_encoded
from mpp.data.hub import is_local, is_url, may_be_of_the_hub, of_the_hub
from mpp.data.record import record, short_digest
from mpp.data.shards import load_streamed
from mpp.data.sources import as_arguments, load_image_datasets
from mpp.errors import ReadFailed, UnreadableImage, UserError
from mpp.models.descriptions import how_read, is_named
from mpp.runtime.parsing import as_words, files_first, read
from mpp.runtime.weights import BEST, run_of
from mpp.training.run_folder import changed_images, commit_begun_with, images_of, moved_along, saved_settings

ConfigT = TypeVar("ConfigT")
HOW_SHOWN = ("flip", "eval_crop")  # in fine-tuning, which has these settings
OF_THE_IMAGES = [field.name for field in dataclasses.fields(SourceConfig) if not field.metadata.get("operational")]
WITH_LABELS = {"head", "lrs"}  # settings of supervised training and of fine-tuning
COMPARED = 1000  # test images that are looked for among the training images of another place
MOST_SEARCHED = 200_000  # training images that are looked through: their sizes take some seconds
READ_AT_ONCE = 256  # images whose bytes are held in memory
DUPLICATES = 0.01  # share of the test images, up to which those that are found in another place may be duplicates


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
    of_encoder = images_of_run(run) if run else [*how_read(config.encoder).items()] if named else []
    images = [(name, value) for name, value in of_encoder if not named or name in HOW_READ]
    if moved:
        known = dict(images)
        images = [*(known | {"labels": moved_along(known.get("labels"), known["path"], config.data.path)}).items()]
    if not images or of_features:
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


def refuse_other_images(run: Path) -> None:
    """Raise UserError where a run's images are gone, or are no longer those that it began with.

    Of the hub's the commit says which they are. Where several processes evaluate, the first one looks.
    """
    began, path = images_of(run), dict(images_of_run(run)).get("path")
    if began is None or os.environ.get("RANK", "0") != "0":
        return
    of_a_commit = commit_begun_with(run) is not None and may_be_of_the_hub(path)
    where = path if path is None or not may_be_of_the_hub(path) else Path.cwd() / path
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
    """The same, where the images of a command are those of its encoder's run, at their place."""
    run = run_folder(config.encoder)
    if run and place(config.data.path) == place(dict(images_of_run(run)).get("path")):
        refuse_other_images(run)


@lru_cache
def moved_to(run: Path, path: str | None) -> bool:
    """Whether `path` has the images of a run that are no longer where they were; if others, that is said."""
    own = dict(images_of_run(run)).get("path")
    if own is None or not Path(own).is_absolute() or is_local(own) or not is_local(path) or images_of(run) is None:
        return False
    settings = settings_of_run(run)
    try:
        changed = changed_images(run, replace(settings, path=path, labels=moved_along(settings.labels, own, path)))
    except UserError as error:  # no such split or column
        changed = [str(error)]
    if changed and os.environ.get("RANK", "0") == "0":
        gone = f"the images of {run} were at {own}, which is gone"
        print(f"note: {gone}; those at {path} are others: {'; '.join(changed)}", file=sys.stderr)
    return not changed


def settings_of_run(run: Path) -> SourceConfig:
    """Where a run's images come from."""
    return SourceConfig(**dict(images_of_run(run)))


def is_own(run: Path | None, path: str | None) -> bool:
    """Whether `path` is where a run's images are, or were before they were moved there."""
    if run is None:
        return False
    own = dict(images_of_run(run)).get("path")
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


class Learned(NamedTuple):
    """The labelled images that an encoder was trained on."""

    source: SourceConfig
    """Where they come from."""
    run: Path
    """The run, whose data.json says which they are."""


def learned_labels(encoder: str) -> Learned | None:
    """The images whose labels an encoder was trained with; None: with no labels, or nothing says so."""
    run = run_folder(encoder)
    if run is None or not WITH_LABELS & saved_settings(run).keys() or "contrast" in saved_settings(run):
        return None
    return Learned(settings_of_run(run), run)


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


class Seen(NamedTuple):
    """How many images an encoder was trained on with their labels."""

    known: int
    looked_at: int
    """Of how many."""
    source: SourceConfig
    """Where the encoder's images come from, by settings that find them now."""


def seen(dataset: ImageDataset, here: SourceConfig, learned: Learned) -> Seen:
    """How many of these images an encoder was trained on with their labels.

    In the same place, and in a copy that has the same record (names, and the bytes of some files), an image is known by
    its position in its split. Elsewhere it is known by its bytes: so many images of `dataset` (see `COMPARED`) are
    looked for among the training images, of which those with as many bytes are read. What is not found there: images
    that were encoded anew, arrays, those of a training split of more than `MOST_SEARCHED` images, or of one that is
    neither here nor, in its entirety, the same as this one.

    Args:
        here: where the images come from.
        learned: what the encoder learned from.
    """
    began = (images_of(learned.run) or {}).get("train", {})
    nothing = Seen(0, len(dataset), learned.source)
    if same_place(here, learned.source):
        source = learned.source
    elif began.get("files") is not None and began["files"] == record(dataset, labels=False)["files"]:
        source = replace(learned.source, path=here.path, name=here.name, revision=here.revision)
    elif is_cheap(learned.source.path, began):
        train = training_images(learned.source)
        return nothing if train is None else Seen(*same_bytes(dataset, train), learned.source)
    else:
        return nothing
    train = training_images(source)
    if train is None or train.origin.split != dataset.origin.split:
        return nothing
    return Seen(len(np.intersect1d(positions(train), positions(dataset))), len(dataset), source)


def training_images(source: SourceConfig) -> ImageDataset | None:
    """The labelled images that a run learned from; None: there are none here."""
    try:
        train = load_image_datasets(source)[0].labelled()
    except UserError:  # gone, or changed
        return None
    return train and train.choose(source.train_images, source.eval_seed)


def is_cheap(path: str | None, began: dict[str, Any]) -> bool:
    """Whether training images are here, and few enough to be looked through."""
    return (path is None or is_local(path)) and began.get("images", 0) <= MOST_SEARCHED


def same_bytes(dataset: ImageDataset, train: ImageDataset) -> tuple[int, int]:
    """How many images have the bytes of one of `train`, and how many were looked at."""
    if not all(is_encoded(each.rows.features[each.image_column]) for each in (dataset, train)):
        return 0, len(dataset)
    some = dataset.choose(COMPARED, 0)
    sizes, wanted = byte_counts(train), byte_counts(some)
    possible = np.isin(sizes, wanted) | (sizes < 0) | (wanted < 0).any()
    near = train.select(np.flatnonzero(possible))
    known = set(digests(near))
    return sum(digest in known for digest in digests(some)), len(some)


def byte_counts(dataset: ImageDataset) -> NDArray[np.int64]:
    """How many bytes each image file has, (n,); -1: nobody knows."""
    rows = dataset.origin.rows.data.column(dataset.image_column)
    sizes = pc.binary_length(pc.struct_field(rows, "bytes")).cast("int64").fill_null(-1).to_numpy()
    sizes = sizes[positions(dataset)]
    for index in np.flatnonzero(sizes < 0).tolist():
        path = dataset.rows[index][dataset.image_column]["path"]
        sizes[index] = Path(path).stat().st_size if is_local(path) else -1
    return sizes


def digests(dataset: ImageDataset) -> Iterator[bytes]:
    """SHA-256 of each image's bytes; nothing of those that cannot be read."""
    for block in dataset.rows.with_format("arrow").iter(READ_AT_ONCE):  # row by row takes ten times as long
        for cell in block.column(dataset.image_column).to_pylist():
            with suppress(UnreadableImage, ReadFailed):
                yield hashlib.sha256(encoded_bytes(cell)).digest()


def same_place(one: SourceConfig, other: SourceConfig) -> bool:
    """Whether two settings name the same dataset; a revision that is not named may be any."""
    names = {(each.name, place(each.path)) for each in (one, other)}
    revisions = {each.revision for each in (one, other)} - {None}
    return len(names) == 1 and len(revisions) < 2


def place(path: str | None) -> str | None:
    """A local path without links and relative parts; None: the package's birds."""
    return path if path is None or is_url(path) else str(Path(path).expanduser().resolve())


def positions(dataset: ImageDataset) -> np.ndarray:
    """Where the images are in their split."""
    return np.arange(len(dataset)) if dataset.origin.indices is None else dataset.origin.indices


def refuse_seen(setting: str, encoder: str, data: SourceConfig, test: ImageDataset) -> None:
    """Raise UserError where what `setting` names, or it began from, was trained with labels of these test images.

    Up to a hundredth of images with the bytes of training images is no reason: sets have such duplicates.
    """
    for each in lineage(encoder):
        learned = learned_labels(each)
        found = seen(test, data, learned) if learned else None
        if found is None or found.known == 0:
            continue
        count = f"{found.known} of {'' if found.looked_at == len(test) else f'{found.looked_at} of '}these {len(test)}"
        began = "" if each == encoder else f"builds on {each}, which "
        by_position = same_place(data, found.source)
        if not by_position and found.known <= DUPLICATES * found.looked_at:
            if os.environ.get("RANK", "0") == "0":
                print(f"note: {encoder} {began}was trained with the labels of {count} test images: duplicates")
            continue
        raise UserError(
            f"{setting} is {encoder}, which {began}was trained with the labels of {count} "
            f"test images; test on those that it held out:"
            f"{as_arguments(found.source) or ' leave out all --data settings'}"
        )


def check_unseen(encoder: str, data: SourceConfig, train: ImageDataset, test: ImageDataset) -> None:
    """Refuse test images whose labels an encoder was trained with; warn of such training images.

    Raises:
        UserError: there are such test images.
    """
    refuse_seen("encoder", encoder, data, test)
    learned = filter(None, map(learned_labels, lineage(encoder)))
    if any(seen(train, data, each).known for each in learned) and os.environ.get("RANK", "0") == "0":
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
