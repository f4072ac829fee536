"""Labelled images and their frozen features: loaded, extracted, checked, cut, saved.

N training images, M test images, D width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor

from evaluation.config import EmbedConfig, EncoderConfig, ExtractionConfig, ProbeDataConfig
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, open_frozen_encoder, resolve_depths
from evaluation.frozen.known_labels import check_labels_unseen
from evaluation.frozen.run_images import DEV, IMAGE_SETTINGS, LoadedSplits
from evaluation.metrics.scoring import Outcomes
from mpp.config import SourceConfig, require
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset, has_label, names_by_number
from mpp.data.identity import identify_images
from mpp.data.labels import LABEL_KINDS
from mpp.data.loader import fixed_view_batches
from mpp.data.overview import note_tested
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import deaths_explained
from mpp.errors import NPZ_ERRORS, UserError
from mpp.features.frozen import BASELINE_CELLS, extract
from mpp.runtime.files import complete
from mpp.runtime.messages import counted, note, progress_bar, shortened, warn
from mpp.runtime.processes import ahead_of_others
from mpp.runtime.randomness import Stream, permutation

DEV_FRACTION = 0.1
"""Of the training images, for `--test false`; choices (`depth dev`, a penalty) are made on another: `cut_dev_split`."""
DEFAULT_BATCH_SIZE = 64  # where data.batch_size is not set
MAX_IMAGES_NAMED = 20  # in a message on images that cannot be decoded
SPLITS = ("train", "test")
ARRAY_NAMES = ("train_features", "train_labels", "test_features", "test_labels")
"""Names of the arrays in a file of features, in the order of `LabelledFeatures`."""
LABELS = {
    "class": "integers from 0 and below 2**63",
    "several": "1 where an image is of a class, and 0 where not",
    "number": "finite floating-point numbers, one an image",
}
"""By kind; images without a label are left out of a file."""
TEXT_NAMES = ("class_names", "test_images", "kind")
"""Names of arrays of text that a file may have besides."""


# --- labelled images ---


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
    kinds: Sequence[str] = LABEL_KINDS,
) -> LabelledSplits:
    """Load the labelled images of the training and the held-out split, and print which these are.

    Args:
        encoder: the encoder that is evaluated on them; empty: one that has learned nothing.
        left_out_images: maximum number of training images in `left_out`.
        on_dev: take a tenth of the training images, the dev split, instead of the held-out ones.
        task: kind of label, or auto.
        kinds: of labels that are allowed.
    Raises:
        UserError: there are none, or the encoder was trained with the labels of those that are held out.
    """
    with ahead_of_others(accelerator.is_main_process):
        all_train, held_out = (split.labelled() for split in load_image_datasets(data, loaded, task))
    if all_train is None or (held_out is None and not on_dev):
        split = "training" if all_train is None else "held-out"
        ways = "name their column with data.label_column, their list with data.labels, or use a folder per class"
        raise UserError(f"the {split} images have no labels; {ways}")
    kind = all_train.label_kind
    require_kind(kind, kinds)
    if kind == "class" and all_train.labels.ndim > 1:
        raise UserError("training images have several labels each: learn them with --task several")

    train = all_train.to_train_on(data)
    if on_dev:
        train, held_out = train.cut(DEV_FRACTION, data.eval_seed, DEV)
    check_labels_unseen(encoder, data, train, held_out)
    accelerator.print(
        f"{describe_source(data)}: {len(train)} labelled images to learn from, "
        f"{len(held_out)} to evaluate on{', a tenth of the training images' if on_dev else ''}"
    )
    note_classes(kind, train.labels, held_out.labels, train.class_names)
    if task == "auto" and kind == "number":
        note("the labels have fractions: task is number")
    left_out = all_train.choose(left_out_images, data.eval_seed, after=len(train)) if left_out_images else None
    return LabelledSplits(train, held_out, left_out)


def require_kind(kind: str, kinds: Sequence[str]) -> None:
    """Raise UserError for a kind of label, or a setting `task`, that a command cannot learn."""
    ways = "mpp linear (protocol logistic), knn, finetune and supervised take all kinds"
    require(kind in ("auto", *kinds), "task", kind, f"{' or '.join(kinds)}: {ways}")


def note_classes(kind: str, train_labels: NDArray, test_labels: NDArray, names: Sequence[str]) -> None:
    """Note classes that are tested without being learned, or the other way round."""
    if kind == "class":
        note_tested(train_labels, test_labels, names)
    elif kind == "several":
        for split, labels in (("training", train_labels), ("test", test_labels)):
            missing = np.flatnonzero(~(labels == 1).any(0)).tolist()
            if missing:
                note(f"classes without a {split} image: {shortened(names_by_number(names, missing))}")


def describe_learned(data: SourceConfig, loaded: LoadedSplits | None, task: str) -> dict[str, Any]:
    """The settings and the record of the training images, for a kept head; those of a dev split are among them.

    Args:
        task: kind of label, or auto.
    """
    all_train, _ = load_image_datasets(data, loaded, task, announce=False)
    return describe_training_images(data, all_train.labelled().to_train_on(data))


def describe_training_images(data: SourceConfig, train: ImageDataset) -> dict[str, Any]:
    """The settings and the record of training images, for a kept head."""
    source = {name: getattr(data, name) for name in IMAGE_SETTINGS}
    return {"source": source, "train": identify_images(train, with_labels=False, retries=data.read_retries)}


# --- features ---


class LabelledFeatures(NamedTuple):
    """Frozen features of one depth and their labels."""

    train: NDArray[np.float32]  # (N, D)
    train_labels: NDArray  # (N, ...): see `ImageDataset.labels`; every image has one
    test: NDArray[np.float32]  # (M, D)
    test_labels: NDArray  # (M, ...); of one class also (M, L) of which any is right, padded with -1
    class_names: Sequence[str] = ()  # by number, as far as they are known
    test_images: Sequence[str] = ()  # (M,) names of the test images; empty: unknown
    kind: str = "class"  # of label

    def checked(self, source: str) -> "LabelledFeatures":
        """The same features with classes as int64.

        Args:
            source: the file or the encoder that they come from, for messages.
        Raises:
            UserError: a probe would give nonsense.
        """
        parts = {}
        for split in SPLITS:
            features, labels = getattr(self, split), getattr(self, f"{split}_labels")
            if self.kind == "class" and labels.dtype.kind in "iu":
                labels = labels.astype(np.int64)  # those that do not fit become negative, which is refused
            is_matrix = features.dtype.kind == "f" and features.shape == (len(labels), self.train.shape[-1])
            allowed = "finite floating-point numbers (images, width): as many as labels, and as wide in both splits"
            given = f"{features.dtype} {features.shape}"
            require(is_matrix and bool(np.isfinite(features).all()), f"{source}: {split}_features", given, allowed)
            problem = label_problem(self.kind, labels, split)
            if self.kind != "class" and labels.shape[1:] != self.train_labels.shape[1:]:
                problem = "train_labels and test_labels have other numbers of classes"
            if problem is not None:
                raise UserError(f"{source}: {problem}")
            parts[f"{split}_labels"] = labels
        return self._replace(**parts)

    def with_numbered_classes(self) -> tuple["LabelledFeatures", NDArray[np.int64]]:
        """The same features with classes numbered from 0 without gaps, in their order; and the labels (C,) of these.

        Labels in a file may be identifiers, far apart.
        """
        labels = {name: getattr(self, name) for name in ("train_labels", "test_labels")}
        classes = np.unique(np.concatenate([each[each >= 0] for each in labels.values()]))
        numbers = {name: np.where(each < 0, -1, np.searchsorted(classes, each)) for name, each in labels.items()}
        return self._replace(**numbers, class_names=names_by_number(self.class_names, classes.tolist())), classes

    def outcomes(self, predicted: NDArray) -> Outcomes:
        """The outcomes of predictions (M, ...) of the test images; one class is numbered without gaps there.

        Raises:
            UserError: they are not one for each image; or no classes, of which the next one would be taken.
        """
        predicted = np.asarray(predicted)
        given = f"{predicted.dtype} of shape {predicted.shape}"
        key = "the array of an evaluation's predictions"
        require(predicted.shape[:1] == (len(self.test),), key, given, f"one for each of {len(self.test)} test images")
        numbered = self
        if self.kind == "class":
            numbered, classes = self.with_numbered_classes()
            are_classes = (
                predicted.ndim == 1 and predicted.dtype.kind in "iu" and bool(np.isin(predicted, classes).all())
            )
            require(are_classes, key, given, f"({len(self.test)},) whole numbers, each a class of the labels")
            predicted = np.searchsorted(classes, predicted)
        else:
            shape = self.test_labels.shape
            require(predicted.shape == shape, key, given, f"numbers of shape {shape}, as the labels are")
        return Outcomes(self.kind, numbered.test_labels, predicted, numbered.class_names, self.test_images)

    def dev_split(self) -> "LabelledFeatures":
        """The training features, a tenth of which is the test split: choices are made on it."""
        train, dev = cut_dev_split(len(self.train))
        splits = self.train[train], self.train_labels[train], self.train[dev], self.train_labels[dev]
        return LabelledFeatures(*splits, self.class_names, kind=self.kind)


def label_problem(kind: str, labels: NDArray, split: str) -> str | None:
    """The problem with the labels of a split, `train` or `test`, in words; None: there is none."""
    are_numbers = labels.dtype.kind == "f"
    is_valid = {
        "class": not are_numbers and (labels.ndim == 1 or split == "test"),
        "several": labels.ndim == 2 and bool(np.isin(labels, (0, 1)).all()),
        "number": labels.ndim == 1 and are_numbers,
    }
    if len(labels) == 0 or not is_valid[kind] or not has_label(labels).all():
        return f"{split}_labels must be {LABELS[kind]}"
    is_constant = labels.min() == labels.max() and split == "train"
    return "all training images have the same label" if is_constant else None


def cut_dev_split(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of the training images that are learned from, and of the tenth that choices are made on.

    The cut is the same every time, drawn at random, not by class.

    Raises:
        UserError: none would be left to learn from.
    """
    allowed = "at least 2 to choose a depth or a rate on a part of them, and 3 to choose both"
    require(count > 1, "the number of training images", count, allowed)
    order = permutation(Stream.CUT, 0, 1, count)
    dev_count = max(1, count // 10)
    return np.sort(order[dev_count:]), np.sort(order[:dev_count])


def save_features(path: Path, features: LabelledFeatures) -> None:
    """Write one depth's features as .npz, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, NDArray] = dict(zip(ARRAY_NAMES, features, strict=False))
    arrays |= {name: np.array(getattr(features, name), str) for name in TEXT_NAMES}
    with complete(path, shared=True) as partial, partial.open("wb") as file:  # numpy would add .npz to a name without
        np.savez(file, **arrays)


def load_features(path: Path) -> LabelledFeatures:
    """Load features and their labels; nothing in the file is executed.

    Raises:
        UserError: no such file, an array missing or pickled, shapes that disagree, values that are not finite.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            texts = {name: arrays[name].tolist() for name in TEXT_NAMES if name in arrays}
            features = LabelledFeatures(*(arrays[name] for name in ARRAY_NAMES), **texts)
            require(features.kind in LABELS, "its kind of label", features.kind, f"one of {', '.join(LABELS)}")
    except (*NPZ_ERRORS, AttributeError, TypeError) as error:  # the last two: of a single array
        raise UserError(f"features is {path}, which cannot be read: {error}") from error
    return features.checked(str(path))


# --- extraction ---


class RecordedBatches:
    """Batches of a split, and a record of the images that could not be decoded, which others replace.

    Args:
        split: name of the split, for messages.
        strict: raise UserError if there are such images, after all batches are read so that it names all of them.
    """

    def __init__(self, batches: Iterable[Batch], split: str, strict: bool = False):
        self.batches, self.split, self.strict = batches, split, strict
        self.indices: list[int] = []
        """Indices of the images that the batches hold; of a replaced image, that of another one."""
        self.unreadable: list[str] = []
        """Names of the images that could not be decoded, and the reasons."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.indices += batch.indices.tolist()
            self.unreadable += batch.unreadable
            yield batch
        if self.strict and self.unreadable:
            needed = "with --strict true a probe needs all images: replace these with intact copies, or remove them"
            raise UserError(f"{shortened(self.unreadable, MAX_IMAGES_NAMED)} ({self.split}); {needed}")


class SplitFeatures(NamedTuple):
    """Features and labels of a split, with a row for each image that can be decoded."""

    by_depth: list[NDArray]  # empty except on the main process
    labels: NDArray  # empty except on the main process
    kept: NDArray[np.int64]  # indices of these images in the split
    unreadable: list[str]  # names of the others, and the reasons


def extract_split(
    views: ViewDataset,
    encode: Callable[[Tensor], list[Tensor]],
    accelerator: Accelerator,
    strict: bool,
    progress: str,
) -> SplitFeatures:
    """Extract features of the images that can be decoded, by all processes: see `extract`.

    Args:
        views: the images of a split as an encoder takes them.
        encode: images (B, C, H, W) on the device to features (B, D), for each depth.
        progress: name of the progress bar.
    Raises:
        UserError: no image can be decoded, or one cannot and `strict` is set.
    """
    count = len(views.dataset)
    rank, processes = accelerator.process_index, accelerator.num_processes
    loader = fixed_view_batches(views, views.data.batch_size or DEFAULT_BATCH_SIZE, processes, rank)
    bar = progress_bar(loader, desc=progress, disable=not accelerator.is_main_process)
    batches = RecordedBatches(bar, views.dataset.split, strict)
    features, labels = extract(batches, encode, count, accelerator)
    requested = np.arange(rank, count, processes)
    replaced = gather_object(requested[requested != np.array(batches.indices, np.int64)].tolist())
    unreadable = sorted(set(gather_object(batches.unreadable)))
    kept = np.setdiff1d(np.arange(count), np.array(replaced, np.int64))
    if len(kept) == 0:
        raise UserError(f"none of the {count} images of {views.dataset.split} can be decoded, such as {unreadable[0]}")
    *by_depth, labels = [each.numpy() for each in (*features, labels)]
    if replaced and accelerator.is_main_process:
        *by_depth, labels = [each[kept] for each in (*by_depth, labels)]
    return SplitFeatures(by_depth, labels, kept, unreadable)


def warn_left_out(unreadable: Sequence[str]) -> None:
    """Name the images that a probe leaves out, once for all probes of the same images."""
    if unreadable:
        count, named = counted(len(unreadable), "image"), shortened([*unreadable], MAX_IMAGES_NAMED)
        warn(f"left out: {count} that cannot be decoded (--strict true refuses such images): {named}")


def views_for(encoder: FrozenEncoder, dataset: ImageDataset, data: ProbeDataConfig) -> ViewDataset:
    """The images as an encoder takes them: its input size and, unless `data` sets another, its centre crop."""
    data = replace(data, eval_crop=data.eval_crop or encoder.crop_pct)
    return ViewDataset(dataset, data, encoder.img_size)


class ExtractedFeatures(NamedTuple):
    """Features of the labelled images."""

    by_depth: dict[int, LabelledFeatures]  # empty except on the main process
    left_out: dict[str, int]  # numbers of images that cannot be decoded: train, and test or dev
    input: dict[str, Any] | None = None  # of the encoder: see HeadDescription; None: it is a file, or a baseline
    baselines: Mapping[str, dict[int, LabelledFeatures]] = {}  # by name, as `by_depth`


def open_extraction(
    frozen: EncoderConfig, data: ProbeDataConfig, how: ExtractionConfig | EmbedConfig, accelerator: Accelerator
) -> tuple[FrozenEncoder | ColorBaseline, list[int], Callable[[Tensor], list[Tensor]]]:
    """The encoder on its device, the depths that `how.depth` means, and images to features at these depths.

    Raises:
        UserError: no such encoder or depth, or it takes other images.
    """
    encoder = open_frozen_encoder(frozen, data.channels).to(accelerator.device)
    depths = resolve_depths(how.depth, len(encoder.stages))
    return encoder, depths, partial(encoder, representation=how.representation, depths=depths)


def open_baselines(
    encoder: FrozenEncoder | ColorBaseline,
    frozen: EncoderConfig,
    data: ProbeDataConfig,
    how: ExtractionConfig,
    accelerator: Accelerator,
) -> dict[str, tuple[list[int], Callable[[Tensor], list[Tensor]]]]:
    """An encoder's baselines by name: depths, and images (as the encoder takes them) to features at these."""
    if not isinstance(encoder, FrozenEncoder):
        return {}
    baselines: dict[str, Any] = {}
    if not frozen.random:
        _, *baselines["random weights"] = open_extraction(replace(frozen, random=True), data, how, accelerator)
    baselines["pixels"] = [0], lambda images: [F.adaptive_avg_pool2d(images.float() / 255, BASELINE_CELLS).flatten(1)]
    return baselines


def extract_labelled_features(
    frozen: EncoderConfig,
    data: ProbeDataConfig,
    extraction: ExtractionConfig,
    accelerator: Accelerator,
    loaded: LoadedSplits | None = None,
    on_dev: bool = False,
    kinds: Sequence[str] = LABEL_KINDS,
    baselines: bool = False,
) -> ExtractedFeatures:
    """Extract features of the labelled images at the depths that `extraction.depth` means.

    Args:
        on_dev, kinds: see `load_labelled`.
        baselines: extract those of baselines, too, from the same decoded images.
    Raises:
        UserError: no such encoder or depth, no such images, or it takes others.
    """
    encoder, depths, encode = open_extraction(frozen, data, extraction, accelerator)
    learned, tested, _ = load_labelled(data, accelerator, frozen.weights, 0, loaded, on_dev, extraction.task, kinds)
    encoders = {"": (depths, encode)}  # whose name may be that of a baseline
    if baselines:
        encoders |= open_baselines(encoder, frozen, data, extraction, accelerator)

    def encode_by_all(images: Tensor) -> list[Tensor]:
        return [features for _, encode_by_one in encoders.values() for features in encode_by_one(images)]

    with deaths_explained():
        train, test = (
            extract_split(views_for(encoder, split, data), encode_by_all, accelerator, extraction.strict, "features")
            for split in (learned, tested)
        )
    left_out = {"train": len(train.unreadable), DEV if on_dev else "test": len(test.unreadable)}
    if not accelerator.is_main_process:
        return ExtractedFeatures({}, left_out)
    warn_left_out((*train.unreadable, *test.unreadable))
    about = learned.class_names, np.array(tested.image_names())[test.kept].tolist(), learned.label_kind
    by_name: dict[str, dict[int, LabelledFeatures]] = {name: {} for name in encoders}
    places = [(name, depth) for name, (depths_of_one, _) in encoders.items() for depth in depths_of_one]
    for (name, depth), of_train, of_test in zip(places, train.by_depth, test.by_depth, strict=True):
        features = LabelledFeatures(of_train, train.labels, of_test, test.labels, *about)
        by_name[name][depth] = features.checked(name or frozen.encoder)
    return ExtractedFeatures(by_name.pop(""), left_out, describe_input(encoder, data, accelerator), by_name)


def describe_input(
    encoder: FrozenEncoder | ColorBaseline, data: ProbeDataConfig, accelerator: Accelerator
) -> dict[str, Any] | None:
    """Form of an encoder's input, and the precision that it computes in; None: of a colour baseline."""
    if not isinstance(encoder, FrozenEncoder):
        return None
    return encoder.describe_input(data) | {"precision": describe_precision(accelerator)}


def describe_precision(accelerator: Accelerator) -> str:
    """The precision that encoders compute in: bf16 or fp32."""
    return "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
