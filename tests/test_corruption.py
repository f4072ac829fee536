"""Corruption: the patches that are corrupted, and their embeddings."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from model_inputs import draw_batch

from mpp.config import CorruptionConfig, Grid
from mpp.corruption import PATTERNS, Corruption, Kind, corrupt, corrupted_count, draw, stack
from mpp.errors import UserError
from mpp.runtime.randomness import Stream, uniform


@pytest.mark.parametrize(
    ("rate", "patches", "count"),
    [
        (0.5, 196, 98),
        (0.5, 49, 25),
        (0.15, 196, 29),
        (0.35, 10, 4),
        (0.145, 100, 15),
        (0.999, 10, None),
        (0.01, 9, None),
    ],
)
def test_count_rounds_halves_up_and_leaves_something(rate, patches, count):
    if count is None:
        with pytest.raises(ValueError, match=r"corruption\.rate"):
            corrupted_count(rate, patches)
    else:
        assert corrupted_count(rate, patches) == count


def draws(config: CorruptionConfig, grid: Grid = (8, 8), images: int = 2000) -> list[Corruption]:
    """The corruptions of the first images."""
    return [draw(config, grid, 0, 0, index) for index in range(images)]


def as_mask(drawn: Corruption, grid: Grid) -> np.ndarray:
    """(rows, columns) bool: the corrupted patches."""
    mask = np.zeros(grid, bool)
    mask.flat[drawn.positions.numpy()] = True
    return mask


# --- patterns ---


def test_every_image_has_exactly_k_distinct_corrupted_patches():
    for drawn in draws(CorruptionConfig(rate=0.3), images=50):
        positions = drawn.positions.tolist()
        assert len(positions) == 19 == len(set(positions))
        assert positions == sorted(positions)


@pytest.mark.parametrize(("grid", "side", "rate", "blocks"), [((8, 8), 2, 0.6, 10), ((6, 9), 3, 0.5, 3)])
def test_blocks_are_whole_squares_on_their_grid_and_all_are_hit_alike(grid, side, rate, blocks):
    config = CorruptionConfig(pattern="blocks", block=side, rate=rate)
    seeds = 1000
    rows = grid[0] // side
    columns = grid[1] // side
    hits = np.zeros((rows, columns))
    for seed in range(seeds):
        drawn = draw(config, grid, seed, 0, 0)
        positions = drawn.positions.tolist()
        assert positions == sorted(set(positions))
        patches = as_mask(drawn, grid).reshape(rows, side, columns, side)
        squares = patches.any((1, 3))
        assert (patches == squares[:, None, :, None]).all()
        assert squares.sum() == blocks
        hits += squares
    share = blocks / hits.size
    assert abs(hits / seeds - share).max() < 5 * (share * (1 - share) / seeds) ** 0.5


def blockwise_one_by_one(seed: int, grid: Grid, count: int) -> list[int]:
    """BEiT's algorithm 1 on sets of patches, from the same numbers."""
    rows, columns = grid
    numbers = iter(uniform(Stream.CORRUPTION, seed, 0, 0, 40_000).tolist())
    corrupted: set[int] = set()
    while len(corrupted) < count:
        area_number, ratio_number, row_number, column_number = itertools.islice(numbers, 4)
        smallest = min(16, count)
        left = count - len(corrupted)
        area = smallest
        if left > smallest:
            area += area_number * (left - smallest)
        ratio = math.exp(math.log(0.3) + ratio_number * 2 * math.log(1 / 0.3))
        height = min(rows, max(1, round(math.sqrt(area * ratio))))
        width = min(columns, max(1, round(math.sqrt(area / ratio))))
        top = int(row_number * (rows - height + 1))
        start = int(column_number * (columns - width + 1))
        for row in range(top, top + height):
            for column in range(start, start + width):
                if len(corrupted) < count:
                    corrupted.add(row * columns + column)
    return sorted(corrupted)


@pytest.mark.parametrize(
    ("grid", "rate", "count"), [((14, 14), 0.4, 78), ((8, 8), 0.4, 26), ((4, 4), 0.4, 6), ((3, 12), 0.75, 27)]
)
def test_rectangles_cover_exactly_k_patches(grid, rate, count):
    config = CorruptionConfig(pattern="blockwise", rate=rate)
    for seed in range(1000):
        positions = draw(config, grid, seed, 0, 0).positions.tolist()
        assert len(positions) == len(set(positions)) == count
        if seed < 100:
            assert positions == blockwise_one_by_one(seed, grid, count)


def visible_below(pattern: str) -> float:
    """Share of corrupted patches with a visible patch below them."""
    grid = (14, 14)
    config = CorruptionConfig(pattern=pattern, rate=0.4)
    masks = np.stack([as_mask(draw(config, grid, seed, 0, 0), grid) for seed in range(200)])
    above = masks[:, :-1]
    below = masks[:, 1:]
    return 1 - below[above].mean()


def test_rectangles_keep_together():
    assert visible_below("random") == pytest.approx(0.6, abs=0.03)  # 60 % of the patches are visible
    assert visible_below("blockwise") < 0.3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(pattern="stripes"), r"corruption\.pattern is stripes; it must be one of random, blocks, blockwise"),
        (dict(pattern="blocks", block=3), r"corruption\.block is 3; it must be a divisor of the grid .*\(8 x 8\)"),
        (dict(pattern="blocks", block=8), r"corruption\.block is 8; it must be a divisor .*, and smaller"),
        (dict(pattern="blocks", block=4, rate=0.1), r"corruption\.rate is 0\.1; .*1 to 3 of 4 blocks"),
        (dict(pattern="blockwise", rate=0.001), r"corruption\.rate is 0\.001; .* of 64 patches"),
    ],
)
def test_a_pattern_that_cannot_be_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        draw(CorruptionConfig(**settings), (8, 8), 0, 0, 0)


@pytest.mark.parametrize(
    "positions",
    [
        [1, 5, 5],
        [-1, 3],
        [3, 64],
        [],
        np.arange(64),
        np.arange(64) < 32,  # a mask
        np.array([1.0, 5.0]),
        np.array([[1, 5]]),
        None,  # a function without a return
    ],
)
def test_positions_that_are_not_some_of_the_patches_are_refused(positions, monkeypatch):
    """Drawn with replacement, for example, patches would count twice."""
    monkeypatch.setitem(PATTERNS, "mine", lambda *_: np.array(positions))
    with pytest.raises(UserError, match=r"^corruption\.pattern is mine, which chose \[.*from 0 to 63"):
        draw(CorruptionConfig(pattern="mine"), (8, 8), 0, 0, 0)


def test_a_pattern_that_corrupts_other_numbers_of_patches_is_refused(monkeypatch):
    monkeypatch.setitem(PATTERNS, "mine", lambda _, grid, uniform: np.arange(2 + int(60 * uniform(1)[0])))
    with pytest.raises(UserError, match=r"^corruption\.pattern is one that corrupts \{.*\} patches"):
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
    second = draw(config, (8, 8), 3, 5, 7)
    for tensor, same in zip(first, second, strict=True):
        assert tensor is same is None or torch.equal(tensor, same)
    for other in ((4, 5, 7), (3, 6, 7), (3, 5, 8)):
        assert not torch.equal(first.positions, draw(config, (8, 8), *other).positions)


def test_a_draw_describes_no_error_that_it_does_not_raise(monkeypatch):
    """To describe the positions takes half of the time of a draw."""
    monkeypatch.setattr(np, "array2string", lambda *_, **__: pytest.fail("an error was described"))
    draw(CorruptionConfig(), (8, 8), 0, 0, 0)


def test_a_corruption_carries_what_it_needs():
    def parts(**settings) -> set[str]:
        of_batch = stack(draws(CorruptionConfig(**settings), images=3))
        return {name for name, part in of_batch._asdict().items() if part is not None}

    always = {"positions", "kinds", "sources"}
    assert parts() == always
    assert parts(pattern="multiblock") == always | {"hidden"}


# --- kinds and sources ---


def test_shares_of_kinds_and_positions_are_as_asked():
    corruptions = draws(CorruptionConfig(mask=0.5, random=0.3, keep=0.2))
    kinds = np.concatenate([each.kinds for each in corruptions])
    for kind, share in ((Kind.MASK, 0.5), (Kind.RANDOM, 0.3), (Kind.KEEP, 0.2)):
        assert abs((kinds == kind).mean() - share) < 5 * (0.25 / len(kinds)) ** 0.5
    positions = np.concatenate([each.positions for each in corruptions])
    shares = np.bincount(positions, minlength=64) / len(corruptions)
    assert abs(shares - 0.5).max() < 5 * (0.25 / len(corruptions)) ** 0.5


@pytest.mark.parametrize("alone", ["mask", "random", "keep"])
def test_a_kind_can_be_the_only_one(alone):
    shares = {"mask": 0.0, "random": 0.0, "keep": 0.0} | {alone: 1.0}
    corruptions = draws(CorruptionConfig(**shares), images=50)
    assert all((each.kinds == Kind[alone.upper()]).all() for each in corruptions)


def test_random_is_any_other_patch_and_never_itself():
    corruptions = draws(CorruptionConfig(mask=0.0, random=1.0, keep=0.0), (2, 4))
    sources = torch.cat([each.sources for each in corruptions])
    positions = torch.cat([each.positions for each in corruptions])
    assert (sources != positions).all()
    counts = torch.bincount(sources[positions == 3], minlength=8)
    assert counts[3] == 0
    others = counts[torch.arange(8) != 3]
    assert (others > 0.7 * counts.sum() / 7).all()


# --- embeddings ---


def test_corrupt_against_a_loop():
    torch.manual_seed(0)
    embeddings = torch.randn(3, 10, 4)
    mask_token = torch.randn(4)
    of_batch = draw_batch(CorruptionConfig(mask=0.4, random=0.4, keep=0.2), (2, 5))
    expected = embeddings.clone()
    for image in range(3):
        for position, kind, source in zip(*(field[image] for field in of_batch[:3]), strict=True):
            if kind == Kind.MASK:
                expected[image, position] = mask_token
            if kind == Kind.RANDOM:
                expected[image, position] = embeddings[image, source]
    assert set(of_batch.kinds.flatten().tolist()) == set(Kind)
    assert torch.equal(corrupt(embeddings, mask_token, of_batch), expected)


def test_gradients_reach_the_mask_and_the_source():
    embeddings = torch.zeros(1, 3, 2, requires_grad=True)
    mask_token = torch.zeros(2, requires_grad=True)
    of_batch = Corruption(
        positions=torch.tensor([[0, 1]]),
        kinds=torch.tensor([[Kind.MASK, Kind.RANDOM]]),
        sources=torch.tensor([[0, 2]]),
        hidden=torch.empty(1, 0, dtype=torch.int64),
    )
    corrupt(embeddings, mask_token, of_batch).sum().backward()
    assert mask_token.grad.tolist() == [1, 1]
    assert embeddings.grad[0, :, 0].tolist() == [0, 0, 2]
