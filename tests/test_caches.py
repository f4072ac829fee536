"""Caches that cannot be written: named, with their variable; data and weights are not blamed."""

import errno
import os

import datasets
import pytest
from conftest import dataset_of, encoded, picture, run_command
from huggingface_hub import constants

from mpp.config import SourceConfig
from mpp.data.sources import load_image_datasets
from mpp.errors import UserError
from mpp.runtime.caches import unwritable_cache
from mpp.runtime.command import user_message

NOWHERE = "/etc/passwd/cache"  # below a file: not even root can write there


@pytest.mark.parametrize(
    ("variable", "value", "file"),
    [
        ("HF_HOME", NOWHERE, f"{NOWHERE}/datasets/images.lock"),
        ("HF_HOME", NOWHERE, f"{NOWHERE}/token"),
        ("HF_HOME", NOWHERE, NOWHERE),
        ("HF_HOME", NOWHERE, "/etc/passwd"),  # the first folder that cannot be made
        ("HF_DATASETS_CACHE", NOWHERE, f"{NOWHERE}/images.lock"),
        ("HF_HUB_CACHE", NOWHERE, f"{NOWHERE}/models--timm"),
        ("TORCH_HOME", NOWHERE, f"{NOWHERE}/hub/checkpoints"),
        ("TORCHINDUCTOR_CACHE_DIR", NOWHERE, f"{NOWHERE}/ab"),
        ("TRITON_CACHE_DIR", NOWHERE, f"{NOWHERE}/ab"),
    ],
)
def test_a_cache_that_cannot_be_written_is_named_with_its_variable(monkeypatch, tmp_path, variable, value, file):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(constants, "HF_HOME", os.environ["HF_HOME"])
    hub = os.environ.get("HF_HUB_CACHE", f"{constants.HF_HOME}/hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", hub)
    cause = OSError(errno.ENOTDIR, "Not a directory", file)
    outer = RuntimeError("An error occurred while generating the dataset")
    outer.__cause__ = cause
    message = f"{variable} is {value}, a cache that cannot be written: Not a directory: '{file}'; it must be"
    for error in (cause, outer):
        assert unwritable_cache(error).startswith(message)
        assert user_message(error).startswith(message)
        wrapped = UserError("data.path is images, which cannot be loaded")
        wrapped.__cause__ = error
        assert user_message(wrapped).startswith(message)


def test_a_full_disk_of_a_cache_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "images.arrow"))
    assert user_message(error).startswith(
        f"HF_DATASETS_CACHE is {tmp_path}, a cache that cannot be written: No space left on device"
    )


@pytest.mark.parametrize("file", ["/data/images/1.png", "{cache}/images.arrow", None])
def test_other_files_are_not_taken_for_a_cache(monkeypatch, tmp_path, file):
    """Neither what lies elsewhere, nor a cache that can be written."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    error = PermissionError(errno.EACCES, "Permission denied", file and file.format(cache=tmp_path))
    assert unwritable_cache(error) is None
    assert user_message(error) == str(error)


def test_images_are_not_blamed_for_the_cache(monkeypatch, tmp_path):
    """Tables are prepared there; folders need none."""
    dataset_of([encoded(picture(number)) for number in range(4)]).to_parquet(tmp_path / "train.parquet")
    monkeypatch.setenv("HF_HOME", NOWHERE)
    monkeypatch.setattr(constants, "HF_HOME", NOWHERE)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", f"{NOWHERE}/datasets")
    with pytest.raises(UserError, match=f"^HF_HOME is {NOWHERE}, a cache that cannot be written: .*Not a directory"):
        load_image_datasets(SourceConfig(path=str(tmp_path)))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (("pretrain", "--run.dir={}/run"), "HF_HOME is {home}/.cache/huggingface (by default)"),
        (("knn", "--encoder=hf-hub:timm/none"), "HF_HOME is {home}/.cache/huggingface (by default)"),
        (("pretrain", "--run.dir={}/run", "--run.compile=true"), "TORCHINDUCTOR_CACHE_DIR is {home}/inductor"),
    ],
    ids=["images", "weights", "compiled code"],
)
def test_a_home_that_cannot_be_written_is_one_line(monkeypatch, tmp_path, words, variable, tally):
    home = "/etc/passwd"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", home)
    if "INDUCTOR" in variable:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{home}/inductor")
    ended = run_command("mpp", *(word.format(tmp_path) for word in words))
    error = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 2, ended.stderr
    assert error.startswith(f"error: {variable.format(home=home)}"), ended.stderr
    assert "Traceback" not in ended.stderr
    tally("a home that cannot be written", 1)
