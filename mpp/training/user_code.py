"""Whether a run uses code of the user: functions and classes that a file of `--import` registered under a name."""

from typing import Any

import timm

from mpp.config.imports import UserImport, user_imports
from mpp.corruption import PATTERNS
from mpp.models.networks import NETWORKS
from mpp.objectives import OBJECTIVES

OURS = ("mpp", "timm")


def imports_used(config: Any) -> list[UserImport]:
    """The imports of this process, if the settings name a function or class that is neither mpp's nor timm's."""
    packages = {getattr(each, "__module__", "").partition(".")[0] for each in components_named(config)}
    return user_imports() if packages - set(OURS) else []


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
