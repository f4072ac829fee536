"""Importing mpp and evaluation changes no state of other libraries."""

import subprocess
import sys

from conftest import ROOT

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


def test_importing_all_modules_changes_no_state_of_other_libraries():
    ended = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stdout + ended.stderr
