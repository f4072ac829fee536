"""The command line and YAML files to a config, and back.

`parse(Config)` reads YAML files (`--config`, several compose, later ones win) and dotted overrides
(`--optim.lr 1e-3`). Whatever is wrong with them is one line.
"""

import dataclasses
import difflib
import json
import math
import os
import re
import sys
import textwrap
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser, set_parsing_settings

from mpp.config import refuse_idle
from mpp.config.fields import default_of
from mpp.config.imports import require_imports, take_imports
from mpp.errors import UserError

ConfigT = TypeVar("ConfigT")
CHANGED_FIRST = (
    *("encoder", "run.dir", "data.path", "run.steps", "optim.lr", "lrs", "optim.global_batch_size", "data.batch_size"),
    *("model.width", "model.depth", "model.img_size", "model.patch_size", "objective.name", "network.name", "dir"),
    *("shots", "neighbours", "solver", "pictures", "depth", "representation", "data.train_images", "out"),
)
"""What people change first; of these, help begins with the ten that a command has."""
USUAL = {"mask_ratio": "corruption.rate", "masking_ratio": "corruption.rate", "embed_dim": "model.width"}
USUAL |= {"num_heads": "model.heads", "lr": "optim.lr", "weight_decay": "optim.weight_decay", "epochs": "run.steps"}
USUAL |= {"num_workers": "data.workers", "batch_size": "data.batch_size", "output_dir": "run.dir", "seed": "run.seed"}
"""What settings are called elsewhere -> here."""
FILE = "--config="
NEGATIVE = re.compile(r"-[\d.]+(e[+-]?\d+)?", re.IGNORECASE)
CONFIG_HELP = "YAML file of settings, or the name of one that the package brings; several compose, later ones win."
IMPORT_HELP = "Python file or module of yours, which registers objectives, patterns, networks or evaluations."
PACKAGE = Path(__file__).parent.parent
CONFIGS = next((path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir()), PACKAGE)
"""The configs: installed within the package; in a checkout beside it."""


def parse(config_class: type[ConfigT], arguments: Sequence[str] | None = None, prog: str | None = None) -> ConfigT:
    """Read a config from the command line.

    Args:
        config_class: a frozen dataclass with defaults; fields that are dataclasses are groups.
        arguments: the command line's words; None: `sys.argv[1:]`.
        prog: the command that `--help` shows.
    Raises:
        UserError: one line that names the wrong key or value and what is allowed, or a setting that has no effect.
    """
    config = read(config_class, files_first(sys.argv[1:] if arguments is None else arguments), prog)
    refuse_idle(config)
    return config


def read(config_class: type[ConfigT], arguments: Sequence[str], prog: str | None = None) -> ConfigT:
    """The same, where settings may have no effect, since not all of them were given by somebody."""
    parser = parser_of(config_class, prog)
    arguments = joined_numbers(joined_files(take_imports(arguments)))
    if {"-h", "--help"} & set(arguments):
        show_help(help_of(config_class, prog))
    try:
        check_files(config_class, arguments)
        values = parser.parse_args(arguments)
    except (ArgumentError, yaml.YAMLError) as error:
        raise UserError(explain(config_class, str(error))) from None
    values.pop("config")
    config = config_class(**vars(parser.instantiate(values)))
    for key, field, value in settings(config):  # as of a shell's variable that is not set
        if value == "" and field.default != "":
            raise UserError(f"{key} is empty; leave it out, or give it a value")
    return config


def files_first(arguments: Sequence[str]) -> list[str]:
    """The command line with the files before all else: settings win over files, wherever they stand."""
    return sorted(joined_files(arguments), key=lambda word: not word.startswith(FILE))


def joined_files(arguments: Sequence[str]) -> list[str]:
    """The command line with `--config NAME` as `--config=FILE`, also where NAME is of a config that the package brings.

    `cifar10` and `finetune/cifar10` are such names; a file of that name comes first.
    """
    words, result = iter(arguments), []
    for word in words:
        if word == "--config" and (name := next(words, None)) is not None:  # else the parser says what is missing
            word = FILE + name
        result.append(FILE + config_file(word.removeprefix(FILE)) if word.startswith(FILE) else word)
    return result


def joined_numbers(arguments: Sequence[str]) -> list[str]:
    """The command line with `--name -1e3` as `--name=-1e3`: Python's parser takes such numbers for options."""
    result: list[str] = []
    for word in arguments:
        before = result[-1] if result else ""
        if before.startswith("--") and "=" not in before and NEGATIVE.fullmatch(word):
            result[-1] = f"{before}={word}"
        else:
            result.append(word)
    return result


def config_file(name: str) -> str:
    """The file that `--config` names: itself, or one that the package brings; UserError where there is neither."""
    packaged = CONFIGS / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    if not name or (Path(name).exists() and not Path(name).is_dir()):  # a folder of images may have a config's name
        return name
    if packaged.is_file():
        return str(packaged)
    names = (str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.rglob("*.yaml"))
    ours = sorted(each for each in names if not each.startswith("accelerate"))  # those are the launcher's
    raise UserError(f"--config is {name}, which is no file; configs by name are {', '.join(ours)}")


@lru_cache
def parser_of(config_class: type, prog: str | None) -> ArgumentParser:
    """The parser of a config; it takes longer to make than to use."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, prog=prog, description=config_class.__doc__)
    parser.add_argument("--config", action="config", help=CONFIG_HELP)
    parser.add_class_arguments(config_class)
    return parser


def help_of(config_class: type, prog: str | None) -> str:
    """What a command takes: the ten settings that people change first, then all others by group."""
    defaults = {each.name: default_of(each) for each in dataclasses.fields(config_class)}
    documented = dict(documented_settings(config_class, defaults))
    first = [key for key in CHANGED_FIRST if key in documented][:10]
    lines = [
        f"usage: {prog or Path(sys.argv[0]).name} [--config FILE_OR_NAME ...] [--import FILE] [--SETTING VALUE ...]",
        "",
    ]
    lines += [
        " ".join((config_class.__doc__ or "").split()),
        "",
        f"--config: {CONFIG_HELP}",
        f"--import: {IMPORT_HELP}",
    ]
    groups = {"What people change first": first}
    for key in documented:
        if key not in first:
            groups.setdefault(key.rpartition(".")[0] or "general", []).append(key)
    for name, keys in groups.items():
        about = f"--{name}.*: {type(defaults[name]).__doc__.splitlines()[0]}" if name in defaults else f"{name}:"
        lines += ["", about, *(line for key in keys for line in documented[key])]
    return "\n".join(lines)


def show_help(text: str) -> NoReturn:
    """Print it and end."""
    print(text)
    sys.exit()


def documented_settings(
    config_class: type, defaults: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """The settings of a config as (dotted key, lines of help): default, choices, and what the setting does."""
    documented = (parse_from_object(each).params for each in reversed(config_class.__mro__[:-1]))
    said = {each.arg_name: each.description or "" for params in documented for each in params}
    for each in dataclasses.fields(config_class):
        default, key = defaults[each.name], f"{prefix}{each.name}"
        if dataclasses.is_dataclass(default):
            yield from documented_settings(type(default), vars(default), f"{key}.")
            continue
        choices = f"  ({' | '.join(map(str, get_args(each.type)))})" if get_origin(each.type) is Literal else ""
        text = textwrap.wrap(" ".join(said[each.name].split()), 110)
        yield key, [f"  --{key} {as_words(default)}{choices}", *(f"      {line}" for line in text)]


def as_words(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return yaml.safe_dump(value).split()[0]  # .nan, .inf
    return os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(plain(value))


def as_command_line(options: Mapping[str, Any]) -> list[str]:
    """Settings by name as a command line; `config` is a file, or several that compose."""
    given = dict(options)
    files = given.pop("config", [])
    files = [files] if isinstance(files, str | os.PathLike) else files
    return [f"{FILE}{file}" for file in files] + [f"--{name}={as_words(value)}" for name, value in given.items()]


def check_files(config_class: type, arguments: Sequence[str]) -> None:
    """Raise UserError at a key that nothing has, or that stands twice, in a file of the command line.

    The parser accepts `modle: {}`, and of two `optim:` the first would not count. It stumbles over an empty `run:`.
    """
    groups = {key.rpartition(".")[0] for key in known_keys(config_class)}
    settings_and_groups = {*known_keys(config_class), *groups}
    for file in (Path(word.removeprefix(FILE)) for word in arguments if word.startswith(FILE)):
        if file.is_file():
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"--config is {file}, which is no text: {error}") from None
            written, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
            for group, values in written.items() if isinstance(written, dict) else ():
                names = values if isinstance(values, dict) and group in settings_and_groups else {}
                for key in (str(group), *(f"{group}.{name}" for name in names)):
                    if key not in settings_and_groups:
                        raise UserError(f"{unknown(config_class, key)} (in {file})")
                if group in groups and not isinstance(values, dict):
                    allowed = "it must have settings below it, or be left out"
                    raise UserError(f"{file}: {group} is {as_words(values)}; {allowed}")
            for key in twice(root):
                raise UserError(f"{file}: {key} stands there twice")


def twice(node: yaml.Node | None) -> Iterator[str]:
    """Keys that stand twice in a mapping, or in a mapping below it."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        yield from (str(name) for name in names if names.count(name) > 1 and name != "<<")
        for _, below in node.value:
            yield from twice(below)


def explain(config_class: type, message: str) -> str:
    """The parser's message in one line; for an unknown key, with the keys that exist."""
    line = " ".join(message.split())
    if "unrecognized arguments" in line:
        word = line.split("arguments:", 1)[1].split()[0]
        culprit = word.removeprefix("--").split("=")[0]
        if not word.startswith("--") and culprit in known_keys(config_class):
            return f"unknown word {word}: did you mean --{word}?"
        if not word.startswith("-"):
            return f"unknown word {word}: settings are --NAME VALUE, and a list is '[a, b]'"
    elif "does not accept option" in line:
        group, option = line.split("'")[1::2][:2]
        culprit = f"{group}.{option}"
    else:
        return f"{line} (a list is written '[a, b]')" if "tuple[" in line else line
    return unknown(config_class, culprit)


def unknown(config_class: type, culprit: str) -> str:
    """That a setting does not exist, and which do."""
    known = list(known_keys(config_class))
    groups = sorted({key.split(".")[0] for key in known})
    group = [key for key in known if key.startswith(culprit.split(".")[0] + ".")]
    usual = [key for key in known if key == USUAL.get(culprit.rsplit(".", 1)[-1])]
    near = usual or difflib.get_close_matches(culprit, known, n=1) or difflib.get_close_matches(culprit, groups, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown setting {culprit}: {hint}allowed: {', '.join(group or groups)}"


def known_keys(config_class: type) -> Iterator[str]:
    """The dotted keys of a config's settings."""
    return (key for key, *_ in settings(config_class))


def settings(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """All settings as (dotted key, field, value); of a class the defaults."""
    for field in dataclasses.fields(config):
        value = default_of(field) if isinstance(config, type) else getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, value


def flatten(config: Any) -> dict[str, Any]:
    """Dotted key -> value."""
    return {key: value for key, _, value in settings(config)}


def plain(value: Any) -> Any:
    """A config as what YAML has: tuples become lists."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else value


def to_yaml(config: Any) -> str:
    """The config as the YAML text that `parse` reads back."""
    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False)


def read_saved(path: Path) -> dict[str, Any]:
    """What a saved config says; nothing where there is none."""
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return saved if isinstance(saved, dict) else {}


def parse_saved(config_class: type[ConfigT], path: Path) -> ConfigT:
    """The config that was saved at `path`.

    Raises:
        UserError: it is none of this kind, or of a run with code of its own that is not imported.
    """
    require_imports(path.parent)
    return read(config_class, ["--config", str(path)])


def differing(config: Any) -> dict[str, Any]:
    """Dotted key -> value of the settings that are not the defaults."""
    usual = flatten(type(config)())
    return {key: value for key, value in flatten(config).items() if value != usual[key]}


def changed_keys(config: Any, path: Path, spelled: Callable[[Any], Any] = lambda config: config) -> list[str]:
    """Keys of settings that are not operational in which `config` differs from the one saved at `path`.

    Args:
        spelled: a config to the same config, in the spelling in which the two are compared.
    Raises:
        UserError: the saved file is not a config of this kind.
    """
    try:
        saved = flatten(spelled(parse_saved(type(config), path)))
    except ValueError as error:
        raise UserError(f"{path} is not a config of this command ({error})") from None
    kept = ((key, value) for key, field, value in settings(spelled(config)) if not field.metadata.get("operational"))
    return [key for key, value in kept if value != saved[key]]
