"""Words of a command line: settings as words, files by name, negative numbers."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from mpp.config.keys import as_yaml_value
from mpp.errors import UserError

FILE_OPTION = "--config="
NEGATIVE_NUMBER = re.compile(r"-[\d.]+(e[+-]?\d+)?", re.IGNORECASE)
PACKAGE = Path(__file__).parent.parent


def configs_folder() -> Path:
    """Folder of mpp's own configs: in the installed package, or next to it in a checkout."""
    for folder in (PACKAGE / "configs", PACKAGE.parent / "configs"):
        if folder.is_dir():
            return folder
    return PACKAGE


def as_words(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return yaml.safe_dump(value).split()[0]  # .nan, .inf
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    return json.dumps(as_yaml_value(value), default=str)  # YAML has dates, too


def as_command_line(options: Mapping[str, Any]) -> list[str]:
    """Settings by name as a command line; `config` is a file, or several that compose."""
    settings = dict(options)
    files = settings.pop("config", [])
    if isinstance(files, str | os.PathLike):
        files = [files]
    words = [f"{FILE_OPTION}{file}" for file in files]
    words += [f"--{name}={as_words(value)}" for name, value in settings.items()]
    return words


def files_first(arguments: Sequence[str]) -> list[str]:
    """The command line with the files before all else: settings win over files, wherever they stand."""
    return sorted(join_files(arguments), key=lambda word: not word.startswith(FILE_OPTION))


def join_files(arguments: Sequence[str]) -> list[str]:
    """The command line with `--config NAME` as `--config=FILE`, also where NAME is a config that mpp brings.

    `cifar10` and `finetune/cifar10` are such names; a file of that name comes first.
    """
    joined = []
    words = iter(arguments)
    for word in words:
        if word == "--config":
            name = next(words, None)
            if name is None:  # the parser says what is missing
                joined.append(word)
                break
            word = FILE_OPTION + name
        if word.startswith(FILE_OPTION):
            word = FILE_OPTION + config_file(word.removeprefix(FILE_OPTION))
        joined.append(word)
    return joined


def join_numbers(arguments: Sequence[str]) -> list[str]:
    """The command line with `--name -1e3` as `--name=-1e3`: Python's parser takes such numbers for options."""
    joined: list[str] = []
    for word in arguments:
        before = joined[-1] if joined else ""
        if before.startswith("--") and "=" not in before and NEGATIVE_NUMBER.fullmatch(word):
            joined[-1] = f"{before}={word}"
        else:
            joined.append(word)
    return joined


def config_file(name: str) -> str:
    """The file that `--config` names: itself, or one that mpp brings.

    Raises:
        UserError: there is neither.
    """
    is_file = Path(name).exists() and not Path(name).is_dir()  # a folder of images may have a config's name
    if not name or is_file:
        return name
    configs = configs_folder()
    included = configs / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    if included.is_file():
        return str(included)
    if Path(name).is_dir():
        raise UserError(f"--config is {name}, a folder; it must be a YAML file, or the name of a config")
    names = sorted(str(file.relative_to(configs).with_suffix("")) for file in configs.rglob("*.yaml"))
    ours = [each for each in names if not each.startswith("accelerate")]  # those are the launcher's
    meant = nearest_config(name.removeprefix("configs/").removesuffix(".yaml"), ours)
    hint = f"did you mean {meant}? Configs" if meant else "configs"
    raise UserError(f"--config is {name}, which does not exist; {hint} by name are {', '.join(ours)}")


def nearest_config(name: str, names: Sequence[str]) -> str | None:
    """The config that was probably meant, by its whole name or by its last part; None: there is none near."""
    by_last_part = {each.rpartition("/")[2]: each for each in reversed(names)}
    for candidates in ({each: each for each in names}, by_last_part):
        matches = get_close_matches(name, candidates, n=1, cutoff=0.7)
        if matches:
            return candidates[matches[0]]
    return None
