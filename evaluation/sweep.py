"""One sweep: trials of a training, each evaluated on a dev split, into a table, a plot, and what they say.

    mpp sweep --config sweep.yaml

A trial is an encoder of a comparison, and its question is asked of all: started several times, on the GPUs of a machine
or as a Slurm array, the processes share the trials; started again, the command continues. Test images are not used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from evaluation.compare import Asked, carry_out
from evaluation.comparison.cases import (
    OF_SEED,
    TRAININGS,
    Case,
    Encoder,
    Entries,
    cases_of,
    entries_of,
    refuse_options,
    settings_of_seed,
    training_settings,
)
from evaluation.comparison.digests import training_digest
from evaluation.comparison.rows import Row, frame_of, in_columns
from evaluation.config import SweepConfig
from evaluation.config.comparing import DatasetEntry, EncoderEntry, EvaluationEntry, Options, Question
from evaluation.frozen.run_images import EVALUATED_SETTINGS
from evaluation.metrics.scoring import rank_of
from evaluation.registry import EVALUATIONS
from mpp.config import HOW_READ, TrainingConfig, as_words, changed_settings, flatten, require, settings_of
from mpp.config.parsing import parse, spread
from mpp.runtime.messages import note
from mpp.runtime.start import run_main

NOT_LOOKING: Options = {"run.eval_every": 0, "run.report": False}
"""Settings by which a trial does not use the held-out images."""
BATCH = "optim.global_batch_size"
SEED = "run.seed"
SPLIT = "data.eval_split"
IMAGES = [f"data.{name}" for name in EVALUATED_SETTINGS if name not in HOW_READ]
"""Settings that say which images are evaluated; how they are read, each encoder knows."""
OF_ALL_TRIALS = ("run.dir", "config", *IMAGES)


class Plan(NamedTuple):
    """The trials of a sweep, and their evaluations."""

    trials: dict[str, Options]
    """Name of a trial -> the value of each setting that differs between trials."""
    cases: list[Case]
    chosen_by: str
    """The evaluation whose score chooses."""


def sweep(config: SweepConfig) -> dict[str, Any]:
    """Train and evaluate the trials that are missing, and write the results.

    Raises:
        UserError: a trial that cannot be carried out, before anything is done; failed trials, after all others.
    """
    plan = plan_sweep(config)
    runs = len({case.encoder for case in plan.cases})
    print(f"{len(plan.trials)} trials, {runs} runs, on a dev split; test images are not used", flush=True)
    return carry_out(plan.cases, config, lambda rows: questions_of_sweep(plan, rows))


# --- trials ---


def plan_sweep(config: SweepConfig) -> Plan:
    """The trials of a sweep and their evaluations, every setting of them parsed.

    Raises:
        UserError: a setting that does not exist or is out of bounds, or an evaluation that would look at test images.
    """
    require(config.vary or config.points, "vary", "empty", "{setting: [values]}, or left out next to points")
    known = {each.key: each for each in settings_of(TRAININGS[config.train].config_class())}
    settings, grid, *points = (dict(spread(given, known)) for given in (config.settings, config.vary, *config.points))
    for key, values in grid.items():
        require(isinstance(values, list) and values, f"vary: {key}", values, "a list that is not empty")
    refuse_options(settings, ["run.dir", SEED], "settings")
    refuse_options(grid, [*OF_ALL_TRIALS, SEED], "vary")
    base = settings_of_seed(TRAININGS[config.train].config_class, settings, 0)
    is_cut = base.data.eval_split is None
    allowed = "null with train supervised, which learns the labels of all training images except the ones it cuts off"
    can_cut = is_cut or config.train != "supervised"
    require(can_cut, "settings: data.eval_split", base.data.eval_split, allowed)
    if is_cut:
        note("the dev split is what other commands test on, if these images have no split `test` or `validation`")

    varied = list(dict.fromkeys(key for options in (grid, *points) for key in options if key != SEED))
    if config.compute is not None and BATCH in varied:  # each number of steps would have a warm-up of its own
        settings = settings | {"optim.warmup_steps": base.optim.warmup(base.run.steps)}
    entries: dict[str, EncoderEntry] = {}
    trials: dict[str, Options] = {}
    for point in [*(dict(zip(grid, values, strict=True)) for values in product(*grid.values()) if grid), *points]:
        refuse_options(point, OF_ALL_TRIALS, "points")
        seeds = (point.pop(SEED),) if SEED in point else config.seeds
        options = settings | point | ({SPLIT: None} if is_cut else NOT_LOOKING)
        new, values = trial_of(config, options, seeds, varied)
        known = entries.get(new.encoder, new)
        if known.name != new.name:
            note(f"{new.name} and {known.name} are one trial: they differ in nothing that changes results")
        entries[new.encoder] = replace(known, seeds=tuple(dict.fromkeys((*known.seeds, *seeds))))
        trials.setdefault(known.name, values)
    evaluations = evaluation_entries(config, is_cut)
    images = DatasetEntry("dev", image_options(base))
    cases = cases_of(Entries([*entries.values()], evaluations, [images], [Question("sweep")]))
    return Plan(trials, cases, evaluations[0].name)


def trial_of(
    config: SweepConfig, options: Options, seeds: tuple[int, ...], varied: Iterable[str]
) -> tuple[EncoderEntry, Options]:
    """The training of a trial, and its values of the settings that differ between trials.

    Its folder is named by the digest of its settings: a sweep that grows finds it by any name.

    Args:
        options: settings of its training.
        varied: the settings that differ between trials.
    """
    entry = EncoderEntry("", OF_SEED, seeds=seeds, train=config.train, train_options=options, compute=config.compute)
    training = training_settings(entry, 0)
    training = TRAININGS[config.train].resolve(training)
    settings = options | flatten(training)
    values = {key: settings.get(key) for key in varied}
    name = " ".join(f"{key}={as_words(value)}" for key, value in values.items())
    digest = training_digest(Encoder(entry, 0, training))
    return replace(entry, name=name, encoder=f"{config.dir}/trials/{digest}_{OF_SEED}"), values


def image_options(training: TrainingConfig) -> Options:
    """The settings of a training's images that are not the defaults."""
    return {name: value for name, value in changed_settings(training).items() if name in IMAGES}


def evaluation_entries(config: SweepConfig, is_cut: bool) -> list[EvaluationEntry]:
    """The evaluations of a sweep, on the dev split; the first one chooses."""
    given = [config.evaluate] if isinstance(config.evaluate, Mapping) else config.evaluate
    named = [{"name": str(value.get("command")), **value} for value in given]
    entries = entries_of(EvaluationEntry, named, "evaluate")
    for entry in entries:
        refuse_options(entry.options, [SPLIT], f"evaluate: {entry.name}: options")
        has_test = "test" in flatten(EVALUATIONS[entry.command].config_class()())
        allowed = "one with a setting `test`; with data.eval_split null in settings, which cuts a dev split, any"
        require(is_cut or has_test, "evaluate: command", entry.command, allowed)
        if not is_cut:
            entry.options["test"] = False
        elif "data.path" in entry.options:  # images of its own, whose test images are not used either
            entry.options[SPLIT] = None
    return entries


# --- what the results say ---


def questions_of_sweep(plan: Plan, rows: list[Row]) -> Asked:
    """A question about the trials, the best first, with what its results say."""
    frame = frame_of(rows)
    ranked = ranking(plan, frame)
    folders = {case.encoder.entry.name: case.encoder.entry.encoder for case in plan.cases}
    trials = [{"name": name, "settings": plan.trials[name], "encoder": folders[name]} for name in ranked]
    question = Question("sweep", "Trials, on the dev split", encoders=tuple(ranked) or None, x="compute")
    return [question], {"trials": trials}, advice(plan, frame)


def ranking(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """The trials that have results, the best first; those of which a seed diverged are last."""
    means = in_columns(frame[frame.evaluation == plan.chosen_by]).groupby("encoder").accuracy.mean()
    diverged = set(frame.encoder[frame.kind == "diverged"])
    present = [name for name in plan.trials if name in set(frame.encoder)]
    return sorted(present, key=lambda name: (name in diverged, -rank_of(means.get(name))))


def advice(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """Sentences below the tables: values to add, and the limits of the choice."""
    of_choice = frame[frame.evaluation == plan.chosen_by]
    diverged = set(of_choice.encoder[of_choice.kind == "diverged"])
    known = [name for name in ranking(plan, of_choice) if name not in diverged]
    lines = []
    for key, value in plan.trials[known[0]].items() if known else ():
        tried = [values[key] for values in plan.trials.values()]
        are_numbers = {type(each) for each in tried} <= {int, float}
        if are_numbers and min(tried) < max(tried) and value in (min(tried), max(tried)):
            lines.append(f"The best is at the edge of {key} ({as_words(value)}): add values beyond it.")
    if len(known) > 1:
        curse = f"The score of the best of {len(known)} trials is too high (the winner's curse)"
        lines.append(f"{curse}: measure the chosen settings again, with other seeds, on the test images.")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep as the command line, or `arguments`, say."""
    sweep(parse(SweepConfig, arguments))


if __name__ == "__main__":
    run_main(main)
