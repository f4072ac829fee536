"""Targets, losses and accuracies against arithmetic done by hand."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import ROOT

from mpp import objectives
from mpp.config import ObjectiveConfig
from mpp.objectives import OBJECTIVES, build_objective, colors_of, quantize


def objective(name, patch=4, **settings):
    return build_objective(ObjectiveConfig(name=name, **settings), patch)


def by_hand(patch: np.ndarray, bits: int) -> int:
    """Colour class of (3, H, W) in exact fractions: v in [k / L, (k + 1) / L) is level k, and 1 is level L - 1."""
    levels = 2**bits
    number = 0
    for channel in patch:
        mean = Fraction(int(channel.astype(int).sum()), 255 * channel.size)
        number = number * levels + min(int(mean * levels), levels - 1)
    return number


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_mean_color_by_hand(bits):
    patches = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 5, 3, 4, 4), dtype=np.uint8))
    patches[0, 0], patches[0, 1] = 0, 255
    targets = objective("mean_color", bits=bits).targets(patches)
    assert targets.tolist() == [[by_hand(patch.numpy(), bits) for patch in image] for image in patches]
    assert targets[0, 0] == 0 and targets[0, 1] == 8**bits - 1


def test_bin_edges_belong_to_the_bin_above():
    whole = 255 * 8  # eight pixels: the sum 255 is a mean of exactly 1/8
    sums = torch.tensor([[254, 255, 256], [0, whole - 1, whole]])
    assert quantize(sums, whole, 3).tolist() == [(0 * 8 + 1) * 8 + 1, (0 * 8 + 7) * 8 + 7]


def test_every_class_has_a_color_that_is_its_own():
    for bits in (1, 3):
        classes = torch.arange(8**bits)
        assert torch.equal(quantize(colors_of(classes, bits).long(), 255, bits), classes)


def test_grid_color_by_hand():
    patches = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1, 3, 3, 8, 8), dtype=np.uint8))
    targets = objective("grid_color", patch=8, grid=4).targets(patches)
    expected = [
        [by_hand(patch[:, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].numpy(), 3) for r in range(4) for c in range(4)]
        for patch in patches[0]
    ]
    assert targets[0].tolist() == expected


def test_grid_must_divide_the_patch():
    with pytest.raises(ValueError, match=r"objective\.grid is 4; it must divide the patch size \(14\)"):
        objective("grid_color", patch=14)


def test_losses_of_knowing_nothing_are_the_closed_forms():
    patches = torch.randint(0, 256, (2, 3, 3, 4, 4), dtype=torch.uint8)
    for name, cells in (("mean_color", 1), ("grid_color", 16)):
        o = objective(name)
        assert o.outputs == 512 * cells
        assert o.loss(torch.zeros(2, 3, o.outputs), o.targets(patches)).item() == pytest.approx(np.log(512))
    o = objective("pixels")
    scaled = patches.numpy() / 127.5 - 1
    assert o.loss(torch.zeros(2, 3, 48), o.targets(patches)).item() == pytest.approx((scaled**2).mean(), rel=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_perfect_predictions_are_decided_right_and_lose_least(name):
    patches = torch.randint(0, 256, (2, 3, 3, 4, 4), dtype=torch.uint8)
    o = objective(name)
    targets = o.targets(patches)
    if name == "pixels":
        perfect = targets.flatten(2).float() / 127.5 - 1
    else:
        perfect = 100.0 * torch.nn.functional.one_hot(targets, 512).float().flatten(2)
    assert perfect.shape == (2, 3, o.outputs)
    assert torch.equal(o.decide(perfect), targets)
    assert o.loss(perfect, targets) < 1e-6


@pytest.mark.parametrize("name", OBJECTIVES)
def test_painted_targets_have_the_labels_of_the_targets(name):
    o = objective(name)
    targets = o.targets(torch.randint(0, 256, (2, 3, 3, 4, 4), dtype=torch.uint8))
    painted = o.paint(targets)
    assert painted.shape == (2, 3, 3, 4, 4) and painted.dtype == torch.uint8
    assert torch.equal(o.labels(o.targets(painted)), o.labels(targets))


def test_unknown_objective_lists_the_known():
    with pytest.raises(ValueError, match=r"objective\.name is colour; .*mean_color, grid_color, pixels"):
        objective("colour")


def test_the_readmes_example_of_another_objective_works(monkeypatch):
    readme = (ROOT / "mpp" / "README.md").read_text()
    example = readme[readme.index("class Brightness") : readme.index("OBJECTIVES = {...")]
    names = vars(objectives).copy()
    exec(example, names)
    monkeypatch.setitem(OBJECTIVES, "brightness", names["Brightness"])
    o = objective("brightness")
    patches = torch.stack([torch.full((3, 4, 4), v, dtype=torch.uint8) for v in (0, 15, 16, 128, 255)])[None]
    targets = o.targets(patches)
    assert targets.tolist() == [[0, 0, 1, 8, 15]]
    assert o.loss(torch.zeros(1, 5, o.outputs), targets).item() == pytest.approx(np.log(16))
    assert torch.equal(o.targets(o.paint(targets)), targets)
    assert o.labels(o.decide(torch.nn.functional.one_hot(targets, 16))).max() < 8**o.bits
