"""Parameter groups, optimiser, learning-rate schedule, Polyak averaging."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mpp.config import OptimConfig

UNDECAYED = ("token", "pos_embed")  # [class], [mask], registers, position embeddings


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices and filters, which decay; biases, norms, tokens and position embeddings, which do not."""
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kept = parameter.ndim < 2 or any(word in name.rsplit(".", 1)[-1] for word in UNDECAYED)
            (undecayed if kept else decayed).append(parameter)
    return [dict(params=decayed, weight_decay=weight_decay), dict(params=undecayed, weight_decay=0.0)]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, or SGD with momentum, in torch's fused implementations."""
    groups = parameter_groups(model, config.weight_decay)
    if config.name == "adam":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    if config.average is not None:
        optimizer.register_step_post_hook(lambda *_: update_average(optimizer, config.average))
    return optimizer


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Polyak averaging (the paper's Table 2), kept in the optimiser's state, so that checkpoints have it.

    Early on the decay is (1 + t) / (10 + t) after t updates, so that the initial weights are soon forgotten.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "average" not in state:
                state["average"], state["updates"] = parameter.clone(), parameter.new_zeros(())
            updates = state["updates"].add_(1)  # stays on the device: nothing waits for it
            state["average"].lerp_(parameter, 1 - ((1 + updates) / (10 + updates)).clamp(max=decay))


def averages(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter and its Polyak average."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter, optimizer.state[parameter]["average"]) for parameter in parameters]


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer, average: bool) -> Iterator[None]:
    """While open, the averages (if `average`) are the model's weights."""
    swapped = averages(optimizer) if average else []
    swap(swapped)
    try:
        yield
    finally:
        swap(swapped)


@torch.no_grad()
def swap(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Exchange the values of tensors, pair by pair."""
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of update `step` (from 0) of `steps`: linear warm-up to the base rate, then decay towards 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    match config.schedule:
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            return config.lr * (1 - progress)
        case "constant":
            return config.lr
    raise AssertionError(config.schedule)
