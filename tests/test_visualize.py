"""The numbers behind pictures of an encoder, against closed forms; and the command that draws them."""

import json
import math
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import TINY, dataset_of, encoded, picture
from einops import rearrange
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evaluation import supervised
from evaluation.frozen.encoder import FrozenEncoder
from evaluation.patches.features import patch_features
from evaluation.pictures.attention import (
    attention_distance,
    attention_rollout,
    extend_rollout,
    mean_distance,
    patch_distances,
    patch_spacing,
    visit_attention,
)
from evaluation.pictures.drawings import place_on_grid
from evaluation.pictures.pca import components_by_depth
from evaluation.pictures.positions import filter_components, position_similarity
from evaluation.pictures.similarity import patch_similarity, search_gallery, spread_patches
from evaluation.visualize import main
from mpp.config import ModelConfig
from mpp.models.encoder import build_encoder
from mpp.pretrain import Pretraining
from mpp.training.log import last_scalars

FAST = ("--precision=fp32", "--threads=1", "--data.workers=0")
SHOWN = "--images=3"  # with pictures that show images
FEW = (SHOWN, "--attention_images=5")  # with all pictures
ALL = {
    "predictions",
    "filters",
    "positions",
    "attention_distance",
    "attention_rollout",
    "pca",
    "similarity",
    "neighbours",
    "rank",
    "accuracy_by_depth",
}


def vit() -> FrozenEncoder:
    """A small ViT, 32 pixels, 4 x 4 patches."""
    torch.manual_seed(0)
    small = dict(img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=0)
    return FrozenEncoder(timm.create_model("vit_base_patch16_224", **small), img_size=32)


def vit_with_uniform_attention() -> FrozenEncoder:
    encoder = vit()
    for block in encoder.model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight[:16])  # queries
    return encoder


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def noise(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), generator=seeded(), dtype=torch.uint8)


def draw(encoder: Path | str, out: Path, *settings: str) -> Path:
    """Draw pictures of an encoder into the folder `out`, and return it."""
    main([f"--encoder={encoder}", f"--out={out}", *FAST, *settings])
    return out


def drawn_in(folder: Path) -> set[str]:
    """Names of the pictures in a folder."""
    return {path.stem for path in folder.glob("*.png")}


def mean_distance_on_a_grid(rows: int, columns: int, patch: float) -> float:
    """Mean length of the offsets between all ordered pairs of patches."""
    total = 0.0
    for y, x in product(range(1 - rows, rows), range(1 - columns, columns)):
        pairs = (rows - abs(y)) * (columns - abs(x))
        total += pairs * math.hypot(y, x)
    return patch * total / (rows * columns) ** 2


@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_distance_of_uniform_and_of_identity_attention(grid):
    distances = patch_distances(grid, 8)
    count = math.prod(grid)
    uniform = torch.full((2, 3, count, count), 0.7 / count)  # 0.3 goes to [class]
    identity = torch.eye(count).expand(2, 3, -1, -1)
    expected = torch.full((2, 3), mean_distance_on_a_grid(*grid, 8))
    torch.testing.assert_close(mean_distance(uniform, distances), expected, rtol=1e-5, atol=0)
    assert mean_distance(identity, distances).abs().max() == 0


def test_a_model_that_attends_to_all_alike_has_the_closed_forms_distance():
    by_depth_and_head = attention_distance(vit_with_uniform_attention(), [noise(3), noise(2)])
    assert by_depth_and_head.shape == (3, 2)
    np.testing.assert_allclose(by_depth_and_head, mean_distance_on_a_grid(4, 4, 8), rtol=1e-5)


def test_overlapping_patches_are_a_stride_apart():
    apart = ModelConfig(img_size=32, width=16, depth=1, heads=2, patch_size=8)
    overlapping = replace(apart, stride=4)  # 7 x 7 patches
    assert patch_spacing(FrozenEncoder(build_encoder(apart))) == 8
    assert patch_spacing(FrozenEncoder(build_encoder(overlapping))) == 4


def test_distance_does_not_depend_on_how_images_are_batched():
    encoder = vit()
    images = noise(5)
    at_once = attention_distance(encoder, [images])
    torch.testing.assert_close(attention_distance(encoder, images.split(2)), at_once)


def test_attention_is_that_of_the_forward_pass():
    encoder = vit()
    images = noise(2)
    weights_by_depth = []
    visit_attention(encoder, images, lambda depth, weights: weights_by_depth.append(weights))
    attn = encoder.model.blocks[1].attn
    calls = []
    with attn.register_forward_hook(lambda module, inputs, output: calls.append((*inputs, output))):
        encoder.model.forward_features(encoder.normalize(images))
    [(tokens, output)] = calls
    values = rearrange(attn.qkv(tokens)[..., 32:], "b t (heads d) -> b heads t d", heads=2)
    mixed = rearrange(weights_by_depth[1] @ values, "b heads t d -> b t (heads d)")
    torch.testing.assert_close(attn.proj(mixed), output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_rollout_rows_sum_to_one_and_multiply_in_order(residual):
    layers = torch.randn(3, 2, 4, 7, 7, generator=seeded()).softmax(-1)
    rollout = None
    for layer in layers:
        rollout = extend_rollout(rollout, layer, residual)
    torch.testing.assert_close(rollout.sum(-1), torch.ones(2, 7))
    first, second, third = layers.mean(2) / (1 + residual) + residual * torch.eye(7) / 2
    torch.testing.assert_close(rollout, third @ second @ first)


@pytest.mark.parametrize("start", ["class", "patches"])
def test_rollout_of_a_model_that_attends_to_all_alike_is_flat(start):
    rollout = attention_rollout(vit_with_uniform_attention(), noise(2), residual=False, start=start)
    torch.testing.assert_close(rollout, torch.ones(2, 4, 4))


def test_similarity_of_sinusoidal_positions():
    encoder = vit()
    angles = 0.9 * (torch.arange(16) % 4)  # one wave over the columns, none over rows
    positions = torch.zeros(1, 17, 16)
    positions[0, 1:, 0] = 3 * torch.sin(angles)
    positions[0, 1:, 1] = 3 * torch.cos(angles)
    encoder.model.pos_embed.data = positions
    similarity = position_similarity(encoder.model)
    expected = torch.cos(angles[:, None] - angles).view(4, 4, 4, 4)
    torch.testing.assert_close(similarity, expected, rtol=1e-5, atol=1e-5)


def test_filter_components_find_the_directions_that_made_the_filters():
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(192, 2)))[0].T  # (2, 192), orthonormal
    strengths = rng.normal(size=(16, 2)) * (5, 1)
    filters = torch.tensor(strengths @ directions + 0.3).float()
    encoder = vit()
    encoder.model.patch_embed.proj.weight.data = filters.view(16, 3, 8, 8)
    components, shares = filter_components(encoder.model, 28)
    assert components.shape == (16, 3, 8, 8)
    assert shares[:2].sum().item() == pytest.approx(1, abs=1e-5)
    rows = components.flatten(1)
    inside = rows[:2].double().numpy() @ directions.T  # the span is the same, the lengths are 1
    np.testing.assert_allclose(np.linalg.norm(inside, axis=1), 1, rtol=1e-4)
    assert torch.equal(rows.amax(1), rows.abs().amax(1))


@pytest.mark.parametrize("sign", [1, -1])
def test_features_along_one_direction_have_one_color(sign):
    """Brighter and brighter: red follows it, from the border to the middle; green and blue have nothing to show."""
    strength = torch.rand(2, 4, 4, generator=seeded())
    strength[:, 1:3, 1:3] += 1
    direction = torch.tensor([3.0, 0, -4.0, 0, 0])
    (components,) = components_by_depth([sign * strength[..., None] * direction + 7])
    torch.testing.assert_close(components.coordinates[..., 0], 5 * (strength - strength.mean()))
    assert components.coordinates[..., 1:].abs().max() == 0
    assert components.variance_shares.tolist() == pytest.approx([1, 0, 0])
    order = strength.flatten().argsort()
    red, green, blue = components.colors.flatten(0, 2)[order].unbind(1)
    assert (red.diff() >= 0).all()
    assert (red[0], red[-1]) == (0, 1)
    assert (green == 0.5).all()
    assert (blue == 0.5).all()
    assert torch.equal(components.foreground, strength > strength.mean())


def test_components_are_of_all_images_together_and_keep_their_signs_from_depth_to_depth():
    deviations = torch.tensor([9, 6, 3, 1, 1, 1, 1, 1])
    features = torch.randn(3, 4, 5, 8, generator=seeded()) * deviations
    features[:, 1:-1, 1:-1, 0] += 5  # the middle differs from the border
    below, above = components_by_depth([features, -features])  # a block that turns all around
    torch.testing.assert_close(below.coordinates, above.coordinates)
    flat = features.double().flatten(0, 2).numpy()
    left, values, _ = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    expected = (left * values)[:, :3].reshape(3, 4, 5, 3)
    np.testing.assert_allclose(above.coordinates.abs(), np.abs(expected), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(above.variance_shares, values[:3] ** 2 / (values**2).sum(), rtol=1e-5)
    first = above.coordinates[..., 0]
    assert first[:, 1:-1, 1:-1].mean() > first.mean()


def test_similarity_is_the_cosine_with_each_patch():
    features = torch.randn(2, 3, 4, 5)
    similarity = patch_similarity(features, [7, 0])
    query = features[:, 1:2, 3:4].expand_as(features)
    assert similarity.shape == (2, 2, 3, 4)
    torch.testing.assert_close(similarity[:, 0], torch.cosine_similarity(query, features, dim=-1))
    assert similarity[:, 1, 0, 0].tolist() == pytest.approx([1, 1])


def test_patches_are_spread_over_the_grid():
    assert spread_patches((4, 4)) == [5, 7, 10, 13, 15]
    assert spread_patches((1, 1)) == [0]


def test_neighbours_are_those_of_a_loop_over_images_and_patches():
    torch.manual_seed(0)
    gallery = torch.randn(9, 2, 3, 5)  # images that are their features
    nearest = search_gallery(lambda images: images, gallery[[1, 4]], 2, gallery.split(4), [1, 4], 20)
    assert nearest.images.shape == nearest.patches.shape == (2, 8)
    for number, query in enumerate((1, 4)):
        query_mean = gallery[query].flatten(0, 1).mean(0)
        query_patch = gallery[query, 0, 2]
        image_similarity = {}
        nearest_patch = {}  # (similarity, patch) of each other image
        for other in range(9):
            if other == query:
                continue
            patches = gallery[other].flatten(0, 1)
            image_similarity[other] = torch.cosine_similarity(query_mean, patches.mean(0), dim=0).item()
            by_patch = torch.cosine_similarity(query_patch[None], patches)
            nearest_patch[other] = (by_patch.max().item(), int(by_patch.argmax()))
        images = nearest.images[number].tolist()
        assert images == sorted(image_similarity, key=image_similarity.get, reverse=True)
        hosts = nearest.hosts[number].tolist()
        assert hosts == sorted(nearest_patch, key=nearest_patch.get, reverse=True)
        assert nearest.patches[number].tolist() == [nearest_patch[host][1] for host in hosts]
        expected = [nearest_patch[host][0] for host in hosts]
        assert nearest.patch_similarity[number].tolist() == pytest.approx(expected, abs=1e-6)


def test_patch_features_have_the_last_norm_of_encoders_that_pool_first():
    """timm has it in fc_norm there."""
    model = timm.create_model("test_vit", img_size=32, num_classes=0, global_pool="avg", class_token=False)
    torch.nn.init.normal_(model.fc_norm.weight)
    encoder = FrozenEncoder(model)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    (last,) = patch_features(encoder, images, [len(model.blocks)])
    with torch.no_grad():
        expected = model.fc_norm(model.forward_features(encoder.normalize(images)))
    torch.testing.assert_close(last.flatten(1, 2), expected)


def test_patch_features_are_the_models_own_in_their_places():
    encoder = vit()
    images = noise(2)
    first, last = patch_features(encoder, images, [1, 3])
    pixels = encoder.normalize(images)
    tokens = encoder.model.forward_features(pixels)
    torch.testing.assert_close(last[:, 2, 3], tokens[:, 1 + 2 * 4 + 3])  # row 2, column 3 of 4 x 4; [class] is left out
    (inner,) = encoder.model.forward_intermediates(pixels, indices=[0], norm=False, intermediates_only=True)
    torch.testing.assert_close(first.permute(0, 3, 1, 2), inner)


def test_entropy_lands_on_its_patch():
    values = np.arange(8.0).reshape(1, 2, 4)  # two patches of 2 x 2 cells
    whole = place_on_grid(values, np.array([[3, 0]]), grid=(2, 2))
    np.testing.assert_array_equal(whole[0, 2:, 2:], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(whole[0, :2, :2], [[4, 5], [6, 7]])
    assert np.isnan(whole).sum() == 8


@pytest.mark.faults
def test_all_pictures_of_a_run(finished_run, tmp_path, capsys):
    out = draw(finished_run, tmp_path / "pictures", *FEW)
    assert "no " not in capsys.readouterr().out.replace("note", "")
    events = EventAccumulator(str(out)).Reload()
    assert set(events.Tags()["images"]) == ALL
    for name in ALL:
        image = Image.open(out / f"{name}.png")
        assert image.width <= 900
        assert np.asarray(image.convert("L")).std() > 5
    distance = json.loads((out / "attention_distance.json").read_text())
    assert distance["images"] == 5
    rollout = np.load(out / "attention_rollout.npz")["rollout"]
    assert rollout.mean((1, 2)).tolist() == pytest.approx([1] * 3, rel=1e-5)
    components = np.load(out / "pca.npz")
    assert components["colors"].shape == (2, 3, 4, 4, 3)
    assert components["depths"].tolist() == [1, 2]


@pytest.mark.faults
def test_the_rank_is_that_of_training(pretrain, tmp_path):
    run = pretrain("--probe.every=4", "--data.eval_images=300")  # all of the held-out ones
    out = draw(run, tmp_path / "pictures", "--pictures=rank")
    drawn = json.loads((out / "rank.json").read_text())
    logged = last_scalars(run)
    ranks = {"1": logged["features/rank/depth_01"], "2": logged["features/rank/depth_02"]}
    assert drawn == {"images": 286, "width": 16, "rank_by_depth": pytest.approx(ranks, rel=1e-3)}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("settings", "cells", "heading"),
    [
        pytest.param(["--objective.name=grid_color"], 16, "(mean colours)", id="grid"),
        pytest.param(["--objective.name=pixels", "--optim.average=0.9"], None, "(pixels)", id="pixels"),
        pytest.param(
            ["--config=rivals/mae"], None, "(pixels, denormalised by each patch's true mean and deviation)", id="mae"
        ),
        pytest.param(["--config=rivals/mae_mean_color"], 1, "(mean colours)", id="mean colour"),
        pytest.param(["--config=rivals/maskfeat"], None, "(grey (no picture))", id="maskfeat"),
    ],
)
def test_predictions_of_every_network_and_target(pretrain, tmp_path, monkeypatch, settings, cells, heading):
    headings = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **_: headings.append(text))
    run = pretrain(*settings, "--run.steps=1")
    out = draw(run, tmp_path / "pictures", "--pictures=predictions", SHOWN)
    assert headings[0].replace("\n", " ").endswith(heading)
    saved = np.load(out / "predictions.npz")
    original = saved["original"]
    assert original.shape == (3, 32, 32, 3)

    positions = saved["positions"]
    assert ("entropy" in saved) == (cells is not None)
    if cells:
        entropy = saved["entropy"]
        assert entropy.shape == (*positions.shape, cells)
        assert 0 <= entropy.min() <= entropy.max() <= 9

    corrupted = np.zeros((3, 16), bool)
    np.put_along_axis(corrupted, positions, True, axis=1)
    corrupted = corrupted.reshape(3, 4, 4).repeat(8, 1).repeat(8, 2)
    for name in ("seen", "predicted", "true"):
        assert (saved[name][~corrupted] == original[~corrupted]).all()
    assert (saved["predicted"][corrupted] != saved["true"][corrupted]).any() == ("no picture" not in heading)
    assert (saved["true"] == original).all() == ("pixels" in heading)


@pytest.mark.faults
def test_predictions_are_by_the_weights_that_were_exported(pretrain, monkeypatch, tmp_path):
    run = pretrain("--optim.average=0.9", "--optim.lr=0.1")
    models = []
    predict = Pretraining.predict

    def recorded_predict(task, model, indices):
        models.append(model)
        return predict(task, model, indices)

    monkeypatch.setattr(Pretraining, "predict", recorded_predict)
    draw(run / "encoder", tmp_path / "pictures", "--pictures=predictions", SHOWN)
    weights = models[0].encoder.state_dict()
    exported = load_file(run / "encoder" / "model.safetensors")
    assert exported
    for name, tensor in exported.items():
        assert torch.equal(weights[name], tensor)


@pytest.mark.faults
def test_what_an_encoder_lacks_is_said(tmp_path, image_folder, capsys):
    images = (f"--data.path={image_folder}", "--data.eval_fraction=0.5")
    draw("resnetv2_18", tmp_path, "--random=true", "--img_size=32", *images, *FEW)
    printed = capsys.readouterr().out
    for name in ("predictions", "positions", "attention_distance", "attention_rollout", "pca"):
        assert f"no {name}: " in printed
    assert drawn_in(tmp_path) == {"filters", "rank", "accuracy_by_depth"}
    with pytest.raises(ValueError, match="pictures is filters; it must be a picture that this encoder supports"):
        draw("floor:pixels", tmp_path, "--pictures=filters")


@pytest.mark.faults
def test_images_without_labels_give_all_but_accuracy(finished_run, tmp_path, capsys):
    plain = tmp_path / "plain"
    plain.mkdir()
    for number in range(6):
        (plain / f"{number}.png").write_bytes(encoded(picture(number)))
    out = draw(finished_run, tmp_path / "pictures", f"--data.path={plain}", *FEW)
    printed = capsys.readouterr().out
    assert "no accuracy_by_depth: the images have no labels" in printed
    assert "no neighbours: there is one held-out image" in printed
    assert drawn_in(out) == ALL - {"accuracy_by_depth", "neighbours"}


def test_images_of_several_labels_give_all_but_accuracy(finished_run, tmp_path, capsys):
    labels = [["a", "b"], ["b"], ["a"]] * 4
    rows = dataset_of([encoded(picture(number)) for number in range(12)], label=labels)
    rows.to_parquet(tmp_path / "images.parquet")
    pictures = ("--pictures=[accuracy_by_depth, filters]", "--data.eval_fraction=0.5")
    out = draw(finished_run, tmp_path / "pictures", f"--data.path={tmp_path / 'images.parquet'}", *pictures)
    assert "no accuracy_by_depth: training images have several labels each" in capsys.readouterr().out
    assert drawn_in(out) == {"filters"}


@pytest.mark.faults
def test_pictures_of_a_run_without_predictions_are_the_others(pretrain, tmp_path, capsys):
    run = pretrain()
    asked = ("--pictures=[predictions,filters]", SHOWN)
    assert drawn_in(draw(run, tmp_path / "with_checkpoints", *asked)) == {"predictions", "filters"}
    shutil.rmtree(run / "checkpoints")
    assert drawn_in(draw(run, tmp_path / "without", *asked)) == {"filters"}
    assert "no predictions: encoder is" in capsys.readouterr().out


def test_a_query_that_attends_to_class_only_has_no_distance():
    distances = patch_distances((2, 2), 8)
    weights = torch.zeros(1, 1, 4, 4)
    weights[0, 0, 0, 1] = 1  # the first attends to its neighbour, the others to [class]
    assert mean_distance(weights, distances).item() == 8
    assert mean_distance(torch.zeros(1, 1, 4, 4), distances).item() == 0


def test_visiting_attention_leaves_the_encoder_as_it_was():
    encoder = vit()
    before = [block.attn.fused_attn for block in encoder.model.blocks]
    visit_attention(encoder, noise(1), lambda *_: None)
    assert [block.attn.fused_attn for block in encoder.model.blocks] == before and any(before)


@pytest.mark.faults
def test_rollout_starts_at_class_where_class_was_trained(finished_run, tmp_path, monkeypatch):
    starts = []
    monkeypatch.setattr(
        "evaluation.figures.images.plot_rollout", lambda images, rollout, start, residual: starts.append(start)
    )
    monkeypatch.setattr("evaluation.pictures.drawings.Drawing.write", lambda *args: None)
    monkeypatch.setattr("evaluation.visualize.SummaryWriter.add_figure", lambda *args: None)

    def start_of(encoder: Path | str, *settings: str) -> str:
        draw(encoder, tmp_path / "pictures", "--pictures=attention_rollout", SHOWN, *settings)
        return starts.pop()

    tiny = [word for word in TINY if not word.startswith("--probe")]
    supervised.main([*tiny, f"--run.dir={tmp_path / 'labels'}"])
    supervised.main([*tiny, f"--run.dir={tmp_path / 'mean'}", "--head.pooling=mean"])
    name = "vit_tiny_patch16_224"
    published = tmp_path / "weights.safetensors"
    save_file(timm.create_model(name, num_classes=0).state_dict(), published)
    assert start_of(finished_run) == "patches"
    assert start_of(tmp_path / "labels") == "class"
    assert start_of(tmp_path / "mean") == "patches"
    assert start_of(name, f"--checkpoint={published}") == "class"
    assert start_of(name, "--random=true") == "patches"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--pictures=attention", "attention"),
        ("--images=0", "images is 0; it must be"),
        ("--pictures=[]", r"pictures is \[\]; it must be"),
        ("--out=pyproject.toml", r"out is pyproject\.toml; it must be a folder"),
        ("--encoder=nowhere", "encoder is nowhere"),
    ],
)
def test_bad_settings_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        main(["--encoder=floor:pixels", *FAST, wrong])
