"""Entries of a comparison's config, typed: encoders, evaluations, datasets, questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

from evaluation.comparison.trainings import TRAININGS
from evaluation.config import CompareConfig
from evaluation.registry import EVALUATIONS
from mpp.config import require
from mpp.errors import UserError

Options = dict[str, Any]
"""Settings of a command by dotted name."""

MEASURED_AXES = {"compute": "training compute (PFLOP)", "total compute": "compute of training and fine-tuning (PFLOP)"}
"""Values of a question's `x` that are measured, and the labels of their axes."""
NUMBER_TYPES = (int, float)
TYPES = {
    "encoder": (str, "text, in quotes"),
    "random": (bool, "true or false"),
    "compute": (NUMBER_TYPES, "a number above 0, or null"),
    "branch_of": (str, "the name of another entry, or null"),
    "group": (str, "text, in quotes, or null"),
    "images": (int, "a whole number, or null"),
}
"""Keys of entries whose values have one type, and what is allowed in words. null: where it is the default."""
OF_TRUNK = {"run.steps", "run.keep_at", "run.branch_from"}
"""Settings of a trunk that its branches do not take over."""
OF_THE_ENTRY = "encoder, random and seeds of an encoder's entry decide it"
DECIDED = {
    **dict.fromkeys(("encoder", "random", "seed", "run.seed"), OF_THE_ENTRY),
    **dict.fromkeys(("out", "run.dir"), "dir decides it"),
}
"""Settings of evaluations that no options can have, and the reason."""
OF_ENCODERS = {"checkpoint": "an encoder's options have it"}
"""Settings that only the options of an encoder can have."""


@dataclass(frozen=True)
class EncoderEntry:
    """A row of the table."""

    name: str
    """Its name in the table."""
    encoder: str
    """Folder, timm name or baseline; `{seed}` stands for the seed."""
    random: bool = False
    """Take the folder's architecture with random weights."""
    options: Options = field(default_factory=dict)
    """Further settings of every evaluation, such as {representation: class}."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of encoders that differ in nothing else: the spread is over them."""
    train: str | None = None
    """Command that trains the encoder if it is missing: pretrain, supervised or contrastive."""
    train_options: Options = field(default_factory=dict)
    """Settings of that command."""
    compute: float | None = None
    """PFLOP that the training executes; the number of steps follows. null: as many steps as its settings say."""
    branch_of: str | None = None
    """Another entry, the trunk: the training continues from a checkpoint of the trunk at the same seed, with the
    trunk's train_options where it has none, but for the length. The result is that of training it separately."""


@dataclass(frozen=True)
class EvaluationEntry:
    """A way to evaluate encoders."""

    name: str
    """Its name in the table."""
    command: str
    """Name of a registered evaluation."""
    options: Options = field(default_factory=dict)
    """Its settings. With data.path it is on these images, once, whatever the datasets."""


@dataclass(frozen=True)
class DatasetEntry:
    """Labelled images."""

    name: str
    """Their name in the table."""
    options: Options = field(default_factory=dict)
    """Settings of every evaluation on them, such as {data.path: ...}."""
    group: str | None = None
    """Group whose mean is reported too (VTAB: natural, specialised, structured)."""
    images: int | None = None
    """Number of test images, for the intervals of published results that did not record it."""


@dataclass(frozen=True)
class Question:
    """Some of the encoders by some of the evaluations: a table and a plot."""

    name: str
    """File name of the plot."""
    title: str = ""
    """The question in words."""
    encoders: Sequence[str] | Mapping[str, float] | None = None
    """Names of rows; with numbers, the plot is against these. null: all."""
    evaluations: Sequence[str] | None = None
    """Names of evaluations. null: all."""
    plot: Literal["bars", "lines", "depth"] = "bars"
    """bars; lines: against x; depth: against the encoder's depth, on the dev split."""
    x: str = ""
    """Meaning of the numbers of `encoders`. Instead of numbers: `compute`, the PFLOP that training the encoder executed
    (random weights: 0), or `total compute`, those of its fine-tuning too; the choice of a rate is left out."""
    lines: Mapping[str, Sequence[str]] | None = None
    """Lines of the plot: name and encoders. Encoders without compute, such as baselines, are horizontal lines. null: a
    line for each case of an evaluation (5 shots, 25 shots)."""

    def __post_init__(self):
        require("/" not in str(self.name), "questions: name", self.name, "a name of a file, without /")
        require(self.plot in ("bars", "lines", "depth"), "questions: plot", self.plot, "bars, lines or depth")
        require(isinstance(self.title, str), "questions: title", self.title, "text (without a colon and a blank)")
        for name in ("encoders", "evaluations"):
            names = getattr(self, name)
            require(not isinstance(names, str), f"questions: {name}", names, f"a list of names: [{names}]")
            require(names is None or len(names) > 0, f"questions: {name}", names, "null (all), or not empty")
        for encoder, x in self.encoders.items() if isinstance(self.encoders, Mapping) else ():
            require(
                has_type(x, NUMBER_TYPES), f"questions: encoders: {encoder}", x, "a number, its place on the x-axis"
            )
        allowed = "{name: [encoders]}"
        require(self.lines is None or isinstance(self.lines, Mapping), "questions: lines", self.lines, allowed)
        for line, names in (self.lines or {}).items():
            require(isinstance(names, list | tuple), f"questions: lines: {line}", names, "a list of encoders")
        if self.plot == "lines":
            has_numbers = isinstance(self.encoders, Mapping) or self.x in MEASURED_AXES
            require(has_numbers, "questions: encoders", self.encoders, "{name: number} to plot lines")


class Entries(NamedTuple):
    """All entries of a comparison's config."""

    encoders: list[EncoderEntry]
    evaluations: list[EvaluationEntry]
    datasets: list[DatasetEntry]
    """Empty: the images that the encoders learned from."""
    questions: list[Question]


EntryT = TypeVar("EntryT", EncoderEntry, EvaluationEntry, DatasetEntry, Question)


def read_entries(config: CompareConfig) -> Entries:
    """The config's entries as dataclasses; an encoder that another entry trains knows how it is trained, too.

    Raises:
        UserError: an entry with a setting that does not exist or fits no other.
    """
    for key in ("encoders", "evaluations", "questions"):
        require(getattr(config, key), key, "empty", "a list in a --config file; see configs/compare")
    encoders = typed_entries(EncoderEntry, config.encoders, "encoders")
    evaluations = typed_entries(EvaluationEntry, config.evaluations, "evaluations")
    datasets = typed_entries(DatasetEntry, config.datasets, "datasets")
    questions = typed_entries(Question, config.questions, "questions")
    check_commands(evaluations, "evaluations")
    for entry in encoders:
        refuse_options(entry.options, f"encoders: {entry.name}: options", DECIDED)
        refuse_options(entry.train_options, f"encoders: {entry.name}: train_options", {"run.dir": "encoder decides it"})
    for key, entries in (("evaluations", evaluations), ("datasets", datasets)):
        for entry in entries:
            refuse_options(entry.options, f"{key}: {entry.name}: options", DECIDED | OF_ENCODERS)
    encoders = [with_trunk(encoder, encoders) for encoder in encoders]
    for encoder in encoders:
        check_encoder(encoder, encoders)
    return Entries([with_training(encoder, encoders) for encoder in encoders], evaluations, datasets, questions)


def refuse_options(options: Options, key: str, refused: Mapping[str, str]) -> None:
    """Raise UserError at an option that would have no effect, or another one.

    Args:
        key: of the options, for messages.
        refused: setting -> the reason.
    """
    for name, reason in refused.items():
        require(name not in options, f"{key}: {name}", options.get(name), f"left out: {reason}")


def check_commands(evaluations: Sequence[EvaluationEntry], key: str) -> None:
    """Raise UserError at an evaluation that is not registered."""
    for evaluation in evaluations:
        require(evaluation.command in EVALUATIONS, f"{key}: command", evaluation.command, " or ".join(EVALUATIONS))


def typed_entries(kind: type[EntryT], values: Sequence[dict[str, Any]], key: str) -> list[EntryT]:
    """Entries below `key` of the config as dataclasses of this kind, whose names must all differ."""
    entries = [typed_entry(kind, value, key) for value in values]
    names = [entry.name for entry in entries]
    require(len(set(names)) == len(names), f"{key}: names", names, "all different")
    return entries


def typed_entry(kind: type[EntryT], value: dict[str, Any], key: str) -> EntryT:
    """An entry of the config as a dataclass."""
    try:
        entry = kind(**value)
    except TypeError as error:
        allowed = ", ".join(each.name for each in fields(kind))
        raise UserError(f"{key}: {value} is not {{{allowed}}}: {error}") from None
    require(isinstance(entry.name, str), f"{key}: name", entry.name, "text, in quotes")
    for each in fields(kind):
        if each.name not in TYPES:
            continue
        allowed_type, allowed = TYPES[each.name]
        given = getattr(entry, each.name)
        is_left_out = given is None and each.default is None
        require(is_left_out or has_type(given, allowed_type), f"{key}: {entry.name}: {each.name}", given, allowed)
    for name in ("options", "train_options"):
        options = getattr(entry, name, {})
        require(isinstance(options, dict), f"{key}: {entry.name}: {name}", options, "settings, or left out")
    return entry


def has_type(value: Any, allowed: type | tuple[type, ...]) -> bool:
    """Whether a value is of a type, or of one of several; true and false are no numbers."""
    if isinstance(value, bool):
        return allowed is bool
    return isinstance(value, allowed)


def with_trunk(entry: EncoderEntry, others: Sequence[EncoderEntry]) -> EncoderEntry:
    """The entry, with the training of its trunk where it is a branch, but for the length.

    Raises:
        UserError: the other entry cannot be a trunk, or this one no branch of it.
    """
    if entry.branch_of is None:
        return entry
    key = f"encoders: {entry.name}"
    possible = {other.name: other for other in others if other.train and not other.branch_of and not other.random}
    allowed = f"an entry with train that is neither random nor a branch ({', '.join(possible) or 'there is none'})"
    require(entry.branch_of in possible, f"{key}: branch_of", entry.branch_of, allowed)
    trunk = possible[entry.branch_of]
    require(entry.train in (None, trunk.train), f"{key}: train", entry.train, f"{trunk.train}, as in {trunk.name}")
    allowed = f"another folder than that of {trunk.name}"
    require(entry.encoder != trunk.encoder, f"{key}: encoder", entry.encoder, allowed)
    has_length = entry.compute is not None or "run.steps" in entry.train_options
    require(has_length, f"{key}: train_options", entry.train_options, "with run.steps, or next to compute")
    given = entry.train_options.get("run.branch_from")
    require(given is None, f"{key}: run.branch_from", given, "left out: it follows from branch_of")
    shared = {name: value for name, value in trunk.train_options.items() if name not in OF_TRUNK}
    return replace(entry, train=trunk.train, train_options=shared | entry.train_options)


def check_encoder(entry: EncoderEntry, others: Sequence[EncoderEntry]) -> None:
    """Raise UserError where an entry cannot be carried out, or another entry trains otherwise in its folder."""
    key = f"encoders: {entry.name}"
    require(entry.train in (None, *TRAININGS), f"{key}: train", entry.train, " or ".join(TRAININGS))
    is_list = isinstance(entry.seeds, list | tuple) and len(entry.seeds) > 0
    are_numbers = is_list and all(isinstance(seed, int) for seed in entry.seeds)
    differ = are_numbers and len(set(entry.seeds)) == len(entry.seeds)
    require(differ, f"{key}: seeds", entry.seeds, "a list of whole numbers, each once")
    possible = entry.compute is None or (entry.train is not None and entry.compute > 0)
    require(possible, f"{key}: compute", entry.compute, "above 0, next to train")
    if entry.train is None:
        return
    has_folders = len(entry.seeds) == 1 or "{seed}" in entry.encoder
    require(has_folders, f"{key}: encoder", entry.encoder, "with {seed} in it, for several seeds")
    for other in others:
        same_folder = other.train is not None and other.encoder == entry.encoder
        if same_folder:
            alike = training_of(other) == training_of(entry)
            require(alike, f"{key}: train_options", entry.train_options, f"those of {other.name}, in the same folder")


def training_of(entry: EncoderEntry) -> dict[str, Any]:
    """The part of an entry that says how its encoder is trained."""
    names = ("train", "train_options", "compute", "branch_of")
    return {name: getattr(entry, name) for name in names}


def with_training(entry: EncoderEntry, others: Sequence[EncoderEntry]) -> EncoderEntry:
    """The entry, with the training of another one that trains the same encoder if it has none."""
    if entry.train is not None:
        return entry
    for other in others:
        if other.encoder == entry.encoder and other.train is not None:
            return replace(entry, **training_of(other))
    return entry
