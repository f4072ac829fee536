"""Blocks that several pages share: settings and the machine."""

import platform
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

import mpp
from evaluation.pages.page import Block, Table, Text
from mpp.config import as_words, flatten
from mpp.runtime.hardware import cores, uses_gpu
from mpp.runtime.messages import counted

LIBRARIES = ("torch", "timm", "accelerate", "datasets", "numpy")
DURATION_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))
SETTINGS_NOT_SHOWN = ("run.dir", "run.precision")  # where precision is not set, it depends on the machine


def settings_rows(config: Any) -> list[Block]:
    """The settings that differ from the defaults."""
    rows = [[key, as_words(value)] for key, value in changed_settings_shown(config).items()]
    if not rows:
        return [Text("All settings are the defaults.")]
    return [Table(["setting", "value"], rows, "Settings that differ from the defaults")]


def changed_settings_shown(config: Any) -> dict[str, Any]:
    """Setting -> value where it is not the default, without SETTINGS_NOT_SHOWN."""
    defaults = type(config)()
    steps = config.run.steps
    default_values = flatten(replace(defaults, optim=defaults.optim.resolved(steps)))
    values = flatten(replace(config, optim=config.optim.resolved(steps)))
    different = {}
    for key, value in values.items():
        if value != default_values[key] and key not in SETTINGS_NOT_SHOWN:
            different[key] = value
    return different


def recorded_versions() -> dict[str, str]:
    """Versions of mpp, Python and the libraries in this process; results that it took over may be of others."""
    own = {"mpp": mpp.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in LIBRARIES}


def machine_blocks() -> list[Block]:
    """Versions and hardware of the process that writes the page."""
    hardware = [
        ["system", platform.platform()],
        ["processor", platform.processor() or platform.machine()],
        ["cores", str(cores())],
        ["GPU", torch.cuda.get_device_name() if uses_gpu() else "none"],
    ]
    return [Table(["", ""], [*map(list, recorded_versions().items()), *hardware], "Process that wrote this page")]


def duration(seconds: float) -> str:
    """Seconds in the largest unit that fits, such as "8.3 minutes"."""
    for size, unit in DURATION_UNITS:
        if seconds >= 1.5 * size:
            count = seconds / size
            return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"
    return counted(round(seconds), "second")
