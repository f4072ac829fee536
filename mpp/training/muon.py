"""Muon (Jordan et al., 2024): orthogonalised momentum for matrices, and NAdamW for all other parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from timm.optim.nadamw import nadamw
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from mpp.runtime.hardware import bf16_is_native

EPS = 1e-7  # of the norm that Newton-Schulz divides by, and of NAdamW
NEWTON_SCHULZ_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""One quintic polynomial an iteration (leloykun.github.io/ponder/muon-opt-coeffs, modded-nanogpt; timm's default)."""
ALL_GATHER = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
"""torch's function by its new name, or by its old one, which newer releases warn of."""
MAX_BATCH_ELEMENTS = 2**24  # numbers of the matrices that are orthogonalised together: this bounds the memory


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum for the groups with `use_muon`, NAdamW for the others; both decay decoupled.

    The matrices' updates are scaled to the size of Adam's (Liu et al., 2025): both parts take the same learning rate.

    Like torch's fused optimisers it changes no weight while `found_inf` is 1. That flag may be on the device: nothing
    waits for it. The optimiser's state does change then, so the flag has to stay 1.

    Where the model is sharded, or there are `sharers`, each process orthogonalises some of the matrices. NAdamW goes
    number by number, and takes each process's shards.

    Args:
        groups: with `params`, `use_muon`, and any of the settings below but `capturable`. With `use_muon` the
            parameters are matrices (m, n).
        weight_decay: times the learning rate.
        momentum: of the matrices.
        betas: of NAdamW.
        adam_scale: learning rate of NAdamW, as a multiple of `lr`.
        capturable: whether the state stays on the GPU, and no number of it is read by the host.
    """

    found_inf: Tensor | None = None
    sharers: ProcessGroup | None = None
    """Processes that all have the whole model, and share the work on its matrices. None: each does all of it."""

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
        skipping = self.found_inf is not None and (self.defaults["capturable"] or bool(self.found_inf))
        not_finite = self.found_inf.bool() if skipping else None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            lr = group["lr"]
            if skipping:
                lr = lr * (1 - self.found_inf)
                for parameter in parameters:
                    local_part(parameter.grad).masked_fill_(not_finite, 0)  # 0 times NaN is NaN
            if not parameters:
                continue
            if group["use_muon"]:
                self.step_matrices(parameters, group, lr)
            else:
                self.step_nadamw(parameters, group, lr)

    def step_matrices(self, parameters: list[Tensor], group: dict[str, Any], lr: float | Tensor) -> None:
        """Muon's step, for all matrices of a shape together: batched products are faster, and have the same bits."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, matrices in by_shape.items():
            sharers = sharding_group(matrices[0]) if isinstance(matrices[0], DTensor) else self.sharers
            processes = 1 if sharers is None else sharers.size()
            count = processes * max(1, MAX_BATCH_ELEMENTS // shape.numel())
            for first in range(0, len(matrices), count):
                self.step_one_shape(matrices[first : first + count], group, lr)

    def step_one_shape(self, matrices: list[Tensor], group: dict[str, Any], lr: float | Tensor) -> None:
        """Muon's step for matrices (m, n) of one shape."""
        weights = [local_part(matrix) for matrix in matrices]
        gradients = [local_part(matrix.grad) for matrix in matrices]
        averages = [local_part(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, averages, group["momentum"])  # Nesterov's
        if isinstance(matrices[0], DTensor):
            updates = orthogonalize_sharded(updates, matrices[0].shape[0], sharding_group(matrices[0]))
        elif self.sharers is not None:
            updates = orthogonalize_shared(updates, self.sharers)
        else:
            updates = list(orthogonalize(torch.stack(updates)))
        step_size = lr * (0.2 * max(matrices[0].shape) ** 0.5)  # the root mean square of Adam's updates is about 0.2
        if isinstance(step_size, Tensor):
            torch._foreach_mul_(updates, -step_size)
            torch._foreach_add_(weights, updates)
        else:
            torch._foreach_add_(weights, updates, alpha=-step_size)

    def step_nadamw(self, parameters: list[Tensor], group: dict[str, Any], lr: float | Tensor) -> None:
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
            lr=lr * group["adam_scale"],
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
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(newton_schulz_dtype())
    x = x.mT if is_tall else x
    x = x / x.norm(2, dim=(-2, -1), keepdim=True).clamp_(min=EPS)
    x = x.contiguous()
    for a, b, c in NEWTON_SCHULZ_COEFFICIENTS:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b X X^T + c (X X^T)^2
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.mT if is_tall else x
    return x.float()


def orthogonalize_shared(updates: list[Tensor], sharers: ProcessGroup) -> list[Tensor]:
    """Orthogonalise matrices that all processes have: each takes some of them, and all receive the results.

    Where there are more processes than matrices, several take the same matrix, and each sends some of its rows.

    Args:
        updates: the matrices, (m, n).
    Returns:
        Each, float32.
    """
    rows, columns = updates[0].shape
    matrices_per_process = -(-len(updates) // sharers.size())
    senders = max(1, sharers.size() // len(updates))  # of a matrix
    rows_per_sender = -(-rows // senders)
    takers = sharers.size() // senders  # of other matrices than the others
    taker, sender = divmod(sharers.rank(), senders)
    taken = updates[taker * matrices_per_process :][:matrices_per_process]
    share = updates[0].new_zeros(matrices_per_process, rows_per_sender, columns, dtype=newton_schulz_dtype())
    if taken:
        sent = orthogonalize(torch.stack(taken))[:, sender * rows_per_sender :][:, :rows_per_sender]
        share[: len(taken), : sent.shape[1]] = sent
    shares = share.new_empty(sharers.size() * matrices_per_process, rows_per_sender, columns)
    ALL_GATHER(shares, share, group=sharers)
    by_taker = shares.unflatten(0, (sharers.size(), -1))[: takers * senders].unflatten(0, (takers, senders))
    whole = by_taker.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (matrices, rows, columns), padded
    return list(whole[: len(updates), :rows].float())


def orthogonalize_sharded(updates: list[Tensor], rows: int, sharers: ProcessGroup) -> list[Tensor]:
    """Orthogonalise matrices of which each process has some rows: each process takes whole matrices meanwhile.

    Products of sharded matrices would be communicated in each iteration, and rounded in another way.

    Args:
        updates: this process's rows of each matrix.
        rows: of a whole matrix.
    Returns:
        This process's rows of each, float32.
    """
    processes = sharers.size()
    rows_per_process = -(-rows // processes)  # the last ones may have fewer
    matrices_per_process = -(-len(updates) // processes)
    columns = updates[0].shape[1]
    shape = (processes, matrices_per_process, rows_per_process, columns)
    shares = updates[0].new_zeros(shape, dtype=newton_schulz_dtype())
    for number, update in enumerate(updates):
        shares[number // matrices_per_process, number % matrices_per_process, : len(update)] = update
    received = torch.empty_like(shares)
    torch.distributed.all_to_all_single(received, shares, group=sharers)  # all rows of this process's matrices
    whole = received.transpose(0, 1).flatten(1, 2)  # (matrices per process, processes * rows per process, columns)
    whole[:, :rows] = orthogonalize(whole[:, :rows])
    sent = whole.unflatten(1, (processes, rows_per_process)).transpose(0, 1).contiguous()
    torch.distributed.all_to_all_single(shares, sent, group=sharers)
    return [
        shares[number // matrices_per_process, number % matrices_per_process, : len(update)].float()
        for number, update in enumerate(updates)
    ]


def sharding_group(tensor: DTensor) -> ProcessGroup:
    """The processes that have the shards of a tensor: the last dimension of its mesh."""
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
