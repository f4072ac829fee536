"""Logging: scalars to metrics.jsonl and to Accelerate's trackers (TensorBoard by default); the speed of training."""

import json
import math
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker, get_available_trackers
from torch import Tensor
from tqdm import tqdm

from mpp.config import RunConfig, TrainingConfig, flatten, require
from mpp.config.parsing import to_yaml
from mpp.errors import UserError, one_line
from mpp.runtime.files import write_complete
from mpp.runtime.messages import printable
from mpp.runtime.processes import maximum_of_all
from mpp.training.history import DEVICE_HOURS, EVALUATED, HOUR, PFLOP, Line, last_value

METRICS_FILE = "metrics.jsonl"
UNREADABLE_FILE = "unreadable.txt"
CHARTS = {
    "masked patches": {
        group: ["Multiline", [f"^{group}/(accuracy|two_nearest|nearest|most_frequent)$"]]
        for group in ("train", "heldout")
    }
}
"""Scalars that TensorBoard draws together: title -> chart -> kind, and patterns of their tags."""


def check_trackers(run: RunConfig) -> None:
    """Refuse trackers that do not exist or are not installed: Accelerate would drop the latter without a word."""
    installed = sorted(map(str, get_available_trackers()))
    for name in run.trackers:
        require(name in installed, "run.trackers", name, f"installed: {', '.join(installed)}")


class Tracker:
    """Writes metrics on the main process; resuming drops those after the checkpoint, so that no curve doubles back.

    Args:
        step: steps done; later lines of metrics.jsonl and later TensorBoard events are dropped.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, config: TrainingConfig, step: int):
        self.accelerator, self.folder = accelerator, folder
        self.metrics_file, self.unreadable_file = folder / METRICS_FILE, folder / UNREADABLE_FILE
        self.unreadable = self.read_unreadable()
        if not accelerator.is_main_process:
            return  # without trackers
        last_kept = step or -1  # without a checkpoint the untrained model is logged again
        drop_after(folder, last_kept)
        names = config.run.trackers
        tensorboard = partial(TensorBoardTracker, "", folder, purge_step=last_kept + 1)
        accelerator.log_with = [tensorboard() if name == "tensorboard" else name for name in names]
        wandb = {"name": folder.name, "id": wandb_id(folder), "resume": "allow"} if "wandb" in names else {}
        try:
            accelerator.init_trackers(config.run.project, init_kwargs={"wandb": wandb})
        except BaseException:
            accelerator.trackers.clear()  # those that were not opened cannot be closed
            raise
        for tracker in accelerator.trackers:
            if tracker.name == "tensorboard":
                if config.objective is not None:
                    tracker.writer.add_custom_scalars(CHARTS)
                tracker.writer.add_text("config", f"```yaml\n{to_yaml(config)}```", max(last_kept, 0))
            else:
                settings = flatten(config).items()  # trackers take no values but numbers and texts
                scalars = {key: value if isinstance(value, int | float) else str(value) for key, value in settings}
                tracker.store_init_configuration(scalars)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars of `step`. A name without a group goes to TensorBoard's group `train`."""
        if not self.accelerator.is_main_process:
            return
        line = json.dumps({"step": step, **values})
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise UserError(
                f"{self.metrics_file} cannot be written: {one_line(error)}; the last checkpoint is intact"
            ) from error
        self.accelerator.log({name if "/" in name else f"train/{name}": values[name] for name in values}, step)

    def log_images(self, step: int, name: str, images: Tensor) -> None:
        """Log pictures (B, 3, H, W) uint8."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({name: images}, step)
            elif tracker.name in ("wandb", "swanlab"):  # others take them otherwise
                tracker.log_images({name: list(images.permute(0, 2, 3, 1).cpu().numpy())}, step)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log Markdown to TensorBoard."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.writer.add_text(name, printable(text), step)

    def warn_unreadable(self, failures: list[str]) -> None:
        """Name images that could not be decoded, each once a process, on stderr and in unreadable.txt."""
        for failure in map(printable, failures):
            if failure in self.unreadable:
                continue
            self.unreadable.add(failure)
            tqdm.write(f"warning: unreadable image, replaced by another: {failure}", file=sys.stderr)
            with self.unreadable_file.open("a", encoding="utf-8") as file:
                file.write(f"{failure}\n")

    def read_unreadable(self) -> set[str]:
        """Images that could not be decoded so far, by all processes and across restarts.

        They are the lines of unreadable.txt, in which nodes may have written over each other.
        """
        if not self.unreadable_file.exists():
            return set()
        return set(self.unreadable_file.read_text(encoding="utf-8", errors="replace").splitlines())


class Speed:
    """Speed and memory of training between two lines of metrics.

    Args:
        flops: executed by a step.
        images_per_step: over all processes.
        history: of the run before this start.
    """

    def __init__(self, flops: int, images_per_step: int, accelerator: Accelerator, history: list[Line]):
        self.flops = flops
        self.images_per_step = images_per_step
        self.device = accelerator.device
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.devices = accelerator.num_processes  # one each
        self.hours = last_value(history, "speed/hours")
        self.device_hours = last_value(history, DEVICE_HOURS)
        self.steps = 0
        self.line_begin = time.perf_counter()
        self.paused_seconds = 0.0
        """Since the last line, for evaluations and checkpoints."""
        self.waited = 0.0
        """Seconds since the last line, in which this process waited for its images; on a GPU `gaps` say it."""
        self.gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Events of a GPU before and after each wait."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While open, images are waited for: by the host, and by a GPU as far as it has done all that is queued."""
        if self.device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self.gaps.append((before, after))
        else:
            begin = time.perf_counter()
            yield
            self.waited += time.perf_counter() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, no training is timed; a GPU's unfinished work of the steps before is."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - begin

    def read(self, done: int) -> dict[str, float]:
        """Scalars since the last line (images/s over all processes, waiting for data, TFLOP/s) and of the whole run.

        All processes have to ask for them together, and a GPU has to be done with the steps.

        Args:
            done: steps of the run.
        """
        waited = self.waited + sum(before.elapsed_time(after) for before, after in self.gaps) / 1000
        waited = maximum_of_all(waited)  # the others wait for the one that waits for its images
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
            "speed/memory_gb": memory_bytes(self.device) / 1e9,
            PFLOP: self.flops * done / 1e15,
        }
        self.line_begin = now
        self.paused_seconds = self.waited = 0.0
        self.gaps.clear()
        self.steps = 0
        return scalars


def memory_bytes(device: torch.device) -> int:
    """Largest memory of the GPU's tensors, or that of this process now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def wandb_id(folder: Path) -> str:
    """The id by which wandb knows the run of this folder, across restarts."""
    file = folder / "wandb_id"
    if not file.exists():
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def drop_after(folder: Path, step: int) -> None:
    """Drop a run's metrics after `step`, and a torn last line."""
    if (folder / METRICS_FILE).exists():
        kept = [line for line in read_history(folder) if line["step"] <= step]
        write_complete(folder / METRICS_FILE, "".join(f"{json.dumps(line)}\n" for line in kept))


def read_history(folder: Path) -> list[Line]:
    """All whole lines of a run's metrics.jsonl; [] if there is no such file."""
    file = folder / METRICS_FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = []
    with suppress(ValueError):  # the last line may be torn
        for line in text.splitlines():
            lines.append(json.loads(line))
    return lines


def last_scalars(folder: Path, name: str = EVALUATED, until: float = math.inf) -> Line:
    """The scalars of a run that were logged last together with the one of that name, such as the last evaluation's.

    Args:
        until: the last step that counts.
    Raises:
        UserError: no run there, or none that has logged it.
    """
    lines = [line for line in read_history(folder) if name in line and line["step"] <= until]
    if not lines:
        raise UserError(f"{folder} is no run that has come so far: its {METRICS_FILE} is missing or has no {name}")
    return lines[-1]
