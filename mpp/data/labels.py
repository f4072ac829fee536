"""Labels of all splits as arrays: one class an image, several classes, or a number.

Text is text: "NA" and "None" are classes, and only a blank is no label. Classes are numbered from 0, the same for all
splits. Labels stay in arrow and numpy all the way: 14 million Python lists would take gigabytes in every process.
n images, C classes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mpp.config import ImagesConfig
from mpp.data.data_path import describe_source
from mpp.errors import UserError, one_line
from mpp.runtime.messages import note

LABEL_KINDS = ("class", "several", "number")
AUTO = "auto"
SEPARATOR = ";"
"""Between the classes of an image, where a column holds text."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?")
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
    setting: str | None = None
    """The setting that names it; None: it is the column `label`."""

    @property
    def class_names(self) -> list[str] | None:
        """The names that its type, or that of the items of its lists, declares; None: there are none."""
        return getattr(getattr(self.feature, "feature", self.feature), "names", None)

    def refuse(self, content: str, allowed: str) -> UserError:
        """The error of a column that holds something else than is allowed."""
        return UserError(
            f"{self.setting or 'data.label_column'} is {self.name}, which holds {content}; it must hold {allowed}"
        )


class NumberedLabels(NamedTuple):
    """Labels of several splits as arrays, and the names of their classes."""

    parts: list[NDArray | None]
    """Of each split: see `ImageDataset.labels`."""
    class_names: list[str]
    """Of the classes, by number: those of the first split with labels, then those that only others have."""
    classes: int
    """Number of classes that the first split with labels has, or declares; several: that all have."""


class Classes(NamedTuple):
    """The labels of some images by the names of their classes."""

    names: list[str | None]
    """Of each code, the last for nulls; None: no label."""
    codes: NDArray[np.int64]
    """(m,) of each label. Images may have none or several."""
    images: NDArray[np.int64]
    """(m,) the image that has the label; ascending."""
    without_list: NDArray[np.bool_] | None
    """(n,) images that have no list of classes; an empty list is one. None: each image has one label."""


def find_label_column(
    config: ImagesConfig, features: datasets.Features, is_held_out: bool = False
) -> tuple[str | None, str | None]:
    """The column of the labels, and the setting that names it; without one the column `label`. None: there is none.

    Raises:
        UserError: the named column is not there.
    """
    setting, column = f"{config.group_name}.label_column", config.label_column
    if is_held_out and config.eval_label_column:
        setting, column = "data.eval_label_column", config.eval_label_column
    if column is None:
        return ("label" if "label" in features else None), None
    if column not in features:
        raise UserError(f"{setting} is {column}; {describe_source(config)} has {', '.join(features)}")
    return column, setting


def find_labels(config: ImagesConfig, rows: datasets.Dataset, is_held_out: bool = False) -> LabelColumn | None:
    """The labels of some images: see `find_label_column`."""
    name, setting = find_label_column(config, rows.features, is_held_out)
    if name is None:
        return None
    return LabelColumn(name, column_of(rows, name).combine_chunks(), rows.features[name], setting)


def column_of(rows: datasets.Dataset, name: str) -> pa.ChunkedArray:
    """A column of a dataset as arrow has it, but for views of texts, of which arrow computes little."""
    values = rows.select_columns([name]).with_format("arrow")[:].column(0)
    if "string_view" in str(values.type):  # of polars
        is_list = values.type.num_fields == 1
        return values.cast(pa.list_(pa.string()) if is_list else pa.string())
    return values


def find_label_kind(kind: str, column: LabelColumn | None) -> str:
    """The kind of label of some images; of `auto` that is numbers where these have fractions, or else classes.

    Args:
        kind: auto, or one of LABEL_KINDS.
        column: of the training split; None: it has none.
    """
    if kind != AUTO:
        return kind
    return "number" if column is not None and holds_fractions(flat_labels(column.values)) else "class"


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
        others = sorted({*labels.names} - {*names, None})
        if all(map(WHOLE_NUMBER.fullmatch, others)):
            others.sort(key=lambda text: (int(text.partition(".")[0]), text))
        names += others
        classes = classes or len(names)
    parts = [labels and to_array(labels, names, kind) for labels in found]
    return NumberedLabels(parts, names, len(names) if kind == "several" else classes)


def to_array(labels: Classes, names: list[str], kind: str) -> NDArray:
    """The labels of a split as `ImageDataset.labels` has them, by the numbers of their classes."""
    number_of = {name: number for number, name in enumerate(names)}
    numbers = np.array([number_of.get(name, NO_LABEL) for name in labels.names])[labels.codes]
    is_known = numbers != NO_LABEL
    has_none = ~is_known if labels.without_list is None else labels.without_list
    if kind == "several":
        marks = np.zeros((len(has_none), len(names)), np.int8)
        marks[labels.images[is_known], numbers[is_known]] = 1
        marks[has_none] = NO_LABEL
        return marks
    places = np.arange(len(numbers)) - np.searchsorted(labels.images, labels.images)  # among those of the image
    array = np.full((len(has_none), places.max(initial=0) + 1), NO_LABEL)
    array[labels.images, places] = numbers
    return array if array.shape[1] > 1 else array[:, 0]


def read_classes(column: LabelColumn, kind: str, declared: Sequence[str] | None) -> Classes | None:
    """The classes of a column of integers or texts, or of lists of such; of several classes, text is split at `;`.

    Args:
        declared: names of the classes that are numbers; a number without a name is its own.
    Returns:
        None: the column `label`, which no setting names, holds no classes.
    Raises:
        UserError: the named column holds no classes.
    """
    values = column.values
    if kind == "several" and is_text(values):
        values = pc.split_pattern_regex(without_blanks(values), rf"\s*{SEPARATOR}\s*")
    flat = flat_labels(values)
    content = other_content(flat, column)
    if content is None:
        encoded = flat.dictionary_encode()
        names = [class_name(value, declared) for value in encoded.dictionary.to_pylist()]
        if is_list(values) and {*names} <= {"0", "1", None} and are_equally_long(values):
            content = "lists of a 0 or a 1 for each class (one-hot)"
    if content is not None:
        if column.setting or kind == "several":
            several = f"lists of classes, or text with {SEPARATOR} between them"
            raise column.refuse(content, several if kind == "several" else "classes")
        note(f"the column {column.name} holds {content} instead of classes; it is not used")
        return None
    codes = encoded.indices.fill_null(len(names)).to_numpy()
    if not is_list(values):
        return Classes([*names, None], codes, np.arange(len(values)), None)
    images = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
    return Classes([*names, None], codes, images, values.is_null().to_numpy(zero_copy_only=False))


def other_content(flat: pa.Array, column: LabelColumn) -> str | None:
    """The content of a column in words, if it holds no integers and no texts; None: it does."""
    if flat.null_count == len(flat):
        return None
    if holds_fractions(flat):
        return "numbers with fractions"
    types = pa.types
    is_number = types.is_integer(flat.type) or types.is_floating(flat.type) or types.is_boolean(flat.type)
    return None if is_number or is_text(flat) else str(column.feature)


def are_equally_long(lists: pa.Array) -> bool:
    """Whether all lists have the same number of labels, of two or more."""
    lengths = pc.unique(pc.list_value_length(lists)).drop_null().to_pylist()
    return len(lengths) == 1 and lengths[0] > 1


def class_name(value: Any, declared: Sequence[str] | None) -> str | None:
    """The class of a label: its text, or its name, where it is the number of one; None: it is none."""
    if isinstance(value, str):
        return value if value.strip() else None
    if value is None or value != value or value < 0:  # the hub writes -1 where a class is unknown
        return None
    number = int(value)
    return declared[number] if declared is not None and number < len(declared) else str(number)


def read_numbers(column: LabelColumn) -> NDArray[np.float64]:
    """The number of each image, (n,). Null, blank text, NaN and infinities are missing labels: NaN.

    Raises:
        UserError: the column holds something else.
    """
    allowed = "numbers with task number"
    if column.class_names is not None:
        raise column.refuse("names of classes", allowed)
    values = without_blanks(column.values) if is_text(column.values) else column.values
    try:
        numbers = values.cast(pa.float64()).fill_null(np.nan).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:  # a text, or a type that has no numbers
        raise column.refuse(f"{column.feature} ({one_line(error)})", allowed) from None
    return np.where(np.isfinite(numbers), numbers, np.nan)


def holds_fractions(flat: pa.Array) -> bool:
    """Whether labels are numbers, or texts of numbers, that are not all whole: measurements, not classes."""
    if pa.types.is_floating(flat.type):
        return not all(value.is_integer() for value in pc.unique(flat).drop_null().to_pylist() if value == value)
    if not is_text(flat):
        return False
    texts = pc.unique(without_blanks(flat)).drop_null().to_pylist()
    return all(map(NUMBER.fullmatch, texts)) and not all(float(text).is_integer() for text in texts)


def flat_labels(values: pa.Array) -> pa.Array:
    """The labels of one image after the other."""
    return pc.list_flatten(values) if is_list(values) else values


def is_list(values: pa.Array) -> bool:
    """Whether an image may have several labels."""
    return isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray)


def is_text(values: pa.Array) -> bool:
    """Whether labels are texts."""
    return pa.types.is_string(values.type) or pa.types.is_large_string(values.type)


def without_blanks(texts: pa.Array) -> pa.Array:
    """Texts without spaces around them, and null where nothing is left."""
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
