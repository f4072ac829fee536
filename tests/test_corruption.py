"""Which patches are corrupted and what becomes of them."""

import math

import numpy as np
import pytest
import torch
from conftest import ROOT

from mpp import corruption
from mpp.config import CorruptionConfig
from mpp.corruption import PATTERNS, Corruption, Kind, corrupt, corrupted_count, draw
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


def draws(config, grid=(8, 8), images=2000):
    return [draw(config, grid, 0, 0, index) for index in range(images)]


def test_every_image_has_exactly_k_distinct_corrupted_patches():
    for drawn in draws(CorruptionConfig(rate=0.3), images=50):
        assert len(drawn.positions) == 19 == len(set(drawn.positions.tolist()))
        assert drawn.positions.tolist() == sorted(drawn.positions.tolist())


def hidden(drawn: Corruption, grid: tuple[int, int]) -> np.ndarray:
    """The grid of patches: which are corrupted."""
    places = np.zeros(grid, bool)
    places.flat[drawn.positions.numpy()] = True
    return places


@pytest.mark.parametrize(("grid", "side", "rate", "blocks"), [((8, 8), 2, 0.6, 10), ((6, 9), 3, 0.5, 3)])
def test_blocks_are_whole_squares_on_their_grid_and_all_are_hit_alike(grid, side, rate, blocks):
    config, hits = CorruptionConfig(pattern="blocks", block=side, rate=rate), 0
    for seed in range(1000):
        drawn = draw(config, grid, seed, 0, 0)
        assert drawn.positions.tolist() == sorted(set(drawn.positions.tolist()))
        cells = hidden(drawn, grid).reshape(grid[0] // side, side, grid[1] // side, side)
        squares = cells.any((1, 3))
        assert (cells == squares[:, None, :, None]).all() and squares.sum() == blocks
        hits = hits + squares
    share = blocks / hits.size
    assert abs(hits / 1000 - share).max() < 5 * (share * (1 - share) / 1000) ** 0.5


def rectangles_one_by_one(seed: int, grid: tuple[int, int], count: int) -> list[int]:
    """BEiT's algorithm 1 on sets of patches, from the same numbers."""
    numbers = iter(uniform(Stream.CORRUPTION, seed, 0, 0, 40_000).tolist())
    found: set[int] = set()
    while len(found) < count:
        size, flatness, down, right = (next(numbers) for _ in range(4))
        smallest, left = min(16, count), count - len(found)
        area = smallest + size * (left - smallest) if left > smallest else smallest
        ratio = math.exp(math.log(0.3) + flatness * 2 * math.log(1 / 0.3))
        height = min(grid[0], max(1, round(math.sqrt(area * ratio))))
        width = min(grid[1], max(1, round(math.sqrt(area / ratio))))
        top, start = int(down * (grid[0] - height + 1)), int(right * (grid[1] - width + 1))
        for row in range(top, top + height):
            for column in range(start, start + width):
                if len(found) < count:
                    found.add(row * grid[1] + column)
    return sorted(found)


@pytest.mark.parametrize(
    ("grid", "rate", "count"), [((14, 14), 0.4, 78), ((8, 8), 0.4, 26), ((4, 4), 0.4, 6), ((3, 12), 0.75, 27)]
)
def test_rectangles_cover_exactly_k_patches(grid, rate, count):
    config = CorruptionConfig(pattern="blockwise", rate=rate)
    for seed in range(1000):
        positions = draw(config, grid, seed, 0, 0).positions.tolist()
        assert len(positions) == len(set(positions)) == count
        if seed < 100:
            assert positions == rectangles_one_by_one(seed, grid, count)


def test_rectangles_keep_together():
    """A visible neighbour is rarer than with random patches, of which 60 % are visible."""
    shown = {}
    for pattern in ("random", "blockwise"):
        config = CorruptionConfig(pattern=pattern, rate=0.4)
        grids = np.stack([hidden(draw(config, (14, 14), seed, 0, 0), (14, 14)) for seed in range(200)])
        shown[pattern] = 1 - grids[:, 1:][grids[:, :-1]].mean()  # below a corrupted patch
    assert shown["random"] == pytest.approx(0.6, abs=0.03) and shown["blockwise"] < 0.3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(pattern="stripes"), r"corruption\.pattern is stripes; it must be one of random, blocks, blockwise"),
        (dict(pattern="blocks", block=3), r"corruption\.block is 3; it must be a divisor of the grid .*\(8 x 8\)"),
        (dict(pattern="blocks", block=8), r"corruption\.block is 8; it must be a divisor .*, and smaller"),
        (dict(pattern="blocks", block=4, rate=0.1), r"corrupts 0 of 4 blocks; it must leave between 1 and 3"),
        (dict(pattern="blockwise", rate=0.001), r"corrupts 0 of 64 patches"),
    ],
)
def test_a_pattern_that_cannot_be_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        draw(CorruptionConfig(**settings), (8, 8), 0, 0, 0)


def test_the_readmes_example_of_another_pattern_works(monkeypatch):
    readme = (ROOT / "mpp" / "README.md").read_text()
    names = vars(corruption).copy()
    exec(readme[readme.index("def whole_rows") : readme.index("PATTERNS[")], names)
    monkeypatch.setitem(PATTERNS, "rows", names["whole_rows"])
    rows = hidden(draw(CorruptionConfig(pattern="rows"), (6, 3), 0, 0, 0), (6, 3))
    assert (rows.all(1) == rows.any(1)).all() and rows.any(1).sum() == 3


def test_shares_of_kinds_and_positions_are_as_asked():
    drawn = draws(CorruptionConfig(mask=0.5, random=0.3, keep=0.2))
    kinds = np.concatenate([d.kinds for d in drawn])
    for kind, share in ((Kind.MASK, 0.5), (Kind.RANDOM, 0.3), (Kind.KEEP, 0.2)):
        assert abs((kinds == kind).mean() - share) < 5 * (0.25 / len(kinds)) ** 0.5
    places = np.bincount(np.concatenate([d.positions for d in drawn]), minlength=64) / len(drawn)
    assert abs(places - 0.5).max() < 5 * (0.25 / len(drawn)) ** 0.5


@pytest.mark.parametrize("alone", ["mask", "random", "keep"])
def test_a_kind_can_be_the_only_one(alone):
    shares = {"mask": 0.0, "random": 0.0, "keep": 0.0} | {alone: 1.0}
    kinds = torch.cat([d.kinds for d in draws(CorruptionConfig(**shares), images=50)])
    assert (kinds == Kind[alone.upper()]).all()


def test_random_is_any_other_patch_and_never_itself():
    config = CorruptionConfig(mask=0.0, random=1.0, keep=0.0)
    drawn = draws(config, (2, 4))
    sources, positions = torch.cat([d.sources for d in drawn]), torch.cat([d.positions for d in drawn])
    assert (sources != positions).all()
    counts = torch.bincount(sources[positions == 3], minlength=8)
    assert counts[3] == 0
    assert (counts[torch.arange(8) != 3] > 0.7 * counts.sum() / 7).all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_draw_is_a_function_of_its_name(pattern):
    config = CorruptionConfig(pattern=pattern)
    again = draw(config, (8, 8), 3, 5, 7)
    assert all(torch.equal(a, b) for a, b in zip(again, draw(config, (8, 8), 3, 5, 7), strict=True))
    for other in ((4, 5, 7), (3, 6, 7), (3, 5, 8)):
        assert not torch.equal(again.positions, draw(config, (8, 8), *other).positions)


def test_corrupt_against_a_loop():
    torch.manual_seed(0)
    embeddings, mask = torch.randn(3, 10, 4), torch.randn(4)
    drawn = [draw(CorruptionConfig(mask=0.4, random=0.4, keep=0.2), (2, 5), 0, 0, i) for i in range(3)]
    corruption = Corruption(*map(torch.stack, zip(*drawn, strict=True)))
    expected = embeddings.clone()
    for image, one in enumerate(drawn):
        for position, kind, source in zip(one.positions, one.kinds, one.sources, strict=True):
            if kind == Kind.MASK:
                expected[image, position] = mask
            if kind == Kind.RANDOM:
                expected[image, position] = embeddings[image, source]
    assert {Kind(int(k)) for d in drawn for k in d.kinds} == set(Kind)
    assert torch.equal(corrupt(embeddings, mask, corruption), expected)


def test_another_image_of_the_batch_may_be_the_source():
    config = CorruptionConfig(mask=0.0, random=1.0, keep=0.0, source="batch")
    batch = 4
    embeddings = torch.arange(batch).view(-1, 1, 1).expand(-1, 16, 1).float()  # the number of the image
    drawn = [draw(config, (4, 4), 0, 0, index) for index in range(batch)]
    corruption = Corruption(*map(torch.stack, zip(*drawn, strict=True)))
    result = corrupt(embeddings, torch.zeros(1), corruption)[..., 0]
    replaced = result.gather(1, corruption.positions)
    assert (replaced != torch.arange(batch)[:, None]).all()
    assert set(replaced.flatten().tolist()) == {0, 1, 2, 3}


def test_gradients_reach_the_mask_and_the_source():
    embeddings, mask = torch.zeros(1, 3, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    rows = ([0, 1], [Kind.MASK, Kind.RANDOM], [0, 2], [0, 0])
    corruption = Corruption(*(torch.tensor([row]) for row in rows), torch.empty(1, 0, dtype=torch.int64))
    corrupt(embeddings, mask, corruption).sum().backward()
    assert mask.grad.tolist() == [1, 1]
    assert embeddings.grad[0, :, 0].tolist() == [0, 0, 2]
