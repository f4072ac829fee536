"""The encoders of a comparison: an entry at each of its seeds, with the encoders that its training needs."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import timm

from evaluation.comparison.branches import check_branch, parting_step
from evaluation.comparison.entries import EncoderEntry, Options
from evaluation.comparison.trainings import TRAININGS, parent_settings
from evaluation.frozen.run_images import evaluated_image_settings, find_run, run_image_settings
from evaluation.supervision.classifiers import TEACHER_SETTING
from mpp.config import HOW_READ, SourceConfig, TrainingConfig, require
from mpp.config.parsing import as_command_line, parse
from mpp.errors import UserError
from mpp.models.descriptions import how_read
from mpp.training.run_folder import parts_named

SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, eq=False)
class Encoder:
    """An encoder of a comparison: an entry at one of its seeds."""

    entry: EncoderEntry
    seed: int
    settings: Any | None
    """Settings of the command that trains it, as the entry has them; None: the entry does not train it."""
    parents: Mapping[str, "Encoder"] = field(default_factory=dict)
    """The encoders that its training begins or learns from, where they are of the comparison, by the settings that name
    them: its first weights and its teacher."""
    trunk: "Encoder | None" = None
    """The encoder whose training it continues, where its entry is a branch."""
    branches: tuple["Encoder", ...] = ()
    """The encoders that continue its training."""

    @property
    def path(self) -> Path:
        """The folder or file that is evaluated."""
        pattern = str(self.entry.options.get("checkpoint") or self.entry.encoder)
        return Path(with_seed(pattern, self.seed))


def encoders_of(entries: list[EncoderEntry]) -> dict[tuple[str, int], Encoder]:
    """The encoders of all entries, with their parents and trunks, by name of the entry and seed.

    Raises:
        UserError: an encoder would be made from itself, or cannot branch from its trunk.
    """
    alone = [Encoder(entry, seed, training_settings(entry, seed)) for entry in entries for seed in entry.seeds]
    encoders = with_trunks(alone)
    trained = [encoder for encoder in encoders if encoder.settings is not None]
    trained.sort(key=lambda encoder: not encoder.entry.random)  # of the same folder, the one with learned weights
    by_path = {encoder.path: encoder for encoder in trained}
    return {(encoder.entry.name, encoder.seed): with_parents(encoder, by_path) for encoder in encoders}


def with_trunks(alone: list[Encoder]) -> list[Encoder]:
    """The encoders, those that branch with their trunk, and all of a trunk's folder with its branches."""
    by_name = {(encoder.entry.name, encoder.seed): encoder for encoder in alone}
    branches: dict[Path, list[Encoder]] = {}
    for encoder in alone:
        if encoder.entry.branch_of is not None:
            trunk = by_name.get((encoder.entry.branch_of, encoder.seed))
            allowed = f"among the seeds of its trunk, {encoder.entry.branch_of}"
            require(trunk is not None, f"encoders: {encoder.entry.name}: seeds", encoder.seed, allowed)
            check_lengths(encoder, trunk)
            branches.setdefault(trunk.path, []).append(encoder)
    trunks = {}
    for key, encoder in by_name.items():
        trunks[key] = replace(encoder, branches=tuple(branches.get(encoder.path, ())))
    linked = []
    for encoder in trunks.values():
        name = encoder.entry.branch_of
        linked.append(encoder if name is None else replace(encoder, trunk=trunks[name, encoder.seed]))
    return linked


def check_lengths(branch: Encoder, trunk: Encoder) -> None:
    """Raise UserError if an encoder cannot branch from its trunk, as far as that is known before images are loaded."""
    of_settings = branch.entry.compute is None and trunk.entry.compute is None
    check = parting_step if of_settings else check_branch
    check(branch.settings, trunk.settings, f"encoders: {branch.entry.name}")


def with_parents(encoder: Encoder, trained: dict[Path, Encoder], descendants: tuple[Path, ...] = ()) -> Encoder:
    """The encoder with its parents, as far as they are among the `trained` ones.

    Args:
        trained: encoders by their paths.
        descendants: paths of the encoders that it is a parent or the trunk of, directly or not.
    """
    if encoder.path in descendants:
        raise UserError(
            f"{encoder.path} would be made from itself; its first weights and its teacher must come from another run"
        )
    below = (*descendants, encoder.path)
    if encoder.trunk is not None:
        encoder = replace(encoder, trunk=with_parents(encoder.trunk, trained, below))
    if encoder.settings is None:
        return encoder
    parents = {}
    for setting, folder in parent_settings(encoder.settings).items():
        if folder in trained:
            parents[setting] = with_parents(trained[folder], trained, below)
    settings = encoder.settings
    if TEACHER_SETTING not in parents:  # such a teacher is not there yet
        settings = TRAININGS[encoder.entry.train].resolve(settings)
    return replace(encoder, parents=parents, settings=settings)


def training_settings(entry: EncoderEntry, seed: int) -> Any | None:
    """Settings of the command that trains the encoder; None: the entry does not say how it is trained.

    Raises:
        UserError: its several seeds would be the same training, or it needs code that is not imported.
    """
    if entry.train is None:
        return None
    options = {"run.seed": seed} | entry.train_options | {"run.dir": entry.encoder}
    settings = parsed(TRAININGS[entry.train].config_class, tuple(command_line(options, seed)))
    is_own = len(entry.seeds) == 1 or settings.run.seed == seed
    require(is_own, f"encoders: {entry.name}: run.seed", settings.run.seed, "left out: seeds has several")
    refuse_unregistered(settings)
    return settings


def refuse_unregistered(config: TrainingConfig) -> None:
    """Raise UserError where settings name a part that nothing has registered in this process.

    For plans of trainings: without their --import, results would be taken for those of other settings.
    """
    parts_named(config)
    model = config.model and config.model.name
    require(not model or timm.is_model(model), "model.name", model, "a timm model, or registered by --import FILE")


def source_of(encoder: Encoder) -> SourceConfig | None:
    """The images that an encoder learned from; None: there is no run of it."""
    if encoder.settings is not None:
        return encoder.settings.data
    run = find_run(str(encoder.path))
    return None if run is None else SourceConfig(**evaluated_image_settings(run))


def reading_options(encoder: Encoder) -> Options:
    """Settings by which the files were read that the encoder learned from: other images are read in the same way."""
    path = str(encoder.path)
    run = find_run(path)
    reading: dict[str, Any] = {}
    if encoder.settings is not None:
        reading = encoder.settings.data.how_read()
    elif run is not None:
        reading = {name: value for name, value in run_image_settings(run).items() if name in HOW_READ}
    else:
        with suppress(UserError):  # no such encoder, which its evaluation reports
            reading = how_read(path)
    return {f"data.{name}": value for name, value in reading.items()}


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
