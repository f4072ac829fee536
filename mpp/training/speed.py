"""Speed and memory of training between two lines of metrics, with and without evaluations, and a GPU's idle time."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from mpp.training.history import DEVICE_HOURS, HOUR


class Speed:
    """Speed and memory between two lines of metrics.

    Args:
        flops: executed by a step.
        images_per_step: over all processes.
        devices: of all processes, one each.
        hours: that the run has trained before this start.
        device_hours: the same times the devices that it had then.
    """

    def __init__(
        self,
        flops: int,
        images_per_step: int,
        device: torch.device,
        devices: int,
        hours: float = 0.0,
        device_hours: float = 0.0,
    ):
        self.flops = flops
        self.images_per_step = images_per_step
        self.device = device
        self.devices = devices
        self.hours = hours
        self.device_hours = device_hours
        self.steps = 0
        self.line_begin = time.perf_counter()
        self.paused_seconds = 0.0
        """Since the last line, for evaluations and checkpoints."""
        self.idle_seconds = 0.0
        """Of the GPU, since the last line."""
        self.gaps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Events before and after each wait for a batch to which the GPU has yet to come."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, no training is timed; a GPU's unfinished work of the steps before is."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While open, the host waits for a batch. A GPU is idle once it has done its queued work."""
        if self.device.type != "cuda":
            yield
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self.gaps.append((before, after))
        self.add_idle_time()

    def count_step(self) -> None:
        """Note that a step is done."""
        self.steps += 1

    def read(self, waited: float) -> dict[str, float]:
        """Scalars since the last line: images/s over all processes, waiting for data, TFLOP/s, hours, device-hours, GB.

        Args:
            waited: seconds for data since the last call.
        """
        now = time.perf_counter()
        wall_seconds = now - self.line_begin
        seconds = wall_seconds - self.paused_seconds
        self.hours += wall_seconds / HOUR
        self.device_hours += self.devices * wall_seconds / HOUR
        scalars = {
            "speed/images_per_second": self.images_per_step * self.steps / seconds,
            "speed/images_per_second_overall": self.images_per_step * self.steps / wall_seconds,
            "speed/data_wait": waited / seconds,
            "speed/executed_tflops": self.flops * self.steps / seconds / 1e12,
            "speed/hours": self.hours,
            DEVICE_HOURS: self.device_hours,
            "speed/memory_gb": self.memory_bytes() / 1e9,
        }
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.add_idle_time()
            scalars["speed/gpu_idle"] = self.idle_seconds / seconds
        self.line_begin = now
        self.paused_seconds = 0.0
        self.steps = 0
        self.idle_seconds = 0.0
        return scalars

    def add_idle_time(self) -> None:
        """Add the seconds that the GPU waited for batches, by its own clock, as far as it is. The host does not wait.

        So there are no more events than the GPU is behind, however many steps are between two lines.
        """
        while self.gaps and self.gaps[0][1].query():
            before, after = self.gaps.popleft()
            self.idle_seconds += before.elapsed_time(after) / 1000

    def memory_bytes(self) -> int:
        """Largest memory of the GPU's tensors, or that of this process now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return psutil.Process().memory_info().rss
