"""Phases of a run whose learning rate is stable before it falls: its cooldown, and the trunk it branched from."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpp.config import OptimConfig
from mpp.errors import UserError
from mpp.models.descriptions import exported_step
from mpp.runtime.messages import note
from mpp.runtime.weights import BEST, ENCODER, SAFETENSORS_SUFFIX, run_of
from mpp.training.checkpoint import newest_step
from mpp.training.growth import branch_point
from mpp.training.run_folder import saved_settings


@dataclass(frozen=True)
class Phases:
    """Starts of a run's phases, in steps that are done."""

    steps: int = 0
    """Steps of the run."""
    stable: int | None = None
    """Steps up to the cooldown, in which the rate does not fall; None: it falls all along, as with cosine."""
    branch_from: str | None = None
    """FOLDER@STEP of the trunk; None: the run began with its first step."""

    @property
    def cooldown(self) -> int | None:
        """Steps that are done when the cooldown begins; None: there is none."""
        return self.stable if self.stable is not None and self.stable < self.steps else None

    def lacks_cooldown(self, done: int) -> bool:
        """Whether a rate that is stable at first has not fallen to its end after so many steps."""
        return self.stable is not None and (done <= self.stable or done < self.steps)

    def describe_cooldown(self, done: int) -> str:
        """Progress of the cooldown after so many steps; empty where the rate falls all along."""
        if self.stable is None:
            return ""
        if not self.lacks_cooldown(done):
            return f"cooled down from step {self.stable} on"
        since = f" (cooling down since step {self.stable})" if done > self.stable else ""
        return f"not cooled down yet{since}"

    def describe_branch(self) -> str:
        """The trunk's name, and the step at which the run parted from it; empty where there is none."""
        if self.branch_from is None:
            return ""
        trunk, step = branch_point(self.branch_from)
        return f"a branch of {trunk.name} from step {step} on"

    def marks(self) -> dict[str, int]:
        """Name of the phase or branch that begins at a step -> that step, to mark it in a curve."""
        marks = {}
        if self.branch_from is not None:
            trunk, step = branch_point(self.branch_from)
            marks[f"branch of {trunk.name}"] = step
        if self.cooldown is not None:
            marks["cooldown"] = self.cooldown
        return marks


def saved_phases(folder: Path) -> Phases:
    """The phases of a run by its config.yaml, whatever command wrote it; those of `Phases()` where it says none."""
    settings = saved_settings(folder)
    with suppress(UserError, KeyError, TypeError, AttributeError, ValueError):  # no settings of today's
        return phases_of(settings["run"], settings["optim"])
    return Phases()


def phases_of(run: dict[str, Any], optim: dict[str, Any]) -> Phases:
    """The phases by the settings of a run and of its optimiser; ValueError or the like where they are not today's."""
    names = [name for name in ("schedule", "cooldown") if name in optim]
    schedule = OptimConfig(**{name: optim[name] for name in names})
    steps = int(run["steps"])
    branch_from = run.get("branch_from")
    if branch_from is not None:
        branch_point(branch_from)  # raises where it is none
    return Phases(steps, schedule.stable_steps(steps), branch_from)


def note_growth(encoder: str) -> None:
    """Note that the run of an encoder has continued since it was written, or that it is not cooled down.

    Args:
        encoder: any that a setting may name; of a run, its folder, an encoder in it, or the weights of one.
    """
    path = Path(encoder)
    path = path.parent if path.suffix == SAFETENSORS_SUFFIX else path
    run = run_of(path)
    folder = run / (BEST if path.name == BEST else ENCODER)
    if not saved_settings(run) or not folder.is_dir():
        return
    newest = newest_step(run)
    step = exported_step(folder) or newest
    if folder.name == ENCODER and step < newest:
        note(f"{folder} is of step {step}, and its run has continued to step {newest}")
    phases = saved_phases(run)
    if phases.lacks_cooldown(step):
        note(f"{folder} is {phases.describe_cooldown(step)}: a branch of its run cools it down (run.branch_from)")
