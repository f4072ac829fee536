"""The labelled images that evaluation learns from and tests on."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from accelerate import Accelerator

from evaluation.frozen.labelled_features import DEV, DEV_FRACTION
from evaluation.frozen.provenance import check_labels_unseen
from evaluation.frozen.run_images import (
    IMAGE_SETTINGS,
    LoadedSplits,
    find_run,
    holds_run_images,
    run_image_settings,
)
from evaluation.metrics.scoring import KINDS
from mpp.config import SourceConfig
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset
from mpp.data.identity import identify_images
from mpp.data.sources import load_image_datasets
from mpp.errors import UserError
from mpp.runtime.messages import note


class LabelledSplits(NamedTuple):
    """Labelled images to learn from and to evaluate on."""

    train: ImageDataset
    held_out: ImageDataset
    left_out: ImageDataset | None = None
    """Some of the training images that `data.train_images` leaves out; None: they were not asked for."""


def load_labelled(
    data: SourceConfig,
    accelerator: Accelerator,
    encoder: str = "",
    left_out_images: int = 0,
    loaded: LoadedSplits | None = None,
    on_dev: bool = False,
    task: str = "class",
    check_kind: Callable[[str], object] = lambda kind: None,
) -> LabelledSplits:
    """Load the labelled images of the training and the held-out split, and print which these are.

    Args:
        encoder: the encoder that is evaluated on them; empty: one that has learned nothing.
        left_out_images: maximum number of training images in `left_out`.
        on_dev: take a tenth of the training images, the dev split, instead of the held-out ones.
        task: kind of label, or auto.
        check_kind: called with the kind that was found; see `refuse_other_kinds`.
    Raises:
        UserError: there are none, or the encoder was trained with the labels of those that are held out.
    """
    with accelerator.main_process_first():
        all_train, held_out = (split.labelled() for split in load_image_datasets(data, loaded, task))
    splits = {"training": all_train} if on_dev else {"training": all_train, "held-out": held_out}
    if None in splits.values():
        lacking = " and ".join(name for name, split in splits.items() if split is None)
        ways = "name their column with data.label_column, their list with data.labels, or use a folder per class"
        raise UserError(f"the {lacking} images have no labels; {ways}")
    kind = all_train.label_kind
    check_kind(kind)
    if kind == "class" and all_train.labels.ndim > 1:
        raise UserError("training images have several labels each: learn them with --task several")

    train = all_train.choose(data.train_images, data.eval_seed)
    if on_dev:
        train, held_out = train.cut(DEV_FRACTION, data.eval_seed, DEV)
    check_labels_unseen(encoder, data, train, held_out)
    accelerator.print(
        f"{describe_source(data)}: {len(train)} labelled images to learn from{describe_share(encoder, data)}, "
        f"{len(held_out)} to evaluate on{', a tenth of the training images' if on_dev else ''}"
    )
    KINDS[kind].note_tested(train.labels, held_out.labels, train.class_names)
    if task == "auto" and kind == "number":
        note("the labels have fractions: task is number")
    if left_out_images == 0:
        return LabelledSplits(train, held_out)
    left_out = all_train.choose(left_out_images, data.eval_seed, after=len(train))
    return LabelledSplits(train, held_out, left_out)


def describe_learned(data: SourceConfig, loaded: LoadedSplits | None, task: str) -> dict[str, Any]:
    """The settings and the record of the training images, for a kept head; those of a dev split are among them.

    Args:
        task: kind of label, or auto.
    """
    all_train, _ = load_image_datasets(data, loaded, task, announce=False)
    return describe_training_images(data, all_train.labelled().choose(data.train_images, data.eval_seed))


def describe_training_images(data: SourceConfig, train: ImageDataset) -> dict[str, Any]:
    """The settings and the record of training images, for a kept head."""
    source = {name: getattr(data, name) for name in IMAGE_SETTINGS}
    return {"source": source, "train": identify_images(train, with_labels=False, retries=data.read_retries)}


def refuse_other_kinds(command: str, kinds: Sequence[str], kind: str) -> None:
    """Raise UserError for a kind of label that a command cannot learn.

    Args:
        kinds: that it can learn.
        kind: that the labels are of, or the setting `task`.
    """
    if kind not in kinds:
        ways = "mpp linear (protocol logistic), knn, finetune and supervised take all kinds"
        raise UserError(f"task is {kind}; it must be {' or '.join(kinds)} with {command}: {ways}")


def describe_share(encoder: str, data: SourceConfig) -> str:
    """A note for images of which the encoder saw a share, and all are taken here; "" otherwise."""
    run = find_run(encoder) if encoder else None
    if run is None or data.train_images is not None or not holds_run_images(data.path, run):
        return ""
    share = run_image_settings(run).get("train_images")
    if share is None:
        return ""
    return f" (all; the encoder was trained on {share} images: set --data.train_images to use as few)"
