"""Names of reports: where they lie, and which settings their names tell."""

import re
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from evaluation.frozen.run_images import IMAGE_SETTINGS, evaluated_image_settings, find_run, holds_run_images
from mpp.config import Settings, SourceConfig, changed_settings, flatten, settings_of, sides
from mpp.errors import UserError
from mpp.models.descriptions import as_saved
from mpp.runtime.files import short_digest
from mpp.runtime.weights import BEST, encoder_folder, run_of

NAMED_SETTINGS = ("encoder", "checkpoint", "random", "img_size", "representation", "depth", "features")
"""Settings that `report_suffix` names, or the place of a report."""
MAX_SETTINGS_LENGTH = 80
"""Characters of settings in a report's name; more are a digest."""


def report_path(out: str | None, encoder: str, name: str, features: str | None = None) -> Path:
    """The file of a report: `out`, or next to what was evaluated: the features, the run folder, or runs/ENCODER.

    Raises:
        UserError: it cannot be written there, or the encoder is a file.
    """
    if not features and Path(encoder).is_file():
        encoder_folder(Path(encoder))  # says why a file is no encoder
    if out and Path(out).is_dir():
        raise UserError(f"out is {out}, a folder; it must be a file")
    if out:
        path = Path(out)
    elif features:
        path = Path(features).with_name(f"{Path(features).stem}_{name}")
    else:
        folder = Path(encoder)
        if not folder.exists():
            folder = Path("runs") / re.sub("[/:]", "_", encoder)
        path = run_of(folder) / "evaluation" / name
    try:
        with TemporaryFile(dir=next(parent for parent in path.absolute().parents if parent.exists())):
            return path
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another place with --out") from error


def report_path_of_command(config: Settings, command: str, ending: str = ".json") -> Path:
    """The file of a command's report, whose name says which settings are unusual: see `report_path`."""
    values = flatten(config)
    features = values.get("features")
    of_encoder = "" if features else report_suffix(config)
    name = f"{command}{of_encoder}{settings_suffix(config)}{ending}"
    return report_path(values["out"], values["encoder"], name, features)


def report_suffix(config: Settings) -> str:
    """The end of a name: encoder, images and features where they are not the usual ones.

    Other encoders, images and features have files of their own. For a report, see `settings_suffix` too.
    """
    parts = []
    frozen = config.frozen
    if frozen.random:
        parts.append(f"random_{frozen.seed}")
    if Path(frozen.encoder).name == BEST:
        parts.append("best")
    if frozen.checkpoint:
        place = str(Path(frozen.checkpoint).resolve())
        parts += [Path(frozen.checkpoint).stem, short_digest([place.encode()])[:6]]  # many are called model
    if frozen.img_size:
        different_sides = dict.fromkeys(sides(frozen.img_size))
        parts.append(f"{'x'.join(map(str, different_sides))}px")

    path = config.data.path
    run = find_run(frozen.encoder)
    has_usual_images = holds_run_images(path, run) if run else path is None
    if not has_usual_images:
        name = re.sub(r"[^\w.-]+", "_", Path(path).name) if path else "birds"
        settings = [str(getattr(config.data, key)) for key in IMAGE_SETTINGS]
        digest = short_digest(["\n".join(settings).encode()])[:6]  # names recur
        parts += [name, digest]
    else:
        parts += parts_of_name(unusual_choices(config.data, run))

    values = {"representation": "mean", "depth": "last"} | flatten(config)
    if values["representation"] != "mean":
        parts.append(values["representation"])
    if values["depth"] != "last":
        parts.append(f"depth_{values['depth']}")
    return "".join(f"_{part}" for part in parts)


def unusual_choices(data: SourceConfig, run: Path | None) -> dict[str, Any]:
    """Settings that choose among the usual images, or read them, otherwise than usual: those of the run, or defaults.

    Args:
        run: the encoder's run; None: it has none.
    """
    usual = evaluated_image_settings(run) if run else {}
    unusual = {}
    for key in IMAGE_SETTINGS:
        value = getattr(data, key)
        moves_along = key == "path" or (key == "labels" and data.path != usual.get("path"))
        if not moves_along and as_saved(value) != as_saved(usual.get(key, getattr(type(data), key))):
            unusual[key] = value
    return unusual


def settings_suffix(config: Any) -> str:
    """The end of a report's name that names all other settings that are not the defaults, such as shots.

    The file of saved features begins the name.
    """
    named = {*NAMED_SETTINGS, *(f"data.{name}" for name in IMAGE_SETTINGS)}
    if config.frozen.random:
        named.add("seed")
    named |= {each.key for each in settings_of(config) if each.about["operational"]}
    changed = changed_settings(config)
    others = {key.rpartition(".")[2]: value for key, value in changed.items() if key not in named}
    return "".join(f"_{part}" for part in parts_of_name(others))


def parts_of_name(settings: dict[str, Any]) -> list[str]:
    """Settings as parts of a file's name, `shots_1-5`; a digest where they are many."""
    parts = []
    for key, value in settings.items():
        text = re.sub(r"[^\w.]+", "-", str(value)).strip("-")
        parts.append(f"{key}_{text}")
    if sum(map(len, parts)) > MAX_SETTINGS_LENGTH:
        return [short_digest([repr(settings).encode()])[:6]]
    return parts


def events_folder(path: Path) -> Path:
    """The folder of a report's TensorBoard events."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}_events")
