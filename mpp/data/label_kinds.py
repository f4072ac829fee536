"""Kinds of labels as columns hold them: one class an image, several classes, or a number.

Each becomes an array with a row for each image, in which a missing label differs from every other one.
n images, C classes.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mpp.data.label_columns import (
    MARKS,
    FoundColumn,
    LabelColumn,
    flatten_lists,
    holds_classes,
    holds_fractions,
    holds_lists,
    holds_marks,
    is_blank,
    is_text,
    null_where,
    read_labels,
    without_fractions,
)
from mpp.data.labels import NO_LABEL, NumberedLabels, number_labels
from mpp.errors import UserError
from mpp.runtime.messages import note, shortened

SEPARATOR = ";"
"""Between the classes of an image, where a column holds text."""
OTHER_SEPARATOR = re.compile("[|,]")
"""Characters that other programs write between the classes of an image."""
AUTO = "auto"


class LabelReader(NamedTuple):
    """The functions that read one kind of label."""

    read: Callable[[FoundColumn], LabelColumn | None]
    """As `read_labels`."""
    convert: Callable[[Sequence[LabelColumn | None]], NumberedLabels]
    """The columns of all splits, training first, to arrays: as `number_labels`."""


def find_label_kind(kind: str, column: FoundColumn | None) -> str:
    """The kind of label of some images; of `auto` that is numbers where these have fractions, or else classes.

    Args:
        kind: auto, or a key of `LABEL_READERS`.
        column: of the training split; None: it has none.
    """
    if kind != AUTO:
        return kind
    return "number" if column is not None and holds_fractions(without_fractions(column.values)) else "class"


def read_several(column: FoundColumn) -> LabelColumn:
    """The classes of each image: a list of them, or text with `;` between them.

    Null, or a blank text, is a missing label; an empty list, or a text of only `;`, is an image of no class.

    Raises:
        UserError: the column holds something else.
    """
    note_other_separators(column.name, column.values)
    labels = split_texts(without_fractions(column.values))
    has_marks = holds_marks(labels)
    if not holds_classes(labels) or holds_fractions(labels) or has_marks:
        content = MARKS if has_marks else column.feature
        allowed = f"lists of classes, or text with {SEPARATOR} between them, with task several"
        raise UserError(f"{column.setting} is {column.name}, which holds {content}; it must hold {allowed}")
    return LabelColumn(column.name, labels, column.class_names)


def note_other_separators(column: str, labels: pa.ChunkedArray) -> None:
    """Note texts that may name several classes, but have no SEPARATOR between them."""
    if holds_lists(labels) or not is_text(labels.type):
        return
    texts = pc.unique(labels).drop_null().to_pylist()
    joined = [text for text in texts if OTHER_SEPARATOR.search(text)]
    if joined and not any(SEPARATOR in text for text in texts):
        rule = f"{SEPARATOR} is between the classes of an image, and each of these texts counts as one"
        note(f"the column {column} has texts such as {joined[0]}: {rule}")


def split_texts(labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts as lists of the classes that they name; other labels as they are."""
    if holds_lists(labels) or not is_text(labels.type):
        return labels
    texts = labels.cast(pa.string())
    lists: list[list[str] | None] = []
    for text in null_where(is_blank(texts), texts).to_pylist():
        if text is None:
            lists.append(None)
            continue
        names = [name.strip() for name in text.split(SEPARATOR)]
        lists.append([name for name in names if name])
    return pa.chunked_array([pa.array(lists, pa.list_(pa.string()))])


def mark_classes(columns: Sequence[LabelColumn | None]) -> NumberedLabels:
    """Several classes an image as marks (n, C) int8: 1 if it is of the class, 0 if not; -1: its label is missing.

    Args:
        columns: see `number_labels`, which numbers the classes.
    """
    numbered = number_labels(columns)
    classes = len(numbered.class_names)
    parts: list[NDArray[np.int8] | None] = []
    for column, numbers in zip(columns, numbered.parts, strict=True):
        if numbers is None:
            parts.append(None)
            continue
        marks = np.zeros((len(numbers), classes), np.int8)
        of_image = numbers.reshape(len(numbers), -1)
        images, places = np.nonzero(of_image >= 0)
        marks[images, of_image[images, places]] = 1
        is_missing = column.values.is_null().to_numpy() if holds_lists(column.values) else numbers < 0
        marks[is_missing] = NO_LABEL
        parts.append(marks)
    return NumberedLabels(parts, numbered.class_names, classes)


def read_numbers(column: FoundColumn) -> LabelColumn:
    """The number of each image. Null, blank text, NaN and infinities are missing labels.

    Raises:
        UserError: the column holds something else.
    """
    labels = column.values
    problem = f"{column.setting} is {column.name}, which holds"
    allowed = "a column of numbers with task number"
    if holds_lists(labels) or getattr(column.feature, "names", None) is not None:
        raise UserError(f"{problem} {column.feature}; it must be {allowed}")
    if is_text(labels.type):
        texts = pc.utf8_trim_whitespace(labels.cast(pa.string()))
        labels = null_where(is_blank(texts), texts)
    try:
        return LabelColumn(column.name, labels.cast(pa.float64()), None)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        shown = shortened([str(value) for value in pc.unique(flatten_lists(labels)).drop_null().to_pylist()[:3]])
        raise UserError(f"{problem} {shown}; it must be {allowed}") from None


def take_numbers(columns: Sequence[LabelColumn | None]) -> NumberedLabels:
    """Numbers as they are, (n,) float64; NaN: the label is missing."""
    parts: list[NDArray[np.float64] | None] = []
    for column in columns:
        values = None
        if column is not None:
            values = column.values.cast(pa.float64()).fill_null(np.nan).to_numpy()
            values = np.where(np.isfinite(values), values, np.nan)
        parts.append(values)
    return NumberedLabels(parts, [], 0)


LABEL_READERS: dict[str, LabelReader] = {
    "class": LabelReader(read_labels, number_labels),
    "several": LabelReader(read_several, mark_classes),
    "number": LabelReader(read_numbers, take_numbers),
}
"""The kinds of labels by name."""
