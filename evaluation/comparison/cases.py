"""The cases of a comparison: which evaluation of which encoder on which images, and the settings of each.

Everything is read and checked here, before anything is trained.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import timm
from accelerate import Accelerator

from evaluation import contrastive, supervised
from evaluation.config import CompareConfig, ContrastiveConfig, SupervisedConfig
from evaluation.config.comparing import DatasetEntry, EncoderEntry, EvaluationEntry, Options, Question
from evaluation.frozen.run_images import (
    EVALUATED_SETTINGS,
    absolute_path,
    find_run,
    is_colour_baseline,
    run_source,
)
from evaluation.registry import EVALUATIONS, Evaluation
from evaluation.supervision.classifiers import TEACHER_SETTING, with_teacher_digest
from mpp.config import (
    HOW_READ,
    Config,
    SourceConfig,
    TrainingConfig,
    changed_settings,
    flatten,
    rebuild,
    require,
    show,
)
from mpp.config.parsing import as_command_line, parse
from mpp.data.loader import BatchLayout
from mpp.errors import UserError
from mpp.models.descriptions import how_read
from mpp.pretrain import Pretraining
from mpp.runtime.messages import note, tell
from mpp.runtime.weights import HUB, ZOO
from mpp.training.run_folder import GROWING_SETTINGS, changes, parts_named, same_until
from mpp.training.task import ImageTask

MAX_NAME_BYTES = 180
"""Of a file's name, whose digests follow: file systems allow 255."""
DECIDED = ("encoder", "random", "seed", "run.seed", "out", "run.dir")
"""Settings of evaluations that no options can have: an encoder's entry or the folder decides them."""
OF_TRUNK = {"run.steps", "run.keep_at", "run.branch_from"}
"""Settings of a trunk that its branches do not take over."""
EntryT = TypeVar("EntryT", EncoderEntry, EvaluationEntry, DatasetEntry, Question)
SettingsT = TypeVar("SettingsT")


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
    """Empty: the images that the encoders learned from."""
    questions: list[Question]


def read_entries(config: CompareConfig) -> Entries:
    """The config's entries as dataclasses; an encoder that another entry trains knows how it is trained, too.

    Raises:
        UserError: an entry with a setting that does not exist or fits no other.
    """
    for key in ("encoders", "evaluations", "questions"):
        require(getattr(config, key), key, "empty", "a list in a --config file; see configs/compare")
    encoders = entries_of(EncoderEntry, config.encoders, "encoders")
    evaluations = entries_of(EvaluationEntry, config.evaluations, "evaluations")
    datasets = entries_of(DatasetEntry, config.datasets, "datasets")
    questions = entries_of(Question, config.questions, "questions")
    for entry in encoders:
        require(entry.encoder, f"encoders: {entry.name}: encoder", "empty", "a folder, a timm name or a baseline")
        refuse_options(entry.options, DECIDED, f"encoders: {entry.name}: options")
        refuse_options(entry.train_options, ["run.dir"], f"encoders: {entry.name}: train_options")
    for entry in (*evaluations, *datasets):
        refuse_options(entry.options, (*DECIDED, "checkpoint"), f"{entry.name}: options")
    by_name = {entry.name: entry for entry in encoders}
    encoders = [with_trunk(entry, by_name) for entry in encoders]
    return Entries([with_training(entry, encoders) for entry in encoders], evaluations, datasets, questions)


def entries_of(kind: type[EntryT], values: Sequence[dict[str, Any]], key: str) -> list[EntryT]:
    """Entries below `key` of the config as dataclasses of this kind, whose names must all differ."""
    entries = []
    for value in values:
        try:
            entry = kind.of(**value)
        except UserError as error:
            raise UserError(f"{key}: {value.get('name', show(value))}: {error}") from None
        require(entry.name, f"{key}: name", "empty", "a name")
        command = getattr(entry, "command", None)
        require(command is None or command in EVALUATIONS, f"{key}: command", command, " or ".join(EVALUATIONS))
        entries.append(entry)
    names = [entry.name for entry in entries]
    require(len(set(names)) == len(names), f"{key}: names", names, "all different")
    return entries


def refuse_options(options: Options, refused: Iterable[str], key: str) -> None:
    """Raise UserError at an option that would have no effect, or another one: other keys of the config decide it."""
    for name in refused:
        require(name not in options, f"{key}: {name}", options.get(name), "left out: another key decides it")


def with_trunk(entry: EncoderEntry, others: Mapping[str, EncoderEntry]) -> EncoderEntry:
    """The entry, with the training of its trunk where it is a branch, but for the length.

    Raises:
        UserError: the other entry cannot be a trunk, or this one has no length.
    """
    if entry.branch_of is None:
        return entry
    trunk = others.get(entry.branch_of, entry)
    is_possible = trunk.train and not trunk.branch_of and not trunk.random and entry.train in (None, trunk.train)
    allowed = "another entry, with the same train, that is neither random nor a branch"
    require(is_possible, f"encoders: {entry.name}: branch_of", entry.branch_of, allowed)
    has_length = entry.compute is not None or "run.steps" in entry.train_options
    require(has_length, f"encoders: {entry.name}: train_options", entry.train_options, "with run.steps, or compute")
    shared = {name: value for name, value in trunk.train_options.items() if name not in OF_TRUNK}
    return replace(entry, train=trunk.train, train_options=shared | entry.train_options)


def with_training(entry: EncoderEntry, others: Iterable[EncoderEntry]) -> EncoderEntry:
    """The entry, with the training of another one that trains the same encoder if it has none.

    Raises:
        UserError: there is no training of this compute, or one folder for several seeds.
    """
    for other in others:
        if entry.train is None and other.train and other.encoder == entry.encoder:
            names = ("train", "train_options", "compute", "branch_of")
            entry = replace(entry, **{name: getattr(other, name) for name in names})
    key = f"encoders: {entry.name}"
    require(entry.train or entry.compute is None, f"{key}: compute", entry.compute, "null, or next to train")
    has_folders = not entry.train or len(entry.seeds) == 1 or "{seed}" in entry.encoder
    require(has_folders, f"{key}: encoder", entry.encoder, "with {seed} in it, for several seeds")
    return entry


# --- encoders ---


@dataclass(eq=False)
class Encoder:
    """An encoder of a comparison: an entry at one of its seeds, linked with the encoders that its training needs."""

    entry: EncoderEntry
    seed: int
    settings: Any | None
    """Settings of the command that trains it, as the entry has them; None: the entry does not train it."""
    parents: dict[str, "Encoder"] = field(default_factory=dict)
    """The encoders that its training begins or learns from, where they are of the comparison, by the settings that name
    them: its first weights and its teacher."""
    trunk: "Encoder | None" = None
    """The encoder whose training it continues, where its entry is a branch."""
    branches: list["Encoder"] = field(default_factory=list)
    """The encoders that continue its training."""

    @property
    def path(self) -> Path:
        """The folder or file that is evaluated."""
        pattern = str(self.entry.options.get("checkpoint") or self.entry.encoder)
        return Path(with_seed(pattern, self.seed))


def encoders_of(entries: Iterable[EncoderEntry]) -> dict[tuple[str, int], Encoder]:
    """The encoders of all entries, with their parents and trunks, by name of the entry and seed.

    Raises:
        UserError: an encoder would be made from itself, or cannot branch from its trunk.
    """
    encoders = {}
    for entry in entries:
        for seed in entry.seeds:
            encoders[entry.name, seed] = Encoder(entry, seed, training_settings(entry, seed))
    trained = [encoder for encoder in encoders.values() if encoder.settings is not None]
    trained.sort(key=lambda encoder: not encoder.entry.random)  # of the same folder, the one with learned weights
    by_path = {encoder.path: encoder for encoder in trained}
    for encoder in trained:
        link(encoder, encoders, by_path)
    for encoder in trained:
        refuse_circle(encoder)
        trunk = encoder.trunk
        if trunk is not None and encoder.entry.compute is None and trunk.entry.compute is None:
            parting_step(encoder.settings, trunk.settings, f"encoders: {encoder.entry.name}")  # raises if there is none
    return encoders


def link(encoder: Encoder, encoders: dict[tuple[str, int], Encoder], trained: dict[Path, Encoder]) -> None:
    """Link an encoder with its parents and its trunk, and all of the trunk's folder with it."""
    entry = encoder.entry
    for setting, folder in parent_settings(encoder.settings).items():
        if folder in trained:
            encoder.parents[setting] = trained[folder]
    if TEACHER_SETTING not in encoder.parents:  # such a teacher is not there yet
        encoder.settings = TRAININGS[entry.train].resolve(encoder.settings)
    if entry.branch_of is None:
        return
    encoder.trunk = encoders.get((entry.branch_of, encoder.seed))
    allowed = f"among the seeds of its trunk, {entry.branch_of}"
    require(encoder.trunk, f"encoders: {entry.name}: seeds", encoder.seed, allowed)
    for other in encoders.values():
        if other.path == encoder.trunk.path:
            other.branches.append(encoder)


def refuse_circle(encoder: Encoder, below: tuple[Path, ...] = ()) -> None:
    """Raise UserError if an encoder would be made from itself.

    Args:
        below: paths of the encoders that are made from it.
    """
    if encoder.path in below:
        raise UserError(f"{encoder.path} would be made from itself; first weights and teachers are of other runs")
    for each in (*encoder.parents.values(), encoder.trunk):
        if each is not None:
            refuse_circle(each, (*below, encoder.path))


def training_settings(entry: EncoderEntry, seed: int) -> Any | None:
    """Settings of the command that trains the encoder; None: the entry does not say how it is trained.

    Raises:
        UserError: its several seeds would be the same training, or it needs code that is not imported: its results
            would be taken for those of other settings.
    """
    if entry.train is None:
        return None
    options = {"run.seed": seed} | entry.train_options | {"run.dir": entry.encoder}
    settings = parsed(TRAININGS[entry.train].config_class, tuple(command_line(options, seed)))
    is_own = len(entry.seeds) == 1 or settings.run.seed == seed
    require(is_own, f"encoders: {entry.name}: run.seed", settings.run.seed, "left out: seeds has several")
    parts_named(settings)
    model = settings.model and settings.model.name
    require(not model or timm.is_model(model), "model.name", model, "a timm model, or registered by --import FILE")
    return settings


def parent_settings(config: TrainingConfig) -> dict[str, Path]:
    """The settings that name a training's first weights and its frozen teacher -> their folders or files.

    Published models are left out.
    """
    settings = flatten(config)
    named = {setting: settings.get(setting) for setting in ("model.init_from", TEACHER_SETTING)}
    objective = config.objective
    if objective is not None and objective.frozen_teacher:
        named["objective.teacher"] = objective.teacher_checkpoint or objective.teacher
    parents = {setting: local_encoder(encoder) for setting, encoder in named.items() if encoder is not None}
    return {setting: parent for setting, parent in parents.items() if parent is not None}


def local_encoder(encoder: str) -> Path | None:
    """The folder or file of an encoder; None: it is a published model, by its name in timm or on the hub."""
    run = find_run(encoder)
    if run is None and (timm.is_model(encoder) or encoder.startswith((HUB, ZOO))):
        return None
    return run or Path(encoder)


def command_line(options: Options, seed: int) -> list[str]:
    """Settings as a command line; `{seed}` is filled in."""
    return as_command_line({name: with_seed(value, seed) for name, value in options.items()})


def with_seed(value: Any, seed: int) -> Any:
    """A setting with `{seed}` filled in, where it is text."""
    return value.replace("{seed}", str(seed)) if isinstance(value, str) else value


@cache
def parsed(config_class: type[SettingsT], arguments: tuple[str, ...]) -> SettingsT:
    """The settings of a command line. Several encoders ask for the same one, and parsing takes a while."""
    return parse(config_class, arguments)


def parting_step(config: TrainingConfig, trunk: TrainingConfig, key: str) -> int:
    """The step up to which a training and its trunk are one: a checkpoint of it, from which the training branches.

    It ends with the bits of a run that was never interrupted, and is known by that run's digest.

    Args:
        config, trunk: settings with the numbers of steps that are carried out.
        key: of the branch's entry, for messages.
    Raises:
        UserError: there is no such step.
    """
    different = changes(trunk, config)
    for name in different.keys() - set(GROWING_SETTINGS):
        before, now = different[name]
        require(False, f"{key}: {name}", now, f"{show(before)}, as in its trunk")
    stable = min(each.optim.stable_steps(each.run.steps) or 0 for each in (config, trunk))
    step = same_until(config, trunk, min(stable, config.run.steps - 1))  # the last is its own: it is evaluated there
    require(step > 0, f"{key}: run.steps", config.run.steps, "such that its first steps have the rates of its trunk's")
    return step


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
            "group": None if self.kind == "masked patches" else self.dataset.group,
        }


def cases_of(entries: Entries) -> list[Case]:
    """All cases that the questions ask for, each once: those of all first seeds come before those of second seeds.

    Without datasets, they are on the images that the encoders learned from.

    Raises:
        UserError: a question about an unknown name, an encoder that would be made from itself, or one that cannot
            branch from its trunk; encoders of different images without datasets.
    """
    encoders = encoders_of(entries.encoders)
    datasets = entries.datasets
    if not datasets:
        is_needed = not all(map(has_own_images, entries.evaluations))
        datasets = [images_learned(encoders.values()) if is_needed else DatasetEntry("images")]
    pairs = dict.fromkeys(pair for question in entries.questions for pair in pairs_of(question, entries))
    evaluations = {entry.name: entry for entry in entries.evaluations}
    cases = []
    for position in range(max(len(entry.seeds) for entry in entries.encoders)):
        for (name, seeds), evaluation in pairs:
            for dataset in datasets if position < len(seeds) else []:
                entry = evaluations[evaluation]
                case = case_of(encoders[name, seeds[position]], entry, dataset)
                is_repeated = has_own_images(entry) and dataset is not datasets[0]
                if not is_repeated and applies(case, is_first_seed=position == 0):
                    cases.append(case)
    return cases


def pairs_of(question: Question, entries: Entries) -> Iterable[tuple[tuple[str, tuple[int, ...]], str]]:
    """The encoders that a question asks for, by name and seeds, with the names of their evaluations."""
    key = f"questions: {question.name}"
    seeds = {entry.name: entry.seeds for entry in entries.encoders}
    encoders = named(question.encoders, seeds, key)
    for line, names in (question.lines or {}).items():
        named(names, encoders, f"{key}: lines: {line}")
    evaluations = named(question.evaluations, [entry.name for entry in entries.evaluations], key)
    return product([(name, seeds[name]) for name in encoders], evaluations)


def named(names: Iterable[str] | None, possible: Iterable[str], key: str) -> list[str]:
    """The names, which must be possible ones; None: all."""
    possible = list(possible)
    for name in names or ():
        require(name in possible, key, name, f"one of {', '.join(possible)}")
    return possible if names is None else list(names)


def case_of(encoder: Encoder, evaluation: EvaluationEntry, dataset: DatasetEntry) -> Case:
    """A case; where the evaluation's options name images, its dataset has their name."""
    if "data.path" in evaluation.options:
        name = Path(evaluation.options["data.path"] or "birds").name
        dataset = replace(dataset, name=name, group=None, images=None)
    return Case(encoder, evaluation, dataset)


def has_own_images(entry: EvaluationEntry) -> bool:
    """Whether it is on the same images whatever the dataset: those of the run, or those that its options name."""
    return EVALUATIONS[entry.command].kind == "masked patches" or "data.path" in entry.options


def applies(case: Case, is_first_seed: bool) -> bool:
    """Whether there is something to evaluate, and no other seed has the same; a note says why not."""
    entry, evaluation = case.encoder.entry, case.entry.name
    left_out = f"{entry.name} is left out of {evaluation}, which does not apply"
    is_masked = case.kind == "masked patches"
    if is_colour_baseline(entry.encoder) and case.kind != "frozen features":
        note(f"{left_out}: a colour baseline has no weights")
    elif is_masked and (entry.random or entry.train in ("supervised", "contrastive")):
        note(f"{left_out}: this encoder has predicted no patches")
    elif is_first_seed or entry.random or case.kind == "fine-tuning" or is_of_seed(case):
        return True
    else:
        once = f"{entry.name} is evaluated once in {evaluation}, at the first of its seeds"
        note(f"{once}: {entry.encoder} is one encoder; {{seed}} in its name stands for several")
    return False


def is_of_seed(case: Case) -> bool:
    """Whether its encoder, or a setting of its evaluation, has the seed in its name."""
    options = case.encoder.entry.options | case.entry.options | case.dataset.options
    return any("{seed}" in str(value) for value in (case.encoder.entry.encoder, *options.values()))


def images_learned(encoders: Iterable[Encoder]) -> DatasetEntry:
    """The images that the encoders learned from; the birds where that is known of none.

    Raises:
        UserError: they learned from different images.
    """
    known: dict[str, Options] = {}
    for encoder in encoders:
        source = source_of(encoder)
        if source is not None:
            options = image_options(source)
            place = absolute_path(options.get("data.path"))
            known.setdefault(described(options | ({"data.path": place} if place else {})), options)
    allowed = "such as [{name: mine, options: {data.path: FOLDER}}]: the encoders learned from different images"
    require(len(known) <= 1, "datasets", "left out", f"{allowed} ({'; '.join(known)})")
    options = next(iter(known.values()), {})
    whose = "from which the encoders learned" if known else "since no encoder has a run"
    tell(f"datasets is left out: the evaluations are on {described(options)}, {whose}")
    return DatasetEntry(Path(options.get("data.path", "birds")).name or "images", options)


def source_of(encoder: Encoder) -> SourceConfig | None:
    """The images that an encoder learned from; None: there is no run of it."""
    if encoder.settings is not None:
        return encoder.settings.data
    run = find_run(str(encoder.path))
    return None if run is None else replace(run_source(run), train_images=None)


def image_options(data: SourceConfig) -> Options:
    """The settings of images that are not the defaults, as options of a dataset: each encoder reads in its own way."""
    changed = changed_settings(rebuild(SourceConfig(), flatten(data)))
    names = [name for name in changed if name in EVALUATED_SETTINGS and name not in HOW_READ]
    return {f"data.{name}": changed[name] for name in names}


def described(options: Options) -> str:
    """Options of a dataset in words."""
    return " ".join(as_command_line(options)) or "the package's birds"


@cache
def evaluation_settings(case: Case) -> Any:
    """Settings of a case's evaluation, but for the places of its results."""
    entry, seed = case.encoder.entry, case.encoder.seed
    options = case.entry.options
    if case.kind != "masked patches":
        options = reading_options(case.encoder) | case.dataset.options | options | entry.options
    options = options | {"encoder": entry.encoder}
    if case.kind == "frozen features":
        options |= {"random": entry.random, "seed": seed}
    if case.kind == "fine-tuning":
        options |= {"run.seed": seed} | ({"init": "random"} if entry.random else {})
    return parsed(case.evaluation.config_class(), tuple(command_line(options, seed)))


def reading_options(encoder: Encoder) -> Options:
    """Settings by which the files were read that the encoder learned from: other images are read in the same way."""
    run = find_run(str(encoder.path))
    reading: dict[str, Any] = {}
    if encoder.settings is not None:
        reading = encoder.settings.data.how_read()
    elif run is not None:
        reading = run_source(run).how_read()
    else:
        with suppress(UserError):  # no such encoder, which its evaluation reports
            reading = how_read(str(encoder.path))
    return {f"data.{name}": value for name, value in reading.items()}
