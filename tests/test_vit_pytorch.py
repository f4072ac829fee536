"""vit-pytorch's masked patch prediction beside the paper's and ours: the differences that elsewhere.md lists."""

import math

import pytest
import torch
from vit_pytorch import ViT
from vit_pytorch.mpp import MPP


def their_model(**settings):
    torch.manual_seed(0)
    encoder = ViT(image_size=32, patch_size=4, num_classes=1, dim=16, depth=1, heads=2, mlp_dim=32)
    return MPP(encoder, patch_size=4, dim=16, **settings)


def patches_before_and_in_the_embedding(model):
    """Patches (B, N, P P C) of random images, and as they come to the projection."""
    images = torch.rand(200, 3, 32, 32)
    seen = []
    model.patch_to_emb.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model(images)
    clean = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(200, 64, -1)
    return clean, seen[0]


def their_class(images, **settings):
    """Levels of red, green and blue of an image that is one patch, by where the loss's gradient is negative."""
    logits = torch.zeros(1, 1, 512, requires_grad=True)
    their_model(**settings).loss(logits, images.expand(1, 3, 4, 4), torch.ones(1, 1, dtype=torch.bool)).backward()
    number = int(logits.grad.argmin())
    return number % 8, number // 8 % 8, number // 64


def test_it_corrupts_15_percent_half_masked_half_random_and_keeps_none():
    """The paper, and ours: 50 %, of which 80, 10 and 10 % are masked, random and kept (test_corruption.py)."""
    model = their_model()
    clean, seen = patches_before_and_in_the_embedding(model)
    masked = (seen == model.mask_token).all(-1)
    random = ~masked & (seen != clean).any(-1)
    corrupted = 200 * math.ceil(0.15 * 64)
    assert masked.sum() / corrupted == pytest.approx(0.5, abs=0.05)
    assert random.sum() / corrupted == pytest.approx(0.5 * 63 / 64, abs=0.05)


def test_its_random_patch_may_be_the_patch_itself():
    model = their_model(mask_prob=1.0, replace_prob=0.0, random_patch_prob=1.0)
    clean, seen = patches_before_and_in_the_embedding(model)
    assert (seen == clean).all(-1).double().mean() == pytest.approx(1 / 64, abs=0.005)


def test_a_mean_on_the_edge_of_two_levels_is_in_the_lower_one():
    """And in the upper one of ours (test_objectives.py)."""
    half = torch.full((1, 3, 4, 4), 0.5)
    assert their_class(half) == (3, 3, 3)
    assert their_class(half + 1e-6) == (4, 4, 4)


def test_of_normalised_images_its_classes_are_wrong_unless_it_is_told_the_statistics_which_stay_on_the_cpu():
    dark, grey = torch.full((1, 3, 1, 1), 0.2), torch.full((1, 3, 1, 1), 0.55)
    statistics = dict(mean=[0.5] * 3, std=[0.5] * 3)
    normalised = [(images - 0.5) / 0.5 for images in (dark, grey)]
    assert [their_class(images) for images in (dark, grey)] == [(1, 1, 1), (4, 4, 4)]
    assert [their_class(images) for images in normalised] == [(0, 0, 0), (0, 0, 0)]
    assert [their_class(images, **statistics) for images in normalised] == [(1, 1, 1), (4, 4, 4)]
    model = their_model(**statistics).to("meta")
    assert model.mask_token.is_meta and not model.loss.mean.is_meta
