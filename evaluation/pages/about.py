"""What every page says of a run: its settings, the machine, and what it lacks."""

import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

import mpp
from evaluation.frozen.encoder import Unavailable
from evaluation.pages.page import Block, Table, Text
from mpp.config.command_line import as_words
from mpp.config.keys import flatten
from mpp.errors import UserError
from mpp.runtime.hardware import cores, uses_gpu

LIBRARIES = ("torch", "timm", "accelerate", "datasets", "numpy")
Missing = dict[str, str]
"""What a page would have, and why it has not."""


def available(title: str, make: Callable[[], list[Block]], missing: Missing) -> list[Block]:
    """The blocks; none where a run does not have what they show, which is noted."""
    try:
        return make()
    except (UserError, OSError, Unavailable) as error:
        missing[title] = str(error)
        return []


def settings_rows(config: Any) -> list[Block]:
    """The settings that differ from the defaults."""
    rows = [[key, as_words(value)] for key, value in changed(config).items()]
    if not rows:
        return [Text("All settings are the defaults.")]
    return [Table(["setting", "value"], rows, "Settings that differ from the defaults")]


def changed(config: Any) -> dict[str, Any]:
    """Setting -> value where it is not the default; where the run is written does not count."""
    usual = type(config)()
    as_run, usual = (flatten(replace(each, optim=each.optim.resolved(config.run.steps))) for each in (config, usual))
    left_out = ("run.dir", "run.precision")  # the machine chooses the last one, unless somebody does
    return {key: value for key, value in as_run.items() if value != usual[key] and key not in left_out}


def machine_blocks() -> list[Block]:
    """What wrote this page."""
    gpu = torch.cuda.get_device_name() if uses_gpu() else "none"
    rows = [["mpp", mpp.__version__], ["python", platform.python_version()]]
    rows += [[library, version(library)] for library in LIBRARIES]
    rows += [["system", platform.platform()], ["processor", platform.processor() or platform.machine()]]
    rows += [["cores", str(cores())], ["GPU", gpu]]
    return [Table(["", ""], rows, "The process that wrote this page")]
