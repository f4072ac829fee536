"""Speed between two lines of metrics: with and without evaluations, across restarts."""

import time
from types import SimpleNamespace

import pytest
import torch

from mpp.training.log import Speed


class FakeClock:
    """Seconds that a test lets pass."""

    def __init__(self):
        self.now = 0.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now)
    return fake


def test_evaluations_are_in_the_hours_and_not_in_the_speed(clock):
    three = SimpleNamespace(device=torch.device("cpu"), num_processes=3)
    before = [{"step": 5, "speed/hours": 1.0, "speed/device_hours": 8.0}]
    measured = Speed(flops=10**12, images_per_step=64, accelerator=three, history=before)
    for _ in range(10):
        clock.pass_(2)
        measured.steps += 1
    with measured.paused():
        clock.pass_(60)
    measured.waited = 5.0
    scalars = measured.read(done=15)
    assert scalars["speed/images_per_second"] == 32
    assert scalars["speed/images_per_second_overall"] == 8
    assert scalars["speed/executed_tflops"] == 0.5
    assert scalars["speed/data_wait"] == 0.25
    assert scalars["speed/hours"] == pytest.approx(1 + 80 / 3600)
    assert scalars["speed/device_hours"] == pytest.approx(8 + 3 * 80 / 3600)  # 8 are of an earlier start
    clock.pass_(2)
    measured.steps += 1
    following = measured.read(done=16)
    assert (scalars["compute/pflop"], following["speed/data_wait"]) == (15e-3, 0)
    assert following["speed/images_per_second"] == following["speed/images_per_second_overall"] == 32
    assert following["speed/hours"] == pytest.approx(1 + 82 / 3600)
