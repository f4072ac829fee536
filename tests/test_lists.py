"""Lists of images: which files count, what they show, in whatever way they are written."""

import csv
import json
import tempfile
import unicodedata
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from colours import CATS_AND_DOGS, COLOURS, Seen, colour, in_train, load, save, save_classes, seen
from conftest import dataset_of
from file_names import ACUTE, DECOMPOSED, FILE_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import write_tar
from mpp.data.listing.file_index import FileIndex
from mpp.data.listing.lists import read_list, to_label_column
from mpp.data.listing.tree import walk_folder
from pyarrow import feather

from mpp.config import ImagesConfig
from mpp.data.sources import load_splits
from mpp.errors import UserError

QUICK = settings(max_examples=30, deadline=None, derandomize=True)
WHOLE = settings(max_examples=3, deadline=None, derandomize=True)
CODES = ["KE", "ZA", "NA", "TZ"]
TEXTS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=6)
LABELS = (
    st.sampled_from(["NA", "None", "null", "nan", "", " ", "-1", "01", "1", "a;b", "a,b", '"', "a\nb", "é"]) | TEXTS
)
"""Cells of a table. A number with a fraction is no class, of which test_labels.py has tests."""


def write_csv(file: Path, rows: list[dict], delimiter: str = ",", encoding: str = "utf-8") -> None:
    """A table as Python's csv writes it."""
    names = list(rows[0])
    with open(file, "w", newline="", encoding=encoding) as out:
        writer = csv.DictWriter(out, names, delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_json_lines(file: Path, rows: list[dict], encoding: str = "utf-8") -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("".join(f"{line}\n" for line in lines), encoding=encoding)


def write_parquet(file: Path, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), file)


WAYS = {
    "metadata.csv": write_csv,
    "labels.csv": partial(write_csv, delimiter=";"),
    "metadata.tsv": partial(write_csv, delimiter="\t", encoding="utf-8-sig"),
    "labels.jsonl": write_json_lines,
    "metadata.jsonl": partial(write_json_lines, encoding="utf-8-sig"),
    "Metadata.parquet": write_parquet,
}
"""Name of a list -> how it is written."""
every_way = pytest.mark.parametrize("name", WAYS)


def listed(folder: Path, labels: list, name: str = "metadata.csv", **columns) -> None:
    """Images of the colours 0, 1, ... and a list of them."""
    rows = []
    for number, label in enumerate(labels):
        row = {"file_name": f"{number}.png", "label": label}
        for column, values in columns.items():
            row[column] = values[number]
        save(folder / row["file_name"], number % 6)
        rows.append(row)
    WAYS[name](folder / name, rows)


def all_right(images: dict[str, Seen], names: str = "012345") -> bool:
    """Whether the label of each image is the name of its colour."""
    return all(image.label == names[image.kind] for image in images.values())


def counts(splits: dict[str, dict[str, Seen]]) -> dict[str, int]:
    """Split -> number of images."""
    return {name: len(images) for name, images in splits.items()}


def write_image_table(file: Path, images: list[dict], binary: pa.DataType) -> None:
    """A parquet file of {"bytes", "path"} and CODES as labels, as other tools write it."""
    cell = pa.struct([("bytes", binary), ("path", pa.string())])
    schema = pa.schema([("image", cell), ("label", pa.string())])
    pq.write_table(pa.table({"image": images, "label": CODES}, schema), file)


def labels_by_name(images: dict[str, Seen]) -> dict[str, str | None]:
    return {name: image.label for name, image in images.items()}


def colours_by_label(images: dict[str, Seen]) -> dict[str | None, int]:
    return {image.label: image.kind for image in images.values()}


# labels ---------------------------------------------------------------------------------------------------------------


@every_way
@QUICK
@given(st.lists(LABELS, min_size=1, max_size=5))
def test_text_is_text_and_only_a_blank_is_no_label(name, labels):
    rows = [{"file_name": f"{number}.png", "label": text} for number, text in enumerate(labels)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        WAYS[name](file, rows)
        image_list = read_list(str(file), "", ImagesConfig())
    assert image_list.files == [f"{number}.png" for number in range(len(labels))]
    assert to_label_column(image_list.columns["label"]) == [text.strip() or None for text in labels]


@every_way
@WHOLE
@given(
    st.lists(LABELS.map(str.strip).filter(lambda text: text.strip(" .0123456789")), min_size=2, max_size=6, unique=True)
)
def test_labels_are_those_of_their_images(name, labels):
    """To the end: images of these colours have these classes."""
    with tempfile.TemporaryDirectory() as folder:
        listed(Path(folder), [*labels, ""], name)
        images = in_train(folder)
    expected = {f"{number}.png": text for number, text in enumerate(labels)}
    assert labels_by_name(images) == {**expected, f"{len(labels)}.png": None}
    for name, image in images.items():
        assert image.kind == int(name.removesuffix(".png")) % 6


def test_spaces_around_cells_do_not_count(tmp_path):
    """As people type them."""
    for number in range(3):
        save(tmp_path / f"{number}.png", number)
    (tmp_path / "labels.csv").write_text("label, file\nred, 0.png\ngreen ,1.png\n red , 2.png \n")
    assert labels_by_name(in_train(tmp_path)) == {"0.png": "red", "1.png": "green", "2.png": "red"}


@every_way
def test_codes_of_countries_are_classes(tmp_path, capsys, name):
    """One of them is NA."""
    listed(tmp_path, [*CODES, *CODES, " "], name)
    train, _ = load(tmp_path)
    assert train.class_names == sorted(CODES) and train.classes == 4
    labels = Counter(image.label for image in in_train(tmp_path).values())
    assert labels == {**dict.fromkeys(CODES, 2), None: 1}
    assert "9 train (8 labelled); 4 classes: KE, NA, TZ, ZA" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "Metadata.parquet"])
@pytest.mark.parametrize("labels", [[998877, 45123, 812345], [-1, 1, 0], [10**17, 3, 20]])
def test_numbers_are_classes_from_zero_in_their_order(tmp_path, name, labels):
    """-1 is one of them."""
    listed(tmp_path, labels, name)
    images = in_train(tmp_path)
    assert colours_by_label(images) == {str(number): kind for kind, number in enumerate(labels)}
    train, _ = load(tmp_path)
    assert train.class_names == [str(number) for number in sorted(labels)] and train.classes == 3


def test_floating_numbers_that_are_whole_are_whole(tmp_path):
    """As pandas writes a column of integers that has blanks."""
    listed(tmp_path, [3.0, None, 1.0], "Metadata.parquet")
    assert [each.label for each in in_train(tmp_path).values()] == ["3", None, "1"]


def test_a_column_of_labels_may_be_blank_throughout(tmp_path):
    listed(tmp_path, ["", " "])
    assert labels_by_name(in_train(tmp_path)) == {"0.png": None, "1.png": None}


@pytest.mark.parametrize("name", ["labels.jsonl", "Metadata.parquet"])
def test_lists_in_lists_of_labels_are_text(tmp_path, name):
    """As where boxes are called so."""
    listed(tmp_path, [[[0, 1], [2]], [], [[3]]], name)
    train, _ = load(tmp_path, eval_split=None)
    assert {*train.class_names} == {"[0, 1]", "[2]", "[3]"}


@pytest.mark.parametrize("name", ["labels.jsonl", "Metadata.parquet"])
def test_lists_of_labels_stay_several_right_answers(tmp_path, name):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        listed(tmp_path / split, ["NA", "é", "x"], name, real=[["NA", "é"], [], ["x", "new"]])
    _, held_out = load(tmp_path, eval_label_column="real")
    answers = []
    for numbers in held_out.labels:
        answers.append({held_out.class_names[number] for number in numbers if number >= 0})
    assert answers == [{"NA", "é"}, set(), {"x", "new"}]


@pytest.mark.parametrize("several", [False, True])
def test_labels_that_utf8_lacks_are_escaped(tmp_path, several):
    """As JSON has them: half of a pair."""
    labels = ["a\ud800", "b"]
    listed(tmp_path, ["x", "y"])
    rows = [{"file_name": f"{n}.png", "label": [label] if several else label} for n, label in enumerate(labels)]
    (tmp_path / "metadata.csv").unlink()
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, _ = load(tmp_path)
    assert train.class_names == ["a\\ud800", "b"]


# files ----------------------------------------------------------------------------------------------------------------


@every_way
@WHOLE
@given(st.lists(FILE_NAMES, min_size=2, max_size=6, unique=True))
def test_names_of_files_are_found_as_they_are(name, files):
    """In a folder of such a name, too."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"file_name": f"{files[0]}/{file}.png", "label": f"class {n}"} for n, file in enumerate(files)]
        for number, row in enumerate(rows):
            save(f"{folder}/{row['file_name']}", number)
        WAYS[name](Path(folder) / name, rows)
        images = in_train(folder)
    assert labels_by_name(images) == {row["file_name"]: row["label"] for row in rows}
    assert all(each.label == f"class {each.kind}" for each in images.values())


@pytest.mark.parametrize("change", ["composed", "decomposed", "backslash", "absolute", "without ending", "dots"])
def test_other_spellings_of_a_name_are_that_file(tmp_path, change):
    for kind, form in enumerate(("NFC", "NFD")):
        folder = unicodedata.normalize(form, f"{ACUTE}t{ACUTE}")
        save(tmp_path / f"{folder}{kind}" / f"{ACUTE}{DECOMPOSED}.png", kind)
    changes = {
        "composed": lambda name: unicodedata.normalize("NFC", name),
        "decomposed": lambda name: unicodedata.normalize("NFD", name),
        "backslash": lambda name: name.replace("/", "\\"),
        "absolute": lambda name: f"{tmp_path}/{name}",
        "without ending": lambda name: name.removesuffix(".png"),
        "dots": lambda name: f"./x/..//{name}",
    }
    rows = []
    for file in tmp_path.rglob("*.png"):
        name = str(file.relative_to(tmp_path))
        rows.append({"file_name": changes[change](name), "label": file.parent.name[-1]})
    write_csv(tmp_path / "metadata.csv", rows)
    images = in_train(tmp_path)
    assert len(images) == 2 and all_right(images)


def test_names_without_endings_are_indexed_only_for_a_list_that_has_some(tmp_path):
    """Such an index of a large folder takes seconds and much memory."""
    save(tmp_path / f"{ACUTE}.png", 0)
    index = FileIndex(walk_folder(str(tmp_path)))
    assert index.find(f"{DECOMPOSED}.png", "") == 0
    assert "without_extensions" not in vars(index)
    assert index.find(DECOMPOSED, "") == 0


def test_a_name_that_is_there_is_no_other_form_of_a_name(tmp_path):
    """Two files whose names look the same."""
    save(tmp_path / f"{ACUTE}.png", 0)
    save(tmp_path / f"{DECOMPOSED}.png", 1)
    save(tmp_path / "a" / "b.png", 2)
    save(tmp_path / "a\\b.png", 3)
    names = (ACUTE, DECOMPOSED, "a/b", "a\\b")
    rows = [{"file_name": f"{name}.png", "label": str(kind)} for kind, name in enumerate(names)]
    write_csv(tmp_path / "metadata.csv", rows)
    assert all_right(in_train(tmp_path))


def test_a_list_that_is_not_there_is_named_with_the_nearest_file(tmp_path):
    (tmp_path / "labels.csv").write_text("file,label\n0.png,cat\n")
    with pytest.raises(UserError, match=r"lables\.csv, which does not exist \(did you mean labels\.csv\?\)"):
        read_list(str(tmp_path / "lables.csv"), str(tmp_path), ImagesConfig())


def test_files_that_are_not_there_are_refused_at_once_or_skipped(tmp_path, capsys):
    listed(tmp_path, list("abc") * 10)
    for number in (3, 4, 5, 6):
        (tmp_path / f"{number}.png").unlink()
    words = rf"names 4 files that are not in {tmp_path}: 3.png, 4.png, 5.png and 1 more; "
    words += r"names start from the list's folder; mend the list, or set data\.missing skip"
    with pytest.raises(UserError, match=words):
        load(tmp_path)
    images = in_train(tmp_path, missing="skip")
    assert len(images) == 26 and images["7.png"] == (1, "b")
    assert "files that a list names and that are not there (4: 3.png, ...)" in capsys.readouterr().err


def test_a_row_without_a_name_is_named(tmp_path):
    listed(tmp_path, list("abc"))
    with open(tmp_path / "metadata.csv", "a") as file:
        file.write(",d\n")
    with pytest.raises(UserError, match=r"names a file that is not in .*: row 4 names none"):
        load(tmp_path)


def test_a_file_that_is_listed_twice_counts_once(tmp_path, capsys):
    listed(tmp_path, list("abc"))
    with open(tmp_path / "metadata.csv", "a") as file:
        file.write("0.png,a\n1.png,z\n")
    assert in_train(tmp_path) == {"0.png": (0, "a"), "1.png": (1, None), "2.png": (2, "c")}
    warned = capsys.readouterr().err
    assert "files that are listed with different labels count as unlabelled (1: 1.png)" in warned


def test_an_archive_beside_its_list_is_the_images(tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for kind, name in enumerate(CATS_AND_DOGS):
            archive.writestr(f"{name}/0.png", colour(kind))
    rows = [{"file_name": f"{name}/0.png", "label": f"a {name}"} for name in CATS_AND_DOGS]
    write_json_lines(tmp_path / "metadata.jsonl", rows)
    assert in_train(tmp_path) == {"cat/0.png": (0, "a cat"), "dog/0.png": (1, "a dog")}


# where lists stand ----------------------------------------------------------------------------------------------------


def test_a_list_in_a_split_is_of_that_split(tmp_path, capsys):
    """The others keep the classes of their folders, and nothing is left out."""
    save_classes(tmp_path / "train", CATS_AND_DOGS, 4)
    save_classes(tmp_path / "test", ["x", "y"], 2)
    rows = []
    for folder, label in zip("xy", CATS_AND_DOGS, strict=True):
        rows += [{"file_name": f"{folder}/{number}.png", "label": label} for number in range(2)]
    write_csv(tmp_path / "test" / "metadata.csv", rows)
    images = seen(tmp_path)
    assert Counter(images["train"].values()) == {(0, "cat"): 4, (1, "dog"): 4}
    assert Counter(images["test"].values()) == {(0, "cat"): 2, (1, "dog"): 2}
    assert "left out" not in capsys.readouterr().err


def test_a_list_at_the_top_is_of_all_splits(tmp_path, capsys):
    rows = []
    for number, split in enumerate(("train", "train", "val")):
        save(tmp_path / split / f"{number}.png", number)
        rows.append({"path": f"{split}/{number}.png", "label": "ab"[number % 2]})
    save(tmp_path / "val" / "unlisted.png", 5)
    write_csv(tmp_path / "labels.csv", rows)
    assert seen(tmp_path) == {
        "train": {"train/0.png": (0, "a"), "train/1.png": (1, "b")},
        "validation": {"val/2.png": (2, "a")},
    }
    assert "files missing from all lists (1: val/unlisted.png)" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["val", "Validation", " dev "])
def test_a_list_may_say_the_split(tmp_path, word):
    listed(tmp_path, list("aabb"), split=["train", word, "train", word])
    assert seen(tmp_path) == {
        "train": {"0.png": (0, "a"), "2.png": (2, "b")},
        "validation": {"1.png": (1, "a"), "3.png": (3, "b")},
    }


@pytest.mark.parametrize("inside", [False, True])
def test_a_list_anywhere(tmp_path, inside):
    """Its names are from data.path on; other lists do not count."""
    save_classes(tmp_path / "data", CATS_AND_DOGS, 1)
    (tmp_path / "data" / "metadata.csv").write_text("file_name,label\ncat/0.png,wrong\n")
    file = tmp_path / ("data/mine.csv" if inside else "elsewhere.csv")
    rows = [{"id": n, "photo": f"{name}/0.png", "species": f"a {name}"} for n, name in enumerate(CATS_AND_DOGS)]
    write_csv(file, rows)
    ways = dict(labels=str(file), file_column="photo", label_column="species")
    assert in_train(tmp_path / "data", **ways) == {"cat/0.png": (0, "a cat"), "dog/0.png": (1, "a dog")}
    with pytest.raises(UserError, match=r"has the columns id, photo, species; data\.file_column must name the column"):
        load(tmp_path / "data", labels=str(file))
    with pytest.raises(UserError, match=r"data\.label_column is kind; .* has image, id, species"):
        load(tmp_path / "data", **ways | {"label_column": "kind"})


@pytest.mark.parametrize("start", ["", "data/", "./data/"])
def test_names_in_a_list_elsewhere_start_from_the_images_or_from_the_list(tmp_path, start):
    save_classes(tmp_path / "data", CATS_AND_DOGS, 1)
    file = tmp_path / "elsewhere.csv"
    write_csv(file, [{"file": f"{start}{name}/0.png", "label": f"a {name}"} for name in CATS_AND_DOGS])
    ways = dict(labels=str(file))
    assert in_train(tmp_path / "data", **ways) == {"cat/0.png": (0, "a cat"), "dog/0.png": (1, "a dog")}
    write_csv(file, [{"file": f"{start}cat/1.png"}])
    with pytest.raises(UserError, match=r"cat/1\.png; names start from data\.path or the list's folder; mend the list"):
        load(tmp_path / "data", **ways)


def test_the_column_of_labels_is_named_as_it_is_written(tmp_path):
    save_classes(tmp_path, ["x"], 2)
    write_csv(tmp_path / "labels.csv", [{"file": f"x/{n}.png", "Label": "ab"[n]} for n in range(2)])
    for column in ("Label", None):
        assert labels_by_name(in_train(tmp_path, label_column=column)) == {"x/0.png": "a", "x/1.png": "b"}


def test_folders_are_the_classes_beside_a_list_without_labels_and_it_is_said(tmp_path, capsys):
    """They may be folders of sites."""
    save_classes(tmp_path / "data", ["here", "there"], 1)
    file = tmp_path / "plants.csv"
    rows = [{"file": f"{name}/0.png", "split": "train", "species": "oak", "age": 3} for name in ("here", "there")]
    write_csv(file, rows)
    said = "classes are folders: no list has a column `label`; data.label_column may name one of age, species"
    for column in (None, "species"):
        images = in_train(tmp_path / "data", labels=str(file), label_column=column)
        assert {image.label for image in images.values()} == ({"oak"} if column else {"here", "there"})
        assert (said in capsys.readouterr().out) == (column is None)


@pytest.mark.parametrize("column", ["file_name", "File Name", "FILENAME", "file", "path", "image"])
def test_the_column_of_files_is_found(tmp_path, column):
    save_classes(tmp_path, ["x"], 2)
    write_csv(tmp_path / "labels.csv", [{"label": "ab"[n], column: f"x/{n}.png"} for n in range(2)])
    assert in_train(tmp_path) == {"x/0.png": (0, "a"), "x/1.png": (0, "b")}


# how lists are written ------------------------------------------------------------------------------------------------


COLUMNS = st.sampled_from(["a, b, c", "fine; coarse; other", "x\ty\tz", 'say "a, b; c"', "1,5\n2,5"]) | TEXTS
COLUMNS = COLUMNS.map(str.strip).filter(bool)
"""Names of columns."""


@QUICK
@given(
    st.sampled_from([",", ";", "\t"]),
    st.lists(COLUMNS, max_size=3, unique=True),
    st.booleans(),
)
def test_any_table_that_python_writes_is_read(delimiter, names, quoted):
    """Whatever is between columns, also where it occurs in their names."""
    names = [*dict.fromkeys(["file_name", "label", *names])]
    rows = [[f"{column}{delimiter}{row}" for column in range(len(names))] for row in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metadata.csv"
        with open(file, "w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL)
            writer.writerows([names, *rows])
        image_list = read_list(str(file), "", ImagesConfig())
    assert image_list.files == [row[0] for row in rows]
    assert {*image_list.columns, *image_list.others} <= {*names}
    assert image_list.columns["label"] == [row[1] for row in rows]


@pytest.mark.parametrize("encoding", ["utf-8", "utf8", "UTF-8", "utf-8-sig"])
@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize("name", ["metadata.csv", "labels.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path, encoding, mark, name):
    listed(tmp_path, ["é", "b"], name)
    file = tmp_path / name
    file.write_bytes((b"\xef\xbb\xbf" if mark else b"") + file.read_bytes())
    assert in_train(tmp_path, labels_encoding=encoding) == {"0.png": (0, "é"), "1.png": (1, "b")}


@pytest.mark.parametrize("name", ["metadata.csv", "labels.jsonl"])
def test_another_encoding_is_named_and_told(tmp_path, name):
    listed(tmp_path, ["é", "b"], name)
    (tmp_path / name).write_bytes((tmp_path / name).read_text("utf-8").encode("latin-1"))
    with pytest.raises(UserError, match=rf"{name} cannot be read: it is not utf-8; data\.labels_encoding names its"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"data\.labels_encoding is latin9000, which is not an encoding"):
        load(tmp_path, labels_encoding="latin9000")
    assert in_train(tmp_path, labels_encoding="latin-1")["0.png"] == (0, "é")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\n\n", "\r\n\r\n"])
def test_ends_of_lines_and_empty_lines(tmp_path, end):
    listed(tmp_path, list("ab"))
    (tmp_path / "metadata.csv").write_bytes(f"file_name,label{end}0.png,a{end},{end}1.png,b,,{end}".encode())
    assert in_train(tmp_path) == {"0.png": (0, "a"), "1.png": (1, "b")}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        pytest.param(
            "metadata.csv",
            "file_name,label\n0.png,a,b\n",
            "line 2 has 3 cells, and the first line 2",
            id="a cell too many",
        ),
        pytest.param(
            "metadata.csv",
            "file_name,label,label\n0.png,a,b\n",
            "it has the column label twice",
            id="a column twice",
        ),
        pytest.param(
            "metadata.csv",
            "name,label\n0.png,a\n",
            "has the columns name, label; data.file_column must name",
            id="no column of files",
        ),
        pytest.param("metadata.csv", "", "has the columns nothing; data.file_column must name", id="empty"),
        pytest.param(
            "metadata.csv",
            'file_name,label\n0.png,a\n"1.png,a\n2.png,b\n',
            "cannot be read: the row of line 3: unexpected end of data",
            id="an open quote",
        ),
        pytest.param(
            "metadata.csv",
            'file_name,label\n\n0.png,"two\nlines"\n1.png,"big" cat\n',
            "the row of line 5: ',' expected after",
            id="text behind a quote",
        ),
        pytest.param(
            "metadata.jsonl",
            '{"file_name": "0.png"}\n{"file_name"\n',
            "line 2 is not JSON",
            id="half an object",
        ),
        pytest.param("metadata.jsonl", '["0.png"]\n', "line 1 is not an object", id="no object"),
        pytest.param("metadata.parquet", "PAR", "cannot be read", id="half a parquet file"),
    ],
)
def test_a_list_that_cannot_be_read_is_named(tmp_path, name, text, words):
    save(tmp_path / "0.png")
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        load(tmp_path)
    message = str(error.value)
    assert f"{tmp_path}/{name}" in message
    assert words in message
    assert "\n" not in message


# parquet with images --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [pa.binary(), pa.large_binary()])
def test_a_struct_of_bytes_and_path_is_an_image(tmp_path, binary):
    """As other tools rewrite a table, without the library's metadata."""
    images = [{"bytes": colour(kind), "path": f"{kind}.png"} for kind in range(4)]
    write_image_table(tmp_path / "train.parquet", images, binary)
    assert colours_by_label(in_train(tmp_path)) == {code: kind for kind, code in enumerate(CODES)}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("write", [pq.write_table, feather.write_feather])
def test_labels_may_be_views_of_texts(tmp_path, write, several):
    """As polars writes a table."""
    try:
        datasets.Features.from_arrow_schema(pa.schema({"label": pa.string_view()}))
    except ValueError:
        pytest.skip("this release of datasets reads no views")
    images = [{"bytes": colour(kind), "path": f"{kind}.png"} for kind in range(4)]
    kind = pa.list_(pa.string_view()) if several else pa.string_view()
    labels = pa.array([[code] if several else code for code in CODES], kind)
    end = "parquet" if write is pq.write_table else "arrow"
    write(pa.table({"image": images, "label": labels}), tmp_path / f"train.{end}")
    assert colours_by_label(in_train(tmp_path)) == {code: kind for kind, code in enumerate(CODES)}


@pytest.mark.parametrize("place", [".", "data"])
def test_paths_in_parquet_are_from_the_file_on(tmp_path, place):
    """Also where a card declares the file."""
    for kind in range(4):
        save(tmp_path / place / "images" / f"{kind}.png", kind)
    images = [{"bytes": None, "path": f"images/{kind}.png"} for kind in range(4)]
    write_image_table(tmp_path / place / "train.parquet", images, pa.binary())
    if place == "data":
        files = "data_files: data/train.parquet"
        (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {files}\n---\n")
    known = in_train(tmp_path, image_column="image")
    assert colours_by_label(known) == {code: kind for kind, code in enumerate(CODES)}
    refused = r"train\.parquet has relative paths of images \(image: images/0\.png\): leave out data\.streaming"
    with pytest.raises(UserError, match=refused):
        load_splits(ImagesConfig(path=str(tmp_path), image_column="image"), streaming=True)


@pytest.mark.parametrize("end", ["parquet", "arrow", "file of arrow"])
@pytest.mark.parametrize("places", [("train", "test"), ("train/b", "train/a")])
def test_paths_of_the_same_name_are_from_the_folder_of_their_own_table(tmp_path, places, end):
    """Not from that of another split, whose images would be trained on."""
    for number, place in enumerate(places):
        images = []
        for kind in range(2 + number):
            save(tmp_path / place / "images" / f"{kind}.png", 3 * number + kind)
            images.append({"bytes": None, "path": f"images/{kind}.png"})
        table = pa.table({"image": images, "label": [str(3 * number + kind) for kind in range(2 + number)]})
        if end == "parquet":
            pq.write_table(table, tmp_path / place / "table.parquet")
            continue
        write = pa.ipc.new_stream if end == "arrow" else pa.ipc.new_file
        with write(tmp_path / place / "table.arrow", table.schema) as file:
            file.write(table)
    known = [image for images in seen(tmp_path).values() for image in images.values()]
    assert sorted(known) == [(kind, str(kind)) for kind in (0, 1, 3, 4, 5)]


def test_images_without_a_split_in_a_list_train_and_are_said(tmp_path, capsys):
    listed(tmp_path, list("abab"), split=["train", "test", "", " "])
    assert counts(seen(tmp_path)) == {"train": 3, "test": 1}
    said = "images without a split in a list are used for training (2: 2.png, 3.png)"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_paths_of_text_in_parquet_are_from_the_file_on_not_from_where_the_command_is_run(tmp_path, monkeypatch, kind):
    for number, place in enumerate(("data", "elsewhere")):
        save(tmp_path / place / "0.png", number)
    pq.write_table(pa.table({"photo": pa.array(["0.png"] * 2, kind)}), tmp_path / "data" / "a.parquet")
    monkeypatch.chdir(tmp_path / "elsewhere")
    train, held_out = load(tmp_path / "data" / "a.parquet", image_column="photo")
    for images in (train, held_out):
        assert images.decode(0, ImagesConfig())[0, 4, 4] == COLOURS[0][0]


def test_lists_of_one_folder_are_joined_and_inner_ones_count_more(tmp_path):
    """A list without labels takes no label away."""
    for number in range(6):
        save(tmp_path / "train" / f"{number}.png", number % 3)
    labels = [{"file": f"{number}.png", "label": "abc"[number % 3]} for number in range(6)]
    ages = [{"file_name": f"{number}.png", "age": number} for number in range(6)]
    outer = [{"file_name": f"train/{number}.png", "label": "x"} for number in range(6)]
    write_csv(tmp_path / "train" / "labels.csv", labels)
    write_csv(tmp_path / "train" / "metadata.csv", ages)
    write_csv(tmp_path / "metadata.csv", outer)
    images = in_train(tmp_path, eval_split=None)
    assert all_right(images, "abc") and len(images) == 6


def test_absolute_names_are_found_through_a_link_to_the_images(tmp_path):
    for split in ("train", "val"):
        save_classes(tmp_path / "real" / split, CATS_AND_DOGS)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files = sorted((tmp_path / "real").rglob("*.png"))
    write_csv(tmp_path / "all.csv", [{"file": str(file), "label": file.parent.name} for file in files])
    splits = seen(tmp_path / "link", labels=str(tmp_path / "all.csv"))
    assert counts(splits) == {"train": 4, "validation": 4}


def test_a_bare_name_is_found_in_a_folder_below_where_it_is_the_only_one(tmp_path):
    """As competitions have it: a table of ids, and folders of images."""
    for number in range(6):
        save(tmp_path / ("part_1" if number < 3 else "part_2") / f"id{number}.png", number % 3)
    write_csv(tmp_path / "labels.csv", [{"id": f"id{number}", "breed": "abc"[number % 3]} for number in range(6)])
    images = in_train(tmp_path, file_column="id", label_column="breed")
    assert all_right(images, "abc") and len(images) == 6
    save(tmp_path / "part_2" / "id0.png", 0)
    with pytest.raises(UserError, match=r"names a file that is not in .*: id0 \(several have this name\);"):
        load(tmp_path, file_column="id", label_column="breed")
    write_csv(tmp_path / "labels.csv", [{"id": f"part_1/id{number}", "breed": "a"} for number in range(4)])
    save(tmp_path / "part_1" / "id1.jpg", 0)
    with pytest.raises(UserError, match=r"2 files .*: part_1/id1 \(several have this name\), part_1/id3;"):
        load(tmp_path, file_column="id", label_column="breed")


def test_a_file_that_is_listed_in_two_splits_is_named(tmp_path, capsys):
    for number in range(4):
        save(tmp_path / f"{number}.png", number)
    rows = [{"file": "3.png", "split": "test"}]
    for number in range(3):
        rows.append({"file": f"{number}.png", "split": "train"})
        rows.append({"file": f"{number}.png", "split": "test"})
    write_csv(tmp_path / "metadata.csv", rows)
    assert counts(seen(tmp_path)) == {"train": 3, "test": 1}
    assert "files that are listed in several splits count in the first of these (3: 0.png" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["a parquet file", "a tar", "a saved dataset"])
def test_a_list_of_what_has_labels_of_its_own_is_refused(tmp_path, what):
    rows = dataset_of([colour(0)] * 4)
    if what == "a parquet file":
        path = tmp_path / "a.parquet"
        rows.to_parquet(path)
    elif what == "a tar":
        path = tmp_path / "a.tar"
        write_tar(path, [("0.png", colour(0))])
    else:
        path = tmp_path / "saved"
        rows.save_to_disk(path)
    with pytest.raises(UserError, match=r"data\.labels is gone\.csv; it must be left out: .* shards have labels of"):
        load(path, labels="gone.csv")


def test_a_list_that_is_named_is_not_left_out_but_others_are(tmp_path, capsys):
    for number in range(4):
        save(tmp_path / f"{number}.png", number)
    for name in ("train.csv", "other.csv"):
        write_csv(tmp_path / name, [{"file": f"{number}.png", "label": number} for number in range(4)])
    assert len(in_train(tmp_path, labels=str(tmp_path / "train.csv"))) == 4
    said = "left out: .csv files; data.labels names a list of images (1: other.csv)\n"
    assert said in capsys.readouterr().out
    (tmp_path / "other.csv").unlink()
    in_train(tmp_path, labels=str(tmp_path / "train.csv"))
    assert "left out" not in capsys.readouterr().out
    link = tmp_path.with_name(f"{tmp_path.name} link")
    link.symlink_to(tmp_path)
    in_train(link, labels=str(tmp_path / "train.csv"))
    assert "left out" not in capsys.readouterr().out


def test_a_table_that_is_named_as_the_list_holds_no_images(tmp_path, capsys):
    """Though it may have bytes, such as features of the images."""
    rows = [{"file": f"{number}.png", "label": str(number), "features": b"1"} for number in range(4)]
    for number in range(4):
        save(tmp_path / f"{number}.png", number)
    write_parquet(tmp_path / "mine.parquet", rows)
    assert all_right(in_train(tmp_path, labels=str(tmp_path / "mine.parquet")))
    output = capsys.readouterr()
    assert "left out" not in output.out + output.err
