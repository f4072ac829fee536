"""Muon (Jordan et al., 2024): orthogonalised momentum for matrices, and NAdamW for all other parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from timm.optim.muon import zeropower_via_newtonschulz
from timm.optim.nadamw import nadamw
from torch import Tensor

from mpp.runtime.hardware import bf16_is_native
from mpp.training.parallel import local_part, shard_like, whole_like

EPS = 1e-7  # of the norm that Newton-Schulz divides by, and of NAdamW
NEWTON_SCHULZ_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""One quintic polynomial an iteration (leloykun.github.io/ponder/muon-opt-coeffs, modded-nanogpt; timm's default)."""
MAX_BATCH_ELEMENTS = 2**24  # numbers of the matrices that are orthogonalised together: this bounds the memory


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum for the groups with `use_muon`, NAdamW for the others; both decay decoupled.

    The matrices' updates are scaled to the size of Adam's (Liu et al., 2025): both parts take the same learning rate.

    Where the model is sharded, each process orthogonalises whole matrices, as where it has copies: their products would
    be communicated in each iteration, and rounded in another way. NAdamW takes each process's shards.

    Args:
        groups: with `params`, `use_muon`, and any of the settings below but `capturable`. With `use_muon` the
            parameters are matrices (m, n).
        weight_decay: times the learning rate.
        momentum: of the matrices.
        betas: of NAdamW.
        adam_scale: learning rate of NAdamW, as a multiple of `lr`.
        capturable: whether the state stays on the GPU, and no number of it is read by the host.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_scale: float = 1.0,
        capturable: bool = False,
    ):
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            betas=betas,
            adam_scale=adam_scale,
            capturable=capturable,
        )
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            if group["use_muon"]:
                self.step_matrices(parameters, group)
            else:
                self.step_nadamw(parameters, group)

    def step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Muon's step, for all matrices of a shape together: batched products are faster, and have the same bits."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, matrices in by_shape.items():
            count = max(1, MAX_BATCH_ELEMENTS // shape.numel())
            for first in range(0, len(matrices), count):
                self.step_one_shape(matrices[first : first + count], group)

    def step_one_shape(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Muon's step for matrices (m, n) of one shape."""
        weights = [local_part(matrix) for matrix in matrices]
        gradients = [local_part(matrix.grad) for matrix in matrices]
        averages = [local_part(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, averages, group["momentum"])  # Nesterov's
        whole = [whole_like(update, matrix) for update, matrix in zip(updates, matrices, strict=True)]
        orthogonal = orthogonalize(torch.stack(whole))
        updates = [local_part(shard_like(update, matrix)) for update, matrix in zip(orthogonal, matrices, strict=True)]
        size = 0.2 * max(matrices[0].shape) ** 0.5  # the root mean square of Adam's updates is about 0.2
        torch._foreach_add_(weights, updates, alpha=-group["lr"] * size)

    def step_nadamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """NAdamW's step: Adam with Nesterov's momentum and decoupled weight decay."""
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                device = parameter.device if group["capturable"] else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        nadamw(
            [local_part(parameter) for parameter in parameters],
            [local_part(parameter.grad) for parameter in parameters],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [local_part(state["step"]) for state in states],
            capturable=group["capturable"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"] * group["adam_scale"],
            weight_decay=group["weight_decay"],
            eps=EPS,
            caution=False,
            maximize=False,
            max_lr=None,
        )


def newton_schulz_dtype() -> torch.dtype:
    """Type of the iterations, in which matrices are sent, too: bf16 where the hardware computes in it.

    Elsewhere it is fp32: emulated bf16 takes a CPU about 30 times as long.
    """
    return torch.bfloat16 if bf16_is_native() else torch.float32


def orthogonalize(matrices: Tensor) -> Tensor:
    """Newton-Schulz iterations: all singular values of each matrix become about 1.

    Args:
        matrices: (k, m, n).
    Returns:
        (k, m, n) float32.
    """
    orthogonal = zeropower_via_newtonschulz(
        matrices, len(NEWTON_SCHULZ_COEFFICIENTS), NEWTON_SCHULZ_COEFFICIENTS, EPS, dtype=newton_schulz_dtype()
    )
    return orthogonal.float()
