"""Watching a run: after each evaluation its verdict, and each new warning once; both are in verdict.json too."""

import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mpp.config import TrainingConfig
from mpp.runtime.files import write_complete
from mpp.training.health import find_warnings, is_moving
from mpp.training.log import Tracker, read_history
from mpp.training.run_folder import branch_point
from mpp.training.task import ImageTask
from mpp.training.verdict import has_best_features, verdict

VERDICT = "verdict.json"


class Watch:
    """Reports how a run is doing while it trains, on the main process."""

    def __init__(self, task: ImageTask, tracker: Tracker, config: TrainingConfig):
        self.task = task
        self.tracker = tracker
        self.config = config
        self.folder = tracker.folder
        self.printed: set[str] = set()
        """Names of the warnings that this process has printed."""

    def warn_of_settings(self) -> None:
        """Print the warnings that follow from the settings, before the first step."""
        if self.tracker.accelerator.is_main_process:
            self.warn_once(0, find_warnings([], self.config))

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
        warnings = find_warnings(history, self.config)
        probe = self.task.probe
        probed = probe.image_count if probe else len(self.task.held_out)
        line = verdict(history, self.config, warnings, probed)
        tqdm.write(f"step {step} of {self.config.run.steps}: {line}")
        listed = [f"- **{name}**: {message}" for name, message in warnings.items()]
        self.tracker.log_text(step, "verdict", "\n\n".join([line, *listed]))
        saved = {
            "model": self.task.describe_model(),
            "images": self.task.describe_images(),
            "step": step,
            "line": line,
            "warnings": self.warn_once(step, warnings),
            "off": list(warnings),
            "facts": {"moving": is_moving(self.config), "evaluated": probed},
        }
        write_complete(self.folder / VERDICT, json.dumps(saved, indent=1))

    def warn_once(self, step: int, warnings: dict[str, str]) -> list[dict[str, Any]]:
        """Print warnings, but for those that were printed before, perhaps by an earlier process.

        Returns:
            For verdict.json: `check` (the name), `step` (when it was new), `message`.
        """
        before = read_verdict(self.folder).get("warnings", [])
        since = {each["check"]: each["step"] for each in before if each["step"] <= step}
        for name, message in warnings.items():
            if name not in since and name not in self.printed:
                tqdm.write(f"warning: {name}: {message}", file=sys.stderr)
        self.printed.update(warnings)
        return [{"check": name, "step": since.get(name, step), "message": warnings[name]} for name in warnings]

    def is_best(self) -> bool:
        """Whether the evaluation that was logged last has the best features so far; of a branch, since it began.

        The trunk's best encoder is in the trunk's folder, and may be of a later step.
        """
        origin = self.config.run.branch_from
        first = branch_point(origin)[1] if origin else -1
        return has_best_features([line for line in read_history(self.folder) if line["step"] > first])


def read_verdict(folder: Path) -> dict[str, Any]:
    """A run's latest verdict: `model`, `images`, `step`, `line`, `warnings`, `off`, `facts`; {} if there is none."""
    try:
        return json.loads((folder / VERDICT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
