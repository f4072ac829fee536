"""Optimiser, its parameter groups, and the learning-rate schedule."""

import math

import torch
from timm.models._manipulate import group_with_matcher
from torch import nn
from torch.distributed.tensor import DTensor

from mpp.config import OptimConfig, require
from mpp.errors import UserError
from mpp.models.plain import has_running_statistics, is_plain, stem_parameters
from mpp.training.averaging import PolyakAverage
from mpp.training.muon import Muon

UNDECAYED_NAMES = ("token", "pos_embed", "position_bias")  # [class], [mask], registers, position embeddings and biases


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Muon with NAdamW, Adam with decoupled weight decay, or SGD with momentum; fused if torch can (shards: not SGD).

    Raises:
        UserError: Muon for a model without transformer blocks; layer decay for one whose layers timm does not know;
            Polyak averages, or frozen steps, for one with running statistics.
    """
    if has_running_statistics(model):
        others = "for this model it must be {}: the batch norms' running statistics would be those of other weights"
        if config.average is not None:
            raise UserError(f"optim.average is {config.average}; {others.format('null')}")
        if config.frozen_steps:
            raise UserError(f"optim.frozen_steps is {config.frozen_steps}; {others.format(0)}")
    groups = parameter_groups(model, config)
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
        PolyakAverage(optimizer, config.average, config.average_warmup)
    return optimizer


def skips_nonfinite_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes no weight while `found_inf`, on the device, is 1."""
    return isinstance(optimizer, Muon) or bool(optimizer.defaults.get("fused"))


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """Parameters in groups of the same treatment: decayed ones first, the others after them.

    Biases, norms, tokens and position embeddings do not decay. With `optim.name=muon` the setting `use_muon` of a group
    says whether its parameters are orthogonalised; with `optim.layer_decay`, `lr_scale` is its share of the rate. With
    `optim.frozen_steps` the encoder has groups of its own: torch's fused SGD begins with a whole group.
    """
    matrices = block_matrices(model) if config.name == "muon" else set()
    exempt = exempt_from_decay(model)
    scales = layer_scales(model, config.layer_decay) if config.layer_decay is not None else {}
    frozen_at_first: set[nn.Parameter] = set()
    if config.frozen_steps:
        frozen_at_first.update(model.encoder.parameters())
    groups: dict[tuple, dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        undecayed = name in exempt or is_undecayed(name, parameter)
        scale = scales.get(name, 1.0)
        key = (undecayed, name not in matrices, -scale, parameter in frozen_at_first)
        if key not in groups:
            groups[key] = {"params": [], "weight_decay": 0.0 if undecayed else config.weight_decay}
            if matrices:
                groups[key]["use_muon"] = name in matrices
            if scales:
                groups[key]["lr_scale"] = scale
        groups[key]["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def is_undecayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias, a norm, a token or a position embedding."""
    last_name = name.rsplit(".", 1)[-1]
    return parameter.ndim < 2 or any(word in last_name for word in UNDECAYED_NAMES)


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that timm exempts from weight decay, such as a rotation's frequencies."""
    names = set()
    for path, module in model.named_modules():
        if hasattr(module, "no_weight_decay"):
            names |= {f"{path}.{name}".removeprefix(".") for name in module.no_weight_decay()}
    return names


def block_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon orthogonalises: the trained weights of linear layers in transformer blocks.

    Raises:
        UserError: there are none.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "blocks" in name.split("."):
            names.add(f"{name}.weight")
    muon_is_for = "optim.name is muon, which is for the matrices of a ViT's blocks"
    if not names:
        raise UserError(f"{muon_is_for}; this model has none: use adam")
    if not names & trained:
        raise UserError(f"{muon_is_for}; none of them is trained (model.train, model.lora_rank): use adam")
    return names & trained


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Parameter of the encoder -> its share of the learning rate: `decay` once for each layer above it (BEiT, MAE).

    The layers are timm's: stem, blocks, and the head with the norm that some encoders have after pooling. A norm before
    pooling belongs to the last block (in BEiT and MAE it has the whole rate). Of a plain transformer all that acts
    before the blocks is in the stem, registers and `norm_pre`, too, and so are the frequencies of its rotations.
    Parameters outside of the encoder, such as a head's, have the whole rate.

    Raises:
        UserError: timm does not know the layers.
    """
    encoder = getattr(model, "encoder", None)
    knows_layers = hasattr(encoder, "group_matcher")
    require(knows_layers, "optim.layer_decay", decay, "null for this model, whose layers timm does not know")
    names = [name for name, _ in encoder.named_parameters()]
    head = ""  # a name that is of no layer is of the head
    named = [(name, None) for name in (*names, head)]
    layers = group_with_matcher(named, encoder.group_matcher(), reverse=True)
    if is_plain(encoder):
        layers |= dict.fromkeys(stem_parameters(encoder), 0)
    prefix = next(name for name, module in model.named_modules() if module is encoder)
    return {f"{prefix}.{name}": decay ** (layers[head] - layers[name]) for name in names}


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up to the base rate, then as scheduled."""
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
        case "wsd":
            stable = config.stable_steps(steps)
            if step < stable:
                return config.lr
            return config.lr * (1 - math.sqrt((step - stable) / (steps - stable)))
    raise AssertionError(config.schedule)
