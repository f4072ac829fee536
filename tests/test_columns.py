"""Cells of a column of images."""

import pytest

from mpp.data.columns import read_cell
from mpp.errors import UnreadableImage


def test_a_cell_may_hold_a_url(image_folder):
    file = image_folder / "cat" / "01.png"
    assert read_cell({"bytes": b"file", "path": "anything"}, 0) == b"file"
    for path in (str(file), f"file://{file}"):
        assert read_cell({"bytes": None, "path": path}, 0) == file.read_bytes()


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}, {"bytes": None, "path": ""}])
def test_a_cell_without_an_image_is_unreadable(cell):
    with pytest.raises(UnreadableImage, match="no bytes"):
        read_cell(cell, 0)


def test_a_relative_path_in_a_table_starts_nowhere(image_folder, monkeypatch):
    monkeypatch.chdir(image_folder)
    with pytest.raises(UnreadableImage, match=r"cat/01\.png is a relative path; give a table .* as data\.labels"):
        read_cell({"bytes": None, "path": "cat/01.png"}, 0)
