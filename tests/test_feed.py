"""Batches taken when their forward pass begins, which a device computes meanwhile, and steps that are dropped."""

import pytest
from comparisons import noted
from conftest import TINY_TUNING, read_metrics, weights_of

from evaluation import supervised
from mpp.errors import ReadFailed
from mpp.training.loop import Loop, TrainingStep


def test_a_step_without_all_of_its_images_is_dropped_whole(tmp_path, monkeypatch):
    """So are its batch norms' statistics."""
    words = (*TINY_TUNING, "--model.name=test_resnet", "--model.img_size=32", "--run.steps=2")

    def run(name):
        folder = tmp_path / name
        supervised.main([*words, "--data.batch_size=2", f"--run.dir={folder}"])  # four passes of eight images
        return weights_of(folder)

    whole = run("whole")
    with monkeypatch.context() as patch:
        load_batch, passes, loads = Loop.load_batch, noted(patch, TrainingStep, "add_pass"), []

        def failing_load(self):  # in the middle of the second step
            assert len(passes) == len(loads)
            loads.append(self)
            return ReadFailed("images cannot be read") if len(loads) == 4 + 3 else load_batch(self)

        patch.setattr(Loop, "load_batch", failing_load)
        with pytest.raises(ReadFailed, match="a checkpoint after step 1 is written"):
            run("cut")
    assert run("cut") == whole
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
