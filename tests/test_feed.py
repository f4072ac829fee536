"""Batches taken when their forward pass begins: order, steps that are dropped, and a simulated device's idle time."""

import itertools
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import read_metrics, tiny_without, weights_of

from evaluation import supervised
from mpp.errors import ReadFailed
from mpp.training.loop import Loop

ACCUMULATION = "--data.batch_size=2"  # four passes of the tests' eight images


@pytest.mark.parametrize("model", [[], ["--model.name=test_resnet"]], ids=["ViT", "batch norm"])
def test_a_step_without_all_of_its_images_is_dropped_whole(tmp_path, monkeypatch, model):
    options = tiny_without("--probe", *(["--model"] if model else []))

    def run(name):
        folder = tmp_path / name
        supervised.main([*options, *model, "--model.img_size=32", ACCUMULATION, f"--run.dir={folder}"])
        return weights_of(folder)

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


class SimulatedClock:
    """A loader and a device by a clock of their own: the loader works ahead, the device works off its queue.

    Args:
        ahead: batches that are loaded before they are taken, at most.

    The host is one pass ahead of the device: a GPU's queue holds a thousand kernels, and a pass has hundreds.
    """

    load = 1.0
    """Seconds a batch, of all loader processes together."""
    compute = 1.1
    """Seconds a forward and backward pass."""

    def __init__(self, ahead):
        self.ahead = ahead
        self.host = self.device = self.idle = 0.0
        self.loaded_at: list[float] = []
        self.taken_at: list[float] = []

    def batches(self):
        """Batches, each when it is loaded."""
        while True:
            number = len(self.loaded_at)
            begin = self.loaded_at[-1] if number else 0.0
            if number >= self.ahead:
                begin = max(begin, self.taken_at[number - self.ahead])
            self.loaded_at.append(begin + self.load)
            self.host = max(self.host, self.loaded_at[-1])
            self.taken_at.append(self.host)
            yield SimpleNamespace(images=[0] * 8, unreadable=[], cursor=None)

    def compute_pass(self):
        """Queue a pass on the device."""
        self.host = max(self.host, self.device - self.compute)
        self.idle += max(0.0, self.host - self.device)
        self.device = max(self.host, self.device) + self.compute

    def wait_for_device(self):
        """The host reads a number of the device."""
        self.host = max(self.host, self.device)


@pytest.mark.parametrize(("passes", "ahead"), [(32, 24), (32, 4), (4, 4)])
def test_a_device_is_not_idle_while_a_loader_keeps_up(passes, ahead):
    """For 200 steps, of which every twentieth is logged; the loader is 1.1 times as fast as the device."""
    clock = SimulatedClock(ahead)
    loop = SimpleNamespace(
        preemption=SimpleNamespace(wait_for=lambda get: get(), agreed=lambda failed=False: failed),
        tracker=SimpleNamespace(warn_unreadable=lambda _: None),
        speed=SimpleNamespace(waiting=nullcontext),
        batches=clock.batches(),
    )
    loop.load_batch = partial(Loop.load_batch, loop)
    for step in range(200):
        for _ in range(passes):
            Loop.next_batch(loop, step)
            clock.compute_pass()
        if step == 0:
            clock.idle = 0.0  # the first batch is waited for in any case
        if (step + 1) % 20 == 0:
            clock.wait_for_device()
    assert clock.idle / clock.device < 0.02
