"""Floating-point operations that training executes: the one place where they are counted.

Matrix products count two operations a multiply-add, everything else nothing. Values that are computed a second time
to save memory do not count: the scores of fused attention in its backward pass, and the activations of checkpointing.
So a budget of operations means the same with either.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from mpp.config import OptimConfig
from mpp.corruption import Corruption
from mpp.models.adaptation import merge
from mpp.training.optim import build_optimizer
from mpp.training.parallel import without_weights
from mpp.training.task import ImageTask


def flops_of_step(task: ImageTask, image_count: int, config: OptimConfig) -> int:
    """Operations of a step: forward and backward pass of so many images, and the optimiser's.

    Gradients that `optim.frozen_steps` drops count, since they are computed.
    """
    return task.flops() * image_count + optimizer_flops(task.model, config)


def executed_flops(model: nn.Module, *inputs: Tensor | Corruption, backward: bool = True) -> int:
    """Operations of a forward (and backward) pass over these inputs, counted without computing them.

    Tokens that the last block skips do not count. Nor do the products by which narrow matrices become changes of
    weights (`model.lora_rank`): their number does not depend on the images, and is a thousandth of a step's.
    """
    model = merge(without_weights(model))
    for module in model.modules():
        module.grad_checkpointing = False
    with flop_counter() as counter:
        outputs = model(*(part.to("meta") for part in inputs))
        if isinstance(outputs, tuple):
            outputs = outputs[0]  # a teacher's, the others, have no gradients
        if backward:
            outputs.sum().backward()
    return counter.get_total_flops()


def optimizer_flops(model: nn.Module, config: OptimConfig) -> int:
    """Operations of one step of the optimiser, counted without computing them: Muon's matrix products.

    Adam and SGD have no products. Each matrix counts once, however many processes iterate it.
    """
    if config.name != "muon":
        return 0
    model = without_weights(model)
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    with flop_counter() as counter:
        optimizer.step()
    return counter.get_total_flops()


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """A counter: while open, it counts the operations that are executed; `get_total_flops()` is their number.

    Attention is computed step by step meanwhile: torch has no formula for each of its fused kernels.
    """
    own = {torch.ops.aten.convolution_backward: convolution_backward_flops}
    with FlopCounterMode(display=False, custom_mapping=own) as counter, sdpa_kernel(SDPBackend.MATH):
        yield counter


def convolution_backward_flops(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    wanted: Sequence[bool],
    **_: Any,
) -> int:
    """Operations of the gradients of a convolution's input and weight, as far as they are wanted.

    Each takes as many as the forward pass. torch's own formula does not divide the weight's by the groups.
    """
    return conv_flop_count(x_shape, w_shape, grad_shape, transposed) * (wanted[0] + wanted[1])
