"""Cells of a column of images."""

import pytest
import torch

from mpp.config import ImagesConfig
from mpp.data.columns import decode_cell
from mpp.errors import UnreadableImage


def test_a_cell_may_hold_a_url(image_folder):
    file = image_folder / "cat" / "01.png"
    expected = decode_cell({"bytes": file.read_bytes(), "path": "anything"}, ImagesConfig())
    for path in (str(file), f"file://{file}"):
        assert torch.equal(decode_cell({"bytes": None, "path": path}, ImagesConfig()), expected)


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}, {"bytes": None, "path": ""}])
def test_a_cell_without_an_image_is_unreadable(cell):
    with pytest.raises(UnreadableImage, match="no bytes"):
        decode_cell(cell, ImagesConfig())
