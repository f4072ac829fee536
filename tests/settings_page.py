"""Writes mpp/settings.md, the page of all settings, from the code: after a change of a setting or its docstring.

python tests/settings_page.py
"""

from importlib import import_module
from pathlib import Path

from evaluation.cli import commands, locate_command
from mpp.config.help import page

PAGE = Path(__file__).parents[1] / "mpp" / "settings.md"
BEGINNING = """# Settings

For readers who know which setting they are looking for: all of them, with default, allowed values and what they need
to have an effect. Generated from the code by `python tests/settings_page.py`; do not edit it. `mpp COMMAND --help`
prints the same: the settings that people change first, `--help optim` a group, `--help all` all of them.

`mpp check` and `mpp memory` have the settings of `mpp pretrain`. Other commands have those that are listed below them,
and settings of earlier commands.
"""


def whole_page() -> str:
    """The page."""
    configs = {}
    for name in sorted(commands(), key="pretrain".__ne__):  # which has most settings
        if name not in ("check", "memory"):
            _, module, config = locate_command(name)
            configs[name] = getattr(import_module(module), config)()
    return f"{BEGINNING}{page(configs)}\n"


if __name__ == "__main__":
    PAGE.write_text(whole_page(), encoding="utf-8")
