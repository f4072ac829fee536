"""Memory of a step against closed forms: on fake tensors nothing is allocated."""

from dataclasses import replace

import pytest

from evaluation import gpu_report, memory
from mpp.config import Config, ModelConfig, ObjectiveConfig, OptimConfig, RunConfig
from mpp.models.encoder import build_encoder

MODEL = ModelConfig(width=64, depth=4, heads=2, img_size=64, patch_size=8, attention="fused")
RUN = RunConfig(dir="unused", steps=10, precision="fp32")
CONFIG = Config(run=RUN, model=MODEL, optim=OptimConfig(name="adam"))


@pytest.mark.faults
def test_weights_and_moments_are_four_bytes_each():
    head = 512 * 64 + 512 + 64  # and [mask]
    count = sum(parameter.numel() for parameter in build_encoder(MODEL).parameters()) + head
    peak = memory.peak_memory(CONFIG, 8)
    assert peak["weights"] == pytest.approx(4 * count, rel=0.01)
    assert peak["optimiser"] == pytest.approx(8 * count, rel=0.01)
    assert peak["total"] == sum(peak[kind] for kind in ("weights", "gradients", "optimiser", "activations"))
    for optim, moments in ((OptimConfig(name="sgd"), 1), (OptimConfig(name="adam", average=0.9), 3)):
        of_optimizer = memory.peak_memory(replace(CONFIG, optim=optim), 8)["optimiser"]
        assert of_optimizer == pytest.approx(4 * moments * count, rel=0.01)


@pytest.mark.faults
def test_a_teacher_adds_its_weights_but_no_gradients_and_no_moments():
    objective = ObjectiveConfig(name="features")
    head = 64 * 64 + 64 + 64
    count = sum(parameter.numel() for parameter in build_encoder(MODEL).parameters())
    peak = memory.peak_memory(replace(CONFIG, objective=objective), 8)
    assert peak["weights"] == pytest.approx(4 * (2 * count + head), rel=0.01)
    assert peak["gradients"] <= 4.1 * (count + head)
    assert peak["optimiser"] == pytest.approx(8 * (count + head), rel=0.01)
    assert peak["activations"] < 1.5 * memory.peak_memory(CONFIG, 8)["activations"]


@pytest.mark.faults
def test_activations_grow_with_the_images_and_fall_with_checkpointing():
    activations = {images: memory.peak_memory(CONFIG, images)["activations"] for images in (64, 128, 192)}
    assert activations[192] - activations[128] == pytest.approx(activations[128] - activations[64], rel=0.01)
    checkpointed = replace(CONFIG, model=replace(MODEL, activation_checkpointing=True))
    assert memory.peak_memory(checkpointed, 64)["activations"] < activations[64] / 2
    unfused = replace(CONFIG, model=replace(MODEL, attention="unfused"))
    scores = 4 * 64 * 2 * 65**2  # bytes: float32, images, heads, tokens; kept by each of three blocks at least
    assert memory.peak_memory(unfused, 64)["activations"] - activations[64] > 3 * scores
    half = replace(CONFIG, run=replace(RUN, precision="bf16"))
    assert memory.peak_memory(half, 64)["activations"] < activations[64]


@pytest.mark.faults
def test_gradients_are_there_from_the_second_forward_pass_on():
    one, two, three = (memory.peak_memory(CONFIG, 64, passes) for passes in (1, 2, 3))
    assert one["gradients"] < 0.1 * one["weights"]
    assert two["gradients"] == pytest.approx(one["weights"], rel=0.1)
    assert two["total"] == three["total"] > one["total"]


def test_the_command_prints_the_peak(capsys):
    memory.main(["--model.width=16", "--model.depth=1", "--model.heads=2", "--data.batch_size=4"])
    printed = capsys.readouterr().out
    for words in ("4 images a forward pass", "weights", "total"):
        assert words in printed


def test_a_report_has_three_parts(tmp_path, monkeypatch, capsys):
    """Its commands are tested on their own."""
    monkeypatch.setattr(gpu_report, "output_of", lambda *words: " ".join(words))
    gpu_report.main([f"--out={tmp_path / 'report.txt'}", "--device=cpu"])
    text = (tmp_path / "report.txt").read_text()
    assert [line for line in text.splitlines() if line.startswith("== ")] == [
        "== versions and card",
        "== tests",
        "== speed",
    ]
    assert "PyTorch version" in text and "tests/test_gpu.py" in text and "evaluation.throughput" in text
