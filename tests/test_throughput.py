"""The benchmark runs, and its ratios are what they say."""

import json

import pytest

from evaluation import throughput


def test_ratios_are_of_the_same_round(tmp_path, capsys):
    out = tmp_path / "t.json"
    throughput.main(["--batch_size=1", "--rounds=2", "--precision=fp32", f"--out={out}"])
    result = json.loads(out.read_text())
    seconds = result["seconds"]
    each = [a / b for a, b in zip(seconds["timm as it comes"], seconds["mpp update"], strict=True)]
    ratio = result["ratios"]["timm as it comes / mpp update"]
    assert (ratio["min"], ratio["max"]) == (min(each), max(each))
    assert ratio["median"] == pytest.approx(sum(each) / 2)
    assert result["executed_flops_per_second"] > 0
    assert "mpp update" in capsys.readouterr().out


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="rounds is 0; it must be at least 1"):
        throughput.main(["--rounds=0"])
