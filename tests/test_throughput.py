"""The benchmark runs, and its ratios are what they say."""

import json

import pytest
import torch

from evaluation import throughput
from evaluation.benchmark import peers


@pytest.mark.faults
def test_ratios_are_of_the_same_round(tmp_path, capsys, monkeypatch):
    """Of a small model; with few and small files to load from, and a small matrix."""
    monkeypatch.setattr(peers, "FILES", 16)
    monkeypatch.setattr(peers, "SIDE", 64)
    monkeypatch.setattr(throughput.time_in_turn, "__defaults__", (0,))
    monkeypatch.setattr(throughput, "BLOCK", 1)
    monkeypatch.setattr(throughput, "DRAIN", 1)
    out = tmp_path / "t.json"
    torch.set_num_threads(1)
    words = ["--model=test_vit", "--batch_size=1", "--rounds=2", "--precision=fp32", "--memory=false", "--workers=0"]
    throughput.main([*words, "--jpeg_side=64", f"--out={out}"])
    result = json.loads(out.read_text())
    seconds = result["seconds"]
    each = [a / b for a, b in zip(seconds["timm as it comes"], seconds["mpp update"], strict=True)]
    ratio = result["ratios"]["timm as it comes / mpp update"]
    assert (ratio["min"], ratio["max"]) == (min(each), max(each))
    assert ratio["median"] == pytest.approx(sum(each) / 2)
    assert set(result["ratios"]) >= {
        *("updates in memory / updates from JPEG", "ImageFolder with PIL / mpp's loading", "features / timm forward"),
    }
    # of 100 patches of 16 x 16, width 64, 6 blocks whose MLP is 3 times as wide; ours skips part of the last block
    tokens, width, embedding, head = 101, 64, 100 * 3 * 16**2 * 64, 64 * 1000
    blocks = 6 * (10 * tokens * width**2 + 2 * tokens**2 * width)
    assert result["flops"]["timm as it comes"] == 2 * (3 * (blocks + head) + 2 * embedding)  # pixels get no gradient
    assert result["flops"]["timm as it comes"] == result["flops"]["timm, attention unfused"]
    assert 0.9 < result["flops"]["mpp update"] / result["flops"]["timm as it comes"] < 1.02
    assert 0.5 < result["flops"]["mpp update, autoencoder"] / result["flops"]["mpp update"] < 0.6
    said = capsys.readouterr().out
    assert "mpp update" in said and "images/s a core" in said


@pytest.mark.faults
def test_cost_of_sizes(tmp_path):
    out = tmp_path / "sizes.json"
    words = ["--sizes=[test_vit]", "--batch_size=2", "--rounds=1", "--precision=fp32", f"--out={out}"]
    throughput.main(words)
    one, two = json.loads(out.read_text())["sizes"]
    assert (one["batch"], two["batch"]) == (1, 2) and one["flops"] == pytest.approx(two["flops"])


@pytest.mark.parametrize(
    ("setting", "words"),
    [("--rounds=0", "rounds is 0; it must be at least 1"), ("--model=vit", "model is vit; it must be a VisionTransf")],
)
def test_bad_settings_are_named(setting, words):
    with pytest.raises(ValueError, match=words):
        throughput.main([setting])
