"""Code of the user: functions and classes that a file of `--import` registered under a name.

Whether a run uses any of it, and whether what it returns fits.
"""

from typing import Any

import timm
from torch import Tensor

from mpp.config import TrainingConfig, flatten, require
from mpp.config.imports import imported
from mpp.corruption import PATTERNS
from mpp.models.networks import NETWORKS
from mpp.objectives import OBJECTIVES

OURS = ("mpp", "timm")
REGISTRIES = (OBJECTIVES, PATTERNS, NETWORKS)
"""Parts by the name that a setting gives them. The group of the setting has `arguments` for parts of users."""


def is_of_user(part: Any) -> bool:
    """Whether a registered function or class is neither mpp's nor timm's."""
    return part.__module__.partition(".")[0] not in OURS


def refuse_idle_arguments(config: TrainingConfig) -> None:
    """Raise UserError for `arguments` of a part that is mpp's own: it takes none."""
    settings = flatten(config)
    for registry in REGISTRIES:
        name = settings[registry.setting]
        group, _ = registry.setting.split(".")
        value = settings[f"{group}.arguments"]
        allowed = f"null or left out: {registry.setting} {name} has settings of its own; these are for code of --import"
        require(value is None or is_of_user(registry[name]), f"{group}.arguments", value, allowed)


def parts_named(config: TrainingConfig) -> list[Any]:
    """The registered parts that settings name. UserError: one that nothing has registered."""
    settings = flatten(config)
    return [registry[settings[registry.setting]] for registry in REGISTRIES if registry.setting in settings]


def imports_used(config: TrainingConfig) -> dict[str, bytes]:
    """The imported files that a run depends on: all, if its settings name any part of the user, and else none."""
    parts = parts_named(config)
    model = config.model and config.model.name
    if model and timm.is_model(model):
        parts.append(timm.model_entrypoint(model))
    return imported if any(map(is_of_user, parts)) else {}


def require_shape(predictions: Tensor, expected: tuple[int, ...], name: str) -> None:
    """Raise UserError where predictions have another shape than (images, corrupted patches, outputs).

    Args:
        name: of the network.
    """
    key = f"the shape of the predictions of network.name {name}"
    allowed = f"{expected}: images, corrupted patches, outputs of the objective"
    require(predictions.shape == expected, key, tuple(predictions.shape), allowed)


def require_useful_loss(loss: Any, name: str) -> None:
    """Raise UserError where the loss of an objective is no scalar with a gradient.

    Args:
        name: of the objective.
    """
    is_useful = isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad
    given = f"a {type(loss).__name__} of shape {list(getattr(loss, 'shape', []))}"
    require(is_useful, f"the loss of objective.name {name}", given, "a scalar tensor that depends on the predictions")
