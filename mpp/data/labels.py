"""Labels of images: a column of classes, by number or by name, as numbers from 0.

They stay arrow's and numpy's all the way: 14 million Python lists would take gigabytes in every process. The library's
`class_encode_column` makes text of integers, numbers each split by itself, and knows no lists.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mpp.errors import UserError
from mpp.runtime.messages import note

NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?\s*$"
WHOLE = r"^[+-]?\d{1,18}(\.0*)?$"


def find_label_column(
    column: str | None, features: datasets.Features, source: str, key: str = "data.label_column"
) -> str | None:
    """The column of the labels: the named one, or `label`; None where there is none.

    Args:
        column: named by the user.
        source, key: the dataset and the setting, for the message.
    """
    if column is not None and column not in features:
        raise UserError(f"{key} is {column}; {source} has {', '.join(features)}")
    return next((name for name in (column, "label") if name in features), None)


@dataclass(frozen=True)
class Labels:
    """The labels of some images, as their column has them."""

    column: str
    values: pa.ChunkedArray
    names: list[str] | None
    """Of the classes, by number, where the dataset declares them."""

    @property
    def each(self) -> pa.ChunkedArray:
        """The labels of one image after the other."""
        return one_by_one(self.values)

    @property
    def is_empty(self) -> bool:
        """Whether no image has a label."""
        return self.each.null_count == len(self.each)

    def spelled(self) -> pa.ChunkedArray:
        """The labels as they are told apart: texts, or integers that have no names. Null: no label."""
        each = self.each
        if self.is_empty:
            return pa.chunked_array([pa.nulls(len(each), pa.string())])
        if is_text(each.type):
            texts = each.cast(pa.string())
            blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0)
            return pc.if_else(blank, pa.scalar(None, pa.string()), texts)
        if pa.types.is_boolean(each.type):
            each = each.cast(pa.int8())
        if not pa.types.is_unsigned_integer(each.type):
            self.note_negative(each)
            each = pc.if_else(pc.less(each, 0), pa.scalar(None, each.type), each)
        try:
            numbers = each.cast(pa.int64())
        except pa.ArrowInvalid:  # above 2**63
            return each.cast(pa.string())
        return numbers if self.names is None else named(numbers, self.names)

    def note_negative(self, numbers: pa.ChunkedArray) -> None:
        """Say how many images have a negative number of a class that nothing declares."""
        negative = 0 if self.names is not None else pc.sum(pc.less(numbers, 0)).as_py()
        if negative:
            what = f"{negative} labels in the column {self.column} are negative numbers"
            note(f"{what}: no labels, as datasets of the hub have it; as text, or in a list, they are classes")


@dataclass(frozen=True)
class Numbered:
    """Labels as numbers of classes, and what these stand for."""

    parts: list[NDArray[np.int64] | None]
    """Of each part (n,), or (n, L) where some image has several; padded with -1. None: it has no labels."""
    names: list[str]
    """Of the classes, by number: those of the first part, then those that only others have."""
    classes: int
    """How many the first part has, or declares."""


def read_labels(
    rows: datasets.Dataset, column: str | None, source: str, key: str = "data.label_column"
) -> Labels | None:
    """The labels of each image: none, one, or (where the column holds lists) several. They stay where the rows are.

    Args:
        column, source, key: see `find_label_column`.
    Returns:
        None: there is no such column, or the column `label`, which no setting names, holds no classes.
    Raises:
        UserError: the named column holds no classes.
    """
    name = find_label_column(column, rows.features, source, key)
    if name is None:
        return None
    labels = whole_numbers(rows.select_columns([name]).with_format("arrow")[:].column(0))
    feature = rows.features[name]
    if holds_classes(labels) and not holds_fractions(labels):
        while hasattr(feature, "feature"):  # a list of what it holds
            feature = feature.feature
        return Labels(name, labels, getattr(feature, "names", None))
    what = "numbers with fractions" if holds_fractions(labels) else str(feature)
    if column is None:
        note(f"the column {name} of {source} holds no classes but {what}; it is not used")
        return None
    raise UserError(f"{key} is {column}, which holds no classes but {what}")


def whole_numbers(labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """Floating-point labels as integers, where all are whole: so pandas writes numbers with blanks between them."""
    if not pa.types.is_floating(labels.type):
        return labels
    with suppress(pa.ArrowInvalid):
        return pc.if_else(pc.is_nan(labels), pa.scalar(None, labels.type), labels).cast(pa.int64())
    return labels


def holds_lists(labels: pa.ChunkedArray) -> bool:
    """Whether an image may have several labels."""
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(kind(labels.type) for kind in kinds)


def is_text(kind: pa.DataType) -> bool:
    """Whether labels are texts, not numbers."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def one_by_one(labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """The labels of one image after the other."""
    return pc.list_flatten(labels) if holds_lists(labels) else labels


def holds_classes(labels: pa.ChunkedArray) -> bool:
    """Whether each label is an integer or a text; an image may have none, but no list has a hole."""
    each = one_by_one(labels)
    if holds_lists(labels) and each.null_count:
        return False
    kinds = (pa.types.is_integer, pa.types.is_boolean, is_text)
    return any(kind(each.type) for kind in kinds) or each.null_count == len(each)


def holds_fractions(labels: pa.ChunkedArray) -> bool:
    """Whether labels are numbers that are not all whole: a measure, no class. Text may be numbers, too."""
    each = one_by_one(labels)
    if pa.types.is_floating(each.type):
        return each.null_count < len(each)
    if not is_text(each.type):
        return False
    texts = pc.unique(each).cast(pa.string()).drop_null()
    texts = texts.filter(pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0))
    if len(texts) == 0 or not pc.all(pc.match_substring_regex(texts, NUMBER)).as_py():
        return False
    return any(not float(text).is_integer() for text in texts.to_pylist())


def number_labels(parts: Sequence[Labels | None]) -> Numbered:
    """Labels as numbers of classes, the same for all parts.

    Classes that the first part declares keep their numbers. Otherwise its classes are sorted, numbers as numbers, and
    numbered from 0, however far apart they are. Classes that only others have come after them.

    Args:
        parts: the training images first.
    Raises:
        UserError: some parts have names for their classes, and others numbers without.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return Numbered([None] * len(parts), [], 0)
    refuse_numbers_beside_names(known)
    declared = {tuple(part.names) for part in known if part.names is not None}
    if len(declared) == 1:  # numbers without names are numbers of these
        names = [*declared.pop()]
        parts = [part and (part if is_text(part.each.type) else replace(part, names=names)) for part in parts]
        known = [part for part in parts if part is not None]
    spelled = {id(part): part.spelled() for part in known}
    if any(is_text(labels.type) for labels in spelled.values()):
        spelled = {key: labels.cast(pa.string()) for key, labels in spelled.items()}
    values = list(known[0].names or [])
    classes = 0
    for part in known:
        seen = {*values}
        values += [value for value in in_order(spelled[id(part)]) if value not in seen]
        classes = classes or len(values)
    numbered = [None if part is None else pad(part.values, as_numbers(spelled[id(part)], values)) for part in parts]
    return Numbered(numbered, [str(value) for value in values], classes)


def refuse_numbers_beside_names(known: Sequence[Labels]) -> None:
    """Raise UserError where some labels are numbers that have no names, and others are texts."""
    texts = [part for part in known if not part.is_empty and is_text(part.each.type)]
    numbers = [part for part in known if not part.is_empty and part.names is None and not is_text(part.each.type)]
    if texts and numbers:
        said = f"has numbers, such as {pc.max(numbers[0].each)}, and the other split has names"
        raise UserError(f"the labels' column {numbers[0].column} {said}; both must have names, or both numbers")


def named(numbers: pa.ChunkedArray, names: Sequence[str]) -> pa.ChunkedArray:
    """Numbers as the names of classes; one that has no name is its own."""
    known = pc.less(numbers, len(names))
    of_names = pa.array(names or [""], pa.string()).take(pc.if_else(known, numbers, 0).combine_chunks())
    return pa.chunked_array([pc.if_else(known.combine_chunks(), of_names, numbers.cast(pa.string()).combine_chunks())])


def in_order(labels: pa.ChunkedArray) -> list[str] | list[int]:
    """The classes among labels: texts in the order of the alphabet, and numbers, also where they are texts, by size."""
    values = pc.unique(labels).drop_null()
    if is_text(values.type) and len(values) and pc.all(pc.match_substring_regex(values, WHOLE)).as_py():
        return sorted(values.to_pylist(), key=lambda text: (int(text.partition(".")[0]), text))
    return sorted(values.to_pylist())


def as_numbers(labels: pa.ChunkedArray, values: Sequence[str] | Sequence[int]) -> NDArray[np.int64]:
    """Class numbers (n,) of single labels; -1: none."""
    if labels.null_count == len(labels):
        return np.full(len(labels), -1)
    numbers = pc.index_in(labels, pa.array(values, labels.type))
    return numbers.cast(pa.int64()).fill_null(-1).to_numpy()


def pad(labels: pa.ChunkedArray, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) or (n, L): the numbers of each image, as many as it has labels, then -1."""
    if not holds_lists(labels):
        return numbers
    counts = pc.list_value_length(labels).fill_null(0).to_numpy()
    padded = np.full((len(counts), max(1, counts.max(initial=0))), -1)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = numbers
    return padded if padded.shape[1] > 1 else padded[:, 0]
