"""Runs that grow: whether a run may continue under a config with another length or schedule than it began with.

One rule decides: at all steps that are done, the learning rate and, where the teacher is a moving average, its decay
must be those that the new config has there. Nothing else in a step depends on the length of its run.
"""

from dataclasses import replace
from pathlib import Path
from shlex import quote

from mpp.config import OptimConfig, RunConfig, TrainingConfig, require
from mpp.errors import UserError
from mpp.models.teachers import moving_average_decay
from mpp.runtime.weights import ENCODER
from mpp.training.checkpoint import kept_steps
from mpp.training.optim import learning_rate

GROWING_SETTINGS = {"run.steps", "optim.schedule", "optim.cooldown", "optim.warmup_steps"}
"""Settings in which a config may differ from that of the steps that are done, as far as the rule allows."""
SAME_HALF_LIFE = "two equal numbers of steps, such as [40, 40], suit runs of any length"


def branch_point(branch_from: str) -> tuple[Path, int]:
    """The trunk's folder, absolute, and the step: of "runs/trunk@8000"."""
    folder, _, step = branch_from.rpartition("@")
    require(folder and step.isdecimal(), "run.branch_from", branch_from, "FOLDER@STEP, such as runs/trunk@8000")
    return Path(folder).expanduser().absolute(), int(step)


def steps_to_keep(optim: OptimConfig, run: RunConfig) -> set[int]:
    """Steps of a run whose checkpoints are written and always stay: of `run.keep_at`, and where a cooldown begins."""
    kept = set(run.keep_at or ())
    if optim.schedule == "wsd":
        kept.add(optim.stable_steps(run.steps))
    return kept - {0}


def refuse_other_rates(config: TrainingConfig, before: TrainingConfig, folder: Path, done: int) -> None:
    """Raise UserError if a run cannot continue under `config`; the message has the command that can.

    Args:
        before: the config of the steps that are done.
        folder: of the run that did them.
        done: their number.
    """
    steps = config.run.steps
    step, name = first_difference(config, before, min(done, steps))
    if steps < done:
        raise UserError(
            f"run.steps is {steps}, and {folder} has done {done} steps; it must be at least that"
            f"{advice_to_branch(folder, step, ', or', before)}"
        )
    if step == done:
        return
    lengths = f"{describe_schedule(before)}, now {describe_schedule(config)}"
    if name == "objective.half_life":
        advice = f"; {SAME_HALF_LIFE}"
    else:
        advice = advice_to_branch(folder, step, ";", before) or advice_to_begin(config, before, folder)
    raise UserError(f"{folder} cannot continue: from step {step} on its {name} was different ({lengths}){advice}")


def first_difference(config: TrainingConfig, before: TrainingConfig, done: int) -> tuple[int, str]:
    """The first step (from 0) at which a value differs between two configs, and its name; (done, "") if none does."""
    for step in range(done):
        now = values_of_step(config, step)
        for name, value in values_of_step(before, step).items():
            if now[name] != value:
                return step, name
    return done, ""


def values_of_step(config: TrainingConfig, step: int) -> dict[str, float]:
    """Every value of a step that depends on the length of the run, by the setting that it follows from."""
    steps = config.run.steps
    values = {"optim.lr": learning_rate(config.optim, step, steps)}
    objective = config.objective
    if objective is not None and objective.moves_teacher:
        values["objective.half_life"] = moving_average_decay(objective.half_life, step, steps)
    return values


def describe_schedule(config: TrainingConfig) -> str:
    """The settings that a step's learning rate follows from: "1000 steps of wsd, cooldown 0.2"."""
    optim = config.optim
    cooldown = f", cooldown {optim.cooldown:g}" if optim.schedule == "wsd" else ""
    return f"{config.run.steps} steps of {optim.schedule}{cooldown}, warm-up {optim.warmup(config.run.steps)}"


def advice_to_branch(folder: Path, last: int, conjunction: str, before: TrainingConfig) -> str:
    """The options that continue from the newest kept checkpoint up to step `last`; "" where none is kept.

    Args:
        before: the config of the folder's run.
    """
    if before.is_fine_tuning:
        return ""
    origin = newest_origin(folder, last, before.run.branch_from)
    return f"{conjunction} {options_of_branch(origin)} continues from there" if origin else ""


def newest_origin(folder: Path, last: int, branch_from: str | None = None) -> str | None:
    """The newest checkpoint up to step `last` from which a run can branch, as `run.branch_from` names it.

    Args:
        branch_from: the run's own origin, which serves where the run has no such checkpoint itself.
    Returns:
        None: there is none.
    """
    kept = [step for step in kept_steps(folder) if step <= last]
    if kept:
        return f"{folder}@{kept[-1]}"
    if branch_from is None:
        return None
    trunk, step = branch_point(branch_from)
    return branch_from if step in kept_steps(trunk) else None


def options_of_branch(origin: str) -> str:
    """The options of a run that branches from a checkpoint."""
    return f"--run.branch_from {quote(origin)} --run.dir NEW"


def beginning(folder: Path) -> str:
    """The option that begins a new run from the encoder of a finished one."""
    return f"--model.init_from {quote(str(folder))}"


def advice_to_begin(config: TrainingConfig, before: TrainingConfig, folder: Path) -> str:
    """Advice on the setting to change where there is no checkpoint to branch from: see `refuse_other_rates`."""
    if before.is_fine_tuning:
        return "; begin a new one with another run.dir"
    warmup = before.optim.warmup(before.run.steps)
    if config.optim.warmup(config.run.steps) != warmup:
        return f"; optim.warmup_steps must be {warmup}, as when it began"
    if before.optim.stable_steps(before.run.steps) is None:
        from_encoder = f" ({beginning(folder)}: from its encoder)" if (folder / ENCODER).is_dir() else ""
        return f"; begin a new run with --optim.schedule wsd --run.dir NEW{from_encoder}"
    if config.optim.stable_steps(config.run.steps) is None:
        return "; optim.schedule must be constant or wsd"
    return "; there is no checkpoint up to that step (run.keep_at keeps some)"


def follows_length(config: TrainingConfig) -> bool:
    """Whether a run with a stable rate cannot grow all the same, since its teacher's moving average has its length."""
    stable = config.optim.stable_steps(config.run.steps)
    if stable is None:
        return False
    twice_as_long = replace(config, run=replace(config.run, steps=2 * config.run.steps))
    step, _ = first_difference(twice_as_long, config, stable)
    return step < stable


def describe_growth(config: TrainingConfig, folder: Path) -> str:
    """The way to continue a finished run, in a line.

    Args:
        config: the run's, resolved.
    """
    schedule, steps = config.optim.schedule, config.run.steps
    if config.is_fine_tuning:
        return "the same command with a larger run.steps and another run.dir"
    stable = config.optim.stable_steps(steps)
    another = f"another run ({beginning(folder)}: from this encoder)"
    if stable is None:
        return (
            f"{another}, since optim.schedule {schedule} ends with run.steps ({steps}); "
            "one with --optim.schedule wsd can continue"
        )
    if follows_length(config):
        return f"{another}, since objective.half_life follows run.steps ({steps}); {SAME_HALF_LIFE}"
    origin = newest_origin(folder, stable, config.run.branch_from)
    if stable == steps:
        longer = "the same command with a larger run.steps"
        if origin is None:
            return longer
        cooled_down = f"--optim.schedule wsd --run.steps {steps + max(1, steps // 4)}"
        return f"{longer}; cooled down: {options_of_branch(origin)} {cooled_down}"
    if origin is None:
        return f"{another}, since there is no checkpoint from before the cooldown (run.keep_at keeps some)"
    return f"{options_of_branch(origin)} --run.steps N continues from before the cooldown"
