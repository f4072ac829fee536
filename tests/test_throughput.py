"""The benchmark runs, and its ratios are those of the same round."""

import json

import pytest
import torch

from evaluation import throughput
from evaluation.benchmark import loading, steps


@pytest.mark.faults
def test_ratios_are_of_the_same_round(tmp_path, capsys, monkeypatch):
    """Of a small model; with few and small files to load from, and a small matrix."""
    monkeypatch.setattr(loading, "IMAGE_FILES", 16)
    monkeypatch.setattr(steps, "CPU_MATRIX_SIDE", 64)
    monkeypatch.setattr(throughput, "WARMUP_ROUNDS", 0)
    monkeypatch.setattr(throughput, "STEPS_PER_ROUND", 1)
    monkeypatch.setattr(throughput, "DRAINED_STEPS", 1)
    torch.set_num_threads(1)
    out = tmp_path / "throughput.json"
    words = [
        "--model=test_vit",
        "--img_size=80",
        "--batch_size=1",
        "--rounds=2",
        "--precision=fp32",
        "--workers=0",
        "--jpeg_side=64",
    ]
    throughput.main([*words, f"--out={out}"])
    result = json.loads(out.read_text())
    of_timm, of_mpp = (result["seconds"][name] for name in ("timm training step", "mpp training step"))
    first, second = (slower / faster for slower, faster in zip(of_timm, of_mpp, strict=True))
    ratio = result["ratios"]["timm training step / mpp training step"]
    assert (ratio["min"], ratio["max"]) == (min(first, second), max(first, second))
    assert ratio["median"] == pytest.approx((first + second) / 2)
    assert {"steps in memory / steps from JPEG", "ImageFolder with PIL / mpp's loading"} <= set(result["ratios"])
    # of 25 patches of 16 x 16, width 64, 6 blocks whose MLP is 3 times as wide; ours skips part of the last block
    tokens, width, embedding, head = 26, 64, 25 * 3 * 16**2 * 64, 64 * 1000
    blocks = 6 * (10 * tokens * width**2 + 2 * tokens**2 * width)
    flops = result["flops"]
    assert flops["timm training step"] == 2 * (3 * (blocks + head) + 2 * embedding)  # pixels get no gradient
    assert 0.9 < flops["mpp training step"] / flops["timm training step"] < 1.02
    printed = capsys.readouterr().out
    assert "mpp training step" in printed and "images/s a core" in printed


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--rounds=0", "rounds is 0; it must be a"),
        ("--model=vit", "model is vit; it must be a timm VisionTransf"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        throughput.main([setting])
