"""Parameter groups, optimiser and learning-rate schedule."""

import math

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
    """Adam with decoupled weight decay, in torch's fused implementation."""
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


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
