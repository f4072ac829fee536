"""How the processes hold the model: each the whole of it (DDP), or each a share of every tensor (FSDP2).

Either trains the same weights to the same checkpoints. The loop asks for three things: the model that is trained, the
optimiser, and the whole model where somebody looks at it.
"""

import copy
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
from mpp.runtime.launcher import sharding
from mpp.runtime.workarounds import compile_blocks_apart
from mpp.training.optim import build_optimizer


class Parallel(Protocol):
    """A model and its optimiser, prepared for training by all processes together."""

    model: nn.Module
    """What holds the weights: no wrapper is in their names."""
    wrapped: nn.Module
    """What is called in a step: `model`, or its wrapper."""
    optimizer: AcceleratedOptimizer

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """A model of the present weights that a process may call alone: for evaluation and export."""


def prepare(model: nn.Module, accelerator: Accelerator, optim: OptimConfig, run: RunConfig) -> Parallel:
    """The model as the launcher asked for it: sharded, or a copy on each process."""
    return (Sharded if sharding(accelerator) else Replicated)(model, accelerator, optim, run)


def start_compilers(device: torch.device) -> None:
    """Start the processes by which inductor compiles for a GPU, where SIGTERM and SIGHUP do not reach them.

    A launcher sends them to all that belongs to a process. Without them the step that is to be finished could not be.
    To be called after loader processes are forked: compilers are beside threads of this process.
    """
    if device.type == "cuda":
        from torch._inductor.async_compile import AsyncCompile

        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))  # a mask is inherited
        try:
            AsyncCompile.warm_pool()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Replicated:
    """One process, or several by DDP, as Accelerate prepares them."""

    def __init__(self, model: nn.Module, accelerator: Accelerator, optim: OptimConfig, run: RunConfig):
        if run.compile:
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

    def __init__(self, model: nn.Module, accelerator: Accelerator, optim: OptimConfig, run: RunConfig):
        self.device = accelerator.device
        unprepared = dict(device_placement=False, evaluation_mode=True)  # autocast alone; fully_shard moves the shards
        self.aside = accelerator.prepare_model(without_weights(model), **unprepared)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):  # as DDP does: the main process's are everybody's
                tensor.copy_(broadcast(tensor.detach().to(self.device)))
        self.model = self.wrapped = accelerator.prepare_model(model, **unprepared)
        reduced = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if run.reduction == "bf16" else None)
        mesh = init_device_mesh(self.device.type, (accelerator.num_processes,))
        again = sharding(accelerator).reshard_after_forward
        blocks = units(model)
        if run.compile:  # a graph for each rate of drop path
            compile_blocks_apart(len(blocks))
        for block in blocks:
            if run.compile:
                block.forward = torch.compile(block.forward)  # within the unit's hooks, which cannot be compiled
            fully_shard(block, mesh=mesh, mp_policy=reduced, reshard_after_forward=again)
        fully_shard(model, mesh=mesh, mp_policy=reduced)
        if self.device.type == "cpu":  # gloo takes a mean for a sum in some releases of torch
            for unit in (*blocks, model):
                unit.set_force_sum_reduction_for_comms(True)
        self.optimizer = accelerator.prepare(build_optimizer(model, optim))

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        self.aside.to_empty(device=self.device)
        with torch.no_grad():
            for target, own in zip(tensors_of(self.aside), tensors_of(self.model), strict=True):
                target.copy_(whole_tensor(own))
        try:
            yield self.aside.train(self.model.training)
        finally:
            self.aside.to("meta")


def units(model: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered alone: of each stack all but the last."""
    stacks = [getattr(module, "blocks", None) for module in model.modules()]
    stacks = [stack for stack in stacks if isinstance(stack, nn.ModuleList | nn.Sequential)]
    blocks = [block for stack in stacks for block in stack[:-1] if not isinstance(block, nn.ModuleList)]
    within = {inner for block in blocks for inner in block.modules() if inner is not block}
    return [block for block in blocks if block not in within]


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model on torch's `meta` device, which takes no memory."""
    memo = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. All processes have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Tensors that may be sharded, whole; one after the other, so that no GPU holds more than one of them.

    Args:
        keep: whether this process wants them, on the CPU. The others get an empty dict.
    """
    result = {}
    for name, tensor in tensors.items():
        whole = whole_tensor(tensor)
        if keep:
            result[name] = whole.cpu() if isinstance(tensor, DTensor) else whole
    return result


def read_tensors(file: Path, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """The tensors of a safetensors file; where `like` says for a name a sharded one, the rows of this process alone."""
    with safe_open(file, framework="pt") as stored:
        names: list[str] = stored.keys()
        return {name: read_tensor(stored, name, like(name)) for name in names}


def read_tensor(stored: safe_open, name: str, like: Tensor | None) -> Tensor:
    """A tensor of an open file; sharded where `like` is, and of its shape (an optimiser counts steps, too)."""
    part = stored.get_slice(name)
    if not isinstance(like, DTensor) or tuple(part.get_shape()) != tuple(like.shape):
        return stored.get_tensor(name)
    first, count = rows_of_process(like)
    rows = part[first : first + count] if count else stored.get_tensor(name)[:0]
    options = dict(shape=like.shape, stride=like.stride(), run_check=False)
    return DTensor.from_local(rows.to(like.device), like.device_mesh, like.placements, **options)


def rows_of_process(tensor: DTensor) -> tuple[int, int]:
    """First row and number of rows of this process; a tensor is sharded by rows, as `Tensor.chunk` does it."""
    size = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(tensor.shape[0], size * tensor.device_mesh.get_local_rank()), len(tensor.to_local())
