"""The command `mpp`: every command by its name, and what is wrong said before torch is loaded."""

import os
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import TINY, finished, start_command

from evaluation.cli import SELDOM, commands, locate_command
from mpp.config import settings_of

INSTALLED = str(Path(sys.executable).with_name("mpp"))
LISTED = """
import sys
sys.argv = ["mpp", *sys.argv[1:]]
from evaluation.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, "numpy" in sys.modules)
"""


def console(*words):
    """What the command says, and whether torch and numpy were loaded."""
    ended = subprocess.run([sys.executable, "-c", LISTED, *words], capture_output=True, text=True)
    *said, loaded = ended.stdout.splitlines()
    return ended.returncode, "\n".join(said), ended.stderr, loaded


def test_help_lists_every_command_and_loads_no_torch():
    code, said, _, loaded = console("--help", "all")
    assert (code, loaded) == (0, "False False") and all(f"  {name} " in said for name in commands())
    for name in commands():
        assert hasattr(import_module(locate_command(name)[0]), "main")
    _, common, *_ = console("--help")
    assert "  knn " in common and not any(f"\n  {name} " in common for name in SELDOM)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("fewshto",), "error: unknown command fewshto (did you mean fewshot?)"),
        (("pretrain", "--optim.lrr=1"), "error: unknown setting optim.lrr (did you mean optim.lr?)"),
    ],
)
def test_what_is_misspelt_is_one_line_before_torch_is_loaded(words, error):
    code, _, said, loaded = console(*words)
    assert (code, loaded) == (2, "False False") and said.startswith(error) and said.count("\n") == 1


@pytest.mark.parametrize("name", commands())
def test_help_of_a_command_has_every_setting_once(name, capsys):
    module, configs, config = locate_command(name)
    with pytest.raises(SystemExit):
        import_module(module).main(["--help", "all"])
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]
    assert shown == [each.key for each in settings_of(getattr(import_module(configs), config)()) if each.is_shown]
    assert all(after.startswith("      ") for line, after in pairwise(lines) if line.startswith("  --"))  # documented


@pytest.mark.parametrize("words", [("--help",), ("pretrain", "--help")])
def test_help_may_be_cut_short(words):
    """`mpp --help | head`: who reads is gone before it is written."""
    gone, written = os.pipe()
    os.close(gone)
    ended = subprocess.run([INSTALLED, *words], stdout=written, stderr=subprocess.PIPE, text=True)
    os.close(written)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.faults
def test_the_installed_command_pretrains(tmp_path):
    folder = tmp_path / "run"
    ended = finished(start_command(INSTALLED, "pretrain", *TINY, f"--run.dir={folder}"))
    assert ended.returncode == 0 and (folder / "encoder" / "model.safetensors").is_file(), ended.stderr
