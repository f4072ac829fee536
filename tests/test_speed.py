"""Speed between two lines of metrics: with and without evaluations, across restarts."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mpp.training import log
from mpp.training.log import Speed


@pytest.fixture
def clock(monkeypatch):
    """Its seconds pass when a test lets them."""
    fake = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now)
    return fake


class SimulatedEvent:
    """An event of a device that is done with its queue at these milliseconds."""

    times: Iterator[float]

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = next(self.times)

    def elapsed_time(self, later):
        return later.at - self.at


def test_a_gpu_waits_only_while_it_has_nothing_to_compute(clock, monkeypatch):
    """Its own clock says so: the host, which runs ahead of it, waits here for longer each time."""
    SimulatedEvent.times = iter([0.0, 500.0, 700.0, 700.0, 900.0, 930.0])
    monkeypatch.setattr(torch.cuda, "Event", SimulatedEvent)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    one = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    measured = Speed(flops=1, images_per_step=8, accelerator=one, history=[])
    monkeypatch.setattr(log, "memory_bytes", lambda device: 0)
    for _ in range(3):
        with measured.waiting():
            clock.now += 1
    assert measured.read(done=1)["speed/data_wait"] == pytest.approx(0.53 / 3)
    clock.now += 1
    assert measured.read(done=2)["speed/data_wait"] == 0


def test_evaluations_are_in_the_hours_and_not_in_the_speed(clock):
    three = SimpleNamespace(device=torch.device("cpu"), num_processes=3)
    before = [{"step": 5, "speed/hours": 1.0, "speed/device_hours": 8.0}]
    measured = Speed(flops=10**12, images_per_step=64, accelerator=three, history=before)
    for _ in range(10):
        with measured.waiting():
            clock.now += 0.5
        clock.now += 1.5
        measured.steps += 1
    with measured.paused():
        clock.now += 60
    scalars = measured.read(done=15)
    assert scalars["speed/images_per_second"] == 32
    assert scalars["speed/images_per_second_overall"] == 8
    assert scalars["speed/executed_tflops"] == 0.5
    assert scalars["speed/data_wait"] == 0.25
    assert scalars["speed/hours"] == pytest.approx(1 + 80 / 3600)
    assert scalars["speed/device_hours"] == pytest.approx(8 + 3 * 80 / 3600)  # 8 are of an earlier start
    clock.now += 2
    measured.steps += 1
    following = measured.read(done=16)
    assert (scalars["compute/pflop"], following["speed/data_wait"]) == (15e-3, 0)
    assert following["speed/images_per_second"] == following["speed/images_per_second_overall"] == 32
    assert following["speed/hours"] == pytest.approx(1 + 82 / 3600)
