"""Code of the user: functions and classes that a file of `--import` registered under a name.

Which of it a run uses, and whether what it returns fits.
"""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import timm
from torch import Tensor

from mpp.config import TrainingConfig, require
from mpp.config.imports import Registry, UserImport, module_name, user_imports
from mpp.corruption import PATTERNS
from mpp.models.networks import NETWORKS
from mpp.objectives import OBJECTIVES

OURS = ("mpp", "timm")
REGISTERED: Mapping[str, tuple[str, Registry]] = {
    "objective": ("name", OBJECTIVES),
    "corruption": ("pattern", PATTERNS),
    "network": ("name", NETWORKS),
}
"""Groups of settings that have `arguments` for parts of users: the setting that names a part, and the parts by name."""


def refuse_idle_arguments(config: TrainingConfig) -> None:
    """Raise UserError for `arguments` of a part that is mpp's own: it takes none."""
    for group, (setting, registered) in REGISTERED.items():
        settings = getattr(config, group)
        name = getattr(settings, setting)
        allowed = f"null or left out: {group}.{setting} {name} has settings of its own; these are for code of --import"
        takes_them = name in registered and is_of_user(registered[name])
        require(takes_them or settings.arguments is None, f"{group}.arguments", settings.arguments, allowed)


def refuse_unregistered(config: TrainingConfig) -> None:
    """Raise UserError where settings name a part that nothing has registered in this process.

    For plans of trainings: without their --import, results would be taken for those of other settings.
    """
    for group, (setting, registered) in REGISTERED.items():
        name = getattr(getattr(config, group, None), setting, None)
        known = [*registered, *registered.reserved]
        allowed = f"one of {', '.join(known)}, or registered by --import FILE"
        require(name is None or name in known, f"{group}.{setting}", name, allowed)
    model = config.model and config.model.name
    require(not model or timm.is_model(model), "model.name", model, "a timm model, or registered by --import FILE")


def is_of_user(component: Any) -> bool:
    """Whether a registered function or class is neither mpp's nor timm's."""
    return defining_module(component).partition(".")[0] not in OURS


def defining_module(component: Any) -> str:
    """Name of the module that defines a function or class; empty: it is unknown."""
    return getattr(component, "__module__", None) or ""


def imports_used(config: TrainingConfig) -> list[UserImport]:
    """The imports that define a function or class which the settings name, and which is neither mpp's nor timm's.

    Also those that such an import imports itself, as one that has a base class.

    All imports of the process, where such a function or class is of a module that none of them is.
    """
    used: set[UserImport] = set()
    for component in components_named(config):
        if not is_of_user(component):
            continue
        defining = [each for each in user_imports() if defines(each, defining_module(component))]
        used.update(defining or user_imports())
    found = list(used)
    while found:
        code = found.pop()
        new = [each for each in user_imports() if each not in used and takes_from(code, each)]
        used.update(new)
        found += new
    return [each for each in user_imports() if each in used]


def takes_from(code: UserImport, other: UserImport) -> bool:
    """Whether the module of an import has another import, or something that it defines, among its names."""
    values = list(vars(sys.modules[module_name(code)]).values())
    modules = [each.__name__ if isinstance(each, ModuleType) else defining_module(each) for each in values]
    return any(defines(other, name) for name in modules)


def defines(code: UserImport, module: str) -> bool:
    """Whether a module is this import, or is in this package."""
    name = module_name(code)
    return module == name or module.startswith(f"{name}.")


def components_named(config: TrainingConfig) -> list[Any]:
    """The registered functions and classes that a config of training names."""
    components = []
    for group, (setting, registered) in REGISTERED.items():
        name = getattr(getattr(config, group, None), setting, None)
        if name in registered:
            components.append(registered[name])
    model = config.model and config.model.name
    if model and timm.is_model(model):
        components.append(timm.model_entrypoint(model))
    return components


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
    is_tensor = isinstance(loss, Tensor)
    given = f"of shape {tuple(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
    if is_tensor and not loss.requires_grad:
        given = "without a gradient"
    allowed = "a scalar tensor that depends on the predictions"
    require(is_tensor and loss.requires_grad and loss.ndim == 0, f"the loss of objective.name {name}", given, allowed)
