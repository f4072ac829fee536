"""Optimiser, its parameter groups, the learning-rate schedule, and Polyak averages of the weights (Table 2)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mpp.config import OptimConfig, require
from mpp.errors import UserError
from mpp.models.plain import has_running_statistics, is_plain, stem_parameters
from mpp.training.muon import Muon

UNDECAYED = ("token", "pos_embed", "position_bias")  # [class], [mask], registers, position embeddings and biases


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Muon with NAdamW, Adam with decoupled weight decay, or SGD with momentum; fused if torch can (shards: not SGD).

    Raises:
        UserError: Muon for a model without transformer blocks; layer decay for one whose layers timm does not know;
            Polyak averages, or frozen steps, for one with running statistics.
    """
    trains_alike = config.average is None and config.frozen_steps == 0
    chosen = f"{config.average}, {config.frozen_steps}"
    allowed = "null, 0 for this model: its batch norms' running statistics would be those of other weights"
    require(trains_alike or not has_running_statistics(model), "optim.average, optim.frozen_steps", chosen, allowed)
    groups = parameter_groups(model, config)
    if config.name == "muon":
        defaults = dict(lr=config.lr, betas=config.betas, adam_scale=config.adam_scale)
        optimizer = Muon(groups, defaults | dict(momentum=config.momentum_or_default()))
    elif config.name == "adam":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    else:
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum_or_default(), fused=not sharded)
    if config.average is not None:
        PolyakAverage(optimizer, config.average, config.average_warmup)
    return optimizer


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """Parameters in groups of the same treatment: decayed ones first, the others after them.

    Biases, norms, tokens and position embeddings do not decay. With `optim.name=muon` the setting `use_muon` of a group
    says whether its parameters are orthogonalised; with `optim.layer_decay`, `lr_scale` is its share of the rate. With
    `optim.frozen_steps` the encoder has groups of its own: torch's fused SGD begins with a whole group.
    """
    matrices = block_matrices(model) if config.name == "muon" else set()
    exempt = exempt_from_decay(model)
    scales = layer_scales(model, config.layer_decay) if config.layer_decay is not None else {}
    frozen_at_first = set(model.encoder.parameters()) if config.frozen_steps else set()
    groups: dict[tuple, dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        undecayed = parameter.ndim < 2 or parameter in exempt or any(word in name.split(".")[-1] for word in UNDECAYED)
        scale = scales.get(parameter, 1.0)
        key = (undecayed, parameter not in matrices, -scale, parameter in frozen_at_first)
        weight_decay = 0.0 if undecayed else config.weight_decay
        group = dict(params=[], weight_decay=weight_decay, use_muon=parameter in matrices, lr_scale=scale)
        groups.setdefault(key, group)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def exempt_from_decay(model: nn.Module) -> set[Tensor]:
    """The parameters that timm exempts from weight decay, such as a rotation's frequencies."""
    exempt = set()
    for module in model.modules():
        names = module.no_weight_decay() if hasattr(module, "no_weight_decay") else ()
        exempt |= {parameter for name, parameter in module.named_parameters() if name in names}
    return exempt


def block_matrices(model: nn.Module) -> set[Tensor]:
    """The parameters that Muon orthogonalises: the trained weights of linear layers in transformer blocks.

    Raises:
        UserError: there are none.
    """
    matrices = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "blocks" in name.split("."):
            matrices |= {each for each in module.parameters(recurse=False) if each.ndim == 2 and each.requires_grad}
    if not matrices:
        raise UserError("optim.name is muon, and no matrix of a transformer block is trained; it must be adam or sgd")
    return matrices


def layer_scales(model: nn.Module, decay: float) -> dict[Tensor, float]:
    """Parameter of the encoder -> its share of the learning rate: `decay` once for each layer above it (BEiT, MAE).

    The layers are timm's: stem, blocks, and the head with the norm that some encoders have after pooling. A norm before
    pooling belongs to the last block (in BEiT and MAE it has the whole rate). Of a plain transformer all that acts
    before the blocks is in the stem, registers and `norm_pre`, too, and so are the frequencies of its rotations.
    Parameters outside of the encoder, such as a head's, have the whole rate.

    Raises:
        UserError: timm does not know the layers.
    """
    encoder = getattr(model, "encoder", None)
    allowed = "null for this model, whose layers timm does not know"
    require(hasattr(encoder, "group_matcher"), "optim.layer_decay", decay, allowed)
    parameters = dict(encoder.named_parameters())
    head = ""  # a name that is of no layer is of the head
    named = SimpleNamespace(named_parameters=lambda: [*parameters.items(), (head, None)])
    layers = group_parameters(named, encoder.group_matcher(), reverse=True)
    if is_plain(encoder):
        layers |= dict.fromkeys(stem_parameters(encoder), 0)
    return {parameter: decay ** (layers[head] - layers[name]) for name, parameter in parameters.items()}


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up to the base rate, then as scheduled."""
    warmup = config.warmup(steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    if config.schedule == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    elif config.schedule == "linear":
        share = 1 - progress
    else:  # constant, and wsd up to its cooldown
        stable = config.stable_steps(steps)
        share = 1 - math.sqrt(max(0, step - stable) / max(1, steps - stable))
    return config.lr * share


class PolyakAverage:
    """Averages the weights after each step, in the optimiser's state: checkpoints have the averages.

    Args:
        warmup: whether the decay is at most (1 + t) / (10 + t) after t steps, so that the first weights are soon
            forgotten: 0.9991 after 10,000 steps, and 0.9999 only after 90,000. The paper says nothing of that. Without
            it the weights after the first step keep a share of decay^(t - 1): 13.5 % with 0.9999 after 20,000 steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float, warmup: bool = True):
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        optimizer.register_step_post_hook(self)

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Average the parameters that are trained: those of an encoder that is frozen at first come later."""
        state = optimizer.state
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in trained:
            if "average" not in state[parameter]:
                state[parameter]["average"] = parameter.clone()
        counts = [state[each]["updates"] for each in trained if "updates" in state[each]]
        count = counts[0] if counts else state[trained[0]].setdefault("updates", torch.zeros(()))
        self.updates = (self.updates or int(count)) + 1  # read from a GPU in the first step of a resumed run alone
        count.fill_(self.updates)
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        get_ema_multi_avg_fn(decay)([state[each]["average"] for each in trained], trained, None)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, the model's weights are their averages."""
    swap_averages(optimizer)
    try:
        yield
    finally:
        swap_averages(optimizer)


@torch.no_grad()
def swap_averages(optimizer: torch.optim.Optimizer) -> None:
    """Exchange the values of the weights and of their averages. Weights that were never trained have none."""
    for parameter, state in optimizer.state.items():
        if "average" in state:
            weights = parameter.clone()
            parameter.copy_(state["average"])
            state["average"].copy_(weights)
