"""The network: the cheap last block equals the whole one, and corruption acts where the paper says."""

from functools import partial

import pytest
import timm
import torch
from model_inputs import HALVES, draw_batch, random_images, randomize, small_vit
from torchvision.transforms.v2.functional import normalize

from mpp.config import CorruptionConfig, ModelConfig, NetworkConfig
from mpp.corruption import corrupt
from mpp.models.encoder import build_encoder
from mpp.models.networks import MaskedPatchPredictor, build_network
from mpp.models.plain import runs_at_few, set_attention
from mpp.models.variants import RELATIVE
from mpp.runtime.messages import tell

SMALL = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)


class GatedAttention(timm.layers.Attention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, gated=True, **kwargs)


VARIANTS = {
    "plain": {},
    "norms and scales": dict(qkv_bias=False, qk_norm=True, scale_attn_norm=True, init_values=0.3, pre_norm=True),
    "registers": dict(reg_tokens=3, no_embed_class=True),
    "no class token": dict(class_token=False, global_pool="avg"),
    "parallel block": dict(block_fn=timm.models.vision_transformer.ParallelScalingBlock),
    "gated": dict(attn_layer=GatedAttention),
    **{position: dict(position=position) for position in (*RELATIVE, "learned_2d", "sincos_2d")},
    "rope with norms": dict(position="rope", qk_norm=True, reg_tokens=2),
    "relative without a class token": dict(position="relative", class_token=False, global_pool="avg"),
    "positions in each block": dict(position_at="every"),
    "positions shared by the blocks": dict(position="learned_2d", position_at="every_shared"),
    "axial": dict(mixing="axial", position="relative_bias"),
}
MOMENTS = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
OURS = {"position", "position_at", "mixing"}


def images_and_corruption():
    torch.manual_seed(0)
    return random_images(), draw_batch(CorruptionConfig(mask=0.4, random=0.3, keep=0.3))


def dense(model, images, corruption):
    """The prediction with every block run whole, written as the paper says it."""
    encoder = model.encoder
    patches = encoder.patch_embed(normalize(images / 255, *MOMENTS))
    tokens = encoder._pos_embed(corrupt(patches, model.mask_token, corruption))
    tokens = encoder.fc_norm(encoder.norm(encoder.blocks(encoder.norm_pre(tokens))))
    patch_tokens = tokens[:, encoder.num_prefix_tokens :]
    return model.head(torch.take_along_dim(patch_tokens, corruption.positions[..., None], 1))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_last_block_where_it_is_looked_at_equals_the_whole(variant, fused):
    torch.manual_seed(1)
    name = "mpp_vit" if OURS & VARIANTS[variant].keys() else "vit_base_patch16_224"
    encoder = timm.create_model(name, **SMALL, **VARIANTS[variant])
    set_attention(encoder, fused)
    randomize(encoder, std=0.2)
    model = MaskedPatchPredictor(encoder, 5, *MOMENTS)
    images, corruption = images_and_corruption()
    weights = torch.randn(3, 8, 5)
    results = []
    for forward in (model, partial(dense, model)):
        model.zero_grad()
        predictions = forward(images, corruption)
        (predictions * weights).sum().backward()
        results.append([predictions, *(parameter.grad for parameter in model.parameters())])
    for sparse, whole in zip(*results, strict=True):
        torch.testing.assert_close(sparse, whole, rtol=1e-4, atol=1e-5)


class Shifted(timm.models.vision_transformer.Block):
    """As timm's, but with another term, which begins at zero."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, **options):
        return super().forward(x, **options) + self.shift


@pytest.mark.parametrize("other", [dict(block_fn=Shifted), dict(attn_layer=GatedAttention, init_values=1e-5)])
def test_a_block_that_timm_has_changed_runs_on_all_tokens(other, capsys):
    plain = small_vit(init_values=1e-5)
    before = torch.get_rng_state()
    assert runs_at_few(plain.blocks[-1], 17)
    assert not capsys.readouterr().err
    encoder = small_vit(**other)
    tell.cache_clear()
    model = MaskedPatchPredictor(encoder, 5, *MOMENTS)
    assert not model.last_at_few
    assert "warning: timm" in capsys.readouterr().err
    images, corruption = images_and_corruption()
    torch.testing.assert_close(model(images, corruption), dense(model, images, corruption))
    torch.set_rng_state(before)
    assert runs_at_few(plain.blocks[-1], 17) and torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("network", [NetworkConfig(), NetworkConfig(name="autoencoder", decoder_depth=2)])
def test_activation_checkpointing_computes_the_same_again(network):
    """Of the decoder, too."""
    images, corruption = images_and_corruption()
    results = []
    for times in (1, 2):
        torch.manual_seed(2)
        numbers = dict(width=16, depth=2, heads=2, img_size=32, patch_size=8, dropout=0.3)
        encoder = build_encoder(ModelConfig(**numbers, activation_checkpointing=times == 2))
        model = build_network(network, encoder, 8, *HALVES).train()
        parts, calls = [encoder, *([model.decoder] if network.decoder_depth else [])], []
        for part in parts:
            part.blocks[0].attn.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        model(images, corruption).square().mean().backward()
        results.append([parameter.grad for parameter in model.parameters()])
        assert len(calls) == times * len(parts)
    assert all(map(torch.equal, *results)) and all(each.any() for each in results[0])
