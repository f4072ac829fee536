"""Checks of settings: values out of bounds, and settings that have no effect, are errors of one line."""

import json
import math
import os
import re
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from mpp.config.allowed import describe_allowed
from mpp.config.fields import default_of
from mpp.config.keys import iterate_settings
from mpp.errors import UserError

PLACES_WRITTEN_TO = ("dir", "out")
"""Last parts of the names of settings that are files or folders which a command writes."""
SHELL_VARIABLE = re.compile(r"\$\{?[a-z_]", re.IGNORECASE)


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise the error of one line for a setting whose value is not allowed, also where the value has several."""
    if not condition:
        given = " ".join(describe_value(value).split())
        raise UserError(f"{key} is {given}; it must be {allowed}")


def check_bounds(config: Any, prefix: str = "") -> None:
    """Raise UserError at a value that is out of its field's bounds. A list that was given as one value becomes a tuple.

    A path from Python becomes text, as on the command line.

    Args:
        prefix: of the settings' names, such as "optim.".
    """
    for each in fields(config):
        bounds = each.metadata.get("bounds")
        value = getattr(config, each.name)
        if isinstance(value, os.PathLike):
            object.__setattr__(config, each.name, os.fspath(value))
        if bounds is None or value is None:
            continue
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        if bounds.listed:
            value = values
            object.__setattr__(config, each.name, value)
        numbers = [number for number in values if not isinstance(number, str)]
        fits = len(values) > 0 and all(map(bounds.contain, numbers))
        allowed = describe_allowed(each)
        if any(map(math.isinf, numbers)):
            allowed += ", and finite"
        require(fits, f"{prefix}{each.name}", value, allowed)
        if bounds.listed and not bounds.repeats:
            require(len(set(values)) == len(values), f"{prefix}{each.name}", value, f"{allowed}, each once")


def check_places(config: Any) -> None:
    """Raise UserError where a place to write to begins with ~, has a variable of the shell, or is a URL.

    Python makes a folder of the name `~`, `$SCRATCH` or `s3:` of them, in the folder where the command is run.
    """
    for key, _, value in iterate_settings(config):
        if key.rpartition(".")[2] in PLACES_WRITTEN_TO and isinstance(value, str):
            require(not value.startswith("~"), key, value, "a path without ~ (only a shell expands it)")
            has_variable = SHELL_VARIABLE.search(value) is not None
            require(not has_variable, key, value, "a path without variables (only a shell fills them in)")
            require("://" not in value, key, value, "a path on this machine, not a URL")


def refuse_idle(config: Any, usual: Any = None, prefix: str = "", whole: Any = None) -> None:
    """Raise UserError for a setting that was given and has no effect; the message names the settings that it needs.

    Args:
        usual: the same config where nothing was given; None: the defaults. A value as usual does not count as given.
        prefix: of the settings' names.
        whole: the config that this one is a group of; None: it is whole itself.
    """
    whole = whole or config
    for each in fields(config):
        key = f"{prefix}{each.name}"
        value = getattr(config, each.name)
        default = default_of(each) if usual is None else getattr(usual, each.name)
        if is_dataclass(value):
            for name, why in each.metadata.get("unused", {}).items():
                given = getattr(value, name)
                other = getattr(default, name)
                allowed = f"{describe_value(other)} or left out: {why}"
                require(given == other, f"{key}.{name}", given, allowed)
            refuse_idle(value, default, f"{key}.", whole)
        elif value != default:
            for name, wanted in each.metadata.get("needs", {}).items():
                of_other_group = "." in name
                actual = attrgetter(name)(whole if of_other_group else config)
                needed = name if of_other_group else f"{prefix}{name}"
                allowed = f"{describe_value(default)} or left out: it has no effect unless {needed} "
                allowed += describe_wanted(wanted)
                require(is_met(actual, wanted), key, value, allowed)


def is_met(value: Any, wanted: Any) -> bool:
    """Whether a field's value is one that another field needs."""
    if isinstance(wanted, bool):
        return bool(value) == wanted
    allowed = wanted if isinstance(wanted, tuple) else (wanted,)
    values = value if isinstance(value, tuple) else (value,)
    return any(part in allowed for part in values)


def describe_wanted(wanted: Any) -> str:
    """The value that a field needs of another, in words: "is pixels or hog"."""
    if isinstance(wanted, bool):
        return "is set" if wanted else "is not set"
    values = wanted if isinstance(wanted, tuple) else (wanted,)
    return f"is {' or '.join(map(describe_value, values))}"


def describe_value(value: Any) -> str:
    """A value in an error message, as YAML has it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(list(value) if isinstance(value, tuple) else value)
