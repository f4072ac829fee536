"""Digests that results are known by: of the settings of an evaluation, and of those of the encoder's training."""

import hashlib
import json
import subprocess
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from timm import is_model

import mpp
from evaluation.comparison.cases import TRAININGS, Case, Encoder, evaluation_settings
from evaluation.config import ContrastiveConfig, FewshotConfig, FinetuneConfig, MaskedDataConfig, SupervisedConfig
from evaluation.frozen.run_images import record_images
from mpp.config import SourceConfig, flatten, settings_of
from mpp.config.imports import imported
from mpp.data.data_path import is_local
from mpp.runtime.files import short_digest
from mpp.runtime.weights import fingerprint
from mpp.training.run_folder import imports_used

PLACES = {"encoder", "checkpoint", "out", "run.dir"}
"""Settings that are places: a result depends on the content there, not on the place."""
EARLIER_DEFAULTS: dict[type, dict[str, Any]] = {FewshotConfig: {"seeds": (0, 1, 2)}}
"""Defaults of before, by which the digests of published results were made: digests leave these values out."""


@cache
def case_digest(case: Case) -> str:
    """Digest of all settings that a case's result depends on: of its evaluation, and of the encoder's training.

    An encoder that is not trained here is known by its weights, or by its name. Hashing these takes a while, so the
    digest of a case is kept.
    """
    encoder = case.encoder
    content = {
        "command": case.entry.command,
        "settings": relevant_settings(evaluation_settings(case)),
        "encoder": training_digest(encoder) or fingerprint(encoder.path) or encoder.entry.encoder,
        "at": checkpoint_name(encoder),
        "random": encoder.entry.random,
        "seed": encoder.seed,
    }
    if case.evaluation.module.partition(".")[0] != "evaluation":
        content["imports"] = code_digests(imported)
    return digest_of(content, case.evaluation.revision)


def training_digest(encoder: Encoder) -> str | None:
    """Digest of the settings that an encoder is trained by, and its parents; None: the comparison does not train it."""
    if encoder.settings is None:
        return None
    of_training = relevant_settings(encoder.settings)
    for setting, parent in encoder.parents.items():
        of_training[setting] = training_digest(parent)
    entry = encoder.entry
    content = {"command": entry.train, "settings": of_training, "compute": entry.compute}
    imports = imports_used(encoder.settings)
    if imports:
        content["imports"] = code_digests(imports)
    return digest_of(content, TRAININGS[entry.train].revision)


def code_digests(imports: dict[str, bytes]) -> list[str]:
    """Digests of the user's files that a result depends on, in any order of their imports."""
    return sorted(hashlib.sha256(content).hexdigest() for content in imports.values())


def checkpoint_name(encoder: Encoder) -> str | None:
    """Name of an entry's weights file; next to timm's name, which decides how images are scaled."""
    entry = encoder.entry
    if "checkpoint" not in entry.options:
        return None
    return f"{entry.encoder} {encoder.path.name}" if is_model(entry.encoder) else encoder.path.name


def relevant_settings(config: Any) -> dict[str, Any]:
    """The settings that a result depends on: those that are not the defaults, not operational, and no places.

    If you change a default, add the earlier one to EARLIER_DEFAULTS and to the configs of published comparisons.
    """
    ignored = {each.key for each in settings_of(config) if each.about["operational"]}
    if depends_on_images_of_a_pass(config):
        ignored.discard("data.batch_size")
    ignored |= PLACES
    defaults = flatten(type(config)()) | EARLIER_DEFAULTS.get(type(config), {})
    changed = {key: value for key, value in flatten(config).items() if value != defaults[key]}
    if changed.get("data.label_folder") == "inner":  # null is the same, where it is not refused
        del changed["data.label_folder"]
    return {key: value for key, value in changed.items() if key not in ignored}


def depends_on_images_of_a_pass(config: Any) -> bool:
    """Whether it matters which images share a forward pass: they are mixed or contrasted."""
    if isinstance(config, SupervisedConfig | FinetuneConfig):
        return config.augment.mixup + config.augment.cutmix > 0
    return isinstance(config, ContrastiveConfig)


def label_task(config: Any) -> str:
    """The kind of label that a command's settings ask for; of a command without labels the usual one."""
    return flatten(config).get("task", "class")


def provenance(case: Case) -> dict[str, Any]:
    """The images and weights that a result would be of if it were computed now."""
    about = {"digest": case_digest(case), "weights": fingerprint(case.encoder.path)}
    records = {name: record_images(*source) for name, source in sources_of(case).items()}
    return about | dict.fromkeys(("images", "trained_on")) | records


def sources_of(case: Case) -> dict[str, tuple[SourceConfig, str]]:
    """The images that a result is of, with the kind of their labels: test images, their masks, those learned from."""
    config = evaluation_settings(case)
    data = getattr(config, "data", None)
    training = case.encoder.settings
    sources = {}
    if data is not None:
        sources["images"] = (data, label_task(config))
    if training is not None and not case.encoder.entry.random:
        sources["trained_on"] = (training.data, label_task(training))
    if isinstance(data, MaskedDataConfig) and data.path is not None:
        sources["masks"] = (replace(data, image_column=data.mask_column), "class")
    return sources


def changed_images(case: Case, recorded: dict[str, str]) -> list[str]:
    """The images of a result that are others now than those recorded in its rows; of those on this machine.

    Args:
        recorded: digests by what the images are for: see `digests_of_images`.
    """
    here = {}
    for name, (data, kind) in sources_of(case).items():
        if name in recorded and (data.path is None or is_local(data.path)):
            here[name] = record_images(data, kind)
    return [name for name, digest in digests_of_images(here).items() if digest != recorded[name]]


def digests_of_images(about: dict[str, Any]) -> dict[str, str]:
    """The digests of the images that a provenance has, by what they are for."""
    return {name: digest_of(about[name]) for name in ("images", "trained_on", "masks") if about.get(name)}


def code_version() -> str:
    """Version and commit of mpp; without a repository its version alone."""
    command = ["git", "-C", str(Path(mpp.__file__).parent), "describe", "--always", "--dirty"]
    with suppress(OSError):  # no git
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        return f"{mpp.__version__} {commit}".strip()
    return mpp.__version__


def digest_of(content: dict[str, Any], revision: int = 0) -> str:
    """Digest of a dictionary that JSON can hold, whatever the order of its keys.

    Args:
        revision: of the code; 0 is left out, so that results of before it was counted are found.
    """
    content = content | ({"revision": revision} if revision else {})
    return short_digest([json.dumps(content, sort_keys=True).encode()])
