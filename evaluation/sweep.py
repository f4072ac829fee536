"""One sweep: trials of a training, each evaluated on a dev split, into a table, a plot, and next steps.

    mpp sweep --config sweep.yaml

A trial is an encoder of a comparison, and its question is asked of all: started several times, on the GPUs of a machine
or as a Slurm array, the processes share the trials; started again, the command continues. Test images are not used.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.compare import write_comparison
from evaluation.comparison.cases import (
    DECIDED,
    TRAININGS,
    Case,
    Encoder,
    Entries,
    cases_of,
    command_line,
    entries_of,
    evaluation_settings,
    image_options,
    parsed,
    refuse_options,
    training_settings,
    with_seed,
)
from evaluation.comparison.differences import differences_from_best
from evaluation.comparison.digests import training_digest
from evaluation.comparison.rows import Row, describe_missing_seeds, frame_of
from evaluation.comparison.run import carry_out
from evaluation.comparison.tables import MASKED_BASELINES, SCORES
from evaluation.config import SweepConfig
from evaluation.config.comparing import DatasetEntry, EncoderEntry, EvaluationEntry, Options, Question
from evaluation.metrics.scoring import rank_of
from evaluation.registry import EVALUATIONS
from mpp.config import as_words, flatten, require
from mpp.config.imports import import_words
from mpp.config.parsing import as_command_line, parse, spread
from mpp.runtime.messages import note
from mpp.runtime.start import run_main
from mpp.training.run_folder import saved_settings

LONGER = 4
"""Length of the run that the last line proposes, in lengths of a trial."""
NOT_LOOKING: Options = {"run.eval_every": 0, "run.report": False}
"""Settings by which a trial does not use the held-out images."""
CUT = ("data.eval_split", "data.eval_fraction")
"""Settings that cut a dev split off."""
BATCH = "optim.global_batch_size"
SEED = "run.seed"


class Trial(NamedTuple):
    """Settings of a sweep's training that are tried."""

    entry: EncoderEntry
    """The training, in a folder named by the digest of its settings: a sweep that grows finds it by any name."""
    values: Options
    """The value of each setting that differs between trials."""


class Plan(NamedTuple):
    """The trials of a sweep, by name, and their evaluations, of which the first one chooses."""

    trials: dict[str, Trial]
    cases: list[Case]

    @property
    def chosen_by(self) -> str:
        """The evaluation whose score chooses."""
        return self.cases[0].entry.name


def sweep(config: SweepConfig) -> dict[str, Any]:
    """Train and evaluate the trials that are missing, and write the results.

    Raises:
        UserError: a trial that cannot be carried out, before anything is done; failed trials, after all others.
    """
    plan = plan_sweep(config)
    runs = sum(len(trial.entry.seeds) for trial in plan.trials.values())
    print(f"{len(plan.trials)} trials, {runs} runs, on a dev split; test images are not used", flush=True)
    return carry_out(plan.cases, config, lambda rows: write_sweep(config, plan, rows))


# --- trials ---


def plan_sweep(config: SweepConfig) -> Plan:
    """The trials of a sweep and their evaluations, every setting of them parsed.

    Raises:
        UserError: a setting that does not exist or is out of bounds, or an evaluation that would look at test images.
    """
    require(config.vary or config.points, "vary", "empty", "{setting: [values]}, or left out next to points")
    settings, grid, *points = map(dotted, (config.settings, config.vary, *config.points))
    for key, values in grid.items():
        require(isinstance(values, list) and values, f"vary: {key}", values, "a list that is not empty")
    for key, options in (("settings", settings), ("vary", grid)):
        refuse_options(options, ["run.dir", SEED], key)
    base = parsed_options(config.train, settings)
    is_cut = base.data.eval_split is None
    allowed = "null with train supervised, which learns the labels of all training images except the ones it cuts off"
    can_cut = is_cut or config.train != "supervised"
    require(can_cut, "settings: data.eval_split", base.data.eval_split, allowed)

    varied = list(dict.fromkeys(key for options in (grid, *points) for key in options if key != SEED))
    if config.compute is not None and BATCH in varied:  # each number of steps would have a warm-up of its own
        settings = settings | {"optim.warmup_steps": base.optim.warmup(base.run.steps)}
    trials: dict[str, Trial] = {}
    for point in [*(dict(zip(grid, values, strict=True)) for values in product(*grid.values()) if grid), *points]:
        refuse_options(point, ["run.dir"], "points")
        seeds = (point.pop(SEED),) if SEED in point else config.seeds
        options = settings | point | ({} if is_cut else NOT_LOOKING)
        new = trial_of(config, options, seeds, varied)
        known = trials.get(new.entry.encoder, new)
        if known.values != new.values:
            alike = f"{new.entry.name} and {known.entry.name} are one trial"
            note(f"{alike}: the settings by which they differ change no result")
        seeds = tuple(dict.fromkeys((*known.entry.seeds, *seeds)))
        trials[known.entry.encoder] = known._replace(entry=replace(known.entry, seeds=seeds))
    images = [DatasetEntry("dev", image_options(base.data))]
    entries = [trial.entry for trial in trials.values()]
    cases = cases_of(Entries(entries, evaluation_entries(config, is_cut), images, [Question("sweep")]))
    for case in cases:
        refuse_test_images(case)
    return Plan({trial.entry.name: trial for trial in trials.values()}, cases)


def trial_of(config: SweepConfig, options: Options, seeds: tuple[int, ...], varied: Iterable[str]) -> Trial:
    """A trial.

    Args:
        options: settings of its training.
        varied: the settings that differ between trials.
    """
    entry = EncoderEntry("", config.dir, seeds=seeds, train=config.train, train_options=options, compute=config.compute)
    training = training_settings(entry, 0)
    folder = f"{config.dir}/trials/{training_digest(Encoder(entry, 0, training))}_{{seed}}"
    settings = flatten(training)
    values = {key: settings.get(key, options.get(key)) for key in varied}
    name = " ".join(f"{key}={as_words(value)}" for key, value in values.items())
    return Trial(replace(entry, name=name, encoder=folder), values)


def parsed_options(train: str, options: Options) -> Any:
    """The config of a training by the settings of its command line."""
    return parsed(TRAININGS[train].config_class, tuple(command_line(options, 0)))


def dotted(settings: Mapping[str, Any]) -> Options:
    """Settings by dotted name, of a mapping that may have groups in it."""
    return dict(spread(settings, {}))


def evaluation_entries(config: SweepConfig, is_cut: bool) -> list[EvaluationEntry]:
    """The evaluations of a sweep, on the dev split; the first one chooses."""
    given = [config.evaluate] if isinstance(config.evaluate, Mapping) else config.evaluate
    require(given, "evaluate", "empty", "for example {command: linear}")
    named = [{"name": str(value.get("command")), **value} for value in given]
    entries = []
    for entry in entries_of(EvaluationEntry, named, "evaluate"):
        options = dotted(entry.options)
        refuse_options(options, (*DECIDED, "checkpoint"), f"evaluate: {entry.name}: options")
        has_test = "test" in flatten(EVALUATIONS[entry.command].config_class()())
        allowed = "one with a setting `test`; with data.eval_split null in settings, which cuts a dev split, any"
        require(is_cut or has_test, "evaluate: command", entry.command, allowed)
        entries.append(replace(entry, options=options | ({} if is_cut else {"test": False})))
    return entries


def refuse_test_images(case: Case) -> None:
    """Raise UserError where a trial or its evaluation would look at held-out images that are no part of train."""
    training = case.encoder.settings
    evaluation = flatten(evaluation_settings(case))
    looked_at = [training.data.eval_split] if training.run.eval_every else []
    looked_at += [evaluation.get("data.eval_split")] if evaluation.get("test", True) else []
    for split in looked_at:
        require(split is None, f"{case.slug}: data.eval_split", split, "null, as it is in settings")


# --- results ---


def write_sweep(config: SweepConfig, plan: Plan, rows: list[Row]) -> dict[str, Any]:
    """Write the files of a comparison of the trials, the best first, with the next steps below its table."""
    frame = frame_of(rows)
    ranked = ranking(plan, frame)
    trials = []
    for name in ranked:
        entry, values = plan.trials[name]
        trials.append({"name": name, "settings": values, "encoder": entry.encoder})
    sentences = [*describe_missing_seeds(plan.cases, rows), *advice(config, plan, frame)]
    question = Question("sweep", "Trials, on the dev split", encoders=tuple(ranked) or None, x="compute")
    about = {"trials": trials, "settings": asdict(config)}
    return write_comparison(Path(config.dir), [question], rows, about, sentences)


def ranking(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """The trials that have results, the best first; those of which a seed diverged are last."""
    scores = frame[frame.kind.isin(SCORES) & ~frame.case.isin(MASKED_BASELINES)]
    means = scores[scores.evaluation == plan.chosen_by].groupby("encoder").accuracy.mean()
    diverged = set(frame.encoder[frame.kind == "diverged"])
    present = [name for name in plan.trials if name in set(frame.encoder)]
    return sorted(present, key=lambda name: (name in diverged, -rank_of(means.get(name))))


def advice(config: SweepConfig, plan: Plan, frame: pd.DataFrame) -> list[str]:
    """Sentences below the table: limits of the choice, trials to add, and the next command."""
    of_choice = frame[frame.evaluation == plan.chosen_by]
    diverged = set(of_choice.encoder[of_choice.kind == "diverged"])
    known = [name for name in ranking(plan, of_choice) if name not in diverged]
    missing = len(plan.trials) - of_choice.encoder.nunique()
    lines = [f"{missing} of {len(plan.trials)} trials have no result yet."] if missing else []
    if not known:
        return [*lines, "Every trial diverged: lower optim.lr."] if diverged else lines
    best = known[0]
    for key, value in plan.trials[best].values.items():
        tried = {trial.values[key] for trial in plan.trials.values()}
        if len(tried) > 1 and {type(each) for each in tried} <= {int, float} and value in (min(tried), max(tried)):
            lines.append(f"The best is at the edge of {key} ({as_words(value)}): add values beyond it.")
    found = differences_from_best(of_choice, Path(config.dir))
    behind = {each.other for each in found if each.best == best and each.is_told_apart}
    close = [name for name in known[1:] if name not in behind]
    if len(known) > 1:
        told = f"no interval tells it apart from {'; '.join(close)}" if close else "it is ahead of all others"
        lines.append(f"The best is {best}: {told}.")
        curse = f"The score of the best of {len(known)} trials is too high (the winner's curse)"
        lines.append(f"{curse}: measure the chosen settings again, with other seeds, on the test images.")
    return [*lines, next_training(config, plan.trials[best])]


def next_training(config: SweepConfig, best: Trial) -> str:
    """The command that trains longer with the best settings, on all training images."""
    settings = {key: value for key, value in dotted(config.settings).items() if key not in CUT}
    options = settings | best.values | {"run.dir": f"{config.dir}_best"}
    run = Path(with_seed(best.entry.encoder, best.entry.seeds[0]))
    steps = saved_settings(run)["run"].get("steps") or parsed_options(config.train, options).run.steps
    options["run.steps"] = LONGER * steps
    return f"next: {shlex.join(['mpp', config.train, *import_words(), *as_command_line(options)])}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep as the command line, or `arguments`, say."""
    sweep(parse(SweepConfig, arguments))


if __name__ == "__main__":
    run_main(main)
