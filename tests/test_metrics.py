"""Accuracy by kind and the reference lines, against loops."""

import math
import statistics

import pytest
import torch

from mpp.config import CorruptionConfig, ObjectiveConfig
from mpp.corruption import Corruption, Kind, draw, stack
from mpp.features.metrics import add_sums, measure_predictions, nearest_visible, summarize
from mpp.objectives import build_objective, patchify


def corruption_of(images: int, side: int, **settings) -> Corruption:
    drawn = [draw(CorruptionConfig(**settings), (side, side), 0, 0, index) for index in range(images)]
    return stack(drawn)


@pytest.mark.parametrize(
    ("pattern", "side", "rate"),
    [
        pytest.param("random", 5, 0.8, id="random"),
        pytest.param("random", 5, 0.96, id="random, one visible patch"),
        pytest.param("blocks", 6, 0.8, id="blocks"),
        pytest.param("blockwise", 5, 0.8, id="blockwise"),
    ],
)
def test_nearest_visible_patches_by_search(pattern, side, rate):
    corruption = corruption_of(20, side, rate=rate, pattern=pattern)
    nearest = nearest_visible(corruption, (side, side))
    for positions, nearest_of_image in zip(corruption.positions.tolist(), nearest.tolist(), strict=True):
        visible = [patch for patch in range(side**2) if patch not in positions]
        for position, nearest_two in zip(positions, nearest_of_image, strict=True):
            place = divmod(position, side)
            distances = {patch: math.dist(divmod(patch, side), place) for patch in visible}
            by_distance = sorted(visible, key=distances.get)  # of equally near ones the first stays first
            assert nearest_two == [by_distance[0], by_distance[:2][-1]]


def share_equal(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one == other).double().mean().item()


@pytest.mark.parametrize("name", ["mean_color", "grid_color", "pixels"])
def test_measures_against_a_loop(name):
    torch.manual_seed(0)
    objective = build_objective(ObjectiveConfig(name=name, bits=1), 4)
    images = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    images[..., :8] = 200  # so that one colour is frequent
    corruption = corruption_of(6, 4, mask=0.4, random=0.3, keep=0.3)
    predictions = torch.randn(6, 8, objective.outputs)
    halves = [slice(0, 2), slice(2, 6)]  # sums add up over uneven batches
    sums = {}
    for half in halves:
        part = Corruption(*(field if field is None else field[half] for field in corruption))
        sums = add_sums(sums, measure_predictions(objective, predictions[half], images[half], part))
    result = summarize(sums)

    truth = objective.colour_classes(objective.targets(images, torch.arange(16).expand(6, -1)))
    guess = objective.colour_classes(objective.decide(predictions))
    patches = patchify(images, 4)
    right = {kind: [] for kind in Kind}
    copied = []
    mixed = []
    colors = []
    nearest = nearest_visible(corruption, (4, 4))
    for b in range(6):
        for k, position in enumerate(corruption.positions[b]):
            kind = Kind(int(corruption.kinds[b, k]))
            true_labels = truth[b, position]
            right[kind].append(share_equal(guess[b, k], true_labels))
            if kind == Kind.MASK:
                first, second = nearest[b, k]
                copied.append(share_equal(truth[b, first], true_labels))
                exact_mean = (patches[b, first].double() + patches[b, second].double()) / 2
                mean_patch = torch.floor(exact_mean + 0.5).to(torch.uint8)
                mean_targets = objective.targets(mean_patch[None], torch.zeros(1, 1).long())
                mixed.append(share_equal(objective.colour_classes(mean_targets)[0, 0], true_labels))
                colors += true_labels.tolist()
    mean = statistics.fmean
    assert result["accuracy"] == pytest.approx(mean(right[Kind.MASK]))
    assert result["accuracy_random"] == pytest.approx(mean(right[Kind.RANDOM]))
    assert result["accuracy_keep"] == pytest.approx(mean(right[Kind.KEEP]))
    assert result["nearest"] == pytest.approx(mean(copied))
    assert result["two_nearest"] == pytest.approx(mean(mixed))
    assert result["most_frequent"] == pytest.approx(max(map(colors.count, colors)) / len(colors))


def test_a_kind_that_does_not_occur_is_not_reported():
    objective = build_objective(ObjectiveConfig(), 4)
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    corruption = corruption_of(1, 4, mask=0.0, random=0.0, keep=1.0)
    sums = measure_predictions(objective, torch.zeros(1, 8, 512), images, corruption)
    assert summarize(sums) == {"accuracy_keep": 1.0}


@pytest.mark.parametrize("target", [dict(name="hog"), dict(name="pixels", normalize="patch")])
def test_where_no_colour_is_predicted_no_accuracy_is_measured(target):
    objective = build_objective(ObjectiveConfig(**target), 4)
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    sums = measure_predictions(objective, torch.zeros(1, 8, objective.outputs), images, corruption_of(1, 4))
    assert summarize(sums) == {}
