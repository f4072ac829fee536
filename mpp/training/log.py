"""Where the numbers go: Accelerate's trackers (TensorBoard by default) and metrics.jsonl, the same scalars in both."""

import json
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from tensorboard.summary.writer import event_file_writer
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from mpp.config.keys import flatten
from mpp.config.saved import to_yaml
from mpp.errors import UserError
from mpp.runtime.files import write_complete
from mpp.runtime.output import printable
from mpp.training.history import EVALUATED

METRICS = "metrics.jsonl"
EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
SHOWN = ("accuracy", "two_nearest", "nearest", "most_frequent")
CHARTS = {  # drawn together; the tags are patterns
    "masked patches": {
        "train": ["Multiline", [f"^train/{name}$" for name in SHOWN]],
        "held out": ["Multiline", [f"^heldout/{name}$" for name in SHOWN]],
    }
}


class Tracker:
    """Writes metrics on the main process; resuming cuts what lies after the checkpoint, so that no curve doubles back.

    Args:
        folder: the run folder.
        step: updates done; later lines of metrics.jsonl and later TensorBoard events are dropped.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, config: Any, step: int):
        self.accelerator, self.folder = accelerator, folder
        self.metrics, self.unreadable = folder / METRICS, folder / "unreadable.txt"
        self.named = self.known_unreadable()
        step = step or -1  # without a checkpoint the untrained model is logged again
        if accelerator.is_main_process:
            keep_until(folder, step)
        for tracker in accelerator.log_with:
            if getattr(tracker, "name", None) == "tensorboard":
                tracker.init_kwargs["purge_step"] = step + 1
            elif getattr(tracker, "name", None) == "wandb" and accelerator.is_main_process:
                tracker.init_kwargs["id"] = wandb_id(folder)
        try:
            with later_event_file(folder):
                accelerator.init_trackers(folder.name)
        except BaseException:
            accelerator.trackers.clear()  # whoever closes them would stumble over those that were not opened
            raise
        for tracker in accelerator.trackers:
            if tracker.name == "tensorboard" and accelerator.is_main_process:
                tracker.writer.add_custom_scalars(CHARTS)
                tracker.writer.add_text("config", f"```yaml\n{to_yaml(config)}```", max(step, 0))
            elif tracker.name != "tensorboard":
                tracker.store_init_configuration({key: scalar(value) for key, value in flatten(config).items()})

    def log(self, step: int, values: dict[str, float]) -> None:
        """Scalars of `step`. A name without a group goes to TensorBoard's group `train`."""
        if self.accelerator.is_main_process:
            try:
                with self.metrics.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, **values}) + "\n")
            except OSError as error:
                raise UserError(f"{self.metrics} cannot be written: {error}; the last checkpoint is good") from error
        self.accelerator.log({name if "/" in name else f"train/{name}": value for name, value in values.items()}, step)

    def log_images(self, step: int, name: str, images: Tensor) -> None:
        """Pictures (B, 3, H, W) uint8."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({name: np.asarray(images.cpu())}, step)
            elif hasattr(tracker, "log_images"):  # the others take lists of (H, W, 3)
                tracker.log_images({name: list(np.asarray(images.permute(0, 2, 3, 1).cpu()))}, step)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Markdown, for TensorBoard."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard" and self.accelerator.is_main_process:
                tracker.writer.add_text(name, printable(text), step)

    def warn_unreadable(self, failures: list[str]) -> None:
        """Name images that could not be decoded, each once, on stderr and in unreadable.txt."""
        new = [failure for failure in dict.fromkeys(map(printable, failures)) if failure not in self.named]
        self.named.update(new)
        for failure in new:
            tqdm.write(f"warning: unreadable image, another takes its place: {failure}", file=sys.stderr)
        if new:
            with self.unreadable.open("a", encoding="utf-8") as file:
                file.writelines(f"{failure}\n" for failure in new)

    def count_unreadable(self) -> int:
        """Different images that could not be decoded so far, by all processes and in all lives of the run."""
        return len(self.known_unreadable())

    def known_unreadable(self) -> set[str]:
        """The lines of unreadable.txt, in which nodes may have written over each other."""
        if not self.unreadable.exists():
            return set()
        return set(self.unreadable.read_text(encoding="utf-8", errors="replace").splitlines())


@contextmanager
def later_event_file(folder: Path) -> Iterator[None]:
    """While open, a TensorBoard event file that is opened in a folder gets a name that sorts after all others there.

    TensorBoard reads files by name, which begins with the time in seconds, and the clock may be behind that of an
    earlier file: a resumed run may be on another machine.
    """
    times = [int(found[1]) for path in folder.glob("*tfevents*") if (found := EVENTS.fullmatch(path.name))]
    later = max(times, default=0) + 1
    clock = SimpleNamespace(time=lambda: max(time.time(), later))
    with patch.object(event_file_writer, "time", clock):
        yield


def event_writer(folder: Path) -> SummaryWriter:
    """TensorBoard's writer; what it writes is read after what is in the folder."""
    with later_event_file(folder):
        return SummaryWriter(str(folder))


def wandb_id(folder: Path) -> str:
    """What wandb knows the run of this folder by, in all of its lives."""
    file = folder / "wandb_id"
    if not file.exists():
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def keep_until(folder: Path, step: int) -> None:
    """Cut a run's metrics after `step`; a torn last line goes with what it would have said."""
    if (folder / METRICS).exists():
        kept = (json.dumps(line) + "\n" for line in metrics_of(folder) if line["step"] <= step)
        write_complete(folder / METRICS, "".join(kept))


def last_evaluation(folder: Path) -> dict[str, float]:
    """The scalars of the last evaluation of a run."""
    return last_scalars(folder, EVALUATED)


def last_step(folder: Path, name: str) -> int:
    """The step at which a run logged that scalar last; 0 where it has not."""
    try:
        return last_scalars(folder, name)["step"]
    except UserError:
        return 0


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """All lines of a run's metrics.jsonl; the last one may be torn. None where there is no such file."""
    file, lines = folder / METRICS, []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def last_scalars(folder: Path, name: str) -> dict[str, float]:
    """The scalars of a run that were logged last together with the one of that name.

    Raises:
        UserError: no run there, or none that logs it.
    """
    found = next((line for line in reversed(metrics_of(folder)) if name in line), None)
    if found is None:
        raise UserError(f"{folder} is no run with {name} in its metrics.jsonl")
    return found


def scalar(value: Any) -> Any:
    """A setting as a scalar: what trackers take."""
    return value if isinstance(value, int | float | str | bool) else str(value)


class Speed:
    """Speed and memory between two lines of metrics.

    Args:
        flops: executed by a step.
        images: of a step, over all processes.
        device: of the model.
    """

    def __init__(self, flops: int, images: int, device: torch.device):
        self.flops, self.images, self.device = flops, images, device
        self.begin, self.steps = time.perf_counter(), 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, time does not count; what a GPU has yet to do of the steps before does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        yield
        self.begin += time.perf_counter() - begin

    def count_step(self) -> None:
        """Note that a step is done."""
        self.steps += 1

    def read(self, waited: float) -> dict[str, float]:
        """Images/s over all processes, share of time spent waiting for data, executed TFLOP/s, memory in GB.

        Args:
            waited: seconds for data since the last call.
        """
        seconds = time.perf_counter() - self.begin
        steps_per_second = self.steps / seconds
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            memory = psutil.Process().memory_info().rss
        self.begin, self.steps = time.perf_counter(), 0
        return {
            "speed/images_per_second": self.images * steps_per_second,
            "speed/data_wait": waited / seconds,
            "speed/executed_tflops": self.flops * steps_per_second / 1e12,
            "speed/memory_gb": memory / 1e9,
        }
