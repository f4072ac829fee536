"""The weights of an encoder: their place, their fingerprint, and what is wrong with a file of weights."""

from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from mpp.errors import UserError, one_line
from mpp.runtime.hashing import sha256_of

HUB = "hf-hub:"  # before the name of a model of the hub's, as timm has it
ENDING = ".safetensors"
PICKLES = (".pth", ".pt", ".ckpt", ".bin", ".pkl", ".pickle", ".tar")
"""How the names of pickled weights end."""
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files that torch.save wrote: a zip archive, or a bare pickle."""
POINTER_START = b"version https://git-lfs"
CONVERSION = """mpp reads no pickled weights, because loading them can run code. These lines write safe ones:

    import torch; from safetensors.torch import save_file
    found = torch.load({pickle!r}, map_location="cpu", weights_only=True)
    weights = found.get("model", found.get("state_dict", found))
    save_file({{name: tensor.contiguous().clone() for name, tensor in weights.items()}}, {safe!r})
"""
NAMED = 3  # weights in a message
ENCODER, BEST = "encoder", "encoder_best"
"""Folders of a run: the encoder at its end, and (run.keep_best) the one whose features were best."""


def run_of(path: Path) -> Path:
    """The run folder, whether it or an encoder in it is named."""
    return path.parent if path.name in (ENCODER, BEST) else path


def fingerprint(path: Path) -> str:
    """SHA-256 of the weights in an encoder's folder or a weights file: what results are of. Empty: nothing is there."""
    if not path.exists():
        return ""
    file = path if path.is_file() else encoder_folder(path) / "model.safetensors"
    return sha256_of(file)


def encoder_folder(path: Path, setting: str = "encoder") -> Path:
    """The encoder folder at `path`: one itself, or in a run folder, or hf-hub:NAME, which is downloaded.

    Args:
        setting: the setting that names it.
    Raises:
        UserError: no encoder there; the message says what is there instead.
    """
    if str(path).startswith(HUB):
        files = ["config.json", "model.safetensors"]
        try:
            path = Path(snapshot_download(str(path).removeprefix(HUB), allow_patterns=files))
        except (OSError, ValueError) as error:
            raise UserError(f"no encoder at {path}: {one_line(error)}") from error
    for folder in (path / ENCODER, path):
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return folder
    if path.is_file() and path.suffix == ENDING:
        raise UserError(
            f"no encoder at {path}: it has weights only; give the folder that has timm's config.json too, or the name "
            "of its timm model, with this file as its checkpoint"
        )
    pickles = [file for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if is_pickle(file)]
    if pickles and not (path / "model.safetensors").is_file():
        raise UserError(f"{setting} is {path}, which cannot be read: {conversion(pickles[0])}")
    raise UserError(
        f"no encoder at {path}: neither an encoder folder (config.json, model.safetensors) nor the run folder of a "
        f"finished run (published timm weights are {HUB}timm/NAME)"
    )


def weights_file(path: Path, setting: str) -> Path:
    """The .safetensors file at `path`: itself, or that of an encoder folder, a run folder or hf-hub:NAME."""
    return path if path.suffix == ENDING else encoder_folder(path, setting) / "model.safetensors"


def is_pickle(file: Path) -> bool:
    """Whether this is a file of pickled weights, by its name."""
    return file.is_file() and file.suffix in PICKLES


def refuse_pickle(file: Path, setting: str) -> None:
    """Raise UserError where this is no .safetensors file, by its name."""
    if file.suffix != ENDING:
        reason = conversion(file) if is_pickle(file) else "other formats can run code"
        raise UserError(f"{setting} is {file}; it must be a .safetensors file: {reason}")


def conversion(pickle: Path) -> str:
    """Why pickled weights are not read, and how they become a .safetensors file."""
    return CONVERSION.format(pickle=str(pickle), safe=str(pickle.with_suffix(ENDING)))


def weight_names(file: Path, setting: str) -> list[str]:
    """The names of the weights in a .safetensors file.

    Args:
        setting: the setting that names the file.
    Raises:
        UserError: it cannot be read, with the reason.
    """
    try:
        with safe_open(file, framework="pt") as weights:
            return list(weights.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{setting} is {file}, which cannot be read: {unread(file, error)}") from error


def unread(file: Path, error: Exception) -> str:
    """Why a file of weights cannot be read.

    Args:
        error: the library's.
    """
    if not file.is_file():
        return "there is no such file"
    try:
        with file.open("rb") as opened:
            start = opened.read(len(POINTER_START))
    except OSError as denied:
        return one_line(denied)
    if not start:
        return "it is empty; copy or download it again"
    if start == POINTER_START:
        return "it is a Git LFS pointer instead of the weights, which `git lfs pull` in its folder downloads"
    if start.startswith(PICKLE_STARTS):
        return conversion(file)
    size = file.stat().st_size
    return f"it is incomplete, or no .safetensors file ({size} bytes); copy or download it again: {one_line(error)}"


def wrapper_of(names: Sequence[str], own: Collection[str]) -> str:
    """The prefix of all names without which most of them are the model's own; empty: there is none.

    Weights that were saved from within a larger module have one, such as `module.` or `student.backbone.`.

    Args:
        names: of the weights in a file.
        own: of the model's weights.
    """
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    beginnings = ["".join(f"{part}." for part in shared[:depth]) for depth in range(len(shared) + 1)]
    return max(beginnings, key=lambda beginning: sum(name.removeprefix(beginning) in own for name in names))


def misfit(missing: Collection[str], left_over: Collection[str]) -> str:
    """How the weights in a file differ from a model's, by name; empty: they fit.

    Args:
        missing: the model's weights that the file lacks.
        left_over: the file's weights that the model lacks.
    """
    lacks = f"lacks {describe_names(missing)}" if missing else ""
    has = f"has {describe_names(left_over)} that the model does not have" if left_over else ""
    both = " and ".join(filter(None, (lacks, has)))
    return both and f"it {both}"


def describe_names(names: Collection[str]) -> str:
    """How many weights, and the names of the first few."""
    more = ", ..." if len(names) > NAMED else ""
    return f"{len(names)} weight{'s' * (len(names) > 1)} ({', '.join([*names][:NAMED])}{more})"
