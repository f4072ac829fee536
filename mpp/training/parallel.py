"""How the processes hold the model: each the whole of it (DDP), or each a share of every tensor (FSDP2).

Either trains the same weights to the same checkpoints.
"""

import copy
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mpp.config import OptimConfig, RunConfig
from mpp.runtime.hardware import share_of_cores
from mpp.runtime.launcher import sharding
from mpp.runtime.workarounds import compile_blocks_apart
from mpp.training.optim import build_optimizer


class Parallel(Protocol):
    """A model and its optimiser, prepared for training by all processes together."""

    model: nn.Module
    """The model without a wrapper, whose name would be in those of the weights."""
    wrapped: nn.Module
    """The model, or its wrapper, that a step calls."""
    optimizer: AcceleratedOptimizer
    communicates_each_pass: bool
    """Whether the processes wait for each other in each forward pass, and not in the last one of a step alone."""

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """The model with its present weights, unsharded, which a process may call alone: to evaluate and export."""


def prepare(model: nn.Module, accelerator: Accelerator, optim: OptimConfig, run: RunConfig) -> Parallel:
    """Prepare the model as the launcher asked for it: sharded, or a copy on each process."""
    kind = Sharded if sharding(accelerator) else Replicated
    return kind(model, accelerator, optim, run)


def start_compilers(device: torch.device) -> None:
    """Start the processes in which inductor compiles for a GPU, with SIGTERM and SIGHUP blocked.

    A launcher sends these signals to a process and its children. Without compilers the last step could not be finished.
    Call it after loader processes are forked: it starts threads in this process.
    """
    if device.type != "cuda":
        return
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # torch would start 32 for each process of this machine
        config.compile_threads = min(config.compile_threads, share_of_cores())

    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))  # a mask is inherited
    try:
        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Replicated:
    """One process, or several by DDP, as Accelerate prepares them."""

    communicates_each_pass = False

    def __init__(self, model: nn.Module, accelerator: Accelerator, optim: OptimConfig, run: RunConfig):
        if run.compile is True:
            model.compile()
        model.to(accelerator.device)  # before the optimiser is built, which asks where it is
        self.wrapped, self.optimizer = accelerator.prepare(model, build_optimizer(model, optim))
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.broadcast_buffers = False  # in each step; as an argument, torch would warn of it
        self.model = accelerator.unwrap_model(self.wrapped)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        yield self.model


class Sharded:
    """FSDP2 (`fully_shard`): weights, gradients and optimiser state are split over the processes by rows.

    A unit is a block, which is gathered for its own forward and backward pass. The last block of each stack goes with
    all that is outside of blocks: its parts are called one by one (mpp/models/blocks.py), and its backward pass is
    the first. Accelerate would choose units by class, and shards on GPUs alone; so it starts the processes, and torch
    shards.

    Weights are kept and gathered in float32, so that they are computed with as DDP's are, under autocast.
    """

    communicates_each_pass = True

    def __init__(self, model: nn.Module, accelerator: Accelerator, optim: OptimConfig, run: RunConfig):
        self.device = accelerator.device
        autocast_only = dict(device_placement=False, evaluation_mode=True)  # fully_shard moves the shards
        self.unsharded = accelerator.prepare_model(without_weights(model), **autocast_only)
        """A copy of the model, without memory while it is not asked for."""
        with torch.no_grad():
            for tensor in state_tensors(model):  # as DDP does: the main process's weights are those of all
                tensor.copy_(broadcast(tensor.detach().to(self.device)))
        self.model = self.wrapped = accelerator.prepare_model(model, **autocast_only)
        self.shard(accelerator, run)
        self.optimizer = accelerator.prepare(build_optimizer(model, optim))

    def shard(self, accelerator: Accelerator, run: RunConfig) -> None:
        """Shard the model's units, and compile them if `run.compile`."""
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if run.reduction == "bf16" else None)
        mesh = init_device_mesh(self.device.type, (accelerator.num_processes,))
        reshard = sharding(accelerator).reshard_after_forward
        units = sharding_units(self.model)
        if run.compile is True:  # a graph for each rate of drop path
            compile_blocks_apart(len(units))
        for unit in units:
            if run.compile is True:
                unit.forward = torch.compile(unit.forward)  # within the unit's hooks, which cannot be compiled
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        if self.device.type == "cpu":  # gloo takes a mean for a sum in some releases of torch
            for unit in (*units, self.model):
                unit.set_force_sum_reduction_for_comms(True)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        self.unsharded.to_empty(device=self.device)
        with torch.no_grad():
            for target, source in zip(state_tensors(self.unsharded), state_tensors(self.model), strict=True):
                target.copy_(whole_tensor(source))
        try:
            yield self.unsharded.train(self.model.training)
        finally:
            self.unsharded.to("meta")


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one by one: of each stack all but the last, none within another."""
    blocks = []
    for module in model.modules():
        stack = getattr(module, "blocks", None)
        if isinstance(stack, nn.ModuleList | nn.Sequential):
            blocks += [block for block in stack[:-1] if not isinstance(block, nn.ModuleList)]
    inner = set()
    for block in blocks:
        inner.update(module for module in block.modules() if module is not block)
    return [block for block in blocks if block not in inner]


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model on torch's `meta` device, which takes no memory."""
    memo: dict[int, Tensor] = {}
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    return copy.deepcopy(model, memo)


def state_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, then buffers."""
    yield from model.parameters()
    yield from model.buffers()


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. All processes have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_tensors(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Tensors that may be sharded, whole; one after the other, so that no GPU holds more than one of them.

    Args:
        keep: whether this process wants them, on the CPU. The others get an empty dict.
    """
    gathered = {}
    for name, tensor in tensors.items():
        whole = whole_tensor(tensor)
        if keep:
            gathered[name] = whole.cpu() if isinstance(tensor, DTensor) else whole
    return gathered


def read_tensors(file: Path, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """The tensors of a safetensors file; of those that are sharded, this process's rows.

    Args:
        like: the present tensor of a name, which may be sharded.
    """
    with safe_open(file, framework="pt") as stored:
        names: list[str] = stored.keys()
        return {name: read_tensor(stored, name, like(name)) for name in names}


def read_tensor(stored: safe_open, name: str, like: Tensor | None) -> Tensor:
    """A tensor of an open file; sharded where `like` is, and of its shape (an optimiser counts steps, too)."""
    stored_rows = stored.get_slice(name)
    if not isinstance(like, DTensor) or tuple(stored_rows.get_shape()) != tuple(like.shape):
        return stored.get_tensor(name)
    first, count = rows_of_process(like)
    rows = stored_rows[first : first + count] if count else stored.get_tensor(name)[:0]
    return DTensor.from_local(
        rows.to(like.device),
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
        run_check=False,
    )


def rows_of_process(tensor: DTensor) -> tuple[int, int]:
    """First row and number of rows of this process; a tensor is sharded by rows, as `Tensor.chunk` does it."""
    rows_per_process = -(-tensor.shape[0] // tensor.device_mesh.size())
    first = rows_per_process * tensor.device_mesh.get_local_rank()
    return min(tensor.shape[0], first), len(tensor.to_local())
