"""Schedules at their corners, and what decays."""

import pytest

from mpp.config import ModelConfig, OptimConfig
from mpp.encoder import build_encoder
from mpp.optim import build_optimizer, learning_rate
from mpp.predictor import MaskedPatchPredictor


@pytest.mark.parametrize(("schedule", "halfway", "last"), [("cosine", 0.5, 0), ("linear", 0.5, 0), ("constant", 1, 1)])
def test_schedule_at_its_corners(schedule, halfway, last):
    config = OptimConfig(lr=2.0, schedule=schedule, warmup_steps=10)
    assert learning_rate(config, 0, 110) == pytest.approx(0.2)
    assert learning_rate(config, 9, 110) == learning_rate(config, 10, 110) == pytest.approx(2.0)
    assert learning_rate(config, 60, 110) == pytest.approx(2 * halfway)
    assert learning_rate(config, 110, 110) == pytest.approx(2 * last)


def test_only_matrices_and_filters_decay():
    model = MaskedPatchPredictor(build_encoder(ModelConfig(depth=1)), 5, (0.5,) * 3, (0.5,) * 3)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {
        names[id(p)] for group in optimizer.param_groups if group["weight_decay"] == 0.3 for p in group["params"]
    }
    assert decayed == {
        "encoder.patch_embed.proj.weight",
        "encoder.blocks.0.attn.qkv.weight",
        "encoder.blocks.0.attn.proj.weight",
        "encoder.blocks.0.mlp.fc1.weight",
        "encoder.blocks.0.mlp.fc2.weight",
        "head.weight",
    }
    rest = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    assert decayed | rest == set(names.values()) and not decayed & rest
