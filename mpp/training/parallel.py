"""The model on several processes: each holds the whole of it (DDP), or a share of every tensor (FSDP2).

Either trains the same weights to the same checkpoints. Copies may be compiled by torch (`run.compile`); whatever torch
cannot compile is computed as it is.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mpp.config import RunConfig, require
from mpp.errors import UserError, one_line
from mpp.models.adaptation import has_low_rank_changes
from mpp.runtime.messages import warn
from mpp.runtime.processes import sharding
from mpp.runtime.start import is_out_of_memory

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Replicated:
    """A model and its optimiser: on one process, or copies on several by DDP, as Accelerate prepares them.

    Attributes:
        model: without a wrapper, whose name would be in those of the weights.
        wrapped: the model, or its wrapper, that a step calls.
        optimizer: Accelerate's wrapper of the one that `build` makes.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, build: BuildOptimizer, run: RunConfig):
        if run.compile is True:
            model.compile()
            model._compiled_call_impl = or_eager(model._compiled_call_impl, model._call_impl)
        model.to(accelerator.device)  # before the optimiser is built, which asks where it is
        self.accelerator = accelerator
        self.wrapped, self.optimizer = accelerator.prepare(model, build(model))
        self.wrapped.broadcast_buffers = False  # DDP's, in each step; as an argument, torch would warn of it
        self.model = accelerator.unwrap_model(self.wrapped)

    def without_sync(self) -> AbstractContextManager[None]:
        """While open, for all passes of a step but the last: gradients stay here, as far as they have to."""
        return self.accelerator.no_sync(self.wrapped)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """The model in eval mode with its present weights, unsharded; one process may call it by itself."""
        yield self.model.eval()


class Sharded:
    """As `Replicated`, by FSDP2 (`fully_shard`): weights, gradients and optimiser state are split by rows.

    A unit is a block, which is gathered for its own forward and backward pass. The last block of each stack goes with
    all that is outside of blocks: its parts are called one by one (mpp/models/plain.py), and its backward pass is
    the first. Accelerate would choose units by class, and shards only on GPUs; so it starts the processes, and torch
    shards.

    Weights are kept in float32. With bf16, those that autocast would round to bf16 (`bf16_parameters`) are gathered in
    bf16, and all others, of the whole model, in float32: so the model computes as DDP's does. A module of FSDP2 has one
    type for all of its parameters, so the others belong to a module around the model. Gradients are summed in float32,
    or as `run.reduction` says.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, build: BuildOptimizer, run: RunConfig):
        allowed = "null where the launcher shards the model; start it without FSDP: only narrow matrices are trained"
        require(not has_low_rank_changes(model), "model.lora_rank", "set", allowed)
        require(run.compile is not True, "run.compile", True, "false where the launcher shards the model")
        self.device = accelerator.device
        autocast_only = dict(device_placement=False, evaluation_mode=True)  # fully_shard moves the shards
        self.unsharded = accelerator.prepare_model(without_weights(model), **autocast_only)
        """A copy of the model, without memory while it is not asked for."""
        with torch.no_grad():
            for tensor in state_tensors(model):  # as DDP does: the main process's weights are those of all
                tensor.copy_(broadcast(tensor.detach().to(self.device)))
        self.model = self.wrapped = accelerator.prepare_model(model, **autocast_only)
        reduce_dtype = torch.bfloat16 if run.reduction == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        mesh = init_device_mesh(self.device.type, (accelerator.num_processes,))
        if accelerator.mixed_precision == "bf16":
            self.wrapped = Outer(self.model)
            ignored = bf16_parameters(self.model)
            fully_shard(self.wrapped, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=ignored)
            policy = replace(policy, param_dtype=torch.bfloat16)
        reshard = sharding(accelerator).reshard_after_forward
        for unit in sharding_units(self.model):
            shard_rest(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        shard_rest(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.optimizer = accelerator.prepare(build(self.model))

    def without_sync(self) -> AbstractContextManager[None]:
        """Gradients are sent after each pass: kept, they would be those of the whole model on each process."""
        return nullcontext()

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        self.unsharded.to_empty(device=self.device)
        with torch.no_grad():
            for target, source in zip(state_tensors(self.unsharded), state_tensors(self.model), strict=True):
                target.copy_(whole_tensor(source))
        yield self.unsharded.eval()
        self.unsharded.to("meta")


class Outer(nn.Module):
    """A module around the model: of FSDP2, with the parameters that are gathered in another type."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.model(*args, **options)


def bf16_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that autocast rounds to bf16 wherever they are used: only those of linear layers and convolutions."""
    rounded = set()
    others = set()
    for module in model.modules():
        chosen = rounded if type(module) in (nn.Linear, nn.Conv2d) else others
        chosen.update(module.parameters(recurse=False))
    return rounded - others


def shard_rest(module: nn.Module, **options: Any) -> None:
    """`fully_shard` with all parameters of a module that are not sharded yet."""
    sharded = {parameter for parameter in module.parameters() if isinstance(parameter, DTensor)}
    fully_shard(module, ignored_params=sharded, **options)


def or_eager(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, and from its first failure on, with a warning, `eager`: an error that is not the compiler's recurs.

    Kernels of the backward pass may be compiled in it: their errors end the run.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal compiled
        try:
            return compiled(*arguments, **options)
        except Exception as error:
            if compiled is eager or isinstance(error, UserError) or is_out_of_memory(error):
                raise
            cause = f"{type(error).__name__}: {one_line(error)}"[:300]  # it may quote the compiler's whole command
            warn(f"run.compile: torch.compile fails ({cause}); the model is computed without it, more slowly")
        compiled = eager
        return compiled(*arguments, **options)

    return call


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one by one: of each stack all but the last, none within another."""
    blocks: dict[nn.Module, None] = {}  # in order, each once
    for module in model.modules():
        stack = getattr(module, "blocks", None)
        if isinstance(stack, nn.ModuleList | nn.Sequential):
            blocks |= dict.fromkeys(block for block in stack[:-1] if not isinstance(block, nn.ModuleList))
    inner = {module for block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if block not in inner]


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model on torch's `meta` device, which takes no memory."""
    return copy.deepcopy(model).to("meta")


def state_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, then buffers."""
    yield from model.parameters()
    yield from model.buffers()


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. All processes have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(whole: Tensor, like: Tensor | None) -> Tensor:
    """A tensor, sharded where `like` is and of its shape: an optimiser counts steps of a sharded weight, too."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def refuse_unlike_weights(model: nn.Module, step: int) -> None:
    """Raise UserError, on all processes, if their copies of the weights differ: those that are not sharded.

    Each process steps by itself, so a fault of one would train another model there, and only the main one's is saved.

    Args:
        step: steps done.
    """
    copied = [parameter.detach() for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    digest = sum(tensor.float().view(torch.int32).sum(dtype=torch.int64) for tensor in copied)
    if len(set(gather_object([int(digest)]))) > 1:
        raise UserError(
            f"the weights of the processes differ after step {step}, and nothing of it is saved: one computes "
            "otherwise than the others; the same command continues from the last checkpoint"
        )
