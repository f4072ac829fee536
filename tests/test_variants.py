"""The other encoders: positions against a loop over pairs, overlap that hides, axial attention, how they travel."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import refused
from model_inputs import HALVES, by_timm, draw_batch, random_images, randomize

import mpp
from mpp.config import CorruptionConfig, ModelConfig
from mpp.corruption import Corruption, Kind
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder
from mpp.models.networks import MaskedPatchPredictor
from mpp.models.plain import attention_at, cell_grid, set_attention
from mpp.models.variants import RELATIVE, PositionedAttention

NUMBERS = dict(width=24, depth=2, heads=3, img_size=32, patch_size=8)
KINDS = {
    **{position: dict(position=position) for position in ("none", "learned_2d", *RELATIVE)},
    "every": dict(position_at="every"),
    "every_shared sincos_2d": dict(position="sincos_2d", position_at="every_shared"),
    "stride": dict(stride=4),
    "stride, rope": dict(stride=2, position="rope"),
    "axial": dict(mixing="axial"),
    "axial, relative": dict(mixing="axial", position="relative"),
    "axial, relative_bias": dict(mixing="axial", position="relative_bias", stride=4),
    "registers, layer scale": dict(arguments={"reg_tokens": 2, "init_values": 0.1, "qk_norm": True}),
}
HYBRID = dict(name="vit_tiny_r_s16_p8_224", width=None, heads=None, patch_size=None)
PARTS = {"none", "rope", "stride", "axial", "relative_bias", "axial, relative"}  # of other kinds, for test_export.py
GRID = (3, 4)
HEADS = 2
WIDTH = 8  # of the attention that loops are compared with


def build(**settings):
    """An encoder whose weights all matter."""
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(**NUMBERS | settings)).eval()
    randomize(encoder, std=0.3)
    return encoder


def predictor(encoder):
    """A network that predicts five numbers for each patch."""
    return MaskedPatchPredictor(encoder, 5, *HALVES)


def permute_patches(images, order):
    """The images with their patches in another order."""
    patches = F.unfold(images, 8, stride=8)
    return F.fold(patches[..., order], images.shape[-2:], 8, stride=8)


def export(encoder, run):
    """Write the encoder of a run; its folder."""
    export_encoder(encoder, run / "encoder", 32, *HALVES, 1.0)
    return run / "encoder"


def attention_of(position):
    torch.manual_seed(1)
    attention = PositionedAttention(HEADS * WIDTH, HEADS, qkv_bias=True)
    attention.set_position(position, GRID, 1)
    randomize(attention, std=0.5)
    return attention.double().eval()


def logits_by_pairs(attention, tokens, position):
    """(heads, T, T) as the definition says it, pair by pair; tokens (T, D), [class] first."""
    queries, keys, _ = attention.qkv(tokens).unflatten(-1, (3, HEADS, WIDTH)).unbind(1)  # (T, heads, d)
    count = len(tokens)
    result = torch.zeros(HEADS, count, count, dtype=tokens.dtype)
    for head in range(HEADS):
        for i in range(count):
            for j in range(count):
                query, key = queries[i, head], keys[j, head]
                if position == "rope":
                    query, key = turned(query, i), turned(key, j)
                if position == "relative":
                    key = key + attention.added.pos_embed_offsets[j - i + count - 1]
                result[head, i, j] = query @ key / math.sqrt(WIDTH)
    if position == "relative_bias":
        result += attention.added.biases.get_bias()[0]
    return result


def turned(vector, token):
    """Rotary: pairs of numbers as complex ones, turned by the row (first half) and by the column (second half)."""
    if token == 0:
        return vector  # [class]
    row, column = divmod(token - 1, GRID[1])
    frequencies = [10000 ** -(k / (WIDTH // 4)) for k in range(WIDTH // 4)]
    angles = torch.tensor([place * each for place in (row, column) for each in frequencies], dtype=torch.double)
    numbers = torch.view_as_complex(vector.unflatten(0, (-1, 2)))
    return torch.view_as_real(numbers * torch.exp(1j * angles)).flatten()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("position", ["none", *RELATIVE])
def test_attention_is_what_a_loop_over_pairs_gives(position, fused):
    """At all tokens, and at some."""
    attention = attention_of(position)
    attention.fused_attn = fused
    tokens = torch.randn(2, 13, HEADS * WIDTH, dtype=torch.double)
    values = attention.qkv(tokens).unflatten(-1, (3, HEADS, WIDTH))[:, :, 2]
    weights = torch.stack([logits_by_pairs(attention, each, position) for each in tokens]).softmax(-1)
    expected = attention.proj(torch.einsum("bhij,bjhd->bihd", weights, values).flatten(2))
    torch.testing.assert_close(attention_at(attention, tokens, None), expected, rtol=1e-6, atol=1e-6)
    index = torch.tensor([[0, 5, 7], [12, 1, 2]])
    expected = expected[torch.arange(2)[:, None], index]
    torch.testing.assert_close(attention_at(attention, tokens, index), expected, rtol=1e-6, atol=1e-6)
    if position == "relative_bias":
        (biases,) = attention.added.biases.get_bias()
        for i, j, k, m in [(0, 1, 4, 5), (0, 4, 3, 7), (11, 6, 10, 5)]:  # the same offset in rows and columns
            torch.testing.assert_close(biases[:, 1 + i, 1 + j], biases[:, 1 + k, 1 + m])


@pytest.mark.parametrize("at", ["every", "every_shared"])
def test_positions_come_with_the_input_of_each_block(at):
    encoder = build(position_at=at, depth=3)
    images = torch.randn(2, 3, 32, 32)
    tokens = torch.cat([encoder.cls_token.expand(2, -1, -1), encoder.patch_embed(images)], dim=1)
    for number, block in enumerate(encoder.blocks):
        of_encoder = at == "every_shared" or number == 0
        tokens = tokens + (encoder.pos_embeds if of_encoder else block.positions)()
        tokens = tokens + block.attn(block.norm1(tokens))  # timm's block, to whose input nothing is added
        tokens = tokens + block.mlp(block.norm2(tokens))
    torch.testing.assert_close(encoder.forward_features(images), encoder.norm(tokens))
    tables = [name for name, _ in encoder.named_parameters() if "pos_embed" in name]
    assert len(tables) == (1 if at == "every_shared" else 3)


def test_axial_is_full_attention_masked_to_rows_then_to_columns():
    encoder = build(mixing="axial", position="none")
    tokens = torch.randn(2, 16, 24)
    place = torch.arange(16)
    for block in encoder.blocks:
        expected = tokens
        for part, line in ((block.along_rows, place // 4), (block.along_columns, place % 4)):
            apart = torch.where(line[:, None] == line, 0.0, -torch.inf)
            masked = timm.layers.Attention.forward(part.attn, part.norm1(expected), attn_mask=apart)
            expected = expected + masked
            expected = expected + part.mlp(part.norm2(expected))
        torch.testing.assert_close(block(tokens), expected, rtol=1e-4, atol=1e-5)
    assert (encoder.has_class_token, encoder.num_prefix_tokens) == (False, 0)


HIDING = {
    "plain": {},
    "half overlap": dict(stride=4),
    "three quarters": dict(stride=2, position="relative_bias"),
    "axial": dict(stride=4, mixing="axial"),
    "hybrid": dict(HYBRID, img_size=96, depth=1),
}


@pytest.mark.parametrize("settings", HIDING)
def test_no_pixel_of_a_masked_cell_reaches_a_prediction(settings):
    encoder = build(**HIDING[settings])
    grid, side = cell_grid(encoder)
    corruption = draw_batch(CorruptionConfig(rate=0.4, mask=0.7, random=0.0, keep=0.3), grid, images=2)
    images = torch.rand(2, 3, grid[0] * side, grid[1] * side).mul(255).requires_grad_()
    predictions = predictor(encoder).eval()(images, corruption)
    assert predictions.shape == (2, corruption.positions.shape[1], 5)
    (gradient,) = torch.autograd.grad(predictions.square().sum(), images)
    cells = F.unfold(gradient, side, stride=side).abs().sum(1)  # (2, N)
    masked = torch.zeros_like(cells, dtype=torch.bool)
    masked.scatter_(1, corruption.positions, corruption.kinds == Kind.MASK)
    assert masked.sum() >= 3
    assert torch.equal(cells > 0, ~masked)


def test_weights_of_a_plain_encoder_are_taken_where_patches_overlap(tmp_path):
    plain = build()
    overlapping = build_encoder(ModelConfig(**NUMBERS, stride=4, init_from=str(export(plain, tmp_path))))
    expected = timm.layers.resample_abs_pos_embed(plain.pos_embed, [7, 7], num_prefix_tokens=1)
    torch.testing.assert_close(overlapping.pos_embed, expected)


def test_a_cell_is_predicted_from_its_own_window_and_whole_windows_become_masks():
    encoder = build(stride=4)
    masking = predictor(encoder).pixel_masking
    assert encoder.patch_embed.grid_size == (7, 7)
    assert cell_grid(encoder) == ((4, 4), 8)
    assert masking.tokens.tolist() == [14 * row + 2 * column for row in range(4) for column in range(4)]
    positions = torch.tensor([[0, 1, 5]])  # two beside each other, and one below the second
    zeros = torch.zeros_like(positions)
    none = torch.empty(1, 0, dtype=torch.int64)
    hidden = masking.masked_tokens(Corruption(positions, zeros, positions, none)).view(7, 7)
    assert hidden.nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 2], [2, 2]]


@pytest.mark.parametrize("kind", ["every", "axial"])
def test_what_timm_offers_and_this_cannot_do_is_refused(kind):
    encoder = build(**KINDS[kind])
    with pytest.raises(NotImplementedError, match=r"mpp\.load_encoder"):
        encoder.set_input_size(64)
    with pytest.raises((NotImplementedError, TypeError), match="mask"):  # and not ignored
        encoder.forward_features(torch.randn(2, 3, 32, 32), attn_mask=torch.zeros(1))


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_encoder_is_rebuilt_also_for_other_images(kind, tmp_path):
    """Its tokens depend on places, unless it has no positions. NCCL sends its buffers: they are contiguous."""
    encoder = build(**KINDS[kind])
    images = torch.randn(2, 3, 32, 32)
    tokens = encoder.forward_features(images)
    of_permuted = encoder.forward_features(permute_patches(images, torch.randperm(16)))
    assert torch.allclose(tokens.mean(1), of_permuted.mean(1), rtol=1e-3, atol=1e-4) == (kind == "none")
    assert all(buffer.is_contiguous() for buffer in predictor(encoder).buffers())
    folder = export(encoder, tmp_path)
    loaded = mpp.load_encoder(tmp_path)
    assert not loaded.training
    for other in (loaded, by_timm(folder)):
        set_attention(other, fused=False)
        torch.testing.assert_close(other.forward_features(images), tokens, rtol=0, atol=1e-5)
    if kind == "axial, relative_bias":
        with refused("size mismatch"):
            mpp.load_encoder(folder, img_size=64)
        return
    larger = mpp.load_encoder(folder, img_size=64)
    assert larger.forward_features(torch.randn(1, 3, 64, 64)).isfinite().all()
    shapes, larger_shapes = ([weight.shape for weight in each.parameters()] for each in (encoder, larger))
    same_shapes = shapes == larger_shapes
    assert same_shapes == (kind in ("none", "rope", "every_shared sincos_2d", "stride, rope"))


@pytest.mark.parametrize("kind", ["relative", "learned_2d", "every", "relative_bias"])
def test_tables_of_a_square_are_stretched_as_they_lie(kind, tmp_path):
    """Offsets along the sequence, rows and columns along theirs; others in two dimensions as timm does."""
    encoder = build(**KINDS[kind])
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if "pos_embed_" in name and "prefix" not in name:
                parameter.copy_(torch.linspace(-1, 1, len(parameter))[:, None].expand_as(parameter))
    larger = mpp.load_encoder(export(encoder, tmp_path), img_size=64)
    for (name, table), (_, other) in zip(encoder.named_parameters(), larger.named_parameters(), strict=True):
        if "pos_embed_" in name and "prefix" not in name:
            torch.testing.assert_close(other, -other.flip(0))  # no offset stays in the middle
            assert (other.diff(dim=0)[2:-2] > 0).all()
        elif name.endswith(".pos_embed"):
            expected = timm.layers.resample_abs_pos_embed(table[None], [8, 8], [4, 4], 1)[0]
            torch.testing.assert_close(other, expected)
        elif "bias_table" in name:
            expected = timm.layers.resize_rel_pos_bias_table(table, (8, 8), tuple(other.shape), (4, 4))
            torch.testing.assert_close(other, expected)
        else:
            assert torch.equal(other, table)


def test_timm_itself_takes_no_table_of_as_many_patches(tmp_path):
    folder = export(build(position_at="every"), tmp_path)
    with pytest.raises(ValueError, match="fit this size alone"):
        by_timm(folder, img_size=(16, 64))


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["every", "stride, rope", "axial, relative_bias"])
def test_the_compiler_follows_each_whole(kind):
    """The backward pass too."""
    model = predictor(build(**KINDS[kind]))
    inputs = random_images(), draw_batch(CorruptionConfig())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(position="rope", position_at="every"), "model.position_at is every; it must be stem"),
        (dict(stride=3), r"model.stride is 3; it must be a divisor .*\(8\)"),
        (dict(position="learned_2d", width=15, heads=3), "even .*learned_2d"),
        (dict(position="relative_bias", arguments={"reg_tokens": 1}), "relative_bias.* registers"),
        (dict(position="rope", width=18), "model.width / model.heads is 6; .*rope"),
        (dict(arguments={"reg_tokens": 2}, mixing="axial"), "model.arguments is reg_tokens"),
    ],
)
def test_what_does_not_go_together_is_named(settings, said):
    with refused(said):
        build_encoder(ModelConfig(**NUMBERS | settings))
