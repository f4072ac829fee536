"""The rivals: their losses against transformers' own code, and that each overlay is a run like any other."""

import pytest
import torch
from conftest import TINY, read_metrics
from einops import rearrange
from model_inputs import HALVES, MASKED, by_timm, draw_batch, random_images, randomize
from server import Command, finish

from mpp.config import Config, CorruptionConfig, ModelConfig, NetworkConfig, ObjectiveConfig
from mpp.config.parsing import parse
from mpp.corruption import draw
from mpp.models.encoder import build_encoder
from mpp.models.networks import build_network
from mpp.objectives import build_objective

OVERLAYS = [f"rivals/{name}" for name in ("simmim", "mae", "mae_mean_color", "maskfeat", "data2vec", "ijepa")]
MODEL = dict(width=24, depth=2, heads=2, img_size=32, patch_size=8)
THEIRS = dict(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=96,
    image_size=32,
    patch_size=8,
    layer_norm_eps=1e-6,
)
BLOCK = {  # in timm: in transformers
    "norm1": "layernorm_before",
    "attn.proj": "attention.o_proj",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def ours(network, objective, position):
    """A network of ours with weights that all matter, its objective, images, and their corruption."""
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(**MODEL, position=position))
    objective = build_objective(objective, 8)
    model = build_network(network, encoder, objective.outputs, *HALVES)
    randomize(model, std=0.2)
    return model, objective, random_images(), draw_batch(CorruptionConfig(rate=0.75, **MASKED))


def assert_same_loss(ours, their_loss, theirs):
    """Ours and theirs have the same loss, and the same gradient reaches the first weights."""
    model, objective, images, corruption = ours
    loss = objective.loss(model(images, corruption), objective.targets(images, corruption.positions))
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    their_loss.backward()
    gradient = model.encoder.patch_embed.proj.weight.grad
    their_gradient = theirs.vit.embeddings.patch_embeddings.projection.weight.grad
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-5, atol=1e-5)


def renamed_blocks(blocks, prefix):
    """The weights of timm's blocks by the names that transformers has for them."""
    state = {}
    for number, block in enumerate(blocks):
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", block.get_parameter(f"attn.qkv.{kind}").chunk(3), strict=True):
                state[f"{prefix}.{number}.attention.{name}_proj.{kind}"] = part
            for name, their_name in BLOCK.items():
                state[f"{prefix}.{number}.{their_name}.{kind}"] = block.get_parameter(f"{name}.{kind}")
    return state


def renamed(model, **names):
    """The weights of a network of ours, by the names that transformers has for them.

    Args:
        names: of parts that only this network has.
    """
    encoder = model.encoder
    state = renamed_blocks(encoder.blocks, "vit.layers")
    names = {"encoder.patch_embed.proj": "vit.embeddings.patch_embeddings.projection"} | names
    for name, their_name in ({"encoder.norm": "vit.layernorm"} | names).items():
        state |= dict(model.get_submodule(name).named_parameters(prefix=their_name))
    state["vit.embeddings.cls_token"] = encoder.cls_token
    state["vit.embeddings.position_embeddings"] = encoder.pos_embed
    return state


def hidden(corruption):
    """(B, 16): whether a patch is corrupted."""
    return torch.zeros(3, 16, dtype=torch.bool).scatter_(1, corruption.positions, True)


@pytest.mark.parametrize("normalize", ["patch", "none"])
def test_mae_has_the_loss_of_transformers(normalize):
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    network = NetworkConfig(name="autoencoder", decoder_width=16, decoder_depth=2, decoder_heads=2)
    target = ObjectiveConfig(name="pixels", normalize=normalize)
    parts = ours(network, target, "sincos_2d")
    model, _, images, corruption = parts
    decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2)
    decoder |= dict(decoder_intermediate_size=64, mask_ratio=0.75, norm_pix_loss=normalize == "patch")
    theirs = ViTMAEForPreTraining(ViTMAEConfig(**THEIRS, **decoder))
    their_names = {"decoder.embed": "decoder.decoder_embed", "decoder.norm": "decoder.decoder_norm"}
    state = renamed(model, **their_names, head="decoder.decoder_pred")
    state |= renamed_blocks(model.decoder.blocks, "decoder.decoder_layers")
    for kind in ("weight", "bias"):  # their pixels are in another order
        weight = state[f"decoder.decoder_pred.{kind}"]
        state[f"decoder.decoder_pred.{kind}"] = rearrange(weight, "(c h w) ... -> (h w c) ...", c=3, h=8)
    state["decoder.mask_token"] = model.decoder.mask_token[None, None]
    state["decoder.decoder_pos_embed"] = model.decoder.positions[None]
    theirs.load_state_dict(state)
    noise = hidden(corruption) + torch.rand(3, 16) / 2  # those with the least are seen
    outputs = theirs(images / 127.5 - 1, noise=noise)
    assert torch.equal(outputs.mask.bool(), hidden(corruption))
    assert_same_loss(parts, outputs.loss, theirs)


def test_simmim_has_the_loss_of_transformers():
    """Theirs divides by the masked pixels, and 1e-5 of one, and by the channels: the mean that ours is."""
    from transformers import ViTConfig, ViTForMaskedImageModeling

    parts = ours(NetworkConfig(), ObjectiveConfig(name="pixels", loss="l1"), "learned")
    model, _, images, corruption = parts
    theirs = ViTForMaskedImageModeling(ViTConfig(**THEIRS, encoder_stride=8))
    state = renamed(model, head="decoder.0")
    state["decoder.0.weight"] = state["decoder.0.weight"][..., None, None]  # a convolution of 1 x 1
    state["vit.embeddings.mask_token"] = model.mask_token[None, None]
    theirs.load_state_dict(state)
    outputs = theirs(images / 127.5 - 1, bool_masked_pos=hidden(corruption))
    assert_same_loss(parts, outputs.loss, theirs)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("recipe", ["birds", "imagenet_vit_b16"])
def test_an_overlay_changes_the_method_and_fits_the_recipe(recipe, overlay):
    alone = parse(Config, [f"--config={recipe}"])
    config = parse(Config, [f"--config={recipe}", f"--config={overlay}"])
    assert (config.run, config.optim, config.probe) == (alone.run, alone.optim, alone.probe)
    numbers = config.model.numbers()
    side = numbers["img_size"] // numbers["patch_size"]
    drawn = draw(config.corruption, (side, side), 0, 0, 0)
    assert not drawn.kinds.any()
    assert len(drawn.positions) == pytest.approx(config.corruption.rate * side**2, abs=2)
    build_objective(config.objective, numbers["patch_size"], teacher_width=8)


@pytest.mark.faults
def test_overlays_are_one_run_on_two_processes(pretrain, tmp_path):
    words = []
    for overlay in OVERLAYS:
        words += [f"--config={overlay}", *TINY, f"--run.dir={tmp_path / 'two' / overlay}", "then"]
    finish(Command("pretrain", *words, processes=2))
    for overlay in OVERLAYS:
        one = pretrain(f"--config={overlay}", dir=tmp_path / "one" / overlay)
        for key in ("loss", "accuracy", "heldout/loss", "heldout/target_deviation"):
            assert read_metrics(tmp_path / "two" / overlay, key) == pytest.approx(read_metrics(one, key), abs=1e-4)
        encoder = by_timm(one / "encoder")
        assert encoder.forward_features(torch.zeros(1, 3, 32, 32)).shape == (1, 17, 16)
