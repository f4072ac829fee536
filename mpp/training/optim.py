"""Parameter groups, optimiser, learning-rate schedule, Polyak averaging."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import timm.optim
import timm.optim.muon
import torch
from timm.models._manipulate import group_with_matcher
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mpp.config import OptimConfig, require
from mpp.errors import UserError
from mpp.runtime.hardware import bf16_is_native

TOGETHER = 2**24  # numbers of the matrices that Muon iterates together: what bounds the memory
NATIVE = {True: torch.bfloat16, False: torch.float32}  # what Muon iterates in
TIMMS_STEP = inspect.unwrap(timm.optim.Muon.step)  # torch wraps it where one is built, and would call hooks again
TIMMS_MUON, TIMMS_NADAMW = timm.optim.muon.muon, timm.optim.muon.nadamw
UNDECAYED = ("token", "pos_embed", "position_bias")  # [class], [mask], registers, position embeddings and biases


class Muon(timm.optim.Muon):
    """timm's Muon, with four things more.

    Like torch's fused optimisers it changes no weight while `found_inf` is 1. The verdict stays on the device: nothing
    waits for it. Muon's state does change then, so the verdict has to stand.

    Its Newton-Schulz iteration computes in bf16, as timm has it, where the hardware does. Elsewhere it is fp32, because
    emulated bf16 takes a CPU some 30 times as long.

    Matrices of the same shape are iterated together, in batched products, and what comes before and after is done for
    all of them by torch's `foreach` functions: see `muon_by_shape`. torch's products of a batch are those of
    its matrices, to the bit.

    Where the model is sharded, each process iterates its part of the matrices. (As timm has it, each product of each
    iteration would be communicated, and rounded in another way.) NAdamW, for all that is no matrix of a block, takes
    each process's shards.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None):
        timm.optim.muon.muon, timm.optim.muon.nadamw = muon_by_shape, nadamw_of_parts
        try:
            return self.step_unless_found(closure)
        finally:
            timm.optim.muon.muon, timm.optim.muon.nadamw = TIMMS_MUON, TIMMS_NADAMW

    def step_unless_found(self, closure=None):
        """timm's step; with `found_inf`, one at rate 0 and without gradients."""
        reads_nothing = self.defaults["capturable"]  # on a GPU, which the host does not wait for
        if self.found_inf is None or not (reads_nothing or self.found_inf):
            return TIMMS_STEP(self, closure)
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] * (1 - self.found_inf)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own_part(parameter.grad).masked_fill_(self.found_inf.bool(), 0)  # 0 times NaN is NaN
        try:
            return TIMMS_STEP(self, closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


def muon_by_shape(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_bufs: list[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_steps: int,
    ns_coefficients: str,
    eps: float,
    safety_factor: float,
    adjust_lr_fn: str,
    scale_eps: bool,
    **of_convolutions: bool | str,
) -> None:
    """timm's `muon` of matrices (m, n), those of a shape together. It changes `params` and `momentum_bufs`.

    Args:
        params: matrices, or shards of them by rows; so are `grads` and `momentum_bufs`.
    """
    coefficients = timm.optim.muon.resolve_ns_coefficients(ns_coefficients, timm.optim.muon._COEFFICIENTS)
    iterate = partial(timm.optim.muon.zeropower_via_newtonschulz, steps=ns_steps, coefficients=coefficients, eps=eps)
    iterate = partial(iterate, safety_factor=safety_factor, scale_eps=scale_eps, dtype=NATIVE[bf16_is_native()])
    by_shape: dict[torch.Size, list[int]] = {}
    for index, parameter in enumerate(params):
        by_shape.setdefault(parameter.shape, []).append(index)
    for shape, indices in by_shape.items():
        scale = -lr * timm.optim.muon.get_lr_scale(shape, adjust_lr_fn)
        for some in batches_of(indices, shape, params[indices[0]]):
            own, gradients, averages = (
                [own_part(part[index]) for index in some] for part in (params, grads, momentum_bufs)
            )
            torch._foreach_mul_(own, 1 - lr * weight_decay)
            torch._foreach_lerp_(averages, gradients, 1 - momentum)
            updates = torch._foreach_lerp(gradients, averages, momentum) if nesterov else averages
            found = orthogonalized(updates, params[some[0]], iterate)
            if isinstance(scale, Tensor):
                torch._foreach_mul_(found, scale)
            torch._foreach_add_(own, found, alpha=1 if isinstance(scale, Tensor) else scale)


def nadamw_of_parts(*lists: list[Tensor], **options: Any) -> None:
    """timm's `nadamw` of what this process has: it goes number by number, and on a GPU by functions without shards."""
    TIMMS_NADAMW(*([own_part(tensor) for tensor in each] for each in lists), **options)


def batches_of(indices: list[int], shape: torch.Size, like: Tensor) -> Iterator[list[int]]:
    """The matrices that are iterated together: as many as take little memory, of each process where they are shared."""
    processes = like.device_mesh.size() if isinstance(like, DTensor) else 1
    count = processes * max(1, TOGETHER // shape.numel())
    yield from (indices[first : first + count] for first in range(0, len(indices), count))


def orthogonalized(updates: list[Tensor], like: Tensor, iterate: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Newton-Schulz of updates of one shape; of shards, each process iterates its part of the matrices.

    Args:
        updates: (m, n) each; or this process's rows of each.
        like: a parameter that one of them is for.
        iterate: of matrices (k, m, n).
    Returns:
        float32, as `updates` are shared.
    """
    if not isinstance(like, DTensor):
        return list(iterate(torch.stack(updates)).float())
    mesh, rows = like.device_mesh, like.shape[0]
    processes, group = mesh.size(), mesh.get_group()
    most = -(-rows // processes)  # rows of a share; the last ones may have fewer
    count = -(-len(updates) // processes)  # matrices of a process
    held = updates[0].new_zeros(processes, count, most, like.shape[1])
    for number, update in enumerate(updates):
        held[number // count, number % count, : len(update)] = update
    sent = torch.empty_like(held)
    torch.distributed.all_to_all_single(sent, held, group=group)  # to the rows of all processes, of its matrices
    whole = sent.transpose(0, 1).flatten(1, 2)  # (count, processes * most, n)
    whole[:, :rows] = iterate(whole[:, :rows])
    sent = whole.unflatten(1, (processes, most)).transpose(0, 1).contiguous()
    torch.distributed.all_to_all_single(held, sent, group=group)
    return [held[number // count, number % count, : len(update)] for number, update in enumerate(updates)]


def own_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Muon with NAdamW, Adam with decoupled weight decay, or SGD with momentum; fused if torch can (shards: not SGD).

    Raises:
        UserError: Muon for a model without transformer blocks; layer decay for one whose layers timm does not know;
            Polyak averages for one with running statistics.
    """
    groups = parameter_groups(model, config)
    if config.average is not None and any(name.endswith("running_mean") for name, _ in model.named_buffers()):
        least = "null: the batch norms' running statistics would be those of other weights"
        raise UserError(f"optim.average is {config.average}; for this model it must be {least}")
    if config.name == "muon":
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        options = dict(capturable=True) if on_gpu else {}  # no number is read from the device
        shared = dict(lr=config.lr, fallback_lr_scale=config.adam_scale, betas=config.betas)
        optimizer: torch.optim.Optimizer = Muon(groups, momentum=config.inertia(), nesterov=True, **shared, **options)
    elif config.name == "adam":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    else:
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.inertia(), fused=not sharded)
    if config.average is not None:
        PolyakAverage(optimizer, config.average)
    return optimizer


def skips_what_is_not_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes no weight while `found_inf`, on the device, is 1."""
    return isinstance(optimizer, timm.optim.Muon) or bool(optimizer.defaults.get("fused"))


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """Parameters by what is done to them: decayed ones first, the others after them.

    Biases, norms, tokens and position embeddings do not decay. With `optim.name=muon` a group says by `use_muon`
    whether its parameters are orthogonalised; with `optim.layer_decay` it says by `lr_scale` its share of the rate.
    """
    matrices = block_matrices(model) if config.name == "muon" else set()
    scales = layer_scales(model, config.layer_decay) if config.layer_decay is not None else {}
    groups: dict[tuple, dict] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kept = parameter.ndim < 2 or any(word in name.rsplit(".", 1)[-1] for word in UNDECAYED)
            key = (kept, name not in matrices, -scales.get(name, 1.0))
            group = groups.setdefault(key, {"params": [], "weight_decay": 0.0 if kept else config.weight_decay})
            group["params"].append(parameter)
            if matrices:
                group["use_muon"] = name in matrices
            if scales:
                group["lr_scale"] = scales.get(name, 1.0)
    return [groups[key] for key in sorted(groups)]


def block_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon orthogonalises: the weights of linear layers in transformer blocks.

    Raises:
        UserError: there are none.
    """
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = {f"{name}.weight" for name in linear if "blocks" in name.split(".")}
    if not names:
        raise UserError(
            "optim.name is muon, which is for the matrices of a ViT's blocks; this model has none: use adam"
        )
    return names


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Parameter of the encoder -> its share of the learning rate: `decay` once for each layer above it (BEiT, MAE).

    The layers are timm's: stem, blocks, and the head with the norm that some encoders have after pooling. A norm before
    pooling is of the last block (in BEiT and MAE it has the whole rate). What is not
    in the encoder, such as the head, has the whole rate.

    Raises:
        UserError: timm does not know the layers.
    """
    encoder = getattr(model, "encoder", None)
    inside = next((name for name, module in model.named_modules() if module is encoder), "encoder")
    known = hasattr(encoder, "group_matcher")
    require(known, "optim.layer_decay", decay, "null for this model, whose layers timm does not know")
    names, head = [name for name, _ in encoder.named_parameters()], ""  # a name that is of no layer is of the head
    layers = group_with_matcher(((name, None) for name in (*names, head)), encoder.group_matcher(), reverse=True)
    return {f"{inside}.{name}": decay ** (layers[head] - layers[name]) for name in names}


class PolyakAverage:
    """Polyak averaging (the paper's Table 2) after each step, kept in the optimiser's state: checkpoints have it.

    After t updates the decay is at most (1 + t) / (10 + t), so that the initial weights are soon forgotten. The paper
    says nothing of that. It is 0.9991 after 10,000 updates, and 0.9999 after 90,000.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float):
        self.decay, self.updates = decay, 0
        optimizer.register_step_post_hook(self)

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        first = optimizer.state[parameters[0]]
        if "average" not in first:
            first["updates"] = torch.zeros(())
            for parameter in parameters:
                optimizer.state[parameter]["average"] = parameter.clone()
        elif self.updates == 0:  # resumed
            self.updates = int(first["updates"])
        self.updates += 1
        first["updates"].fill_(self.updates)
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        get_ema_multi_avg_fn(decay)([optimizer.state[p]["average"] for p in parameters], parameters, None)


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
    warmup = config.warmup(steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    match config.schedule:
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            return config.lr * (1 - progress)
        case "constant":
            return config.lr
    raise AssertionError(config.schedule)
