"""Watching a run: after each evaluation its verdict, and each new warning once; both are in verdict.json too."""

import json
import sys
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mpp.config import OptimConfig, RunConfig
from mpp.runtime.files import write_complete
from mpp.runtime.messages import note
from mpp.runtime.weights import BEST
from mpp.training.facts import RunFacts, facts_of
from mpp.training.growth import branch_point
from mpp.training.health import RunWarning, find_warnings
from mpp.training.history import History
from mpp.training.log import Tracker, read_history
from mpp.training.task import ImageTask
from mpp.training.verdict import has_best_features, scores_of_features, verdict

VERDICT = "verdict.json"
MATRIX_SIDE = 4096  # of the matrix products that measure the speed a GPU reaches
PRODUCTS = 10


class Watch:
    """Reports how a run is doing while it trains, on the main process."""

    def __init__(self, task: ImageTask, tracker: Tracker, run: RunConfig, optim: OptimConfig):
        self.task = task
        self.tracker = tracker
        self.run = run
        self.optim = optim
        self.folder = tracker.folder
        self.printed: set[str] = set()
        """Names of the warnings that this process has printed."""

    def warn_of_settings(self) -> None:
        """Print the warnings that follow from the settings, before the first step."""
        if not self.tracker.accelerator.is_main_process:
            return
        for name, message in find_warnings([], self.facts):
            self.print_once(name, message)

    def print_once(self, name: str, message: str) -> None:
        """Print a warning, unless this process has printed it before."""
        if name not in self.printed:
            tqdm.write(f"warning: {name}: {message}", file=sys.stderr)
        self.printed.add(name)

    def report(self, step: int) -> None:
        """Report how the run is doing after an evaluation that is logged. An error in here does not end the run."""
        if not self.tracker.accelerator.is_main_process:
            return
        try:
            self.write_verdict(step)
        except Exception as error:
            tqdm.write(f"warning: no verdict after step {step}: {type(error).__name__}: {error}", file=sys.stderr)

    def write_verdict(self, step: int) -> None:
        """The verdict and the new warnings, to the console, TensorBoard and verdict.json."""
        history = read_history(self.folder)
        warnings = find_warnings(history, self.facts)
        names = [warning.name for warning in warnings]
        line = verdict(history, self.facts, names)
        tqdm.write(f"step {step} of {self.run.steps}: {line}")
        self.log_verdict(step, line, warnings)
        saved = {
            "model": self.task.describe_model(),
            "images": self.task.describe_images(),
            "step": step,
            "line": line,
            "warnings": self.warn_once(step, warnings),
            "off": names,  # of the warnings at this step
            "facts": asdict(self.facts),
        }
        write_complete(self.folder / VERDICT, json.dumps(saved, indent=1))

    def warn_once(self, step: int, warnings: list[RunWarning]) -> list[dict[str, Any]]:
        """Print the warnings that are new.

        Returns:
            All warnings of the run so far: `check` (its name), `step` (when it was new), `message` (the latest).
        """
        before = [warning for warning in read_verdict(self.folder).get("warnings", []) if warning["step"] <= step]
        known = {warning["check"] for warning in before}
        messages = dict(warnings)
        for warning in before:
            warning["message"] = messages.get(warning["check"], warning["message"])
        new = []
        for name, message in warnings:
            if name not in known:
                self.print_once(name, message)
                new.append({"check": name, "step": step, "message": message})
        return before + new

    def log_verdict(self, step: int, line: str, warnings: list[RunWarning]) -> None:
        """The verdict and all warnings as a text in TensorBoard."""
        listed = [f"- **{name}**: {message}" for name, message in warnings]
        self.tracker.log_text(step, "verdict", "\n\n".join([line, *listed]))

    def is_best(self) -> bool:
        """Whether the evaluation that was logged last has the best features so far; of a branch, since it began.

        The trunk's best encoder is in the trunk's folder, and may be of a later step.
        """
        return has_best_features(self.own_history())

    def own_history(self) -> History:
        """The lines of the run; of a branch, since it began."""
        history = read_history(self.folder)
        if self.run.branch_from is None:
            return history
        _, first = branch_point(self.run.branch_from)
        return [line for line in history if line["step"] > first]

    def note_lost_best(self) -> None:
        """Note that `run.keep_best` is asked for only now: the best encoder so far was not kept."""
        if not self.run.keep_best or not self.tracker.accelerator.is_main_process or (self.folder / BEST).is_dir():
            return
        scores = scores_of_features(self.own_history())
        if scores:
            best_step, _ = max(scores, key=lambda pair: pair[1])
            note(
                f"run.keep_best: features were best after step {best_step}, whose encoder was not kept; {BEST} is "
                "written when they are better than then"
            )

    @cached_property
    def facts(self) -> RunFacts:
        """Constants of the run that warnings need; the speed of a GPU is measured."""
        accelerator = self.tracker.accelerator
        dtype = torch.bfloat16 if self.run.precision == "bf16" else torch.float32
        gpu_tflops = accelerator.num_processes * measure_tflops(accelerator.device, dtype)
        return facts_of(self.run, self.optim, self.task.facts(), gpu_tflops)


def read_verdict(folder: Path) -> dict[str, Any]:
    """A run's latest verdict: `model`, `images`, `step`, `line`, `warnings`, `off`, `facts`; {} if there is none."""
    try:
        return json.loads((folder / VERDICT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def measure_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large matrix product on a GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    matrix = torch.randn(
        MATRIX_SIDE, MATRIX_SIDE, device=device, dtype=dtype
    )  # ones take less power, at a higher clock
    for _ in range(2):  # the first one prepares
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            matrix @ matrix
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return PRODUCTS * 2 * MATRIX_SIDE**3 / seconds / 1e12
