"""Labels of every sort of column, against plain Python, and what they take of memory."""

import itertools
import tracemalloc
from collections.abc import Callable

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import LargeList, List, Value

from mpp.config import ImagesConfig
from mpp.data.labels import NumberedLabels, find_labels, read_labels

NO_CLASSES_ERROR = r"data\.label_column is label, which holds .*; it must hold classes"


def rows(kind, values: list, column: str = "label") -> datasets.Dataset:
    features = datasets.Features({column: kind})
    return datasets.Dataset.from_dict({column: values}, features=features)


def read(kind, values: list, column: str = "label"):
    """The labels of a column, which no setting names."""
    return read_rows(rows(kind, values, column))


def read_rows(rows: datasets.Dataset, column: str | None = None):
    """The labels of rows, in the column that a setting may name."""
    return find_labels(ImagesConfig(label_column=column), rows)


def number(kind, values: list) -> NumberedLabels:
    """The labels of one split."""
    return read_labels([read(kind, values)])


class Reference:
    """Labels of splits as numbers, by the words of the contract, a label at a time in plain Python.

    Raises:
        LookupError: numbers without names stand beside names.
    """

    def __init__(self, splits: list[list], kinds: list):
        splits = [[as_list(value) for value in split] for split in splits]
        declared = [getattr(kind, "names", None) for kind in kinds]
        names = share_names(declared, splits)
        classes = []
        for split, names_of_split in zip(splits, names, strict=True):
            classes.append(map_labels(split, lambda value, known=names_of_split: class_of(value, known)))
        if any(isinstance(value, str) for split in classes for value in flatten(split)):
            classes = [map_labels(split, as_text) for split in classes]

        self.classes = list(names[0] or [])
        for split in classes:
            others = {*flatten(split)} - {None, *self.classes}
            are_numbers = all(str(value).isdecimal() for value in others)
            self.classes += sorted(others, key=numeric_order if are_numbers else str)
        self.class_names = [str(value) for value in self.classes]
        self.parts = [self.pad(split) for split in classes]

    def pad(self, split: list[list]) -> np.ndarray:
        """(n,), or (n, L) where an image has several labels."""
        longest = max([1, *map(len, split)])
        padded = np.full((len(split), longest), -1)
        for image, labels in enumerate(split):
            for position, value in enumerate(labels):
                if value is not None:
                    padded[image, position] = self.classes.index(value)
        return padded if longest > 1 else padded[:, 0]


def map_labels(split: list[list], change: Callable) -> list[list]:
    """The labels of each image, each changed."""
    return [[change(value) for value in labels] for labels in split]


def flatten(split: list[list]) -> list:
    """The labels of one image after the other."""
    return list(itertools.chain.from_iterable(split))


def as_list(value) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def as_text(value) -> str | None:
    return None if value is None else str(value)


def numeric_order(value) -> tuple[int, str]:
    return int(value), str(value)


def share_names(names: list[list[str] | None], splits: list[list[list]]) -> list[list[str] | None]:
    """The names of the classes of each split; None: its labels are their own."""
    has_texts = []
    has_nameless_numbers = []
    for split, of_split in zip(splits, names, strict=True):
        are_texts = [isinstance(value, str) for value in flatten(split)]
        has_texts.append(any(are_texts))
        has_nameless_numbers.append(of_split is None and not all(are_texts))
    if any(has_texts) and any(has_nameless_numbers):
        raise LookupError
    declared = {tuple(of_split) for of_split in names if of_split}
    if len(declared) != 1:
        return names
    (shared,) = declared
    return [None if has else [*shared] for has in has_texts]


def class_of(value, names: list[str] | None):
    """The class of a label; None: it is no label."""
    if isinstance(value, str):
        return value if value.strip() else None
    if value < 0:
        return None
    if names is None:
        return int(value)
    return names[value] if value < len(names) else str(int(value))


def below(first: int, end: int) -> Callable:
    """A draw of one integer."""
    return lambda rng: int(rng.integers(first, end))


def one_of(*texts: str) -> Callable:
    """A draw of one text."""
    return lambda rng: str(rng.choice(texts))


def integers(first: int, end: int, longest: int) -> Callable:
    """A draw of a list of integers."""
    return lambda rng: rng.integers(first, end, rng.integers(0, longest + 1)).tolist()


SORTS = {
    "int8": (Value("int8"), below(-3, 100)),
    "uint64": (Value("uint64"), below(0, 100)),
    "bool": (Value("bool"), lambda rng: bool(rng.integers(2))),
    "text": (Value("string"), one_of("é", "zebra", "B", "a", "", "猫")),
    "named": (datasets.ClassLabel(names=["zebra", "a", "owl"]), below(-1, 3)),
    "named in another order": (datasets.ClassLabel(names=["owl", "zebra", "a"]), below(-1, 3)),
    "large text": (Value("large_string"), one_of("owl", "猫")),
    "lists": (List(Value("int64")), integers(-2, 9, longest=3)),
    "lists of text": (List(Value("string")), lambda rng: rng.choice(["b", "a", "c"], rng.integers(0, 3)).tolist()),
    "large lists": (LargeList(Value("int16")), integers(0, 9, longest=1)),
    "fixed lists": (List(Value("int32"), length=2), lambda rng: rng.integers(0, 9, 2).tolist()),
    "nothing": (Value("null"), lambda rng: None),
    "no number": (Value("float32"), lambda rng: None),
}
"""Name -> type of a column, and a draw of one label."""


@pytest.mark.parametrize("sort", SORTS)
def test_labels_of_every_sort_are_numbered_as_plain_python_would(sort):
    rng = np.random.default_rng(0)
    for other in SORTS:
        kinds, values = [], []
        for kind, draw in (SORTS[sort], SORTS[other]):
            count = int(rng.integers(1, 30))
            kinds.append(kind)
            values.append([None if rng.random() < 0.2 else draw(rng) for _ in range(count)])
        first, second = (rows(kind, of_split) for kind, of_split in zip(kinds, values, strict=True))
        chunked = datasets.concatenate_datasets([first, first])
        order = rng.permutation(len(second))
        columns = [read_rows(split) for split in (chunked, second.select(order))]
        try:
            expected = Reference([values[0] * 2, [values[1][i] for i in order]], kinds)
        except LookupError:
            continue
        numbered = read_labels(columns)
        assert numbered.class_names == expected.class_names, (sort, other)
        for part, expected_part in zip(numbered.parts, expected.parts, strict=True):
            assert part.dtype == np.int64, (sort, other)
            assert part.tolist() == expected_part.tolist(), (sort, other)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Value("float32"), 0.5),
        (Value("binary"), b"a"),
        ({"name": Value("string")}, {"name": "a"}),
        (List(Value("int64")), [1, None]),
        (List(List(Value("int64"))), [[1]]),
        (datasets.Array2D((1, 1), "int64"), [[1]]),
    ],
)
def test_what_are_no_classes_are_no_labels_unless_asked_for(kind, value):
    values = [value] * 3
    assert read_labels([read(kind, values)]).parts == [None]
    with pytest.raises(ValueError, match=NO_CLASSES_ERROR):
        read_labels([read_rows(rows(kind, values), "label")])


def test_numbers_with_blanks_are_labels():
    """As pandas writes a column of which some images have none."""
    numbered = number(Value("float64"), [1.0, None, float("nan"), 3.0])
    assert numbered.parts[0].tolist() == [0, -1, -1, 1]
    assert number(Value("float64"), [1.0, 2.5]).parts == [None]


@pytest.mark.parametrize("column", [[45123, 998877, 45123, None, 812345], [7, 2**63 + 1, 7, None, 2**63]])
def test_numbers_far_apart_are_numbered_from_zero(column):
    """As ids of species are, and the largest number that arrow holds."""
    table = pa.table({"label": pa.array(column, pa.uint64())})
    numbered = read_labels([read_rows(datasets.Dataset(table))])
    assert numbered.parts[0].tolist() == [0, 2, 0, -1, 1]
    assert numbered.classes == 3
    assert numbered.class_names == [str(value) for value in sorted({*column} - {None})]


def test_classes_are_those_of_training_and_then_others():
    train = read(Value("string"), ["owl", "10", "9", ""])
    test = read(Value("string"), ["cat", "owl", None, "ant"])
    numbered = read_labels([train, test])
    assert numbered.class_names == ["10", "9", "owl", "ant", "cat"]
    assert numbered.classes == 3
    assert [part.tolist() for part in numbered.parts] == [[2, 0, 1, -1], [4, 2, -1, 3]]


def test_numbers_that_are_texts_are_sorted_as_numbers():
    numbered = number(Value("string"), ["10", "9", "-1", "011"])
    assert numbered.class_names == ["-1", "9", "10", "011"]
    assert numbered.parts[0].tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("values", [["0.5", "1"], ["1e-3", " 2 "], [".5", "", None]])
def test_texts_that_are_numbers_with_fractions_are_no_classes(values, capsys):
    column = rows(Value("string"), values)
    assert read_labels([read_rows(column)]).parts == [None]
    with pytest.raises(ValueError, match="which holds numbers with fractions"):
        read_labels([read_rows(column, "label")])


@pytest.mark.parametrize("values", [["1.0", "2.0"], ["0.5", "x"], ["v1.5", "v2"], ["1.5.2", "3"]])
def test_texts_that_are_no_measures_are_classes(values):
    assert number(Value("string"), values).classes == 2


@pytest.mark.parametrize("labels_per_image", [1, 2])
def test_labels_take_little_more_memory_than_their_numbers(labels_per_image):
    numbers = np.arange(50_000 * labels_per_image) % 1000
    column = numbers
    if labels_per_image > 1:
        column = pa.FixedSizeListArray.from_arrays(numbers, labels_per_image).cast(pa.list_(pa.int64()))
    table = datasets.Dataset(pa.table({"label": column}))
    tracemalloc.start()
    try:
        (labels,) = read_labels([read_rows(table)]).parts
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (labels.reshape(-1) == numbers).all()
    assert peak < 6 * labels.nbytes  # as lists of Python: 13 and 14 times
