"""The files of the project: names that shadow nothing, one source of versions of the truth."""

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml
from conftest import ROOT, run_command, tiny_without

DISTRIBUTION = "masked-patch-prediction"
MODULES = [path for folder in ("mpp", "evaluation") for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_module_run_as_a_script_shadows_no_other(module):
    dependencies = {re.split(r"[\[>=<;\s]", line)[0] for line in importlib.metadata.requires(DISTRIBUTION)}
    taken = sys.stdlib_module_names | {name.replace("-", "_") for name in dependencies} | {"yaml", "PIL", "evaluate"}
    assert module.stem not in taken


SCRIPTS = [module for module in MODULES if "run_main(main)" in module.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_is_a_command(script, monkeypatch, capsys):
    """As `accelerate launch` runs it: by its path."""
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code and "--" in capsys.readouterr().out


def test_the_lowest_versions_are_those_that_are_promised():
    promised = dict(re.findall(r'"([a-z]+)(?:\[\w+\])?>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    lowest = dict(re.findall(r"^([a-z]+)==([\d.]+)$", (ROOT / "tests" / "lowest.txt").read_text(), re.MULTILINE))
    promised.pop("setuptools")
    assert {name: version.removesuffix(".0") for name, version in lowest.items()} == promised


def tracked_files():
    """The names of what git tracks."""
    tracked = run_command("git", "ls-files")
    if tracked.returncode:
        pytest.skip("not a git checkout")
    return tracked.stdout.splitlines()


INSTALLED = """
import runpy, sys
def run(*words):
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
folder, *words = sys.argv[1:]
run("mpp.pretrain", *words, "--run.dir", folder)
run("evaluation.fewshot", "--encoder", folder, "--shots=1", "--threads=1")
import mpp
print(mpp.__file__)
run("mpp.pretrain", "--config", "cifar11")
"""  # as `python -m` each, in one process


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The sdist of what is tracked, and the wheel that is built from this sdist: what an index would get."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    subprocess.run(build, check=True, capture_output=True)
    return folder


@pytest.mark.faults
def test_an_installed_wheel_works_from_an_empty_folder(published, tmp_path):
    """Not editable, not from a checkout: modules and configs come from the wheel."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    (wheel,) = published.glob("*.whl")
    options = ("--quiet", "--no-deps", "--no-index", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    empty.mkdir()

    short = [*tiny_without("--model.img_size"), "--run.print_config=true"]
    folder, birds = str(tmp_path / "run"), ["--data.path=null", "--data.image_column=null", "--data.label_column=null"]
    composed = ("--config", "cifar10", "--config", "rivals/mae")
    env = os.environ | {"PYTHONPATH": str(site)}
    words = (sys.executable, "-c", INSTALLED, folder, *composed, *short, *birds)
    ended = subprocess.run(words, cwd=empty, env=env, capture_output=True, text=True)
    assert "img_size: 32\n  patch_size: 4\n" in ended.stdout and f"wrote {folder}/evaluation" in ended.stdout, ended
    assert ended.stdout.splitlines()[-1].startswith(str(site))
    assert ended.returncode == 2 and "such as cifar10" in ended.stderr
    assert list(empty.iterdir()) == []


@pytest.mark.faults
def test_the_published_files_carry_the_licence_and_one_version(published):
    (wheel,), (sdist,) = published.glob("*.whl"), published.glob("*.tar.gz")
    version = importlib.metadata.version(DISTRIBUTION)
    assert wheel.name == f"masked_patch_prediction-{version}-py3-none-any.whl"
    assert sdist.name == f"masked_patch_prediction-{version}.tar.gz"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "mpp" / "CHANGELOG.md").read_text()
    assert citation["version"] == version and f"## {version}" in changelog
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shipped = {"mpp/birds/ATTRIBUTION.md", "evaluation/pages/page.html", "mpp/zoo/simclr_cifar10/model.safetensors"}
    shipped |= {f"mpp/{name}" for name in tracked_files() if re.match(r"configs/.*\.yaml", name)}
    assert shipped | {name for name in tracked_files() if re.match(r"(mpp|evaluation)/.*\.py", name)} <= set(names)


def test_python_in_the_folder_around_a_clone_imports_the_package(tmp_path):
    """Named as README.md says: a folder `mpp` there would be a namespace package in its place."""
    clone = re.search(r"git clone URL (\S+) && cd \1\n", (ROOT / "README.md").read_text())[1]
    (tmp_path / clone / "mpp").mkdir(parents=True)
    words = [sys.executable, "-c", "import mpp; mpp.__version__"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # as installed
    ended = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


# --- importing mpp and evaluation changes no state of other libraries ---


IMPORT_ALL = """
import csv, importlib, pkgutil, warnings
import accelerate, datasets, sklearn, timm, torchvision  # which have filters of their own
import matplotlib
from PIL import Image

import evaluation, mpp

def state():
    return {
        "pixels": Image.MAX_IMAGE_PIXELS,
        "cell": csv.field_size_limit(),
        "style": dict(matplotlib.rcParams),
        "filters": list(warnings.filters),
    }

before = state()
for package in (mpp, evaluation):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
after = state()
print(*(name for name in before if before[name] != after[name]))
"""


@pytest.mark.faults  # it takes seconds
def test_importing_all_modules_changes_no_state_of_other_libraries():
    ended = run_command(sys.executable, "-c", IMPORT_ALL)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stdout + ended.stderr
