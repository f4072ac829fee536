"""The images whose labels an encoder has learned: evaluation on such test images is refused."""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from timm import is_model

from evaluation.frozen.run_images import place, positions, run_folder, settings_of_run
from mpp.config import SourceConfig
from mpp.data.columns import is_encoded, read_encoded
from mpp.data.data_path import is_local
from mpp.data.dataset import ImageDataset
from mpp.data.identity import identify_images
from mpp.data.sources import image_arguments, load_image_datasets
from mpp.errors import ReadFailed, UnreadableImage, UserError
from mpp.models.descriptions import is_named
from mpp.runtime.messages import note
from mpp.training.run_folder import images_of, saved_settings

WITH_LABELS = {"head", "lrs"}  # settings of supervised training and of fine-tuning
COMPARED = 1000  # test images that are searched for among the training images of another place
MOST_SEARCHED = 200_000  # training images that are searched: to read the sizes of so many files takes some seconds
READ_AT_ONCE = 256  # images whose bytes are held in memory
DUPLICATES = 0.01  # share of the test images that may also be in another place, as duplicates


class Learned(NamedTuple):
    """The labelled images that an encoder was trained on."""

    source: SourceConfig
    """Where they come from."""
    run: Path
    """The run, whose data.json is their record."""


def learned_from(encoder: str) -> Learned | None:
    """The images whose labels an encoder was trained with; None: it had no labels, or that is unknown."""
    run = run_folder(encoder)
    if run is None or not WITH_LABELS & saved_settings(run).keys() or "contrast" in saved_settings(run):
        return None
    return Learned(settings_of_run(run), run)


def lineage(encoder: str) -> Iterator[str]:
    """The encoder, its run's initial weights and teachers, theirs, and so on: all that may have passed on labels."""
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
                note(f"{setting} of {run} is {each}, which is not here: whether it learned from labels is unknown")


def stands_on(run: Path) -> dict[str, str]:
    """The initial weights and teachers of a run: setting -> an encoder, or its file of weights."""
    saved = saved_settings(run)
    model, distill, objective = (saved.get(part) or {} for part in ("model", "distill", "objective"))
    named = {"model.init_from": model.get("init_from"), "distill.teacher": distill.get("teacher")}
    if saved.get("init") == "encoder":
        named["encoder"] = saved.get("checkpoint") or saved.get("encoder")
    if objective.get("name") == "features" and objective.get("teacher") != "ema":
        named["objective.teacher"] = objective.get("teacher_checkpoint") or objective.get("teacher")
    return {setting: each for setting, each in named.items() if each}


class Seen(NamedTuple):
    """The number of images that an encoder was trained on with their labels."""

    known: int
    looked_at: int
    """The number of images that were searched for."""
    source: SourceConfig
    """The settings by which the encoder's images are found now."""


def seen(dataset: ImageDataset, here: SourceConfig, learned: Learned) -> Seen:
    """The number of these images that an encoder was trained on with their labels.

    In the same place, and in a copy that has the same record (names, and the bytes of some files), an image is known by
    its position in its split. Elsewhere it is known by its bytes: up to `COMPARED` images of `dataset` are searched for
    among the training images, of which only files of the same sizes are read. Not found there: images that were encoded
    anew, arrays, and those of a training split of more than `MOST_SEARCHED` images, or of one that is not on this
    machine.

    Args:
        here: the source of `dataset`.
        learned: the labelled images of the encoder.
    """
    began = (images_of(learned.run) or {}).get("train", {})
    nothing = Seen(0, len(dataset), learned.source)
    if same_place(here, learned.source):
        source = learned.source
    elif began.get("files") is not None and began["files"] == identify_images(dataset, labels=False)["files"]:
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
    """The labelled images that a run learned from; None: none can be loaded."""
    try:
        train = load_image_datasets(source)[0].labelled()
    except UserError:  # gone, or changed
        return None
    return train and train.choose(source.train_images, source.eval_seed)


def is_cheap(path: str | None, began: dict[str, Any]) -> bool:
    """Whether training images are on this machine, and few enough to be searched."""
    return (path is None or is_local(path)) and began.get("images", 0) <= MOST_SEARCHED


def same_bytes(dataset: ImageDataset, train: ImageDataset) -> tuple[int, int]:
    """The number of images that have the bytes of one of `train`, and the number of images searched for."""
    if not all(is_encoded(each.rows.features[each.image_column]) for each in (dataset, train)):
        return 0, len(dataset)
    some = dataset.choose(COMPARED, 0)
    sizes, wanted = byte_counts(train), byte_counts(some)
    possible = np.isin(sizes, wanted) | (sizes < 0) | (wanted < 0).any()
    near = train.select(np.flatnonzero(possible))
    known = set(digests(near))
    return sum(digest in known for digest in digests(some)), len(some)


def byte_counts(dataset: ImageDataset) -> NDArray[np.int64]:
    """The size of each image file in bytes, (n,); -1: unknown."""
    rows = dataset.origin.rows.data.column(dataset.image_column)
    sizes = pc.binary_length(pc.struct_field(rows, "bytes")).cast("int64").fill_null(-1).to_numpy()
    sizes = sizes[positions(dataset)]
    for index in np.flatnonzero(sizes < 0).tolist():
        path = dataset.rows[index][dataset.image_column]["path"]
        sizes[index] = Path(path).stat().st_size if is_local(path) else -1
    return sizes


def digests(dataset: ImageDataset) -> Iterator[bytes]:
    """SHA-256 of each image's bytes, without those that cannot be read."""
    for block in dataset.rows.with_format("arrow").iter(READ_AT_ONCE):  # row by row takes ten times as long
        for cell in block.column(dataset.image_column).to_pylist():
            with suppress(UnreadableImage, ReadFailed):
                yield hashlib.sha256(read_encoded(cell)).digest()


def same_place(one: SourceConfig, other: SourceConfig) -> bool:
    """Whether two settings name the same dataset; a revision that is not named may be any."""
    names = {(each.name, place(each.path)) for each in (one, other)}
    revisions = {each.revision for each in (one, other)} - {None}
    return len(names) == 1 and len(revisions) < 2


def refuse_seen(setting: str, encoder: str, data: SourceConfig, test: ImageDataset) -> None:
    """Raise UserError where an encoder, or one that it builds on, was trained with labels of these test images.

    Up to `DUPLICATES` of the test images may have the bytes of training images: many datasets have such duplicates.

    Args:
        setting: the setting that names the encoder.
    """
    for each in lineage(encoder):
        learned = learned_from(each)
        found = seen(test, data, learned) if learned else None
        if found is None or found.known == 0:
            continue
        count = f"{found.known} of {'' if found.looked_at == len(test) else f'{found.looked_at} of '}these {len(test)}"
        began = "" if each == encoder else f"builds on {each}, which "
        by_position = same_place(data, found.source)
        if not by_position and found.known <= DUPLICATES * found.looked_at:
            note(f"{encoder} {began}was trained with the labels of {count} test images: duplicates")
            continue
        raise UserError(
            f"{setting} is {encoder}, which {began}was trained with the labels of {count} "
            f"test images; test on those that it held out:"
            f"{image_arguments(found.source) or ' leave out all --data settings'}"
        )


def check_unseen(encoder: str, data: SourceConfig, train: ImageDataset, test: ImageDataset) -> None:
    """Refuse test images whose labels an encoder was trained with; warn of such training images.

    Raises:
        UserError: there are such test images.
    """
    refuse_seen("encoder", encoder, data, test)
    learned = filter(None, map(learned_from, lineage(encoder)))
    if any(seen(train, data, each).known for each in learned):
        note(
            f"{encoder} was trained with labels of these training images: what is chosen on a part of them, "
            "such as a depth, a rate or a penalty, is chosen for images that it knows"
        )
