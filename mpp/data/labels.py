"""Labels of images: a column of classes, by number or by name, as numbers from 0.

They stay in arrow and numpy all the way: 14 million Python lists would take gigabytes in every process.
`class_encode_column` of `datasets` makes text of integers, numbers each split by itself, and knows no lists.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mpp.errors import UserError
from mpp.runtime.messages import counted, note

ANY_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?\s*$"
WHOLE_NUMBER = r"^[+-]?\d{1,18}(\.0*)?$"
MARKS = "lists of a 0 or a 1 for each class (one-hot)"
NO_LABEL = -1


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
            return without(is_blank(texts), texts)
        if pa.types.is_boolean(labels.type):
            labels = labels.cast(pa.int8())
        if not pa.types.is_unsigned_integer(labels.type):
            is_negative = pc.less(labels, 0)
            if self.class_names is None:
                self.note_negative(pc.sum(is_negative).as_py())
            labels = without(is_negative, labels)
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


@dataclass(frozen=True)
class NumberedLabels:
    """Labels of several splits as numbers of classes, and the names of these."""

    parts: list[NDArray[np.int64] | None]
    """Of each split (n,), or (n, L) where an image has several; padded with -1. None: the split has no labels."""
    class_names: list[str]
    """Of the classes, by number: those of the first split with labels, then those that only others have."""
    classes: int
    """Number of classes that the first split with labels has, or declares."""


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
        return without(pc.is_nan(labels), labels).cast(pa.int64())
    return labels


def without(condition: pa.ChunkedArray, labels: pa.ChunkedArray) -> pa.ChunkedArray:
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


def to_names(numbers: pa.ChunkedArray, names: Sequence[str]) -> pa.ChunkedArray:
    """Numbers as the names of classes; a number that has no name is its own."""
    numbers = numbers.combine_chunks()
    has_name = pc.less(numbers, len(names))
    named = pa.array(names or [""], pa.string()).take(pc.if_else(has_name, numbers, 0))
    return pa.chunked_array([pc.if_else(has_name, named, numbers.cast(pa.string()))])


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
