"""Whether a run uses code of the user: functions and classes that a file of `--import` registered under a name."""

from typing import Any

import timm

from mpp.config.imports import UserImport, module_name, user_imports
from mpp.corruption import PATTERNS
from mpp.models.networks import NETWORKS
from mpp.objectives import OBJECTIVES

OURS = ("mpp", "timm")


def imports_used(config: Any) -> list[UserImport]:
    """The imports that define a function or class which the settings name, and which is neither mpp's nor timm's.

    All imports of the process, where such a function or class is of a module that none of them is.
    """
    used: set[UserImport] = set()
    for component in components_named(config):
        module = getattr(component, "__module__", "")
        if module.partition(".")[0] in OURS:
            continue
        defining = [each for each in user_imports() if defines(each, module)]
        used.update(defining or user_imports())
    return [each for each in user_imports() if each in used]


def defines(code: UserImport, module: str) -> bool:
    """Whether a module is this import, or is in this package."""
    name = module_name(code)
    return module == name or module.startswith(f"{name}.")


def components_named(config: Any) -> list[Any]:
    """The registered functions and classes that a config of training names."""
    components = []
    for group, setting, registered in (
        ("objective", "name", OBJECTIVES),
        ("corruption", "pattern", PATTERNS),
        ("network", "name", NETWORKS),
    ):
        name = getattr(getattr(config, group, None), setting, None)
        if name in registered:
            components.append(registered[name])
    model = getattr(getattr(config, "model", None), "name", None)
    if model and timm.is_model(model):
        components.append(timm.model_entrypoint(model))
    return components
