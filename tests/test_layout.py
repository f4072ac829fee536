"""The files of the project: names that shadow nothing, one source of versions of the truth."""

import importlib.metadata
import re
import subprocess
import sys

import pytest
from conftest import ROOT

MODULES = [path for folder in ("mpp", "evaluation") for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_module_run_as_a_script_shadows_no_other(module):
    dependencies = {re.split(r"[\[>=<;\s]", line)[0] for line in importlib.metadata.requires("mpp")}
    taken = sys.stdlib_module_names | {name.replace("-", "_") for name in dependencies} | {"yaml", "PIL", "evaluate"}
    assert module.stem not in taken


def test_top_level_is_what_the_readme_says():
    allowed = {"mpp", "configs", "evaluation", "tests", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == allowed


def test_birds_travel_with_the_package():
    assert {path.name for path in (ROOT / "mpp" / "birds").iterdir()} == {
        "ATTRIBUTION.md",
        "train-00000-of-00001.parquet",
        "test-00000-of-00001.parquet",
    }
