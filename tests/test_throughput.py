"""Ratios of speed are those of the same round, and FLOPs those of the architecture; a GPU's report can be pasted."""

import shlex
import time

import pytest
import torch
from conftest import read_json, refused

from evaluation import gpu_report, throughput
from evaluation.memory import peak_memory
from mpp.config import Config, ModelConfig, OptimConfig, RunConfig
from mpp.config.parsing import parse


@pytest.mark.faults
def test_ratios_are_of_the_same_round(tmp_path, monkeypatch):
    """Of a small model; with few and small files to load from, and a small matrix."""
    monkeypatch.setattr(throughput, "IMAGE_FILES", 16)
    monkeypatch.setattr(throughput, "MATRIX_SIDE", {"cpu": 64})
    monkeypatch.setattr(throughput, "WARMUP_ROUNDS", 0)
    torch.set_num_threads(1)
    out = tmp_path / "throughput.json"
    words = ("--model=test_vit", "--img_size=80", "--batch_size=2", "--rounds=2", "--precision=fp32", "--jpeg_side=64")
    throughput.main([*words, f"--out={out}"])
    result = read_json(out)
    of_timm, of_mpp = (result["seconds"][name] for name in ("timm training step", "mpp training step"))
    ratios = [slower / faster for slower, faster in zip(of_timm, of_mpp, strict=True)]
    ratio = result["ratios"]["timm training step / mpp training step"]
    assert (ratio["min"], ratio["max"]) == (min(ratios), max(ratios))
    assert ratio["median"] == pytest.approx(sum(ratios) / 2)
    # of 25 patches of 16 x 16, width 64, 6 blocks whose MLP is 3 times as wide; ours skips part of the last block
    tokens, width, embedding, head = 26, 64, 25 * 3 * 16**2 * 64, 64 * 1000
    blocks = 6 * (10 * tokens * width**2 + 2 * tokens**2 * width)
    flops = result["flops"]
    assert flops["timm training step"] == 2 * 2 * (3 * (blocks + head) + 2 * embedding)  # pixels get no gradient
    assert 0.9 < flops["mpp training step"] / flops["timm training step"] < 1.02


def test_a_model_that_timm_lacks_is_named():
    with refused(r"model\.name is vit; it must be"):
        throughput.main(["--model=vit"])


# --- the report on a GPU ---


def pasted(text):
    """Settings of pre-training that the last two lines set."""
    words = shlex.split("\n".join(text.splitlines()[-2:]).replace("\\\n", ""))  # as a shell joins them
    assert [word.split("=")[0] for word in words] == ["--data.batch_size", "--run.compile"]
    return parse(Config, words)


@pytest.mark.parametrize(
    "eager, compiled, compile",
    [(2400.0, 2900.0, True), (2400.0, 2420.0, False), (2400.0, 0.0, False), (0, 0, False)],
)
def test_the_last_lines_set_what_was_fastest(eager, compiled, compile):
    config = pasted(gpu_report.advice(512, eager, compiled))
    assert config.data.batch_size == 512 and config.run.compile is compile


@pytest.mark.faults
def test_the_largest_batch_leaves_half_of_the_memory_free(monkeypatch):
    config = Config(run=RunConfig(dir="unused"), model=ModelConfig(name="test_vit"), optim=OptimConfig(name="adam"))
    total = peak_memory(config, 512, passes=2)["total"]
    for share, size in ((0.48, 512), (0.52, 256)):
        monkeypatch.setattr(gpu_report, "REHEARSED_BYTES", int(total / share))
        assert gpu_report.largest_batch("test_vit") == size
    monkeypatch.setattr(gpu_report, "REHEARSED_BYTES", 1)
    assert gpu_report.largest_batch("test_vit") == 1


def test_parts_that_fail_or_hang_leave_the_others_alone(tmp_path, monkeypatch):
    """A part is a module's command: one that fails, one that never ends, one after the time is over."""
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    (tmp_path / "fails.py").write_text("raise RuntimeError('CUDA error: an illegal memory access was encountered')")
    (tmp_path / "hangs.py").write_text("print('begun', flush=True)\nwhile True: pass")
    with open(tmp_path / "report.txt", "w") as file:
        report = gpu_report.Report(file, {}, time.monotonic() + 1)
        for part in ("fails", "hangs", "fails"):
            report.add(part, part)
        assert report.add_training("test_vit", 1, compile=True) == 0
    failed, hung, late, _ = (tmp_path / "report.txt").read_text().split("== ")[1:]
    assert "RuntimeError: CUDA error" in failed and "exit code 1" in failed
    assert "begun" in hung and "stopped: the time is over" in hung
    assert "stopped" in late


@pytest.mark.rehearsal
def test_a_rehearsal_writes_the_whole_report(tmp_path, monkeypatch, tally):
    """All parts but the tests of a GPU, which are a command of their own; without the compiler, for minutes."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(gpu_report, "TESTS", ("platform",))
    add, quick = gpu_report.Report.add, {"evaluation.throughput": ("--rounds=1", "--jpeg_side=64")}
    monkeypatch.setattr(gpu_report.Report, "add", lambda *part: add(*part, *quick.get(part[2], ())))
    gpu_report.main([f"--out={tmp_path / 'report.txt'}", "--device=cpu", "--minutes=60", "--batch_size=4"])
    text = (tmp_path / "report.txt").read_text()
    titles = [line[3:] for line in text.splitlines() if line.startswith("== ")]
    of_model = [f"test_vit, {part}" for part in ("memory as it is counted", "eager, batch 4", "compiled, batch 4")]
    assert titles == ["versions and card", *of_model, "tests", "recommended settings"]
    assert text.count("exit code 0") == 5
    assert "PyTorch version" in text
    assert pasted(text).data.batch_size == 4
    tally("gpu-report: the whole of it on a CPU")
