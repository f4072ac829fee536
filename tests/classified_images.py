"""A kept head that knows three classes, images of these classes, and tables of predictions: fixtures of several files.

Pytest imports this before it hides the GPUs: nothing here imports torch at the top.
"""

import csv
import shutil
from pathlib import Path

import pytest
from conftest import FAST, TINY, put_picture, tiny_without

OF_MODEL = tuple(each for each in TINY if each.startswith("--model"))
OF_TRAINING = tiny_without("--probe", "--model", "--data.eval_images")
TO_KEEP = ("--data.eval_fraction=0.3", "--l2=0.01", "--baselines=false", "--save=true")
"""Settings of a probe whose head is kept."""
NAMES = ("Blåmes, adult", 'Ente "鴨"', "owl")


def write_images(folder: Path) -> Path:
    """A folder of images of three classes."""
    for number in range(12):
        put_picture(folder / NAMES[number % 3] / f"{number:02d}, ü.png", number)
    return folder


@pytest.fixture(scope="module")
def class_images(tmp_path_factory):
    """Images of three classes, whose names have commas, quotes and characters of several scripts."""
    return write_images(tmp_path_factory.mktemp("images") / "folder")


@pytest.fixture(scope="module")
def run_with_head(finished_run, class_images, tmp_path_factory):
    """A run with a kept head on the mean of the patches, after its first block."""
    from evaluation import linear

    run = shutil.copytree(finished_run, tmp_path_factory.mktemp("probed") / "run")
    words = (f"--encoder={run}", f"--data.path={class_images}", "--depth=1", f"--out={run}/evaluation/birds.json")
    linear.main([*FAST, *TO_KEEP, *words])
    return run


def read_csv(file: Path) -> list[dict[str, str]]:
    """The rows of a table, as texts."""
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def predict_to(out: Path, classifier: Path, images: Path, *options: str) -> Path:
    """Predict the images of a folder, and return the table."""
    from evaluation import predict

    predict.main([f"--classifier={classifier}", f"--data.path={images}", f"--out={out}", *FAST, *options])
    return out
