"""The residual stream in bf16 (`model.residual`): tokens between blocks, which float32 positions make float32.

Without autocast nothing changes: tokens that come in float32 stay so.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, LayerScale
from torch import Tensor, nn

from mpp.models.plain import last_step_before_blocks


class ResidualNorm(LayerNorm):
    """timm's layer norm; of bf16 tokens it is bf16, where autocast on a GPU would write float32 copies of them."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return super().forward(x)
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)  # sums are float32 inside


def use_bf16_residual(encoder: nn.Module) -> None:
    """Run an encoder's blocks on bf16 tokens under autocast; its weights and their names stay as they are."""
    last_step_before_blocks(encoder).register_forward_hook(to_autocast_type)  # of every caller
    use_bf16_norms(encoder)
    for block in encoder.blocks:
        if getattr(block, "gamma_1", None) is not None:  # Eva and Beit scale by a parameter, which is float32
            block.register_forward_hook(to_input_type)


def use_bf16_norms(module: nn.Module) -> None:
    """Keep bf16 tokens in bf16 through the norms and scales of a module."""
    for child in module.modules():
        if type(child) is LayerNorm:
            child.__class__ = ResidualNorm
        elif isinstance(child, LayerScale):
            child.register_forward_hook(to_input_type)


def has_bf16_residual(encoder: nn.Module) -> bool:
    """Whether the encoder's blocks run on bf16 tokens: see `use_bf16_residual`."""
    return any(isinstance(module, ResidualNorm) for module in encoder.modules())


def to_autocast_type(_: nn.Module, __: Any, tokens: Tensor) -> Tensor:
    """Hook: the output in bf16 under autocast."""
    device = tokens.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # the meta device has no autocast
        return tokens
    return tokens.to(torch.bfloat16)


def to_input_type(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Hook: the output in the type of the input."""
    return output.to(inputs[0].dtype)
