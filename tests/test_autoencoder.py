"""The masked autoencoder: what its encoder sees, what its decoder does, and what both cost."""

from functools import partial

import pytest
import timm
import torch
from model_inputs import HALVES, draw_batch, random_images, randomize, scaled
from torch.utils.flop_counter import FlopCounterMode

from mpp.config import Config, CorruptionConfig, ModelConfig, NetworkConfig
from mpp.models.encoder import build_encoder
from mpp.models.networks import MaskedAutoencoder, build_network, complement, decoder_numbers
from mpp.models.plain import has_fused_attention, set_attention
from mpp.objectives import patchify
from mpp.training.flops import executed_flops

VARIANTS = {
    "plain": {},
    "registers without positions": dict(reg_tokens=3, no_embed_class=True),
    "pre-norm": dict(pre_norm=True),
    "no class token, norm after pooling": dict(class_token=False, global_pool="avg"),
    "patches on their grid": dict(dynamic_img_size=True),
}
SMALL = NetworkConfig(name="autoencoder", decoder_width=16, decoder_depth=2, decoder_heads=2)


def autoencoder(decoder=SMALL, **changes) -> MaskedAutoencoder:
    torch.manual_seed(1)
    sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=0)
    encoder = timm.create_model("vit_base_patch16_224", **sizes | changes)
    set_attention(encoder, fused=False)
    return build_network(decoder, encoder, 5, *HALVES)


def images_and_corruption(rate=0.75, **pattern):
    config = CorruptionConfig(rate=rate, mask=1.0, random=0.0, keep=0.0, **pattern)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return random_images(), draw_batch(config)


def one_by_one(model, images, corruption):
    """The predictions of each image alone, token by token and with every block run whole."""
    encoder = model.encoder
    decoder = model.decoder
    embedded = encoder._pos_embed(encoder.patch_embed(scaled(images)))
    prefix = encoder.num_prefix_tokens
    results = []
    for tokens, positions in zip(embedded, corruption.positions.tolist(), strict=True):
        seen = [place for place in range(len(tokens)) if place - prefix not in positions]
        encoded = encoder.fc_norm(encoder.norm(encoder.blocks(encoder.norm_pre(tokens[None, seen]))))
        whole = [decoder.mask_token + row for row in decoder.positions]
        for place, token in zip(seen, decoder.embed(encoded)[0], strict=True):
            whole[place] = token + decoder.positions[place]
        decoded = torch.stack(whole)[None]
        for block in decoder.blocks:
            decoded = block(decoded)
        predictions = model.head(decoder.norm(decoded))[0]
        results.append(predictions[prefix:][positions])
    return torch.stack(results)


@pytest.mark.parametrize("variant", VARIANTS)
def test_predictions_and_gradients_are_those_of_each_image_alone(variant):
    model = autoencoder(**VARIANTS[variant])
    randomize(model, std=0.2)
    images, corruption = images_and_corruption()
    results = []
    for forward in (model, partial(one_by_one, model)):
        model.zero_grad()
        predictions = forward(images, corruption)
        predictions.square().sum().backward()
        results.append([predictions, *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert ours.any()  # every parameter learns


@pytest.mark.parametrize("pattern", ["random", "blocks", "blockwise"])
@pytest.mark.parametrize("network", ["predictor", "autoencoder"])
def test_no_pixel_of_a_hidden_patch_reaches_a_prediction(network, pattern):
    model = autoencoder(NetworkConfig(name=network))
    images, corruption = images_and_corruption(pattern=pattern)
    pixels = images.float().requires_grad_()
    model(pixels, corruption).square().sum().backward()
    gradients = patchify(pixels.grad, 8)  # (B, N, C, P, P)
    reached = gradients.flatten(2).any(-1)
    hidden = torch.zeros(3, 16, dtype=torch.bool).scatter_(1, corruption.positions, True)
    assert torch.equal(reached, ~hidden)


@pytest.mark.parametrize("rate", [0.25, 0.75])
def test_compute_falls_with_the_patches_that_are_seen(rate):
    model = autoencoder(NetworkConfig(name="autoencoder", decoder_width=16, decoder_depth=1, decoder_heads=2))
    images, corruption = images_and_corruption(rate)
    with FlopCounterMode(display=False) as counter:
        model(images, corruption)
    hidden = corruption.positions.shape[1]
    every = 17
    seen = every - hidden
    wide = 24
    narrow = 16
    embedding = 16 * 3 * 8**2 * wide
    encoder = 2 * (12 * seen * wide**2 + 2 * seen**2 * wide)  # two blocks
    queries = hidden * (2 + 8) * narrow**2 + 2 * hidden * every * narrow  # in the decoder's one block
    decoder = seen * wide * narrow + every * 2 * narrow**2 + queries + hidden * narrow * 5
    assert counter.get_total_flops() == 3 * 2 * (embedding + encoder + decoder)
    assert 2.5 < executed_flops(model, images, corruption) / counter.get_total_flops() < 3  # with the backward pass


@pytest.mark.parametrize("fused", [True, False])
def test_the_decoders_attention_is_computed_as_the_encoders(fused):
    encoder = build_encoder(ModelConfig(depth=1, attention="fused" if fused else "unfused"))
    assert has_fused_attention(build_network(SMALL, encoder, 5, *HALVES).decoder) == fused


def test_the_others_are_all_but_those_named():
    named = torch.tensor([[0, 3], [4, 2]])
    assert complement(named, 5).tolist() == [[1, 2, 4], [0, 1, 3]]


@pytest.mark.faults
@pytest.mark.parametrize("again", [False, True], ids=["plain", "activation checkpointing"])
def test_the_whole_is_one_graph_to_the_compiler(again):
    model = autoencoder()
    model.encoder.set_grad_checkpointing(again)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for sort in (model.train(), model.eval()):
        torch.testing.assert_close(compiled(*images_and_corruption()), sort(*images_and_corruption()))


def test_activation_checkpointing_computes_the_same_twice():
    gradients = []
    for again in (False, True):
        model = autoencoder(drop_path_rate=0.2, pos_drop_rate=0.1).train()
        calls = []
        model.encoder.set_grad_checkpointing(again)
        for part in (model.encoder, model.decoder):
            part.blocks[0].register_forward_pre_hook(lambda block, _, calls=calls: calls.append(block))
        torch.manual_seed(3)
        model(*images_and_corruption()).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert len(calls) == (4 if again else 2)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    ("width", "depth", "decoder"),
    [(768, 12, (512, 8, 16)), (1024, 24, (512, 8, 16)), (96, 4, (64, 3, 2)), (16, 1, (32, 1, 1))],
)
def test_a_decoder_is_maes_or_as_large_in_proportion(width, depth, decoder):
    with torch.device("meta"):
        encoder = timm.create_model("vit_base_patch16_224", embed_dim=width, depth=depth, num_heads=4)
    assert decoder_numbers(NetworkConfig(), encoder) == decoder
    given = NetworkConfig(decoder_width=48, decoder_depth=5, decoder_heads=3)
    assert decoder_numbers(given, encoder) == (48, 5, 3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(name="unet"), r"network\.name is unet; it must be one of predictor, autoencoder"),
        (dict(name="autoencoder", decoder_width=36, decoder_heads=5), r"network\.decoder_width is 36; .*_heads \(5\)"),
    ],
)
def test_what_cannot_be_built_is_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        autoencoder(NetworkConfig(**wrong))


def test_a_hybrid_is_refused_because_its_convolutions_see_what_is_hidden():
    encoder = build_encoder(ModelConfig(name="vit_tiny_r_s16_p8_224", img_size=64))
    with pytest.raises(ValueError, match=r"network\.name is autoencoder; it must be predictor with a hybrid"):
        build_network(SMALL, encoder, 5, *HALVES)


@pytest.mark.parametrize("kinds", [{}, dict(mask=0.5, random=0.5, keep=0.0)])
def test_kept_and_random_kinds_are_refused(kinds):
    with pytest.raises(ValueError, match=r"corruption\.mask is 0\.\d; it must be 1 .*network\.name=autoencoder"):
        Config(network=SMALL, corruption=CorruptionConfig(**kinds))
