"""Attention by hand: three tokens, integer weights, and the same numbers from the encoder's own attention."""

import math

import pytest
import torch

from mpp.config import ModelConfig
from mpp.models.encoder import build_encoder

TOKENS = torch.tensor([[1, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]]).float()
QUERY = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0]]).float()
KEY = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 1]]).float()
VALUE = torch.tensor([[1, 0, 0, 2], [0, 1, 0, 0], [0, 0, 3, 0], [0, 2, 0, 0]]).float()
SCORES = [[2, 4, 4], [4, 12, 10], [4, 10, 9]]
"""Query times key of each pair of tokens, without the scale."""
VALUES = [[1, 0, 3, 2], [0, 6, 0, 0], [1, 3, 3, 2]]


def attended(scores: list[float]) -> list[float]:
    """The values' mean, weighted by the softmax of a token's scores, in Python's numbers."""
    exponentials = [math.exp(score) for score in scores]
    weights = [each / sum(exponentials) for each in exponentials]
    return [sum(weight * value[channel] for weight, value in zip(weights, VALUES, strict=True)) for channel in range(4)]


@pytest.mark.parametrize("fused", [True, False])
def test_attention_of_three_tokens_is_that_by_hand(fused):
    encoder = build_encoder(ModelConfig(width=4, heads=1, depth=1, img_size=(8, 8), patch_size=4))
    attention = encoder.blocks[0].attn
    attention.fused_attn = fused
    attention.qkv.weight.data = torch.cat([QUERY.T, KEY.T, VALUE.T])
    attention.qkv.bias.data.zero_()
    attention.proj.weight.data = torch.eye(4)
    attention.proj.bias.data.zero_()
    assert attention.scale == 1 / 2  # of width 4
    by_hand = [attended([score / 2 for score in scores]) for scores in SCORES]
    torch.testing.assert_close(attention(TOKENS[None])[0], torch.tensor(by_hand))


def test_scores_and_values_of_the_example():
    """The numbers that the notebook prints."""
    assert ((TOKENS @ QUERY) @ (TOKENS @ KEY).T).tolist() == SCORES
    assert (TOKENS @ VALUE).tolist() == VALUES
    without_scale = attended(SCORES[0])
    assert without_scale == pytest.approx([0.5317, 4.2148, 1.5951, 1.0634], abs=1e-4)
    scaled = attended([score / 2 for score in SCORES[0]])
    assert scaled == pytest.approx([0.5777, 3.8009, 1.7330, 1.1554], abs=1e-4)
