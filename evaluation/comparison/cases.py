"""The cases of a comparison: which evaluation of which encoder on which dataset, and the settings of each."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from evaluation.comparison.encoders import Encoder, command_line, encoders_of, parsed, reading_options, source_of
from evaluation.comparison.entries import (
    DatasetEntry,
    EncoderEntry,
    Entries,
    EntryT,
    EvaluationEntry,
    Options,
    Question,
)
from evaluation.frozen.run_images import EVALUATED_SETTINGS, absolute_path, is_colour_baseline
from evaluation.registry import EVALUATIONS, Evaluation
from mpp.config import HOW_READ, SourceConfig, changed_settings, flatten, rebuild, require
from mpp.config.parsing import as_command_line
from mpp.runtime.messages import note, tell

MAX_NAME_BYTES = 180
IMAGES_SETTING = "data.path"
"""The option of an evaluation that names images of its own."""


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
    def slug(self) -> str:
        """Its name in messages."""
        names = (self.encoder.entry.name, str(self.encoder.seed), self.entry.name, self.dataset.name)
        return re.sub("[ /:]", "_", "-".join(names))

    @property
    def file_name(self) -> str:
        """The beginning of its names of files: digests follow. File systems allow 255 bytes."""
        return self.slug.encode()[:MAX_NAME_BYTES].decode(errors="ignore")

    @property
    def labels(self) -> dict[str, Any]:
        """Its names in rows of results."""
        return {
            "encoder": self.encoder.entry.name,
            "encoder_seed": self.encoder.seed,
            "evaluation": self.entry.name,
            "dataset": self.dataset.name,
            "group": None if has_own_images(self.entry) else self.dataset.group,
        }


def cases_of(entries: Entries) -> list[Case]:
    """All cases that the questions ask for, each once: those of all first seeds come before those of second seeds.

    Without datasets, they are on the images that the encoders learned from.

    Raises:
        UserError: a question about an unknown name, names that are alike in file names, an encoder that would be made
            from itself, or one that cannot branch from its trunk; encoders of different images without datasets.
    """
    encoders = encoders_of(entries.encoders)
    are_given = bool(entries.datasets)
    if not are_given:
        entries = entries._replace(datasets=[DatasetEntry("birds")])
    cases: dict[str, Case] = {}
    for position in range(max(len(entry.seeds) for entry in entries.encoders)):
        for question in entries.questions:
            for case in cases_of_question(question, entries, encoders, position):
                same = cases.setdefault(case.slug, case)
                alike = (same.encoder, same.entry, same.dataset) == (case.encoder, case.entry, case.dataset)
                require(alike, "names", f"the same file name ({case.slug})", "more different")
    return list(cases.values()) if are_given else on_images_of_encoders(list(cases.values()))


def cases_of_question(
    question: Question, entries: Entries, encoders: dict[tuple[str, int], Encoder], position: int
) -> Iterator[Case]:
    """The cases of a question at the seeds that stand at this position in the lists of seeds.

    Args:
        encoders: by name of their entry and seed.
    """
    key = f"questions: {question.name}"
    evaluations = entries_named(entries.evaluations, question.evaluations, key)
    asked = entries_named(entries.encoders, question.encoders, key)
    for line, names in (question.lines or {}).items():
        entries_named(asked, names, f"{key}: lines: {line}")
    for entry in asked:
        if position >= len(entry.seeds):
            continue
        encoder = encoders[entry.name, entry.seeds[position]]
        for dataset in entries.datasets:
            for evaluation in evaluations:
                is_once = has_own_images(evaluation) or IMAGES_SETTING in evaluation.options
                if is_once and dataset is not entries.datasets[0]:
                    continue
                case = Case(encoder, evaluation, with_name_of_images(dataset, evaluation))
                reason = why_left_out(entry, evaluation)
                if reason:
                    note(f"{entry.name} is left out of {evaluation.name}, which does not apply: {reason}")
                elif position > 0 and not differs_by_seed(case):
                    once = f"{entry.name} is evaluated once in {evaluation.name}, at the first of its seeds"
                    note(f"{once}: {entry.encoder} is one encoder; {{seed}} in its name stands for several")
                else:
                    yield case


def entries_named(entries: list[EntryT], names: Iterable[str] | None, key: str) -> list[EntryT]:
    """The entries of these names, in the order of the names; None: all."""
    if names is None:
        return entries
    by_name = {entry.name: entry for entry in entries}
    for name in names:
        require(name in by_name, key, name, f"one of {', '.join(by_name)}")
    return [by_name[name] for name in names]


def why_left_out(entry: EncoderEntry, evaluation: EvaluationEntry) -> str:
    """The reason why there is nothing to evaluate; empty: there is."""
    kind = EVALUATIONS[evaluation.command].kind
    if is_colour_baseline(entry.encoder):
        return "" if kind == "frozen features" else "a colour baseline has no weights"
    if kind != "masked patches":
        return ""
    if entry.random:
        return "random weights have predicted no patches"
    return f"{entry.train} training predicts no patches" if entry.train in ("supervised", "contrastive") else ""


def differs_by_seed(case: Case) -> bool:
    """Whether another seed is another encoder, or fine-tunes it otherwise: one measured twice would have no spread."""
    entry = case.encoder.entry
    if entry.random or case.evaluation.kind == "fine-tuning":
        return True
    options = entry.options | case.entry.options | case.dataset.options
    return any("{seed}" in value for value in (entry.encoder, *options.values()) if isinstance(value, str))


def has_own_images(evaluation: EvaluationEntry) -> bool:
    """Whether an evaluation is on the images of the run, whatever the dataset: it is a case of the first one only."""
    return EVALUATIONS[evaluation.command].kind == "masked patches"


def with_name_of_images(dataset: DatasetEntry, evaluation: EvaluationEntry) -> DatasetEntry:
    """The dataset, with the name of the images that an evaluation's options name: its results are on those."""
    if IMAGES_SETTING not in evaluation.options:
        return dataset
    path = evaluation.options[IMAGES_SETTING]
    name = "birds" if path is None else Path(path).name
    return replace(dataset, name=name or dataset.name, group=None, images=None)


def on_images_of_encoders(cases: list[Case]) -> list[Case]:
    """The cases on the images that their encoders learned from; on the birds where none of these is known.

    Where the options of an evaluation or encoder name images, a case is on those.

    Raises:
        UserError: the encoders learned from different images.
    """
    named = [case for case in cases if names_images(case)]
    asking = [case for case in cases if case not in named and not has_own_images(case.entry)]
    known: dict[str, tuple[str, Options]] = {}
    for encoder in dict.fromkeys(case.encoder for case in asking):
        source = source_of(encoder)
        if source is not None:
            options = image_options(source)
            places = {key: absolute_path(options[key]) for key in ("data.path", "data.labels") if key in options}
            known.setdefault(described(options | places), (encoder.entry.name, options))
    if len(known) > 1:
        learned = "; ".join(f"{name} from {described(options)}" for name, options in known.values())
        allowed = "such as [{name: mine, options: {data.path: FOLDER}}]: the encoders learned from different images"
        require(False, "datasets", "left out", f"{allowed} ({learned})")
    options = next((options for _, options in known.values()), {})
    if asking:
        whose = "from which the encoders learned" if known else "since no encoder has a run"
        tell(f"datasets is left out: the evaluations are on {described(options)}, {whose}")
    path = options.get("data.path")
    name = "birds" if path is None else Path(path).name
    dataset = DatasetEntry(name if asking and not named and name else "images", options)
    without_options = replace(dataset, options={})
    return [replace(case, dataset=without_options if case in named else dataset) for case in cases]


def names_images(case: Case) -> bool:
    """Whether the options of an evaluation or encoder name images; an evaluation may have no such setting."""
    if has_own_images(case.entry):
        return False
    options = case.entry.options | case.encoder.entry.options
    settings = parsed(case.evaluation.config_class(), tuple(command_line(options, case.encoder.seed)))
    return flatten(settings).get("data.path", "no such setting") is not None


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
    options = case.entry.options | {"encoder": entry.encoder}
    if case.evaluation.kind != "masked patches":
        options = reading_options(case.encoder) | case.dataset.options | case.entry.options | entry.options
        options |= {"encoder": entry.encoder}
    if case.evaluation.kind == "frozen features":
        options |= {"random": entry.random, "seed": seed}
    if case.evaluation.kind == "fine-tuning":
        options |= {"run.seed": seed}
        if entry.random:
            options |= {"init": "random"}
    return parsed(case.evaluation.config_class(), tuple(command_line(options, seed)))
