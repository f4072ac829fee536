"""Other columns of images, such as site and date, beside predictions: whole, by their names, in little memory."""

import csv
import datetime
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from classified_images import FAST, predict_to, read_csv
from conftest import encoded, interrupt_after, picture
from datasets import ClassLabel, List, Value

from evaluation import embed
from evaluation.tables import given, parts
from evaluation.tables.given import given_columns
from mpp.errors import UserError
from mpp.runtime import messages

SITES = ("river, north", 'the "old" mill', None, "ü")


def write_list(folder: Path, name: str = "metadata.csv", count: int = 12) -> Path:
    """A flat folder of images with a list that has a site, a date, and columns whose names the table has itself."""
    folder.mkdir(parents=True)
    with (folder / name).open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["file_name", "site", "date", "class", "p_owl"])
        for number in range(count):
            (folder / f"{number}.png").write_bytes(encoded(picture(number)))
            writer.writerow([f"{number}.png", SITES[number % 4], f"2024-01-{number + 1:02d}", "?", number / 2])
    return folder


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_a_list_of_images_keeps_its_columns_beside_the_predictions(name, run_with_head, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts, "ROWS_PER_PART", 5)
    folder = write_list(tmp_path / "images")
    out = predict_to(tmp_path / name, run_with_head / "evaluation" / "birds_head", folder)
    rows = read_csv(out) if name.endswith("csv") else pq.read_table(out).to_pylist()
    names = list(rows[0])
    after = names.index("error") + 1
    assert names[after : after + 4] == ["site", "date", "given_class", "given_p_owl"]
    for row in rows:
        number = int(row["file"].removesuffix(".png"))
        site = SITES[number % 4]
        assert row["site"] == (site if site or name == "p.parquet" else "")
        assert row["date"] == f"2024-01-{number + 1:02d}" and float(row["given_p_owl"]) == number / 2
        assert row["given_class"] == "?" and row["class"] != "?" and row["split"] == "all"
    assert "class (given_class), p_owl (given_p_owl)" in capsys.readouterr().out


def test_a_table_is_another_where_a_given_column_changes(run_with_head, tmp_path, monkeypatch):
    folder = write_list(tmp_path / "images")
    head = run_with_head / "evaluation" / "birds_head"
    monkeypatch.setattr(parts, "ROWS_PER_PART", 5)
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        interrupt_after(context, given.GivenColumns, "add_to", 2)
        predict_to(tmp_path / "p.csv", head, folder)
    table = folder / "metadata.csv"
    table.write_text(table.read_text(encoding="utf-8").replace("2024", "2025"), encoding="utf-8")
    out = predict_to(tmp_path / "p.csv", head, folder)
    assert {row["date"][:4] for row in read_csv(out)} == {"2025"}  # parts of the earlier list are not taken over
    table.write_text(table.read_text(encoding="utf-8").replace("2025", "2026"), encoding="utf-8")
    with pytest.raises(UserError, match=r"out is .*p\.csv; it must be a new file"):
        predict_to(out, head, folder)


TYPES = datasets.Features(
    {
        "image": datasets.Image(decode=False),
        "thumbnail": datasets.Image(decode=False),
        "sound": Value("binary"),
        "species": ClassLabel(names=["owl", "duck"]),
        "when": Value("timestamp[s]"),
        "tags": List(Value("string")),
        "box": List(Value("int64")),
        "count": Value("int32"),
        "error": Value("string"),
        "nothing": Value("null"),
    }
)


def rows_of_types() -> datasets.Dataset:
    image = {"bytes": encoded(picture(1)), "path": None}
    when = datetime.datetime(2024, 5, 6)
    columns = {
        "image": [image] * 2,
        "thumbnail": [image] * 2,
        "sound": [b"a", None],
        "species": [1, None],
        "when": [when, None],
        "tags": [["night", "rain"], []],
        "box": [[1, 2], None],
        "count": [3, None],
        "error": ["blurred", None],
        "nothing": [None, None],
    }
    return datasets.Dataset.from_dict(columns, features=TYPES)


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_columns_of_all_types_are_taken_over(name, capsys):
    """Of two splits, one of which has other columns; classes have their names, and files are left out by name."""
    messages.tell.cache_clear()  # which prints a line once
    other = rows_of_types().select_columns(["image", "count"]).cast_column("count", Value("string"))
    splits = {"train": rows_of_types(), "test": other}
    columns = given_columns(splits, Path(name), {"image"})
    own = pa.table({"file": ["a", "b"], "error": pa.array([None, None], pa.string()), "p_x": [0.0, 1.0]})
    table = columns.add_to(own, "train", range(2))
    assert table.schema == columns.add_to(own, "test", range(2)).schema  # the parts are joined
    names = ["species", "when", "tags", "box", "count", "given_error", "nothing"]
    assert table.column_names == ["file", "error", *names, "p_x"]
    as_text = name == "p.csv"
    assert table.slice(0, 1).select(names).to_pylist() == [
        {
            "species": "duck",
            "when": datetime.datetime(2024, 5, 6),
            "tags": "night;rain" if as_text else ["night", "rain"],
            "box": "[1, 2]" if as_text else [1, 2],
            "count": "3",
            "given_error": "blurred",
            "nothing": None,
        }
    ]
    empty = dict.fromkeys(names) | {"tags": "" if as_text else []}
    assert table.slice(1, 1).select(names).to_pylist() == [empty]
    of_test = columns.add_to(own, "test", range(2)).select(names).to_pylist()
    assert of_test == [dict.fromkeys(names) | {"count": count} for count in ("3", None)]
    assert "are not in the table: thumbnail, sound" in capsys.readouterr().out


def test_only_the_rows_of_a_part_are_read(monkeypatch):
    """Also of rows that the library has selected, and without the images."""
    rows = datasets.Dataset.from_dict({"image": [b""] * 9, "site": list("abcdefghi")}).select(range(8, 0, -1))
    columns = given_columns({"all": rows}, Path("p.csv"), {"image"})
    sizes = []
    convert = given.convert
    monkeypatch.setattr(given, "convert", lambda values, *types: sizes.append(len(values)) or convert(values, *types))
    table = columns.add_to(pa.table({"error": pa.nulls(3, pa.string())}), "all", range(2, 5))
    assert table.column("site").to_pylist() == ["g", "f", "e"] and sizes == [3]
    assert columns.splits["all"].column_names == ["site"]


def test_embeddings_have_the_columns_too(finished_run, tmp_path):
    folder = write_list(tmp_path / "images")
    out = tmp_path / "e.parquet"
    embed.main([f"--encoder={finished_run}", f"--data.path={folder}", f"--out={out}", *FAST])
    table = pq.read_table(out)
    assert table.column_names == ["file", "split", "features", "error", "site", "date", "class", "p_owl"]
    assert table["site"].to_pylist() == [SITES[int(Path(file).stem) % 4] for file in table["file"].to_pylist()]
