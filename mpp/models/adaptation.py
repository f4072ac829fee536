"""The part of an encoder that is trained: chosen by name (`model.train`), and low-rank changes (`model.lora_rank`)."""

import copy
import math
import re

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mpp.config import ModelConfig, require
from mpp.runtime.messages import note, shortened


class LowRankChange(nn.Module):
    """A weight (m, n) plus the product of two narrow matrices, which is zero at first (LoRA: Hu et al., ICLR 2022).

    The sum is float32 under autocast, too: an exported encoder has the weights of the running one. LoRA's alpha is the
    rank.

    Args:
        rank: columns of the first matrix, and rows of the second one.
    """

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        rows, columns = weight.shape
        self.up = nn.Parameter(weight.new_zeros(rows, rank))
        self.down = nn.Parameter(weight.new_empty(rank, columns))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as LoRA's code does

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast("cpu" if weight.is_meta else weight.device.type, enabled=False):
            return torch.addmm(weight, self.up, self.down)


def choose_trained(encoder: nn.Module, config: ModelConfig) -> None:
    """Freeze an encoder except for the parameters that the settings name; low-rank products change frozen matrices.

    To be called before the optimiser is built, and after a copy for a moving average is made.

    Raises:
        UserError: a pattern that matches no parameter or all of them, or a rank that is too large.
    """
    if config.train is None and config.lora_rank is None:
        return
    encoder.requires_grad_(False)
    if config.train is not None:
        parameters = dict(encoder.named_parameters())
        trained = [name for name in parameters if re.search(config.train, name)]
        some = ", ".join([*parameters][-8:])
        allowed = f"found in some names of the encoder's parameters, such as {some}, and not in all"
        require(0 < len(trained) < len(parameters), "model.train", config.train, allowed)
        note(f"model.train {config.train} trains {shortened(sorted(trained))}")
        for name in trained:
            parameters[name].requires_grad_()
    if config.lora_rank is not None:
        add_low_rank_changes(encoder, config.lora_rank)


def add_low_rank_changes(encoder: nn.Module, rank: int) -> None:
    """Add a `LowRankChange` to the weight of each linear layer that is frozen.

    Raises:
        UserError: there is no such layer, or one that is narrower than the rank.
    """
    frozen = [layer for layer in encoder.modules() if type(layer) is nn.Linear and not layer.weight.requires_grad]
    most = min((min(layer.weight.shape) for layer in frozen), default=0)
    allowed = f"at most {most}, the narrow side of the encoder's frozen linear layers (0: there is none), or null"
    require(rank <= most, "model.lora_rank", rank, allowed)
    for layer in frozen:
        parametrize.register_parametrization(layer, "weight", LowRankChange(layer.weight, rank))


def has_low_rank_changes(model: nn.Module) -> bool:
    """Whether some weights of a model have a `LowRankChange`."""
    return any(isinstance(module, LowRankChange) for module in model.modules())


def merge(encoder: nn.Module) -> nn.Module:
    """The encoder with its changes in its weights, under timm's names: a copy, or itself where it has none."""
    if not has_low_rank_changes(encoder):
        return encoder
    merged = copy.deepcopy(encoder)
    for layer in filter(parametrize.is_parametrized, merged.modules()):
        weight = nn.Parameter(layer.weight.detach())
        layer.__class__ = nn.Linear  # torch's way would change the class that the copy shares
        del layer.parametrizations
        layer.weight = weight
    return merged


def count_parameters(encoder: nn.Module) -> tuple[int, int]:
    """The number of an encoder's parameters without low-rank changes, and the number that is trained, with these."""
    total = sum(parameter.numel() for parameter in merge(encoder).parameters())
    trained = sum(parameter.numel() for parameter in encoder.parameters() if parameter.requires_grad)
    return total, trained


def describe_adaptation(config: ModelConfig) -> str:
    """A sentence on the part that was trained, without its full stop; empty where all was."""
    if config.train is None and config.lora_rank is None:
        return ""
    chosen = f"model.train {config.train}, model.lora_rank {config.lora_rank}"
    return f"Of the encoder only a part was trained ({chosen}); low-rank changes (LoRA) are merged"
