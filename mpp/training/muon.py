"""Muon (Jordan et al., 2024): orthogonalised momentum for matrices, and NAdamW for all other parameters."""

from collections.abc import Iterator
from typing import Any

import torch
from timm.optim.muon import zeropower_via_newtonschulz
from timm.optim.nadamw import nadamw
from torch import Tensor

from mpp.models.teachers import local_part
from mpp.runtime.hardware import bf16_is_native
from mpp.training.parallel import shard_like, whole_tensor

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
        params: groups, each with `params` and `use_muon`, and settings that differ from the defaults. With `use_muon`
            the parameters are matrices (m, n).
        defaults: settings of all groups: `lr`; `weight_decay`, times the learning rate; `momentum` of the matrices;
            `betas` of NAdamW, and `adam_scale`, its learning rate as a multiple of `lr`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["use_muon"]:
                for matrices in of_one_shape(parameters):
                    self.step_matrices(matrices, group)
            elif parameters:
                self.step_nadamw(parameters, group)

    def step_matrices(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Muon's step for matrices (m, n) of one shape; it changes their gradients."""
        gradients = [matrix.grad for matrix in matrices]
        averages = self.averages(matrices, "momentum_buffer")
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, averages, group["momentum"])  # Nesterov's
        orthogonal = orthogonalize(torch.stack([whole_tensor(gradient) for gradient in gradients]))
        updates = [shard_like(update, matrix) for update, matrix in zip(orthogonal, matrices, strict=True)]
        size = 0.2 * max(matrices[0].shape) ** 0.5  # the root mean square of Adam's updates is about 0.2
        torch._foreach_add_(matrices, updates, alpha=-group["lr"] * size)

    def step_nadamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """NAdamW's step: Adam with Nesterov's momentum and decoupled weight decay."""
        gradients = [parameter.grad for parameter in parameters]
        averages = self.averages(parameters, "exp_avg"), self.averages(parameters, "exp_avg_sq")
        steps = [self.state[parameter].setdefault("step", torch.zeros(())) for parameter in parameters]
        beta1, beta2 = group["betas"]
        nadamw(
            *(list(map(local_part, tensors)) for tensors in (parameters, gradients, *averages)),
            steps,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"] * group["adam_scale"],
            weight_decay=group["weight_decay"],
            eps=EPS,
            caution=False,
            maximize=False,
            max_lr=None,
        )

    def averages(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """A moving average of the state of each parameter, zero at first."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]


def of_one_shape(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of matrices of one shape: batched products are faster. (In bf16 a CPU may round small ones otherwise.)"""
    for shape in dict.fromkeys(matrix.shape for matrix in matrices):
        same = [matrix for matrix in matrices if matrix.shape == shape]
        count = max(1, MAX_BATCH_ELEMENTS // shape.numel())
        for first in range(0, len(same), count):
            yield same[first : first + count]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Newton-Schulz iterations: all singular values of each matrix become about 1.

    They are in bf16 where the hardware computes in it. Elsewhere, emulated bf16 takes a CPU about 30 times as long.

    Args:
        matrices: (k, m, n).
    Returns:
        (k, m, n) float32.
    """
    dtype = torch.bfloat16 if bf16_is_native() else torch.float32
    iterations = len(NEWTON_SCHULZ_COEFFICIENTS)
    return zeropower_via_newtonschulz(matrices, iterations, NEWTON_SCHULZ_COEFFICIENTS, EPS, dtype=dtype).float()
