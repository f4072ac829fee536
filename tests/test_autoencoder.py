"""The masked autoencoder: how its decoder begins, what both cost, and which encoders it refuses."""

from dataclasses import replace

import pytest
import timm
import torch
from conftest import refused
from model_inputs import HALVES, MASKED, draw_batch, random_images, small_vit
from torch.utils.flop_counter import FlopCounterMode

from mpp.config import Config, CorruptionConfig, ModelConfig, NetworkConfig
from mpp.models.encoder import build_encoder
from mpp.models.networks import build_network, decoder_numbers
from mpp.models.plain import has_fused_attention, set_attention
from mpp.training.flops import executed_flops

SMALL = NetworkConfig(name="autoencoder", decoder_width=16, decoder_depth=2, decoder_heads=2)


def autoencoder(decoder=SMALL):
    encoder = small_vit(embed_dim=24, depth=2)
    set_attention(encoder, fused=False)
    return build_network(decoder, encoder, 5, *HALVES)


def images_and_corruption():
    torch.manual_seed(0)
    return random_images(), draw_batch(CorruptionConfig(rate=0.75, **MASKED))


def test_compute_falls_with_the_patches_that_are_seen():
    model = autoencoder(replace(SMALL, decoder_depth=1))
    images, corruption = images_and_corruption()
    with FlopCounterMode(display=False) as counter:
        model(images, corruption)
    every, hidden, wide, narrow = 17, 12, 24, 16
    seen = every - hidden
    embedding = 16 * 3 * 8**2 * wide
    encoder = 2 * (12 * seen * wide**2 + 2 * seen**2 * wide)  # two blocks
    queries = hidden * (2 + 8) * narrow**2 + 2 * hidden * every * narrow  # in the decoder's one block
    decoder = seen * wide * narrow + every * 2 * narrow**2 + queries + hidden * narrow * 5
    assert counter.get_total_flops() == 3 * 2 * (embedding + encoder + decoder)
    assert 2.5 < executed_flops(model, images, corruption) / counter.get_total_flops() < 3  # with the backward pass


@pytest.mark.parametrize("fused", [True, False])
def test_the_decoder_begins_as_the_encoder_and_computes_attention_so(fused):
    attention = "fused" if fused else "unfused"
    encoder = build_encoder(ModelConfig(depth=1, attention=attention, position="learned_2d"))
    network = build_network(NetworkConfig(name="autoencoder"), encoder, 5, *HALVES)
    assert has_fused_attention(network.decoder) == fused
    for weight in (network.decoder.mask_token, network.head.weight, network.decoder.blocks[0].mlp.fc1.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize(
    "width, depth, decoder",
    [(768, 12, (512, 8, 16)), (1024, 24, (512, 8, 16)), (96, 4, (64, 3, 2)), (16, 1, (32, 1, 1))],
)
def test_a_decoder_is_maes_or_as_large_in_proportion(width, depth, decoder):
    with torch.device("meta"):
        encoder = timm.create_model("vit_base_patch16_224", embed_dim=width, depth=depth, num_heads=4)
    assert decoder_numbers(NetworkConfig(), encoder) == decoder
    given = NetworkConfig(decoder_width=48, decoder_depth=5, decoder_heads=3)
    assert decoder_numbers(given, encoder) == (48, 5, 3)


def test_what_cannot_be_built_is_named():
    with refused(r"network\.name is unet; it must be one of predictor, autoencoder"):
        autoencoder(NetworkConfig(name="unet"))
    with refused(r"network\.decoder_width is 36; .*_heads \(5\)"):
        autoencoder(NetworkConfig(name="autoencoder", decoder_width=36, decoder_heads=5))
    with refused(r"corruption\.mask is 0\.8; it must be 1 .*network\.name=autoencoder"):
        Config(network=SMALL)


@pytest.mark.parametrize(
    "settings",
    [
        dict(name="vit_tiny_r_s16_p8_224"),
        dict(name="beit_base_patch16_224"),
        dict(stride=4),
        dict(position="rope"),
        dict(mixing="axial"),
        dict(position_at="every"),
    ],
    ids=str,
)
def test_an_encoder_that_needs_all_tokens_is_refused(settings):
    """Or whose convolutions and windows see what is hidden."""
    numbers = {} if "name" in settings else dict(width=24, heads=2)
    encoder = build_encoder(ModelConfig(**settings, **numbers, depth=1, img_size=64))
    with refused(r"network\.name is autoencoder; it must be predictor with a hybrid.*\(BEiT\)"):
        build_network(SMALL, encoder, 5, *HALVES)
