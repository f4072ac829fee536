"""Digests of a comparison's cases, by which a result is found again.

A result is known by the settings of its evaluation and of the encoder's training that it depends on.
"""

import hashlib
import json
from dataclasses import replace
from functools import cache
from typing import Any

import timm

from evaluation.comparison.cases import TRAININGS, TRUNK_SETTING, Case, Encoder, evaluation_settings, parent_runs
from evaluation.config import ContrastiveConfig, FewshotConfig, MaskedDataConfig, ProbeConfig, SegmentationConfig
from evaluation.frozen.run_images import record_images, record_source
from mpp.config import flatten, settings_of
from mpp.config.imports import imported
from mpp.data.data_path import is_local
from mpp.runtime.files import short_digest
from mpp.runtime.weights import fingerprint
from mpp.training.run_folder import imports_used

PLACES = {"encoder", "checkpoint", "out", "run.dir"}
"""Settings that are places: a result depends on the content there, not on the place."""
EARLIER_DEFAULTS: dict[type, dict[str, Any]] = {
    ProbeConfig: {"depth": "last"},
    SegmentationConfig: {"depth": "last"},
    FewshotConfig: {"seeds": (0, 1, 2)},
}
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
    parents = {}
    for setting, (_, weights) in parent_runs(encoder).items():
        if setting in encoder.parents and setting != TRUNK_SETTING:
            parents[setting] = f"{training_digest(encoder.parents[setting])} {weights}".strip()
    if encoder.settings is None:
        return parents.get("encoder")
    entry, settings = encoder.entry, relevant_settings(encoder.settings) | parents
    content = {"command": entry.train, "settings": settings, "compute": entry.compute}
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
    return f"{entry.encoder} {encoder.path.name}" if timm.is_model(entry.encoder) else encoder.path.name


def relevant_settings(config: Any) -> dict[str, Any]:
    """The settings that a result depends on: those that are not the defaults, not operational, and no places.

    If you change a default, add the earlier one to EARLIER_DEFAULTS and to the configs of published comparisons.
    """
    ignored = {each.key for each in settings_of(config) if each.about["operational"]}
    values = flatten(config)
    is_mixed = values.get("augment.mixup", 0) + values.get("augment.cutmix", 0) > 0
    if is_mixed or isinstance(config, ContrastiveConfig):  # it matters which images share a forward pass
        ignored.discard("data.batch_size")
    ignored |= PLACES
    defaults = flatten(type(config)())
    for kind, earlier in EARLIER_DEFAULTS.items():
        defaults |= earlier if isinstance(config, kind) else {}
    changed = {key: value for key, value in values.items() if value != defaults[key]}
    if changed.get("data.label_folder") == "inner":  # null is the same, where it is not refused
        del changed["data.label_folder"]
    return {key: value for key, value in changed.items() if key not in ignored}


def digest_of(content: dict[str, Any], revision: int = 0) -> str:
    """Digest of a dictionary that JSON can hold, whatever the order of its keys.

    Args:
        revision: of the code; 0 is left out, so that results of before it was counted are found.
    """
    content = content | ({"revision": revision} if revision else {})
    return short_digest([json.dumps(content, sort_keys=True).encode()])


# --- images and weights ---


def provenance(case: Case) -> dict[str, Any]:
    """The images and weights that a result would be of if it were computed now."""
    return {"digest": case_digest(case), "weights": fingerprint(case.encoder.path), "images": digests_of_images(case)}


def digests_of_images(case: Case, only_here: bool = False) -> dict[str, str]:
    """Digests of the images that a result is of: images, from which its figures are; masks; trained_on.

    Args:
        only_here: without those that are not on this machine.
    """
    config, training = evaluation_settings(case), case.encoder.run_settings
    data = getattr(config, "data", None)  # masked patches are of the run's own
    sources = {"images": (data, label_task(config))}
    if isinstance(data, MaskedDataConfig) and data.path is not None:
        sources["masks"] = (replace(data, image_column=data.mask_column), "class")
    if training is not None and not case.encoder.entry.random:
        sources["trained_on"] = (training.data, label_task(training))
    digests = {}
    for name, (source, kind) in sources.items():
        if source is not None and (not only_here or source.path is None or is_local(source.path)):
            record = record_source(source, kind) if name == "masks" else record_images(source, kind)
            digests |= {name: digest_of(record)} if record else {}
    return digests


def label_task(config: Any) -> str:
    """The kind of label that a command's settings ask for; of a command without labels the usual one."""
    return flatten(config).get("task", "class")
