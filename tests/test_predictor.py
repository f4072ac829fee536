"""The network: the cheap last block equals the whole one, and corruption acts where the paper says."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from mpp.config import CorruptionConfig, ModelConfig
from mpp.corruption import Corruption, Kind, corrupt, draw
from mpp.models.attention import RELATIVE, gather_tokens
from mpp.models.blocks import block_at
from mpp.models.encoder import build_encoder
from mpp.models.predictor import MaskedPatchPredictor
from mpp.models.timm_models import set_attention

SMALL = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)


class GatedAttention(timm.layers.Attention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, gated=True, **kwargs)


VARIANTS = {
    "plain": {},
    "no qkv bias": dict(qkv_bias=False),
    "query and key norm": dict(qk_norm=True),
    "output norm": dict(scale_attn_norm=True),
    "layer scale": dict(init_values=0.3),
    "registers": dict(reg_tokens=3, no_embed_class=True),
    "pre-norm": dict(pre_norm=True),
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
OURS = {"position", "position_at", "mixing"}


def images_and_corruption(batch=3, side=32):
    torch.manual_seed(0)
    config = CorruptionConfig(mask=0.4, random=0.3, keep=0.3)
    drawn = [draw(config, (4, 4), 0, 0, index) for index in range(batch)]
    images = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8)
    return images, Corruption(*map(torch.stack, zip(*drawn, strict=True)))


def dense(model, images, corruption):
    """The prediction with every block run whole, written as the paper says it."""
    encoder = model.encoder
    patches = encoder.patch_embed((images / 255 - 0.5) / 0.5)
    tokens = encoder._pos_embed(corrupt(patches, model.mask_token, corruption))
    tokens = encoder.fc_norm(encoder.norm(encoder.blocks(encoder.norm_pre(tokens))))
    return model.head(tokens[:, encoder.num_prefix_tokens :].gather(1, expand(corruption.positions, tokens)))


def expand(index, tokens):
    return index[..., None].expand(-1, -1, tokens.shape[-1])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_last_block_where_it_is_looked_at_equals_the_whole(variant, fused):
    torch.manual_seed(1)
    name = "mpp_vit" if OURS & VARIANTS[variant].keys() else "vit_base_patch16_224"
    encoder = timm.create_model(name, **SMALL, **VARIANTS[variant])
    set_attention(encoder, fused)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # so that norms, scales and biases all do something
    model = MaskedPatchPredictor(encoder, 5, (0.5,) * 3, (0.5,) * 3)
    images, corruption = images_and_corruption()
    weights = torch.randn(3, 8, 5)
    results = []
    for forward in (model, lambda *a: dense(model, *a)):
        model.zero_grad()
        predictions = forward(images, corruption)
        (predictions * weights).sum().backward()
        results.append([predictions, *(p.grad.clone() for p in model.parameters())])
    for sparse, whole in zip(*results, strict=True):
        torch.testing.assert_close(sparse, whole, rtol=1e-4, atol=1e-5)


def test_last_block_skips_what_is_not_looked_at():
    encoder = timm.create_model("vit_base_patch16_224", **SMALL)
    set_attention(encoder, fused=False)  # not every torch counts what fused kernels do
    tokens = torch.randn(2, 17, 16)
    index = torch.tensor([[1, 5], [2, 3]])
    costs = []
    block = encoder.blocks[0]
    for forward in (lambda: block_at(block, tokens, index), lambda: gather_tokens(block(tokens), index)):
        with FlopCounterMode(display=False) as counter:
            forward()
        costs.append(counter.get_total_flops())
    width = 16
    heads_width = 16
    tokens_in = 2 * 17
    seen = 2 * 2
    projections = 2 * width * (heads_width * seen + 2 * heads_width * tokens_in + heads_width * seen)
    attention = 2 * 2 * seen * 17 * heads_width
    mlp = 2 * 2 * seen * width * 4 * width
    assert costs[0] == projections + attention + mlp
    assert costs[0] < costs[1] / 2


def test_input_is_normalised_and_corruption_acts_on_embeddings_before_positions():
    torch.manual_seed(0)
    model = MaskedPatchPredictor(build_encoder(ModelConfig(img_size=32)), 5, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    images, corruption = images_and_corruption(batch=1)
    seen = {}
    model.encoder.patch_embed.register_forward_hook(lambda _, args, out: seen.update(pixels=args[0], embedded=out))
    model.encoder.blocks[0].register_forward_hook(lambda _, args, out: seen.update(tokens=args[0]))
    model(images, corruption)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    torch.testing.assert_close(seen["pixels"], (images / 255 - mean) / std)
    without_position = seen["tokens"] - model.encoder.pos_embed
    for position, kind, source in zip(*(field[0] for field in corruption[:3]), strict=True):
        expected = model.mask_token if kind == Kind.MASK else seen["embedded"][0, source]
        torch.testing.assert_close(without_position[0, 1 + position], expected)
    assert set(corruption.kinds[0].tolist()) == set(Kind)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "activation checkpointing"])
def test_the_whole_is_one_graph_to_the_compiler(again):
    """The compiler leaves what it cannot follow to Python without a word; here it says so."""
    numbers = dict(width=16, depth=2, heads=2, img_size=32, patch_size=8, activation_checkpointing=again)
    model = MaskedPatchPredictor(build_encoder(ModelConfig(**numbers)), 5, (0.5,) * 3, (0.5,) * 3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for sort in (model.train(), model.eval()):
        torch.testing.assert_close(compiled(*images_and_corruption()), sort(*images_and_corruption()))


def test_every_parameter_learns():
    model = MaskedPatchPredictor(build_encoder(ModelConfig(img_size=32)), 5, (0.5,) * 3, (0.5,) * 3)
    model(*images_and_corruption()).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_computes_the_same_with_less_memory(dropout):
    images, corruption = images_and_corruption()
    numbers = dict(width=16, depth=6, heads=2, img_size=32, patch_size=8, dropout=dropout)
    results = []
    kept = []
    for again in (False, True):
        torch.manual_seed(2)
        encoder = build_encoder(ModelConfig(**numbers, activation_checkpointing=again))
        model = MaskedPatchPredictor(encoder, 8, (0.5,) * 3, (0.5,) * 3).train()
        storages: dict[int, int] = {}

        def keep(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(images, corruption).square().mean()
        loss.backward()
        results.append(
            [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        )
        kept.append(sum(storages.values()) - sum(p.untyped_storage().nbytes() for p in model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert kept[1] < 0.5 * kept[0]
