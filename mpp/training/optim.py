"""Parameter groups, optimiser, learning-rate schedule, Polyak averaging."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from timm.models._manipulate import group_with_matcher
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mpp.config import OptimConfig, require
from mpp.errors import UserError
from mpp.training.muon import Muon

UNDECAYED = ("token", "pos_embed", "position_bias")  # [class], [mask], registers, position embeddings and biases


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
        optimizer: torch.optim.Optimizer = Muon(
            groups,
            lr=config.lr,
            momentum=config.momentum_or_default(),
            betas=config.betas,
            adam_scale=config.adam_scale,
            capturable=any(parameter.is_cuda for parameter in model.parameters()),
        )
    elif config.name == "adam":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    else:
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum_or_default(), fused=not sharded)
    if config.average is not None:
        PolyakAverage(optimizer, config.average)
    return optimizer


def skips_nonfinite_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes no weight while `found_inf`, on the device, is 1."""
    return isinstance(optimizer, Muon) or bool(optimizer.defaults.get("fused"))


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
