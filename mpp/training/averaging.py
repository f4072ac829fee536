"""Polyak averaging of the weights (the paper's Table 2)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class PolyakAverage:
    """Averages the weights after each step, in the optimiser's state: checkpoints have the averages.

    Args:
        warmup: whether the decay is at most (1 + t) / (10 + t) after t steps, so that the first weights are soon
            forgotten: 0.9991 after 10,000 steps, and 0.9999 only after 90,000. The paper says nothing of that. Without
            it the weights after the first step keep a share of decay^(t - 1): 13.5 % with 0.9999 after 20,000 steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float, warmup: bool = True):
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        optimizer.register_step_post_hook(self)

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_) -> None:
        parameters = trained_so_far(optimizer)
        states = [optimizer.state[parameter] for parameter in parameters]
        count = next((state["updates"] for state in states if "updates" in state), None)
        if count is not None and self.updates == 0:  # resumed
            self.updates = int(count)
        self.updates += 1
        if not states:
            return
        if count is None:
            count = states[0]["updates"] = torch.zeros(())
        count.fill_(self.updates)
        for parameter, state in zip(parameters, states, strict=True):
            if "average" not in state:
                state["average"] = parameter.clone()
        averages = [state["average"] for state in states]
        get_ema_multi_avg_fn(self.decay_of_step())(averages, parameters, None)

    def decay_of_step(self) -> float:
        """The decay of the step that was counted last."""
        if not self.warmup:
            return self.decay
        return min(self.decay, (1 + self.updates) / (10 + self.updates))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of an optimiser, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_so_far(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that were trained up to this step: those of an encoder that is frozen at first come later."""
    trained = []
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None or "average" in optimizer.state[parameter]:
            trained.append(parameter)
    return trained


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, the model's weights are their averages."""
    swap_averages(optimizer)
    try:
        yield
    finally:
        swap_averages(optimizer)


@torch.no_grad()
def swap_averages(optimizer: torch.optim.Optimizer) -> None:
    """Exchange the values of the weights and of their averages. Weights that were never trained have none."""
    for parameter in parameters_of(optimizer):
        if "average" not in optimizer.state[parameter]:
            continue
        average = optimizer.state[parameter]["average"]
        weights = parameter.clone()
        parameter.copy_(average)
        average.copy_(weights)
