"""Where the weights of an encoder are, and what they are known by."""

from pathlib import Path

from huggingface_hub import snapshot_download

from mpp.errors import UserError, one_line
from mpp.runtime.hashing import sha256_of

HUB = "hf-hub:"  # before the name of a model of the hub's, as timm has it
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


def encoder_folder(path: Path) -> Path:
    """The encoder folder at `path`: one itself, or in a run folder, or hf-hub:NAME, which is downloaded."""
    if str(path).startswith(HUB):
        files = ["config.json", "model.safetensors"]
        try:
            path = Path(snapshot_download(str(path).removeprefix(HUB), allow_patterns=files))
        except (OSError, ValueError) as error:
            raise UserError(f"no encoder at {path}: {one_line(error)}") from error
    for folder in (path / ENCODER, path):
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return folder
    raise UserError(
        f"no encoder at {path}: neither an encoder folder nor the run folder of a finished run (published weights of "
        f"timm's are {HUB}timm/NAME)"
    )
