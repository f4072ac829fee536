"""Command line and YAML files to a config, and back.

`parse(Config)` reads YAML files (`--config`, several compose, later ones win) and settings (`--optim.lr 1e-3`), which
win over files. Every mistake in them is an error of one line.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from mpp.config.fields import Setting, as_tuple, as_words, flatten, nested, rebuild, require, settings_of, show, take
from mpp.config.help import describe_needs, groups_of, show_help
from mpp.config.imports import require_imports, take_imports
from mpp.errors import UserError, did_you_mean

CONFIGS = next(folder / "configs" for folder in Path(__file__).parents[1:] if (folder / "configs").is_dir())
"""Folder of the configs that mpp brings: in the installed package, or next to it in a checkout."""
UNKNOWN = "unknown setting "
NAMES_ELSEWHERE = {
    "mask_ratio": "corruption.rate",
    "embed_dim": "model.width",
    "num_heads": "model.heads",
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip",
    "ema_decay": "optim.average",
    "batch_size": "optim.global_batch_size (over all processes; data.batch_size is the micro-batch of one)",
    "epochs": "run.steps (epochs x images / optim.global_batch_size)",
    "num_workers": "data.workers",
    "crop_pct": "data.eval_crop",
    "output_dir": "run.dir",
    "pooling": "representation",
}
"""Names of settings in other libraries -> ours, which a remark may follow."""
SCALARS = {
    "null": "~|null|",
    "bool": "true|false",
    "int": r"[-+]?(0|[1-9][\d_]*|0x[\da-f]+)",
    "float": r"[-+]?((0|[1-9][\d_]*)(\.\d*)?(e[-+]?\d+)?|\.\d+(e[-+]?\d+)?|\.inf|(?-i:Infinity))|\.nan|(?-i:NaN)",
    "merge": "<<",
}
"""Type of a word in YAML; all others are text. 1e-3 is a number; 010, 1:30, 2020-01-01 and no are text."""
NOT_ON_THIS_MACHINE = re.compile(r"~|.*\$\{?[a-z_]|.*://", re.IGNORECASE)
ConfigT = TypeVar("ConfigT")


# --- the command line ---


def parse(config_class: type[ConfigT], words: Sequence[str] | None = None) -> ConfigT:
    """Read a config: defaults, then files in their order, then settings.

    Args:
        config_class: a frozen dataclass with defaults.
        words: of the command line; None: `sys.argv[1:]`.
    Raises:
        UserError: one line that names the wrong key or value, what is allowed, and the file; or a setting that has no
            effect.
    """
    return read(config_class(), sys.argv[1:] if words is None else words, refuse_idle=True)


def read(usual: ConfigT, words: Sequence[str], refuse_idle: bool = False) -> ConfigT:
    """Read a config as `parse` does.

    Args:
        usual: the config where nothing is given.
        refuse_idle: whether settings must have an effect: a saved config has all.
    """
    known = {each.key: each for each in settings_of(usual)}
    values, places, lengths = {}, {}, {}
    try:
        for option, word, file, content in contents(words, usual, known):
            length = content.get("run.steps", values.get("run.steps"))
            for key, value in content.items():
                lengths[key] = length if file else None
                places[key] = f" (in {file})" if file else ""
                values[key] = take(find(key, known), value, word if key == option else value_of(value))
        config = rebuild(usual, shortened(values, lengths))
        if refuse_idle:
            check_given(config, usual)
        return config
    except UserError as error:
        key = str(error).removeprefix(UNKNOWN).split()[0].strip(",;")  # with which messages begin
        raise UserError(show(f"{error}{places.get(key, '')}")) from None


def contents(
    words: Sequence[str], usual: Any, known: Mapping[str, Setting]
) -> Iterator[tuple[str, str, Path | None, dict[str, Any]]]:
    """Each option with its word, the file that it names, and the settings that it gives."""
    for option, word in options(words, usual):
        file = config_file(word) if option == "config" else None
        yield option, word, file, dict(spread(read_yaml(file) if file else {option: value_of(word)}, known))


def is_given(key: str, words: Sequence[str], usual: Any) -> bool:
    """Whether the command line or a file of it names a setting, perhaps with its usual value."""
    known = {each.key: each for each in settings_of(usual)}
    return any(key in content for *_, content in contents(words, usual, known))


def shortened(values: Mapping[str, Any], lengths: Mapping[str, int | None]) -> dict[str, Any]:
    """Settings whose first steps keep their share of a run that was made too short for them.

    Args:
        lengths: steps of the run for which a file gives a setting; None: it is not of a file, or for any length.
    """
    changed = dict(values)
    for key in ("optim.warmup_steps", "optim.frozen_steps"):
        steps, length = values.get("run.steps"), lengths.get(key)
        if length and steps < length and (values[key] or 0) >= steps:
            changed[key] = values[key] * steps // length
    return changed


def options(words: Sequence[str], usual: Any) -> list[tuple[str, str]]:
    """Names and words of options. Files come first: settings win over them, wherever they stand."""
    words = take_imports(words)
    for place, word in enumerate(words):
        if word in ("-h", "--help"):
            show_help(usual, *words[place + 1 : place + 2])
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    pairs = list(zip_longest(parts[::2], parts[1::2], fillvalue=""))
    for name, word in pairs:
        if not name.startswith("--"):
            raise UserError(f"unknown word {show(name)}: settings are --NAME VALUE, and a list is '[a, b]'")
        if word.startswith("--"):
            raise UserError(f"{name} has no value; {word} follows")
    return sorted(((name[2:], word) for name, word in pairs), key=lambda pair: pair[0] != "config")


def value_of(word: Any) -> Any:
    """The value of a word as in a file, but text as it is; any other value as it is."""
    if not isinstance(word, str):
        return word
    try:
        value = yaml.load(word, Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return word
    return value if word.strip() and not isinstance(value, str) else word


def spread(content: Mapping[Any, Any], known: Mapping[str, Setting], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings in groups one by one: dotted key, value."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        if value and isinstance(value, dict) and key not in known:
            yield from spread(value, known, f"{key}.")
        else:
            yield key, value


def find(key: str, known: Mapping[str, Setting]) -> Setting:
    """The setting of this key.

    Raises:
        UserError: there is none; with the nearest one and those that are allowed.
    """
    if key in known:
        return known[key]
    group, _, name = key.rpartition(".")
    members = [name for name in known if name.startswith(f"{group or key}.")]
    same = (each for each in known if each.endswith(f".{name}") and known[each].is_shown)  # without its group
    ours = NAMES_ELSEWHERE.get(name) or next(same, "none")
    hint = f" (did you mean {ours}?)" if ours.split()[0] in known else did_you_mean(key, known)
    allowed = ", ".join(members or groups_of(known))
    raise UserError(f"{UNKNOWN}{key}{hint if group or not members else ', a group'}; allowed: {allowed}")


def check_given(config: Any, usual: Any) -> None:
    """Raise UserError for a setting that was given and has no effect, or cannot be a place on this machine.

    Args:
        usual: the same config where nothing was given.
    """
    values = flatten(config)
    for each, default in zip(settings_of(config), settings_of(usual), strict=True):
        of_class = getattr(each.owner, each.key.rpartition(".")[2], default.value)  # a config of Python may begin there
        if each.value in (default.value, of_class):
            continue
        is_met = all(is_one_of(values[key], wanted) for key, wanted in each.about["needs"].items())
        why = each.unused or f"it has no effect unless {describe_needs(each)}"
        require(is_met and not each.unused, each.key, each.value, f"{show(default.value)} or left out: {why}")
        is_elsewhere = each.key.endswith(("dir", "out")) and NOT_ON_THIS_MACHINE.match(str(each.value))
        require(not is_elsewhere, each.key, each.value, "a path on this machine, without ~ and variables of the shell")


def is_one_of(value: Any, wanted: Any) -> bool:
    """Whether a value is one that another setting needs."""
    if isinstance(wanted, bool):
        return bool(value) == wanted
    return any(part in as_tuple(wanted) for part in as_tuple(value))


def as_command_line(settings: Mapping[str, Any]) -> list[str]:
    """Settings by their names as the words of a command line; `config` is a file, or several."""
    pairs = []
    for name, value in settings.items():
        pairs += [(name, part) for part in (value if name == "config" and isinstance(value, list | tuple) else [value])]
    return [f"--{name}={as_words(value)}" for name, value in pairs]


# --- files ---


class Loader(yaml.SafeLoader):
    """Reads YAML in which no key stands twice."""

    yaml_implicit_resolvers: ClassVar = {}

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """A mapping as it is written."""
        node = super().compose_mapping_node(anchor)
        names = [name.value for name, _ in node.value if name.value != "<<"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.MarkedYAMLError(problem=f"{name} occurs twice", problem_mark=node.end_mark)
        return node


class Dumper(yaml.SafeDumper):
    """Writes in quotes what `Loader` would not read as text."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


for scalar, pattern in SCALARS.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{scalar}", re.compile(f"({pattern})$", re.IGNORECASE), None)


def config_file(name: str) -> Path:
    """The file that `--config` names: itself, or one that mpp brings (`cifar10`, `rivals/mae`)."""
    short = name.removeprefix("configs/").removesuffix(".yaml")
    for file in (Path(name), CONFIGS / f"{short}.yaml"):
        if file.is_file():
            return file
    files = [file for file in CONFIGS.rglob("*.yaml") if file.parent.name != "accelerate"]
    names = sorted(file.relative_to(CONFIGS).with_suffix("").as_posix() for file in files)
    folder, _, stem = short.rpartition("/")
    by_stem = {each.rpartition("/")[2]: each for each in reversed(names)}
    near = [by_stem[each] for each in get_close_matches(stem, by_stem)]
    of_folder = [each for each in names if each.rpartition("/")[0] == folder]
    folders = dict.fromkeys(each.rpartition("/")[0] for each in names if "/" in each)
    known = f"such as {', '.join(near)}" if near else f"{', '.join(of_folder)}; others are in {', '.join(folders)}"
    allowed = f"a YAML file or a config of mpp, {known}"
    raise UserError(f"--config is {show(name)}; it must be {allowed}")


@lru_cache(maxsize=256)
def parse_yaml(text: str) -> Any:
    """The values in YAML, to be copied before they are changed. A comparison reads its files for every case."""
    return yaml.load(text, Loader)


def read_yaml(file: Path) -> dict[str, Any]:
    """The settings of a YAML file."""
    try:
        content = deepcopy(parse_yaml(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{file}{line}: {show(getattr(error, 'problem', None) or str(error))}") from None
    require(isinstance(content, dict), str(file), content, "settings by name")
    return content


def to_yaml(config: Any) -> str:
    """The config as the YAML text that `parse` reads back."""
    return yaml.dump(nested(config), Dumper=Dumper, sort_keys=False)


def parse_saved(config_class: type[ConfigT], file: Path) -> ConfigT:
    """The config that was saved in a file.

    Raises:
        UserError: it is none of this kind, or of a run with code of its own that is not imported.
    """
    require_imports(file.parent)
    return read(config_class(), ["--config", str(file)])
