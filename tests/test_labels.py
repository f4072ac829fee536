"""Labels of every sort of column, against plain Python, and what they take of memory."""

import itertools
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pytest
from conftest import refused
from datasets import LargeList, List, Value

from mpp.config import ImagesConfig
from mpp.data.labels import find_labels, read_labels


def rows(kind, values):
    schema = datasets.Features({"label": kind}).arrow_schema
    return datasets.Dataset(pa.table({"label": values}, schema=schema))


def read(*splits, column=None):
    """The labels of splits, in the column that a setting may name."""
    return read_labels([find_labels(ImagesConfig(label_column=column), split) for split in splits])


class Reference:
    """Labels of splits as numbers, by the words of the contract, a label at a time in plain Python.

    Raises:
        LookupError: numbers without names stand beside names.
    """

    def __init__(self, splits, kinds):
        splits = [[as_list(value) for value in split] for split in splits]
        names = share_names([getattr(kind, "names", None) for kind in kinds], splits)
        classes = [
            [[class_of(value, names_of_split) for value in labels] for labels in split]
            for split, names_of_split in zip(splits, names, strict=True)
        ]

        self.classes, self.of_training = list(names[0] or []), 0
        for split in classes:
            others = {*flatten(split)} - {None, *self.classes}
            are_numbers = all(value.lstrip("-").isdecimal() for value in others)
            self.classes += sorted(others, key=(lambda value: (int(value), value)) if are_numbers else None)
            self.of_training = self.of_training or len(self.classes)
        self.parts = [self.pad(split) for split in classes]

    def pad(self, split):
        """A number an image, or as many as one has where an image has several labels."""
        longest = max([1, *map(len, split)])
        numbers = [[-1 if value is None else self.classes.index(value) for value in labels] for labels in split]
        padded = [each + [-1] * (longest - len(each)) for each in numbers]
        return padded if longest > 1 else flatten(padded)


def flatten(split):
    """The labels of one image after the other."""
    return list(itertools.chain.from_iterable(split))


def as_list(value):
    return value if isinstance(value, list) else [value] * (value is not None)


def share_names(declared, splits):
    """The names of the classes of each split; None: its labels are their own."""
    are_texts = [[isinstance(value, str) for value in flatten(split)] for split in splits]
    has_texts = [*map(any, are_texts)]
    is_nameless = [names is None and not all(texts) for names, texts in zip(declared, are_texts, strict=True)]
    if any(has_texts) and any(is_nameless):
        raise LookupError
    known = {tuple(names) for names in declared if names}
    if len(known) != 1:
        return declared
    (shared,) = known
    return [None if has else [*shared] for has in has_texts]


def class_of(value, names):
    """The class of a label; None: it is no label."""
    if isinstance(value, str):
        return value if value.strip() else None
    if value != value or value < 0:
        return None
    return names[int(value)] if names is not None and value < len(names) else str(int(value))


def lists_of(values, longest, shortest=0):
    """All lists of some of the values."""
    return [[*each] for length in range(shortest, longest + 1) for each in itertools.product(values, repeat=length)]


SORTS = {
    "int8": (Value("int8"), range(-3, 100)),
    "far apart": (Value("uint64"), [7, 81, 812345, 2**63 + 1]),
    "bool": (Value("bool"), [False, True]),
    "floats, of pandas": (Value("float64"), [1.0, 3.0, 12.0, float("nan")]),
    "text": (Value("string"), ["é", "zebra", "B", "a", "", " ", "猫"]),
    "texts of numbers": (Value("string"), ["10", "9", "-1", "011"]),
    "named": (datasets.ClassLabel(names=["zebra", "a", "owl"]), range(-1, 3)),
    "named in another order": (datasets.ClassLabel(names=["owl", "zebra", "a"]), range(-1, 3)),
    "large text": (Value("large_string"), ["owl", "猫"]),
    "lists": (List(Value("int64")), lists_of(range(-2, 9), 3)),
    "lists of text": (List(Value("string")), lists_of("bac", 2)),
    "large lists": (LargeList(Value("int16")), lists_of(range(9), 1)),
    "fixed lists": (List(Value("int32"), length=2), lists_of(range(9), 2, 2)),
    "nothing": (Value("null"), [None]),
}
"""Name -> type of a column, and labels."""


@pytest.mark.parametrize("sort", SORTS)
def test_labels_of_every_sort_are_numbered_as_plain_python_would(sort):
    """Beside those of every other sort: in training, and held out."""
    rng = np.random.default_rng(0)
    for other in SORTS:
        kinds, labels = zip(SORTS[sort], SORTS[other], strict=True)
        first, second = (
            [None if rng.random() < 0.2 else pool[rng.integers(len(pool))] for _ in range(rng.integers(4, 30))]
            for pool in labels
        )
        order = rng.permutation(len(second))
        chunked = datasets.concatenate_datasets([rows(kinds[0], first)] * 2)
        numbered = read(chunked, rows(kinds[1], second).select(order))
        try:
            expected = Reference([first * 2, [second[i] for i in order]], kinds)
        except LookupError:
            continue
        assert numbered.class_names == expected.classes, (sort, other)
        assert numbered.classes == expected.of_training, (sort, other)
        assert all(part.dtype == np.int64 for part in numbered.parts), (sort, other)
        assert [part.tolist() for part in numbered.parts] == expected.parts, (sort, other)


@pytest.mark.parametrize(
    "kind, values",
    [
        (Value("float32"), [1.0, 0.5]),
        (Value("string"), ["0.5", "1e-3", " 2 ", "", None]),
        (Value("string"), [".5"]),
        (Value("binary"), [b"a"]),
        ({"name": Value("string")}, [{"name": "a"}]),
        (List(List(Value("int64"))), [[[1]]]),
        (List(Value("int64")), [[0, 1], [1, 0]]),
        (datasets.Array2D((1, 1), "int64"), [[[1]]]),
    ],
)
def test_what_are_no_classes_are_no_labels_unless_asked_for(kind, values):
    assert read(rows(kind, values)).parts == [None]
    with refused(r"data\.label_column is label, which holds .*; it must hold classes"):
        read(rows(kind, values), column="label")


@pytest.mark.parametrize("values", [["1.0", "2.0"], ["0.5", "x"], ["v1.5", "v2"], ["1.5.2", "3"]])
def test_texts_that_are_no_measures_are_classes(values):
    assert read(rows(Value("string"), values)).classes == 2


def test_views_of_texts_as_polars_writes_them_are_texts():
    pytest.importorskip("datasets", "4.1")
    texts = pa.array(["b", "a", None, "b"], pa.string_view())
    assert read(datasets.Dataset(pa.table({"label": texts}))).parts[0].tolist() == [1, 0, -1, 1]
    lists = pa.array([["b"], ["a"]], pa.large_list(pa.string_view()))
    column = find_labels(ImagesConfig(), datasets.Dataset(pa.table({"label": lists})))
    assert read_labels([column], "several").parts[0].tolist() == [[0, 1], [1, 0]]


def test_labels_take_little_more_memory_than_their_numbers():
    numbers = np.arange(100_000) % 1000
    column = pa.FixedSizeListArray.from_arrays(numbers, 2).cast(pa.list_(pa.int64()))
    table = datasets.Dataset(pa.table({"label": column}))
    tracemalloc.start()
    try:
        (labels,) = read(table).parts
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (labels.reshape(-1) == numbers).all()
    assert peak < 6 * labels.nbytes  # as lists of Python: 14 times
