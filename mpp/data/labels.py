"""Classes as numbers from 0, the same for all splits.

`class_encode_column` of `datasets` makes text of integers, numbers each split by itself, and knows no lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mpp.data.label_columns import LabelColumn, all_match, all_null, holds_lists, is_text
from mpp.errors import UserError

WHOLE_NUMBER = r"^[+-]?\d{1,18}(\.0*)?$"
NO_LABEL = -1


@dataclass(frozen=True)
class NumberedLabels:
    """Labels of several splits as numbers of classes, and the names of these."""

    parts: list[NDArray[np.int64] | None]
    """Of each split (n,), or (n, L) where an image has several; padded with -1. None: the split has no labels."""
    class_names: list[str]
    """Of the classes, by number: those of the first split with labels, then those that only others have."""
    classes: int
    """Number of classes that the first split with labels has, or declares."""


def number_labels(columns: Sequence[LabelColumn | None]) -> NumberedLabels:
    """Labels as numbers of classes, the same for all splits.

    Classes that the first split declares keep their numbers. Otherwise its classes are sorted, numbers as numbers, and
    numbered from 0, however far apart they are. Classes that only others have come after them.

    Args:
        columns: of the splits, training first; None: the split has no labels.
    Raises:
        UserError: some splits have names for their classes, and others numbers without.
    """
    known = [column for column in columns if column is not None]
    if not known:
        return NumberedLabels([None] * len(columns), [], 0)
    refuse_numbers_beside_names(known)
    known = share_declared_names(known)
    class_of_label = [column.classes() for column in known]
    if any(is_text(classes.type) for classes in class_of_label):
        class_of_label = share_whole_numbers([classes.cast(pa.string()) for classes in class_of_label])

    values: list[str] | list[int] = list(known[0].class_names or [])
    class_count = 0
    for classes in class_of_label:
        numbered = {*values}
        values += [value for value in sorted_classes(classes) if value not in numbered]
        if class_count == 0:
            class_count = len(values)

    parts: list[NDArray[np.int64] | None] = [None] * len(columns)
    positions = [position for position, column in enumerate(columns) if column is not None]
    for position, column, classes in zip(positions, known, class_of_label, strict=True):
        parts[position] = pad(column.values, to_numbers(classes, values))
    return NumberedLabels(parts, [str(value) for value in values], class_count)


def refuse_numbers_beside_names(columns: Sequence[LabelColumn]) -> None:
    """Raise UserError where some labels are numbers that have no names, and others are texts."""
    labelled = [column for column in columns if not column.is_empty]
    nameless = [column for column in labelled if column.class_names is None and not column.is_text]
    if nameless and any(column.is_text for column in labelled):
        problem = f"has numbers, such as {pc.max(nameless[0].flat)}, and the other split has names"
        raise UserError(f"the labels' column {nameless[0].name} {problem}; both must have names, or both numbers")


def share_declared_names(columns: list[LabelColumn]) -> list[LabelColumn]:
    """The columns with the names that one of them declares: numbers without names in the others are numbers of these.

    Columns of different declared names, or of texts, stay as they are.
    """
    declared = {tuple(column.class_names) for column in columns if column.class_names is not None}
    if len(declared) != 1:
        return columns
    names = [*declared.pop()]
    return [column if column.is_text else replace(column, class_names=names) for column in columns]


def share_whole_numbers(columns: list[pa.ChunkedArray]) -> list[pa.ChunkedArray]:
    """Texts, without the zeros of 1.0 where all of a split end so and another split has whole numbers without.

    pandas writes integers so where a cell of their column is blank.
    """
    values = [pc.unique(texts).drop_null() for texts in columns]
    if not any(all_match(texts, r"^[+-]?\d+$") for texts in values):
        return columns
    with_zeros = [all_match(texts, r"^[+-]?\d+\.0+$") for texts in values]
    return [
        pc.replace_substring_regex(texts, r"\.0+$", "") if has_zeros else texts
        for texts, has_zeros in zip(columns, with_zeros, strict=True)
    ]


def sorted_classes(labels: pa.ChunkedArray) -> list[str] | list[int]:
    """The classes among labels: texts in the order of the alphabet, and numbers, also where they are texts, by size."""
    values = pc.unique(labels).drop_null()
    if is_text(values.type) and all_match(values, WHOLE_NUMBER):
        return sorted(values.to_pylist(), key=lambda text: (int(text.partition(".")[0]), text))
    return sorted(values.to_pylist())


def to_numbers(labels: pa.ChunkedArray, classes: Sequence[str] | Sequence[int]) -> NDArray[np.int64]:
    """The number (n,) of each label in the list of classes; -1: no label."""
    if all_null(labels):
        return np.full(len(labels), NO_LABEL)
    numbers = pc.index_in(labels, pa.array(classes, labels.type))
    return numbers.cast(pa.int64()).fill_null(NO_LABEL).to_numpy()


def pad(labels: pa.ChunkedArray, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) or (n, L): the numbers of each image, as many as it has labels, then -1.

    Args:
        labels: a label or a list of labels for each image.
        numbers: of the labels of one image after the other.
    """
    if not holds_lists(labels):
        return numbers
    counts = pc.list_value_length(labels).fill_null(0).to_numpy()
    longest = max(1, counts.max(initial=0))
    padded = np.full((len(counts), longest), NO_LABEL)
    padded[np.arange(longest) < counts[:, None]] = numbers
    return padded if longest > 1 else padded[:, 0]
