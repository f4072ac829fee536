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


def reference(parts: list[list], kinds: list) -> list[np.ndarray]:
    """By the words of the contract, a label at a time. LookupError: a number that has to be a name, and has none."""
    lists = [[[] if v is None else v if isinstance(v, list) else [v] for v in part] for part in parts]
    spellings = [getattr(kind, "names", None) for kind in kinds]
    text = any(isinstance(v, str) for part in lists for of_image in part for v in of_image)
    if text or (None not in spellings and spellings[0] != spellings[1]):
        for of_image, names in ((each, names) for part, names in zip(lists, spellings, strict=True) for each in part):
            if names is None and any(not isinstance(v, str) and v >= 0 for v in of_image):
                raise LookupError
            of_image[:] = [v if isinstance(v, str) or v < 0 else names[v] for v in of_image]
    names = sorted({v for part in lists for of_image in part for v in of_image if isinstance(v, str)})
    numbered = []
    for part in lists:
        length = max([1, *map(len, part)])
        numbers = [[names.index(v) if isinstance(v, str) else max(int(v), -1) for v in image] for image in part]
        padded = np.array([image + [-1] * (length - len(image)) for image in numbers])
        numbered.append(padded if length > 1 else padded[:, 0])
    return numbered


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
            expected = reference([values[0] * 2, [values[1][i] for i in shuffled]], kinds)
        except LookupError:
            with pytest.raises(ValueError, match=r"column label has numbers, such as \w+, .* names; both must"):
                number_labels(known)
            continue
        found = number_labels(known)
        for ours, theirs in zip(found, expected, strict=True):
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
    assert number_labels([labels])[0].tolist() == [1, -1, -1, 3]
    assert read_labels(rows(Value("float64"), [1.0, 2.5]), None, "here") is None


def test_identifiers_are_no_labels_unless_asked_for():
    for number in (10**6, 2**63 + 1):
        table = pa.table({"label": pa.array([1, number, None], pa.uint64())})
        with pytest.raises(ValueError, match=f"a label is {number}; labels are numbers of classes, below 1000000"):
            number_labels([read_labels(datasets.Dataset(table), "label", "here")])
        assert read_labels(datasets.Dataset(table), None, "here") is None


@pytest.mark.parametrize("several", [False, True])
def test_labels_take_little_more_memory_than_their_numbers(several):
    count, each = 50_000, 2 if several else 1
    numbers = np.arange(each * count) % 1000
    column = pa.FixedSizeListArray.from_arrays(numbers, each).cast(pa.list_(pa.int64())) if several else numbers
    table = datasets.Dataset(pa.table({"label": column}))
    tracemalloc.start()
    try:
        (found,) = number_labels([read_labels(table, None, "here")])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.reshape(-1) == numbers).all()
    assert peak < 4 * found.nbytes  # as lists of Python: 13 and 14 times
