"""Files of weights: where an encoder's are, their fingerprint, and why a file cannot be read."""

from collections.abc import Collection, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from mpp.errors import UserError, one_line
from mpp.runtime.hashing import sha256_of

HUB = "hf-hub:"
"""Prefix of the name of a model on the hub, as in timm."""
ZOO = "zoo:"
"""Prefix of the name of an encoder that comes with mpp."""
ZOO_FOLDER = Path(__file__).parent.parent / "zoo"
SAFETENSORS_SUFFIX = ".safetensors"
PICKLES = (".pth", ".pt", ".ckpt", ".bin", ".pkl", ".pickle", ".tar")
"""Suffixes of pickled weights."""
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files that torch.save wrote: a zip archive, or a bare pickle."""
LFS_POINTER_START = b"version https://git-lfs"
CONVERSION = """mpp reads no pickled weights, because loading them can run code. These lines write safe ones:

    import torch; from safetensors.torch import save_file
    content = torch.load({pickle!r}, map_location="cpu", weights_only=True)
    weights = content.get("model", content.get("state_dict", content))
    save_file({{name: tensor.contiguous().clone() for name, tensor in weights.items()}}, {safe!r})
"""
NAMED_WEIGHTS = 3
"""Names of weights in a message."""
NAMED_FOLDERS = 3
"""Folders with an encoder in a message."""
ENCODER = "encoder"
"""Folder of a run with the encoder at its end."""
BEST = "encoder_best"
"""Folder of a run with the encoder whose features were best (run.keep_best)."""


def run_of(path: Path) -> Path:
    """The run folder of a path that is one, or that is an encoder in one."""
    return path.parent if path.name in (ENCODER, BEST) else path


def fingerprint(path: Path, on_hub: bool = False) -> str:
    """SHA-256 of the weights in an encoder's folder or a weights file; empty where there is no such path.

    Args:
        on_hub: whether hf-hub:NAME is one, too: it is downloaded.
    """
    path = zoo_folder(path)
    is_on_hub = on_hub and str(path).startswith(HUB)
    if not (is_on_hub or path.exists()):
        return ""
    file = path if path.is_file() else encoder_folder(path) / "model.safetensors"
    return sha256_of(file)


def encoder_folder(path: Path, setting: str = "encoder") -> Path:
    """The encoder folder at `path`: itself, the one in a run folder, that of zoo:NAME or hf-hub:NAME (downloaded).

    Raises:
        UserError: no encoder there; the message says what is there instead.
    """
    path = zoo_folder(path, setting)
    if str(path).startswith(HUB):
        files = ["config.json", "model.safetensors"]
        try:
            path = Path(snapshot_download(str(path).removeprefix(HUB), allow_patterns=files))
        except (OSError, ValueError) as error:
            raise UserError(f"no encoder at {path}: {one_line(error)}") from error
    for folder in (path / ENCODER, path):
        if has_encoder(folder):
            return folder
    if path.is_file() and path.suffix == SAFETENSORS_SUFFIX:
        raise UserError(
            f"no encoder at {path}: it has weights only; give the folder that has timm's config.json too, or the name "
            "of its timm model, with this file as its checkpoint"
        )
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    pickles = [file for file in candidates if is_pickle(file)]
    if pickles and not (path / "model.safetensors").is_file():
        raise UserError(f"{setting} is {path}, which cannot be read: {describe_conversion(pickles[0])}")
    below = folders_with_encoder(path)
    if below:
        raise UserError(f"no encoder at {path}, but below it: give {setting} as {' or '.join(map(str, below))}")
    raise UserError(
        f"no encoder at {path}: neither an encoder folder (config.json, model.safetensors) nor the run folder of a "
        f"finished run (published timm weights are {HUB}timm/NAME)"
    )


def zoo_folder(path: Path, setting: str = "encoder") -> Path:
    """The folder of an encoder that comes with mpp, for `zoo:NAME`; any other path as it is.

    Raises:
        UserError: no encoder of this name comes with mpp.
    """
    if not str(path).startswith(ZOO):
        return path
    folder = ZOO_FOLDER / str(path).removeprefix(ZOO)
    if has_encoder(folder):
        return folder
    names = sorted(f"{ZOO}{encoder.name}" for encoder in ZOO_FOLDER.glob("*") if has_encoder(encoder))
    raise UserError(f"{setting} is {path}; it must be {' or '.join(names)}")


def has_encoder(folder: Path) -> bool:
    """Whether a folder is an encoder's: it has timm's config.json, and the weights."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def folders_with_encoder(path: Path) -> list[Path]:
    """The run folders and encoder folders right below a folder, such as those of fine-tuning: the first few.

    Runs that only compared rates (dev_lr_RATE) come last.
    """
    below = [folder for folder in path.glob("*") if has_encoder(folder) or has_encoder(folder / ENCODER)]
    return sorted(below, key=lambda folder: (folder.name.startswith("dev_"), folder))[:NAMED_FOLDERS]


def weights_file(path: Path, setting: str) -> Path:
    """The .safetensors file at `path`: itself, or that of an encoder folder, a run folder, zoo:NAME or hf-hub:NAME."""
    return path if path.suffix == SAFETENSORS_SUFFIX else encoder_folder(path, setting) / "model.safetensors"


def is_pickle(file: Path) -> bool:
    """Whether a file has the name of pickled weights."""
    return file.is_file() and file.suffix in PICKLES


def refuse_pickle(file: Path, setting: str) -> None:
    """Raise UserError if a file does not have the name of a .safetensors file."""
    if file.suffix != SAFETENSORS_SUFFIX:
        reason = describe_conversion(file) if is_pickle(file) else "other formats can run code"
        raise UserError(f"{setting} is {file}; it must be a .safetensors file: {reason}")


def describe_conversion(pickle: Path) -> str:
    """Why pickled weights are not read, and how to convert them to a .safetensors file."""
    return CONVERSION.format(pickle=str(pickle), safe=str(pickle.with_suffix(SAFETENSORS_SUFFIX)))


def weight_names(file: Path, setting: str) -> list[str]:
    """The names of the weights in a .safetensors file.

    Raises:
        UserError: it cannot be read, with the reason.
    """
    try:
        with safe_open(file, framework="pt") as weights:
            return list(weights.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{setting} is {file}, which cannot be read: {describe_unreadable_weights(file, error)}"
        ) from error


def describe_unreadable_weights(file: Path, error: Exception) -> str:
    """Why a file of weights cannot be read.

    Args:
        error: of the library that tried.
    """
    if not file.is_file():
        return "there is no such file"
    try:
        with file.open("rb") as opened:
            start = opened.read(len(LFS_POINTER_START))
    except OSError as denied:
        return one_line(denied)
    if not start:
        return "it is empty; copy or download it again"
    if start == LFS_POINTER_START:
        return "it is a Git LFS pointer instead of the weights, which `git lfs pull` in its folder downloads"
    if start.startswith(PICKLE_STARTS):
        return describe_conversion(file)
    size = file.stat().st_size
    return f"it is incomplete, or no .safetensors file ({size} bytes); copy or download it again: {one_line(error)}"


def wrapper_of(names: Sequence[str], model_names: Collection[str]) -> str:
    """The prefix of all names without which most of them are the model's; empty where there is none.

    Weights that were saved from within a larger module have one, such as `module.` or `student.backbone.`.

    Args:
        names: of the weights in a file.
        model_names: of the model's weights.
    """
    prefixes = [""]
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):  # the parts of all names at one level
        if len(set(parts)) > 1:
            break
        prefixes.append(f"{prefixes[-1]}{parts[0]}.")

    def matches(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in model_names for name in names)

    return max(prefixes, key=matches)


def misfit(missing: Collection[str], left_over: Collection[str]) -> str:
    """Differences between the weights in a file and a model's, by name; empty: they fit.

    Args:
        missing: the model's weights that the file lacks.
        left_over: the file's weights that the model lacks.
    """
    differences = []
    if missing:
        differences.append(f"lacks {describe_weights(missing)}")
    if left_over:
        differences.append(f"has {describe_weights(left_over)} that the model does not have")
    return f"it {' and '.join(differences)}" if differences else ""


def describe_weights(names: Collection[str]) -> str:
    """The number of weights, and the names of the first few."""
    count = len(names)
    first = ", ".join([*names][:NAMED_WEIGHTS])
    more = ", ..." if count > NAMED_WEIGHTS else ""
    return f"{count} weight{'s' if count > 1 else ''} ({first}{more})"
