"""Inputs of networks, their corruption, and weights that all matter: shared by the tests of models."""

import timm
import torch

from mpp.corruption import Corruption, draw, stack

HALVES = ((0.5,) * 3, (0.5,) * 3)
"""Mean and deviation that scale pixels to [-1, 1]."""
MASKED = dict(mask=1.0, random=0.0, keep=0.0)
"""Settings of corruption: each corrupted patch is masked."""


def random_images(count=3, side=32) -> torch.Tensor:
    """Images (B, 3, H, W), uint8, from torch's global generator."""
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)


def small_vit(**changes):
    """A timm model of 4 x 4 patches of 8 pixels; `changes` are arguments of the timm model."""
    torch.manual_seed(0)
    settings = dict(img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=0)
    return timm.create_model("vit_base_patch16_224", **settings | changes).eval()


def by_timm(folder, **options):
    """The encoder of a folder as timm alone loads it, in eval mode."""
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


def scaled(images) -> torch.Tensor:
    """Images from 0 to 255 as a network with the moments HALVES sees them."""
    return (images / 255 - 0.5) / 0.5


def draw_batch(config, grid=(4, 4), images=3) -> Corruption:
    """The corruption of a batch of images, under seed 0."""
    drawn = [draw(config, grid, 0, 0, index) for index in range(images)]
    return stack(drawn)


def names_where(model, optimizer, chosen) -> set[str]:
    """The names of the parameters in the groups that are chosen."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)] for group in optimizer.param_groups if chosen(group) for p in group["params"]}


def scales_of(model, groups) -> dict[str, float]:
    """The rate of each parameter as a share of the whole one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}


def randomize(model, std) -> None:
    """Draw the weights that are trained from a normal distribution: norms, scales and biases all have an effect."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=std)
