"""Logging: the same scalars to metrics.jsonl and to Accelerate's trackers (TensorBoard by default)."""

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
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker, get_available_trackers
from tensorboard.summary.writer import event_file_writer
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from mpp.config import RunConfig, TrainingConfig, flatten, require
from mpp.config.parsing import to_yaml
from mpp.errors import UserError, one_line
from mpp.runtime.files import write_complete
from mpp.runtime.messages import printable
from mpp.training.history import EVALUATED, Line

METRICS_FILE = "metrics.jsonl"
UNREADABLE_FILE = "unreadable.txt"
EVENT_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")  # with the time in seconds
CHARTED_ACCURACIES = ("accuracy", "two_nearest", "nearest", "most_frequent")
TENSORBOARD_CHARTS = {
    "masked patches": {
        "train": ["Multiline", [f"^train/{name}$" for name in CHARTED_ACCURACIES]],
        "held out": ["Multiline", [f"^heldout/{name}$" for name in CHARTED_ACCURACIES]],
    }
}
"""Scalars that are drawn together: title -> chart -> kind, and patterns of their tags."""


def check_trackers(run: RunConfig) -> None:
    """Refuse trackers that do not exist or are not installed: Accelerate would drop the latter without a word."""
    installed = sorted(map(str, get_available_trackers()))
    for name in run.trackers:
        require(name in installed, "run.trackers", name, f"installed: {', '.join(installed)}")


def named_tracker(name: str, run: RunConfig) -> GeneralTracker | str:
    """One of Accelerate's trackers: its name, or an object where a resumed run needs other options (see `Tracker`)."""
    if name == "tensorboard":
        return TensorBoardTracker(run_name="", logging_dir=run.dir)
    if name == "wandb":
        return WandBTracker(run.project, name=Path(run.dir).name, resume="allow")
    return name


class Tracker:
    """Writes metrics on the main process; resuming drops those after the checkpoint, so that no curve doubles back.

    Args:
        step: steps done; later lines of metrics.jsonl and later TensorBoard events are dropped.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, config: TrainingConfig, step: int):
        self.accelerator, self.folder = accelerator, folder
        self.metrics_file, self.unreadable_file = folder / METRICS_FILE, folder / UNREADABLE_FILE
        self.unreadable = self.read_unreadable()
        last_kept = step or -1  # without a checkpoint the untrained model is logged again
        if accelerator.is_main_process:
            drop_after(folder, last_kept)
        accelerator.log_with = [named_tracker(name, config.run) for name in config.run.trackers]
        self.open_trackers(last_kept)
        for tracker in accelerator.trackers:
            if tracker.name != "tensorboard":
                tracker.store_init_configuration({key: as_scalar(value) for key, value in flatten(config).items()})
            elif accelerator.is_main_process:
                tracker.writer.add_custom_scalars(TENSORBOARD_CHARTS)
                tracker.writer.add_text("config", f"```yaml\n{to_yaml(config)}```", max(last_kept, 0))

    def open_trackers(self, last_kept: int) -> None:
        """Open Accelerate's trackers, so that they continue after a step."""
        accelerator = self.accelerator
        for tracker in accelerator.log_with:
            name = getattr(tracker, "name", None)
            if name == "tensorboard":
                tracker.init_kwargs["purge_step"] = last_kept + 1
            elif name == "wandb" and accelerator.is_main_process:
                tracker.init_kwargs["id"] = wandb_id(self.folder)
        try:
            with later_event_file(self.folder):
                accelerator.init_trackers(self.folder.name)
        except BaseException:
            accelerator.trackers.clear()  # those that were not opened cannot be closed
            raise

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars of `step`. A name without a group goes to TensorBoard's group `train`."""
        if self.accelerator.is_main_process:
            line = json.dumps({"step": step, **values})
            try:
                with self.metrics_file.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
            except OSError as error:
                message = f"{self.metrics_file} cannot be written: {one_line(error)}; the last checkpoint is intact"
                raise UserError(message) from error
        tagged = {name if "/" in name else f"train/{name}": value for name, value in values.items()}
        self.accelerator.log(tagged, step)

    def log_images(self, step: int, name: str, images: Tensor) -> None:
        """Log pictures (B, 3, H, W) uint8."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({name: np.asarray(images.cpu())}, step)
            elif hasattr(tracker, "log_images"):  # the others take lists of (H, W, 3)
                channels_last = images.permute(0, 2, 3, 1)
                tracker.log_images({name: list(np.asarray(channels_last.cpu()))}, step)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log Markdown to TensorBoard."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard" and self.accelerator.is_main_process:
                tracker.writer.add_text(name, printable(text), step)

    def warn_unreadable(self, failures: list[str]) -> None:
        """Name images that could not be decoded, each once, on stderr and in unreadable.txt."""
        new = []
        for failure in map(printable, failures):
            if failure not in self.unreadable:
                self.unreadable.add(failure)
                new.append(failure)
        if not new:
            return
        for failure in new:
            tqdm.write(f"warning: unreadable image, replaced by another: {failure}", file=sys.stderr)
        with self.unreadable_file.open("a", encoding="utf-8") as file:
            file.writelines(f"{failure}\n" for failure in new)

    def read_unreadable(self) -> set[str]:
        """Images that could not be decoded so far, by all processes and across restarts.

        They are the lines of unreadable.txt, in which nodes may have written over each other.
        """
        if not self.unreadable_file.exists():
            return set()
        return set(self.unreadable_file.read_text(encoding="utf-8", errors="replace").splitlines())


@contextmanager
def later_event_file(folder: Path) -> Iterator[None]:
    """While open, a TensorBoard event file that is opened in a folder gets a name that sorts after all others there.

    TensorBoard reads files by name, which begins with the time in seconds, and the clock may be behind that of an
    earlier file: a resumed run may be on another machine.
    """
    later = 0
    for path in folder.glob("*tfevents*"):
        name = EVENT_FILE_NAME.fullmatch(path.name)
        if name:
            later = max(later, int(name[1]))
    clock = SimpleNamespace(time=lambda: max(time.time(), later + 1))
    with patch.object(event_file_writer, "time", clock):
        yield


def event_writer(folder: Path, purge_step: int | None = None) -> SummaryWriter:
    """TensorBoard's writer, whose file is read after those in the folder.

    Args:
        purge_step: TensorBoard drops what those have from this step on; None: nothing.
    """
    with later_event_file(folder):
        return SummaryWriter(str(folder), purge_step=purge_step)


def wandb_id(folder: Path) -> str:
    """The id by which wandb knows the run of this folder, across restarts."""
    file = folder / "wandb_id"
    if not file.exists():
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def drop_after(folder: Path, step: int) -> None:
    """Drop a run's metrics after `step`, and a torn last line."""
    if (folder / METRICS_FILE).exists():
        kept = [f"{json.dumps(line)}\n" for line in read_history(folder) if line["step"] <= step]
        write_complete(folder / METRICS_FILE, "".join(kept))


def read_history(folder: Path) -> list[Line]:
    """All whole lines of a run's metrics.jsonl; [] if there is no such file."""
    file = folder / METRICS_FILE
    if not file.is_file():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the last one may be torn
            break
    return lines


def last_evaluation(folder: Path) -> Line:
    """The scalars of the last evaluation of a run."""
    return last_scalars(folder, EVALUATED)


def last_scalars(folder: Path, name: str) -> Line:
    """The scalars of a run that were logged last together with the one of that name.

    Raises:
        UserError: no run there, or none that has logged it.
    """
    if not (folder / METRICS_FILE).is_file():
        raise UserError(f"{folder} is not the folder of a run that has begun: it has no {METRICS_FILE}")
    lines = [line for line in read_history(folder) if name in line]
    if not lines:
        problem = "been evaluated" if name == EVALUATED else "reached that point"
        raise UserError(f"the run {folder} has not {problem} yet: its {METRICS_FILE} has no {name}")
    return lines[-1]


def as_scalar(value: Any) -> Any:
    """A setting as a scalar: trackers take no others."""
    return value if isinstance(value, int | float | str | bool) else str(value)
