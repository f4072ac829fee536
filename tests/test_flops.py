"""Executed operations: fused attention counts as unfused does, with every torch, and both as the closed form."""

import pytest
import timm
import torch
from conftest import newton_schulz, read_metrics

from evaluation.compare import settings_to_train
from evaluation.comparison.cases import Encoder
from evaluation.config.comparing import EncoderEntry
from mpp.config import Config, ModelConfig
from mpp.config.parsing import parse_saved
from mpp.corruption import Corruption
from mpp.models.encoder import build_encoder
from mpp.models.networks import MaskedPatchPredictor
from mpp.models.plain import set_attention
from mpp.training.flops import executed_flops, flop_counter

BATCH = 2


def test_a_step_of_timms_vit_is_the_closed_form():
    """With fused attention; without, it is as much: below."""
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
    set_attention(model, fused=True)
    with flop_counter() as counter:
        model(torch.randn(BATCH, 3, 64, 64)).sum().backward()
    width, tokens = 192, 17
    embed = 2 * BATCH * 16 * 3 * 16**2 * width
    block = 2 * BATCH * (12 * tokens * width**2 + 2 * tokens**2 * width)
    head = 2 * BATCH * width * 1000
    # forward, and two gradients of each product: the images have none
    assert counter.get_total_flops() == 3 * (embed + 2 * block + head) - embed


def test_a_convolution_of_groups_costs_three_forward_passes():
    layer = torch.nn.Conv2d(8, 8, 3, padding=1, groups=4)
    with flop_counter() as counter:
        layer(torch.randn(BATCH, 8, 6, 6, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == 3 * (2 * BATCH * 36 * 8 * 2 * 9)


def counted(**settings):
    """Operations of a forward and backward pass of a small network: without computing them, and while they are."""
    model = build_encoder(ModelConfig(img_size=32, width=16, depth=2, heads=2, **settings))
    network = MaskedPatchPredictor(model, 512, (0.5,) * 3, (0.5,) * 3)
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    corruption = Corruption(*torch.tensor([[[0, 3]] * 2] * 3), torch.zeros(2, 0).long())
    with flop_counter() as counter:
        network(images, corruption).sum().backward()
    return executed_flops(network, images, corruption), counter.get_total_flops()


def test_what_saves_memory_executes_no_more():
    expected, computed = counted(attention="unfused")
    assert computed == expected
    assert counted(attention="fused") == (expected, expected)
    again, computed = counted(activation_checkpointing=True)
    assert again == expected < computed  # activation checkpointing computes more, which is in no budget


def test_the_optimiser_is_in_a_runs_compute_and_in_a_comparisons_budget(pretrain, tmp_path):
    runs = {name: pretrain(f"--optim.name={name}", dir=tmp_path / name) for name in ("muon", "adam")}
    executed = {name: 1e15 * read_metrics(folder, "compute/pflop")[4] for name, folder in runs.items()}
    assert executed["muon"] - executed["adam"] == pytest.approx(4 * newton_schulz(16, 2))
    for name, folder in runs.items():
        config = parse_saved(Config, folder / "config.yaml")
        entry = EncoderEntry(train="pretrain", compute=25 * executed[name] / 1e15)
        assert settings_to_train(Encoder(entry, 0, config)).run.steps == 100
