"""Labels of images: a column of classes, by number or by name, as numbers.

They stay arrow's and numpy's all the way: 14 million Python lists would take gigabytes in every process. The library's
`class_encode_column` makes text of integers, numbers each split by itself, and knows no lists.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mpp.errors import UserError

MOST_CLASSES = 1_000_000  # a larger label is an identifier, not a class


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
    """Of the classes, by number, where the dataset says them."""

    def spelled(self) -> pa.ChunkedArray:
        """The labels as text.

        Raises:
            UserError: they are numbers without names.
        """
        each = one_by_one(self.values)
        if is_text(each.type) or each.null_count == len(each):
            return each
        if self.names is None and pc.max(each).as_py() >= 0:
            said = f"has numbers, such as {pc.max(each)}, and the other split has names or another order of names"
            raise UserError(f"the labels' column {self.column} {said}; both must have names, or both numbers")
        none = pa.scalar(None, pa.int64())
        known = pc.if_else(pc.less(each, 0), none, each.cast(pa.int64())).combine_chunks()
        return pa.chunked_array([pa.array(self.names or [], pa.string()).take(known)])


def read_labels(
    rows: datasets.Dataset, column: str | None, source: str, key: str = "data.label_column"
) -> Labels | None:
    """The labels of each image: none, one, or (where the column holds lists) several. They stay where the rows are.

    Args:
        column, source, key: see `find_label_column`.
    Returns:
        None where there is no such column.
    """
    name = find_label_column(column, rows.features, source, key)
    if name is None:
        return None
    labels = whole_numbers(rows.select_columns([name]).with_format("arrow")[:].column(0))
    if holds_classes(labels) and (column is not None or not holds_identifiers(labels)):
        feature = rows.features[name]
        while hasattr(feature, "feature"):  # a list of what it holds
            feature = feature.feature
        return Labels(name, labels, getattr(feature, "names", None))
    if column is None:
        return None  # something else is called `label`, and nobody asked for it
    raise UserError(f"{key} is {column}, which holds no classes but {rows.features[column]}")


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
    """Whether labels are names, not numbers."""
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


def holds_identifiers(labels: pa.ChunkedArray) -> bool:
    """Whether labels are numbers that no classes have."""
    each = one_by_one(labels)
    return pa.types.is_integer(each.type) and (pc.max(each).as_py() or 0) >= MOST_CLASSES


def number_labels(parts: Sequence[Labels | None]) -> list[NDArray[np.int64] | None]:
    """Labels as class numbers: integers as they are, names in the order of the alphabet over all parts.

    Integers stand for names where another part has names, or numbers them in another way.

    Returns:
        For each part (n,), or (n, L) where some image has several; padded with -1.
    """
    known = [part for part in parts if part is not None]
    each = {id(part): one_by_one(part.values) for part in known}
    named = {tuple(part.names) for part in known if part.names is not None}
    if len(named) > 1 or any(is_text(one.type) and one.null_count < len(one) for one in each.values()):
        each = {id(part): part.spelled() for part in known}
    texts = [labels for labels in each.values() if is_text(labels.type)]
    names = sorted(set().union(*(pc.unique(labels).drop_null().to_pylist() for labels in texts)))
    return [None if part is None else pad(part.values, as_numbers(each[id(part)], names)) for part in parts]


def as_numbers(labels: pa.ChunkedArray, names: list[str]) -> NDArray[np.int64]:
    """Class numbers (n,) of single labels; -1: none."""
    if labels.null_count == len(labels):
        return np.full(len(labels), -1)  # of whatever type
    if is_text(labels.type):
        labels = pc.index_in(labels, pa.array(names, labels.type))
    largest = pc.max(labels).as_py()
    if largest >= MOST_CLASSES:
        raise UserError(f"a label is {largest}; labels are numbers of classes, below {MOST_CLASSES}")
    return np.maximum(labels.cast(pa.int64()).fill_null(-1).to_numpy(), -1)


def pad(labels: pa.ChunkedArray, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) or (n, L): the numbers of each image, as many as it has labels, then -1."""
    if not holds_lists(labels):
        return numbers
    counts = pc.list_value_length(labels).fill_null(0).to_numpy()
    padded = np.full((len(counts), max(1, counts.max(initial=0))), -1)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = numbers
    return padded if padded.shape[1] > 1 else padded[:, 0]
