"""Writes mpp/settings.md, the page of all settings, from the code: after a change of a setting or its docstring.

python tests/settings_page.py
"""

from importlib import import_module
from pathlib import Path

from evaluation.cli import commands, locate_command
from mpp.config import Config
from mpp.config.allowed import describe_allowed
from mpp.config.checks import describe_wanted
from mpp.config.command_line import as_words
from mpp.config.help import DocumentedSetting, about_group, by_group, documented_settings
from mpp.config.terms import names_elsewhere

PAGE = Path(__file__).parents[1] / "mpp" / "settings.md"
BEGINNING = """# Settings

For readers who know which setting they are looking for: all of them, with default, allowed values and what they need
to have an effect. Generated from the code by `python tests/settings_page.py`; do not edit it. `mpp COMMAND --help`
prints the same: the settings that people change first, `--help optim` a group, `--help all` all of them.

The first part has those of `mpp pretrain`, `mpp check` and `mpp memory`; [the second](#other-commands) those of other
commands that are new or differ.
"""


def in_cell(text: str) -> str:
    """A text as a cell of a table: what would be markup there is escaped."""
    return text.replace("|", "\\|").replace("**", "\\*\\*")


def table(settings: list[DocumentedSetting]) -> list[str]:
    """A table of settings."""
    lines = ["| setting | default | allowed | needs | meaning |", "|-|-|-|-|-|"]
    for each in settings:
        group = each.key.rpartition(".")[0]
        needs = []
        for name, wanted in each.field.metadata.get("needs", {}).items():
            needed = name if "." in name or not group else f"{group}.{name}"
            needs.append(f"{needed} {describe_wanted(wanted)}")
        elsewhere = names_elsewhere(each.key)
        remark = f" Elsewhere: {', '.join(elsewhere)}." if elsewhere else ""
        cells = [describe_allowed(each.field), ", ".join(needs), each.text + remark]
        lines.append(f"| `{each.key}` | `{as_words(each.default)}` | {' | '.join(map(in_cell, cells))} |")
    return lines


def page() -> str:
    """The page."""
    of_pretraining = list(documented_settings(Config))
    lines = [BEGINNING]
    for name, settings in by_group(of_pretraining).items():
        lines += [f"## {name}", "", about_group(name, Config), "", *table(settings), ""]
    lines += ["## Other commands", ""]
    shown = {(each.key, str(each.default), each.text) for each in of_pretraining}
    for command in commands():
        _, configs, config = locate_command(command)
        config_class = getattr(import_module(configs), config)
        settings = list(documented_settings(config_class))
        others = [each for each in settings if (each.key, str(each.default), each.text) not in shown]
        if config_class is Config or not others:
            continue
        groups = [name for name in by_group(settings) if name in vars(Config())]
        shared = f" Also settings of {', '.join(f'[{name}](#{name})' for name in groups)}." if groups else ""
        about = " ".join((config_class.__doc__ or "").split())
        lines += [f"### mpp {command}", "", f"{about}{shared}", "", *table(others), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
