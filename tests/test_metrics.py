"""Accuracy by kind and the reference lines, against loops."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from model_inputs import draw_batch, random_images

from mpp.config import CorruptionConfig, ObjectiveConfig
from mpp.corruption import Corruption, Kind
from mpp.features.metrics import add_sums, measure_predictions, nearest_visible, summarize
from mpp.objectives import build_objective, patchify


def corruption_of(images, side, **settings):
    return draw_batch(CorruptionConfig(**settings), (side, side), images)


@pytest.mark.parametrize(
    "pattern, grid, rate",
    [
        ("random", (5, 5), 0.8),
        ("random", (5, 5), 0.96),  # one visible patch
        ("random", (2, 7), 0.5),
        ("blockwise", (6, 6), 0.8),
    ],
)
def test_nearest_visible_patches_by_search(pattern, grid, rate):
    corruption = draw_batch(CorruptionConfig(rate=rate, pattern=pattern), grid, 20)
    nearest = nearest_visible(corruption, grid)
    places = list(np.ndindex(grid))
    for positions, nearest_of_image in zip(corruption.positions.tolist(), nearest.tolist(), strict=True):
        visible = [patch for patch in range(len(places)) if patch not in positions]
        for position, nearest_two in zip(positions, nearest_of_image, strict=True):
            by_distance = sorted(visible, key=lambda patch: math.dist(places[patch], places[position]))
            assert nearest_two == [by_distance[0], by_distance[:2][-1]]  # of equally near ones the first


@pytest.mark.parametrize("name", ["mean_color", "grid_color", "pixels"])
def test_measures_against_a_loop(name):
    torch.manual_seed(0)
    objective = build_objective(ObjectiveConfig(name=name, bits=1), 4)
    images = random_images(6, side=16)
    images[..., :8] = 200  # so that one colour is frequent
    corruption = corruption_of(6, 4, mask=0.4, random=0.3, keep=0.3)
    predictions = torch.randn(6, 8, objective.outputs)
    sums = {}
    for half in (slice(0, 2), slice(2, 6)):  # sums add up over uneven batches
        part = Corruption(*(field if field is None else field[half] for field in corruption))
        sums = add_sums(sums, measure_predictions(objective, predictions[half], images[half], part))

    truth = objective.colour_classes(objective.targets(images, torch.arange(16).expand(6, -1)))
    guess = objective.colour_classes(objective.decide(predictions))
    patches = patchify(images, 4)
    nearest = nearest_visible(corruption, (4, 4))
    equal = defaultdict(list)
    colors = []
    for b, k in np.ndindex(6, 8):
        kind = Kind(int(corruption.kinds[b, k]))
        right = truth[b, corruption.positions[b, k]]
        name = "accuracy" if kind == Kind.MASK else f"accuracy_{kind.name.lower()}"
        equal[name].append(guess[b, k] == right)
        if kind == Kind.MASK:
            equal["nearest"].append(truth[b, nearest[b, k, 0]] == right)
            exact_mean = patches[b, nearest[b, k]].double().mean(0)
            mean_patch = torch.floor(exact_mean + 0.5).to(torch.uint8)
            mean_targets = objective.targets(mean_patch[None], torch.zeros(1, 1).long())
            equal["two_nearest"].append(objective.colour_classes(mean_targets)[0, 0] == right)
            colors += right.tolist()
    expected = {case: torch.stack(found).double().mean().item() for case, found in equal.items()}
    expected["most_frequent"] = max(map(colors.count, colors)) / len(colors)
    assert {case: value for case, value in summarize(sums).items() if case in expected} == pytest.approx(expected)


def test_a_kind_that_does_not_occur_is_not_reported():
    corruption = corruption_of(1, 4, mask=0.0, random=0.0, keep=1.0)
    objective = build_objective(ObjectiveConfig(), 4)
    sums = measure_predictions(objective, torch.zeros(1, 8, 512), torch.zeros(1, 3, 16, 16).byte(), corruption)
    assert summarize(sums) == {"accuracy_keep": 1.0}


@pytest.mark.parametrize("target", [dict(name="hog"), dict(name="pixels", normalize="patch")])
def test_where_no_colour_is_predicted_no_accuracy_is_measured(target):
    objective = build_objective(ObjectiveConfig(**target), 4)
    predictions = torch.zeros(1, 8, objective.outputs)
    assert summarize(measure_predictions(objective, predictions, random_images(1, side=16), corruption_of(1, 4))) == {}
