"""Floating-point operations that training executes: the one place where they are counted.

Matrix products count two operations a multiply-add, everything else nothing. Values that are computed a second time
to save memory do not count: the scores of fused attention in its backward pass, and the activations of checkpointing.
So a budget of operations means the same with either.
"""

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpp.config import OptimConfig
from mpp.corruption import Corruption
from mpp.models.adaptation import LowRankChange
from mpp.training.muon import Muon
from mpp.training.optim import parameter_groups
from mpp.training.parallel import without_weights
from mpp.training.task import ImageTask

FUSED_ATTENTION_KERNELS = ("efficient_attention", "flash_attention", "flash_attention_for_cpu", "cudnn_attention")
"""torch's. torch 2.14 has no formula for the CPU's."""


def flops_of_step(task: ImageTask, image_count: int, config: OptimConfig) -> int:
    """Operations of a step: forward and backward pass of so many images, and those that are once in a step.

    Gradients that `optim.frozen_steps` drops count, since they are computed.
    """
    return task.flops() * image_count + low_rank_flops(task.model) + optimizer_flops(task.model, config)


def executed_flops(model: nn.Module, *inputs: Tensor | Corruption, backward: bool = True) -> int:
    """Operations of a forward (and backward) pass over these inputs, counted without computing them.

    Tokens that the last block skips do not count. Nor do products of narrow matrices, whose number does not depend on
    the images: see `low_rank_flops`.
    """
    model = without_weights(model)
    for module in model.modules():
        if getattr(module, "grad_checkpointing", False):
            module.grad_checkpointing = False
    with flop_counter() as counter:
        outputs = model(*(part.to("meta") for part in inputs))
        if isinstance(outputs, tuple):
            outputs = outputs[0]  # a teacher's, the others, have no gradients
        if backward:
            outputs.sum().backward()
    return counter.get_total_flops() - low_rank_flops(model, backward)


def low_rank_flops(model: nn.Module, backward: bool = True) -> int:
    """Operations by which narrow matrices become changes of weights (`model.lora_rank`), and their gradients.

    They count once a step, however many passes and processes repeat them.
    """
    flops = 0
    for module in model.modules():
        if isinstance(module, LowRankChange):
            product = 2 * module.up.numel() * module.down.shape[1]
            flops += 3 * product if backward else product
    return flops


def optimizer_flops(model: nn.Module, config: OptimConfig) -> int:
    """Operations of one step of the optimiser, counted without computing them: Muon's matrix products.

    Adam and SGD have no products. Each matrix counts once, however many processes iterate it.
    """
    if config.name != "muon":
        return 0
    flops = 0
    for group in parameter_groups(model, config):
        if group["use_muon"]:
            flops += sum(muon_flops(matrix.shape) for matrix in group["params"])
    return flops


@cache
def muon_flops(shape: torch.Size) -> int:
    """Operations of Muon's step for one matrix. A deep model has many of the same shape."""
    matrix = nn.Parameter(torch.empty(shape, device="meta"))
    matrix.grad = torch.empty_like(matrix)
    with flop_counter() as counter:
        Muon([dict(params=[matrix], use_muon=True)], lr=1.0).step()
    return counter.get_total_flops()


def flop_counter() -> FlopCounterMode:
    """A counter: while open, it counts the operations that are executed; `get_total_flops()` is their number."""
    formulas = {}
    for kernel in FUSED_ATTENTION_KERNELS:
        name = f"_scaled_dot_product_{kernel}"
        formulas[getattr(torch.ops.aten, name)] = fused_attention
        formulas[getattr(torch.ops.aten, f"{name}_backward")] = fused_attention_backward
    return FlopCounterMode(display=False, custom_mapping=formulas)


def fused_attention(query: torch.Size, key: torch.Size, value: torch.Size, *_, **__) -> int:
    """Operations of fused attention: queries times keys, and weights times values. Shapes are (B, heads, T, d)."""
    queries, keys = math.prod(query[:-1]), key[-2]
    return 2 * queries * keys * (query[-1] + value[-1])


def fused_attention_backward(_: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *__, **___) -> int:
    """Operations of its backward pass: each of the two products has two gradients."""
    return 2 * fused_attention(query, key, value)
