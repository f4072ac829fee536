"""timm's plain transformers as students: their tokens are timm's own, visible or all, and so is what they export."""

import re
from collections import Counter
from operator import itemgetter

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import FAST, ONLY_MASKED, TINY_TUNING, read_metrics, refused
from model_inputs import MASKED, by_timm, draw_batch, names_where, randomize, scales_of
from timm.models.eva import Eva
from torch import nn

from evaluation import finetune, knn, visualize
from mpp.config import Config, CorruptionConfig, ModelConfig, NetworkConfig, OptimConfig
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder
from mpp.models.networks import build_model
from mpp.models.plain import cell_grid, gather_tokens, is_plain, prepare_tokens, run_blocks
from mpp.training.optim import build_optimizer

NUMBERS = dict(width=32, depth=3, heads=2)
MEAN_POOLED = {"global_pool": "avg", "use_fc_norm": False}
FAMILIES = {  # a model of timm's -> settings beside its numbers
    "vit_small_patch14_reg4_dinov2": dict(img_size=56),
    "vit_base_patch16_clip_224": dict(img_size=64),
    "deit3_small_patch16_224": dict(img_size=64),
    "vit_small_patch16_dinov3": dict(img_size=64),
    "vit_small_patch16_dinov3_qkvb": dict(img_size=(48, 80)),
    "eva02_tiny_patch14_224": dict(img_size=56),
    "vit_small_patch16_rope_mixed_ape_224": dict(img_size=(48, 80)),
    "vit_pe_core_tiny_patch16_384": dict(img_size=64, arguments=MEAN_POOLED),
    "vit_medium_patch16_rope_reg1_gap_256": dict(img_size=64),
    "vit_base_patch16_sapiens2": dict(img_size=64, arguments={"num_kv_heads": [2, 1, 1]}),
    "beit_base_patch16_224": dict(img_size=(48, 80)),
    "beitv2_base_patch16_224": dict(img_size=64),
}
NEED_ALL = [name for name in FAMILIES if name.startswith("beit") or "rope_mixed" in name]
RUNS = {
    "vit_small_patch16_dinov3": ("--network.name=autoencoder", *ONLY_MASKED),
    "eva02_tiny_patch14_224": ("--objective.name=features", *ONLY_MASKED),
    "vit_small_patch16_rope_mixed_ape_224": ("--model.activation_checkpointing=true", "--model.drop_path=0.1"),
    "beit_base_patch16_224": ("--probe.every=2", "--probe.images=40"),
}
HIDDEN = CorruptionConfig(**MASKED)
every_family = pytest.mark.parametrize("name", FAMILIES)


def settings_of(name, **changes):
    return ModelConfig(name=name, **NUMBERS | FAMILIES[name] | changes)


def encoder_of(name, channels=3, **changes):
    """An encoder whose weights all matter, in eval mode."""
    torch.manual_seed(0)
    encoder = build_encoder(settings_of(name, **changes), channels)
    randomize(encoder, std=0.2)
    return encoder.eval()


def network_of(name, network="predictor", **options):
    """A network of a family, whose weights all matter."""
    torch.manual_seed(0)
    config = Config(model=settings_of(name), network=NetworkConfig(name=network), corruption=HIDDEN, **options)
    model, _ = build_model(config)
    randomize(model, std=0.1)
    return model


def inputs_of(encoder):
    """Images (B, C, H, W) from 0 to 255, and which of their patches are hidden."""
    grid, _ = cell_grid(encoder)
    images = torch.randint(0, 256, (3, 3, *encoder.patch_embed.img_size)).float()
    return images, draw_batch(HIDDEN, grid)


def tokens_by_parts(encoder, images, kept=None):
    """An encoder's tokens after its last norm before pooling, by the parts that networks use."""
    tokens, block_arguments = prepare_tokens(encoder, encoder.patch_embed(images), kept)
    return encoder.norm(run_blocks(encoder.blocks, tokens, False, block_arguments))


@every_family
def test_tokens_by_parts_are_timms_all_of_them_and_the_visible_ones(name):
    """timm leaves the others out in its `patch_drop`, after positions: what a rotation needs, by their indices."""
    encoder = encoder_of(name)
    images = torch.randn(2, 3, *encoder.patch_embed.img_size)
    assert torch.equal(tokens_by_parts(encoder, images), encoder.forward_features(images))
    if name in NEED_ALL:
        return
    patches = torch.stack([torch.randperm(encoder.patch_embed.num_patches)[:6].sort().values for _ in images])
    prefix = encoder.num_prefix_tokens
    places = torch.cat([torch.arange(prefix).expand(2, -1), prefix + patches], dim=1)
    found = tokens_by_parts(encoder, images, places)
    encoder.patch_drop = nn.Identity()
    encoder.patch_drop.forward = lambda tokens: (
        (gather_tokens(tokens, places), patches) if isinstance(encoder, Eva) else gather_tokens(tokens, places)
    )
    torch.testing.assert_close(found, encoder.forward_features(images), rtol=1e-5, atol=1e-5)


@every_family
def test_every_parameter_learns_and_no_gradient_comes_from_hidden_patches(name):
    """Patches cannot be hidden from an encoder whose blocks need all of them, but in the predictor."""
    for network in ("predictor",) if name in NEED_ALL else ("predictor", "autoencoder"):
        model = network_of(name, network).eval()
        images, corruption = inputs_of(model.encoder)
        images.requires_grad_()
        model(images, corruption).square().sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
        side = model.encoder.patch_embed.patch_size[0]
        seen = F.max_pool2d(images.grad.abs().amax(1), side).flatten(1) > 0
        assert torch.equal(seen, torch.ones_like(seen).scatter_(1, corruption.positions, False))


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", *NEED_ALL])
def test_checkpointed_activations_give_the_same_gradients(name):
    """Blocks get rotations, each its own, or biases."""
    gradients = []
    for checkpointed in (False, True):
        model = network_of(name)
        model.encoder.set_grad_checkpointing(checkpointed)
        model(*inputs_of(model.encoder)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


@every_family
def test_each_parameter_is_in_one_group_with_its_decay_and_its_rate(name):
    """Registers, norms before the blocks and frequencies have the stem's rate; timm's layers count them to the head."""
    model = network_of(name)
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=1.0, layer_decay=0.5))
    groups = optimizer.param_groups
    assert Counter(p for group in groups for p in group["params"]) == Counter(model.parameters())
    decayed, orthogonal = (names_where(model, optimizer, itemgetter(key)) for key in ("weight_decay", "use_muon"))
    assert not decayed & {f"encoder.{name}" for name in model.encoder.no_weight_decay()}
    assert {name.rsplit(".", 1)[-1] for name in decayed} == {"weight"}  # no bias, token, table
    assert {name.split(".")[1] for name in orthogonal} == {"blocks"}
    assert any("qkv" in name or "q_proj" in name for name in orthogonal)
    scales = scales_of(model, groups)
    in_blocks = [0.5**3, 0.5**2, 0.5]
    for path, _ in model.encoder.named_parameters():
        top, *rest = path.split(".")
        expected = in_blocks[int(rest[0])] if top == "blocks" else {"norm": 0.5, "fc_norm": 1.0}.get(top, 0.5**4)
        assert scales[f"encoder.{path}"] == pytest.approx(expected), path


@every_family
def test_plain_timm_gives_the_bits_of_an_export(name, tmp_path):
    channels = 4 if name in RUNS else 3
    encoder = encoder_of(name, channels, attention="fused")  # as timm's own default
    size = encoder.patch_embed.img_size
    export_encoder(encoder, tmp_path / "encoder", size, (0.1,) * channels, (0.4,) * channels, 1.0)
    theirs = by_timm(tmp_path / "encoder")
    assert type(theirs) is type(encoder)
    assert timm.data.resolve_model_data_config(theirs)["input_size"] == (channels, *size)
    again = build_encoder(settings_of(name, attention="fused", init_from=str(tmp_path / "encoder")), channels).eval()
    images = torch.randn(2, channels, *size)
    for other in (theirs, again):
        assert torch.equal(other.forward_features(images), encoder.forward_features(images))
        assert torch.equal(other(images), encoder(images))


DINOV3 = "vit_small_patch16_dinov3"
NOT_PLAIN = "it must be a plain transformer"
REFUSED = [
    ("vit_base_patch16_siglip_224", {}, '{"global_pool": "avg", "fc_norm": false}'),
    ("cait_xxs24_224", {}, NOT_PLAIN),
    ("vit_small_resnet26d_224", {}, "without batch norms"),
    (DINOV3, dict(position="none"), "unexpected keyword argument 'pos_embed'"),
    (DINOV3, dict(position="sincos_2d"), "model.position is sincos_2d; it must be learned with a model that has no"),
    ("vit_bose_patch16_224", {}, "vit_base_patch16_224"),
    (None, dict(width=18, position="sincos_2d"), "(18)"),
    (DINOV3, dict(img_size=60), "model.img_size is 60; it must be a multiple of the patch size (16)"),
]


@pytest.mark.parametrize("name, settings, words", REFUSED)
def test_a_model_that_does_not_serve_is_refused_by_name(name, settings, words):
    with refused(re.escape(words)):
        build_encoder(ModelConfig(name=name, **NUMBERS | settings))


def test_the_settings_that_a_refusal_names_serve():
    without_pool = {"global_pool": "avg", "fc_norm": False}
    assert build_encoder(ModelConfig(name="vit_base_patch16_siglip_224", **NUMBERS, arguments=without_pool))


@pytest.mark.faults
@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_and_its_encoder_is_evaluated(name, pretrain, tmp_path):
    side = 56 if "patch14" in name else 80
    numbers = (f"--model.name={name}", "--model.width=32", f"--model.img_size={side}")
    folder = pretrain(*numbers, *RUNS[name], "--run.steps=2")
    assert len(read_metrics(folder)) == 2
    assert is_plain(by_timm(folder / "encoder"))
    fast = (*FAST, f"--encoder={folder}")
    knn.main([*fast, f"--out={tmp_path / 'knn'}"])
    visualize.main([*fast, f"--out={tmp_path / 'pictures'}"])
    assert list((tmp_path / "pictures").glob("attention*"))
    words = (f"--encoder={folder}", "--run.steps=2", "--lrs=[0.01]", f"--run.dir={tmp_path / 'tuned'}")
    finetune.main([*TINY_TUNING, *words])
    assert is_plain(by_timm(tmp_path / "tuned" / "lr_0.01" / "encoder"))
