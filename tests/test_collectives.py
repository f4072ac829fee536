"""What processes send in a step, counted in a process group that pretends to have many processes.

What is sent never arrives: numbers, order and waiting are not shown, and bytes are those of tensors, not of a wire.
"""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpp.config import OptimConfig, RunConfig
from mpp.training import parallel
from mpp.training.optim import build_optimizer

GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"


@pytest.fixture
def group_of_eight(monkeypatch):
    """This process is the first of eight, the others of which are pretended, in a sharded run."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setattr(parallel, "broadcast", lambda tensor: tensor)

    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    distributed.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of the largest tensor of each, by name and type."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            largest = max(filter(torch.is_tensor, tree_leaves(args)), key=torch.numel)
            key = function.overloadpacket.__name__, largest.dtype
            self.calls[key] += 1
            self.bytes[key] += largest.nbytes
        return function(*args, **(kwargs or {}))


def shard(model, precision="bf16", **run):
    """The model as the first of eight processes has it."""
    AcceleratorState._reset_state(True)
    real = Accelerator(cpu=True, mixed_precision=precision)
    pretended = SimpleNamespace(
        device=real.device,
        num_processes=8,
        mixed_precision=real.mixed_precision,
        prepare_model=real.prepare_model,
        prepare=lambda optimizer: optimizer,
    )
    return parallel.Sharded(model, pretended, partial(build_optimizer, config=OptimConfig()), RunConfig(**run))


def vit():
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=0)


def count(sharded):
    """The collectives of a forward and backward pass; one before it sets up."""
    for _ in range(2):
        with Collectives() as counted:
            sharded.wrapped(torch.zeros(1, 3, 32, 32)).sum().backward()
    return counted


def test_bf16_gathers_half_the_bytes_and_reduces_in_float32(group_of_eight):
    full = count(shard(vit(), "no"))
    half = count(shard(vit()))
    assert half.calls[GATHER, torch.float32] == 1  # norms, tokens and positions of the whole model
    gathered = half.bytes[GATHER, torch.bfloat16] + half.bytes[GATHER, torch.float32]
    assert 0.5 < gathered / full.bytes[GATHER, torch.float32] < 0.51
    assert half.bytes[SCATTER, torch.float32] == full.bytes[SCATTER, torch.float32]
    assert set(half.calls) == {(GATHER, torch.float32), (GATHER, torch.bfloat16), (SCATTER, torch.float32)}


def test_gradients_travel_in_bf16_where_it_is_asked_for(group_of_eight):
    counted = count(shard(vit(), reduction="bf16"))
    assert counted.calls[SCATTER, torch.bfloat16] == 5 and counted.calls[SCATTER, torch.float32] == 0


def test_each_of_eight_processes_holds_an_eighth(group_of_eight):
    """Of weights, gradients and Muon's state, but for the rows that eight do not divide."""
    sharded = shard(vit())
    count(sharded)
    sharded.optimizer.step()
    parameters = list(sharded.model.parameters())
    state = [each for of_one in sharded.optimizer.state.values() for each in of_one.values() if torch.is_tensor(each)]
    for tensors in (parameters, [each.grad for each in parameters], state):
        held = sum(each.to_local().numel() for each in tensors if isinstance(each, DTensor))
        assert held == pytest.approx(sum(each.numel() for each in tensors) / 8, rel=0.02)
