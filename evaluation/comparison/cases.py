"""What a comparison consists of: encoders, evaluations, datasets, questions; and the cases that they make."""

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from evaluation.comparison.tables import Question
from evaluation.config import CompareConfig
from evaluation.registry import EVALUATIONS
from mpp.config import require
from mpp.errors import UserError

Options = dict[str, Any]

TRAININGS = ("pretrain", "supervised", "contrastive")  # commands that make encoders


@dataclass(frozen=True)
class EncoderEntry:
    """A row of the table."""

    name: str
    """What the table calls it."""
    encoder: str
    """Folder, timm name or floor; `{seed}` stands for the seed."""
    random: bool
    """The folder's architecture with random weights."""
    options: Options
    """Further settings of every evaluation, such as {representation: class}."""
    seeds: tuple[int, ...]
    """Encoders that differ in their seed alone: what the spread is over."""
    train: Literal["pretrain", "supervised", "contrastive"] | None
    """The command that makes it, where it is not there."""
    train_options: Options
    """Settings of that command."""
    compute: float | None = None
    """PFLOP that it executes: the steps follow. null: as many steps as its settings say."""


@dataclass(frozen=True)
class EvaluationEntry:
    """A way to judge an encoder."""

    name: str
    """What the table calls it."""
    command: str
    """Name in the registry of evaluations."""
    options: Options
    """Its settings."""


@dataclass(frozen=True)
class DatasetEntry:
    """Labelled images."""

    name: str
    """What the table calls it."""
    options: Options
    """Settings of every evaluation on it, such as {data.path: ...}."""
    group: str | None = None
    """Group whose mean is reported too (VTAB: natural, specialised, structured)."""


class Case(NamedTuple):
    """One evaluation of one encoder on one dataset."""

    encoder: EncoderEntry
    seed: int
    evaluation: EvaluationEntry
    dataset: DatasetEntry

    @property
    def slug(self) -> str:
        """Its name as a file's."""
        parts = (self.encoder.name, str(self.seed), self.evaluation.name, self.dataset.name)
        return "-".join(parts).replace(" ", "_").replace("/", "_")


class Plan(NamedTuple):
    """What a config asks for."""

    questions: list[Question]
    cases: list[Case]
    unasked: list[Case]
    """A case of each encoder that no question is about, which may be a teacher: it is not judged."""


def entries(kind: type, values: Sequence[dict[str, Any]], key: str, **defaults: Any) -> list:
    """Entries of the config as their dataclass; UserError where they are not that."""
    made = []
    for value in values:
        try:
            made.append(kind(**copy.deepcopy(defaults) | value))
        except TypeError as error:
            raise UserError(f"{key}: {value} is not {{{', '.join(kind.__dataclass_fields__)}}}: {error}") from None
        require(isinstance(made[-1].name, str), f"{key}: name", made[-1].name, "text, in quotes")
        for part in ("options", "train_options"):
            given = getattr(made[-1], part, {})
            require(isinstance(given, dict), f"{key}: {made[-1].name}: {part}", given, "settings, or left out")
    names = [entry.name for entry in made]
    require(len(set(names)) == len(names), f"{key}: names", names, "all different")
    return made


def plan(config: CompareConfig) -> Plan:
    """The cases of all questions, each once; the first seed of all before the second of any.

    Raises:
        UserError: an entry that is none, or a name that nothing has.
    """
    plain = dict(random=False, options={}, seeds=(0,), train=None, train_options={})
    encoders = {entry.name: entry for entry in entries(EncoderEntry, config.encoders, "encoders", **plain)}
    evaluations = {e.name: e for e in entries(EvaluationEntry, config.evaluations, "evaluations", options={})}
    datasets = entries(DatasetEntry, config.datasets, "datasets", options={})
    questions = entries(Question, config.questions, "questions")
    for evaluation in evaluations.values():
        require(evaluation.command in EVALUATIONS, "evaluations: command", evaluation.command, " or ".join(EVALUATIONS))
    for entry in encoders.values():
        check_encoder(entry, encoders.values())
    encoders = {name: as_trained(entry, encoders.values()) for name, entry in encoders.items()}
    cases: dict[str, Case] = {}
    rounds = max(len(entry.seeds) for entry in encoders.values())
    for number, question in itertools.product(range(rounds), questions):
        key = f"questions: {question.name}"
        asked = choose(encoders, question.encoders, key), choose(evaluations, question.evaluations, key)
        for entry, dataset, evaluation in itertools.product(asked[0], datasets, asked[1]):
            if number < len(entry.seeds) and suits(entry, evaluation):
                case = Case(entry, entry.seeds[number], evaluation, dataset)
                same = cases.setdefault(case.slug, case)
                require(same == case, "names", f"alike as files' names ({case.slug})", "more different")
    asked_for = {case.encoder.name for case in cases.values()}
    spare = [entry for name, entry in encoders.items() if name not in asked_for]
    judged_by = next(iter(evaluations.values())), datasets[0]
    return Plan(questions, list(cases.values()), [Case(e, seed, *judged_by) for e in spare for seed in e.seeds])


def check_encoder(entry: EncoderEntry, others: Iterable[EncoderEntry]) -> None:
    """Raise UserError where an entry cannot be carried out."""
    key = f"encoders: {entry.name}"
    require(entry.train in (None, *TRAININGS), f"{key}: train", entry.train, " or ".join(TRAININGS))
    seeds = entry.seeds
    require(isinstance(seeds, list | tuple) and len(seeds) > 0, f"{key}: seeds", seeds, "a list that is not empty")
    compute = entry.compute
    require(compute is None or (entry.train and compute > 0), f"{key}: compute", compute, "above 0, beside train")
    if entry.train:
        several = len(seeds) > 1 and "{seed}" not in entry.encoder
        require(not several, f"{key}: encoder", entry.encoder, "with {seed} in it, for several seeds")
        made = (entry.train, entry.train_options, entry.compute)
        for other in others:
            of_other = (other.train, other.train_options, other.compute)
            alike = other.encoder != entry.encoder or not other.train or of_other == made
            require(alike, f"{key}: train_options", entry.train_options, f"those of {other.name}, in the same folder")


def as_trained(entry: EncoderEntry, others: Iterable[EncoderEntry]) -> EncoderEntry:
    """The entry; where another one trains its encoder, it knows how too."""
    same = [other for other in others if other.encoder == entry.encoder and other.train]
    if entry.train or not same:
        return entry
    made = {name: getattr(same[0], name) for name in ("train", "train_options", "compute")}
    return dataclasses.replace(entry, **made)


def choose(named: dict[str, Any], names: Iterable[str] | None, key: str) -> list[Any]:
    """The entries of these names; None: all."""
    for name in names or ():
        require(name in named, key, name, f"one of {', '.join(named)}")
    return list(named.values()) if names is None else [named[name] for name in names]


def suits(entry: EncoderEntry, evaluation: EvaluationEntry) -> bool:
    """Whether there is something to evaluate: a floor has no weights, and only pre-training has predicted patches."""
    kind = EVALUATIONS[evaluation.command].kind
    if entry.encoder.startswith("floor:"):
        return kind == "frozen features"
    predicts_patches = not entry.random and entry.train not in ("supervised", "contrastive")
    return kind != "masked patches" or predicts_patches
