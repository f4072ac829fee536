"""Branches of a comparison: an encoder that continues from a checkpoint of another one, its trunk, at the same seed.

It ends with the bits of a run that was never interrupted, and is known by that run's digest.
"""

from mpp.config import TrainingConfig, flatten, require, settings_of, show
from mpp.training.run_folder import GROWING_SETTINGS


def check_branch(config: TrainingConfig, trunk: TrainingConfig, key: str) -> None:
    """Raise UserError if a training cannot branch from another one, whatever their lengths are.

    Args:
        key: of the branch's entry, for messages.
    """
    before = flatten(trunk)
    for each in settings_of(config):
        if not each.about["operational"] and each.key not in GROWING_SETTINGS:
            allowed = f"{show(before[each.key])}, as in its trunk"
            require(each.value == before[each.key], f"{key}: {each.key}", each.value, allowed)
    for which, each in (("", config), ("its trunk's ", trunk)):
        stable = each.optim.stable_steps(each.run.steps)
        allowed = "wsd or constant: other schedules lower the rate from the start"
        require(stable is not None, f"{key}: {which}optim.schedule", each.optim.schedule, allowed)
    objective = config.objective
    if objective is not None and objective.moves_teacher:
        start, end = objective.half_life
        allowed = "two equal numbers of steps, such as [40, 40]: shares depend on the length of a run"
        require(start == end >= 1, f"{key}: objective.half_life", list(objective.half_life), allowed)


def parting_step(config: TrainingConfig, trunk: TrainingConfig, key: str) -> int:
    """The step up to which a training and its trunk are one: where the first of them begins its cooldown, or ends.

    Args:
        config, trunk: settings with the numbers of steps that are carried out.
        key: of the branch's entry, for messages.
    Raises:
        UserError: there is no such step.
    """
    check_branch(config, trunk, key)
    warmup = config.optim.warmup(config.run.steps)
    of_trunk = trunk.optim.warmup(trunk.run.steps)
    allowed = f"{of_trunk}, as in its trunk: give both the same number"
    require(warmup == of_trunk, f"{key}: optim.warmup_steps", warmup, allowed)
    stable = min(each.optim.stable_steps(each.run.steps) for each in (config, trunk))
    step = min(stable, config.run.steps - 1)  # the last step is the branch's own: it logs and evaluates there
    allowed = "larger, or optim.cooldown smaller: no step comes before the cooldown"
    require(step > 0, f"{key}: run.steps", config.run.steps, allowed)
    return step
