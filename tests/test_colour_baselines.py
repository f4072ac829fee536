"""The baselines that need no model: colour statistics of a grid over the image."""

import pytest
import torch

from evaluation.frozen.encoder import load_frozen_encoder


def test_floors_are_colour_statistics():
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    images[0, 0] = 255  # red
    images[1, 2, :, 32:] = 255  # right half blue
    (pixels,) = load_frozen_encoder("floor:pixels")(images, "mean", [1])
    assert pixels.shape == (2, 192)
    assert pixels[0].view(64, 3).tolist() == [[1, 0, 0]] * 64
    (colors,) = load_frozen_encoder("floor:colors")(images, "mean", [1])
    assert colors.shape == (2, 512)
    assert colors[0].nonzero().tolist() == [[7 * 64]]
    assert colors[0, 7 * 64] == 64
    assert (colors[1, 0], colors[1, 7]) == (32, 32)


def test_another_floor_is_refused():
    with pytest.raises(ValueError, match="must be floor:pixels or floor:colors"):
        load_frozen_encoder("floor:size")
