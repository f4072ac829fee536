"""Speed between two lines of metrics: with and without evaluations, across restarts, and a GPU's idle time."""

import time

import pytest
import torch

from mpp.training import speed
from mpp.training.speed import Speed


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
    measured = Speed(
        flops=10**12, images_per_step=64, device=torch.device("cpu"), devices=3, hours=1.0, device_hours=8.0
    )
    for _ in range(10):
        clock.pass_(2)
        measured.count_step()
    with measured.paused():
        clock.pass_(60)
    scalars = measured.read(waited=5.0)
    assert scalars["speed/images_per_second"] == 32
    assert scalars["speed/images_per_second_overall"] == 8
    assert scalars["speed/executed_tflops"] == 0.5
    assert scalars["speed/data_wait"] == 0.25
    assert scalars["speed/hours"] == pytest.approx(1 + 80 / 3600)
    assert scalars["speed/device_hours"] == pytest.approx(8 + 3 * 80 / 3600)  # 8 are of an earlier start
    assert "speed/gpu_idle" not in scalars
    clock.pass_(2)
    measured.count_step()
    following = measured.read(waited=0.0)
    assert following["speed/images_per_second"] == following["speed/images_per_second_overall"] == 32
    assert following["speed/hours"] == pytest.approx(1 + 82 / 3600)


class FakeGPU:
    """A queue of work: an event has the time at which the GPU comes to it."""

    def __init__(self, clock: FakeClock):
        self.clock = clock
        self.done_at = 0.0

    def work(self, seconds: float) -> None:
        """Queue work."""
        self.done_at = max(self.done_at, self.clock.now) + seconds

    def event(self, enable_timing: bool) -> "FakeEvent":
        """torch.cuda.Event."""
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGPU):
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.work(0)
        self.at = self.gpu.done_at

    def query(self) -> bool:
        return self.at <= self.gpu.clock.now

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1000 * (later.at - self.at)


@pytest.fixture
def gpu(clock, monkeypatch):
    fake = FakeGPU(clock)
    monkeypatch.setattr(speed.torch.cuda, "Event", fake.event)
    monkeypatch.setattr(speed.torch.cuda, "synchronize", lambda device: clock.pass_(max(0.0, fake.done_at - clock.now)))
    monkeypatch.setattr(speed.torch.cuda, "max_memory_allocated", lambda device: 0)
    return fake


def test_a_gpu_is_idle_where_its_queue_is_empty_and_not_where_the_host_waits(clock, gpu):
    measured = Speed(flops=1, images_per_step=1, device=torch.device("cuda"), devices=1)
    gpu.work(8)
    with measured.waiting():
        clock.pass_(5)  # the GPU still computes
    gpu.work(1)  # until 9
    with measured.waiting():
        clock.pass_(7)  # until 12: idle for 3
    gpu.work(8)
    with measured.paused():
        pass
    scalars = measured.read(waited=12.0)
    assert scalars["speed/gpu_idle"] == pytest.approx(3 / 20)
    assert scalars["speed/data_wait"] == pytest.approx(12 / 20)


def test_events_are_no_more_than_the_gpu_is_behind(clock, gpu):
    """5,000 steps between two lines: the GPU takes a second a step, and is idle for half of one."""
    measured = Speed(flops=1, images_per_step=1, device=torch.device("cuda"), devices=1)
    most = 0
    for _ in range(5_000):
        with measured.waiting():
            clock.pass_(1.5)
        gpu.work(1)
        measured.count_step()
        most = max(most, len(measured.gaps))
    assert most <= 2
    assert measured.read(waited=0.0)["speed/gpu_idle"] == pytest.approx(1 / 3, rel=1e-3)
    with measured.waiting():
        pass
    clock.pass_(1)
    assert measured.read(waited=0.0)["speed/gpu_idle"] == 0
