"""Targets, losses and accuracies against arithmetic done by hand."""

import textwrap
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, refused
from einops import rearrange
from skimage.feature import hog
from torch import nn

import mpp
from mpp.config import Config, ModelConfig, ObjectiveConfig
from mpp.objectives import OBJECTIVES, Objective, Palette, build_objective

SETTINGS = {
    **{name: dict(name=name) for name in OBJECTIVES if name not in ("features", "hog")},
    "mean_color, factorized": dict(name="mean_color", factorized=True),
    "grid_color, factorized": dict(name="grid_color", factorized=True, grid=2, bits=2),
    "pixels, l1": dict(name="pixels", loss="l1"),
    "pixels, normalised": dict(name="pixels", normalize="patch"),
    "hog, cells": dict(name="hog", cell=2, loss="l1"),
}


def objective(name, patch=4, channels=3, **settings):
    return build_objective(ObjectiveConfig(name=name, **settings), patch, channels)


def targets_of(objective, patches):
    """The targets of patches (B, K, C, P, P) that lie side by side in an image."""
    side_by_side = rearrange(patches, "b k c h w -> b c h (k w)")
    return objective.targets(side_by_side, torch.arange(patches.shape[1]).expand(len(patches), -1))


def random_patches(count=3, side=4, channels=3):
    return torch.randint(0, 256, (2, count, channels, side, side), dtype=torch.uint8)


def levels_by_hand(patch, bits):
    """Level of each channel of (C, H, W) in exact fractions: v in [k / L, (k + 1) / L) is level k, and 1 is L - 1."""
    means = [Fraction(int(channel.astype(int).sum()), 255 * channel.size) for channel in patch]
    return [min(int(mean * 2**bits), 2**bits - 1) for mean in means]


def by_hand(patch, bits):
    """Colour class of (C, H, W)."""
    number = 0
    for level in levels_by_hand(patch, bits):
        number = number * 2**bits + level
    return number


@pytest.mark.parametrize("channels, bits", [(3, 3), (3, 4), (1, 3), (4, 3)])
def test_mean_color_by_hand(channels, bits):
    """Edges of bins belong to the bin above."""
    patches = random_patches(6, channels=channels)
    patches[0, :4] = torch.tensor([0, 255, 0, 0], dtype=torch.uint8).view(4, 1, 1, 1)
    patches[0, 2:4, :, 0, :2] = 255  # of 16 pixels: a mean of exactly 1/8,
    patches[0, 3, 0, 0, 0] = 254  # and one a bit below
    tested, apart = (objective("mean_color", channels=channels, bits=bits, factorized=each) for each in (False, True))
    each_patch = patches.flatten(0, 1).numpy()
    expected = [by_hand(patch, bits) for patch in each_patch]
    assert expected[1] == 2 ** (bits * channels) - 1 and expected[2] != expected[3]
    for pixels in (patches, patches.float()):
        assert targets_of(tested, pixels).flatten().tolist() == expected
        assert targets_of(apart, pixels).flatten(0, 1).tolist() == [levels_by_hand(each, bits) for each in each_patch]


@pytest.mark.parametrize("bits, factorized", [(1, False), (3, False), (2, True)])
def test_every_class_has_a_color_that_is_its_own_the_middle_of_its_bin(bits, factorized):
    palette = Palette(3, bits, factorized)
    assert (palette.softmaxes, palette.classes) == ((3, 2**bits) if factorized else (1, 8**bits))
    classes = torch.arange(palette.classes)[:, None].expand(-1, palette.softmaxes)
    colors = palette.colors(classes)
    assert torch.equal(palette.classes_of(colors[..., None, None]), classes)
    middles = [255 * (2 * level + 1) // 2 ** (bits + 1) for level in range(2**bits)]
    assert colors.tolist() == (
        [[each] * 3 for each in middles] if factorized else [*map(list, product(middles, repeat=3))]
    )


def test_occurrences_of_classes_are_counted_by_softmax():
    """Of two patches with a cell, and one with two."""
    for classes in ([[0, 1, 1], [1, 1, 0]], [[0, 1, 1, 1, 1, 0]]):
        assert Palette(3, 1, factorized=True).count(torch.tensor(classes)).tolist() == [[1, 1], [0, 2], [1, 1]]


def test_pixels_of_more_than_4096_colours_have_a_palette_of_factors():
    assert [objective("pixels", bits=bits).palette.factorized for bits in (4, 5)] == [False, True]


def test_grid_color_by_hand():
    patches = random_patches(side=8)
    targets = targets_of(objective("grid_color", patch=8, grid=4), patches)
    cells = rearrange(patches, "b k c (g h) (f w) -> (b k g f) c h w", g=4, f=4)
    assert targets.flatten().tolist() == [by_hand(cell.numpy(), 3) for cell in cells]


@pytest.mark.parametrize(
    "name, patch, said",
    [
        ("grid_color", 14, r"objective\.grid is 4; it must be a divisor of the patch size \(14\)"),
        ("hog", 14, r"objective\.cell is 8; it must be a divisor of the patch size \(14\)"),
        ("colour", 8, r"objective\.name is colour; .*mean_color, grid_color, pixels, hog"),
    ],
)
def test_what_cannot_be_an_objective_is_named(name, patch, said):
    with refused(said):
        objective(name, patch=patch)


@pytest.mark.parametrize("name, cells", [("mean_color", 1), ("grid_color", 16)])
def test_the_loss_of_knowing_nothing_is_the_closed_form(name, cells):
    tested = objective(name)
    assert tested.outputs == 512 * cells
    loss = tested.loss(torch.zeros(2, 3, tested.outputs), targets_of(tested, random_patches()))
    assert loss.item() == pytest.approx(np.log(512))


@pytest.mark.parametrize("patch, cell", [(16, 8), (4, 8), (14, 7)])
def test_hog_is_scikit_images(patch, cell):
    """Of the whole image, a channel at a time: a gradient at a patch's edge needs its neighbour."""
    images = torch.randint(0, 256, (2, 3, 3 * patch, 5 * patch), dtype=torch.uint8)
    images[0, :, :patch, :patch] = 50  # a cell without a gradient
    images[1] = images[1] // 64 * 64  # many gradients of the same direction
    tested = objective("hog", patch, cell=cell)
    side = max(1, patch // cell)
    positions = torch.tensor([[0, 7, 14], [1, 4, 9]])
    targets = tested.targets(images, positions)
    assert tested.outputs == side**2 * 27 and tested.palette is None
    options = dict(cells_per_block=(1, 1), block_norm="L2", feature_vector=False)
    for image, places, found in zip(images.double().numpy(), positions, targets, strict=True):
        of_channels = [hog(channel, 9, (patch // side,) * 2, **options)[:, :, 0, 0] for channel in image]
        theirs = rearrange(np.stack(of_channels), "c (h g) (w f) o -> (h w) (g f c o)", g=side, f=side)
        np.testing.assert_allclose(found, theirs[places], atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_perfect_predictions_are_decided_right_lose_least_and_are_painted_with_their_labels(name):
    tested = objective(**SETTINGS[name])
    patches = random_patches()
    patches[0, 0] = 90  # normalised, there is nothing to divide by
    targets = targets_of(tested, patches)
    perfect = targets.flatten(2)
    if targets.dtype == torch.int64:  # classes
        perfect = 100.0 * F.one_hot(targets, tested.classes).float().flatten(2)
    elif targets.dtype == torch.uint8:  # pixels
        perfect = perfect / 127.5 - 1
    assert perfect.shape == (2, 3, tested.outputs)
    assert torch.equal(tested.decide(perfect), targets)
    assert tested.loss(perfect, targets) < 1e-6 < tested.loss(perfect.roll(1, dims=1), targets)
    painted = tested.paint(targets, patches)
    assert painted.shape == (2, 3, 3, 4, 4)
    assert painted.dtype == torch.uint8
    assert torch.equal(painted, patches) == ("pixels" in name)  # put back, if they were normalised
    if name == "pixels":
        assert [tested.decide(perfect * 0 + value).unique().tolist() for value in (-3, 0, 3)] == [[0], [128], [255]]
    if "hog" in name:
        assert (painted == 128).all() and tested.entropy(perfect) is None
    if tested.palette is not None:
        assert torch.equal(tested.colour_classes(targets_of(tested, painted)), tested.colour_classes(targets))


def test_the_pages_example_of_the_loss_in_a_loop_of_ones_own_works():
    page = (ROOT / "mpp" / "use_encoder.md").read_text()
    example, *_ = page[page.index("      import mpp.corruption") :].partition("\n\n")
    small = Config(model=ModelConfig(width=16, depth=1, heads=2, img_size=32, patch_size=8))
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    names = {"images": images, "indices": range(6), "seed": 0, "epoch": 3, "mpp": mpp, "small": small}
    exec(textwrap.dedent(example).replace("mpp.Config()", "small"), names)
    positions = names["drawn"].positions
    assert positions.shape == (6, 8)
    logits = names["network"](images, names["drawn"]).float()
    colours = names["objective"].targets(images, positions)
    torch.testing.assert_close(names["loss"], F.cross_entropy(logits.flatten(0, 1), colours.flatten()))
    names["loss"].backward()
    assert names["network"].encoder.patch_embed.proj.weight.grad.any()


def test_an_objective_with_weights_that_nothing_trains_is_refused(monkeypatch):
    class Mine(Objective):
        outputs = 4

        def __init__(self, *given):
            super().__init__(*given)
            self.codes = nn.Linear(4, 4)

    monkeypatch.setitem(OBJECTIVES, "mine", Mine)
    with refused(r"^objective\.name is mine; .* without weights to be trained"):
        objective("mine")
    monkeypatch.setitem(OBJECTIVES, "mine", lambda *given: Mine(*given).requires_grad_(False))
    frozen = objective("mine")
    assert isinstance(frozen, Mine) and not frozen.training


def test_entropy_is_in_bits():
    """Of 512 colours alike nine, of a certain one none; of three softmaxes their sum."""
    logits = torch.zeros(1, 2, 512)
    logits[0, 1, 7] = 1e4
    assert objective("mean_color").entropy(logits).flatten().tolist() == pytest.approx([9, 0])
    factorized = objective("mean_color", factorized=True, bits=2)
    assert float(factorized.entropy(torch.zeros(1, 1, factorized.outputs))) == pytest.approx(6)
