"""Which patches are corrupted and what becomes of them."""

import numpy as np
import pytest
import torch

from mpp.config import CorruptionConfig
from mpp.corruption import Corruption, Kind, corrupt, corrupted_count, draw


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


def draws(config, patches=64, images=2000):
    return [draw(config, patches, 0, 0, index) for index in range(images)]


def test_every_image_has_exactly_k_distinct_corrupted_patches():
    for drawn in draws(CorruptionConfig(rate=0.3), images=50):
        assert len(drawn.positions) == 19 == len(set(drawn.positions.tolist()))
        assert drawn.positions.tolist() == sorted(drawn.positions.tolist())


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
    drawn = draws(config, patches=8)
    sources, positions = torch.cat([d.sources for d in drawn]), torch.cat([d.positions for d in drawn])
    assert (sources != positions).all()
    counts = torch.bincount(sources[positions == 3], minlength=8)
    assert counts[3] == 0
    assert (counts[torch.arange(8) != 3] > 0.7 * counts.sum() / 7).all()


def test_a_draw_is_a_function_of_its_name():
    config = CorruptionConfig()
    again = draw(config, 64, 3, 5, 7)
    assert all(torch.equal(a, b) for a, b in zip(again, draw(config, 64, 3, 5, 7), strict=True))
    for other in ((4, 5, 7), (3, 6, 7), (3, 5, 8)):
        assert not torch.equal(again.positions, draw(config, 64, *other).positions)


def test_corrupt_against_a_loop():
    torch.manual_seed(0)
    embeddings, mask = torch.randn(3, 10, 4), torch.randn(4)
    drawn = [draw(CorruptionConfig(mask=0.4, random=0.4, keep=0.2), 10, 0, 0, i) for i in range(3)]
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
    drawn = [draw(config, 16, 0, 0, index) for index in range(batch)]
    corruption = Corruption(*map(torch.stack, zip(*drawn, strict=True)))
    result = corrupt(embeddings, torch.zeros(1), corruption)[..., 0]
    replaced = result.gather(1, corruption.positions)
    assert (replaced != torch.arange(batch)[:, None]).all()
    assert set(replaced.flatten().tolist()) == {0, 1, 2, 3}


def test_gradients_reach_the_mask_and_the_source():
    embeddings, mask = torch.zeros(1, 3, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    corruption = Corruption(*(torch.tensor([row]) for row in ([0, 1], [Kind.MASK, Kind.RANDOM], [0, 2], [0, 0])))
    corrupt(embeddings, mask, corruption).sum().backward()
    assert mask.grad.tolist() == [1, 1]
    assert embeddings.grad[0, :, 0].tolist() == [0, 0, 2]
