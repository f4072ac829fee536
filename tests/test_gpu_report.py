"""The report on a GPU: parts that fail or take too long leave the others alone, and its end can be pasted."""

import re
import shlex
import time

import pytest
import torch
from conftest import ROOT

from evaluation import gpu_report
from evaluation.benchmark.card import CardLimits, LoadingSpeed, ModelSpeed, first_that_fits
from evaluation.config import GpuReportConfig
from evaluation.memory import peak_memory
from mpp.config import Config, ModelConfig, RunConfig
from mpp.config.parsing import parse
from mpp.errors import UserError

SMALL = ModelConfig(width=16, depth=1, heads=2, img_size=16, patch_size=8)


def speed_of(images_per_second: float) -> ModelSpeed:
    """Speed of a fake model."""
    return ModelSpeed(
        batch_size=512,
        too_large=(1024,),
        images_per_second=images_per_second,
        flops_per_second=1e14,
        first_step_seconds=60.0,
        peak_bytes=36 * 10**9,
    )


@pytest.fixture
def report():
    """The report of a pretended GPU, on which nothing has been measured yet."""
    return gpu_report.GpuReport(GpuReportConfig())


def pasted(text: str) -> Config:
    """Settings of pre-training that the last three lines set."""
    lines = "\n".join(text.splitlines()[-3:])
    words = shlex.split(lines.replace("\\\n", ""))  # as a shell joins them
    assert [word.split("=")[0] for word in words] == ["--data.batch_size", "--run.compile", "--data.workers"]
    return parse(Config, words)


@pytest.mark.parametrize(("compiled_speed", "compile"), [(2900, True), (2420, False), (1500, False)])
def test_the_last_lines_set_what_was_fastest(report, monkeypatch, compiled_speed, compile):
    monkeypatch.setattr(gpu_report, "cores", lambda: 16)
    report.speeds["ViT-B/16", False] = speed_of(2400)
    report.speeds["ViT-B/16", True] = speed_of(compiled_speed)
    report.loading = LoadingSpeed({256: 1400.0, 375: 650.0}, 20000.0)
    config = pasted(report.advice())
    assert config.data.batch_size == 512
    assert config.run.compile is compile
    assert config.data.workers == -(-max(2400, compiled_speed) // 650)
    assert "mpp prepare" not in report.advice()


def test_too_few_cores_for_a_gpu_are_said(report, monkeypatch):
    monkeypatch.setattr(gpu_report, "cores", lambda: 3)
    report.speeds["ViT-B/16", False] = speed_of(2400)
    report.loading = LoadingSpeed({256: 1400.0, 375: 650.0}, 2800.0)
    assert pasted(report.advice()).data.workers == 2
    assert "make them smaller with `mpp prepare`" in report.advice()


def test_the_last_lines_are_there_when_nothing_was_measured(report):
    assert pasted(report.advice()).run.compile is False
    assert "ViT-B/16: not measured" in report.advice()


def test_speed_and_memory_stand_beside_what_limits_and_counts_them(report, monkeypatch):
    report.limits = CardLimits("H100", "bf16", 4e14, 80 * 10**9, "flash")
    report.speeds["ViT-B/16", False] = speed_of(2000)
    monkeypatch.setattr(report, "batch_sizes", lambda model: [1024, 512, 256])
    monkeypatch.setattr(gpu_report, "peak_memory", lambda config, images: {"total": images * 7 * 10**7})
    asked = []

    def fake_measure(function, model, batch_sizes, *others):
        asked.extend(batch_sizes)
        return speed_of(2500)

    monkeypatch.setattr(report, "measure", fake_measure)
    text = report.describe_speed("ViT-B/16", True)
    assert asked == [512, 256]  # 1024 ran out of memory uncompiled: both are timed at the same batch size
    assert "batch 512: 2500 images/s, 100 TFLOP/s (25% of the ceiling)" in text
    assert "out of memory at batch 1024" in text
    assert "peak memory: 36 GB; `mpp memory` counts 35.8 GB" in text
    assert "1.25 times the eager speed" in text


@pytest.mark.parametrize(
    ("on_card", "difference", "verdict"),
    [
        ([2.0, 4.0], "0:", "the card computes what the CPU computes"),
        ([2.0, 4.04], "0.01 ", "WRONG"),
        ([2.0, float("nan")], "nan ", "WRONG"),
    ],
)
def test_losses_that_differ_from_the_cpus_are_named(report, monkeypatch, on_card, difference, verdict):
    monkeypatch.setattr(
        report, "measure", lambda function, model, batch, device: dict(cpu=[2.0, 4.0], auto=on_card)[device]
    )
    text = report.describe_losses()
    assert f"largest relative difference: {difference.rstrip(':')}" in text and verdict in text
    assert "TF32 off" in text


def test_a_part_that_fails_or_does_not_fit_says_so(report):
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert report.text_of(gpu_report.ReportPart("speed", 1, fails)).startswith("failed: RuntimeError: CUDA error")
    assert report.text_of(gpu_report.ReportPart("speed", 6000, fails)).startswith("left out: it takes about 6000 s")


@pytest.mark.faults
def test_a_part_that_hangs_is_stopped_when_the_time_is_over():
    report = gpu_report.GpuReport(GpuReportConfig(minutes=0.05))
    begin = time.monotonic()
    text = report.text_of(gpu_report.ReportPart("speed", 0, lambda: report.measure(time.sleep, 600)))
    assert text == "stopped: minutes 0.05 are over"
    output = gpu_report.output_of(
        "cpu", 10, "timeit", "-n1", "-r1", "-s", "print('begun', flush=True)", "while True: pass"
    )
    assert "begun" in output and "stopped: the time is over" in output
    assert time.monotonic() - begin < 300


def test_the_estimated_times_are_below_ten_minutes(report):
    """Of all parts but the tests, which take what is left."""
    assert sum(part.gpu_seconds for part in report.parts()) <= 60 * GpuReportConfig().minutes


def test_the_next_smaller_batch_is_tried_when_memory_runs_out():
    released = []

    def attempt(batch_size):
        if batch_size > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch_size

    assert first_that_fits([512, 128, 64, 32], attempt, lambda: released.append(1)) == 64
    assert len(released) == 2
    with pytest.raises(torch.OutOfMemoryError):
        first_that_fits([512, 128], attempt, lambda: None)


def test_other_errors_are_not_taken_for_memory():
    def attempt(batch_size):
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        first_that_fits([512, 128], attempt, lambda: None)


@pytest.mark.faults
def test_the_largest_batch_leaves_a_tenth_of_the_memory_free():
    config = Config(run=RunConfig(dir="unused"), model=SMALL)
    sizes = (1024, 512, 256, 64)
    totals = {size: peak_memory(config, size, passes=2)["total"] for size in sizes}
    assert gpu_report.sizes_that_fit(config, sizes, int(totals[512] / 0.88)) == [512, 256, 64]
    assert gpu_report.sizes_that_fit(config, sizes, int(totals[512] / 0.92)) == [256, 64]
    assert gpu_report.sizes_that_fit(config, sizes, 1) == [64]


def test_a_given_batch_size_comes_first(monkeypatch):
    report = gpu_report.GpuReport(GpuReportConfig(batch_size=300))
    assert report.batch_sizes(SMALL)[:3] == [300, 256, 192]


@pytest.mark.rehearsal
def test_a_rehearsal_writes_the_whole_report(tmp_path, monkeypatch, tally):
    """All parts but the tests of a GPU, which are a command of their own."""
    monkeypatch.setattr(gpu_report, "output_of", lambda *words: " ".join(map(str, words)))
    gpu_report.main([f"--out={tmp_path / 'report.txt'}", "--device=cpu", "--minutes=60"])
    text = (tmp_path / "report.txt").read_text()
    titles = [line[3:].rpartition(" (")[0] or line[3:] for line in text.splitlines() if line.startswith("== ")]
    parts = [
        "versions and card",
        "limits of the card",
        "tiny ViT, eager",
        "tiny ViT, compiled",
        "losses compared with the CPU",
    ]
    assert titles == [*parts, "loader", "tests", "recommended settings"]
    for words in ("failed", "left out", "stopped", "WRONG"):
        assert words not in text
    expected = ("PyTorch version", "TFLOP/s", "attention kernel", "of the ceiling", "times the eager speed")
    for words in (
        *expected,
        "`mpp memory` counts",
        "largest relative difference: 0 ",
        "images/s a core",
        "test_gpu.py",
    ):
        assert words in text
    config = pasted(text)
    assert config.data.batch_size == 4 and config.data.workers >= 1
    tally("gpu-report: the whole of it on a CPU", 1)


def test_without_a_gpu_the_rehearsal_is_named(tmp_path):
    with pytest.raises(UserError, match="--device cpu rehearses"):
        gpu_report.main([f"--out={tmp_path / 'report.txt'}"])


def test_pages_ask_for_the_packages_that_the_report_takes():
    """The extra `test` alone: peers are what `mpp throughput` compares with."""
    lines = [line for page in ROOT.rglob("*.md") for line in page.read_text(encoding="utf-8").splitlines()]
    extras = [re.search(r"pip install -e '\.\[(.+?)\]'", line) for line in lines if "gpu-report" in line]
    assert [match[1] for match in extras if match] == ["test"] * 3
