"""A step whose images cannot all be read is dropped whole, and done again with the same bits."""

import itertools

import pytest
from conftest import TINY, read_metrics

from evaluation import supervised
from mpp.errors import ReadFailed
from mpp.training.loop import Loop

ACCUMULATION = "--data.batch_size=2"  # four passes of the tests' eight images


@pytest.mark.parametrize("model", [[], ["--model.name=test_resnet"]], ids=["ViT", "batch norm"])
def test_a_step_without_all_of_its_images_is_dropped_whole(tmp_path, monkeypatch, model):
    options = [word for word in TINY if not word.startswith("--probe") and not (model and "model." in word)]

    def run(name: str) -> bytes:
        folder = tmp_path / name
        supervised.main([*options, *model, "--model.img_size=32", ACCUMULATION, f"--run.dir={folder}"])
        return (folder / "encoder" / "model.safetensors").read_bytes()

    whole = run("whole")
    with monkeypatch.context() as patch:
        load_batch, passes = Loop.load_batch, itertools.count(1)

        def failing_load(self):  # in the middle of the second step
            return ReadFailed("images cannot be read") if next(passes) == 4 + 3 else load_batch(self)

        patch.setattr(Loop, "load_batch", failing_load)
        with pytest.raises(ReadFailed, match="a checkpoint after step 1 is written"):
            run("cut")
    assert run("cut") == whole
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
