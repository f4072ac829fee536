"""Files of weights: where an encoder's are, and their fingerprint."""

from functools import cache
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from mpp.errors import UserError, one_line
from mpp.runtime.files import sha256_of

HTTPError = HfHubHTTPError.__mro__[1]
"""Base of the errors of the hub's client. It comes from the client's own library, and is not always an OSError."""
HUB = "hf-hub:"
"""Prefix of the name of a model on the hub, as in timm."""
ZOO = "zoo:"
"""Prefix of the name of an encoder that comes with mpp."""
ZOO_FOLDER = Path(__file__).parent.parent / "zoo"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SAFETENSORS_SUFFIX = ".safetensors"
PICKLES = (".pth", ".pt", ".ckpt", ".bin", ".pkl", ".pickle", ".tar")
"""Suffixes of pickled weights."""
CONVERSION = """mpp reads no pickled weights, because loading them can run code. These lines write safe ones:

    import torch; from safetensors.torch import save_file
    content = torch.load({pickle!r}, map_location="cpu", weights_only=True)
    weights = content.get("model", content.get("state_dict", content))
    save_file({{name: tensor.contiguous().clone() for name, tensor in weights.items()}}, {safe!r})
"""
ENCODER_PLACES = (
    f"an encoder folder ({CONFIG}, {WEIGHTS}), the folder of a finished run, {HUB}NAME (published timm weights: "
    f"{HUB}timm/NAME) or {ZOO}NAME; a weights file is a checkpoint, with the name of its timm model as the encoder"
)
ENCODER = "encoder"
"""Folder of a run with the encoder at its end."""
BEST = "encoder_best"
"""Folder of a run with the encoder whose features were best (run.keep_best)."""
CLASSIFIER = "classifier"
"""Folder of a supervised run, or of a fine-tuning, with the encoder and its head."""


def run_of(path: Path) -> Path:
    """The run folder of a path that is one, or that is an encoder or a classifier in one: they have timm's config."""
    is_part = path.name in (ENCODER, BEST, CLASSIFIER) and ((path / CONFIG).is_file() or not path.exists())
    return path.parent if is_part else path


def fingerprint(path: Path, on_hub: bool = False) -> str:
    """SHA-256 of the weights in an encoder's folder or a weights file; empty where there is no such path.

    Args:
        on_hub: whether hf-hub:NAME is one, too: it is downloaded.
    """
    path = zoo_folder(path)
    if not path.exists() and not (on_hub and str(path).startswith(HUB)):
        return ""
    return sha256_of(path if path.is_file() else encoder_folder(path) / WEIGHTS)


def encoder_folder(path: Path, setting: str = "encoder") -> Path:
    """The encoder folder at `path`: itself, the one in a run folder, that of zoo:NAME or hf-hub:NAME (downloaded).

    Raises:
        UserError: no encoder there; it is in a pickle, say.
    """
    path = zoo_folder(path)
    if str(path).startswith(HUB):
        try:
            path = download(str(path).removeprefix(HUB))
        except (OSError, ValueError, HTTPError) as error:
            raise UserError(f"no encoder at {path}: {one_line(error)}") from error
    for folder in (path / ENCODER, path):
        if has_encoder(folder):
            return folder
    pickles = [file for file in (path, *sorted(path.glob("*"))) if file.suffix in PICKLES and file.is_file()]
    if pickles and not (path / WEIGHTS).is_file():
        raise UserError(f"{setting} is {path}, which cannot be read: {describe_conversion(pickles[0])}")
    if (path / "checkpoints").is_dir():
        raise UserError(f"{setting} is {path}, a run that is not finished: the command that started it continues it")
    raise UserError(f"no encoder at {path}; {setting} must be {ENCODER_PLACES}")


@cache  # one commit for all that this process reads
def download(name: str) -> Path:
    """The folder with an encoder of the hub."""
    return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS]))


def zoo_folder(path: Path) -> Path:
    """The folder of an encoder that comes with mpp, for `zoo:NAME`; any other path as it is."""
    return ZOO_FOLDER / str(path).removeprefix(ZOO) if str(path).startswith(ZOO) else path


def has_encoder(folder: Path) -> bool:
    """Whether a folder is an encoder's: it has timm's config.json, and the weights."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def weights_file(path: Path, setting: str) -> Path:
    """The .safetensors file at `path`: itself, or that of an encoder folder, a run folder, zoo:NAME or hf-hub:NAME."""
    return path if path.suffix == SAFETENSORS_SUFFIX else encoder_folder(path, setting) / WEIGHTS


def describe_conversion(pickle: Path) -> str:
    """Why pickled weights are not read, and how to convert them to a .safetensors file."""
    return CONVERSION.format(pickle=str(pickle), safe=str(pickle.with_suffix(SAFETENSORS_SUFFIX)))
