"""One sweep: trials of a training, each evaluated on a dev split, into a table, a plot, and what they say.

    mpp sweep --config sweep.yaml

A trial is an encoder of a comparison, and its question is asked of all: started several times, on the GPUs of a machine
or as a Slurm array, the processes share the trials; started again, the command continues. Test images are not used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.compare import carry_out, write_comparison
from evaluation.comparison.cases import (
    TRAININGS,
    Case,
    Encoder,
    Entries,
    cases_of,
    entries_of,
    refuse_options,
    settings_of_seed,
    training_digest,
    training_settings,
)
from evaluation.comparison.differences import differences_from_best
from evaluation.comparison.rows import Row, describe_missing_seeds, frame_of
from evaluation.comparison.tables import in_columns
from evaluation.config import SweepConfig
from evaluation.config.comparing import DatasetEntry, EncoderEntry, EvaluationEntry, Options, Question
from evaluation.frozen.run_images import EVALUATED_SETTINGS
from evaluation.metrics.scoring import rank_of
from evaluation.registry import EVALUATIONS
from mpp.config import HOW_READ, SourceConfig, as_words, changed_settings, flatten, rebuild, require
from mpp.config.parsing import parse, spread
from mpp.runtime.messages import note
from mpp.runtime.start import run_main

NOT_LOOKING: Options = {"run.eval_every": 0, "run.report": False}
"""Settings by which a trial does not use the held-out images."""
BATCH = "optim.global_batch_size"
SEED = "run.seed"
SPLIT = "data.eval_split"


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
    refuse_options(settings, ["run.dir", SEED], "settings")
    refuse_options(grid, ["run.dir", SEED, SPLIT], "vary")
    base = settings_of_seed(TRAININGS[config.train].config_class, settings, 0)
    is_cut = base.data.eval_split is None
    allowed = "null with train supervised, which learns the labels of all training images except the ones it cuts off"
    can_cut = is_cut or config.train != "supervised"
    require(can_cut, "settings: data.eval_split", base.data.eval_split, allowed)

    varied = list(dict.fromkeys(key for options in (grid, *points) for key in options if key != SEED))
    if config.compute is not None and BATCH in varied:  # each number of steps would have a warm-up of its own
        settings = settings | {"optim.warmup_steps": base.optim.warmup(base.run.steps)}
    trials: dict[str, Trial] = {}
    for point in [*(dict(zip(grid, values, strict=True)) for values in product(*grid.values()) if grid), *points]:
        refuse_options(point, ["run.dir", SPLIT], "points")
        seeds = (point.pop(SEED),) if SEED in point else config.seeds
        new = trial_of(config, settings | point | ({SPLIT: None} if is_cut else NOT_LOOKING), seeds, varied)
        known = trials.get(new.entry.encoder, new)
        if known.values != new.values:
            note(f"{new.entry.name} and {known.entry.name} are one trial: they differ in nothing that changes results")
        seeds = tuple(dict.fromkeys((*known.entry.seeds, *seeds)))
        trials[known.entry.encoder] = known._replace(entry=replace(known.entry, seeds=seeds))
    entries = Entries(
        [trial.entry for trial in trials.values()],
        evaluation_entries(config, is_cut),
        [DatasetEntry("dev", image_options(base.data))],
        [Question("sweep")],
    )
    return Plan({trial.entry.name: trial for trial in trials.values()}, cases_of(entries))


def trial_of(config: SweepConfig, options: Options, seeds: tuple[int, ...], varied: Iterable[str]) -> Trial:
    """A trial.

    Args:
        options: settings of its training.
        varied: the settings that differ between trials.
    """
    place = f"{config.dir}/{{seed}}"
    entry = EncoderEntry("", place, seeds=seeds, train=config.train, train_options=options, compute=config.compute)
    training = training_settings(entry, 0)
    folder = f"{config.dir}/trials/{training_digest(Encoder(entry, 0, training))}_{{seed}}"
    settings = flatten(training)
    values = {key: settings.get(key, options.get(key)) for key in varied}
    name = " ".join(f"{key}={as_words(value)}" for key, value in values.items())
    return Trial(replace(entry, name=name, encoder=folder), values)


def dotted(settings: Mapping[str, Any]) -> Options:
    """Settings by dotted name, of a mapping that may have groups in it."""
    return dict(spread(settings, {}))


def image_options(data: SourceConfig) -> Options:
    """The settings of images that are not the defaults, as options of a dataset: each encoder reads in its own way."""
    changed = changed_settings(rebuild(SourceConfig(), flatten(data)))
    names = [name for name in changed if name in EVALUATED_SETTINGS and name not in HOW_READ]
    return {f"data.{name}": changed[name] for name in names}


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
    return entries if is_cut else [replace(entry, options=entry.options | {"test": False}) for entry in entries]


# --- results ---


def write_sweep(config: SweepConfig, plan: Plan, rows: list[Row]) -> dict[str, Any]:
    """Write the files of a comparison of the trials, the best first, with what they say below its table."""
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
    means = in_columns(frame[frame.evaluation == plan.chosen_by]).groupby("encoder").accuracy.mean()
    diverged = set(frame.encoder[frame.kind == "diverged"])
    present = [name for name in plan.trials if name in set(frame.encoder)]
    return sorted(present, key=lambda name: (name in diverged, -rank_of(means.get(name))))


def advice(config: SweepConfig, plan: Plan, frame: pd.DataFrame) -> list[str]:
    """Sentences below the table: trials to add, and the limits of the choice."""
    of_choice = frame[frame.evaluation == plan.chosen_by]
    diverged = of_choice.encoder[of_choice.kind == "diverged"]
    known = ranking(plan, of_choice[~of_choice.encoder.isin(diverged)])
    missing = len(plan.trials) - of_choice.encoder.nunique()
    lines = [f"{missing} of {len(plan.trials)} trials have no result yet."] if missing else []
    if not known:
        return lines
    best = known[0]
    for key, value in plan.trials[best].values.items():
        tried = {trial.values[key] for trial in plan.trials.values()}
        if len(tried) > 1 and {type(each) for each in tried} <= {int, float} and value in (min(tried), max(tried)):
            lines.append(f"The best is at the edge of {key} ({as_words(value)}): add values beyond it.")
    found = differences_from_best(of_choice)
    behind = {each.other for each in found if each.best == best and each.is_told_apart}
    close = [name for name in known[1:] if name not in behind]
    if len(known) > 1:
        told = f"no interval tells it apart from {'; '.join(close)}" if close else "it is ahead of all others"
        lines.append(f"The best is {best}: {told}.")
        curse = f"The score of the best of {len(known)} trials is too high (the winner's curse)"
        lines.append(f"{curse}: measure the chosen settings again, with other seeds, on the test images.")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep as the command line, or `arguments`, say."""
    sweep(parse(SweepConfig, arguments))


if __name__ == "__main__":
    run_main(main)
