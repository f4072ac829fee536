"""Images that are not square: rows and columns are not swapped anywhere, and all that squares have, they have."""

import json
from pathlib import Path

import pytest
import timm
import torch
from model_inputs import HALVES
from torch import Tensor, nn

import mpp
from evaluation import fewshot, finetune, visualize
from evaluation.config import EVERY
from mpp.config import CorruptionConfig, ModelConfig
from mpp.corruption import draw, stack
from mpp.errors import UserError
from mpp.features.metrics import nearest_visible
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder

WIDE = "--model.img_size=[16,32]"


@pytest.mark.parametrize("grid", [(2, 7), (7, 2), (3, 5), (1, 6)])
def test_nearest_visible_patches_by_search(grid):
    columns = grid[1]
    corruption = stack([draw(CorruptionConfig(), grid, 0, 0, 0)])
    corrupted = corruption.positions[0].tolist()
    visible = [position for position in range(grid[0] * grid[1]) if position not in corrupted]
    nearest = nearest_visible(corruption, grid)[0].tolist()

    def squared_distance(one: int, other: int) -> int:
        rows_apart = one // columns - other // columns
        columns_apart = one % columns - other % columns
        return rows_apart**2 + columns_apart**2

    for position, two_nearest in zip(corrupted, nearest, strict=True):
        by_distance = sorted((squared_distance(position, other), other) for other in visible)
        assert two_nearest == [other for _, other in by_distance[:2]]


def test_turned_images_and_weights_give_turned_tokens():
    wide = build_encoder(ModelConfig(width=16, depth=2, heads=2, img_size=(16, 32), patch_size=8)).eval()
    tall = build_encoder(ModelConfig(width=16, depth=2, heads=2, img_size=(32, 16), patch_size=8)).eval()
    turned = torch.arange(8).view(2, 4).T.flatten()  # positions in the wide grid, in the order of the tall one

    def turn_patches(tokens: Tensor) -> Tensor:
        return torch.cat([tokens[:, :1], tokens[:, 1:][:, turned]], 1)

    state = wide.state_dict()
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].transpose(2, 3)
    state["pos_embed"] = turn_patches(state["pos_embed"])
    tall.load_state_dict(state)
    images = torch.randn(2, 3, 16, 32)
    tokens = tall.forward_features(images.transpose(2, 3))
    torch.testing.assert_close(tokens, turn_patches(wide.forward_features(images)), rtol=1e-4, atol=1e-5)


def export_plain(encoder: nn.Module, folder: Path, img_size: int | tuple[int, int]) -> None:
    """Export an encoder whose normalisation and crop do not matter."""
    export_encoder(encoder, folder, img_size, *HALVES, 0.875)


def resampled_by_timm(table: Tensor, grid: tuple[int, int], old_grid: tuple[int, int]) -> Tensor:
    return timm.layers.resample_abs_pos_embed(table, list(grid), list(old_grid), num_prefix_tokens=1)


@pytest.mark.parametrize("kind", ["learned", "learned_2d", "relative_bias", "every"])
def test_tables_are_resampled_from_their_own_grid(tmp_path, kind):
    """To the double of each side, and to grids of as many patches, which are others; nothing else changes."""
    settings = dict(width=16, depth=2, heads=2, patch_size=4)
    if kind == "every":
        settings["position_at"] = "every"
    else:
        settings["position"] = kind
    source = build_encoder(ModelConfig(img_size=(16, 32), **settings))
    export_plain(source, tmp_path / "encoder", (16, 32))
    unchanged = mpp.load_encoder(tmp_path, img_size=(16, 32))
    assert all(map(torch.equal, source.parameters(), unchanged.parameters()))
    for size in ((32, 64), (32, 16), (8, 64)):
        if kind != "learned":  # timm knows the grid of this table alone
            assert_no_other_size(tmp_path, size, settings)
            continue
        loaded = mpp.load_encoder(tmp_path, img_size=size)
        continued = build_encoder(ModelConfig(img_size=size, init_from=str(tmp_path), **settings))
        for encoder in (loaded, continued):
            assert_only_tables_differ(encoder, source)
            expected = resampled_by_timm(source.pos_embed, (size[0] // 4, size[1] // 4), (4, 8))
            torch.testing.assert_close(encoder.pos_embed, expected)


def assert_no_other_size(source: Path, size: tuple[int, int], settings: dict) -> None:
    """Weights of another size are refused, by both doors."""
    with pytest.raises(UserError, match="fit this size alone"):
        mpp.load_encoder(source, img_size=size)
    with pytest.raises(UserError, match="fit this size alone"):
        build_encoder(ModelConfig(img_size=size, init_from=str(source), **settings))


def assert_only_tables_differ(encoder: nn.Module, source: nn.Module) -> None:
    """All tables of positions differ from those of `source`, and no other parameter does."""
    for (name, parameter), (_, original) in zip(encoder.named_parameters(), source.named_parameters(), strict=True):
        if "prefix" in name:
            continue
        is_table = "pos_embed" in name or "bias_table" in name
        is_equal = parameter.shape == original.shape and torch.equal(parameter, original)
        assert is_table != is_equal, name


@pytest.mark.parametrize("name", [None, "vit_tiny_patch16_224", "vit_tiny_r_s16_p8_224"])
def test_a_line_of_as_many_patches_as_a_square_is_no_square(tmp_path, name):
    """timm would take the table of [112, 448] for that of 224 x 224, or the other way round."""
    settings = dict(width=16, depth=1, heads=2, patch_size=16) if name is None else dict(name=name)
    long = (112, 448)
    square = (224, 224)
    if name and "_r_" in name:
        long = (64, 256)
        square = (128, 128)
    for size, other in ((long, square), (square, long), (long, long)):
        source = build_encoder(ModelConfig(img_size=size, **settings))
        export_plain(source, tmp_path / "encoder", size)
        if name and "_r_" in name and size != other:
            assert_no_other_size(tmp_path, other, settings)
            continue
        continued = build_encoder(ModelConfig(img_size=other, init_from=str(tmp_path), **settings))
        expected = source.pos_embed
        if size != other:
            expected = resampled_by_timm(
                source.pos_embed, continued.patch_embed.grid_size, source.patch_embed.grid_size
            )
        torch.testing.assert_close(continued.pos_embed, expected)
        torch.testing.assert_close(mpp.load_encoder(tmp_path, img_size=other).pos_embed, continued.pos_embed)


@pytest.mark.parametrize("size", [(96, 32), (64, 64), (48, 96)])
def test_the_biases_of_a_beit_are_for_their_own_oblong(tmp_path, size):
    """Those of [96, 32] are as many as those of [32, 96], and timm would take them as they are."""
    settings = dict(name="beit_base_patch16_224", width=16, depth=1, heads=2)
    source = build_encoder(ModelConfig(img_size=(32, 96), **settings))
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    export_plain(source, tmp_path / "encoder", (32, 96))
    assert_no_other_size(tmp_path, size, settings)
    continued = build_encoder(ModelConfig(img_size=(32, 96), init_from=str(tmp_path), **settings)).state_dict()
    assert all(torch.equal(continued[name], weight) for name, weight in source.state_dict().items())
    assert mpp.load_encoder(tmp_path, num_classes=3).head.out_features == 3
    (tmp_path / "encoder" / "config.json").unlink()  # which has the size
    weights = str(tmp_path / "encoder" / "model.safetensors")
    if size in ((64, 64), (48, 96)):
        with pytest.raises(UserError, match=r"^model\.init_from is .*Cannot infer non-square source window"):
            build_encoder(ModelConfig(img_size=size, init_from=weights, **settings))


@pytest.mark.parametrize("size", [(3, 27), (2, 14)])
def test_the_biases_of_an_oblong_are_no_square_of_as_many(tmp_path, size):
    """timm would take the 81 of 2 x 14 for those of 5 x 5, also where this is the size of the model."""
    settings = dict(name="beit_base_patch16_224", width=16, depth=1, heads=2, img_size=[16 * side for side in size])
    source = build_encoder(ModelConfig(**settings))
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    export_plain(source, tmp_path / "encoder", settings["img_size"])
    loaded = mpp.load_encoder(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in source.state_dict().items())


def test_patches_that_overlap_begin_from_plain_ones(tmp_path):
    settings = dict(width=16, depth=1, heads=2, patch_size=8, img_size=32, position="relative")
    plain = build_encoder(ModelConfig(**settings))
    export_plain(plain, tmp_path / "encoder", 32)
    overlapping = build_encoder(ModelConfig(stride=4, init_from=str(tmp_path), **settings))

    offsets = "blocks.0.attn.added.pos_embed_offsets"
    table, stretched = plain.state_dict()[offsets], overlapping.state_dict()[offsets]
    middle, new_middle = len(table) // 2, len(stretched) // 2
    assert (len(table), len(stretched)) == (2 * 17 - 1, 2 * 50 - 1)
    torch.testing.assert_close(stretched[new_middle], table[middle], rtol=0.1, atol=1e-2)


def test_weights_of_other_patches_begin_an_oblong_encoder(pretrain):
    folder = pretrain(WIDE, "--model.patch_size=4")
    coarse = ModelConfig(width=16, depth=2, heads=2, patch_size=8, img_size=(16, 32), init_from=str(folder))
    assert build_encoder(coarse).pos_embed.shape == (1, 1 + 2 * 4, 16)
    grey = mpp.load_encoder(folder, in_chans=1)
    assert grey(torch.rand(1, 1, 16, 32)).shape == (1, 16)


def test_a_hybrid_takes_oblong_images(tmp_path):
    hybrid = build_encoder(ModelConfig(name="vit_tiny_r_s16_p8_224", img_size=(64, 128)))
    export_plain(hybrid, tmp_path / "hybrid", (64, 128))
    encoder = mpp.load_encoder(tmp_path / "hybrid", num_classes=3)
    assert torch.equal(encoder.pos_embed, hybrid.pos_embed)
    assert encoder(torch.rand(1, 3, 64, 128)).shape == (1, 3)
    for size in ((128, 64), (64, 64)):
        assert_no_other_size(tmp_path / "hybrid", size, dict(name="vit_tiny_r_s16_p8_224"))


@pytest.mark.faults
def test_it_is_evaluated_fine_tuned_and_drawn(pretrain, tmp_path):
    folder = pretrain(WIDE, "--model.patch_size=8")
    fast = ("--data.workers=0", "--precision=fp32", "--threads=1")
    fewshot.main([f"--encoder={folder}", "--depth=all", *fast])
    fewshot.main([f"--encoder={folder}", "--img_size=[24,16]", *fast])
    assert (folder / "evaluation" / "fewshot_img_size_24-16_precision_fp32.json").is_file()
    pictures = (f"--pictures={json.dumps(EVERY)}", "--images=2", "--attention_images=4")
    visualize.main([f"--encoder={folder}", *pictures, *fast])
    tuned = ("--run.steps=2", "--run.threads=1", "--data.workers=0", "--optim.global_batch_size=8", "--lrs=0.1")
    finetune.main([f"--encoder={folder}", "--img_size=[32,16]", f"--run.dir={tmp_path / 'tuned'}", *tuned])
    exported = next((tmp_path / "tuned").rglob("encoder/config.json"))
    assert mpp.load_encoder(exported.parent).patch_embed.img_size == (32, 16)


@pytest.mark.parametrize(
    ("size", "message"), [("[16,32,8]", "model.img_size"), ("[16,30]", "a multiple of the patch size")]
)
def test_a_size_of_three_numbers_or_of_half_a_patch_is_refused(pretrain, size, message):
    with pytest.raises(ValueError, match=message):
        pretrain(f"--model.img_size={size}", "--model.patch_size=8")
