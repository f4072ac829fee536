"""The trials of a sweep, as encoders of a comparison, each evaluated on a dev split."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from evaluation.comparison.cases import Case, cases_of, evaluation_settings, image_options
from evaluation.comparison.digests import training_digest
from evaluation.comparison.encoders import Encoder, command_line, parsed, training_settings
from evaluation.comparison.entries import (
    DECIDED,
    OF_ENCODERS,
    DatasetEntry,
    EncoderEntry,
    Entries,
    EvaluationEntry,
    Options,
    Question,
    check_commands,
    refuse_options,
    typed_entry,
)
from evaluation.comparison.trainings import TRAININGS
from evaluation.config import SweepConfig
from evaluation.registry import EVALUATIONS
from mpp.config import as_words, flatten, require
from mpp.runtime.messages import note

NOT_LOOKING: Options = {"run.eval_every": 0, "run.report": False}
"""Settings by which a trial does not use the held-out images."""
BATCH_SETTING = "optim.global_batch_size"
SEED_SETTING = "run.seed"
OF_THE_SWEEP = {"run.dir": "the sweep's `dir` sets it", SEED_SETTING: "the sweep's `seeds` sets it"}
"""Settings of trainings that a sweep decides, and the reason."""
DECIDED_IN_SWEEPS = dict.fromkeys((*DECIDED, *OF_ENCODERS), "the sweep's trials decide it")
"""Settings of the evaluation that it cannot have, and the reason."""
CUT = ("data.eval_split", "data.eval_fraction")
"""Settings that cut a dev split off."""


class Trial(NamedTuple):
    """Settings of a sweep's training that are tried."""

    entry: EncoderEntry
    values: dict[str, Any]
    """The value of each setting that differs between trials."""


@dataclass(frozen=True)
class SweepPlan:
    """The trials of a sweep."""

    trials: list[Trial]
    cases: list[Case]
    is_cut: bool
    """Whether the held-out images are a part of the training images."""
    chosen_by: str
    """Name of the first evaluation, whose score chooses."""

    def describe(self) -> str:
        """The plan in a line."""
        runs = sum(len(trial.entry.seeds) for trial in self.trials)
        dev = "a tenth of the training images"
        if self.is_cut:
            dev = "the held-out images, which data.eval_split null cuts from the training images"
        count = f"{len(self.trials)} trials, {runs} runs" if runs > len(self.trials) else f"{runs} trials"
        return f"{count}; the dev split is {dev}; test images are not used"


def plan_sweep(config: SweepConfig) -> SweepPlan:
    """The trials of a sweep and their evaluations, every setting of them parsed.

    Raises:
        UserError: a setting that does not exist or is out of bounds, or an evaluation that would look at test images.
    """
    given = config.vary or config.points
    require(given, "vary", "empty", "{setting: [values]} in a --config file, or left out next to points")
    for key, values in config.vary.items():
        require(isinstance(values, list) and values, f"vary: {key}", values, "a list that is not empty")
    settings = dotted(config.settings)
    refuse_options(settings, "settings", OF_THE_SWEEP)
    base = parsed_options(config.train, settings)
    is_cut = base.data.eval_split is None
    learns_labels = config.train == "supervised"
    allowed = "null with train supervised, which learns the labels of all training images except the ones it cuts off"
    require(is_cut or not learns_labels, "settings: data.eval_split", base.data.eval_split, allowed)

    common = dict(settings)
    if config.compute is not None and BATCH_SETTING in varied_settings(config):
        # each number of steps would have a warm-up of its own
        common["optim.warmup_steps"] = base.optim.warmup(base.run.steps)
    decided = {} if is_cut else NOT_LOOKING
    trials = merged(trial_of(config, common | point | decided, seeds) for point, seeds in points_of(config))
    evaluations = evaluation_entries(config, is_cut)
    images = [DatasetEntry("dev", image_options(base.data))]
    entries = Entries([trial.entry for trial in trials], evaluations, images, [Question("sweep")])
    cases = cases_of(entries)
    for case in cases:
        refuse_test_images(case)
    return SweepPlan(trials, cases, is_cut, evaluations[0].name)


def parsed_options(train: str, options: Options) -> Any:
    """The config of a training by the settings of its command line."""
    return parsed(TRAININGS[train].config_class, tuple(command_line(options, 0)))


def command_options(config: SweepConfig, trial: Trial) -> Options:
    """The settings by which a trial is trained on all training images: without the cut of the dev split."""
    settings = dotted(config.settings)
    without_cut = {key: value for key, value in settings.items() if key not in CUT}
    return without_cut | trial.values


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Options:
    """Settings by dotted name, of a mapping that may have groups in it."""
    flat: Options = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        flat |= dotted(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


def points_of(config: SweepConfig) -> Iterator[tuple[Options, tuple[int, ...]]]:
    """The settings of each trial that differ from those of all, and its seeds: the grid, then the points."""
    grid = dotted(config.vary)
    refuse_options(grid, "vary", OF_THE_SWEEP)
    if grid:
        for values in product(*grid.values()):
            yield dict(zip(grid, values, strict=True)), config.seeds
    for each in config.points:
        point = dotted(each)
        refuse_options(point, "points", {"run.dir": OF_THE_SWEEP["run.dir"]})
        seeds = (point.pop(SEED_SETTING),) if SEED_SETTING in point else config.seeds
        yield point, seeds


def varied_settings(config: SweepConfig) -> list[str]:
    """The settings that differ between trials, those of the grid first."""
    names = dict.fromkeys(dotted(config.vary))
    for point in config.points:
        names |= dict.fromkeys(dotted(point))
    return [name for name in names if name != SEED_SETTING]


def trial_of(config: SweepConfig, options: Options, seeds: tuple[int, ...]) -> Trial:
    """A trial, in a folder named by the digest of its settings: a sweep that grows finds it by any name.

    Args:
        options: settings of its training.
    """
    entry = EncoderEntry("", config.dir, seeds=seeds, train=config.train, train_options=options, compute=config.compute)
    training = training_settings(entry, 0)
    digest = training_digest(Encoder(entry, 0, training))
    values = flatten(training)
    tried = {key: values.get(key, options.get(key)) for key in varied_settings(config)}
    name = " ".join(f"{key}={as_words(value)}" for key, value in tried.items())
    folder = f"{config.dir}/trials/{digest}_{{seed}}"
    return Trial(replace(entry, name=name, encoder=folder), tried)


def merged(trials: Iterable[Trial]) -> list[Trial]:
    """The trials, each once: of those with the same settings one that has the seeds of all."""
    by_folder: dict[str, Trial] = {}
    for trial in trials:
        known = by_folder.setdefault(trial.entry.encoder, trial)
        if known.values != trial.values:
            alike = f"{trial.entry.name} and {known.entry.name} are one trial"
            note(f"{alike}: the settings by which they differ change no result")
        seeds = tuple(dict.fromkeys((*known.entry.seeds, *trial.entry.seeds)))
        by_folder[trial.entry.encoder] = known._replace(entry=replace(known.entry, seeds=seeds))
    return list(by_folder.values())


def evaluation_entries(config: SweepConfig, is_cut: bool) -> list[EvaluationEntry]:
    """The evaluations of a sweep, on the dev split; the first one chooses."""
    given = [config.evaluate] if isinstance(config.evaluate, Mapping) else config.evaluate
    entries = []
    for value in given:
        entry = typed_entry(EvaluationEntry, {"name": str(value.get("command")), **value}, "evaluate")
        check_commands([entry], "evaluate")
        options = dotted(entry.options)
        refuse_options(options, f"evaluate: {entry.name}: options", DECIDED_IN_SWEEPS)
        if not is_cut:
            able = [name for name, each in EVALUATIONS.items() if has_test(each.config_class())]
            allowed = f"{' or '.join(able)}; with data.eval_split null in settings, which cuts a dev split, any"
            require(entry.command in able, "evaluate: command", entry.command, allowed)
            options["test"] = False
        entries.append(replace(entry, options=options))
    require(len(entries) > 0, "evaluate", "empty", "for example {command: linear}")
    return entries


def has_test(config_class: type) -> bool:
    """Whether an evaluation can be done on a dev split."""
    return "test" in flatten(config_class())


def refuse_test_images(case: Case) -> None:
    """Raise UserError where a trial or its evaluation would look at held-out images that are no part of train."""
    training = case.encoder.settings
    not_looking = training.run.eval_every == 0
    if not not_looking:
        split = training.data.eval_split
        require(split is None, f"{case.encoder.entry.name}: data.eval_split", split, "null, as it is in settings")
    evaluation = flatten(evaluation_settings(case))
    if evaluation.get("test", True):
        split = evaluation.get("data.eval_split")
        require(split is None, "evaluate: data.eval_split", split, "null, as it is in settings")
