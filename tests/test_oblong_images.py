"""Images that are not square: rows and columns are not swapped anywhere, and all that squares have, they have."""

import json

import pytest
import timm
import torch

import mpp
from evaluation import fewshot, finetune, visualize
from evaluation.config import EVERY
from mpp.config import CorruptionConfig, ModelConfig
from mpp.corruption import draw
from mpp.features.metrics import nearest_visible
from mpp.models.encoder import build_encoder
from mpp.models.exporting import export_encoder
from mpp.models.positions import interpolate_offsets

WIDE = "--model.img_size=[16,32]"


@pytest.mark.parametrize("grid", [(2, 7), (7, 2), (3, 5), (1, 6)])
def test_nearest_visible_patches_by_search(grid):
    columns, patches = grid[1], grid[0] * grid[1]
    hidden = draw(CorruptionConfig(), grid, 0, 0, 0).positions.tolist()
    found = nearest_visible(torch.tensor([hidden]), grid)[0].tolist()
    visible = [place for place in range(patches) if place not in hidden]
    for place, two in zip(hidden, found, strict=True):
        apart = {v: (v // columns - place // columns) ** 2 + (v % columns - place % columns) ** 2 for v in visible}
        assert two == sorted(visible, key=lambda v: (apart[v], v))[:2]


def test_turned_images_and_weights_give_turned_tokens():
    wide = build_encoder(ModelConfig(width=16, depth=2, heads=2, img_size=(16, 32), patch_size=8)).eval()
    tall = build_encoder(ModelConfig(width=16, depth=2, heads=2, img_size=(32, 16), patch_size=8)).eval()
    state = wide.state_dict()
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].transpose(2, 3)
    turn = torch.arange(8).view(2, 4).T.flatten()  # places of the wide grid, in the order of the tall one
    state["pos_embed"] = torch.cat([state["pos_embed"][:, :1], state["pos_embed"][:, 1:][:, turn]], 1)
    tall.load_state_dict(state)
    images = torch.randn(2, 3, 16, 32)
    tokens, turned = wide.forward_features(images), tall.forward_features(images.transpose(2, 3))
    torch.testing.assert_close(turned, torch.cat([tokens[:, :1], tokens[:, 1:][:, turn]], 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["learned", "learned_2d", "relative", "relative_bias", "every"])
def test_tables_are_resampled_from_their_own_grid(tmp_path, kind):
    """To the double of each side, and to grids of as many patches, which are others; nothing else changes."""
    numbers = dict(width=16, depth=2, heads=2, patch_size=4)
    numbers |= dict(position_at="every") if kind == "every" else dict(position=kind)
    source = build_encoder(ModelConfig(img_size=(16, 32), **numbers))
    export_encoder(source, tmp_path / "encoder", (16, 32), (0.5,) * 3, (0.5,) * 3, 0.875)
    assert all(map(torch.equal, source.parameters(), mpp.load_encoder(tmp_path, img_size=(16, 32)).parameters()))
    for size in ((32, 64), (32, 16), (8, 64)):
        begun = build_encoder(ModelConfig(img_size=size, init_from=str(tmp_path), **numbers))
        for encoder in (mpp.load_encoder(tmp_path, img_size=size), begun):
            for (name, parameter), (_, own) in zip(encoder.named_parameters(), source.named_parameters(), strict=True):
                table = "pos_embed" in name or "bias_table" in name
                if "prefix" not in name:
                    assert table != (parameter.shape == own.shape and torch.equal(parameter, own)), name
            if kind == "learned":
                grid = (size[0] // 4, size[1] // 4)
                expected = timm.layers.resample_abs_pos_embed(source.pos_embed, grid, (4, 8), num_prefix_tokens=1)
                torch.testing.assert_close(encoder.pos_embed, expected)


@pytest.mark.parametrize("name", [None, "vit_tiny_patch16_224", "vit_tiny_r_s16_p8_224"])
def test_a_line_of_as_many_patches_as_a_square_is_no_square(tmp_path, name):
    """timm would take the table of [112, 448] for that of 224 x 224, or the other way round."""
    numbers = dict(width=16, depth=1, heads=2, patch_size=16) if name is None else dict(name=name)
    long, square = ((64, 256), (128, 128)) if name and "_r_" in name else ((112, 448), (224, 224))
    for size, other in ((long, square), (square, long), (long, long)):
        source = build_encoder(ModelConfig(img_size=size, **numbers))
        export_encoder(source, tmp_path / "encoder", size, (0.5,) * 3, (0.5,) * 3, 0.9)
        begun = build_encoder(ModelConfig(img_size=other, init_from=str(tmp_path), **numbers))
        grids = [encoder.patch_embed.grid_size for encoder in (begun, source)]
        expected = timm.layers.resample_abs_pos_embed(source.pos_embed, *map(list, grids), num_prefix_tokens=1)
        torch.testing.assert_close(begun.pos_embed, expected if size != other else source.pos_embed)
        torch.testing.assert_close(mpp.load_encoder(tmp_path, img_size=other).pos_embed, begun.pos_embed)


def test_patches_that_overlap_begin_from_plain_ones(tmp_path):
    numbers = dict(width=16, depth=1, heads=2, patch_size=8, img_size=32, position="relative")
    source = build_encoder(ModelConfig(**numbers))
    export_encoder(source, tmp_path / "encoder", 32, (0.5,) * 3, (0.5,) * 3, 0.9)
    begun = build_encoder(ModelConfig(stride=4, init_from=str(tmp_path), **numbers))
    tables = [next(p for n, p in each.named_parameters() if "added" in n) for each in (source, begun)]
    torch.testing.assert_close(tables[1], interpolate_offsets(tables[0], (7, 7), 1, (4, 4)))


def test_weights_of_other_patches_and_hybrids(pretrain, tmp_path):
    folder = pretrain(WIDE, "--model.patch_size=4")
    coarse = ModelConfig(width=16, depth=2, heads=2, patch_size=8, img_size=(16, 32), init_from=str(folder))
    assert build_encoder(coarse).pos_embed.shape == (1, 1 + 2 * 4, 16)
    hybrid = build_encoder(ModelConfig(name="vit_tiny_r_s16_p8_224", img_size=(64, 128)))
    export_encoder(hybrid, tmp_path / "hybrid", (64, 128), (0.5,) * 3, (0.5,) * 3, 0.9)
    for size, grid in (((128, 64), (4, 2)), ((64, 64), (2, 2))):
        found = mpp.load_encoder(tmp_path / "hybrid", img_size=size, num_classes=3)
        expected = timm.layers.resample_abs_pos_embed(hybrid.pos_embed, grid, (2, 4), num_prefix_tokens=1)
        torch.testing.assert_close(found.pos_embed, expected)
        assert torch.equal(found.norm.weight, hybrid.norm.weight) and found(torch.rand(1, 3, *size)).shape == (1, 3)
    grey = mpp.load_encoder(folder, in_chans=1)
    assert grey(torch.rand(1, 1, 16, 32)).shape == (1, 16)


@pytest.mark.faults
def test_it_is_judged_fine_tuned_and_drawn(pretrain, tmp_path):
    folder = pretrain(WIDE, "--model.patch_size=8")
    fast = ("--data.workers=0", "--precision=fp32", "--threads=1")
    fewshot.main([f"--encoder={folder}", "--depth=all", *fast])
    fewshot.main([f"--encoder={folder}", "--img_size=[24,16]", *fast])
    assert (folder / "evaluation" / "fewshot_24x16px.json").is_file()
    visualize.main(
        [f"--encoder={folder}", f"--pictures={json.dumps(EVERY)}", "--images=2", "--attention_images=4", *fast]
    )
    tuned = ("--run.steps=2", "--run.threads=1", "--data.workers=0", "--optim.global_batch_size=8", "--lrs=0.1")
    finetune.main([f"--encoder={folder}", "--img_size=[32,16]", f"--run.dir={tmp_path / 'tuned'}", *tuned])
    exported = next((tmp_path / "tuned").rglob("encoder/config.json"))
    assert mpp.load_encoder(exported.parent).patch_embed.img_size == (32, 16)


def test_a_size_of_three_numbers_or_of_half_a_patch_is_refused(pretrain):
    for size, says in (("[16,32,8]", "model.img_size"), ("[16,30]", "a multiple of the patch size")):
        with pytest.raises(ValueError, match=says):
            pretrain(f"--model.img_size={size}", "--model.patch_size=8")
