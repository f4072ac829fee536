"""Memory of a step against closed forms: on fake tensors nothing is allocated."""

from dataclasses import replace

import pytest

from evaluation import memory
from mpp.config import Config, ModelConfig, ObjectiveConfig, OptimConfig, RunConfig
from mpp.models.encoder import build_encoder

MODEL = ModelConfig(width=64, depth=4, heads=2, img_size=64, patch_size=8, attention="fused")
RUN = RunConfig(dir="unused", steps=10, precision="fp32")
CONFIG = Config(run=RUN, model=MODEL, optim=OptimConfig(name="adam"))


HEAD_WEIGHTS = 512 * 64 + 512 + 64
"""A linear layer to 512 colours, and [mask]."""


def parameter_count():
    """Parameters of the encoder."""
    return sum(parameter.numel() for parameter in build_encoder(MODEL).parameters())


def activations_of(images, **model):
    """Bytes of activations with other settings of the model."""
    config = replace(CONFIG, model=replace(MODEL, **model))
    return memory.peak_memory(config, images)["activations"]


@pytest.mark.faults
@pytest.mark.parametrize(
    "optim, moments",
    [
        (OptimConfig(name="sgd"), 1),
        (OptimConfig(name="adam", average=0.9), 3),  # averaged weights are one more
    ],
    ids=str,
)
def test_weights_and_moments_are_four_bytes_each(optim, moments):
    """Adam's two: below."""
    count = parameter_count() + HEAD_WEIGHTS
    peak = memory.peak_memory(replace(CONFIG, optim=optim), 8)
    assert peak["weights"] == pytest.approx(4 * count, rel=0.01)
    assert peak["optimiser"] == pytest.approx(4 * moments * count, rel=0.01)
    assert peak["total"] == sum(peak[part] for part in ("weights", "gradients", "optimiser", "activations"))


@pytest.mark.faults
def test_a_teacher_adds_its_weights_but_no_gradients_and_no_moments():
    head = 64 * 64 + 64 + 64
    count = parameter_count()
    peak = memory.peak_memory(replace(CONFIG, objective=ObjectiveConfig(name="features")), 8)
    assert peak["weights"] == pytest.approx(4 * (2 * count + head), rel=0.01)
    assert peak["gradients"] <= 4.1 * (count + head)
    assert peak["optimiser"] == pytest.approx(8 * (count + head), rel=0.01)
    assert peak["activations"] < 1.5 * activations_of(8)


@pytest.mark.faults
def test_activations_fall_with_checkpointing_and_in_bf16_and_grow_with_images_and_scores():
    fused = activations_of(64)
    assert activations_of(192) - activations_of(128) == pytest.approx(activations_of(128) - fused, rel=0.01)
    assert activations_of(64, activation_checkpointing=True) < fused / 2
    score_bytes = 4 * 64 * 2 * 65**2  # float32, images, heads, tokens; kept by each of three blocks at least
    assert activations_of(64, attention="unfused") - fused > 3 * score_bytes
    in_bf16 = replace(CONFIG, run=replace(RUN, precision="bf16"))
    assert memory.peak_memory(in_bf16, 64)["activations"] < fused


@pytest.mark.faults
def test_gradients_are_there_from_the_second_forward_pass_on():
    one, two, three = (memory.peak_memory(CONFIG, 64, passes) for passes in (1, 2, 3))
    assert one["gradients"] < 0.1 * one["weights"]
    assert two["gradients"] == pytest.approx(one["weights"], rel=0.1)
    assert two["total"] == three["total"] > one["total"]


def test_weights_to_begin_from_give_the_model_its_numbers(recwarn):
    begun = replace(CONFIG, model=ModelConfig(init_from="zoo:simclr_cifar10", mean=None, std=None))
    alike = replace(CONFIG, model=ModelConfig(width=128, depth=6, heads=2, img_size=32, patch_size=4))
    assert memory.peak_memory(begun, 4) == memory.peak_memory(alike, 4) and not recwarn.list
