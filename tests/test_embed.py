"""Features as a table: the encoder's own, broken images named, resumed to the same rows."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import FAST, encoded, interrupted_after, picture, refused
from PIL import Image

import mpp
from evaluation import embed, tables


@pytest.fixture
def images(image_folder):
    (image_folder / "cat" / "broken.png").write_bytes(encoded(picture(1))[:60])
    return image_folder


def rows_of(file):
    return {row["file"].rsplit("/", 1)[-1]: row for row in pq.read_table(file).to_pylist()}


def test_each_image_has_a_row_and_a_table_is_neither_made_again_nor_written_over(
    images, finished_run, tmp_path, monkeypatch, capsys
):
    """A broken image's row says so. A table of other images, weights or settings is refused; and what is no table."""
    file = tmp_path / "features.parquet"
    words = [f"--encoder={finished_run}", f"--data.path={images}", f"--out={file}", *FAST]
    embed.main(words)
    rows = rows_of(file)
    assert len(rows) == 13 and rows["broken.png"]["features"] is None and "broken" not in str(rows["00.png"])
    assert [name for name, row in rows.items() if row["error"]] == ["broken.png"]
    encoder = mpp.load_encoder(finished_run)
    for name in ("00.png", "11.png"):
        whole = Image.open(next(images.rglob(name)))
        np.testing.assert_allclose(rows[name]["features"], mpp.extract_features(encoder, whole)[0], atol=1e-5)

    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(tables.ImageBatch, "table", None)
        embed.main(words)
    assert f"note: {file} was complete already" in capsys.readouterr().out
    (images / "cat" / "01.png").unlink()
    for others in ([], ["--random=true"], ["--depth=1"], ["--representation=class"]):
        with refused("it must be a new file: the existing one is from other images, weights"):
            embed.main([*words, *others])
    assert file.read_bytes() == before
    file.write_text("text of some length")
    with refused(r"out is .*features\.parquet; it must be a new file"):
        embed.main(words)
    assert file.read_text() == "text of some length"
    assert not list(tmp_path.glob(".*"))


def test_parts_of_something_else_are_written_over(images, finished_run, tmp_path, monkeypatch):
    """Of a folder that has changed since, too: it has fewer images, and fewer parts."""
    monkeypatch.setattr(tables, "BATCHES_PER_PART", 1)
    file = tmp_path / "features.parquet"
    words = [f"--encoder={finished_run}", f"--data.path={images}", f"--out={file}", *FAST]
    with interrupted_after(tables, "write_complete", 0):
        embed.main(words)
    for image in sorted(images.rglob("0*.png"))[:6]:
        image.unlink()
    embed.main(words)
    embed.main([*words, f"--out={tmp_path / 'new.parquet'}"])
    rows = rows_of(file)
    assert len(rows) == pq.read_metadata(file).num_rows == 7 and rows == rows_of(tmp_path / "new.parquet")


def test_images_of_one_type_and_broken_ones_make_a_batch():
    samples = [(torch.zeros(3, 2, 2), None), (torch.zeros(3, 2, 2, dtype=torch.uint8), "broken")]
    pixels, errors = tables.collate(samples)
    assert pixels.dtype == torch.float32 and errors == [None, "broken"]
