"""Schedules at their corners, what decays, what Muon does and to which parameters."""

from functools import partial

import pytest
import timm
import torch
from comparisons import noted
from conftest import refused
from model_inputs import HALVES, names_where, scales_of

from mpp.config import ModelConfig, OptimConfig
from mpp.models.encoder import build_encoder
from mpp.models.networks import MaskedPatchPredictor
from mpp.training import muon
from mpp.training.optim import build_optimizer, learning_rate, parameter_groups


def predictor(**model):
    return MaskedPatchPredictor(build_encoder(ModelConfig(**{"depth": 1} | model)), 5, *HALVES)


@pytest.mark.parametrize("schedule, halfway, last", [("cosine", 0.5, 0), ("linear", 0.5, 0), ("constant", 1, 1)])
def test_schedule_at_its_corners(schedule, halfway, last):
    config = OptimConfig(lr=2.0, schedule=schedule, warmup_steps=10)
    assert learning_rate(config, 0, 110) == pytest.approx(0.2)
    assert learning_rate(config, 9, 110) == learning_rate(config, 10, 110) == pytest.approx(2.0)
    assert learning_rate(config, 60, 110) == pytest.approx(2 * halfway)
    assert learning_rate(config, 110, 110) == pytest.approx(2 * last)


MATRICES = {f"encoder.blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
FILTERS = {"encoder.patch_embed.proj.weight", "head.weight"}
ALL_ELSE = {
    *("mask_token", "head.bias", "encoder.norm.weight", "encoder.norm.bias"),
    *("encoder.cls_token", "encoder.pos_embed", "encoder.patch_embed.proj.bias"),
    *(f"encoder.blocks.0.{name}.bias" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
    *(f"encoder.blocks.0.{name}.{what}" for name in ("norm1", "norm2") for what in ("weight", "bias")),
}
POOLED = {"encoder.reg_token", "encoder.fc_norm.weight", "encoder.fc_norm.bias"}
UNPOOLED = {"encoder.cls_token", "encoder.norm.weight", "encoder.norm.bias"}


@pytest.mark.parametrize(
    "name, more, fewer",
    [
        (None, set(), set()),
        ("vit_base_patch16_reg4_gap_256", POOLED, UNPOOLED),
        ("vit_tiny_r_s16_p8_224", set(), set()),
    ],
)
def test_muon_is_for_the_blocks_matrices_and_they_decay_and_filters(name, more, fewer):
    """Every parameter is in one of these lists: a new one has to be put in one."""
    model = predictor(name=name, width=16, heads=2)
    optimizer = build_optimizer(model, OptimConfig(name="muon", weight_decay=0.3))

    def found(chosen):
        names = names_where(model, optimizer, chosen)
        return {each for each in names if not each.startswith("encoder.patch_embed.backbone.")}  # a hybrid's CNN

    assert found(lambda group: group["use_muon"]) == MATRICES
    assert found(lambda group: group["weight_decay"] == 0.3) == MATRICES | FILTERS
    assert found(lambda group: group["weight_decay"] == 0) == (ALL_ELSE | more) - fewer


def test_sgd_has_momentum_by_hand():
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = build_optimizer(layer, OptimConfig(name="sgd", lr=0.1, momentum=0.8, weight_decay=0.0))
    for expected in (-0.1, -0.28, -0.524):  # each step is 0.8 of the one before, and the gradient
        layer.weight.grad = torch.ones(1, 1)
        optimizer.step()
        assert layer.weight.item() == pytest.approx(expected)


@pytest.mark.parametrize("native, together", [(True, 2**24), (False, 600)], ids=["bf16, all", "fp32, few"])
def test_muon_is_timms(native, together, monkeypatch):
    """Nesterov's momentum, Newton-Schulz in bf16 where the hardware has it, Adam's scale; all else by NAdamW.

    timm's loops over matrices; ours are together as far as their memory allows. To the bit; in bf16 a CPU may round
    products of small matrices that are together in another way.
    """
    monkeypatch.setattr("mpp.training.muon.bf16_is_native", lambda: native)
    monkeypatch.setattr("mpp.training.muon.MAX_BATCH_ELEMENTS", together)
    in_dtype = partial(timm.optim.muon.zeropower_via_newtonschulz, dtype=torch.bfloat16 if native else torch.float32)
    monkeypatch.setattr("timm.optim.muon.zeropower_via_newtonschulz", in_dtype)
    batches = noted(monkeypatch, muon, "orthogonalize")
    models = [predictor(width=16, heads=2, depth=3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = OptimConfig(name="muon", lr=0.1, momentum=0.8, betas=(0.8, 0.9), weight_decay=0.5, adam_scale=3.0)
    ours = build_optimizer(models[0], config)
    groups = [group | {"lr": 0.1 if group["use_muon"] else 0.1 * 3.0} for group in parameter_groups(models[1], config)]
    timms = timm.optim.Muon(groups, lr=0.1, momentum=0.8, nesterov=True, betas=(0.8, 0.9))
    for step in range(3):
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            one.grad = torch.randn_like(one) * 1e-3**step  # the last ones show the eps
            other.grad = one.grad.clone()
        ours.step()
        timms.step()
    largest = 3072 if together > 3072 else 1024  # three matrices of 16 x 64, or one
    assert max(each.numel() for each in batches) == largest
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3 if native and one.ndim == 2 else 0)


def test_an_average_is_updated_once_a_step_after_timms_own_muon_was_built():
    """torch wraps the step of each class of which one is built, and calls the hooks there. Its decay warms up."""
    timm.optim.Muon([torch.zeros(2, 2, requires_grad=True)])
    model = predictor(width=16, heads=2)
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=0.1, average=0.26))
    average = None
    for decay in (2 / 11, 3 / 12, 0.26):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        weight = model.head.weight.detach()
        average = weight.clone() if average is None else decay * average + (1 - decay) * weight
        torch.testing.assert_close(optimizer.state[model.head.weight]["average"], average)


@pytest.mark.parametrize(
    "name, options",
    [
        ("mpp_vit", dict(depth=3, embed_dim=48, num_heads=3, mixing="axial", position="relative")),
        ("test_convnext", {}),  # with a norm in its head
    ],
)
def test_layers_rates_are_timms(name, options):
    """Those of plain transformers: test_plain.py."""
    timms = timm.create_model(name, num_classes=7, **options)
    groups = timm.optim.param_groups_layer_decay(timms, weight_decay=0.1, layer_decay=0.7)
    encoder = timm.create_model(name, num_classes=0, **options)
    model = torch.nn.ModuleDict({"encoder": encoder, "head": torch.nn.Linear(encoder.num_features, 7)})
    built = build_optimizer(model, OptimConfig(lr=1.0, layer_decay=0.7))
    expected = {f"encoder.{name}": scale for name, scale in scales_of(timms, groups).items()}
    for kind in ("weight", "bias"):
        expected[f"head.{kind}"] = expected.pop(f"encoder.{timms.pretrained_cfg['classifier']}.{kind}")
    assert scales_of(model, built.param_groups) == pytest.approx(expected)


def test_what_a_model_has_not_is_refused():
    """Blocks whose matrices are Muon's, and layers that timm knows."""
    with refused(r"optim\.name is muon, .* must be adam"):
        build_optimizer(timm.create_model("test_resnet"), OptimConfig(name="muon"))
    model = torch.nn.ModuleDict({"encoder": timm.create_model("pit_ti_224", num_classes=0)})
    with refused(r"optim\.layer_decay is 0\.7; it must be null for this model"):
        build_optimizer(model, OptimConfig(layer_decay=0.7))
