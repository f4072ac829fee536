"""The files of the project: names that shadow nothing, one source of versions of the truth."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml
from conftest import ROOT, TINY

DISTRIBUTION = "masked-patch-prediction"


def test_a_module_run_as_a_script_shadows_no_other():
    dependencies = {re.split(r"[\[>=<;\s]", line)[0] for line in importlib.metadata.requires(DISTRIBUTION)}
    taken = sys.stdlib_module_names | {name.replace("-", "_") for name in dependencies} | {"yaml", "PIL", "evaluate"}
    assert taken.isdisjoint(path.stem for folder in ("mpp", "evaluation") for path in (ROOT / folder).glob("*.py"))


def test_every_package_is_in_the_wheel():
    declared = re.findall(r'^    "((?:mpp|evaluation)[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for folder in ("mpp", "evaluation"):
        for file in (ROOT / folder).rglob("__init__.py"):
            assert ".".join(file.parent.relative_to(ROOT).parts) in declared
    for folder in {file.parent for file in (ROOT / "configs").rglob("*.yaml")}:
        assert ".".join(("mpp", *folder.relative_to(ROOT).parts)) in declared


def test_the_lowest_versions_are_those_that_are_promised():
    promised = dict(re.findall(r'"([a-z]+)(?:\[\w+\])?>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    lowest = dict(re.findall(r"^([a-z]+)==([\d.]+)$", (ROOT / "tests" / "lowest.txt").read_text(), re.MULTILINE))
    promised.pop("setuptools")
    assert {name: version.removesuffix(".0") for name, version in lowest.items()} == promised


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
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked.stdout.splitlines():
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

    folder, birds = str(tmp_path / "run"), ("--data.path=null", "--data.image_column=null", "--data.label_column=null")
    env = os.environ | {"PYTHONPATH": str(site)}
    words = (sys.executable, "-c", INSTALLED, folder, "--config=cifar10", "--config=rivals/mae", *TINY, *birds)
    ended = subprocess.run(words, cwd=empty, env=env, capture_output=True, text=True)
    assert f"wrote {folder}/evaluation" in ended.stdout, ended
    assert ended.stdout.splitlines()[-1].startswith(str(site))
    assert ended.returncode == 2 and "such as cifar10" in ended.stderr
    assert list(empty.iterdir()) == []


@pytest.mark.faults
def test_the_published_files_carry_the_licence_and_one_version(published):
    (wheel,) = published.glob("*.whl")
    version = importlib.metadata.version(DISTRIBUTION)
    assert {file.name for file in published.iterdir()} == {
        f"masked_patch_prediction-{version}-py3-none-any.whl",
        f"masked_patch_prediction-{version}.tar.gz",
    }
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version and f"## {version}" in (ROOT / "mpp" / "CHANGELOG.md").read_text()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shipped = {"mpp/birds/ATTRIBUTION.md", "evaluation/pages/page.html", "mpp/zoo/simclr_cifar10/model.safetensors"}
    assert shipped <= set(names)
