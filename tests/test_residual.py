"""The residual stream in bf16: bytes, losses and types beside those of the float32 stream."""

from dataclasses import replace

import pytest
import torch
from conftest import each_of, equal_tensors, exported
from model_inputs import MASKED, draw_batch, random_images, randomize
from test_variants import KINDS
from traffic import count_traffic

from mpp.config import Config, CorruptionConfig, ModelConfig, NetworkConfig, ObjectiveConfig, RunConfig
from mpp.config.parsing import parse
from mpp.models.encoder import build_encoder
from mpp.models.networks import build_model
from mpp.models.plain import has_bf16_residual

NUMBERS = dict(width=32, depth=3, heads=2, img_size=32, patch_size=8)
MODEL = ModelConfig(**NUMBERS)
MASK_ALONE = CorruptionConfig(**MASKED)
NETWORKS = {
    "autoencoder": Config(model=MODEL, corruption=MASK_ALONE, network=NetworkConfig(name="autoencoder")),
    "moving average": Config(model=MODEL, objective=ObjectiveConfig(name="features")),
}
BARE = {"class_token": False, "global_pool": "avg"}
OF_TIMM = dict(patch_size=None, img_size=64)
ENCODERS = KINDS | {
    "plain": {},
    "rope alone": dict(position="rope", arguments=BARE),
    "biases alone": dict(position="relative_bias", arguments=BARE),
    "layer scale": dict(arguments={"init_values": 0.1, "qk_norm": True, "pre_norm": True}),
    "DINOv3": dict(name="vit_small_patch16_dinov3", **OF_TIMM),
    "BEiT": dict(name="beit_base_patch16_224", **OF_TIMM),
}


def build(network, residual):
    config = NETWORKS[network]
    return build_model(replace(config, model=replace(MODEL, residual=residual)))[0]


@each_of("settings", ENCODERS)
def test_under_autocast_alone_all_blocks_take_and_give_the_type_that_is_asked_for(settings):
    """Weights, gradients and results without autocast are those of a float32 stream.

    There a bf16 patch embedding becomes float32 with an embedding or [class] that is; some have neither.
    """
    states = []
    for residual, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        torch.manual_seed(0)
        encoder = build_encoder(ModelConfig(**NUMBERS | settings, residual=residual))
        randomize(encoder, 0.05)
        images = torch.randn(2, 3, *encoder.patch_embed.img_size)
        states.append({"features": encoder.forward_features(images), **encoder.state_dict()})
        types = []
        for block in encoder.blocks:
            block.register_forward_hook(lambda _, inputs, out, types=types: types.extend((inputs[0].dtype, out.dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            features = encoder.forward_features(images)
            encoder.forward_intermediates(images)
        assert set(types) == {dtype}
    expected = states[0]["features"]
    assert 0 < (features.float() - expected).norm() < 2**-6 * expected.norm()
    features.float().sum().backward()
    gradients = [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert equal_tensors(*states)


def test_the_decoder_and_the_moving_average_follow():
    model = build("autoencoder", "bf16")
    types = []
    model.decoder.blocks[0].register_forward_hook(lambda _, inputs, output: types.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(random_images(2), draw_batch(MASK_ALONE, images=2))
    assert types == [torch.bfloat16]
    for residual in ("bf16", "fp32"):
        assert has_bf16_residual(build("moving average", residual).teacher.encoder) == (residual == "bf16")


@pytest.mark.parametrize("precision", ["bf16", "auto"])
def test_a_run_trains_and_says_where_the_setting_has_no_effect(pretrain, capsys, monkeypatch, precision):
    monkeypatch.setattr("mpp.runtime.start.bf16_is_native", lambda: False)
    folder = pretrain("--model.residual=bf16", f"--run.precision={precision}", "--run.steps=1")
    noted = "note: model.residual bf16 has no effect here: run.precision is fp32" in capsys.readouterr().out
    assert noted == (precision == "auto")
    parse(Config, [f"--config={folder / 'config.yaml'}"])  # repeats the run
    assert {tensor.dtype for tensor in exported(folder).values()} == {torch.float32}


@pytest.mark.faults
def test_a_block_moves_76_bytes_less_for_each_value_of_the_stream():
    """In each half, 14 in the forward pass and 24 in the backward pass, by the sizes of what operations read and write.

    Forward: layer norm 4 + 4 -> 2 + 2, its output's cast 4 + 2 -> 0, the sum 4 + 2 + 4 -> 2 + 2 + 2. Backward: the
    norm's gradient 4 + 4 + 4 -> 2 + 2 + 2, the sum of both branches' likewise, and a cast of each branch's 6 -> 0.
    """
    images, width = 64, 192
    moved = {}
    for residual in ("fp32", "bf16"):
        for depth in (2, 3):
            model = ModelConfig(width=width, depth=depth, heads=3, img_size=64, patch_size=8, residual=residual)
            config = Config(run=RunConfig(precision="bf16", steps=10), model=model)
            moved[residual, depth] = count_traffic(config, images).elementwise()
    of_fp32, of_bf16 = (moved[residual, 3] - moved[residual, 2] for residual in ("fp32", "bf16"))
    values = images * 65 * width
    assert of_fp32 - of_bf16 == pytest.approx(76 * values, rel=0.02)
