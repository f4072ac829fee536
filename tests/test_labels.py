"""Labels of every sort of column, against plain Python, and what they take of memory."""

import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import LargeList, List, Value

from mpp.data.labels import number_labels, read_labels


def rows(kind, values: list, column: str = "label") -> datasets.Dataset:
    return datasets.Dataset.from_dict({column: values}, features=datasets.Features({column: kind}))


def reference(parts: list[list], kinds: list) -> tuple[list[np.ndarray], list[str]]:
    """By the words of the contract, a label at a time. LookupError: numbers without names beside names."""
    lists = [[[] if v is None else v if isinstance(v, list) else [v] for v in part] for part in parts]
    spellings = [getattr(kind, "names", None) for kind in kinds]
    declared = {tuple(names) for names in spellings if names}
    has_text = [any(isinstance(v, str) for labels in part for v in labels) for part in lists]
    has_numbers = [any(not isinstance(v, str) for labels in part for v in labels) for part in lists]
    if any(has_text) and any(n and s is None for n, s in zip(has_numbers, spellings, strict=True)):
        raise LookupError
    if len(declared) == 1:
        spellings = [None if text else [*next(iter(declared))] for text in has_text]

    def spelled(value, names):
        if isinstance(value, str):
            return value if value.strip() else None
        if value < 0:
            return None
        return int(value) if names is None else names[value] if value < len(names) else str(int(value))

    own = [
        [[spelled(v, names) for v in labels] for labels in part] for part, names in zip(lists, spellings, strict=True)
    ]
    if any(isinstance(v, str) for part in own for labels in part for v in labels):
        own = [[[v if v is None else str(v) for v in labels] for labels in part] for part in own]
    values = [*spellings[0]] if spellings[0] else []
    for part in own:
        new = {v for labels in part for v in labels if v is not None} - {*values}
        values += sorted(new, key=lambda v: (int(v), str(v)) if all(str(n).isdecimal() for n in new) else str(v))
    numbered = []
    for part in own:
        length = max([1, *map(len, part)])
        numbers = [[-1 if v is None else values.index(v) for v in labels] for labels in part]
        padded = np.array([labels + [-1] * (length - len(labels)) for labels in numbers])
        numbered.append(padded if length > 1 else padded[:, 0])
    return numbered, [str(value) for value in values]


SORTS = {
    "int8": (Value("int8"), lambda rng: int(rng.integers(-3, 100))),
    "uint64": (Value("uint64"), lambda rng: int(rng.integers(0, 100))),
    "bool": (Value("bool"), lambda rng: bool(rng.integers(2))),
    "text": (Value("string"), lambda rng: str(rng.choice(["é", "zebra", "B", "a", "", "猫"]))),
    "named": (datasets.ClassLabel(names=["zebra", "a", "owl"]), lambda rng: int(rng.integers(-1, 3))),
    "named in another order": (datasets.ClassLabel(names=["owl", "zebra", "a"]), lambda rng: int(rng.integers(-1, 3))),
    "large text": (Value("large_string"), lambda rng: str(rng.choice(["owl", "猫"]))),
    "lists": (List(Value("int64")), lambda rng: rng.integers(-2, 9, rng.integers(0, 4)).tolist()),
    "lists of text": (List(Value("string")), lambda rng: rng.choice(["b", "a", "c"], rng.integers(0, 3)).tolist()),
    "large lists": (LargeList(Value("int16")), lambda rng: rng.integers(0, 9, rng.integers(0, 2)).tolist()),
    "fixed lists": (List(Value("int32"), length=2), lambda rng: rng.integers(0, 9, 2).tolist()),
    "nothing": (Value("null"), lambda rng: None),
    "no number": (Value("float32"), lambda rng: None),
}


@pytest.mark.parametrize("sort", SORTS)
def test_labels_of_every_sort_are_numbered_as_plain_python_would(sort):
    rng = np.random.default_rng(0)
    for other in SORTS:
        kinds, values = [], []
        for kind, draw in (SORTS[sort], SORTS[other]):
            count = int(rng.integers(1, 30))
            kinds.append(kind)
            values.append([None if rng.random() < 0.2 else draw(rng) for _ in range(count)])
        parts = [rows(kind, part) for kind, part in zip(kinds, values, strict=True)]
        parts[0] = datasets.concatenate_datasets([parts[0], parts[0]])  # of several chunks
        shuffled = rng.permutation(len(parts[1]))
        parts[1] = parts[1].select(shuffled)
        known = [read_labels(part, None, "here") for part in parts]
        try:
            expected, names = reference([values[0] * 2, [values[1][i] for i in shuffled]], kinds)
        except LookupError:
            with pytest.raises(ValueError, match=r"column label has numbers, such as \w+, .* names; both must"):
                number_labels(known)
            continue
        found = number_labels(known)
        assert found.names == names, (sort, other)
        for ours, theirs in zip(found.parts, expected, strict=True):
            assert ours.dtype == np.int64 and ours.shape == theirs.shape and (ours == theirs).all(), (sort, other)


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
    found = rows(kind, [value] * 3)
    assert read_labels(found, None, "here") is None
    with pytest.raises(ValueError, match=r"data\.label_column is label, which holds no classes but"):
        read_labels(found, "label", "here")


def test_numbers_with_blanks_are_labels():
    """As pandas writes a column of which some images have none."""
    labels = read_labels(rows(Value("float64"), [1.0, None, float("nan"), 3.0]), None, "here")
    assert number_labels([labels]).parts[0].tolist() == [0, -1, -1, 1]
    assert read_labels(rows(Value("float64"), [1.0, 2.5]), None, "here") is None


def test_numbers_far_apart_are_numbered_from_zero():
    """As ids of species are, and the largest number that arrow holds."""
    for column in ([45123, 998877, 45123, None, 812345], [7, 2**63 + 1, 7, None, 2**63]):
        labels = read_labels(datasets.Dataset(pa.table({"label": pa.array(column, pa.uint64())})), None, "here")
        found = number_labels([labels])
        assert found.parts[0].tolist() == [0, 2, 0, -1, 1] and found.classes == 3
        assert found.names == [str(number) for number in sorted({*column} - {None})]


def test_classes_are_those_of_training_and_then_others():
    train = read_labels(rows(Value("string"), ["owl", "10", "9", ""]), None, "here")
    test = read_labels(rows(Value("string"), ["cat", "owl", None, "ant"]), None, "here")
    found = number_labels([train, test])
    assert found.names == ["10", "9", "owl", "ant", "cat"] and found.classes == 3
    assert [part.tolist() for part in found.parts] == [[2, 0, 1, -1], [4, 2, -1, 3]]


def test_numbers_that_are_texts_are_sorted_as_numbers():
    found = number_labels([read_labels(rows(Value("string"), ["10", "9", "-1", "011"]), None, "here")])
    assert found.names == ["-1", "9", "10", "011"] and found.parts[0].tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("values", [["0.5", "1"], ["1e-3", " 2 "], [".5", "", None]])
def test_texts_that_are_numbers_with_fractions_are_no_classes(values, capsys):
    column = rows(Value("string"), values)
    assert read_labels(column, None, f"here {values}") is None
    assert "holds no classes but numbers with fractions; it is not used" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"data\.label_column is label, which holds no classes but numbers with frac"):
        read_labels(column, "label", "here")


@pytest.mark.parametrize("values", [["1.0", "2.0"], ["0.5", "x"], ["v1.5", "v2"], ["1.5.2", "3"]])
def test_texts_that_are_no_measures_are_classes(values):
    assert number_labels([read_labels(rows(Value("string"), values), None, "here")]).classes == 2


@pytest.mark.parametrize("several", [False, True])
def test_labels_take_little_more_memory_than_their_numbers(several):
    count, each = 50_000, 2 if several else 1
    numbers = np.arange(each * count) % 1000
    column = pa.FixedSizeListArray.from_arrays(numbers, each).cast(pa.list_(pa.int64())) if several else numbers
    table = datasets.Dataset(pa.table({"label": column}))
    tracemalloc.start()
    try:
        (found,) = number_labels([read_labels(table, None, "here")]).parts
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.reshape(-1) == numbers).all()
    assert peak < 4 * found.nbytes  # as lists of Python: 13 and 14 times


def test_negative_numbers_of_classes_that_nothing_declares_are_said(capsys):
    column = rows(Value("int64"), [-1, 1, 1, -1, 1], "sign")
    assert number_labels([read_labels(column, "sign", "here")]).parts[0].tolist() == [-1, 0, 0, -1, 0]
    assert "2 labels in the column sign are negative numbers: no labels" in capsys.readouterr().out
