"""Floating-point operations that training executes: the one place where they are counted.

Matrix products count two operations a multiply-add, the rest nothing. What is computed a second time to save memory
does not count: the scores that fused attention computes again in its backward pass, and the activations of
checkpointing. So a budget of operations means the same with either.
"""

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpp.config import OptimConfig
from mpp.corruption import Corruption
from mpp.training.muon import Muon
from mpp.training.optim import parameter_groups
from mpp.training.parallel import without_weights
from mpp.training.task import ImageTask

KERNELS = ("efficient_attention", "flash_attention", "flash_attention_for_cpu", "cudnn_attention")
"""torch's kernels of fused attention. torch 2.14 has no formula for the CPU's."""


def update_flops(task: ImageTask, images: int, config: OptimConfig) -> int:
    """Operations of an update: of so many images, forward and backward, and of the optimiser."""
    return task.flops() * images + optimizer_flops(task.model, config)


def executed_flops(model: nn.Module, *inputs: Tensor | Corruption, backward: bool = True) -> int:
    """Operations of a forward (and backward) pass over these inputs, counted without computing them.

    What the last block skips does not count.
    """
    model = without_weights(model)
    for module in model.modules():
        if getattr(module, "grad_checkpointing", False):
            module.grad_checkpointing = False
    with flop_counter() as counter:
        outputs = model(*(part.to("meta") for part in inputs))
        if backward:
            (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()  # a teacher's have no gradients
    return counter.get_total_flops()


def optimizer_flops(model: nn.Module, config: OptimConfig) -> int:
    """Operations of one step of the optimiser, counted without computing them: Muon's matrix products.

    Adam and SGD have no products. Each matrix counts once, however many processes iterate it.
    """
    if config.name != "muon":
        return 0
    groups = [group for group in parameter_groups(model, config) if group["use_muon"]]
    return sum(muon_flops(matrix.shape) for group in groups for matrix in group["params"])


@cache
def muon_flops(shape: torch.Size) -> int:
    """Operations of Muon's step for one matrix. A deep model has many of the same shape."""
    matrix = nn.Parameter(torch.empty(shape, device="meta"))
    matrix.grad = torch.empty_like(matrix)
    with flop_counter() as counter:
        Muon([dict(params=[matrix], use_muon=True)], lr=1.0).step()
    return counter.get_total_flops()


def flop_counter() -> FlopCounterMode:
    """A counter of operations: while open, it counts what is executed; `get_total_flops()` says how many."""
    named = {f"_scaled_dot_product_{kernel}": fused_attention for kernel in KERNELS}
    named |= {f"{name}_backward": fused_attention_backward for name in named}
    formulas = {getattr(torch.ops.aten, name): formula for name, formula in named.items()}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def fused_attention(query: torch.Size, key: torch.Size, value: torch.Size, *_, **__) -> int:
    """Operations of fused attention: queries times keys, and weights times values. Shapes are (B, heads, T, d)."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def fused_attention_backward(_: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *__, **___) -> int:
    """Operations of its backward pass: each of the two products has two gradients."""
    return 2 * fused_attention(query, key, value)
