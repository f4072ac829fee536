"""Features as a table: the encoder's own, broken images named, resumed to the same rows."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import timm
import torch
from conftest import encoded, interrupt_after, picture
from PIL import Image

import mpp
from evaluation import embed, export, finetune, predict, tables
from evaluation.supervision.classifiers import load_classifier
from mpp.config import ImagesConfig
from mpp.data.crops import centre_crop
from mpp.data.decoding.decode import decode
from mpp.errors import UserError

FAST = ("--precision=fp32", "--data.workers=0", "--threads=1")


@pytest.fixture
def images(image_folder):
    (image_folder / "cat" / "broken.png").write_bytes(encoded(picture(1))[:60])
    return image_folder


def rows_of(file):
    return {row["file"].rsplit("/", 1)[-1]: row for row in pq.read_table(file).to_pylist()}


def test_each_image_has_a_row_and_a_broken_one_says_so(images, finished_run, tmp_path):
    file = tmp_path / "features.parquet"
    embed.main([f"--encoder={finished_run}", f"--data.path={images}", f"--out={file}", *FAST])
    rows = rows_of(file)
    assert len(rows) == 13 and rows["broken.png"]["features"] is None and "broken" not in str(rows["00.png"])
    assert rows["broken.png"]["error"] and all(row["error"] is None for name, row in rows.items() if name[0] != "b")
    encoder = mpp.load_encoder(finished_run)
    for name in ("00.png", "11.png"):
        whole = Image.open(next(images.rglob(name)))
        np.testing.assert_allclose(rows[name]["features"], mpp.extract_features(encoder, whole)[0], atol=1e-5)
    assert list(tmp_path.glob(".*")) == []


def test_what_is_there_is_not_done_again(images, finished_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "BATCHES_PER_PART", 3)
    words = [f"--encoder={finished_run}", f"--data.path={images}", "--data.batch_size=2", *FAST]
    embed.main([*words, f"--out={tmp_path / 'whole.parquet'}"])
    file = tmp_path / "features.parquet"
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        interrupt_after(context, tables.ImageBatch, "table", 6)
        embed.main([*words, f"--out={file}"])
    assert not file.exists()
    with monkeypatch.context() as context:
        interrupt_after(context, tables.ImageBatch, "table", 1)  # 12 of the 13 images are in parts
        embed.main([*words, f"--out={file}"])
    assert rows_of(file) == rows_of(tmp_path / "whole.parquet")
    said = "was complete already, so nothing is computed again"
    assert said not in capsys.readouterr().out
    monkeypatch.setattr(tables.ImageBatch, "table", None)
    embed.main([*words, f"--out={file}"])
    assert f"note: {file} {said}" in capsys.readouterr().out


def test_a_table_of_something_else_is_not_written_over(images, finished_run, tmp_path):
    file = tmp_path / "features.parquet"
    words = [f"--encoder={finished_run}", f"--data.path={images}", f"--out={file}", *FAST]
    embed.main(words)
    before = file.read_bytes()
    (images / "cat" / "01.png").unlink()
    for others in ([], ["--representation=class"]):
        with pytest.raises(ValueError, match="it must be a new file: the existing one is from other images, weights"):
            embed.main([*words, *others])
    assert file.read_bytes() == before


@pytest.mark.parametrize("kind", ["text", "folder"])
def test_what_is_no_table_is_not_written_over(kind, images, finished_run, tmp_path):
    file = tmp_path / "features.parquet"
    file.mkdir() if kind == "folder" else file.write_text("text of some length")
    with pytest.raises(UserError, match=r"out is .*features\.parquet; it must be a new file"):
        embed.main([f"--encoder={finished_run}", f"--data.path={images}", f"--out={file}", *FAST])
    assert file.is_dir() or file.read_text() == "text of some length"
    assert not list(tmp_path.glob(".*"))


def test_parts_of_something_else_are_written_over(images, finished_run, tmp_path, monkeypatch):
    """Of a folder that has changed since, too: it has fewer images, and fewer parts."""
    monkeypatch.setattr(tables, "BATCHES_PER_PART", 1)
    words = [f"--encoder={finished_run}", f"--data.path={images}", f"--out={tmp_path / 'features.parquet'}", *FAST]
    with monkeypatch.context() as broken_off:
        broken_off.setattr(tables, "write_complete", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            embed.main(words)
    for file in sorted(images.rglob("0*.png"))[:6]:
        file.unlink()
    embed.main(words)
    embed.main([*words[:2], f"--out={tmp_path / 'new.parquet'}", *FAST])
    rows = rows_of(tmp_path / "features.parquet")
    assert len(rows) == pq.read_metadata(tmp_path / "features.parquet").num_rows == 7
    assert rows == rows_of(tmp_path / "new.parquet")


def test_a_table_of_other_weights_is_another(images, trained, tmp_path):
    words = [f"--data.path={images}", f"--encoder={trained}", f"--out={tmp_path / 'features.parquet'}", *FAST]
    embed.main(words)
    for others in (["--random=true"], ["--random=true", "--seed=1"], ["--depth=1"]):
        with pytest.raises(UserError, match="it must be a new file"):
            embed.main([*words, *others])


@pytest.mark.faults
def test_a_fine_tuned_run_says_what_it_takes_each_image_for(images, finished_run, tmp_path):
    (images / "cat" / "broken.png").unlink()
    words = ["--data.eval_fraction=0.3", "--lrs=0.1", "--run.steps=3", "--data.workers=0", "--run.threads=1"]
    tuned, file = tmp_path / "tuned", tmp_path / "predictions.parquet"
    finetune.main([f"--encoder={finished_run}", f"--data.path={images}", f"--run.dir={tuned}", *words])
    words = [f"--data.path={images}", f"--out={file}", *FAST]
    predict.main([f"--classifier={tuned / 'lr_0.1'}", *words])
    rows = pq.read_table(file).to_pylist()
    network, size, *_ = load_classifier(str(tuned / "lr_0.1"), 3, "classifier")
    for row in rows[::5]:
        image = centre_crop(decode((images / row["file"]).read_bytes(), ImagesConfig()), size, 0.875)
        expected = network.eval()(image[None].float())[0].softmax(0).detach()
        assert np.allclose([row["p_cat"], row["p_dog"]], expected, atol=1e-5)
    for format, end in (("onnx", "onnx"), ("torch_export", "pt2")):
        written = tmp_path / f"classifier.{end}"
        options = [f"--format={format}", f"--out={written}", "--images=5", "--threads=1"]
        export.main([f"--classifier={tuned / 'lr_0.1'}", *options, "--data.workers=0"])
        found = export.read_file(written)(torch.zeros(1, 3, *size, dtype=torch.uint8))
        assert torch.allclose(found, network(torch.zeros(1, 3, *size)), atol=1e-5)
        about = json.loads(written.with_name(f"{written.name}.json").read_text())["about"]
        assert about["label_names"] == ["cat", "dog"]
    model = timm.create_model(f"local-dir:{tuned / 'classifier'}", pretrained=True).eval()
    assert model.pretrained_cfg["label_names"] == ["cat", "dog"]
    with torch.no_grad():
        torch.testing.assert_close(model(-torch.ones(1, 3, *size)), network(torch.zeros(1, 3, *size)))
    of_encoder = []
    for place in (tuned, tuned / "lr_0.1"):  # a fine-tuning's folder means its tested run, in every command
        file = tmp_path / f"{place.name}.parquet"
        embed.main([f"--encoder={place}", f"--data.path={images}", f"--out={file}", *FAST])
        of_encoder.append(rows_of(file))
    assert of_encoder[0] == of_encoder[1]
    with pytest.raises(
        UserError, match=r"classifier is .*; it must be the folder of a finished supervised or fine-tuned"
    ):
        predict.main([f"--classifier={finished_run}", *words])


def test_images_of_one_type_and_broken_ones_make_a_batch():
    samples = [(torch.zeros(3, 2, 2), None), (torch.zeros(3, 2, 2, dtype=torch.uint8), "broken")]
    pixels, errors = tables.collate(samples)
    assert pixels.dtype == torch.float32 and errors == [None, "broken"]
