"""The column of a split's labels, as arrow has it: found, and read as classes.

Labels stay in arrow and numpy all the way: 14 million Python lists would take gigabytes in every process.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from mpp.errors import UserError
from mpp.runtime.messages import counted, note

ANY_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?\s*$"
MARKS = "lists of a 0 or a 1 for each class (one-hot)"


def find_label_column(
    column: str | None, features: datasets.Features, source: str, setting: str = "data.label_column"
) -> str | None:
    """The column of the labels: the named one, or `label`; None: there is none.

    Args:
        column: the value of the setting.
        source, setting: names of the dataset and of the setting, for messages.
    Raises:
        UserError: the named column is not there.
    """
    if column is None:
        return "label" if "label" in features else None
    if column not in features:
        raise UserError(f"{setting} is {column}; {source} has {', '.join(features)}")
    return column


class FoundColumn(NamedTuple):
    """The column of some images' labels, before these are read as a kind of label."""

    name: str
    values: pa.ChunkedArray
    feature: Any
    """Its type in the dataset."""
    is_named: bool
    """Whether a setting names it; otherwise it is the column `label`."""
    setting: str
    """The setting that may name it."""
    source: str
    """Name of the dataset."""

    @property
    def class_names(self) -> list[str] | None:
        """The names that its type, or that of the items of its lists, declares; None: there are none."""
        feature = self.feature
        while hasattr(feature, "feature"):
            feature = feature.feature
        return getattr(feature, "names", None)


def find_labels(rows: datasets.Dataset, column: str | None, source: str, setting: str) -> FoundColumn | None:
    """The column of some images' labels: see `find_label_column`, also for arguments and errors."""
    name = find_label_column(column, rows.features, source, setting)
    if name is None:
        return None
    return FoundColumn(name, column_of(rows, name), rows.features[name], column is not None, setting, source)


@dataclass(frozen=True)
class LabelColumn:
    """The labels of some images, as their column has them."""

    name: str
    values: pa.ChunkedArray
    """Of each image: a label, none, or a list of labels."""
    class_names: list[str] | None
    """By number, where the dataset declares them."""

    @property
    def flat(self) -> pa.ChunkedArray:
        """The labels of one image after the other."""
        return flatten_lists(self.values)

    @property
    def is_empty(self) -> bool:
        """Whether no image has a label."""
        return all_null(self.flat)

    @property
    def is_text(self) -> bool:
        """Whether the labels are texts, not numbers."""
        return is_text(self.flat.type)

    def classes(self) -> pa.ChunkedArray:
        """The class of each label in `flat`: a text, or an integer that has no name. Null: no label."""
        labels = self.flat
        if self.is_empty:
            return pa.chunked_array([pa.nulls(len(labels), pa.string())])
        if self.is_text:
            texts = labels.cast(pa.string())
            return null_where(is_blank(texts), texts)
        if pa.types.is_boolean(labels.type):
            labels = labels.cast(pa.int8())
        if not pa.types.is_unsigned_integer(labels.type):
            is_negative = pc.less(labels, 0)
            if self.class_names is None:
                self.note_negative(pc.sum(is_negative).as_py())
            labels = null_where(is_negative, labels)
        try:
            numbers = labels.cast(pa.int64())
        except pa.ArrowInvalid:  # above 2**63
            return labels.cast(pa.string())
        return numbers if self.class_names is None else to_names(numbers, self.class_names)

    def note_negative(self, count: int | None) -> None:
        """Print how many labels are negative numbers, if any."""
        if count:
            verb = "is a negative number" if count == 1 else "are negative numbers"
            what = f"{counted(count, 'label')} in the column {self.name} {verb}"
            note(f"{what}: no labels, as datasets of the hub have it; as text, or in a list, they are classes")


def read_labels(column: FoundColumn) -> LabelColumn | None:
    """The labels of each image: none, one, or (where the column holds lists) several. They stay where the rows are.

    Returns:
        None: the column `label`, which no setting names, holds no classes.
    Raises:
        UserError: the named column holds no classes.
    """
    labels = without_fractions(column.values)
    has_fractions = holds_fractions(labels)
    has_marks = holds_marks(labels)
    if holds_classes(labels) and not has_fractions and not has_marks:
        return LabelColumn(column.name, labels, column.class_names)
    content = "numbers with fractions" if has_fractions else MARKS if has_marks else str(column.feature)
    if column.is_named:
        raise UserError(f"{column.setting} is {column.name}, which holds {content} instead of classes")
    note(f"the column {column.name} of {column.source} holds {content} instead of classes; it is not used")
    return None


def column_of(rows: datasets.Dataset, name: str) -> pa.ChunkedArray:
    """A column of a dataset as arrow has it, but for views of texts, of which arrow computes little."""
    values = rows.select_columns([name]).with_format("arrow")[:].column(0)
    kind = without_views(values.type)
    return values if kind == values.type else values.cast(kind)


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type of texts, or of lists of texts, that polars writes as views."""
    if pa.types.is_list(kind):
        return pa.list_(without_views(kind.value_type))
    return pa.string() if str(kind) == "string_view" else kind


def without_fractions(labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """Floating-point labels as integers, if all are whole: so pandas writes numbers with blanks between them."""
    if not pa.types.is_floating(labels.type):
        return labels
    with suppress(pa.ArrowInvalid):
        return null_where(pc.is_nan(labels), labels).cast(pa.int64())
    return labels


def null_where(condition: pa.ChunkedArray, labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """Labels with null instead of those that meet a condition."""
    return pc.if_else(condition, pa.scalar(None, labels.type), labels)


def holds_lists(labels: pa.ChunkedArray) -> bool:
    """Whether an image may have several labels."""
    kind = labels.type
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def all_null(labels: pa.ChunkedArray) -> bool:
    """Whether no label is there."""
    return labels.null_count == len(labels)


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_blank(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether each text is empty or only spaces."""
    return pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0)


def flatten_lists(labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """The labels of one image after the other."""
    return pc.list_flatten(labels) if holds_lists(labels) else labels


def holds_classes(labels: pa.ChunkedArray) -> bool:
    """Whether each label is an integer or a text; an image may have none, but no list has a hole."""
    flat = flatten_lists(labels)
    if holds_lists(labels) and flat.null_count:
        return False
    if all_null(flat):
        return True
    return pa.types.is_integer(flat.type) or pa.types.is_boolean(flat.type) or is_text(flat.type)


def holds_marks(labels: pa.ChunkedArray) -> bool:
    """Whether all labels are lists of one length of 0 and 1: marks of all classes, and not numbers of some."""
    if not holds_lists(labels) or not holds_classes(labels) or all_null(labels):
        return False
    lengths = pc.min_max(pc.list_value_length(labels)).as_py()
    values = pc.unique(flatten_lists(labels)).slice(0, 3).to_pylist()
    return 1 < lengths["min"] == lengths["max"] and {str(value) for value in values} <= {"0", "1", "False", "True"}


def holds_fractions(labels: pa.ChunkedArray) -> bool:
    """Whether labels are numbers, or texts of numbers, that are not all whole: measurements, not classes."""
    flat = flatten_lists(labels)
    if pa.types.is_floating(flat.type):
        return not all_null(flat)
    if not is_text(flat.type):
        return False
    texts = pc.unique(flat).cast(pa.string()).drop_null()
    texts = texts.filter(pc.invert(is_blank(texts)))
    if not all_match(texts, ANY_NUMBER):
        return False
    return any(not float(text).is_integer() for text in texts.to_pylist())


def all_match(texts: pa.Array, pattern: str) -> bool:
    """Whether there are texts, and all of them match a regular expression."""
    return len(texts) > 0 and pc.all(pc.match_substring_regex(texts, pattern)).as_py()


def to_names(numbers: pa.ChunkedArray, names: Sequence[str]) -> pa.ChunkedArray:
    """Numbers as the names of classes; a number that has no name is its own."""
    numbers = numbers.combine_chunks()
    has_name = pc.less(numbers, len(names))
    named = pa.array(names or [""], pa.string()).take(pc.if_else(has_name, numbers, 0))
    return pa.chunked_array([pc.if_else(has_name, named, numbers.cast(pa.string()))])
