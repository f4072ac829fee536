"""Corruption: the patches that are corrupted, and their embeddings."""

import math
import re
from itertools import islice, product

import numpy as np
import pytest
import torch
from conftest import ROOT, refused
from model_inputs import draw_batch

from mpp.config import CorruptionConfig
from mpp.corruption import PATTERNS, Kind, corrupt, corrupted_count, draw, stack
from mpp.runtime.randomness import Stream, uniform


@pytest.mark.parametrize(
    "rate, patches, count",
    [(0.5, 196, 98), (0.5, 49, 25), (0.35, 10, 4), (0.145, 100, 15), (0.01, 64, 1), (0.99, 64, 63)],
)
def test_count_rounds_halves_up(rate, patches, count):
    assert corrupted_count(rate, patches) == count


def draws(config, grid=(8, 8), images=1000):
    """The corruptions of the first images."""
    return [draw(config, grid, 0, 0, index) for index in range(images)]


def as_mask(drawn, grid):
    """(rows, columns) bool: the corrupted patches."""
    mask = np.zeros(grid, bool)
    mask.flat[drawn.positions.numpy()] = True
    return mask


# --- patterns ---


@pytest.mark.parametrize("grid, side, rate, blocks", [((8, 8), 2, 0.6, 10), ((6, 9), 3, 0.5, 3)])
def test_blocks_are_whole_squares_on_their_grid_and_all_are_hit_alike(grid, side, rate, blocks):
    config = CorruptionConfig(pattern="blocks", block=side, rate=rate)
    hits = 0
    for drawn in draws(config, grid):
        assert drawn.positions.diff().min() > 0
        patches = as_mask(drawn, grid).reshape(grid[0] // side, side, grid[1] // side, side)
        squares = patches.any((1, 3))
        assert (patches == squares[:, None, :, None]).all()
        assert squares.sum() == blocks
        hits = hits + squares / 1000
    share = blocks / hits.size
    assert abs(hits - share).max() < 5 * (share * (1 - share) / 1000) ** 0.5


def areas_of_beit(number, left, count, patches):
    """About the patches of a rectangle, of so many to corrupt, of which some are left."""
    smallest = min(16, count)
    return smallest + (number * (left - smallest) if left > smallest else 0)


RECTANGLES = {  # area, height / width, and whether the last one begins at any corner
    "blockwise": (areas_of_beit, lambda number: math.exp(math.log(0.3) + number * 2 * math.log(1 / 0.3)), False),
    "multiblock": (
        lambda number, left, count, patches: (0.15 + 0.05 * number) * patches,
        lambda number: 0.75 * (1.5 / 0.75) ** number,
        True,
    ),
}


def rectangles_one_by_one(pattern, seed, grid, count):
    """BEiT's algorithm 1, and I-JEPA's targets, on sets of patches, from the same numbers."""
    area, ratio, from_corner = RECTANGLES[pattern]
    rows, columns = grid
    numbers = iter(uniform(Stream.CORRUPTION, seed, 0, 0, 40_000).tolist())
    corrupted: set[int] = set()
    while len(corrupted) < count:
        area_number, ratio_number, row_number, column_number = islice(numbers, 4)
        size = area(area_number, count - len(corrupted), count, rows * columns)
        height = min(rows, max(1, round(math.sqrt(size * ratio(ratio_number)))))
        width = min(columns, max(1, round(math.sqrt(size / ratio(ratio_number)))))
        top = int(row_number * (rows - height + 1))
        start = int(column_number * (columns - width + 1))
        order = int(8 * next(numbers)) if from_corner else 0
        axes = [range(top, top + height), range(start, start + width)]
        axes = axes[::-1] if order // 4 else axes  # column by column
        outer, inner = (axis[::-1] if order // bit % 2 else axis for axis, bit in zip(axes, (1, 2), strict=True))
        for place in product(outer, inner):
            row, column = place[::-1] if order // 4 else place
            if len(corrupted) < count:
                corrupted.add(row * columns + column)
    return sorted(corrupted)


@pytest.mark.parametrize("pattern", RECTANGLES)
@pytest.mark.parametrize("grid, rate, count", [((14, 14), 0.4, 78), ((4, 4), 0.4, 6), ((3, 12), 0.75, 27)])
def test_rectangles_cover_exactly_k_patches(pattern, grid, rate, count):
    config = CorruptionConfig(pattern=pattern, rate=rate)
    for seed in range(100):
        positions = draw(config, grid, seed, 0, 0).positions.tolist()
        assert len(positions) == count
        assert positions == rectangles_one_by_one(pattern, seed, grid, count)


@pytest.mark.parametrize("grid", [(8, 8), (3, 16)])
def test_patterns_of_ijepa(grid):
    """Exact K and U for every image, context and targets apart; all patches are reached, and all corners alike.

    At least one patch is seen.
    """
    config = CorruptionConfig(pattern="multiblock", rate=0.5, context=0.85)
    patches = math.prod(grid)
    seen = torch.zeros(2, patches)
    for drawn in draws(config, grid, 300):
        hidden = patches // 2 - round(0.85 * patches / 2)
        assert (len(drawn.positions), len(drawn.hidden)) == (patches // 2, hidden)
        assert len(torch.cat([drawn.positions, drawn.hidden]).unique()) == patches // 2 + hidden
        assert drawn.positions.diff().min() > 0 < drawn.hidden.diff().min()
        seen[0, drawn.positions] += 1
        seen[1, drawn.hidden] += 1
    for context, shown in ((0.001, 1), (1.0, 32 if grid == (8, 8) else 24)):
        (drawn,) = draws(CorruptionConfig(pattern="multiblock", rate=0.5, context=context), grid, 1)
        assert patches - len(drawn.positions) - len(drawn.hidden) == shown
    predicted, hidden = (seen / 300).unflatten(1, grid)
    assert predicted.min() > 0 < hidden.max()
    for part in (predicted, hidden):
        assert (part - part.flip(0)).abs().mean() < 0.07
        assert (part - part.flip(1)).abs().mean() < 0.07


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(pattern="stripes"), r"corruption\.pattern is stripes; it must be one of random, blocks, blockwise"),
        (dict(pattern="blocks", block=3), r"corruption\.block is 3; it must be a divisor of the grid .*\(8 x 8\)"),
        (dict(pattern="blocks", block=8), r"corruption\.block is 8; it must be a divisor of the grid .* and smaller"),
        (dict(pattern="blocks", block=4, rate=0.1), r"corruption\.rate is 0\.1; .*1 to 3 of 4 blocks"),
        (dict(pattern="random", rate=0.999), r"corruption\.rate is 0\.999; .* 1 to 63 of 64 patches"),
    ],
)
def test_a_pattern_that_cannot_be_is_named(settings, words):
    with refused(words):
        draw(CorruptionConfig(**settings), (8, 8), 0, 0, 0)


@pytest.mark.parametrize(
    "positions",
    [
        [1, 5, 5],  # drawn with replacement: a patch would count twice
        [-1, 3],
        [3, 5, 64],
        np.zeros(0, int),
        np.arange(64),
        np.arange(64) < 32,  # a mask
        np.array([1.0, 5.0]),
        None,  # a function without a return
    ],
    ids=str,
)
def test_positions_that_are_not_some_of_the_patches_are_refused(positions, monkeypatch):
    monkeypatch.setitem(PATTERNS, "mine", lambda *_: np.array(positions))
    with refused(r"^corruption\.pattern is mine, which chose \[.*from 0 to 63"):
        draw(CorruptionConfig(pattern="mine"), (8, 8), 0, 0, 0)


def test_a_pattern_that_corrupts_other_numbers_of_patches_is_refused(monkeypatch):
    monkeypatch.setitem(PATTERNS, "mine", lambda _, grid, uniform: np.arange(2 + int(60 * uniform(1)[0])))
    with refused(r"^corruption\.pattern is one that corrupts \{.*\} patches"):
        stack(draws(CorruptionConfig(pattern="mine"), images=4))


def test_the_readmes_example_of_another_pattern_works(monkeypatch):
    readme = (ROOT / "mpp" / "README.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "whole_rows" in block)
    monkeypatch.setitem(PATTERNS, "rows", None)  # the example registers its own
    exec(example, {})
    mask = as_mask(draw(CorruptionConfig(pattern="rows"), (6, 3), 0, 0, 0), (6, 3))
    assert (mask.all(1) == mask.any(1)).all()
    assert mask.any(1).sum() == 3


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_draw_is_a_function_of_its_name(pattern):
    config = CorruptionConfig(pattern=pattern)
    first = draw(config, (8, 8), 3, 5, 7)
    assert all(map(torch.equal, first[:3], draw(config, (8, 8), 3, 5, 7)[:3]))
    for other in ((4, 5, 7), (3, 6, 7), (3, 5, 8)):
        assert not torch.equal(first.positions, draw(config, (8, 8), *other).positions)


# --- kinds and sources ---


def test_shares_of_kinds_and_positions_are_as_asked():
    corruptions = draws(CorruptionConfig(mask=0.5, random=0.3, keep=0.2))
    kinds = np.concatenate([each.kinds for each in corruptions])
    expected = {Kind.MASK: 0.5, Kind.RANDOM: 0.3, Kind.KEEP: 0.2}
    assert {kind: (kinds == kind).mean() for kind in Kind} == pytest.approx(expected, abs=0.01)
    assert all(each.hidden is None for each in corruptions)
    positions = np.concatenate([each.positions for each in corruptions])
    shares = np.bincount(positions, minlength=64) / len(corruptions)
    assert abs(shares - 0.5).max() < 5 * (0.25 / len(corruptions)) ** 0.5


# --- embeddings ---


def test_corrupt_against_a_loop():
    torch.manual_seed(0)
    embeddings = torch.randn(3, 10, 4)
    mask_token = torch.randn(4)
    of_batch = draw_batch(CorruptionConfig(mask=0.4, random=0.4, keep=0.2), (2, 5))
    hidden = torch.tensor([[min({*range(10)} - {*positions})] for positions in of_batch.positions.tolist()])
    of_batch = of_batch._replace(hidden=hidden)
    expected = embeddings.clone()
    for image in range(3):
        expected[image, hidden[image]] = mask_token
        for position, kind, source in zip(*(field[image] for field in of_batch[:3]), strict=True):
            if kind == Kind.MASK:
                expected[image, position] = mask_token
            if kind == Kind.RANDOM:
                expected[image, position] = embeddings[image, source]
    assert set(of_batch.kinds.flatten().tolist()) == set(Kind)
    assert torch.equal(corrupt(embeddings, mask_token, of_batch), expected)
