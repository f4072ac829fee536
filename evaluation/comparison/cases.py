"""The cases of a comparison: which evaluation of which encoder on which images, and the settings of each.

Everything is read and checked here, before anything is trained.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import timm
from accelerate import Accelerator

from evaluation import contrastive, supervised
from evaluation.config import CompareConfig, ContrastiveConfig, SupervisedConfig
from evaluation.config.comparing import DatasetEntry, EncoderEntry, EvaluationEntry, Options, Question
from evaluation.frozen.run_images import (
    EVALUATED_SETTINGS,
    VIEW_SETTINGS,
    find_run,
    is_colour_baseline,
    run_source,
    split_run,
)
from evaluation.registry import EVALUATIONS, Evaluation
from evaluation.supervision.classifiers import DISTILL_TEACHER, with_teacher_digest
from mpp.config import HOW_READ, Config, flatten, require, settings_of, show
from mpp.config.parsing import as_command_line, read, spread
from mpp.data.loader import BatchLayout
from mpp.errors import UserError
from mpp.models.descriptions import how_read
from mpp.pretrain import Pretraining
from mpp.runtime.messages import note
from mpp.training.run_folder import encoders_named, parts_named, saved_settings
from mpp.training.task import ImageTask

MAX_NAME_BYTES = 180
"""Of a file's name, whose digests follow: file systems allow 255."""
OF_SEED = "{seed}"
"""In names and settings: the seed of the encoder."""
DECIDED = ("encoder", "random", "seed", "run.seed", "out", "run.dir")
"""Settings of evaluations that no options can have: an encoder's entry or the folder decides them."""
TRUNK_SETTING = "run.branch_from"
"""Names the encoder whose training another one continues, with the result of training it separately."""


class Training(NamedTuple):
    """A command that trains an encoder."""

    config_class: type
    build_task: Callable[[Any, Accelerator, BatchLayout], ImageTask]
    resolve: Callable[[Any], Any] = lambda config: config
    """Add to a config the digests of weights that it depends on."""
    revision: int = 0
    """Raised, with the reason next to it, when the same settings give other weights: digests have it but for 0."""


TRAININGS: dict[str, Training] = {
    "pretrain": Training(Config, Pretraining),
    "supervised": Training(SupervisedConfig, supervised.Classification, with_teacher_digest),
    "contrastive": Training(ContrastiveConfig, contrastive.Contrastive),
}


# --- entries ---


class Entries(NamedTuple):
    """All entries of a comparison's config."""

    encoders: list[EncoderEntry]
    evaluations: list[EvaluationEntry]
    datasets: list[DatasetEntry]
    questions: list[Question]


def read_entries(config: CompareConfig) -> Entries:
    """The config's entries as dataclasses; an encoder that another entry trains knows how it is trained, too.

    Raises:
        UserError: an entry with a setting that does not exist or fits no other.
    """
    kinds = {"encoders": EncoderEntry, "evaluations": EvaluationEntry, "datasets": DatasetEntry, "questions": Question}
    entries = Entries(*(entries_of(kind, getattr(config, key), key) for key, kind in kinds.items()))
    for entry in entries.encoders:
        require(entry.encoder, f"encoders: {entry.name}: encoder", "empty", "a folder, a timm name or a baseline")
        refuse_options(dict(spread(entry.train_options, {})), ["run.dir"], f"encoders: {entry.name}: train_options")
    trained = {entry.encoder: entry for entry in reversed(entries.encoders) if entry.train}
    for place, entry in enumerate(entries.encoders):
        how = entry if entry.train else trained.get(entry.encoder, entry)
        named = {name: getattr(how, name) for name in ("train", "train_options", "compute")}
        entries.encoders[place] = replace(entry, **named)
    return entries


def entries_of(kind: type, values: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """Entries below `key` of the config as dataclasses of this kind, whose names must all differ."""
    require(values, key, "empty", "a list in a --config file; see configs/compare")
    entries = []
    for value in values:
        try:
            entry = kind.of(**value)
        except UserError as error:
            raise UserError(f"{key}: {value.get('name', show(value))}: {error}") from None
        require(entry.name, f"{key}: name", "empty", "a name")
        command = getattr(entry, "command", None)
        require(command is None or command in EVALUATIONS, f"{key}: command", command, " or ".join(EVALUATIONS))
        if hasattr(entry, "options"):
            known = {each.key: each for each in settings_of(EVALUATIONS[command].config_class()())} if command else {}
            entry = replace(entry, options=dict(spread(entry.options, known)))
            decided = DECIDED if kind is EncoderEntry else (*DECIDED, "checkpoint")
            refuse_options(entry.options, decided, f"{key}: {entry.name}: options")
        entries.append(entry)
    names = [entry.name for entry in entries]
    require(len(set(names)) == len(names), f"{key}: names", names, "all different")
    return entries


def refuse_options(options: Options, refused: Iterable[str], key: str) -> None:
    """Raise UserError at an option that would have no effect, or another one: other keys of the config decide it."""
    for name in refused:
        require(name not in options, f"{key}: {name}", options.get(name), "left out: another key decides it")


# --- encoders ---


@dataclass(eq=False)
class Encoder:
    """An encoder of a comparison: an entry at one of its seeds, linked with the encoders that its training needs."""

    entry: EncoderEntry
    seed: int
    settings: Any | None
    """Settings of the command that trains it, as the entry has them; None: the entry does not train it."""
    parents: dict[str, "Encoder"] = field(default_factory=dict)
    """The encoders of the comparison that its training begins from, continues or learns from, by the settings that name
    them; or, as `encoder`, the one in whose run it is."""

    @property
    def run_settings(self) -> Any | None:
        """Settings of its training, or of the run that it is in; None: the comparison trains neither."""
        return self.parents.get("encoder", self).settings

    @property
    def path(self) -> Path:
        """The folder or file that is evaluated."""
        pattern = self.entry.options.get("checkpoint") or self.entry.encoder
        return Path(str(pattern).replace(OF_SEED, str(self.seed)))


def encoders_of(entries: Iterable[EncoderEntry]) -> dict[tuple[str, int], Encoder]:
    """The encoders of all entries, with their parents, by name of the entry and seed.

    Raises:
        UserError: an encoder would be made from itself.
    """
    encoders = {
        (entry.name, seed): Encoder(entry, seed, training_settings(entry, seed))
        for entry in entries
        for seed in entry.seeds
    }
    trained = [encoder for encoder in encoders.values() if encoder.settings is not None]
    by_path = {encoder.path: encoder for encoder in sorted(trained, key=lambda encoder: not encoder.entry.random)}
    for encoder in encoders.values():
        runs = {setting: run for setting, (run, _) in parent_runs(encoder).items()}
        encoder.parents = {setting: by_path[run] for setting, run in runs.items() if run in by_path}
    for encoder in trained:
        if DISTILL_TEACHER not in encoder.parents:  # such a teacher is not there yet
            encoder.settings = TRAININGS[encoder.entry.train].resolve(encoder.settings)
    try:
        TopologicalSorter({encoder: encoder.parents.values() for encoder in trained}).prepare()
    except CycleError as error:
        raise UserError(
            f"{error.args[1][0].path} would be made from itself; parents of a training are other runs"
        ) from None
    return encoders


def training_settings(entry: EncoderEntry, seed: int) -> Any | None:
    """Settings of the command that trains the encoder; None: the entry does not say how it is trained.

    Raises:
        UserError: there is no training of this compute; its several seeds would be the same training, or in one folder;
            or it needs code that is not imported: its results would be taken for those of other settings.
    """
    key = f"encoders: {entry.name}"
    if entry.train is None:
        require(entry.compute is None, f"{key}: compute", entry.compute, "null, or next to train")
        return None
    options = {"run.seed": seed} | entry.train_options | {"run.dir": entry.encoder}
    settings = settings_of_seed(TRAININGS[entry.train].config_class, options, seed)
    if len(entry.seeds) > 1:
        require(OF_SEED in entry.encoder, f"{key}: encoder", entry.encoder, "with {seed} in it, for several seeds")
        require(settings.run.seed == seed, f"{key}: run.seed", settings.run.seed, "left out: seeds has several")
    parts_named(settings)
    model = settings.model and settings.model.name
    require(not model or timm.is_model(model), "model.name", model, "a timm model, or registered by --import FILE")
    return settings


def parent_runs(encoder: Encoder) -> dict[str, tuple[Path, str]]:
    """Setting -> the run that a training begins from, continues or learns from by it, and which of its weights.

    Of an encoder that is not trained itself, `encoder` -> the run that it is in.
    """
    config = encoder.settings
    if config is None:
        return {"encoder": split_run(str(encoder.path))}
    named = encoders_named(flatten(config))
    named[TRUNK_SETTING] = (config.run.branch_from or "").rpartition("@")[0]
    return {setting: split_run(name) for setting, name in named.items() if name}


def settings_of_seed(config_class: type, options: Options, seed: int, inherited: Options | None = None) -> Any:
    """The config of a command with these settings, where `{seed}` stands for the seed.

    Args:
        inherited: settings instead of the defaults.
    """
    words = [word.replace(OF_SEED, str(seed)) for word in as_command_line(options)]
    usual = read(config_class(), as_command_line(inherited or {}))
    return read(usual, words, refuse_idle=True)


# --- cases ---


@dataclass(frozen=True, eq=False)
class Case:
    """One evaluation of one encoder on one dataset."""

    encoder: Encoder
    entry: EvaluationEntry
    dataset: DatasetEntry

    @property
    def evaluation(self) -> Evaluation:
        """The registered evaluation."""
        return EVALUATIONS[self.entry.command]

    @property
    def kind(self) -> str:
        """The way in which its evaluation uses an encoder."""
        return self.evaluation.kind

    @property
    def slug(self) -> str:
        """Its name in messages, and at the beginning of names of files."""
        names = (self.encoder.entry.name, str(self.encoder.seed), self.entry.name, self.dataset.name)
        text = re.sub("[ /:]", "_", "-".join(names))
        return text.encode()[:MAX_NAME_BYTES].decode(errors="ignore")

    @property
    def labels(self) -> dict[str, Any]:
        """Its names in rows of results."""
        return {
            "encoder": self.encoder.entry.name,
            "encoder_seed": self.encoder.seed,
            "evaluation": self.entry.name,
            "dataset": self.dataset.name,
            "group": self.dataset.group,
        }


def cases_of(entries: Entries) -> list[Case]:
    """All cases that the questions ask for, each once: those of all first seeds come before those of second seeds.

    Raises:
        UserError: a question about an unknown name, or an encoder that would be made from itself.
    """
    asked = {pair for question in entries.questions for pair in pairs_of(question, entries)}
    cases = [
        Case(encoder, evaluation, dataset)
        for encoder in encoders_of(entries.encoders).values()
        for evaluation in entries.evaluations
        for dataset in datasets_of(evaluation, entries.datasets)
        if (encoder.entry.name, evaluation.name) in asked
    ]
    cases.sort(key=lambda case: case.encoder.entry.seeds.index(case.encoder.seed))
    return [case for case in cases if applies(case)]


def pairs_of(question: Question, entries: Entries) -> Iterable[tuple[str, str]]:
    """The names of the encoders that a question asks for, and of their evaluations."""
    key = f"questions: {question.name}"
    encoders = named(question.encoders, [entry.name for entry in entries.encoders], key)
    for line, names in (question.lines or {}).items():
        named(names, encoders, f"{key}: lines: {line}")
    return product(encoders, named(question.evaluations, [entry.name for entry in entries.evaluations], key))


def named(names: Iterable[str] | None, possible: Sequence[str], key: str) -> Sequence[str]:
    """The names, which must be possible ones; None: all."""
    names = possible if names is None else list(names)
    for name in names:
        require(name in possible, key, name, f"one of {', '.join(possible)}")
    return names


def datasets_of(evaluation: EvaluationEntry, datasets: list[DatasetEntry]) -> list[DatasetEntry]:
    """The images of an evaluation: once the run's own, or those that its options name."""
    if "data.path" in evaluation.options:
        name = Path(evaluation.options["data.path"] or "birds").name
        return [DatasetEntry(name)]
    is_masked = EVALUATIONS[evaluation.command].kind == "masked patches"
    return [replace(datasets[0], group=None)] if is_masked else datasets


def applies(case: Case) -> bool:
    """Whether there is something to evaluate, and no other seed has the same; a note says why not."""
    entry, seed = case.encoder.entry, case.encoder.seed
    settings = (entry.encoder, entry.options, case.entry.options, case.dataset.options)
    differs = entry.random or case.kind == "fine-tuning" or OF_SEED in str(settings)
    why = None
    if is_colour_baseline(entry.encoder) and case.kind != "frozen features":
        why = "a colour baseline has no weights"
    elif case.kind == "masked patches" and (entry.random or entry.train not in (None, "pretrain")):
        why = "this encoder has predicted no patches"
    elif not differs and seed != entry.seeds[0]:
        why = f"{entry.encoder} is the same encoder at each seed; {{seed}} in its name stands for several"
    if why:
        note(f"{entry.name} (seed {seed}) is left out of {case.entry.name}: {why}")
    return not why


@cache
def evaluation_settings(case: Case) -> Any:
    """Settings of a case's evaluation, but for the places of its results."""
    entry, seed = case.encoder.entry, case.encoder.seed
    options, inherited = case.entry.options, {}
    if case.kind != "masked patches":
        options = case.dataset.options | options | entry.options
        inherited = reading_options(case.encoder)
        if "config" in case.entry.options:
            options = images_beside_recipe(case, options) | options
    options = options | {"encoder": entry.encoder}
    if case.kind == "frozen features":
        options |= {"random": entry.random, "seed": seed}
    if case.kind == "fine-tuning":
        options |= {"run.seed": seed} | ({"init": "random"} if entry.random else {})
        inherited |= view_options(case.encoder)
    return settings_of_seed(case.evaluation.config_class(), options, seed, inherited)


def images_beside_recipe(case: Case, options: Options) -> Options:
    """The usual settings of images where the recipe of an evaluation (`config`) is for another dataset; {}: it is not.

    Raises:
        UserError: the recipe has a dataset, and the entry of the images names no path.
    """
    usual, recipe = case.evaluation.config_class()(), options["config"]
    path = read(usual, as_command_line({"config": recipe})).data.path
    if path is None or options.get("data.path") == path:
        return {}
    key = f"datasets: {case.dataset.name}: data.path"
    require("data.path" in options, key, "missing", f"there: {recipe} has {path}")
    return {f"data.{name}": getattr(usual.data, name) for name in EVALUATED_SETTINGS if name not in HOW_READ}


def reading_options(encoder: Encoder) -> Options:
    """Settings by which the files were read that the encoder learned from: other images are read in the same way."""
    run, source = find_run(str(encoder.path)), None
    if encoder.run_settings is not None:
        source = encoder.run_settings.data
    elif run is not None:
        source = run_source(run)
    with suppress(UserError):  # no such encoder, which its evaluation reports
        reading = how_read(str(encoder.path)) if source is None else source.how_read()
        return {f"data.{name}": value for name, value in reading.items()}
    return {}


def view_options(encoder: Encoder) -> Options:
    """Settings by which fine-tuning shows images as the encoder's training did."""
    run = find_run(str(encoder.path))
    saved = saved_settings(run)["data"] if run else {}
    data = saved if encoder.run_settings is None else vars(encoder.run_settings.data)
    return {f"data.{name}": data[name] for name in VIEW_SETTINGS if name in data}
