"""The command `mpp`: every command by its name, and what is wrong said before torch is loaded."""

import os
import pty
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from colours import save_classes, write
from conftest import ROOT, TINY, run_command

from evaluation.cli import SELDOM, commands, locate_command
from mpp.config import settings_of
from mpp.runtime.files import write_complete
from mpp.runtime.messages import printable
from mpp.training.verdict import read_verdict

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
    ended = run_command(sys.executable, "-c", LISTED, *words)
    *said, loaded = ended.stdout.splitlines()
    return ended.returncode, "\n".join(said), ended.stderr, loaded


def test_help_lists_every_command_and_loads_no_torch():
    code, said, _, loaded = console("--help", "all")
    assert (code, loaded) == (0, "False False") and all(f"  {name} " in said for name in commands())
    _, common, *_ = console("--help")
    assert "  knn " in common and not any(f"\n  {name} " in common for name in SELDOM)


@pytest.mark.parametrize(
    "words, error",
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
def test_the_installed_command_pretrains(tmp_path, tally):
    """The default run beats copies in a quarter of its length, and nothing is wrong with it."""
    ended = run_command(
        INSTALLED, "pretrain", f"--run.dir={tmp_path}", "--run.steps=400", "--run.threads=1", "--run.report=false"
    )
    assert not ended.returncode and (tmp_path / "encoder").is_dir(), ended.stderr
    verdict = read_verdict(tmp_path)
    assert "copy baseline 32.1%, beaten" in verdict["line"]  # as on the front page
    assert all(each["check"] == "data-loading bottleneck" for each in verdict["warnings"])
    tally("runs that are healthy: the verdict says so")


# --- text in and out: any locale, any terminal, any name of a file ---


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NAMES = "± Vögel caf\udce9"
SAYS = f"""
import sys
from mpp.runtime.messages import steady_output
steady_output()
for stream in (sys.stdout, sys.stderr):
    print({NAMES!a}, file=stream)
"""


def said(*words, **environment):
    return subprocess.run(
        [sys.executable, *words], env=os.environ | environment, capture_output=True, text=True, encoding="utf-8"
    )


@pytest.mark.faults
@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, ASCII], ids=["ascii", "an ASCII locale"])
def test_what_a_terminal_cannot_show_is_an_escape(environment):
    ended = said("-c", SAYS, **environment)
    line = "\\xb1 V\\xf6gel caf\\udce9\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, line, line)


WRITES_ON = """
import os, signal, sys
from mpp.runtime.messages import steady_output
steady_output()
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print("begun", flush=True)
os.read(int(sys.argv[1]), 1)
for stream in (sys.stdout, sys.stderr):
    print("not read", file=stream, flush=True)
os._exit(7)
"""


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_output_without_a_reader_ends_nothing(kind):
    reader, output = pty.openpty() if kind == "terminal" else os.pipe()
    wait, go = os.pipe()
    words = [sys.executable, "-c", WRITES_ON, str(wait)]
    process = subprocess.Popen(words, stdout=output, stderr=output, pass_fds=[wait], cwd=ROOT)
    os.close(output)
    assert os.read(reader, 5) == b"begun"
    os.close(reader)
    os.write(go, b"1")
    assert process.wait() == 7


@pytest.mark.faults
def test_a_full_disk_is_not_taken_for_a_terminal_that_is_gone():
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", SAYS], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert ended.returncode != 0 and "No space left on device" in ended.stderr


def test_names_that_are_no_utf_8_are_written_as_escapes(tmp_path):
    name = os.fsdecode(b"caf\xe9 \xc3\xa4.jpg")
    assert printable(name) == "caf\\udce9 ä.jpg"
    write_complete(tmp_path / "names.txt", f"{name}\n")
    assert (tmp_path / "names.txt").read_bytes() == b"caf\\udce9 \xc3\xa4.jpg\n"


@pytest.mark.faults
@pytest.mark.parametrize("environment", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}], ids=["locale", "terminal"])
def test_a_run_of_umlauts_where_all_is_ascii(tmp_path, environment, tally):
    """Names of folders, files and classes, in a config and on the command line, with loader processes."""
    save_classes(tmp_path / "Vögel" / "train", ("Ähre", "über"), 6)
    settings = f"data:\n  path: {tmp_path}/Vögel\nrun:\n  dir: {tmp_path}/läufe\n"
    write(tmp_path, {"größe.yaml": settings} | {f"Vögel/train/{name}/ß.png": "no image" for name in ("Ähre", "über")})
    words = ("-m", "mpp.pretrain", *TINY, f"--config={tmp_path}/größe.yaml", "--data.workers=1", "--run.steps=8")
    ended = said(*words, "--data.eval_fraction=0.3", **environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    listed = (tmp_path / "läufe" / "unreadable.txt").read_text(encoding="utf-8")
    assert "über/ß.png" in listed or "Ähre/ß.png" in listed
    tally("umlauts where the locale or the terminal is ASCII")
