"""Watching a run: after each evaluation a line on how it is, and a warning, once, of what is off."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mpp.config import OptimConfig, RunConfig
from mpp.runtime.files import write_complete
from mpp.training.health import Facts, findings
from mpp.training.log import Tracker, metrics_of
from mpp.training.verdict import is_best, verdict

VERDICT = "verdict.json"
SIDE = 4096  # of the matrices that say what a GPU reaches


class Watch:
    """What is said of a run while it trains; on the main process alone. `verdict.json` in its folder has the same.

    Args:
        task: says what is to be known of its images: see `ImageTask.facts`.
        tracker: of the run.
    """

    def __init__(self, task: Any, tracker: Tracker, run: RunConfig, optim: OptimConfig):
        self.task, self.tracker, self.run, self.optim = task, tracker, run, optim
        self.folder, self.main = tracker.folder, tracker.accelerator.is_main_process
        self.facts: Facts | None = None

    def report(self, step: int) -> None:
        """Say how the run is after an evaluation, which is logged. Whatever goes wrong here, the run goes on."""
        if not self.main:
            return
        try:
            self.say(step)
        except Exception as error:
            tqdm.write(f"warning: no verdict after step {step}: {type(error).__name__}: {error}", file=sys.stderr)

    def say(self, step: int) -> None:
        """The line and the new warnings, on the console, in TensorBoard and in verdict.json."""
        history, self.facts = metrics_of(self.folder), self.facts or self.look()
        before = [each for each in verdict_of(self.folder).get("warnings", []) if each["step"] <= step]
        known, found = {each["check"] for each in before}, findings(history, self.facts)
        line = verdict(history, self.facts, [finding.check for finding in found])
        tqdm.write(f"step {step} of {self.run.steps}: {line}")
        new = [{"check": check, "step": step, "message": said} for check, said in found if check not in known]
        for each in new:
            tqdm.write(f"warning: {each['check']}: {each['message']}", file=sys.stderr)
        now = dict(found)
        before = [each | {"message": now.get(each["check"], each["message"])} for each in before]
        lines = [f"- **{name}**: {message}" for name, message in found]
        self.tracker.log_text(step, "verdict", "\n\n".join([line, *lines]))
        about = {"model": self.task.describe_model(), "images": self.task.describe_images()}
        said = about | {"step": step, "line": line, "warnings": before + new, "off": [each.check for each in found]}
        write_complete(self.folder / VERDICT, json.dumps(said | {"facts": asdict(self.facts)}, indent=1))

    def is_best(self) -> bool:
        """Whether the features were never better than at the evaluation that was logged last."""
        return is_best(metrics_of(self.folder))

    def look(self) -> Facts:
        """What stays the same."""
        run, optim = self.run, self.optim
        own = dict(steps=run.steps, images=optim.global_batch_size, lr=optim.lr, clip=optim.clip)
        accelerator, dtype = self.tracker.accelerator, torch.bfloat16 if run.precision == "bf16" else torch.float32
        own |= dict(warmup=optim.warmup(run.steps))
        own |= dict(gpu_tflops=accelerator.num_processes * reached(accelerator.device, dtype))
        return Facts(**own, **self.task.facts())


def verdict_of(folder: Path) -> dict[str, Any]:
    """What was said of a run last: `model`, `images`, `step`, `line`, `warnings`, `off`, `facts`; or nothing."""
    try:
        return json.loads((folder / VERDICT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def reached(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large matrix product on a GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    matrix = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    for _ in range(2):  # the first one prepares
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(10):
            matrix @ matrix
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return 10 * 2 * SIDE**3 / seconds / 1e12
