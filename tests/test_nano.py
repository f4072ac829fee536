"""The method in one file beside the product: neither has code of the other, and both are held to the same bits."""

import json
import sys

import datasets
import pytest
import torch
from model_inputs import by_timm
from safetensors.torch import load_file

from mpp import extract_features, load_encoder, nano
from mpp.pretrain import main as pretrain

in_bf16 = [pytest.mark.faults, pytest.mark.skipif(not nano.HAS_BF16, reason="this CPU does not compute in bf16")]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=in_bf16)])
def test_one_file_has_the_weights_and_figures_of_the_product(few_birds, precision, tmp_path, monkeypatch, capsys):
    words = f"nano.py --data {few_birds} --out {tmp_path / 'nano'} --steps 3 --precision {precision}"
    monkeypatch.setattr(sys, "argv", words.split())
    nano.main()
    _, last = capsys.readouterr().out.splitlines()[-1].split(": ")
    figures = dict(each.split() for each in last.split(", "))

    run = tmp_path / "run"
    options = f"--data.path={few_birds} --run.dir={run} --run.steps=3 --run.threads=1 --run.precision={precision}"
    pretrain([*options.split(), "--run.report=false", "--data.workers=0"])
    theirs = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    ours, product = (load_file(tmp_path / folder / "model.safetensors") for folder in ("nano", "run/encoder"))

    assert ours.keys() == product.keys()
    assert [name for name in ours if not torch.equal(ours[name], product[name])] == []
    names = {name: name.replace("knn_", "knn/depth_0") if "knn" in name else f"heldout/{name}" for name in figures}
    assert figures == {name: f"{theirs[names[name]]:.4f}" for name in figures}
    assert {"loss", "accuracy", "nearest", "two_nearest", "knn_4"} < figures.keys()

    encoder = by_timm(tmp_path / "nano")
    photographs = datasets.load_dataset("parquet", data_files=str(few_birds / "test*"), split="train")["image"][:3]
    views = torch.stack([nano.centre_crop(torch.tensor(nano.np.array(each)).permute(2, 0, 1)) for each in photographs])
    with torch.no_grad():
        features = encoder(nano.normalize(views))
    expected = extract_features(load_encoder(tmp_path / "nano"), photographs)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
