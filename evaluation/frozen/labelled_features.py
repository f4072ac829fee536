"""Frozen features with their labels: checked, cut, saved and loaded.

N training images, M test images, D width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluation.metrics.outcomes import Outcomes
from evaluation.metrics.scoring import KINDS
from mpp.config import require
from mpp.data.dataset import has_label, names_by_number
from mpp.errors import NPZ_ERRORS, UserError
from mpp.runtime.files import complete
from mpp.runtime.messages import note
from mpp.runtime.randomness import Stream, permutation

DEV_SEED = 0
DEV = "dev"
"""Name of the part of the training images that choices are made on."""
DEV_FRACTION = 0.1
"""Its share where a probe has `test: false`, as in fine-tuning by default."""
ARRAY_NAMES = ("train_features", "train_labels", "test_features", "test_labels")
"""Names of the arrays in a file of features, in the order of `LabelledFeatures`."""
TEXT_NAMES = ("class_names", "test_images")
"""Names of arrays of text that a file may have besides."""


KIND_NAME = "kind"
"""Name of the array with the kind of label, which a file has where that is not one class an image."""


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
        """The same features with classes as int64, without images whose label is missing.

        Args:
            source: the file or the encoder that they come from, for messages.
        Raises:
            UserError: a probe would give nonsense.
        """
        check_split(source, "train", self.train, self.train_labels, self.kind)
        check_split(source, "test", self.test, self.test_labels, self.kind)
        train_width = self.train.shape[1]
        test_width = self.test.shape[1]
        if train_width != test_width:
            raise UserError(f"{source}: train_features and test_features are {train_width} and {test_width} wide")
        if self.kind == "class":
            return self._replace(
                train_labels=self.train_labels.astype(np.int64), test_labels=self.test_labels.astype(np.int64)
            )
        if self.train_labels.shape[1:] != self.test_labels.shape[1:]:
            classes = f"{self.train_labels.shape[1]} and {self.test_labels.shape[1]} classes"
            raise UserError(f"{source}: train_labels and test_labels have {classes}")
        return self.without_missing(source)

    def without_missing(self, source: str) -> "LabelledFeatures":
        """The images that have a label; a note counts the others."""
        known = [has_label(labels) for labels in (self.train_labels, self.test_labels)]
        missing = [int((~each).sum()) for each in known]
        if not any(missing):
            return self
        note(f"{source}: {missing[0]} training and {missing[1]} test images without a label are left out")
        of_train, of_test = (np.flatnonzero(each) for each in known)
        return self._replace(
            train=self.train[of_train],
            train_labels=self.train_labels[of_train],
            test=self.test[of_test],
            test_labels=self.test_labels[of_test],
            test_images=[self.test_images[index] for index in of_test] if len(self.test_images) else (),
        )

    def with_numbered_classes(self) -> tuple["LabelledFeatures", NDArray[np.int64]]:
        """The same features with classes numbered from 0 without gaps, in their order; and the labels (C,) of these.

        Labels in a file may be identifiers, far apart.
        """
        known = [labels[labels >= 0] for labels in (self.train_labels, self.test_labels)]
        classes = np.unique(np.concatenate(known))

        def number(labels: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.where(labels < 0, -1, np.searchsorted(classes, labels))

        numbered = self._replace(
            train_labels=number(self.train_labels),
            test_labels=number(self.test_labels),
            class_names=names_by_number(self.class_names, classes.tolist()),
        )
        return numbered, classes

    def outcomes(self, predicted: NDArray) -> Outcomes:
        """The outcomes of predictions (M, ...) of the test images; one class is numbered without gaps there.

        Raises:
            UserError: they are not one for each image; or no classes, of which the next one would be taken.
        """
        predicted = np.asarray(predicted)
        given = f"{predicted.dtype} of shape {predicted.shape}"
        key = "the array of an evaluation's predictions"
        require(predicted.shape[:1] == (len(self.test),), key, given, f"one for each of {len(self.test)} test images")
        if self.kind != "class":
            return Outcomes(self.kind, self.test_labels, predicted, self.class_names, self.test_images)
        numbered, classes = self.with_numbered_classes()
        are_classes = predicted.ndim == 1 and predicted.dtype.kind in "iu" and bool(np.isin(predicted, classes).all())
        require(are_classes, key, given, f"({len(self.test)},) whole numbers, each a class of the labels")
        predicted = np.searchsorted(classes, predicted)
        return Outcomes("class", numbered.test_labels, predicted, numbered.class_names, self.test_images)

    def dev_split(self) -> "LabelledFeatures":
        """The training features, a tenth of which is the test split: choices are made on it."""
        train, dev = cut_dev_split(len(self.train))
        return LabelledFeatures(
            self.train[train],
            self.train_labels[train],
            self.train[dev],
            self.train_labels[dev],
            self.class_names,
            kind=self.kind,
        )


def check_split(source: str, split: str, features: NDArray, labels: NDArray, kind: str) -> None:
    """Raise UserError if features and labels of a split do not fit together, or labels are not of their kind."""
    has_labels = labels.ndim == 1 or (labels.ndim == 2 and (split == "test" or kind == "several"))
    if features.ndim != 2 or not has_labels or len(features) != len(labels):
        shapes = f"{split}_features {features.shape} and {split}_labels {labels.shape}"
        raise UserError(f"{source}: {shapes} disagree")
    if len(labels) == 0:
        raise UserError(f"{source}: no labelled images in {split}")
    problem = KINDS[kind].problem(labels, split)
    if problem is not None:
        raise UserError(f"{source}: {problem}")
    if not has_label(labels).any():
        raise UserError(f"{source}: no labelled images in {split}")
    if not np.issubdtype(features.dtype, np.floating):
        raise UserError(f"{source}: {split}_features are {features.dtype}, not floating-point numbers")
    if not np.isfinite(features).all():
        raise UserError(f"{source}: {split}_features have values that are not finite")


def cut_dev_split(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of the training images that are learned from, and of the tenth that choices are made on.

    The cut is the same every time, drawn at random, not by class.

    Raises:
        UserError: none would be left to learn from.
    """
    allowed = "at least 2 to choose a depth or a rate on a part of them, and 3 to choose both"
    require(count > 1, "the number of training images", count, allowed)
    order = permutation(Stream.CUT, DEV_SEED, 1, count)
    dev_count = max(1, count // 10)
    return np.sort(order[dev_count:]), np.sort(order[:dev_count])


def save_features(path: Path, features: LabelledFeatures) -> None:
    """Write one depth's features as .npz, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, NDArray] = dict(zip(ARRAY_NAMES, features[: len(ARRAY_NAMES)], strict=True))
    arrays |= {} if features.kind == "class" else {KIND_NAME: np.array(features.kind)}
    for name in TEXT_NAMES:
        texts = getattr(features, name)
        if len(texts):
            arrays[name] = np.array(list(texts), str)
    with complete(path, shared=True) as partial, partial.open("wb") as file:  # numpy would add .npz to a name without
        np.savez(file, **arrays)


def load_features(path: Path) -> LabelledFeatures:
    """Load features and their labels; nothing in the file is executed.

    Raises:
        UserError: no such file, an array missing or pickled, shapes that disagree, values that are not finite.
    """
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array, not several by name")
        with arrays:
            missing = [name for name in ARRAY_NAMES if name not in arrays]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            texts = {name: load_texts(arrays, name) for name in TEXT_NAMES if name in arrays}
            kind = str(arrays[KIND_NAME]) if KIND_NAME in arrays else "class"
            if kind not in KINDS:
                raise ValueError(f"its kind of label is {kind}; it must be one of {', '.join(KINDS)}")
            features = LabelledFeatures(*(arrays[name] for name in ARRAY_NAMES), **texts, kind=kind)
    except NPZ_ERRORS as error:
        raise UserError(f"features is {path}, which cannot be read: {error}") from error
    return features.checked(str(path))


def load_texts(arrays: np.lib.npyio.NpzFile, name: str) -> list[str]:
    """An array of texts of a file of features; raises ValueError if it is none."""
    texts = arrays[name]
    if texts.ndim != 1 or texts.dtype.kind != "U":
        raise ValueError(f"{name} must be a list of texts")
    return texts.tolist()
