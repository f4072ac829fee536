"""Inputs of networks, their corruption, and weights that all matter: shared by the tests of models."""

import timm
import torch

from mpp.corruption import Corruption, draw, stack

HALVES = ((0.5,) * 3, (0.5,) * 3)
"""Mean and deviation that scale pixels to [-1, 1]."""


def random_images(count=3, channels=3, side=32) -> torch.Tensor:
    """Images (B, C, H, W), uint8, from torch's global generator."""
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8)


def small_vit(**changes):
    """A timm model of 4 x 4 patches of 8 pixels; `changes` are arguments of timm's."""
    torch.manual_seed(0)
    settings = dict(img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=0)
    return timm.create_model("vit_base_patch16_224", **settings | changes).eval()


def scaled(images) -> torch.Tensor:
    """Images from 0 to 255 as a network with the moments HALVES sees them."""
    return (images / 255 - 0.5) / 0.5


def draw_batch(config, grid=(4, 4), images=3) -> Corruption:
    """The corruption of a batch of images, under seed 0."""
    drawn = [draw(config, grid, 0, 0, index) for index in range(images)]
    return stack(drawn)


def randomize(model, std) -> None:
    """Draw the weights that are trained from a normal distribution: norms, scales and biases all have an effect."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=std)
