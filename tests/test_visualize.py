"""The numbers behind pictures of an encoder, against closed forms; and the command that draws them."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from comparisons import noted
from conftest import FAST, equal_tensors, exported, refused, write_pictures
from einops import rearrange
from model_inputs import random_images, small_vit
from numpy.testing import assert_allclose
from PIL import Image
from scipy.spatial.distance import cdist
from torch.testing import assert_close

from evaluation.config import EVERY
from evaluation.figures.images import grid_of_images
from evaluation.frozen.encoder import FrozenEncoder
from evaluation.patches.features import patch_features
from evaluation.pictures import (
    as_colors,
    attention_distance,
    attention_rollout,
    components_by_depth,
    filter_components,
    mean_distance,
    patch_distances,
    patch_similarity,
    place_on_grid,
    position_similarity,
    read_attention,
)
from evaluation.visualize import main
from mpp.config import ModelConfig
from mpp.models.encoder import build_encoder
from mpp.pretrain import Pretraining

SHOWN = "--images=3"  # with pictures that show images
FEW = (SHOWN, "--attention_images=5")  # with all pictures
ALL = {*EVERY}


def vit(size=(32, 32)):
    return FrozenEncoder(small_vit(img_size=size), img_size=size)


def seeded():
    return torch.Generator().manual_seed(0)


def draw(encoder, out, *settings):
    """Draw pictures of an encoder into the folder `out`, and return it."""
    main([f"--encoder={encoder}", f"--out={out}", *FAST, *settings])
    return out


def drawn_in(folder):
    """Names of the pictures in a folder."""
    return {path.stem for path in folder.glob("*.png")}


def mean_distance_on_a_grid(rows, columns, patch):
    """Mean length of the offsets between all ordered pairs of patches."""
    places = np.argwhere(np.ones((rows, columns)))
    return patch * cdist(places, places).mean()


def test_distance_of_uniform_and_of_identity_attention():
    distances = patch_distances(vit((24, 40)))
    uniform = torch.full((2, 3, 15, 15), 0.7 / 15)  # 0.3 goes to [class]
    assert_allclose(mean_distance(uniform, distances), mean_distance_on_a_grid(3, 5, 8), rtol=1e-5)
    assert mean_distance(torch.eye(15).expand(2, 3, -1, -1), distances).abs().max() == 0
    to_neighbour = torch.zeros(1, 1, 15, 15)  # the other patches attend to [class] only
    to_neighbour[0, 0, 0, 1] = 1
    assert mean_distance(to_neighbour, distances) == 8 and mean_distance(0 * to_neighbour, distances) == 0


def test_a_model_that_attends_to_all_alike_has_the_closed_forms_distance():
    encoder = vit()
    for block in encoder.model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight[:16])  # queries
    by_depth_and_head = attention_distance(encoder, [random_images(3), random_images(2)])
    assert by_depth_and_head.shape == (3, 2)
    assert_allclose(by_depth_and_head, mean_distance_on_a_grid(4, 4, 8), rtol=1e-5)


def test_overlapping_patches_are_a_stride_apart():
    overlapping = ModelConfig(img_size=32, width=16, depth=1, heads=2, patch_size=8, stride=4)
    assert patch_distances(FrozenEncoder(build_encoder(overlapping)))[0, 1] == 4


def test_attention_is_that_of_the_forward_pass_which_stays_as_it_was():
    encoder, images = vit(), random_images(2)
    before = [block.attn.fused_attn for block in encoder.model.blocks]
    weights_by_depth = read_attention(encoder, images, lambda weights: weights)
    assert [block.attn.fused_attn for block in encoder.model.blocks] == before and any(before)
    attn = encoder.model.blocks[1].attn
    calls = []
    with attn.register_forward_hook(lambda module, inputs, output: calls.append((*inputs, output))):
        encoder.model.forward_features(encoder.normalize(images))
    [(tokens, output)] = calls
    values = rearrange(attn.qkv(tokens)[..., 32:], "b t (heads d) -> b heads t d", heads=2)
    mixed = rearrange(weights_by_depth[1] @ values, "b heads t d -> b t (heads d)")
    assert_close(attn.proj(mixed), output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_rollout_multiplies_the_layers_in_order(residual):
    encoder, images = vit(), random_images(2)
    for block in encoder.model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, generator=seeded())  # far from uniform
    layers = torch.stack(read_attention(encoder, images, lambda weights: weights.mean(1)))
    first, second, third = layers / (1 + residual) + residual * torch.eye(17) / 2
    rollout = third @ second @ first
    for start, row in (("class", rollout[:, 0]), ("patches", rollout[:, 1:].mean(1))):
        expected = row[:, 1:] / row[:, 1:].mean(1, keepdim=True)
        found = attention_rollout(encoder, images, residual, start)
        assert_close(found.flatten(1), expected, rtol=1e-4, atol=1e-5)


def test_similarity_of_sinusoidal_positions():
    encoder = vit()
    angles = 0.9 * (torch.arange(16) % 4)  # one wave over the columns, none over rows
    positions = encoder.model.pos_embed.data.zero_()
    positions[0, 1:, :2] = 3 * torch.stack([angles.sin(), angles.cos()], 1)
    expected = torch.cos(angles[:, None] - angles).view(4, 4, 4, 4)
    assert_close(position_similarity(encoder.model), expected, rtol=1e-5, atol=1e-5)


def test_filter_components_find_the_directions_that_made_the_filters(rng):
    directions = np.linalg.qr(rng.normal(size=(192, 2)))[0].T  # (2, 192), orthonormal
    filters = torch.tensor(rng.normal(size=(16, 2)) * (5, 1) @ directions + 0.3).float()
    encoder = vit()
    encoder.model.patch_embed.proj.weight.data = filters.view(16, 3, 8, 8)
    components, shares = filter_components(encoder.model, 28)
    assert components.shape == (16, 3, 8, 8) and shares[:2].sum() == pytest.approx(1, abs=1e-5)
    rows = components.reshape(16, -1)
    assert_allclose(np.linalg.norm(rows[:2] @ directions.T, axis=1), 1, rtol=1e-4)  # of the same span
    np.testing.assert_array_equal(rows.max(1), np.abs(rows).max(1))


def test_features_along_one_direction_have_one_color():
    """Brighter and brighter: red follows it; green and blue have nothing to show."""
    strength = torch.rand(2, 4, 4, generator=seeded())
    coordinates, _ = components_by_depth([strength[..., None] * torch.tensor([3.0, 0, 4.0, 0, 0]) + 7])
    red, green, blue = as_colors(coordinates).reshape(-1, 3)[strength.flatten().argsort()].T
    assert (np.diff(red) >= 0).all() and (red[0], red[-1]) == (0, 1)
    assert {*green, *blue} == {0.5}


def test_components_are_of_all_images_together_and_keep_their_signs_from_depth_to_depth():
    features = torch.randn(3, 4, 5, 5, generator=seeded()) * torch.tensor([9, 6, 3, 1, 1])
    turned = features * torch.tensor([-1, 1, -1, 1, 1])
    (below, above), shares = components_by_depth([features, turned])
    assert ((below * above).sum((0, 1, 2)) > 0).all()
    flat = features.double().flatten(0, 2).numpy()
    left, values, _ = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    expected = (left * values)[:, :3].reshape(above.shape)
    assert_allclose(np.abs(above), np.abs(expected), rtol=1e-4, atol=1e-4)
    assert_allclose(shares[1], values[:3] ** 2 / (values**2).sum(), rtol=1e-5)


def test_similarity_is_the_cosine_with_each_patch():
    features = torch.randn(2, 3, 4, 5)
    queries = features.flatten(1, 2)[:, [7, 0]]
    expected = torch.cosine_similarity(queries[:, :, None, None], features[:, None], dim=-1)
    assert_close(patch_similarity(features, [7, 0]), expected)


def test_patch_features_are_the_models_own_in_their_places():
    encoder = vit()
    images = random_images(2)
    first, last = patch_features(encoder, images, [1, 3])
    pixels = encoder.normalize(images)
    assert_close(
        last[:, 2, 3], encoder.model.forward_features(pixels)[:, 1 + 2 * 4 + 3]
    )  # row 2, column 3 of 4 x 4; [class] is left out
    (inner,) = encoder.model.forward_intermediates(pixels, indices=[0], norm=False, intermediates_only=True)
    assert_close(first.permute(0, 3, 1, 2), inner)


def test_entropy_lands_on_its_patch():
    values = torch.arange(8.0).view(1, 2, 4)  # two patches of 2 x 2 cells
    (whole,) = place_on_grid(values, torch.tensor([[3, 0]]), grid=(2, 2))
    gap = [math.nan] * 2
    expected = torch.tensor([[4, 5, *gap], [6, 7, *gap], [*gap, 0, 1], [*gap, 2, 3]])
    assert_close(whole, expected, equal_nan=True)


@pytest.mark.faults
def test_all_pictures_of_a_run(finished_run, tmp_path, capsys):
    out = draw(finished_run, tmp_path / "pictures", *FEW)
    assert "no " not in capsys.readouterr().out.replace("note", "")
    assert drawn_in(out) == ALL
    for image in map(Image.open, out.glob("*.png")):
        assert image.width <= 900 and np.asarray(image.convert("L")).std() > 5
    assert np.load(out / "attention_distance.npz")["images"] == 5
    rollout = np.load(out / "attention_rollout.npz")["rollout"]
    assert rollout.mean((1, 2)).tolist() == pytest.approx([1] * 3, rel=1e-5)
    assert np.load(out / "pca.npz")["colors"].shape == (2, 3, 4, 4, 3)
    neighbours = np.load(out / "neighbours.npz")
    assert (np.diff(neighbours["image_similarity"]) <= 0).all() and neighbours["image_similarity"].max() <= 1 + 1e-6
    assert [len(set(names)) for names in neighbours["names"].tolist()] == [6] * 3  # a query is not its own neighbour


@pytest.mark.faults
@pytest.mark.parametrize(
    "setting, cells",
    [("--objective.name=grid_color", 16), ("--config=rivals/mae", 0), ("--config=rivals/maskfeat", 0)],
)
def test_predictions_of_every_network_and_target(pretrain, tmp_path, setting, cells):
    run = pretrain(setting, "--run.steps=1")
    saved = np.load(draw(run, tmp_path / "pictures", "--pictures=predictions", SHOWN) / "predictions.npz")
    original, positions = saved["original"], saved["positions"]
    assert original.shape == (3, 32, 32, 3) and ("entropy" in saved) == bool(cells)
    if cells:
        entropy = saved["entropy"]
        assert entropy.shape == (*positions.shape, cells) and 0 <= entropy.min() <= entropy.max() <= 9

    corrupted = (positions[..., None] == np.arange(16)).any(1)
    corrupted = corrupted.reshape(3, 4, 4).repeat(8, 1).repeat(8, 2)
    for name in ("seen", "predicted", "true"):
        assert (saved[name][~corrupted] == original[~corrupted]).all()
    is_grey = "maskfeat" in setting  # HOG has no picture
    assert (saved["predicted"][corrupted] != saved["true"][corrupted]).any() == (not is_grey)
    assert (saved["true"] == original).all() == ("mae" in setting)


def test_a_bar_is_of_values_and_not_of_colours():
    colours, values = np.zeros((2, 2, 3)), np.ones((2, 2))
    assert len(grid_of_images([colours, colours], 2, "t", bar="bits").axes) == 2
    assert len(grid_of_images([colours, values], 2, "t", bar="bits").axes) == 3


@pytest.mark.faults
def test_predictions_are_by_the_weights_that_were_exported_and_need_a_checkpoint(
    pretrain, monkeypatch, tmp_path, capsys
):
    run = pretrain("--optim.average=0.9", "--optim.lr=0.1")
    models = noted(monkeypatch, Pretraining, "predict", 1)
    asked = ("--pictures=[predictions,filters]", SHOWN)
    assert drawn_in(draw(run / "encoder", tmp_path / "with_checkpoints", *asked)) == {"predictions", "filters"}
    assert equal_tensors(models[0].encoder.state_dict(), exported(run))

    shutil.rmtree(run / "checkpoints")
    assert drawn_in(draw(run, tmp_path / "without", *asked)) == {"filters"}
    assert "no predictions: encoder is" in capsys.readouterr().out


@pytest.mark.faults
def test_what_an_encoder_lacks_is_said(tmp_path, image_folder, capsys):
    images = (f"--data.path={image_folder}", "--data.eval_fraction=0.5")
    draw("resnetv2_18", tmp_path, "--random=true", "--img_size=32", *images, *FEW)
    printed = capsys.readouterr().out
    for name in ALL - {"filters", "neighbours"}:
        assert f"no {name}: " in printed
    assert drawn_in(tmp_path) == {"filters", "neighbours"}
    with refused("pictures is filters; it must be a picture that this encoder supports"):
        draw("floor:pixels", tmp_path, "--pictures=filters")


def test_a_file_in_the_place_of_the_folder_is_named():
    with refused(r"out is pyproject\.toml; it must be a folder"):
        main(["--encoder=floor:pixels", *FAST, "--out=pyproject.toml"])


@pytest.mark.faults
def test_broken_images_are_no_neighbours(finished_run, tmp_path):
    write_pictures(tmp_path, 24)
    for number in range(0, 24, 2):
        (tmp_path / f"{number:02d}.png").write_bytes(b"broken")
    words = (f"--data.path={tmp_path}", "--pictures=neighbours", SHOWN, "--data.eval_fraction=0.5")
    saved = np.load(draw(finished_run, tmp_path / "out", *words) / "neighbours.npz")
    names = {int(Path(name).stem) for name in saved["names"].flatten()}
    assert names and all(name % 2 for name in names)
