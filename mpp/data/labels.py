"""Labels of all splits as arrays: one class an image, several classes, or a number.

Text is text: "NA" and "None" are classes, and only a blank is no label. Classes are numbered from 0, the same for all
splits. Labels stay in arrow and numpy all the way: 14 million Python lists would take gigabytes in every process.
n images, C classes.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mpp.errors import UserError
from mpp.runtime.messages import counted, note, shortened

LABEL_KINDS = ("class", "several", "number")
AUTO = "auto"
SEPARATOR = ";"
"""Between the classes of an image, where a column holds text."""
OTHER_SEPARATOR = re.compile("[|,]")
"""Characters that other programs write between the classes of an image."""
NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?\s*$"
WHOLE_NUMBER = re.compile(r"[+-]?\d{1,18}(\.0*)?")
NO_LABEL = -1


@dataclass(frozen=True)
class LabelColumn:
    """The column of the labels of some images."""

    name: str
    values: pa.Array
    """(n,) labels, or lists of labels; null: none."""
    feature: Any
    """Its type in the dataset."""
    is_named: bool = False
    """Whether a setting names it; otherwise it is the column `label`."""
    setting: str = "data.label_column"
    """The setting that may name it."""

    @property
    def class_names(self) -> list[str] | None:
        """The names that its type, or that of the items of its lists, declares; None: there are none."""
        feature = self.feature
        while hasattr(feature, "feature"):
            feature = feature.feature
        return getattr(feature, "names", None)


class NumberedLabels(NamedTuple):
    """Labels of several splits as arrays, and the names of their classes."""

    parts: list[NDArray | None]
    """Of each split: see `ImageDataset.labels`."""
    class_names: list[str]
    """Of the classes, by number: those of the first split with labels, then those that only others have."""
    classes: int
    """Number of classes that the first split with labels has, or declares; several: that all have."""


class Classes(NamedTuple):
    """The labels of some images as text."""

    names: list[str]
    codes: NDArray[np.int64]
    """(m,) of each label: its place in `names`; -1: a blank. Images may have none or several."""
    images: NDArray[np.int64]
    """(m,) the image that has the label; ascending."""
    is_missing: NDArray[np.bool_]
    """(n,) whether an image has no label. An empty list is one: of no class."""


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


def find_labels(rows: datasets.Dataset, column: str | None, source: str, setting: str) -> LabelColumn | None:
    """The column of some images' labels: see `find_label_column`, also for arguments and errors."""
    name = find_label_column(column, rows.features, source, setting)
    if name is None:
        return None
    values = column_of(rows, name).combine_chunks()
    return LabelColumn(name, values, rows.features[name], column is not None, setting)


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


def find_label_kind(kind: str, column: LabelColumn | None) -> str:
    """The kind of label of some images; of `auto` that is numbers where these have fractions, or else classes.

    Args:
        kind: auto, or one of LABEL_KINDS.
        column: of the training split; None: it has none.
    """
    if kind != AUTO:
        return kind
    has_fractions = column is not None and holds_fractions(flat_labels(whole_numbers(column.values)))
    return "number" if has_fractions else "class"


def read_labels(columns: Sequence[LabelColumn | None], kind: str = "class") -> NumberedLabels:
    """The labels of splits as arrays, by a kind of LABEL_KINDS.

    Classes that the first split declares keep their numbers. Otherwise its classes are sorted, numbers as numbers, and
    numbered from 0, however far apart they are. Classes that only others have come after them.

    Args:
        columns: of the splits, training first; None: the split has no labels.
    Raises:
        UserError: a column that a setting names holds labels of another kind.
    """
    if kind == "number":
        return NumberedLabels([column and read_numbers(column) for column in columns], [], 0)
    declared = {tuple(column.class_names) for column in columns if column and column.class_names is not None}
    shared = declared.pop() if len(declared) == 1 else None  # numbers without names are numbers of these
    found = [column and read_classes(column, kind, column.class_names or shared) for column in columns]
    names: list[str] = []
    classes = 0
    for column, labels in zip(columns, found, strict=True):
        if labels is None:
            continue
        if not names:
            names += column.class_names or (() if is_text(flat_labels(column.values)) else shared) or ()
        others = sorted({*labels.names} - {*names})
        if all(map(WHOLE_NUMBER.fullmatch, others)):
            others.sort(key=lambda text: (int(text.partition(".")[0]), text))
        names += others
        classes = classes or len(names)
    if kind == "several":
        return NumberedLabels([labels and mark(labels, names) for labels in found], names, len(names))
    return NumberedLabels([labels and number(labels, names) for labels in found], names, classes)


def number(labels: Classes, names: list[str]) -> NDArray[np.int64]:
    """(n,) the class of each image; (n, L) where an image has several; -1: none."""
    numbers = numbers_of(labels, names)
    places = np.arange(len(numbers)) - np.searchsorted(labels.images, labels.images)  # among those of the image
    array = np.full((len(labels.is_missing), places.max(initial=0) + 1), NO_LABEL)
    array[labels.images, places] = numbers
    return array if array.shape[1] > 1 else array[:, 0]


def mark(labels: Classes, names: list[str]) -> NDArray[np.int8]:
    """(n, C) 1 where an image is of a class, 0 where not; -1: its label is missing."""
    marks = np.zeros((len(labels.is_missing), len(names)), np.int8)
    numbers = numbers_of(labels, names)
    marks[labels.images[numbers >= 0], numbers[numbers >= 0]] = 1
    marks[labels.is_missing] = NO_LABEL
    return marks


def numbers_of(labels: Classes, names: list[str]) -> NDArray[np.int64]:
    """(m,) the number of each label's class; -1: a blank."""
    number_of = {name: number for number, name in enumerate(names)}
    return np.array([*(number_of[name] for name in labels.names), NO_LABEL], np.int64)[labels.codes]


def read_classes(column: LabelColumn, kind: str, declared: Sequence[str] | None) -> Classes | None:
    """The classes of a column of integers or texts, or of lists of such; of several classes, text is split at `;`.

    Args:
        declared: names of the classes that are numbers; a number without a name is its own.
    Returns:
        None: the column `label`, which no setting names, holds no classes.
    Raises:
        UserError: the named column holds no classes.
    """
    values = whole_numbers(column.values)
    if kind == "several" and is_text(values):
        note_other_separators(column.name, values)
        values = split_texts(values)
    problem = find_problem(values, column)
    if problem:
        if column.is_named or kind == "several":
            allowed = f"lists of classes, or text with {SEPARATOR} between them" if kind == "several" else "classes"
            raise UserError(f"{column.setting} is {column.name}, which holds {problem}; it must hold {allowed}")
        note(f"the column {column.name} holds {problem} instead of classes; it is not used")
        return None
    flat = flat_labels(values)
    images = np.arange(len(values))
    if is_list(values):
        images = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
    if is_text(flat):
        flat = null_where(is_blank(flat), flat)
    elif pa.types.is_boolean(flat.type) or pa.types.is_null(flat.type):
        flat = flat.cast(pa.int8())
    if pa.types.is_signed_integer(flat.type):
        is_negative = pc.less(flat, 0)
        if declared is None:
            note_negative(column, pc.sum(is_negative).as_py())
        flat = null_where(is_negative, flat)
    encoded = flat.dictionary_encode()
    names = [class_name(value, declared) for value in encoded.dictionary.to_pylist()]
    codes = encoded.indices.fill_null(-1).to_numpy()
    is_missing = (values.is_null() if is_list(values) else flat.is_null()).to_numpy(zero_copy_only=False)
    return Classes(names, codes, images, is_missing)


def class_name(value: Any, declared: Sequence[str] | None) -> str:
    """The class of a label: its name, where it is the number of one."""
    if declared is not None and isinstance(value, int) and value < len(declared):
        return declared[value]
    return str(value)


def find_problem(values: pa.Array, column: LabelColumn) -> str | None:
    """The content of a column in words, if it holds no integers, texts, or lists of such; None: it does."""
    flat = flat_labels(values)
    if flat.null_count == len(flat):
        return None
    if holds_fractions(flat):
        return "numbers with fractions"
    if not (is_text(flat) or pa.types.is_integer(flat.type) or pa.types.is_boolean(flat.type)):
        return str(column.feature)
    if is_list(values):
        lengths = pc.min_max(pc.list_value_length(values)).as_py()
        marks = {str(value) for value in pc.unique(flat).slice(0, 3).to_pylist()}
        if 1 < lengths["min"] == lengths["max"] and marks <= {"0", "1", "False", "True"}:
            return "lists of a 0 or a 1 for each class (one-hot)"
        if flat.null_count:
            return "lists with holes"
    return None


def note_negative(column: LabelColumn, count: int | None) -> None:
    """Print how many labels are negative numbers, if any."""
    if count:
        verb = "is a negative number" if count == 1 else "are negative numbers"
        note(f"{counted(count, 'label')} in the column {column.name} {verb}: no labels, as datasets of the hub have it")


def note_other_separators(name: str, texts: pa.Array) -> None:
    """Note texts in which other characters than `;` may stand between classes."""
    distinct = pc.unique(texts).drop_null().to_pylist()
    joined = [text for text in distinct if OTHER_SEPARATOR.search(text)]
    if joined and not any(SEPARATOR in text for text in distinct):
        note(f"the column {name} has texts such as {joined[0]}: each is one class; {SEPARATOR} is between classes")


def split_texts(texts: pa.Array) -> pa.Array:
    """Lists of the texts between `;`, without spaces around them; null where a text is blank."""
    lists = pc.split_pattern(null_where(is_blank(texts), texts), SEPARATOR).to_pylist()
    for row, names in enumerate(lists):
        if names is not None:
            lists[row] = [name.strip() for name in names if name.strip()]
    return pa.array(lists, pa.list_(pa.string()))


def read_numbers(column: LabelColumn) -> NDArray[np.float64]:
    """The number of each image, (n,). Null, blank text, NaN and infinities are missing labels: NaN.

    Raises:
        UserError: the column holds something else.
    """
    values = column.values
    problem = f"{column.setting} is {column.name}, which holds"
    allowed = "it must be a column of numbers with task number"
    if is_list(values) or column.class_names is not None:
        raise UserError(f"{problem} {column.feature}; {allowed}")
    if is_text(values):
        texts = pc.utf8_trim_whitespace(values)
        values = null_where(is_blank(texts), texts)
    try:
        numbers = values.cast(pa.float64()).fill_null(np.nan).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        shown = shortened([str(value) for value in pc.unique(values).drop_null().to_pylist()[:3]])
        raise UserError(f"{problem} {shown}; {allowed}") from None
    return np.where(np.isfinite(numbers), numbers, np.nan)


def whole_numbers(values: pa.Array) -> pa.Array:
    """Floating-point labels as integers, if all are whole: so pandas writes numbers with blanks between them."""
    if not pa.types.is_floating(values.type):
        return values
    with suppress(pa.ArrowInvalid):
        return null_where(pc.is_nan(values), values).cast(pa.int64())
    return values


def holds_fractions(flat: pa.Array) -> bool:
    """Whether labels are numbers, or texts of numbers, that are not all whole: measurements, not classes."""
    if pa.types.is_floating(flat.type):
        return flat.null_count < len(flat)
    if not is_text(flat):
        return False
    texts = pc.unique(null_where(is_blank(flat), flat)).drop_null()
    if len(texts) == 0 or not pc.all(pc.match_substring_regex(texts, NUMBER)).as_py():
        return False
    return any(not float(text).is_integer() for text in texts.to_pylist())


def flat_labels(values: pa.Array) -> pa.Array:
    """The labels of one image after the other."""
    return pc.list_flatten(values) if is_list(values) else values


def is_list(values: pa.Array) -> bool:
    """Whether an image may have several labels."""
    return isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray)


def is_text(values: pa.Array) -> bool:
    """Whether labels are texts."""
    return pa.types.is_string(values.type) or pa.types.is_large_string(values.type)


def is_blank(texts: pa.Array) -> pa.Array:
    """Whether each text is empty or only spaces."""
    return pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0)


def null_where(condition: pa.Array, labels: pa.Array) -> pa.Array:
    """Labels with null instead of those that meet a condition."""
    return pc.if_else(condition, pa.scalar(None, labels.type), labels)
