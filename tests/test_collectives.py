"""What processes send in a step, counted in a process group that pretends to have many processes."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpp.config import ModelConfig, OptimConfig, RunConfig
from mpp.models.encoder import build_encoder
from mpp.training import parallel
from mpp.training.optim import build_optimizer

GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


@pytest.fixture
def group_of(monkeypatch):
    """group_of(16): this process is the first of 16, the others of which are pretended, in a sharded run."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setattr(parallel, "broadcast", lambda tensor: tensor)

    def begin(processes: int) -> None:
        distributed.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())

    yield begin
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


def shard(model: nn.Module, processes: int, precision: str = "bf16", **run) -> parallel.Sharded:
    """The model as the first of so many processes has it."""
    AcceleratorState._reset_state(True)
    real = Accelerator(cpu=True, mixed_precision={"bf16": "bf16", "fp32": "no"}[precision])
    pretended = SimpleNamespace(
        device=real.device,
        num_processes=processes,
        mixed_precision=real.mixed_precision,
        prepare_model=real.prepare_model,
        prepare=lambda optimizer: optimizer,
    )
    return parallel.Sharded(model, pretended, partial(build_optimizer, config=OptimConfig()), RunConfig(**run))


def vit(depth: int = 4) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=depth, num_classes=0)


def count(sharded: parallel.Sharded) -> Collectives:
    """The collectives of a forward and backward pass; one before it sets up."""
    for _ in range(2):
        with Collectives() as counted:
            sharded.wrapped(torch.zeros(1, 3, 32, 32)).sum().backward()
    return counted


def test_bf16_gathers_half_the_bytes_and_reduces_in_float32(group_of):
    group_of(8)
    full = count(shard(vit(), 8, "fp32"))
    half = count(shard(vit(), 8, "bf16"))
    assert half.calls[GATHER, torch.float32] == 1  # norms, tokens and positions of the whole model
    gathered = half.bytes[GATHER, torch.bfloat16] + half.bytes[GATHER, torch.float32]
    assert 0.5 < gathered / full.bytes[GATHER, torch.float32] < 0.51
    assert half.bytes[SCATTER, torch.float32] == full.bytes[SCATTER, torch.float32]
    assert set(half.calls) == {(GATHER, torch.float32), (GATHER, torch.bfloat16), (SCATTER, torch.float32)}


def test_gradients_travel_in_bf16_where_it_is_asked_for(group_of):
    group_of(8)
    counted = count(shard(vit(), 8, reduction="bf16"))
    assert counted.calls[SCATTER, torch.bfloat16] == 5 and counted.calls[SCATTER, torch.float32] == 0


@pytest.mark.parametrize("position", ["learned", "relative", "none"])
def test_parameters_that_autocast_does_not_round_are_computed_with_in_float32(group_of, position):
    """So are the tokens that blocks add to, also where no positions in float32 are added to them."""
    group_of(2)
    config = ModelConfig(width=16, depth=3, heads=2, img_size=32, position=position, activation_checkpointing=True)
    sharded = shard(build_encoder(config, channels=3), 2)
    block_inputs = []
    types = {nn.Linear: set(), nn.LayerNorm: set(), nn.Conv2d: set()}

    def note(module, _):
        for kind in types:
            if isinstance(module, kind):
                types[kind].update(parameter.dtype for parameter in module.parameters())

    for module in sharded.model.modules():
        module.register_forward_pre_hook(note)
    for block in sharded.model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs[0].dtype))
    sharded.wrapped(torch.zeros(1, 3, 32, 32)).sum().backward()
    assert set(block_inputs) == {torch.float32} and len(block_inputs) >= 3
    assert types == {nn.Linear: {torch.bfloat16}, nn.LayerNorm: {torch.float32}, nn.Conv2d: {torch.bfloat16}}


def test_gradients_are_sent_after_each_pass(group_of):
    group_of(8)
    sharded = shard(vit(), 8)
    images = torch.zeros(1, 3, 32, 32)
    with Collectives() as counted:
        for _ in range(2):
            with sharded.without_sync():
                sharded.wrapped(images).sum().backward()
        sharded.wrapped(images).sum().backward()
    assert counted.calls[SCATTER, torch.float32] == 5 * 3
